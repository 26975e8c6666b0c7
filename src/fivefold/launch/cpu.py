"""Process-wide settings for speed on a CPU: freed memory is kept, and oneDNN computes fp32 products where MKL is
slow."""

import ctypes
import re
import sys
from functools import cache

from fivefold.core.system import cpuinfo
from fivefold.torch_internals import multiply_by_onednn


@cache
def tune() -> None:
    """Apply both settings. Results change in rounding alone."""
    _keep_freed_memory()
    if mkl_is_slow():
        multiply_by_onednn()


def mkl_is_slow() -> bool:
    """True if PyTorch's fp32 products use half of this CPU: MKL uses AVX2 on an AMD CPU that has AVX-512.

    Two cores of an EPYC 9005 (Zen 5, family 26): 234 GFLOP/s by MKL, 500 by oneDNN. Zen 4 (family 25) executes an
    AVX-512 instruction in two halves, so that oneDNN gains nothing. The answer depends on the CPU's model alone, as a
    measurement would let ranks and resumed runs round differently.
    """
    import torch

    has_mkl: bool = torch.backends.mkl.is_available()  # type: ignore[no-untyped-call]
    if torch.backends.cpu.get_cpu_capability() != "AVX512" or not has_mkl:
        return False
    said = cpuinfo()
    maker, family = (re.search(rf"^{key}\s*:\s*(\S+)", said, re.MULTILINE) for key in ("vendor_id", "cpu family"))
    return maker is not None and family is not None and maker[1] == "AuthenticAMD" and int(family[1]) >= 26


def _keep_freed_memory() -> None:
    """Let glibc reuse freed tensors instead of returning each to the system, which would zero it page by page.

    With the defaults of malloc, a step of a 15M model takes 300,000 page faults, a third of its time on a virtual
    machine (mallopt(3): M_MMAP_MAX, M_TRIM_THRESHOLD). No effect without glibc.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt:
        mallopt(-4, 0)  # never use mmap for an allocation
        mallopt(-1, 2**31 - 1)  # keep up to 2 GiB at the top of the heap
