"""Results that a block saves in its first forward for its second one, under selective recompute.

A recomputed block runs forward again in its backward. Expensive results (matmuls of linears, attention and most
collectives) are computed once: the first forward saves them, and the second one reads them. Norms, activation
functions, rotary positions and casts are recomputed.

Results are saved below autograd. So the second forward makes the same graph as the first, with the same numbers in it.

| | inside of it |
|---|---|
| `save_outputs(forward)` | matmuls and fused attention are saved, as PyTorch's own operators |
| `save_reduced_only(forward)` | matmuls are neither saved nor recomputed: the collective that reduces them is saved |
| `save_nothing(forward)` | nothing is saved |
| `kept(compute)`, `product_with_inputs(compute)` | in an `autograd.Function`'s forward: saves the result of `compute` |

Outside of a block that saves anything, none of them does anything. Saved-tensor hooks around a block also get what it
saves: offloading of saved activations to the host covers these.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from fivefold.core.errors import UserError
from fivefold.torch_internals import DEAR, SUMS, Dispatch, hooks_of_saved, times_changed, without_graph

Forward = Callable[..., Any]
Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]  # pack, unpack


@dataclass(frozen=True)
class _Held:
    """A saved tensor without its graph, and the number of its in-place changes until then."""

    own: Tensor
    changes: int

    def taken(self) -> Tensor:
        if times_changed(self.own) != self.changes:
            raise RuntimeError("a tensor that selective recompute keeps has been changed in place")
        return self.own


@dataclass(frozen=True)
class _Packed:
    """A tensor saved through the hooks around the block."""

    value: Any
    unpack: Callable[[Any], Tensor]

    def taken(self) -> Tensor:
        return self.unpack(self.value)


@dataclass(frozen=True)
class _Shape:
    """Stand-in for a tensor that is not saved: one of its shape, without memory."""

    number: Tensor
    shape: tuple[int, ...]

    def taken(self) -> Tensor:
        return self.number.expand(self.shape)


def _shape_of(tensor: Tensor) -> _Shape:
    return _Shape(tensor.new_empty(()), tuple(tensor.shape))


@dataclass
class _Block:
    """One forward of one block: what it saves, in order. `hooks`: those around it. `hands_on`: only saved results read
    the outputs of matmuls."""

    hooks: Hooks | None = None
    values: deque[Any] = field(default_factory=deque)
    is_again: bool = False
    hands_on: bool = False

    def kept(self, compute: Callable[[], Any]) -> Any:
        if self.is_again:
            return self._taken()
        with _during(None):
            found = compute()
        self.values.append(tree_map_only(Tensor, self._hold, found))
        return found

    def product(self, compute: Callable[[], Any]) -> Any:
        return self.product_with_inputs(lambda: (compute(), ()))[0]

    def product_with_inputs(self, compute: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
        if not self.is_again:
            with _during(None):
                outs, inputs = compute()
            keep = _shape_of if self.hands_on else self._hold
            self.values.append((tree_map_only(Tensor, keep, outs), tree_map_only(Tensor, self._hold, inputs)))
            return outs, inputs
        outs, inputs = self._taken()
        return outs, inputs

    def _taken(self) -> Any:
        return tree_map_only((_Held, _Packed, _Shape), lambda block: block.taken(), self.values.popleft())

    def _hold(self, tensor: Tensor) -> _Held | _Packed:
        own = without_graph(tensor)
        if self.hooks is None:
            return _Held(own, times_changed(own))
        pack, unpack = self.hooks
        return _Packed(pack(own), unpack)


_block: _Block | None = None  # in its forward; the main thread and autograd's take turns


@contextmanager
def _during(block: _Block | None) -> Iterator[None]:
    global _block
    before, _block = _block, block
    try:
        yield
    finally:
        _block = before


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of the first and the second forward of a block: `context_fn` of `torch.utils.checkpoint`."""
    block = _Block(hooks_of_saved())
    return _during(block), _Second(block)


class _Second(AbstractContextManager[None]):
    """Context of the second forward of a block, which reads what the first saved. There is no third."""

    def __init__(self, block: _Block) -> None:
        self._block = block

    def __enter__(self) -> None:
        if self._block.is_again:
            raise UserError(
                "a second backward of one forward (retain_graph=True): selective recompute keeps products for one",
                fix="a layout with +full or without recompute, or a forward for each backward",
            )
        self._block.is_again = True
        self._during = _during(self._block)
        self._during.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._during.__exit__(*error)


def graph_contexts() -> Any:
    """Contexts for a block that `torch.compile` makes one graph of: a policy of the operators to save."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = _is_dear(operator) or operator.overloadpacket in SUMS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


# ---- around a forward ------------------------------------------------------------------------------------------------


def save_outputs(forward: Forward) -> Forward:
    """Wrap `forward` to save its matmuls and fused attention."""

    def run(*args: Any, **kwargs: Any) -> Any:
        if (block := _block) is None:
            return forward(*args, **kwargs)
        with Dispatch(lambda operator, own, named: _dispatched(block, operator, own, named)):
            return forward(*args, **kwargs)

    return run


def _dispatched(block: _Block, operator: Any, args: Any, kwargs: Any) -> Any:
    if _is_dear(operator) and _block is block:
        return block.product(lambda: operator(*args, **kwargs))
    return operator(*args, **kwargs)


def _is_dear(operator: Any) -> bool:
    return operator.overloadpacket in DEAR or operator.namespace == "fivefold"


def save_reduced_only(forward: Forward) -> Forward:
    """Wrap a row-parallel `forward`: skip saving its matmul, because the collective that reduces it is saved."""
    own = save_outputs(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        if (block := _block) is None:
            return forward(*args, **kwargs)
        block.hands_on = True
        try:
            return own(*args, **kwargs)
        finally:
            block.hands_on = False

    return run


def save_nothing(forward: Forward) -> Forward:
    def run(*args: Any, **kwargs: Any) -> Any:
        with _during(None):
            return forward(*args, **kwargs)

    return run


# ---- inside of an autograd.Function ----------------------------------------------------------------------------------


def kept(compute: Callable[[], Any]) -> Any:
    """Return the result of `compute`, or the saved one: tensors and numbers, in tuples or lists."""
    return compute() if _block is None else _block.kept(compute)


def product_with_inputs(compute: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """Like `kept`, for matmuls of linears: (outputs, tensors for backward besides the weights)."""
    return compute() if _block is None else _block.product_with_inputs(compute)
