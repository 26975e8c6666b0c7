"""Where a layer's tensors go that it keeps for its backward by itself, and not as saved tensors of autograd: nowhere,
or to host memory (`parallel/offload_activations.py`)."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor

Back = Callable[[], Tensor]  # asked in backward
Put = Callable[[Tensor], Back]

_put: Put | None = None  # of the layer that runs forward


@contextmanager
def putting(put: Put) -> Iterator[None]:
    """Inside, tensors that are kept are given to `put`."""
    global _put
    before, _put = _put, put
    try:
        yield
    finally:
        _put = before


def put_away(tensor: Tensor) -> Back:
    """What gives the tensor back."""
    return (lambda: tensor) if _put is None else _put(tensor)
