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

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.models import hf_internals
from fivefold.parallel.plan import ParallelPlan
from fivefold.parallel.stage_plan import StagePlan

# ---- what stands in for a module of another stage --------------------------------------------------------------------


class StageStub(nn.Module):
    """Stands in for a module of another stage: returns the hidden states it is given, in the form (tensor or tuple) of
    that module.

    It keeps the attributes of the module, which some models read from their layers.
    """

    def __init__(self, original: nn.Module, *, in_tuple: bool = False) -> None:
        super().__init__()
        plain = vars(nn.Module())
        for name, value in vars(original).items():
            if name not in plain and name != "forward":
                self.__dict__.setdefault(name, value)
        self._in_tuple = in_tuple

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The hidden states given, after `passing`."""
        hidden = self.passing(args[0] if args else kwargs["hidden_states"])
        return (hidden,) if self._in_tuple else hidden

    def passing(self, hidden: Tensor) -> Tensor:
        """What becomes of the hidden states: nothing."""
        return hidden


class _Slot(StageStub):
    """Before a stage's first layer: returns what was received. After its last layer: keeps what it is given."""

    value: Tensor | None = None
    takes_in = False

    def passing(self, hidden: Tensor) -> Tensor:
        if self.takes_in:
            assert self.value is not None, "no hidden states were received"
            return self.value
        self.value = hidden
        return hidden


class _Zeros(StageStub):
    """Of an embedding or a linear: zeros as it would give them, [*, features]. `weight` has no numbers; some models
    (Llama 4) ask it for its device."""

    def __init__(self, original: nn.Module, shape: Callable[[Tensor], Sequence[int]], dtype: torch.dtype) -> None:
        super().__init__(original)
        self._shape, self._dtype = shape, dtype
        self.weight = torch.empty(0, dtype=dtype, device="meta")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """The device follows that of the model; the type stays the one it computes in."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        if "weight" in vars(self):  # not where the stub holds a tied embedding
            self.weight = fn(self.weight).to(self._dtype)
        return self

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        given: Tensor = args[0] if args else next(iter(kwargs.values()))
        return torch.zeros(*self._shape(given), dtype=self._dtype, device=given.device)


# ---- the model of this rank ------------------------------------------------------------------------------------------


@dataclass
class StageModules:
    """The stages of this rank in its model.

    `tokens(T)`: how many of T tokens a rank's hidden states have.
    """

    stages: StagePlan
    rank: int
    model: nn.Module
    dtype: torch.dtype
    own_tokens: Callable[[int], int]
    tokens: Callable[[int], int]
    hidden_size: int
    views: dict[int, dict[str, nn.Module]] = field(default_factory=dict)
    slots: dict[int, tuple[_Slot | None, _Slot | None]] = field(default_factory=dict)

    @property
    def own(self) -> tuple[int, ...]:
        """The stages of this rank, in their order."""
        return self.stages.stages_of(self.rank)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of this rank."""
        return self.stages.layers_of(self.rank)

    @property
    def has_ends(self) -> tuple[bool, bool]:
        """Whether the first stage is here, and whether the last one is."""
        return 0 in self.own, self.stages.count - 1 in self.own

    def is_last(self, stage: int) -> bool:
        """Whether the loss is computed there."""
        return stage == self.stages.count - 1

    def shape(self, ids_BT: Tensor) -> tuple[int, int, int]:
        """Of the hidden states of a micro batch between stages, [B, T, D]."""
        rows, length = ids_BT.shape
        return rows, self.tokens(self.own_tokens(length)), self.hidden_size

    def empty(self, ids_BT: Tensor) -> Tensor:
        """Memory for them."""
        return torch.empty(self.shape(ids_BT), dtype=self.dtype, device=ids_BT.device)

    def check(self, stage: int, hidden_BTD: Tensor, ids_BT: Tensor) -> None:
        """Raises `UserError` for hidden states of a shape or type that the next stage does not expect: its buffer would
        be misread."""
        if (hidden_BTD.shape, hidden_BTD.dtype) != (self.shape(ids_BT), self.dtype):
            raise UserError(
                f"stage {stage} of {type(self.model).__name__} gives hidden states {list(hidden_BTD.shape)} in "
                f"{hidden_BTD.dtype}, and the next expects {list(self.shape(ids_BT))} in {self.dtype}",
                fix="set layout.pp: 1, or a layout.precision in which all layers compute in one type",
            )

    @contextmanager
    def running(self, stage: int, hidden: Tensor | None) -> Iterator[Callable[[], Tensor]]:
        """Inside, the model's forward runs `stage` alone on `hidden`. The yielded function returns its output."""
        taken, given = self.slots[stage]
        if taken:
            taken.value = hidden
        before = {path: self.model.get_submodule(path) for path in self.views[stage]}
        _place(self.model, self.views[stage])
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


def install(
    model: nn.Module, plan: ParallelPlan, *, dtype: torch.dtype, own_tokens: Callable[[int], int],
    tokens: Callable[[int], int],
) -> StageModules:  # fmt: skip
    """Put stand-ins into `model`, in place, where other ranks have the modules."""
    stages, anatomy, in_tuples = plan.stages, plan.anatomy, plan.facts.in_tuples
    staged = StageModules(stages, plan.coords.pp, model, dtype, own_tokens, tokens, plan.facts.hidden_size)
    originals = {path: model.get_submodule(path) for path in stages.stages_of_module}
    shared = stages.stages_of_module[anatomy.embedding] if anatomy.tied else ()

    def stand_in(path: str) -> nn.Module:
        original = originals[path]
        if isinstance(original, nn.Embedding):
            split = tokens if path == anatomy.embedding else (lambda length: length)
            return _Zeros(original, lambda x: (*x.shape[:-1], split(x.shape[-1]), original.embedding_dim), dtype)
        if path not in stages.layers and (dims := hf_internals.linear_dims(original)) is not None:
            features = original.weight.shape[dims[0]]  # type: ignore[index]
            return _Zeros(original, lambda x: (*x.shape[:-1], features), dtype)
        return StageStub(original, in_tuple=path in in_tuples)

    stand_ins = {path: stand_in(path) for path in originals}
    for stage in staged.own:
        # A tied embedding is at work in the first stage only; in the last one the head has its weight.
        view = {
            path: originals[path]
            if stage == (where[0] if path == anatomy.embedding else where[-1])
            else stand_ins[path]
            for path, where in stages.stages_of_module.items()
        }
        first, last = stages.splits[stage]
        taken = _slot(anatomy.layers[first - 1], originals, in_tuples, takes_in=True) if first else None
        given = None if staged.is_last(stage) else _slot(anatomy.layers[last], originals, in_tuples, takes_in=False)
        for layer, slot in ((first - 1, taken), (last, given)):
            if slot:
                view[anatomy.layers[layer]] = slot
        staged.views[stage], staged.slots[stage] = view, (taken, given)
    at_rest = {
        path: originals[path] if set(where) & set(staged.own) else stand_ins[path]
        for path, where in stages.stages_of_module.items()
    }
    if shared and staged.own[0] != 0 and set(shared) & set(staged.own):
        # Only the head is here: the weight keeps the embedding's name in a module that does not look it up.
        holder = stand_ins[anatomy.embedding]
        vars(holder).pop("weight", None)
        holder.register_parameter("weight", originals[anatomy.embedding].weight)  # type: ignore[arg-type]
        at_rest[anatomy.embedding] = holder
    _place(model, at_rest)
    return staged


def _slot(path: str, originals: Mapping[str, nn.Module], in_tuples: Collection[str], *, takes_in: bool) -> _Slot:
    slot = _Slot(originals[path], in_tuple=path in in_tuples)
    slot.takes_in = takes_in
    return slot


def _place(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Put modules where their paths say; children of the model, of a module or of a list."""
    for path, module in modules.items():
        parent, _, leaf = path.rpartition(".")
        model.get_submodule(parent)._modules[leaf] = module
