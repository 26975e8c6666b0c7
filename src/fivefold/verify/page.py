"""being written on another branch"""

from typing import Any


def write_page(report: Any, path: str) -> None: ...
