"""Versions of the software, read from the packages' metadata without importing them, and the CPU of this machine."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_SHOWN = ("fivefold", "torch", "transformers")


def version_of(package: str) -> str:
    """The installed version of a package, `not installed` when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> dict[str, str]:
    """Versions of the software behind a run, fivefold first: name -> version."""
    return {**{package: version_of(package) for package in _SHOWN}, "Python": platform.python_version()}


def version_line() -> str:
    """`fivefold 0.1.0 (torch 2.13.0, transformers 5.23.0, Python 3.11.7)`."""
    own, *others = (f"{name} {number}" for name, number in versions().items())
    return f"{own} ({', '.join(others)})"


_FILE = Path("/proc/cpuinfo")


def cpuinfo() -> str:
    """Contents of `/proc/cpuinfo`; "" if it does not exist."""
    return _FILE.read_text(encoding="utf-8", errors="replace") if _FILE.exists() else ""


def cores() -> int:
    """Cores that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # not on macOS
    return len(affinity(0)) if affinity else os.cpu_count() or 1
