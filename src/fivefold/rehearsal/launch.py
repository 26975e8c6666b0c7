"""`fivefold rehearse`: turn its arguments into requests, run a process for every rank, and collect the results."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from pydantic import TypeAdapter

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.core import interrupts
from fivefold.core.errors import RunFailed, UserError, refuse
from fivefold.hardware.cluster import Cluster
from fivefold.launch.model import check_model
from fivefold.launch.processes import private_folder
from fivefold.launch.world import LAUNCHER
from fivefold.parallel.layout import Layout
from fivefold.parallel.ranks import RankGrid
from fivefold.planner.estimate import Estimate, estimate_layout
from fivefold.planner.of_run import chosen, facts_of_run, workload_of
from fivefold.planner.price import PriceList
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.report import Rehearsal, or_why
from fivefold.rehearsal.request import RehearsalRequest, Seen

STAGE = "fivefold.rehearsal.stage"
EVALUATED = 2  # micro batches of the evaluation on each rank: more would be the same


def rehearse(
    path: Path | None, overrides: Sequence[str] = (), *, cluster: str, rank: int | None = None,
    all_kinds: bool = False, steps: int = 2, synthetic: bool = False, quiet: bool = True,
) -> Rehearsal:  # fmt: skip
    """Rehearse the run file at `path` (None: the demo) on one rank of `cluster`, or on one of each kind.

    `synthetic`: random documents in place of its text. `quiet`: hide the run's output. Raises `UserError` for an
    impossible request, and `RunFailed` if a rank ended without a report.
    """
    place = Cluster.parse(cluster)
    lacks = stand_in.lacking()
    if not lacks and not stand_in.stands_for(place.chip):
        what = f"{place.chip.name} is no CUDA device that this torch has kernels for"
        raise UserError(what, fix="rehearse on A100, H100, H200 or B200")
    with interrupts.sigterm_raises(), private_folder("rehearsal") as folder:
        config, layout = resolved(path, [*overrides, *changes(folder, steps, is_full=not lacks)], place)
        ranks = kinds(layout) if all_kinds else [rank or 0]
        if ranks[-1] >= place.world:
            raise UserError(f"--rank {ranks[-1]}: {place.text} has the ranks 0 to {place.world - 1}")
        environment = (
            {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            if lacks
            else stand_in.environment(place.chip, place.devices_per_node)
        )
        vocabulary = None if synthetic else _prepare(config)
        requests = [
            RehearsalRequest(
                config=config.to_yaml(), folder=f"{folder}/{rank}", rank=rank, world=place.world,
                local_size=place.devices_per_node, steps=steps, synthetic=synthetic, is_full=not lacks,
            )
            for rank in ranks
        ]  # fmt: skip
        with stage(environment, folder, quiet=quiet) as play:
            seen = [play(request) for request in requests]
    if config.train.compile is False and not lacks:
        planned, unplanned = None, "the planner prices compiled blocks, and train.compile is false"
    else:
        planned, unplanned = _planned(config, layout, place, vocabulary, synthetic=synthetic)
    return Rehearsal(
        config.model.name_or_path, str(layout), place, steps, tuple(seen), tuple(lacks), planned, unplanned
    )


def kinds(layout: Layout) -> list[int]:
    """A rank of each kind: the first, a middle and the last of a pipeline, whose stages and micro batches in flight
    differ. Ranks along the other axes hold as much and do the same."""
    grid = RankGrid(layout)
    first = {grid.coords(rank).pp: rank for rank in reversed(range(layout.world))}
    return sorted({first[0], first[layout.pp // 2], first[layout.pp - 1]})


def resolved(path: Path | None, overrides: Sequence[str], place: Cluster) -> tuple[RunConfig, Layout]:
    """The run with its layout resolved on the cluster, checked, with a short evaluation."""
    config = load_config(path, overrides)
    check_supported(config)
    if config.is_automatic:
        config, _ = chosen(config, place)
    layout = _resolved(config, place)
    check_model(config, layout=layout, weights=False)
    return _short_evaluation(config, layout), layout


def changes(folder: Path, steps: int, *, is_full: bool) -> list[str]:
    """Overrides of the run file for a rehearsal: where it writes, and evaluation and save at the end only."""
    return [
        f"run.dir={folder}", "run.name=rehearsal", f"eval.every={steps}", "sample.every=0", "checkpoint.every=0",
        "checkpoint.remote=null", "checkpoint.export_hf=false", "checkpoint.keep_best=0", "eval.stop.patience=0",
        'log.to=["jsonl"]', "log.every=1",
        "memory.trial=false",  # a trial runs the same phases as the run
        "train.check_every=0",  # these checks compare values, and run in one step of a hundred
        f"train.device={'cuda' if is_full else 'cpu'}", *([] if is_full else ["train.compile=false"]),
    ]  # fmt: skip


def _resolved(config: RunConfig, place: Cluster) -> Layout:
    refuse(config.layout.against_world(place.world, place.text))
    return config.layout.resolve(place.world)


def _short_evaluation(config: RunConfig, layout: Layout) -> RunConfig:
    tokens = EVALUATED * layout.data_ranks * layout.micro_batch_size * config.data.seq_length
    section = config.eval.model_copy(update={"max_tokens": min(config.eval.max_tokens, tokens)})
    return config.model_copy(update={"eval": section})


def _prepare(config: RunConfig) -> int:
    """Tokenise the text here, so that a missing file gives a proper error; ranks find it in the cache. Returns the size
    of the vocabulary."""
    from fivefold.data import prepare

    return prepare(config).tokenizer.vocab_size


def _planned(
    config: RunConfig, layout: Layout, place: Cluster, vocabulary: int | None, *, synthetic: bool
) -> tuple[Estimate | None, str]:
    """The planner's estimate of the rehearsed layout; or None, and the reason."""
    if synthetic:  # the model keeps the vocabulary of its own config
        config = config.model_copy(update={"tokenizer": config.tokenizer.model_copy(update={"name_or_path": "auto"})})
    return or_why(
        lambda: estimate_layout(
            PriceList(facts_of_run(config, vocabulary), place, config.objective.is_own),
            layout,
            workload_of(config),
        )
    )


@contextmanager
def stage(
    environment: Mapping[str, str], folder: Path, *, quiet: bool = True
) -> Iterator[Callable[[RehearsalRequest], Seen]]:
    """Inside, provide a function that rehearses the rank of a request, each in its own process. They are forked from
    one that has imported everything they need. `folder`: for its log, and for files of compilers."""
    reports, theirs = os.pipe()
    with (folder / "log").open("w+b") as log, os.fdopen(reports) as codes:
        out = log if quiet else sys.stderr
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", STAGE, str(theirs)],
            env={**environment, "TMPDIR": str(folder), LAUNCHER: str(os.getpid())},
            stdin=subprocess.PIPE, stdout=out, stderr=out, pass_fds=[theirs],
            start_new_session=True,  # Ctrl-C in the terminal reaches this process alone
        )  # fmt: skip
        os.close(theirs)
        try:
            yield partial(_played, process, codes, log)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # with its forks, and their compilers
            process.communicate()


def _played(process: "subprocess.Popen[bytes]", codes: IO[str], log: IO[bytes], request: RehearsalRequest) -> Seen:
    folder = Path(request.folder)
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(vars(request)), encoding="utf-8")
    assert process.stdin is not None
    with suppress(BrokenPipeError):  # it has ended: its exit code tells
        process.stdin.write(f"{folder}\n".encode())
        process.stdin.flush()
    code = int(codes.readline() or process.wait())
    found = folder / "seen.json"
    if not found.exists():
        raise _failure(request.rank, code, log)
    return TypeAdapter(Seen).validate_json(found.read_bytes())


def _failure(rank: int, code: int, log: IO[Any]) -> RunFailed:
    log.seek(0)
    said = log.read().decode(errors="replace").strip().splitlines()
    if code < 0:
        fix = "free memory of this machine" if code == -signal.SIGKILL else "--debug shows all"
        failure = RunFailed(f"rank {rank} was ended by {signal.Signals(-code).name}", fix=fix)
    else:
        last = f": {said[-1]}" if said else ""
        failure = RunFailed(f"rank {rank} ended without a word (code {code}){last}", fix="--debug shows all")
    failure.__cause__ = RuntimeError("\n".join(said))
    return failure
