"""A proof on its ranks: rank 0 computes the reference, then each layout runs on as many ranks as it has.

If fivefold started the workers itself, smaller layouts run on the first of them, each in a process group of its own. In
a world that something else started (torchrun), the layouts of its size run in that world.
"""

import math
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from textwrap import fill
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.config import parse_config
from fivefold.core.alike import program
from fivefold.core.errors import UserError
from fivefold.core.text import say
from fivefold.core.units import GIB
from fivefold.launch.memory import room
from fivefold.launch.world import World, join, leave, threads_per_worker
from fivefold.models import hf_internals, kernels
from fivefold.models.build import load_model_config, meta_of_folder
from fivefold.models.discover import facts_of
from fivefold.parallel import plain
from fivefold.parallel.adapters.settings import NF4_BLOCK
from fivefold.parallel.balance.runtime import movable_biases
from fivefold.parallel.dtypes import master_dtype
from fivefold.parallel.layout import KEYS, Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.plain import check_alike
from fivefold.parallel.plan import ParallelPlan
from fivefold.training.model import balance_options
from fivefold.training.optimizers import rule_for
from fivefold.training.preflight import agreed_keys
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
    tokens_of,
)
from fivefold.verification.reduced_model import make_folder
from fivefold.verification.reference import ReferenceRun, reassociated
from fivefold.verification.reference_tensors import ReferenceTensors, logit_distances, save_reference_tensors
from fivefold.verification.report import VerifyReport, report_on
from fivefold.verification.results import (
    FACTOR,
    SMALL,
    SUBJECT,
    Distance,
    LayoutResult,
    VerifyRequest,
    kind_of,
    read_found,
    reference_file,
    relative,
    relative_number,
    write_found,
)

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
    check_alike(lambda: {**agreed_keys(parse_config(request.config)), "the layouts": request.layouts, **program()})
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
        objective=config.objective, adapter=config.adapter.lora,
        neftune_noise_alpha=config.train.neftune_noise_alpha, balance_rows=config.data.balance_rows,
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


# ---- the evidence of a case: the reference, and its noise ------------------------------------------------------------


def prepare(case: ProofCase, layout: Layout, path: Path, device: str) -> None:
    """Write to `path` the reference of `case` in the types of `layout`, and the floors of its tolerances."""
    precision, inputs, routers = layout.precision, row_linears(case), watched_routers(case)
    plan = plan_of_one_rank(case, layout)
    run = partial(
        _run, case, precision, device, inputs, routers=routers, plan=plan, state_dtype=layout.state_dtype, layout=layout
    )
    reference = run()
    with reassociated():
        other = run()
    noisy = run(noise=True)
    floors: dict[str, float] = {}
    for computed in (other, noisy):
        for key, floor in distances(computed.tensors, reference.tensors, case).items():
            # A non-finite distance is not rounding noise: it must not raise the tolerance.
            floors[key] = max(floors.get(key, 0.0), floor if math.isfinite(floor) else 0.0)
    signs = flips(reference.tensors, floors, case.steps) if precision != "fp64" else {}
    chance = left_to_chance(reference.tensors["margins"], floors["logits, mean error of top 5"])
    for key, floor in (*rounding(reference.tensors).items(), *signs.items(), ("tokens, continuations", chance)):
        floors[key] = max(floors[key], floor)
    features = {
        key: tensor[0, 0].numel() for key, tensor in reference.tensors.items() if kind_of(key) in ("output", "backward")
    }
    tokens = sum(map(tokens_of, case.documents(0)))
    values = {
        key: features[key] * tokens if key in features else tensor.numel() for key, tensor in reference.tensors.items()
    }
    save_reference_tensors(
        reference.tensors, path, floors=floors, limits=reference.limits, token_dims=reference.token_dims,
        dtypes=reference.dtypes, features=features, values=values, routers=routers, row_length=case.row_length,
        losses=reference.tensors["losses"].tolist(),
    )  # fmt: skip


def _run(case: ProofCase, precision: str, device: str, inputs: list[str], **options: Any) -> ReferenceRun:
    return ReferenceRun(case, precision, device, **options).before().run(inputs)


def rounding(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative error of each update due to rounding of the weights before and after it."""
    norms = {key: float(tensor.norm()) for key, tensor in tensors.items() if kind_of(key) in ("weight", "update")}
    updates = {key: norm for key, norm in norms.items() if kind_of(key) == "update"}
    smallest = SMALL * math.hypot(*updates.values()) or 1.0
    ulp = next(torch.finfo(tensor.dtype).eps for key, tensor in tensors.items() if kind_of(key) == "weight")
    return {
        key: 0.5 * ulp * norms[f"weight/{key.partition('/')[2]}"] / max(norm, smallest) for key, norm in updates.items()
    }


def flips(tensors: Mapping[str, Tensor], floors: Mapping[str, float], steps: int) -> dict[str, float]:
    """Relative error of sign-like updates, Adam's first and those of a router's bias: the sign of a value below its
    noise is random. At worst it is random in every later step, too. (fp64 has next to none of these.)
    """
    found: dict[str, float] = {}
    for name, uncertain in (*_noisy_gradients(tensors, floors), *_noisy_loads(tensors, floors)):
        part = 2 * float(uncertain.double().mean()) ** 0.5 / FACTOR  # of the update
        update, last = (float(tensors[f"{kind}/{name}"].norm()) for kind in ("update", "last"))
        found |= {f"update/{name}": part, f"last/{name}": steps * part * update / last if last else 0.0}
    return found


def _noisy_gradients(tensors: Mapping[str, Tensor], floors: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter with a mask of the elements of its gradient that are below their noise."""
    clipped = {key.partition("/")[2]: tensor for key, tensor in tensors.items() if kind_of(key) == "clipped"}
    smallest = SMALL * math.hypot(*(float(tensor.norm()) for tensor in clipped.values()))
    for name, gradient in clipped.items():
        noise = FACTOR * floors.get(f"clipped/{name}", 0.0) * max(float(gradient.norm()), smallest)
        yield name, (gradient != 0) & (gradient.abs() <= noise / gradient.numel() ** 0.5)


def _noisy_loads(tensors: Mapping[str, Tensor], floors: Mapping[str, float]) -> Iterator[tuple[str, Tensor]]:
    """Yield each bias moved by load, with a mask of the experts whose load is within its noise of the mean."""
    loads = {key.partition("/")[2]: tensor for key, tensor in tensors.items() if kind_of(key) == "load"}
    biases = [key.partition("/")[2] for key in tensors if kind_of(key) == "update"]
    for bias, (router, load) in zip(movable_biases([*loads], biases), loads.items(), strict=False):
        noise = FACTOR * floors.get(f"load/{router}", 0.0) * float(load.norm())
        yield bias, (load != load.mean()) & ((load - load.mean()).abs() <= noise)


def left_to_chance(margins: Tensor, error: float) -> float:
    """The share of continuation tokens that may differ, given a logit's mean `error`. If the two likeliest logits are
    within ten times that, either may be next, and all later tokens may differ. `margins`: [prompts, tokens].
    """
    if not margins.numel():
        return 0.0
    uncertain = (margins <= FACTOR * error).cumsum(1) > 0
    return float(uncertain.double().mean()) / FACTOR


def row_linears(case: ProofCase) -> list[str]:
    """The linears that write to the residual stream; their inputs are the results of attention and the MLP."""
    model = meta_of_folder(case.folder)
    try:
        return [region.row for region in facts_of(model).partition.tp_blocks]
    except UserError:
        return []


def plan_of_one_rank(case: ProofCase, layout: Layout) -> ParallelPlan:
    """The plan of a case in one process, in the types of `layout`."""
    types = {name: getattr(layout, name) for name, key in KEYS.items() if key.section == "precision"}
    return lower(facts_of(meta_of_folder(case.folder)), Layout(**types), 0)


def watched_routers(case: ProofCase) -> list[str]:
    """The routers whose load a run counts: all if all of them return logits, else none."""
    experts = facts_of(meta_of_folder(case.folder)).experts
    return [block.router for block in experts] if all(block.has_logits for block in experts) else []


def _relative_numbers(found: Tensor, expected: Tensor) -> list[float]:
    return [relative_number(*pair) for pair in zip(found.flatten().tolist(), expected.flatten().tolist(), strict=True)]


def distances(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], case: ProofCase) -> dict[str, float]:
    """The distance between two runs of the reference, by key, measured like the rows of a proof."""
    totals: dict[str, float] = {}
    for key, tensor in expected.items():
        totals[kind_of(key)] = totals.get(kind_of(key), 0.0) + float(tensor.double().square().sum())
    errors = {}
    for key, tensor in expected.items():
        if "/" in key and key in found:
            floor = SMALL * totals[kind_of(key)] ** 0.5
            errors[key] = relative(Distance().add(found[key], tensor), float(tensor.double().norm()), floor)
    for what in ("losses", "norms"):
        largest = accumulate(_relative_numbers(found[what], expected[what]), max)  # an error persists in later steps
        errors |= {f"{what}/{step}": error for step, error in enumerate(largest)}
    (errors["loss, evaluated"],) = _relative_numbers(found["evaluated"], expected["evaluated"])
    if "balance" in expected:
        errors["losses of routers"] = max(_relative_numbers(found["balance"], expected["balance"]))
    errors["loss"], errors["gradient norm"] = errors["losses/0"], errors["norms/0"]
    real = torch.tensor([[t < tokens_of(row) for t in range(case.row_length)] for row in case.documents(0)])
    errors |= logit_distances(found["logits"][real], expected["logits"][real])
    different = (found["greedy"] != expected["greedy"]).double()
    return errors | {"tokens, continuations": float(different.mean()) if different.numel() else 0.0}
