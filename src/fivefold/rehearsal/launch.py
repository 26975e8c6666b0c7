"""`fivefold rehearse`: what is asked for as requests, a process for every rank, and what they have seen."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from fivefold.config import RunConfig, check_supported, load_config
from fivefold.core import legality
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.layout import Layout
from fivefold.launch.model import check_model
from fivefold.parallel.ranks import RankGrid
from fivefold.planner.auto import chosen
from fivefold.planner.cluster import Cluster
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.report import Rehearsal
from fivefold.rehearsal.request import Request, Seen

STAGE = "fivefold.rehearsal.stage"
EVALUATED = 2  # micro batches of the evaluation on each rank: the others would be alike


def rehearse(
    path: Path | None, overrides: Sequence[str] = (), *, cluster: str, rank: int | None = None,
    all_kinds: bool = False, steps: int = 2, synthetic: bool = False, quiet: bool = True,
) -> Rehearsal:  # fmt: skip
    """Rehearse the run file at `path` (None: the demo) on one rank of `cluster`, or on one of each kind.

    `synthetic`: random documents in place of its text. `quiet`: what the run prints is not shown. Raises `UserError`
    for a request that cannot be met, and `RunFailed` where a rank ended without a word.
    """
    place = Cluster.parse(cluster)
    lacks = stand_in.lacking()
    if not lacks and tuple(place.chip.capability) not in stand_in.SHARED:
        raise UserError(f"{place.chip.name} is no CUDA device", fix="rehearse on A100, H100, H200 or B200")
    with tempfile.TemporaryDirectory(prefix="fivefold-rehearsal-") as folder:
        config = load_config(path, [*overrides, *_changes(folder, steps, is_full=not lacks)])
        check_supported(config)
        if config.is_automatic:
            config, _ = chosen(config, place)
        layout = _resolved(config, place)
        check_model(config, layout=layout, weights=False)
        config = _short_evaluation(config, layout)
        ranks = kinds(layout) if all_kinds else [rank or 0]
        if ranks[-1] >= place.world:
            raise UserError(f"--rank {ranks[-1]}: {place.text} has the ranks 0 to {place.world - 1}")
        environment = (
            {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
            if lacks
            else stand_in.environment(place.chip, place.devices_per_node)
        )
        if not synthetic:
            _prepare(config)
        requests = [
            Request(
                config=config.to_yaml(), folder=f"{folder}/{each}", rank=each, world=place.world,
                local_size=place.devices_per_node, steps=steps, synthetic=synthetic, is_full=not lacks,
            )
            for each in ranks
        ]  # fmt: skip
        seen = [_staged(request, environment, quiet=quiet) for request in requests]
    return Rehearsal(config.model.name_or_path, str(layout), place, steps, tuple(seen), tuple(lacks))


def kinds(layout: Layout) -> list[int]:
    """A rank of each kind: the first, a middle and the last of a pipeline, whose stages and micro batches under way
    differ. Ranks beside each other on the other axes have as much, and do the same."""
    grid = RankGrid(layout)
    first = {grid.coords(rank).pp: rank for rank in reversed(range(layout.world))}
    return sorted({first[0], first[layout.pp // 2], first[layout.pp - 1]})


def _changes(folder: str, steps: int, *, is_full: bool) -> list[str]:
    """Keys of the run file that a rehearsal sets: where it writes, and that it evaluates and saves when it ends."""
    return [
        f"run.dir={folder}", "run.name=rehearsal", f"eval.every={steps}", "sample.every=0", "checkpoint.every=0",
        "checkpoint.remote=null", "checkpoint.export_hf=false", 'log.to=["jsonl"]', "log.every=1",
        f"train.device={'cuda' if is_full else 'cpu'}", *([] if is_full else ["train.compile=false"]),
    ]  # fmt: skip


def _resolved(config: RunConfig, place: Cluster) -> Layout:
    legality.refuse(legality.of_world(config.layout, place.world, place.text))
    return config.layout.resolve(place.world)


def _short_evaluation(config: RunConfig, layout: Layout) -> RunConfig:
    tokens = EVALUATED * layout.data_ranks * layout.micro_batch_size * config.data.seq_length
    section = config.eval.model_copy(update={"max_tokens": min(config.eval.max_tokens, tokens)})
    return config.model_copy(update={"eval": section})


def _prepare(config: RunConfig) -> None:
    """Tokenise the text here, where a missing file is said in words; a rank finds it in the cache."""
    from fivefold.data import prepare

    prepare(config)


def _staged(request: Request, environment: dict[str, str], *, quiet: bool) -> Seen:
    """What the rank of a request has seen, in a process of its own."""
    folder = Path(request.folder)
    folder.mkdir()
    (folder / "request.json").write_text(json.dumps(vars(request)), encoding="utf-8")
    with (folder / "log").open("w+b") as log:
        out = log if quiet else sys.stderr
        command = [sys.executable, "-m", STAGE, str(folder)]
        code = subprocess.run(command, env=environment, stdin=subprocess.DEVNULL, stdout=out, stderr=out).returncode
        log.seek(0)
        said = log.read().decode(errors="replace").strip().splitlines()
    found = folder / "seen.json"
    if not found.exists():
        last = f": {said[-1]}" if said else ""
        failure = RunFailed(f"rank {request.rank} ended without a word (code {code}){last}", fix="--debug shows all")
        failure.__cause__ = RuntimeError("\n".join(said))
        raise failure
    return Seen.from_json(json.loads(found.read_text(encoding="utf-8")))
