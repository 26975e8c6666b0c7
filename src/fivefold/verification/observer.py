"""Watches one pass of a parallelized model: the output of every module, and every gradient before it is reduced.

A rank has its rows, its part of the tokens and its part of the features. They are compared immediately with that region
of the reference, so no rank ever holds more than its own part.

Legend: B rows of a micro batch, T tokens of a row, F features (trailing dimensions flattened).
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.models import hf_internals
from fivefold.models.anatomy import is_within
from fivefold.parallel.adapters import nf4
from fivefold.parallel.dtensor import local
from fivefold.parallel.dtypes import COMPUTE_DTYPES
from fivefold.parallel.pipeline.runtime import Pipeline
from fivefold.parallel.pipeline.stages import StageStub
from fivefold.parallel.plain import everywhere
from fivefold.parallel.sharding import Block, Region, ShardSpec, local_regions
from fivefold.parallel.state import ParallelState, state_of
from fivefold.verification.proof_case import Documents, tokens_of
from fivefold.verification.reference_tensors import ReferenceTensors
from fivefold.verification.results import (
    ALWAYS,
    SMALL,
    WORDS,
    ComparisonRow,
    Distance,
    LayoutResult,
    Tolerances,
    judge,
    kind_of,
)

Distances = dict[str, Distance]
Placed = tuple[Region, Sequence[Block], Tensor]  # a row and its tokens; which features; their values [1, T, F]


def watch(
    model: nn.Module, outputs: Collection[str], inputs: Collection[str], note: Callable[[str, Tensor], None]
) -> list[Any]:
    """Call `note(name, values)` with the output of each module in `outputs`, and with the first input of each module in
    `inputs` under `NAME input`; a tuple counts by its first element. Returns the hook handles."""

    def hook(name: str, at: int) -> Callable[..., None]:
        def noted(*call: Any) -> None:  # module, arguments, output
            values = call[at]
            values = values[0] if isinstance(values, tuple | list) and values else values
            if isinstance(values, Tensor):
                note(name, values)

        return noted

    modules = dict(model.named_modules())
    before = [modules[name].register_forward_pre_hook(hook(f"{name} input", 1)) for name in modules if name in inputs]
    return before + [modules[name].register_forward_hook(hook(name, 2)) for name in modules if name in outputs]


def by_row(values: Tensor, token_dim: int, rows: int) -> Tensor:
    """Reshape a module's output for `rows` rows to [B, T, F]. `token_dim` 0: rows and tokens are one dimension."""
    if token_dim == 0:
        return values.reshape(rows, values.shape[0] // rows, -1)
    return values.movedim(token_dim, 1).flatten(2) if values.ndim > 2 else values.unsqueeze(-1)


def _accumulation(parameter: Tensor) -> Any:
    """The autograd node that accumulates into `parameter`. (A hook on the tensor would also see intermediate gradients
    of the chunked loss.)"""
    with torch.enable_grad():
        return parameter.view_as(parameter).grad_fn.next_functions[0][0]  # type: ignore[union-attr]


class Observer:
    """Compares every forward and backward pass of `model` inside a `with` block with `reference`, micro batch by micro
    batch. `rows`: the numbers of the rows of each, in the global batch of `documents`. `distances`: the results.
    `types`: modules that compute in another type. `not_shown`: modules whose values on this rank cannot be located."""

    def __init__(
        self, model: Any, reference: ReferenceTensors, documents: Documents, rows: Sequence[Sequence[int]]
    ) -> None:
        self._model, self._reference, self._documents = model, reference, documents
        self._state = state_of(model)
        self._rows = rows
        self._token_dims: Mapping[str, int] = reference.about["token_dims"]
        self._handles: list[Any] = []
        self._micro_batch, self._passes, self._inside = -1, 0, False
        self._seen: set[str] = set()
        self._hidden_size = model.config.get_text_config().hidden_size
        self._early = _before_layers(model, self._state.plan.anatomy.layers[0])
        self._is_later_stage = False  # in the current pass of a pipeline
        self._raw: dict[str, Tensor] = {}
        self._shares: dict[str, list[tuple[int, Tensor]]] = {}  # module -> gradients of its output, by micro batch
        self._hooked: set[int] = set()
        self._splits: dict[tuple[str, int], ShardSpec | None] = {}  # cache of `_split_of`
        self._nodes: list[Any] = []  # graph nodes, kept alive: their hooks would vanish with them
        self.distances: Distances = {}
        self.types: dict[str, str] = {}
        self.not_shown: set[str] = set()

    def __enter__(self) -> "Observer":
        anatomy = self._state.plan.anatomy
        base = self._model.get_submodule(anatomy.base)
        self._handles += [base.register_forward_pre_hook(self._begin), base.register_forward_hook(self._end)]
        canonical = {id(p): name for name, p in self._model.named_parameters()}
        # A module of another stage is compared on the rank that has it.
        here = {
            name: submodule for name, submodule in self._model.named_modules() if not isinstance(submodule, StageStub)
        }
        for module in here.values():
            # A plain `nn.Module` never runs: it holds parameters that are used when its owner runs.
            for holder in (module, *(child for child in module.children() if type(child) is nn.Module)):
                if own := [(leaf, canonical[id(p)]) for leaf, p in holder._parameters.items() if p is not None]:
                    self._handles.append(module.register_forward_pre_hook(partial(self._watch_parameters, holder, own)))
        # What makes logits of hidden states gets those of a chunk of targets; the logits and its gradients tell.
        self.not_shown |= {name for name in self._token_dims if not is_within(name, [anatomy.base])}
        outputs = [name for name in here if name in self._token_dims and name not in self.not_shown]
        inputs = [name for name in here if f"{name} input" in self._token_dims and name not in self.not_shown]
        self._handles += watch(self._model, outputs, inputs, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def raw_gradients(self) -> None:
        """Compare the sum over ranks of the gradients before any reduction. Every rank calls this.

        Replicas of a parameter may hold partial gradients, or each the full one: both are accepted here. The row of the
        reduced gradient checks how they are combined.
        """
        for name, spec in self._state.plan.placement.shards.items():
            sums = [self._summed(name, spec, copies=False)]
            if spec.replicas > 1:
                sums.append(self._summed(name, spec, copies=True))
            key = f"gradient/{name}"
            if dist.get_rank() == 0 and key in self._reference:
                unrounded = f"raw/{name}"  # where a reduction rounds
                expected = self._reference.whole(unrounded if unrounded in self._reference else key)
                distances = [Distance().add(found, expected) for found in sums]
                self.distances[f"raw/{name}"] = min(distances, key=lambda distance: distance.squares)

    def shared_gradients(self) -> None:
        """Compare the summed gradients of modules that several ranks compute (key/value heads fewer than tp, latents).
        Each rank has a share of such a gradient. Every rank calls this."""
        for name in dict.fromkeys(name for rank in everywhere([*self._shares]) for name in rank):
            expected = self._reference.whole(f"backward/{name}")
            whole = torch.zeros(expected.shape, dtype=torch.float64, device=next(self._model.parameters()).device)
            for micro_batch, gradient in self._shares.get(name, ()):
                for region, blocks, share in self._placed(f"backward/{name}", gradient, micro_batch) or ():
                    widths = [stop - start for start, stop in blocks]
                    for block, part in zip(blocks, torch.split(share, widths, dim=-1), strict=True):
                        whole[(*region, slice(*block))] += part.double()
            dist.all_reduce(whole)
            if dist.get_rank() == 0:
                self.distances[f"backward/{name}"] = Distance().add(whole, expected)

    def _summed(self, name: str, spec: ShardSpec, *, copies: bool) -> Tensor:
        """The gradient of a whole parameter, from one rank of each set of replicas, or (`copies`) from all."""
        whole = torch.zeros(spec.shape, dtype=torch.float64, device=next(self._model.parameters()).device)
        part = self._state.plan.placement.shard_index(name).part
        if name in self._raw and (copies or spec.is_owner(part)):
            for global_region, local_region in local_regions(spec, part, 0, 1):
                whole[global_region] += self._raw[name][local_region]
        dist.all_reduce(whole)
        return whole

    @property
    def micro_batches(self) -> tuple[int, int]:
        """The number of passes seen, and of those in a global batch: micro batches times the stages on this rank."""
        return self._passes, len(self._rows) * len(self._state.plan.placement.own_stages)

    # ---- hooks ------------------------------------------------------------------------------------------------------

    def _begin(self, *_: Any) -> None:
        if not self._inside:
            self._micro_batch, stage = self._place()
            self._is_later_stage = stage > 0
            self._passes, self._inside, self._seen = self._passes + 1, True, set()

    def _place(self) -> tuple[int, int]:
        """Micro batch and stage of the pass that begins. In a forward-only run, a micro batch passes all stages of this
        rank before the next one starts."""
        if slot := self._state.live(Pipeline).running:
            return slot.micro_batch, slot.stage
        stages = self._state.plan.placement.own_stages
        return self._passes // len(stages), stages[self._passes % len(stages)]

    def _end(self, *_: Any) -> None:
        self._inside = False

    def _watch_parameters(self, holder: nn.Module, own: Sequence[tuple[str, str]], *_: Any) -> None:
        """Watch the gradients of a holder's parameters. Called when its module runs, because they are gathered then."""
        for leaf, name in own:
            parameter = holder._parameters[leaf]
            if parameter is not None and parameter.requires_grad and id(parameter) not in self._hooked:
                self._hooked.add(id(parameter))
                self._nodes.append(_accumulation(parameter))
                self._handles.append(self._nodes[-1].register_prehook(partial(self._accumulate, name)))

    def _accumulate(self, name: str, gradients: tuple[Tensor | None, ...]) -> None:
        if gradients[0] is None:  # deferred by a pipeline
            return
        gradient = local(gradients[0]).detach().double()
        self._raw[name] = self._raw[name] + gradient if name in self._raw else gradient.clone()

    def _note(self, name: str, values: Tensor) -> None:
        """Compare an output, and later its gradient. Recomputed outputs are ignored."""
        if not self._inside or name in self._seen:
            return
        self._seen.add(name)
        if name in self._early and self._is_later_stage and values.shape[-1] == self._hidden_size:
            return  # here it passes on the output of a stub in place of the embedding
        micro_batch = self._micro_batch
        expected_type = self._reference.about["dtypes"].get(name)
        if expected_type and str(values.dtype) != expected_type:
            self.types[name] = f"{values.dtype} instead of {expected_type}"
        is_placed = self._compare(f"output/{name}", values, micro_batch)
        if not is_placed and not self._model.get_submodule(name.removesuffix(" input"))._parameters:
            self.not_shown.add(name)
        if is_placed and values.requires_grad and f"backward/{name}" in self._reference:
            look = self._keep_share if self._is_shared(name) else self._compare_gradient
            values.register_hook(partial(look, name, micro_batch))  # type: ignore[no-untyped-call]

    def _keep_share(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        self._shares.setdefault(name, []).append((micro_batch, gradient.detach()))

    def _compare_gradient(self, name: str, micro_batch: int, gradient: Tensor) -> None:
        self._compare(f"backward/{name}", gradient, micro_batch)

    # ---- where a rank's values belong ------------------------------------------------------------------------------

    def _compare(self, key: str, values: Tensor, micro_batch: int) -> bool:
        """Add the distance of `values` from the reference; False if their place in it is unknown."""
        placed = self._placed(key, values, micro_batch)
        if placed is None:
            return False
        distance = self.distances.setdefault(key, Distance())
        for region, blocks, found in placed:
            expected = self._reference.read(key, region)
            distance.add(found, torch.cat([expected[..., slice(*block)] for block in blocks], dim=-1))
        return True

    def _placed(self, key: str, values: Tensor, micro_batch: int) -> "Iterator[Placed] | None":
        """The real tokens of `values`, piece by piece; None if their place in the reference is unknown."""
        name = key.partition("/")[2]
        rows = self._rows[micro_batch]
        values_BTF = by_row(values.detach(), self._token_dims[name], len(rows))
        features = self._reference.about["features"][key]
        blocks = self._blocks(name, features, values_BTF.shape[-1])
        tokens = self._tokens(values_BTF.shape[1])
        if blocks is None or tokens is None or values_BTF.shape[0] not in (1, len(rows)):
            return None
        return self._cut(values_BTF.expand(len(rows), -1, -1), rows, tokens, blocks)

    def _cut(
        self, values_BTF: Tensor, rows: Sequence[int], tokens: Sequence[Block], blocks: Sequence[Block]
    ) -> "Iterator[Placed]":
        for values_TF, row in zip(values_BTF, rows, strict=True):
            at = 0
            for start, end in tokens:
                stop = min(end, tokens_of(self._documents[row]))
                if start < stop:
                    yield (slice(row, row + 1), slice(start, stop)), blocks, values_TF[None, at : at + stop - start]
                at += end - start

    def _tokens(self, length: int) -> Sequence[Block] | None:
        """The tokens of a row in values of this length: this rank's part over cp, or its sequence-parallel part of
        that. None if neither has this length."""
        placement = self._state.placement
        whole = placement.layout.padded(self._reference.about["row_length"])
        for splits in (False, True):
            tokens = placement.grid.tokens(placement.rank, whole, sequence_parallel=splits)
            if sum(stop - start for start, stop in tokens) == length:
                return tokens
        return None

    def _blocks(self, name: str, features: int, width: int) -> Sequence[Block] | None:
        """The features this rank has: all, those of the linear's own shard, or those of another linear of the layer."""
        if width == features:
            return [(0, features)]
        spec = self._split_of(name, features)
        return None if spec is None else spec.splits[0].blocks[self._state.plan.placement.coords.tp]

    def _is_shared(self, name: str) -> bool:
        """True if several ranks compute it (key/value heads fewer than tp, latents), and share its gradient."""
        roles = [self._state.plan.partition.roles.get(f"{name}.{leaf}") for leaf in ("weight", "bias")]
        if any(role and role.kind == "latent" for role in roles):
            return True
        features = self._reference.about["features"][f"output/{name}"]
        spec = self._split_of(name, features)
        return spec is not None and spec.replicas > 1

    def _split_of(self, name: str, features: int) -> ShardSpec | None:
        """The shard of the linear whose split gives a module its part of `features`, cached."""
        if (name, features) not in self._splits:
            self._splits[name, features] = self._found_split(name, features)
        return self._splits[name, features]

    def _found_split(self, name: str, features: int) -> ShardSpec | None:
        module = name.removesuffix(" input")
        own = self._own_split(module, 1 if name.endswith(" input") else 0)
        if own is not None and own.shape[own.splits[0].dim] == features:
            return own
        layer = next(
            (of_layer for of_layer in self._state.plan.anatomy.layers if module.startswith(f"{of_layer}.")), None
        )
        near = module.rpartition(".")[0]
        linears = [path for path, _ in self._model.named_modules() if layer and path.startswith(f"{layer}.")]
        linears.sort(key=lambda path: not path.startswith(near))  # those in the same module first
        for linear in linears:
            for end in (0, 1):
                spec = self._own_split(linear, end)
                if spec is not None and spec.shape[spec.splits[0].dim] == features:
                    return spec
        return None

    def _own_split(self, name: str, end: int) -> ShardSpec | None:
        """The shard of a linear's weight, if its outputs (`end` 0) or its inputs (1) are split."""
        dims = hf_internals.linear_dims(self._model.get_submodule(name))
        spec = self._state.plan.placement.shards.get(f"{name}.weight")
        return spec if dims and spec and [split.dim for split in spec.splits] == [dims[end]] else None


def _before_layers(model: nn.Module, first: str) -> set[str]:
    """Modules without parameters before the `first` layer, such as a dropout after the embedding."""
    found: set[str] = set()
    for name, module in model.named_modules():
        if name == first:
            break
        if not any(True for _ in module.parameters()):
            found.add(name)
    return found


# ---- rows of a proof -------------------------------------------------------------------------------------------------


class Comparison:
    """Compares a layout with `reference`, and adds the rows to `found`, the same on every rank."""

    def __init__(self, found: LayoutResult, reference: ReferenceTensors, state: ParallelState) -> None:
        self.found, self._reference, self._state = found, reference, state
        self._tolerances = Tolerances(state.plan.layout.precision, reference.about["floors"])
        self._whole: set[str] = set()  # keys with all their values compared

    def allowed(self, key: str) -> float:
        return self._tolerances.of(key)

    def pieces(
        self, kind: str, tensors: Mapping[str, Tensor | None], names: list[str] | None = None, *, must: bool = True
    ) -> None:
        """Compare this rank's part of each tensor with that region of the reference. `must`: report missing tensors."""
        distances: Distances = {}
        for name, tensor in tensors.items():
            key = f"{kind}/{name}"
            if tensor is None or key not in self._reference:
                continue
            distance, values = distances.setdefault(key, Distance()), local(tensor)
            if values.dtype == torch.uint8:  # stored in four bits
                values = nf4.restored(values, COMPUTE_DTYPES[self._state.plan.layout.precision])
            for region, place in self._state.plan.placement.regions(name):
                distance.add(values[place], self._reference.read(key, region))
        held = [name for name in self._reference.names(kind) if must and self._state.plan.placement.holds(name)]
        lacking = {name: name for name in held if f"{kind}/{name}" not in distances}
        self.count(f"{kind} without values", lacking, say=False)
        self.in_order(kind, distances, names)

    def in_order(self, kind: str, distances: Distances, names: list[str] | None = None) -> None:
        """Add a row for each key of a kind, in the order of the reference's execution, or of `names`."""
        everyone = _of_all_ranks(kind, distances)
        for row in self._rows(kind, everyone, names):
            self.found.add(row)
        for key in dict.fromkeys(key for distances in everyone for key in distances):
            values = sum(distances[key].elements for distances in everyone if key in distances)
            if values >= self._reference.values(_recorded_as(key)):
                self._whole.add(key)

    def judged(self, kind: str, distances: Distances) -> list[ComparisonRow]:
        return self._rows(kind, _of_all_ranks(kind, distances), None)

    def _rows(self, kind: str, everyone: Sequence[Distances], names: list[str] | None) -> list[ComparisonRow]:
        source = _recorded_as(kind)
        norms = {name: self._reference.norm(f"{source}/{name}") for name in self._reference.names(source)}
        floor = SMALL * math.hypot(*norms.values())
        rows = []
        for name in names or norms:
            key = f"{kind}/{name}"
            per_rank = [distances.get(key) for distances in everyone]
            if any(distance is not None for distance in per_rank):
                rows.append(judge(key, per_rank, norms[name], floor, self.allowed(key), self._state.plan.layout))
        return rows

    def numbers(self, mine: Mapping[str, float]) -> None:
        """Add a row for each number under its key: the maximum over ranks, with NaN as the largest."""
        everyone = everywhere(dict(mine))
        for what in mine:
            error = max((times[what] for times in everyone), key=lambda time: math.inf if math.isnan(time) else time)
            self.found.add(ComparisonRow(what, error, self.allowed(what), error <= self.allowed(what)))

    def count(self, what: str, wrong: Mapping[str, str], *, say: bool = True) -> None:
        """Add a row that counts what is wrong on any rank; without `say` only if something is."""
        everyone: dict[str, str] = {}
        for wrong_ in everywhere(dict(wrong)):
            everyone.update(wrong_)
        if everyone or say:
            first = next(iter(everyone.values()), "")
            self.found.add(ComparisonRow(what, float(len(everyone)), 0.0, not everyone, first))

    def coverage(self, not_shown: Collection[str]) -> None:
        """Check that every value recorded by the reference was compared. Incomplete kinds are reported with counts.
        `not_shown`: modules whose values this rank could not locate."""
        somewhere = {name for rank in everywhere([*not_shown]) for name in rank}
        names = {name for name in somewhere if f"output/{name}" not in self._whole}
        self.found.not_shown = sorted(names)
        wrong = {}
        for word, keys in self._asked().items():
            lacking = [key for key in keys if key not in self._whole and key.partition("/")[2] not in names]
            if lacking:
                first = lacking[0].partition("/")[2]
                done = f"{word}: {len(keys) - len(lacking)} of {len(keys)} compared in full"
                wrong[word] = f"{done}; the first that is not: {first}" if first else done
        self.count("coverage", wrong)

    def _asked(self) -> dict[str, list[str]]:
        """Every key that a proof compares, grouped by the displayed name of its kind."""
        asked: dict[str, list[str]] = {}
        for key in self._reference.recorded():
            kind = kind_of(key)
            is_input = kind == "output" and key.endswith(" input")
            asked.setdefault("input" if is_input else WORDS.get(kind, kind), []).append(key)
        said = {row.what for row in self.found.rows} | {*self.found.not_told}
        numbers = [*ALWAYS, *self._reference.numbers()]
        return asked | {what: [what] for what in numbers if what not in said}


def _of_all_ranks(kind: str, distances: Distances) -> list[Distances]:
    mine = {key: asdict(distance) for key, distance in distances.items() if kind_of(key) == kind}
    return [{key: Distance(**distance) for key, distance in told.items()} for told in everywhere(mine)]


def _recorded_as(key: str) -> str:
    """The reference's key for a key; a raw gradient is compared with the reduced one."""
    return key.replace("raw", "gradient", 1) if kind_of(key) == "raw" else key
