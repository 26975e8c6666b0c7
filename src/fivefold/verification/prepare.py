"""The evidence of a case: the reference, and its numerical noise, from which the tolerances follow."""

import math
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.models.build import meta_of_folder
from fivefold.models.discover import facts_of
from fivefold.parallel.balance.runtime import movable_biases
from fivefold.parallel.layout import KEYS, Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.plan import ParallelPlan
from fivefold.verification.proof_case import ProofCase, tokens_of
from fivefold.verification.reference import ReferenceRun, reassociated
from fivefold.verification.reference_tensors import logit_distances, save_reference_tensors
from fivefold.verification.results import FACTOR, SMALL, Distance, kind_of, relative, relative_number


def prepare(case: ProofCase, layout: Layout, path: Path, device: str) -> None:
    """Write the evidence of `case`, in the types of `layout`, to `path`: the reference, and the floors of its
    tolerances."""
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
