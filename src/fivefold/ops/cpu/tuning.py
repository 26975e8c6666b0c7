"""Settings of a process for speed on a CPU. Results change in rounding alone."""

import ctypes
import re
import sys
from functools import cache

import torch
from torch import Tensor

from fivefold.core.system import cpuinfo
from fivefold.torch_internals import override_on_cpu

_LEAST_OF_ONEDNN = 2**20  # multiplications: fewer take less time than the call through Python, 10 us


@cache
def tune() -> None:
    """Keep freed memory, and let oneDNN compute fp32 products where MKL is slow."""
    _keep_freed_memory()
    if mkl_is_slow():
        multiply_by_onednn()


def _keep_freed_memory() -> None:
    """Let glibc reuse freed tensors instead of returning each to the system, which would zero it page by page.

    With the defaults of malloc, a step of a 15M model takes 300,000 page faults, a third of its time on a virtual
    machine (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD). No effect without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # never use mmap for an allocation
        mallopt(-1, 2**31 - 1)  # keep up to 2 GiB at the top of the heap


def mkl_is_slow() -> bool:
    """True if PyTorch's fp32 products use half of this CPU: MKL uses AVX2 on an AMD CPU that has AVX-512.

    Two cores of an EPYC 9005 (Zen 5, family 26): 234 GFLOP/s by MKL, 500 by oneDNN. Zen 4 (family 25) executes an
    AVX-512 instruction in two halves, so that oneDNN gains nothing. The answer depends on the CPU's model alone, as a
    measurement would let ranks and resumed runs round differently.
    """
    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_mkl:
        return False
    said = cpuinfo()
    maker, family = (re.search(rf"^{key}\s*:\s*(\S+)", said, re.MULTILINE) for key in ("vendor_id", "cpu family"))
    return maker is not None and family is not None and maker[1] == "AuthenticAMD" and int(family[1]) >= 26


def multiply_by_onednn() -> None:
    """Let oneDNN compute fp32 `mm` and `addmm` on the CPU from now on, forward and backward, in the whole process.

    PyTorch uses MKL for them, and oneDNN only for the 16-bit types; `mkldnn._linear_pointwise` takes both.
    """
    has_onednn: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    if has_onednn and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        override_on_cpu("aten", {"mm": _mm, "mm.out": _mm_out, "addmm": _addmm})


def _mm(a: Tensor, b: Tensor) -> Tensor:
    if _takes_onednn(a, b):
        return _by_onednn(a, b, None)
    return torch.addmm(a.new_empty(()), a, b, beta=0, out=a.new_empty(0))


def _mm_out(a: Tensor, b: Tensor, *, out: Tensor) -> Tensor:
    if out.dtype is torch.float32 and _takes_onednn(a, b) and out.shape == (len(a), b.shape[1]):
        return out.copy_(_by_onednn(a, b, None))
    return torch.addmm(a.new_empty(()), a, b, beta=0, out=out)  # rejects another type, and warns about another shape


def _addmm(bias: Tensor, a: Tensor, b: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    if beta == alpha == 1 and bias.shape == b.shape[1:] and bias.dtype is torch.float32 and _takes_onednn(a, b):
        return _by_onednn(a, b, bias.contiguous())  # the kernel ignores the stride of a bias
    return torch.addmm(bias, a, b, beta=beta, alpha=alpha, out=a.new_empty(0))


def _takes_onednn(a: Tensor, b: Tensor) -> bool:
    if a.dtype is not torch.float32 or b.dtype is not torch.float32 or a.dim() != 2 or b.dim() != 2:
        return False
    (rows, inner), columns = a.shape, b.shape[1]
    return inner == b.shape[0] and rows * inner * columns >= _LEAST_OF_ONEDNN


def _by_onednn(a: Tensor, b: Tensor, bias: Tensor | None) -> Tensor:
    product: Tensor = torch.ops.mkldnn._linear_pointwise.default(a, b.t(), bias, "none", [], "")
    return product
