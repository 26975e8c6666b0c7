"""What Linux says of this machine's CPU."""

from pathlib import Path

_FILE = Path("/proc/cpuinfo")


def cpuinfo() -> str:
    """`/proc/cpuinfo`; "" where there is none."""
    return _FILE.read_text(encoding="utf-8", errors="replace") if _FILE.exists() else ""
