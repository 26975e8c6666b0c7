"""The CPU of this machine, as Linux describes it."""

from pathlib import Path

_FILE = Path("/proc/cpuinfo")


def cpuinfo() -> str:
    """Contents of `/proc/cpuinfo`; "" if it does not exist."""
    return _FILE.read_text(encoding="utf-8", errors="replace") if _FILE.exists() else ""
