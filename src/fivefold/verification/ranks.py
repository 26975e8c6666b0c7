"""A proof on its ranks: rank 0 computes the reference, then each layout runs on as many ranks as it has.

If fivefold started the workers itself, smaller layouts run on the first of them, each in a process group of its own. In
a world that something else started (torchrun), the layouts of its size run in that world.
"""

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist

from fivefold.config import parse_config
from fivefold.core.alike import program
from fivefold.core.errors import UserError
from fivefold.core.text import say
from fivefold.core.units import GIB
from fivefold.launch.memory import room
from fivefold.launch.world import World, join, leave, threads_per_worker
from fivefold.models import hf_internals, kernels
from fivefold.models.build import load_model_config
from fivefold.parallel import plain
from fivefold.parallel.adapters.settings import NF4_BLOCK
from fivefold.parallel.dtypes import master_dtype
from fivefold.parallel.layout import Layout
from fivefold.parallel.plain import check_alike
from fivefold.training import agreed
from fivefold.training.model import balance_options
from fivefold.training.optimizers import rule_for
from fivefold.verification.prepare import prepare
from fivefold.verification.proof import Proof
from fivefold.verification.proof_case import (
    AUX_LOSS,
    BIAS_RATE,
    CHUNKS,
    ROW,
    WEIGHT_DECAY,
    Z_LOSS,
    ProofCase,
    row_length_for,
    rows_for,
)
from fivefold.verification.reduced_model import make_folder
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.report import VerifyReport
from fivefold.verification.request import SUBJECT, VerifyRequest, read_found, reference_file, report_on, write_found
from fivefold.verification.results import LayoutResult

POLL_SECONDS = 0.05
WHOLE = 2**31  # no vocabulary is larger: a loss of the user's own may name any token
UNKNOWN = 8 * GIB  # free memory assumed if the system does not report it
_INDENT = 15  # of the text of a progress line, after its label
Work = Callable[[World], None]
# Arguments: the number of a layout, the layout, a unique name, and the work to do in a world of its size.
Runner = Callable[[int, Layout, str, Work], None]


def inside(
    request: VerifyRequest, world: World, folder: Path, publish: Callable[[VerifyReport], object]
) -> VerifyReport:
    """Prove the layouts of this world's size; others do not run. `folder`, for scratch files, is seen by all ranks."""
    check_alike(lambda: {**agreed.keys(parse_config(request.config)), "the layouts": request.layouts, **program()})
    if world.is_first:
        folder.mkdir(parents=True, exist_ok=True)
    scratch = plain.of_first(tempfile.mkdtemp(prefix=".verify-", dir=folder) if world.is_first else "")
    fitting = {name: str(layout) for name, layout in request.parsed.items() if layout.world == world.size}
    own = replace(request, scratch=scratch, layouts=fitting)
    if own.layouts:
        in_world(own, world)
    dist.barrier()
    report = report_on(request, own, world.size)
    if world.is_first:
        publish(report)
    dist.barrier()  # the first rank to exit with a failure would make the launcher end the others
    if world.is_first:
        shutil.rmtree(scratch)
    return report


def on_worker(request: Mapping[str, Any], world: World) -> None:
    """The body of a worker started for a proof. A layout runs on the first ranks. A layout that fails is a finding, and
    the next one runs."""
    asked = VerifyRequest(**request["verify"])

    def run(number: int, layout: Layout, name: str, work: Work) -> None:
        if world.rank >= layout.world:
            return
        meeting = f"file://{asked.folder / name}" if layout.world > 1 else ""
        try:
            with join(replace(world, size=layout.world, rendezvous=meeting)) as own:
                torch.set_num_threads(threads_per_worker(layout.world))
                work(own)
        except Exception as error:
            text = f"rank {world.rank}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            (asked.folder / f"broken-{number}-{world.rank}.txt").write_text(text)

    leave()
    prove(asked, world, run)


def in_world(asked: VerifyRequest, world: World) -> None:
    """Prove the layouts of a joined world's size in its own process group. A failing rank ends the world."""
    prove(asked, world, lambda number, layout, name, work: work(world))


def prove(asked: VerifyRequest, world: World, run: Runner) -> None:
    """Prove every layout; rank 0 writes the results to the scratch folder (`read_found`)."""
    hf_internals.no_progress_bars()
    kernels.choose(parse_config(asked.config).train.attention, torch.device(world.device))
    layouts = asked.parsed
    tell: Callable[[str], None] = print_line if world.is_first and not asked.quiet else lambda text: None
    if world.is_first:
        _make_evidence(asked, list(layouts.values()), world, tell)
    _wait_for(asked.folder / SUBJECT)
    for number, (name, layout) in enumerate(layouts.items()):
        run(number, layout, f"world-{number}", partial(_prove_one, asked, layout, number, name, tell))
        if world.is_first:
            (asked.folder / f"ended-{number}").touch()
    for number in range(len(layouts)):
        _wait_for(asked.folder / f"ended-{number}")
    for number, (name, layout) in enumerate(layouts.items()):
        saved = _saved(asked, layout)
        if str(layout) in saved:
            run(number, layout, f"again-{number}", partial(_load_all, asked, layout, number, name, saved))


def _saved(asked: VerifyRequest, layout: Layout) -> dict[str, Path]:
    """Layout -> its checkpoint, for layouts with the same types of weights and optimizer state as `layout`: checkpoints
    are not converted."""
    folders = {str(other): asked.folder / f"saved-{number}" for number, other in enumerate(asked.parsed.values())
               if _stored(other) == _stored(layout)}  # fmt: skip
    return {text: folder for text, folder in folders.items() if (folder / "done").exists()}


def _stored(layout: Layout) -> tuple[torch.dtype, str]:
    """The types of weights and optimizer state in a checkpoint."""
    return master_dtype(layout.precision), layout.state_dtype


def print_line(text: str) -> None:
    """Print a line immediately; on a terminal, wrap it between words and indent the continuation."""
    columns = shutil.get_terminal_size(fallback=(sys.maxsize, 0)).columns
    say(fill(text, width=columns, subsequent_indent=" " * _INDENT, break_long_words=False))


def make_subject(asked: VerifyRequest, layouts: Sequence[Layout]) -> ProofCase:
    """Make the subject of the proof, with its model in a folder. Raises `UserError`."""
    config = parse_config(asked.config)
    machine = room()
    model = make_folder(
        config, asked.folder / "model", thin=asked.thin, memory=(machine.free if machine else UNKNOWN) // 2,
        vocabulary=WHOLE if config.objective.is_own else 8 * max(layout.tp for layout in layouts) + 3,
        layers=max(layout.fewest_layers for layout in layouts), seed=asked.seed,
        block=NF4_BLOCK * max(layout.tp for layout in layouts) if config.adapter.quantize == "nf4" else 1,
    )  # fmt: skip
    options = config.optimizer.model_dump(exclude_none=True)
    takes_decay = rule_for(config.optimizer).takes_decay
    decay = max(config.optimizer.weight_decay, WEIGHT_DECAY) if takes_decay else 0.0
    balance = balance_options(config, load_model_config(model.folder))
    length = asked.seq_length or min(ROW, config.data.seq_length)
    whole_rows = any(layout.matmul_words for layout in layouts)
    return ProofCase(
        folder=model.folder, model_class=model.name, vocabulary=model.vocabulary, thin=asked.thin, cuts=model.cuts,
        rows=rows_for(layouts), row_length=row_length_for(layouts, length) if whole_rows else length, steps=asked.steps,
        seed=asked.seed, optimizer=type(config.optimizer)(**options | {"weight_decay": decay}),
        reduce=config.precision.reduce, loss_chunks=config.memory.chunks or CHUNKS,
        capacity_factor=balance.capacity_factor, bias_rate=max(balance.bias_rate, BIAS_RATE),
        aux_loss=max(balance.load, AUX_LOSS), z_loss=max(balance.z, Z_LOSS), whole_rows=whole_rows,
        objective=config.objective.name, beta=config.objective.beta,
        gamma=config.objective.gamma, desirable_weight=config.objective.desirable_weight,
        undesirable_weight=config.objective.undesirable_weight, top_k=config.objective.top_k,
        temperature=config.objective.temperature, alpha=config.objective.alpha, adapter=config.adapter.lora,
        neftune_noise_alpha=config.train.neftune_noise_alpha, loss=config.objective.path,
        columns=config.objective.columns, balance_rows=config.data.balance_rows,
        prompts=0 if any(layout.has_tensor_scales for layout in layouts) else ProofCase.prompts,
    )  # fmt: skip


def _make_evidence(asked: VerifyRequest, layouts: Sequence[Layout], world: World, say: Callable[[str], None]) -> None:
    """Compute the model, the documents and the references on rank 0, while the others wait."""
    case, threads = make_subject(asked, layouts), torch.get_num_threads()
    # The others wait, so this rank may use all threads. In a thin model their synchronisation costs more than it saves.
    torch.set_num_threads(1 if case.thin else threads_per_worker(1))
    say(f"  model        {case.describe()}")
    for numerics, layout in {layout.numerics: layout for layout in layouts}.items():
        started = time.perf_counter()
        evidence = reference_file(asked, layout)
        prepare(case, layout, evidence, world.device)
        seconds = time.perf_counter() - started
        say(f"  reference    one process, plain transformers, {numerics}, {case.steps} steps   {seconds:.1f} s")
    torch.set_num_threads(threads)
    case.save(asked.folder / ".subject")
    (asked.folder / ".subject").replace(asked.folder / SUBJECT)


def _wait_for(path: Path) -> None:
    """Poll for a file. Rank 0 may compute for long, so no rank waits for it in a collective."""
    while not path.exists():
        time.sleep(POLL_SECONDS)


def _prove_one(
    asked: VerifyRequest, layout: Layout, number: int, name: str, tell: Callable[[str], None], world: World
) -> None:
    """Prove a layout, and save it for the others to load."""
    started = time.perf_counter()
    found = LayoutResult(name)
    try:
        proof = _open(asked, layout, world)
    except UserError as error:  # on every rank
        found.refused = error.what
    else:
        found = proof.run()
        proof.save(asked.folder / f"saved-{number}")
        found.seconds = time.perf_counter() - started
        found.layout, found.holds = name, proof.state.placement.by_rank() if world.is_first else {}
    if world.is_first:
        write_found(asked, number, found)
    tell(_line(found))


def _load_all(
    asked: VerifyRequest, layout: Layout, number: int, name: str, saved: Mapping[str, Path], world: World
) -> None:
    """Load the checkpoint of every layout, and add the comparisons to the results."""
    proof = _open(asked, layout, world)
    proof.forget()
    proof.reload(saved)
    if world.is_first:
        found = read_found(asked)[name]
        found.rows.extend(proof.found.rows)
        write_found(asked, number, found)


def _open(asked: VerifyRequest, layout: Layout, world: World) -> Proof:
    case = ProofCase.load(asked.folder / SUBJECT)
    return Proof(case, layout, ReferenceTensors(reference_file(asked, layout)), world.device)


def _line(found: LayoutResult) -> str:
    verdict = found.verdict if found.verdict == "WRONG" else found.verdict.lower()
    return f"  {found.layout:<12} {verdict:<8} {found.seconds:.1f} s"
