"""What a block keeps from its forward for its second one, under selective recompute.

A block that is recomputed runs forward again in its backward. What is dear, the products of linears, attention and most
collectives, is computed once: its result is kept, and the second forward finds it where the first one put it. Norms,
activation functions, rotary positions and casts are computed again.

A value is kept below autograd. So the second forward makes the same graph as the first, with the same numbers in it.

| | inside of it |
|---|---|
| `keeping(forward)` | products and fused attention are kept, as PyTorch's own operators |
| `handing_on(forward)` | products are not kept, nor computed again: what is made of them is kept |
| `computing_again(forward)` | nothing is kept |
| `kept(compute)`, `product_with_inputs(compute)` | in an `autograd.Function`'s forward: what `compute` gives is kept |

Outside of a block that keeps anything, none of them does anything. Hooks for saved tensors that stand around a block
get what it keeps, too: what moves saved activations to the host moves these with them.
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
    """A tensor that is kept, without its graph, and how often it had been changed in place by then."""

    own: Tensor
    changes: int

    def taken(self) -> Tensor:
        if times_changed(self.own) != self.changes:
            raise RuntimeError("a tensor that selective recompute keeps has been changed in place")
        return self.own


@dataclass(frozen=True)
class _Packed:
    """A tensor that is kept by way of the hooks around the block."""

    value: Any
    unpack: Callable[[Any], Tensor]

    def taken(self) -> Tensor:
        return self.unpack(self.value)


@dataclass(frozen=True)
class _Shape:
    """Of a tensor that is not kept: another of its shape takes its place, without memory."""

    number: Tensor
    shape: tuple[int, ...]

    def taken(self) -> Tensor:
        return self.number.expand(self.shape)


def _shape_of(tensor: Tensor) -> _Shape:
    return _Shape(tensor.new_empty(()), tuple(tensor.shape))


@dataclass
class _Block:
    """One forward of one block: what it keeps, in order. `hooks`: those around it. `hands_on`: products are read by
    what is kept, and by nothing else."""

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
        return tree_map_only((_Held, _Packed, _Shape), lambda each: each.taken(), self.values.popleft())

    def _hold(self, tensor: Tensor) -> _Held | _Packed:
        own = without_graph(tensor)
        if self.hooks is None:
            return _Held(own, times_changed(own))
        pack, unpack = self.hooks
        return _Packed(pack(own), unpack)


_block: _Block | None = None  # whose forward is under way: of autograd's thread and the main one, one waits


@contextmanager
def _during(block: _Block | None) -> Iterator[None]:
    global _block
    before, _block = _block, block
    try:
        yield
    finally:
        _block = before


def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Around the first forward of a block and around its second: `context_fn` of `torch.utils.checkpoint`."""
    block = _Block(hooks_of_saved())
    return _during(block), _Second(block)


class _Second(AbstractContextManager[None]):
    """Around the second forward of a block, which takes what the first has kept. There is no third."""

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
    """The same for a block that `torch.compile` makes one graph of: it is told which operators to keep."""
    return create_selective_checkpoint_contexts(_policy)  # type: ignore[no-untyped-call]


def _policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = _is_dear(operator) or operator.overloadpacket in SUMS
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


# ---- around a forward ------------------------------------------------------------------------------------------------


def keeping(forward: Forward) -> Forward:
    """`forward`, whose products and fused attention are kept."""

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


def handing_on(forward: Forward) -> Forward:
    """`forward`, whose products only something reads that is itself kept: the collective that sums up a row's."""
    own = keeping(forward)

    def run(*args: Any, **kwargs: Any) -> Any:
        if (block := _block) is None:
            return forward(*args, **kwargs)
        block.hands_on = True
        try:
            return own(*args, **kwargs)
        finally:
            block.hands_on = False

    return run


def computing_again(forward: Forward) -> Forward:
    """`forward`, of which nothing is kept."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with _during(None):
            return forward(*args, **kwargs)

    return run


# ---- inside of an autograd.Function ----------------------------------------------------------------------------------


def kept(compute: Callable[[], Any]) -> Any:
    """What `compute` gives: tensors and numbers, in tuples or lists."""
    return compute() if _block is None else _block.kept(compute)


def product_with_inputs(compute: Callable[[], tuple[Any, Any]]) -> tuple[Any, Any]:
    """As `kept`, for products of linears: (the products, what their backward reads besides the weights)."""
    return compute() if _block is None else _block.product_with_inputs(compute)
