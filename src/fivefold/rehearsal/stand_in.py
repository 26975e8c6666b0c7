"""The stand-in for the CUDA driver: its requirements, its build for the installed torch, and the environment of a
process that sees it. No torch here: it is built before torch is imported.

`driver/driver.c` has the functions that must do something. Every other name that torch's libraries import from CUDA,
cuBLAS and NCCL is generated as a function that returns 0: those names differ between versions of torch.
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from runpy import run_path

from fivefold.core.c_library import INSTALL, compile_library, compiler, kept_library
from fivefold.core.errors import RunFailed, UserError
from fivefold.core.units import GIB
from fivefold.hardware.chip import Chip
from fivefold.launch.world import set_for_cuda

SOURCE = Path(__file__).with_name("driver") / "driver.c"
LIBRARY = "libcuda.so.1"  # the name under which torch and Triton look for the driver
MONITOR = "libnvidia-ml.so.1"  # and for NVIDIA's management library: here the same file
INSTALL_TORCH = "pip install torch, whose usual build for Linux has CUDA, in an environment of its own"
# Libraries of torch that call CUDA, and the names that they import. cuDNN's computing routines are not called.
_LIBRARIES = ("c10_cuda", "torch_cuda", "torch_python", "torch_cuda_linalg", "torch_nvshmem", "caffe2_nvrtc")
_TAKEN = re.compile(r"(__cuda|cuda|nccl|cublas|cu[A-Z]|cudnn(Create|Destroy|SetStream|GetVersion)$)\w*")
_NOT_TAKEN = re.compile(r"cuFile")
_COMPUTES = re.compile(r"cublas\w*(gemm|Gemm|gemv|trsm|Dot|dot|getrf|getrs|geqrf|gels)")
_MONITORS = re.compile(rb"nvml[A-Z]\w+(?=\0)")  # these are looked up by name, as strings
_DRIVER_CALL = re.compile(r"CUDAAPI\s+(cu[A-Z]\w*)\s*\(|#define\s+(cu[A-Z]\w*)\s+\w+")
_DEFINED = re.compile(r"^[\w *]*?\b(\w+)\(", re.MULTILINE)  # a function of `driver.c`


@dataclass(frozen=True)
class Torch:
    """The installed torch: its folder, and the CUDA version that it was built with ("13.0"; None: without)."""

    folder: Path
    version: str
    cuda: str | None

    @classmethod
    def installed(cls) -> "Torch | None":
        """The installed torch; None if there is none."""
        origin = getattr(importlib.util.find_spec("torch"), "origin", None)
        if origin is None:
            return None
        folder = Path(origin).parent
        says = run_path(str(folder / "version.py"))
        return cls(folder, says["__version__"], says.get("cuda"))

    @cached_property
    def includes(self) -> list[Path]:
        """Folders that contain `driver_types.h`, torch's own CUDA first; empty if there are no headers. NVIDIA's
        package lacks some that Triton has."""
        site = self.folder.parent
        places = [*sorted(site.glob("nvidia/*/include")), site / "triton/backends/nvidia/include"]
        places += [Path(os.environ[name]) / "include" for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
        return [place for place in places if (place / "driver_types.h").is_file()]

    @property
    def libraries(self) -> list[Path]:
        """Its libraries that call CUDA."""
        return [path for name in _LIBRARIES if (path := self.folder / "lib" / f"lib{name}.so").is_file()]


@dataclass(frozen=True)
class Lack:
    """A missing requirement of a full rehearsal, and how to get it."""

    what: str
    fix: str


def lacking() -> list[Lack]:
    """List what is missing of: Linux, a torch built with CUDA, its headers, a C compiler."""
    torch = Torch.installed()
    lacks = []
    if sys.platform != "linux":
        lacks.append(Lack("this is not Linux", "rehearse on a Linux machine"))
    if torch is None or torch.cuda is None:
        lacks.append(Lack("this torch is built without CUDA", INSTALL_TORCH))
    elif not torch.includes:
        lacks.append(Lack("the headers of CUDA are missing", "pip install nvidia-cuda-runtime"))
    if compiler() is None:
        lacks.append(Lack("there is no C compiler", INSTALL))
    return lacks


def stands_for(chip: Chip) -> bool:
    """True if this can stand for `chip`: a CUDA device with kernels in torch. AMD numbers its chips differently."""
    return tuple(chip.capability) in SHARED and not chip.name.startswith("MI")


def library() -> Path:
    """Build the stand-in for the installed torch into the cache, at first use.

    Raises `UserError` if a requirement is missing, and `RunFailed` if it does not compile.
    """
    if lacks := lacking():
        raise UserError(
            f"no stand-in for the CUDA driver: {lacks[0].what}", fix=lacks[0].fix, more="fivefold docs howto/rehearse"
        )
    torch = Torch.installed()
    assert torch is not None
    key = (torch.version, str(torch.folder), SOURCE.read_text(encoding="utf-8"), Path(__file__).read_text())

    def load(library: Path) -> Path:
        library.with_name(MONITOR).stat()  # raises if it is missing: torch would find no driver
        return library

    return kept_library("rehearsal", LIBRARY, key, build=partial(_build, torch), load=load)


def _build(torch: Torch, library: Path) -> None:
    others = library.with_name("others.c")
    others.write_text(rest(torch, SOURCE.read_text(encoding="utf-8")), encoding="utf-8")
    sources = [str(SOURCE), str(others)]
    defined = [f"-DCUDART={_number(torch.cuda or '', 1000, 10)}", f"-DNCCL={_nccl(torch)}"]
    options = ["-O1", "-w", "-fno-builtin", *(f"-I{folder}" for folder in torch.includes), *defined]
    options += [f"-Wl,-soname,{LIBRARY}", "-ldl", "-lpthread"]
    compile_library(sources, library, options)
    library.with_name(MONITOR).symlink_to(LIBRARY)


def rest(torch: Torch, source: str) -> str:
    """C source: a function for every name that torch's libraries import and that `source` does not define."""
    taken = {name for path in torch.libraries for name in undefined(path)}
    taken = {name for name in taken if _TAKEN.fullmatch(name) and not _NOT_TAKEN.match(name)}
    taken |= {name.decode() for path in torch.libraries[:1] for name in _MONITORS.findall(path.read_bytes())}
    # Torch and Triton look up the driver's functions by name at run time, so all of them are defined.
    for header in (folder / "cuda.h" for folder in torch.includes[:1]):
        taken |= {next(filter(None, found)) for found in _DRIVER_CALL.findall(header.read_text(encoding="utf-8"))}
    return "int rehearsal_blas(void);\n" + "".join(
        f"int {name}(void) {{ return {'rehearsal_blas()' if _COMPUTES.match(name) else '0'}; }}\n"
        for name in sorted(taken - set(_DEFINED.findall(source)))
    )


def _number(version: str, *factors: int) -> int:
    """Number of a version: "13.0" with the factors 1000 and 10 is 13000."""
    return sum(int(part) * factor for part, factor in zip(version.split("."), factors, strict=False))


def _nccl(torch: Torch) -> int:
    """Version of NCCL in the format of `ncclGetVersion`, from the installed header."""
    for header in torch.folder.parent.glob("nvidia/nccl/include/nccl.h"):
        if found := re.search(r"NCCL_VERSION_CODE\s+(\d+)", header.read_text(encoding="utf-8", errors="replace")):
            return int(found[1])
    return 22703


def environment(chip: Chip, devices: int, *, base: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment of a process that sees `devices` of a chip."""
    path = library()
    major, minor = chip.capability
    own = {
        "LD_PRELOAD": str(path),
        "LD_LIBRARY_PATH": ":".join(filter(None, (str(path.parent), base.get("LD_LIBRARY_PATH")))),
        "FIVEFOLD_CHIP_NAME": f"NVIDIA {chip.name}",
        "FIVEFOLD_CHIP_MEMORY": chip.memory_bytes,
        "FIVEFOLD_CHIP_CONTEXT": int(chip.context_gib * GIB),
        "FIVEFOLD_CHIP_DEVICES": devices,
        "FIVEFOLD_CHIP_SMS": chip.sms,
        "FIVEFOLD_CHIP_MAJOR": major,
        "FIVEFOLD_CHIP_MINOR": minor,
        "FIVEFOLD_CHIP_SHARED": SHARED.get((major, minor), 101376),
        "TORCH_NCCL_ENABLE_MONITORING": 0,  # the monitor would end a process whose collectives "hang"
        "OMP_NUM_THREADS": 1,
        # Compiled code is tuned by timing kernels that do not run: no other process may find it.
        "TORCHINDUCTOR_CACHE_DIR": path.with_name("inductor"),
        "TRITON_CACHE_DIR": path.with_name("triton"),
        "TORCHINDUCTOR_COMPILE_THREADS": 1,
    }
    env = {**base, **{name: str(value) for name, value in own.items()}}
    set_for_cuda(env)  # set here: watching a rank starts CUDA before it joins its world
    return env


# Bytes of shared memory of an SM, by compute capability (CUDA C programming guide, "Technical Specifications").
SHARED = {
    (8, 0): 167936,
    (8, 6): 102400,
    (8, 9): 102400,
    (9, 0): 233472,
    (10, 0): 233472,
    (10, 3): 233472,
}


def undefined(library: Path) -> frozenset[str]:
    """Names that `library` imports from other libraries, by `nm`, which comes with a compiler. Raises `RunFailed`."""
    asked = ["nm", "--dynamic", "--undefined-only", "--format=posix", str(library)]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or str(error)
        raise RunFailed(f"the names that torch imports cannot be read: {said.strip()}", fix=INSTALL) from error
    return frozenset(line.split()[0].partition("@")[0] for line in done.stdout.splitlines())


if __name__ == "__main__":  # in `make rehearsal`, whose tests would be skipped one by one
    sys.exit("\n".join(f"{lack.what}: {lack.fix}" for lack in lacking()) or None)
