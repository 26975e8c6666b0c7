"""The stages of this rank: its own layers, and stubs in place of all others.

A rank keeps the one Hugging Face model and its parameter names. Stubs that return the hidden states they are given
replace the layers of other ranks, and the embedding, final norm and head where these run elsewhere. Layers are never
removed, because models read settings by layer index. While a stage runs, stubs also replace this rank's other stages.
The stub before the first layer of the stage returns the hidden states that were received. The stub after its last
layer keeps those to be sent. The model's own forward does the rest.

    stage of layers 2, 3 of 6:   zeros -> hand on -> take in -> layer 2 -> layer 3 -> give out -> hand on -> hand on
                                 embedding   0          1          2          3          4          5       norm

Legend: B rows, T tokens of a row (of this rank, under sequence parallel), D hidden size.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.pipeline.spec import RunStages, Stub
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.state import Builders
from fivefold.parallel.tensor.runtime import TensorParallel

# ---- stand-ins for modules of other stages ---------------------------------------------------------------------------


class StageStub(nn.Module):
    """Stand-in for a module of another stage: returns the hidden states it is given, in the form (tensor or tuple) of
    that module.

    It keeps the attributes of the module, because some models read them from their layers.
    """

    def __init__(self, original: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        plain = vars(nn.Module())
        for name, value in vars(original).items():
            if name not in plain and name != "forward":
                self.__dict__.setdefault(name, value)
        self._in_tuple = in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        hidden = self.passing(args[0] if args else kwargs["hidden_states"])
        return (hidden,) if self._in_tuple else hidden

    def passing(self, hidden: Tensor) -> Tensor:
        return hidden


class _Slot(StageStub):
    """Stub before a stage's first layer (`takes_in`), to return what was received; or after its last, to keep it."""

    def __init__(self, original: nn.Module, *, in_tuple: bool, takes_in: bool) -> None:
        super().__init__(original, in_tuple=in_tuple)
        self.takes_in = takes_in
        self.value: Tensor | None = None

    def passing(self, hidden: Tensor) -> Tensor:
        if self.takes_in:
            assert self.value is not None, "no hidden states were received"
            return self.value
        self.value = hidden
        return hidden


class _Zeros(StageStub):
    """Stand-in for an embedding or a linear: zeros in the shape of its output, [*, features]. `weight`: that of a tied
    embedding whose head is here; else it has no numbers, but some models (Llama 4) ask it for its device."""

    def __init__(
        self, original: nn.Module, shape: Callable[[Tensor], Sequence[int]], dtype: torch.dtype,
        weight: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__(original)
        self._shape, self._dtype = shape, dtype
        self.weight: Tensor = torch.empty(0, dtype=dtype, device="meta") if weight is None else weight

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Follow the model's device, but keep the compute dtype."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if not isinstance(self.weight, nn.Parameter):
            self.weight = fn(self.weight).to(self._dtype)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given: Tensor = args[0] if args else next(iter(kwargs.values()))
        return torch.zeros(*self._shape(given), dtype=self._dtype, device=given.device)


# ---- the model of this rank ------------------------------------------------------------------------------------------


@dataclass
class StageModules:
    """The stages of this rank in its model. `views`: modules that are put into the model while one runs. `slots`: those
    before its first layer and after its last. `stubs`: of every module that has a stage."""

    plan: ParallelPlan
    model: nn.Module
    dtype: torch.dtype
    tensor: TensorParallel
    context: ContextParallel
    views: dict[int, dict[str, nn.Module]] = field(default_factory=dict)
    slots: dict[int, tuple[_Slot | None, _Slot | None]] = field(default_factory=dict)
    stubs: dict[str, nn.Module] = field(default_factory=dict)

    def is_last(self, stage: int) -> bool:
        return stage == self.plan.placement.stages.count - 1

    def shape(self, ids_BT: Tensor) -> tuple[int, int, int]:
        """Shape of the hidden states of a micro batch between stages, [B, T, D]."""
        rows, length = ids_BT.shape
        return rows, self.tensor.share(self.context.share(length)), self.plan.facts.hidden_size

    def empty(self, ids_BT: Tensor) -> Tensor:
        return torch.empty(self.shape(ids_BT), dtype=self.dtype, device=ids_BT.device)

    def check(self, stage: int, hidden_BTD: Tensor, ids_BT: Tensor) -> None:
        """Raise `UserError` for hidden states of a shape or type that the next stage's buffer does not have."""
        if (hidden_BTD.shape, hidden_BTD.dtype) != (self.shape(ids_BT), self.dtype):
            raise UserError(
                f"stage {stage} of {type(self.model).__name__} gives hidden states {list(hidden_BTD.shape)} in "
                f"{hidden_BTD.dtype}, and the next expects {list(self.shape(ids_BT))} in {self.dtype}",
                fix="set layout.pp: 1, or a layout.precision in which all layers compute in one type",
            )

    @contextmanager
    def running(self, stage: int, hidden: Tensor | None) -> Iterator[Callable[[], Tensor]]:
        """Let the model's forward run `stage` alone on `hidden` in this context. Yields what returns the output."""
        taken, given = self.slots.get(stage, (None, None))  # a single stage has neither
        if taken:
            taken.value = hidden
        view = self.views.get(stage, {})
        before = {path: self.model.get_submodule(path) for path in view}
        _place(self.model, view)
        try:
            yield lambda: _given_out(given)
        finally:
            _place(self.model, before)
            for slot in (taken, given):
                if slot:
                    slot.value = None


def _given_out(slot: _Slot | None) -> Tensor:
    assert slot is not None and slot.value is not None, "the stage gave no hidden states"
    return slot.value


def stage_builders(staged: StageModules) -> Builders:
    """Builders that put stubs into a model, in place of other ranks' modules."""
    return {
        RunStages: lambda *_: _find_views(staged),
        Stub: lambda _, edit: _place(staged.model, {edit.path: staged.stubs[edit.path]}),
    }


def _find_views(staged: StageModules) -> None:
    model, plan, tensor = staged.model, staged.plan, staged.tensor
    stages, own = plan.placement.stages, set(plan.placement.own_stages)
    anatomy, in_tuples = plan.anatomy, plan.facts.in_tuples
    originals = {path: model.get_submodule(path) for path in stages.stages_of_module}
    is_here = {path: not own.isdisjoint(where) for path, where in stages.stages_of_module.items()}

    def slot(layer: int, *, takes_in: bool) -> _Slot:
        path = anatomy.layers[layer]
        return _Slot(originals[path], in_tuple=path in in_tuples, takes_in=takes_in)

    def stub(path: str) -> nn.Module:
        original: Any = originals[path]
        if isinstance(original, nn.Embedding):
            share = tensor.share if path == anatomy.embedding else (lambda length: length)
            # If only the head of a tied embedding is here, its weight keeps the embedding's name in the stand-in.
            weight = original.weight if is_here[path] and 0 not in own else None
            return _Zeros(
                original, lambda x: (*x.shape[:-1], share(x.shape[-1]), original.embedding_dim), staged.dtype, weight
            )
        if path not in stages.layers and (dims := hf_internals.linear_dims(original)) is not None:
            features = original.weight.shape[dims[0]]
            return _Zeros(original, lambda x: (*x.shape[:-1], features), staged.dtype)
        return StageStub(original, in_tuple=path in in_tuples)

    staged.stubs.update({path: stub(path) for path in originals})
    for stage in plan.placement.own_stages:
        # A tied embedding works in the first stage only; in the last one the head uses its weight.
        view = {
            path: originals[path]
            if stage == (where[0] if path == anatomy.embedding else where[-1])
            else staged.stubs[path]
            for path, where in stages.stages_of_module.items()
        }
        first, last = stages.splits[stage]
        taken = slot(first - 1, takes_in=True) if first else None
        given = None if staged.is_last(stage) else slot(last, takes_in=False)
        for layer, end in ((first - 1, taken), (last, given)):
            if end:
                view[anatomy.layers[layer]] = end
        staged.views[stage], staged.slots[stage] = view, (taken, given)


def _place(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put modules at their paths, as children of the model, of a module or of a list."""
    for path, module in modules.items():
        parent, _, leaf = path.rpartition(".")
        setattr(model.get_submodule(parent), leaf, module)
