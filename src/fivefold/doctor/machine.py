"""Findings about this machine: versions, devices, memory, and what is missing or would help a training run.

A finding is `ok`, `help` (fivefold works, something would make it better), `missing` (fivefold does not work), or of
ranks `failed` (one differs).
"""

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fivefold.core.c_library import INSTALL
from fivefold.core.cache import cache_root
from fivefold.core.code_cache import code_folder
from fivefold.core.errors import UserError, first_line
from fivefold.core.system import cores, cpuinfo
from fivefold.core.units import GIB
from fivefold.launch.memory import room
from fivefold.report.findings import Report

State = Literal["ok", "help", "missing", "failed"]
MIN_PYTHON = (3, 11)
SLOW_IMPORT = 10.0  # seconds; 1 to 3 from a local disk, once cached
OPTIONAL = {
    "pyarrow": "parquet files",
    "datasets": "data of the Hugging Face hub",
    **{name: f"log.to: [jsonl, {name}]" for name in ("tensorboard", "wandb", "mlflow", "trackio")},
}
# Instructions of a CPU, the best first, and the speed of bf16 with them.
BF16 = {
    "amx_bf16": "AMX matrix units: fast",
    "avx512_bf16": "AVX-512 bf16 instructions",
    "avx512bw": "emulated with AVX-512: no faster than fp32",
}


@dataclass(frozen=True)
class Finding:
    """One finding: its subject, its state, what was found, and what would help."""

    what: str
    state: State
    found: str
    advice: str = ""


def examine_machine() -> Report[Finding]:
    """Look at everything; `ok` is false if something that fivefold needs is missing."""
    findings = tuple(finding for look in LOOKS for finding in look())
    missing = [finding.what for finding in findings if finding.state == "missing"]
    closing = f"missing: {', '.join(missing)}" if missing else "all that fivefold needs is here; next: fivefold train"
    return Report(title="fivefold doctor", rows=findings, ok=not missing, closing=closing)


def _python() -> Iterator[Finding]:
    version = platform.python_version()
    if sys.version_info >= MIN_PYTHON:
        yield Finding("python", "ok", f"{version} on {platform.system()} {platform.machine()}")
    else:
        yield Finding("python", "missing", version, "fivefold needs Python 3.11 or newer")


def _packages() -> Iterator[Finding]:
    """Check the versions of the packages that fivefold declares against the declared bounds."""
    for requirement in importlib.metadata.requires("fivefold") or []:
        if "extra ==" in requirement:
            continue
        name = re.split(r"[<>=!~;\s\[]", requirement, maxsplit=1)[0]
        bounds = requirement.removeprefix(name).strip()
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Finding(name, "missing", "not installed", f"pip install '{requirement}'")
            continue
        if unmet := [bound for bound in bounds.split(",") if bound and not _meets(version, bound)]:
            yield Finding(name, "missing", f"{version}, not {unmet[0]}", f"pip install '{requirement}'")
        elif name in ("torch", "transformers"):
            yield Finding(name, "ok", version)


def _meets(version: str, bound: str) -> bool:
    """True if `2.13.0+cpu` meets `>=2.11`; release numbers only."""
    match = re.fullmatch(r"\s*(>=|<=|==|<|>)\s*([\d.]+)\s*", bound)
    if not match:
        return True
    have, want = (_numbers(text) for text in (version, match[2]))
    return {">=": have >= want, "<=": have <= want, "==": have == want, "<": have < want, ">": have > want}[match[1]]


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:3])


def _devices() -> Iterator[Finding]:
    """Check torch by importing it, which takes most of the command's time. Its metadata only have the installed
    version, not whether it loads, sees a GPU, was built with gloo and has the private interfaces that fivefold uses."""
    if not importlib.util.find_spec("torch"):
        return
    is_first, began = "torch" not in sys.modules, time.perf_counter()
    try:
        import torch
    except (ImportError, OSError) as error:  # a library that it was built with may be missing
        yield Finding("torch", "missing", f"does not load: {first_line(error)}", "pip install -c constraints.txt torch")
        return
    if is_first:
        took = time.perf_counter() - began
        advice = "each command waits for it: a disk of this machine is faster than a network's"
        is_slow = took >= SLOW_IMPORT
        yield Finding("import torch", "help" if is_slow else "ok", f"{took:.1f} s", advice * is_slow)
    if not torch.cuda.is_available():
        built = "this torch is built without CUDA" if torch.version.cuda is None else "torch sees no usable GPU"
        yield Finding("gpu", "ok", f"none ({built}): training runs on the CPU")
    else:
        for index in range(torch.cuda.device_count()):
            chip = torch.cuda.get_device_properties(index)
            yield Finding(f"gpu {index}", "ok", f"{chip.name}, {chip.total_memory / GIB:.0f} GiB")
    import torch.distributed as dist

    from fivefold import torch_internals

    if not dist.is_available() or not dist.is_gloo_available():
        yield Finding("distributed", "missing", "torch without gloo", "pip install -c constraints.txt torch")
        return
    if torch.cuda.is_available() and not dist.is_nccl_available():
        yield Finding("distributed", "missing", "gloo, no NCCL", "install a torch with NCCL to use several GPUs")
        return
    yield Finding("distributed", "ok", "gloo and NCCL" if dist.is_nccl_available() else "gloo")
    if not torch_internals.is_supported():
        advice = f"install torch {torch_internals.SUPPORTED}"
        yield Finding("torch's interfaces", "missing", f"torch {torch.__version__} may have moved them", advice)


def _cpu() -> Iterator[Finding]:
    count = cores()
    advice = "" if count > 1 else "two workers share this core: the demo takes twice as long"
    yield Finding("cpu", "ok" if count > 1 else "help", f"{count} cores", advice)
    flags = set(re.findall(r"\w+", cpuinfo()))
    if not flags:
        return
    if found := next((says for flag, says in BF16.items() if flag in flags), None):
        yield Finding("bf16 on the cpu", "ok", found)
    else:
        advice = "set precision.compute: fp32"
        yield Finding("bf16 on the cpu", "help", "no instructions: up to 100 x slower than fp32", advice)


def _memory() -> Iterator[Finding]:
    if memory := room():
        advice = "" if memory.free >= 3 * GIB else "the demo needs about 3 GiB: close something"
        found = f"{memory.free / GIB:.1f} GiB free of {memory.total / GIB:.1f}"
        yield Finding("memory", "help" if advice else "ok", found, advice)
    free = shutil.disk_usage(Path.cwd()).free / GIB
    advice = "" if free >= 2 else "checkpoints go to runs/: make room, or set run.dir"
    yield Finding("disk here", "help" if advice else "ok", f"{free:.1f} GiB free", advice)


def _compiler() -> Iterator[Finding]:
    found = next(filter(None, map(shutil.which, ("c++", "g++", "clang++"))), None)
    if found:
        yield Finding("compiler", "ok", f"{found}, for train.compile on the CPU")
    else:
        yield Finding("compiler", "help", "none", "install g++ to let train.compile speed up the CPU")


def _gpu_kernels() -> Iterator[Finding]:
    """Implementation of attention on a GPU where FlashAttention does not apply."""
    try:
        import torch

        from fivefold.ops import gpu_attention
    except (ImportError, OSError):  # reported by `_devices`
        return
    for index in range(torch.cuda.device_count()):
        name, of = f"attention on gpu {index}", "soft-capped scores, and windows between ranks,"
        if why := gpu_attention.lacks(torch.device("cuda", index), torch.bfloat16, 128, is_capped=True):
            yield Finding(
                name, "help", f"{of} block by block: {why}", "such models train slower (fivefold docs explain/gpu)"
            )
        else:
            yield Finding(name, "ok", f"{of} by FlexAttention, which was tried")


def _kernels() -> Iterator[Finding]:
    """Implementations of products, attention and collectives on the CPU."""
    try:
        from fivefold.ops.cpu import cpu_attention, shared_memory, tuning

        is_slow, lacks, apart = tuning.mkl_is_slow(), cpu_attention.lacks(), shared_memory.lacks()
    except (ImportError, OSError):  # reported by `_devices`
        return
    if is_slow:
        yield Finding("fp32 on the cpu", "ok", "products by oneDNN: MKL does not use this CPU's AVX-512")
    if lacks:
        yield Finding("attention on the cpu", "help", f"by PyTorch: {lacks}", f"{INSTALL}: 2 to 4 times as fast")
    else:
        yield Finding("attention on the cpu", "ok", "by a kernel compiled for this CPU")
    if apart:
        advice = f"{INSTALL}: 3 to 10 times as fast" if "compiler" in apart else ""
        yield Finding("collectives on the cpu", "help" if advice else "ok", f"by gloo: {apart}", advice)
    else:
        yield Finding("collectives on the cpu", "ok", "over shared memory, by a library compiled here")


def _rehearsal() -> Iterator[Finding]:
    """Requirements for `fivefold rehearse` to see memory, kernels and waiting as well."""
    from fivefold.rehearsal.stand_in import lacking

    lacks = lacking()
    if not lacks:
        yield Finding("rehearsal", "ok", "full: a CUDA build of torch, and a C compiler")
    for lack in lacks:
        yield Finding("rehearsal", "help", f"in part: {lack.what}", lack.fix)


def _cache() -> Iterator[Finding]:
    folder = cache_root()
    at = next(path for path in (folder, *folder.parents) if path.exists())
    if os.access(at, os.W_OK):
        yield Finding("cache", "ok", f"{folder}")
    else:
        yield Finding("cache", "missing", f"{folder} cannot be written", "set FIVEFOLD_CACHE to a folder of yours")
    try:
        code = code_folder("kernels")
    except UserError as error:
        yield Finding("compiled code", "help", error.what, error.fix or "")
    else:
        if folder not in code.parents:  # others can write to the cache, or programs cannot run from there
            yield Finding("compiled code", "ok", f"not in the cache, which is not this user's alone: {code.parent}")


def _extras() -> Iterator[Finding]:
    for module, use in OPTIONAL.items():
        if importlib.util.find_spec(module):
            yield Finding(module, "ok", f"here, for {use}")
        else:
            yield Finding(module, "help", "not installed", f"pip install {module}, for {use}")


LOOKS = (_python, _packages, _devices, _cpu, _memory, _compiler, _kernels, _gpu_kernels, _rehearsal, _cache, _extras)
