"""A proof on the ranks: rank 0 computes the reference, then each layout runs on as many ranks as it has.

Where fivefold started the workers itself, smaller layouts run on the first of them, each in a process group of its own.
In a world that was there before (torchrun), the layouts of its size run in that world.
"""

import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from textwrap import fill
from typing import Any

import torch

from fivefold.config import parse_config
from fivefold.core.errors import UserError
from fivefold.core.layout import Layout
from fivefold.core.legality import layers_for
from fivefold.core.terminal import say
from fivefold.launch.world import World, cores, join, leave, threads_per_worker
from fivefold.models import hf_internals
from fivefold.verification.prepare import prepare
from fivefold.verification.proof import Proof
from fivefold.verification.proof_case import ROW, WEIGHT_DECAY, ProofCase, rows_for
from fivefold.verification.reduced_model import make_folder
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.request import VerifyRequest
from fivefold.verification.results import LayoutResult

SUBJECT = "subject.json"
POLL_SECONDS = 0.05
_INDENT = 15  # of what a line of progress says, behind its label
Opener = Callable[[Layout, str], Any]  # (layout, a name that is used once) -> context of the world it runs in, or None
Failures = Callable[[VerifyRequest, int, World], AbstractContextManager[None]]


def on_worker(request: Mapping[str, Any], world: World) -> None:
    """The body of a worker that was started for a proof."""
    lists = {key: tuple(request["verify"][key]) for key in ("layouts", "names")}
    asked = VerifyRequest(**{**request["verify"], **lists})

    @contextmanager
    def first_ranks(layout: Layout, name: str) -> Iterator[World | None]:
        if world.rank >= layout.world:
            yield None
            return
        meeting = f"file://{asked.folder / name}" if layout.world > 1 else ""
        with join(replace(world, size=layout.world, rendezvous=meeting)) as own:
            torch.set_num_threads(threads_per_worker(layout.world))
            yield own

    leave()
    prove(asked, world, first_ranks, failures=_noted)


def in_world(asked: VerifyRequest, world: World) -> None:
    """Prove the layouts of a joined world's size, in its own process group. A rank that breaks ends the world."""

    @contextmanager
    def same(_: Layout, __: str) -> Iterator[World | None]:
        yield world

    prove(asked, world, same, failures=lambda *_: nullcontext())


def prove(asked: VerifyRequest, world: World, open_world: Opener, *, failures: Failures) -> None:
    """Prove every layout; rank 0 leaves what was found in the scratch folder (`read_found`).

    `failures`: the context in which each layout runs, which may keep its errors to itself.
    """
    hf_internals.no_progress_bars()
    layouts = [Layout.parse(text) for text in asked.layouts]
    say: Callable[[str], None] = print_line if world.is_first and not asked.quiet else lambda text: None
    if world.is_first:
        _make_evidence(asked, layouts, world, say)
    _wait_for(asked.folder / SUBJECT)
    for number, layout in enumerate(layouts):
        with failures(asked, number, world), open_world(layout, f"world-{number}") as here:
            if here is not None:
                found = _prove_one(asked, layout, here, asked.folder / f"saved-{number}")
                found.layout = asked.names[number]
                _write(asked, number, found, world)
                say(_line(found))
        if world.is_first:
            (asked.folder / f"ended-{number}").touch()
    saved = _saved(asked)
    for number, layout in enumerate(layouts):
        if asked.layouts[number] in saved:
            with failures(asked, number, world), open_world(layout, f"again-{number}") as here:
                if here is not None:
                    _load_all(asked, layout, number, saved, here)


def _saved(asked: VerifyRequest) -> dict[str, Path]:
    """layout -> the checkpoint that it wrote, when all of them have ended."""
    folders = {text: asked.folder / f"saved-{number}" for number, text in enumerate(asked.layouts)}
    for number in range(len(asked.layouts)):
        _wait_for(asked.folder / f"ended-{number}")
    return {text: folder for text, folder in folders.items() if (folder / "done").exists()}


def print_line(text: str) -> None:
    """At once; on a terminal a long line goes on below its own text, and no word is broken."""
    columns = shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns
    say(fill(text, width=columns, subsequent_indent=" " * _INDENT, break_long_words=False))


def make_subject(asked: VerifyRequest, layouts: Sequence[Layout]) -> ProofCase:
    """What is proved; its model is in a folder. Raises `UserError`."""
    config = parse_config(asked.config)
    most = max(layout.tp for layout in layouts)
    model = make_folder(
        config, asked.folder / "model", thin=asked.thin, memory=free_memory() // 2, vocabulary=8 * most + 3,
        layers=max(map(layers_for, layouts)), seed=asked.seed,
    )  # fmt: skip
    options, chunks = config.optimizer.model_dump(exclude_none=True), config.memory.loss_chunks
    decay = max(config.optimizer.weight_decay, WEIGHT_DECAY)
    return ProofCase(
        folder=model.folder, model_class=model.name, vocabulary=model.vocabulary, thin=asked.thin, cuts=model.cuts,
        rows=rows_for(layouts), row_length=asked.seq_length or min(ROW, config.data.seq_length), steps=asked.steps,
        seed=asked.seed, optimizer=type(config.optimizer)(**options | {"weight_decay": decay}),
        reduce=config.precision.reduce, loss_chunks=None if chunks == "auto" else chunks,
        capacity_factor=config.balance.capacity_factor,
    )  # fmt: skip


def reference_file(asked: VerifyRequest, precision: str) -> Path:
    """Where the reference in `precision` lies."""
    return asked.folder / f"reference-{precision}.safetensors"


def free_memory() -> int:
    """Bytes that this machine has left."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return 8 * 2**30


def _make_evidence(asked: VerifyRequest, layouts: Sequence[Layout], world: World, say: Callable[[str], None]) -> None:
    """On rank 0, while the others wait: the model, the documents and what one process computes."""
    case = make_subject(asked, layouts)
    torch.set_num_threads(1 if case.thin else cores())  # threads that wait for each other cost more than they save
    say(f"  model        {case.describe()}")
    for precision in dict.fromkeys(layout.precision for layout in layouts):
        started = time.perf_counter()
        prepare(case, precision, reference_file(asked, precision), world.device)
        seconds = time.perf_counter() - started
        say(f"  reference    one process, plain transformers, {precision}, {case.steps} steps   {seconds:.1f} s")
    case.save(asked.folder / ".subject")
    (asked.folder / ".subject").replace(asked.folder / SUBJECT)


def _wait_for(path: Path) -> None:
    """Rank 0 may compute for long; nobody waits for it in a collective."""
    while not path.exists():
        time.sleep(POLL_SECONDS)


def _prove_one(asked: VerifyRequest, layout: Layout, world: World, folder: Path) -> LayoutResult:
    """Prove a layout, and save it for the others to load."""
    started = time.perf_counter()
    try:
        proof = _open(asked, layout, world)
    except UserError as error:  # on every rank
        return LayoutResult(str(layout), refused=error.what)
    found = proof.run()
    proof.save(folder)
    found.seconds = time.perf_counter() - started
    found.holds = proof.state.plan.by_rank() if world.is_first else {}
    return found


def _load_all(asked: VerifyRequest, layout: Layout, number: int, saved: Mapping[str, Path], world: World) -> None:
    """Load what every layout has saved, and add that to what was found."""
    proof = _open(asked, layout, world)
    proof.forget()
    proof.reload(saved)
    if world.is_first:
        found = read_found(asked, number)
        found.rows.extend(proof.found.rows)
        _write(asked, number, found, world)


def _open(asked: VerifyRequest, layout: Layout, world: World) -> Proof:
    case = ProofCase.load(asked.folder / SUBJECT)
    return Proof(case, layout, ReferenceTensors(reference_file(asked, layout.precision)), world.device)


def _write(asked: VerifyRequest, number: int, found: LayoutResult, world: World) -> None:
    if world.is_first:
        (asked.folder / f"found-{number}.json").write_text(json.dumps(found.to_json()))


def read_found(asked: VerifyRequest, number: int) -> LayoutResult:
    """What was found of the layout of this number."""
    file = asked.folder / f"found-{number}.json"
    found = LayoutResult.of(json.loads(file.read_text())) if file.exists() else LayoutResult(asked.names[number])
    broken = sorted(asked.folder.glob(f"broken-{number}-*.txt"), key=lambda path: path.stat().st_mtime_ns)
    if broken:
        found.refused = broken[0].read_text()
    return found


@contextmanager
def _noted(asked: VerifyRequest, number: int, world: World) -> Iterator[None]:
    """A layout that breaks is a finding; the next one runs. The rank that broke first has the reason."""
    try:
        yield
    except Exception as error:
        text = f"rank {world.rank}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        (asked.folder / f"broken-{number}-{world.rank}.txt").write_text(text)


def _line(found: LayoutResult) -> str:
    verdict = "proved" if found.ok else "not run" if found.refused else "WRONG"
    return f"  {found.layout:<12} {verdict:<8} {found.seconds:.1f} s"
