"""Causal attention on a CPU by `cpu_attention.c`, compiled for this machine's instructions at first use.

`benchmarks/attention.py` compares it with PyTorch's fused kernel. Two cores of an AMD EPYC 9005 compute 2 rows of 1,024
tokens and 12 heads of 64 in fp32 at 290 GFLOP/s forward and 390 backward, where large fp32 matmuls reach 490. An Intel
CPU with AMX multiplies bf16 by its tiles (`cpu_attention_bf16.h`). Elsewhere bf16 is multiplied as fp32. For heads of
128 on that EPYC this is 0.8 times as fast as PyTorch's kernel, which uses the CPU's bf16 instructions.

Without a C compiler with OpenMP nothing is compiled, and PyTorch's kernels serve.

Legend: M tokens in documents one after the other, or N rows of L queries and S keys; H query heads, G key/value heads,
D head size.
"""

import ctypes
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.core.c_library import UnusableCompiler, compile_library, compiler
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.system import cpuinfo
from fivefold.ops.blockwise_attention import AttentionParams
from fivefold.ops.cpu import library_or_lack
from fivefold.ops.dropout import AttentionDrops, drop_below, kept_scale

SOURCE = Path(__file__).with_name("cpu_attention.c")
HEADER = Path(__file__).with_name("cpu_attention_bf16.h")  # included if the CPU has AMX
LIBRARY = "cpu_attention.so"
_OPTIONS = ("-O3", "-fopenmp", "-lm")
_MACHINES = ("-march=native", "-mcpu=native", "-O3")  # the last: the compiler's default machine
_TRIAL = "import ctypes, sys; sys.exit(ctypes.CDLL(sys.argv[1]).attention_tried())"
_TYPES = (torch.float32, torch.bfloat16)
_TILE = 32  # keys, at most


@dataclass
class _Choice:
    is_wanted: bool = True


_choice = _Choice()


_SIZES = ("documents", "heads", "shared", "queries", "keys", "size", "offset", "window")


class _Tensor(ctypes.Structure):
    _fields_ = [("data", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token"))]


class _Shape(ctypes.Structure):
    _fields_ = [
        ("bounds", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in _SIZES),
        *((name, ctypes.c_float) for name in ("scale", "softcap")),
        *((name, ctypes.c_int32) for name in ("is_bf16", "threads")),
        *((name, _Tensor) for name in ("query_hashes", "key_hashes")),
        ("drop_below", ctypes.c_int32),
        ("kept_scale", ctypes.c_float),
    ]


def use(is_wanted: bool) -> None:
    _choice.is_wanted = is_wanted


def serves(query: Tensor) -> bool:
    """True if the kernel computes attention of queries like these: fp32 or bf16 on a CPU."""
    return query.device.type == "cpu" and query.dtype in _TYPES and _is_used()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _is_used() -> bool:
    return _choice.is_wanted and not lacks()


def lacks() -> str:
    """Return why this machine has no such kernel; "" if it has. The first call may compile it (1 s)."""
    found = _library()
    return found if isinstance(found, str) else ""


def forward(
    q_NHLD: Tensor, k_NGSD: Tensor, v_NGSD: Tensor, rule: AttentionParams, *, offset: int = 0,
    cu_seqlens: Tensor | None = None, drops: AttentionDrops | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output [N,H,L,D] and log-sum-exp [N,H,L] in fp32. `offset`: positions from the first key to the first query.

    With `cu_seqlens` (int32 [documents + 1], on the CPU) the tensors have one row of documents between these bounds.
    `drops`: of these queries [N,L] and keys [N,S,H]; the log-sum-exp is that without them.
    """
    rows, heads, length, size = q_NHLD.shape
    out_NHLD = q_NHLD.new_empty(rows, length, heads, size).transpose(1, 2)
    lse_NHL = torch.empty(rows, heads, length, dtype=torch.float32)
    drops = drops and _by_head(drops)
    shape = _shape(q_NHLD, k_NGSD, rule, offset, cu_seqlens, drops)
    _call("attention_forward", shape, q_NHLD, k_NGSD, v_NGSD, out_NHLD, lse_NHL.unsqueeze(-1))
    return out_NHLD, lse_NHL


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, rule: AttentionParams, *, offset: int = 0,
    cu_seqlens: Tensor | None = None, drops: AttentionDrops | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k, v; `grad` and `out` [N,H,L,D], `lse` [N,H,L]; the others as in `forward`."""
    dq, dk, dv = (_like(tensor) for tensor in (q, k, v))
    drops = drops and _by_head(drops)
    shape = _shape(q, k, rule, offset, cu_seqlens, drops)
    _call("attention_backward", shape, grad, q, k, v, out, lse.unsqueeze(-1), dq, dk, dv)
    return dq, dk, dv


def _like(tensor: Tensor) -> Tensor:
    """Allocate a result, strided as `tensor` if the elements of a head are contiguous: the kernel needs that."""
    return torch.empty_like(tensor) if _is_taken(tensor) else tensor.new_empty(tensor.shape)


def _is_taken(tensor: Tensor) -> bool:
    return tensor.stride(-1) == 1 or tensor.shape[-1] == 1


def _by_head(drops: AttentionDrops) -> AttentionDrops:
    """Hashes of queries as [N,1,L] and of keys as [N,H,S + _TILE]: the kernel reads whole tiles of keys."""
    keys_NHS = F.pad(drops.keys.transpose(1, 2), (0, _TILE)).contiguous()
    return AttentionDrops(drops.queries.unsqueeze(1), keys_NHS, drops.p)


def _shape(
    q_NHLD: Tensor, k_NGSD: Tensor, rule: AttentionParams, offset: int, cu_seqlens: Tensor | None,
    drops: AttentionDrops | None = None,
) -> _Shape:  # fmt: skip
    rows, heads, queries, size = q_NHLD.shape
    shared, keys = k_NGSD.shape[1:3]
    assert heads % shared == 0, f"{heads} query heads do not share {shared} key/value heads"
    bounds = None
    if cu_seqlens is not None:
        assert rows == 1, "documents lie in one row"
        assert cu_seqlens.dtype == torch.int32 and cu_seqlens.is_contiguous(), "bounds: int32, one after the other"
        rows, bounds = len(cu_seqlens) - 1, cu_seqlens.data_ptr()
    return _Shape(
        bounds, rows, heads, shared, queries, keys, size, offset, rule.window or 0,
        rule.scale, rule.softcap or 0.0, q_NHLD.dtype == torch.bfloat16, torch.get_num_threads(),
        *_dropping(drops, heads, queries, keys),
    )  # fmt: skip


def _dropping(drops: AttentionDrops | None, heads: int, queries: int, keys: int) -> tuple[_Tensor, _Tensor, int, float]:
    """Fields of a shape. `drops`: by head."""
    if drops is None:
        return _Tensor(), _Tensor(), 0, 1.0
    assert drops.queries.shape[2] == queries and drops.keys.shape[1:] == (heads, keys + _TILE), "drops of other tokens"
    return _passed(drops.queries), _passed(drops.keys), drop_below(drops.p), kept_scale(drops.p)


def _passed(tensor: Tensor) -> _Tensor:
    return _Tensor(tensor.data_ptr(), *tensor.stride()[:3])


def _call(name: str, shape: _Shape, *tensors: Tensor) -> None:
    library = _library()
    assert isinstance(library, ctypes.CDLL), library
    types = [tensor.dtype for tensor in tensors]
    types.remove(torch.float32)  # that of the log-sum-exp
    assert len(set(types)) == 1, f"{name} takes one type, not {types}"
    held = [tensor if _is_taken(tensor) else tensor.contiguous() for tensor in tensors]
    passed = [_passed(tensor) for tensor in held]
    function: Callable[..., int] = getattr(library, name)
    if function(ctypes.byref(shape), *map(ctypes.byref, passed)):
        raise MemoryError(f"no memory for attention over {shape.queries:,} queries in {shape.heads} heads")


@cache
def _library() -> ctypes.CDLL | str:
    """The compiled kernel, or why there is none."""
    sources = [path.read_text(encoding="utf-8") for path in (SOURCE, HEADER)]
    return library_or_lack(LIBRARY, (*sources, _OPTIONS, _machine(), os.name), build=_build)


def _machine() -> str:
    """Describe the instructions of this machine's CPU: different machines may share a home folder."""
    lines = cpuinfo().splitlines()
    if not lines:
        return f"{platform.machine()} {platform.processor()}"
    named = [line for line in lines if line.partition("\t")[0].rstrip(" :") in ("flags", "Features", "model name")]
    return f"{platform.machine()} {sorted(set(named))}"


def _build(library: Path) -> None:
    for machine in _MACHINES:
        try:
            compile_library([str(SOURCE)], library, [machine, *_OPTIONS])
            _try(library)
            break
        except UnusableCompiler:
            raise
        except UserError:
            if machine == _MACHINES[-1]:
                raise


def _try(library: Path) -> None:
    """Raise `UnusableCompiler` if the library cannot be used, `RunFailed` if it does not run on this CPU. A compiler on
    another machine uses that machine's instructions, which would end this process: the trial is another one."""
    command = [sys.executable, "-P", "-S", "-c", _TRIAL, str(library)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace")
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        raise RunFailed(f"what {compiler()} compiled does not run on this CPU ({name})")
    if done.returncode:
        raise UnusableCompiler(
            f"what {compiler()} compiled cannot be used: {(done.stderr.strip() or 'no memory').splitlines()[-1]}"
        )
