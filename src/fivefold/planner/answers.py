"""Search results kept between runs: one small file per question, in the cache. No torch.

A file holds the layouts found; their numbers are computed again. Its name is derived from everything that the answer
depends on, including the planner's code. A file that is damaged or stored under another's name is rejected: it has a
checksum and contains its own name.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.core.cache import cache_root, key_of, write_atomically
from fivefold.core.errors import UserError
from fivefold.core.integrity import read_signed, signed
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, Step, Workload
from fivefold.planner.price import PriceList
from fivefold.planner.search import Found, search

TOP = 10  # default number of layouts
MOST_FILES = 1000  # about a kilobyte each; the oldest are deleted first
CODE = ("core", "models", "parallel", "planner")  # packages that an answer depends on


def answer(
    prices: PriceList, workload: Workload, *, top: int = TOP, given: Mapping[str, Any] | None = None, anew: bool = False
) -> Found:
    """Return the result of `search`: read from the cache if known, else searched and stored. `anew`: ignore the cache.
    A read-only or full cache stores nothing, and the result is the same."""
    try:
        file = cache_root() / "plans" / f"{_key(prices, workload, top, given or {})}.json"
    except UserError:  # no folder for a cache
        return search(prices, workload, top=top, given=given)
    if not anew:
        with suppress(ValueError, TypeError, LookupError, UserError):  # missing, damaged, or written by other code
            return _read(file, prices, workload)
    found = search(prices, workload, top=top, given=given)
    with suppress(UserError):
        write_atomically(file, signed({"name": file.name, **_to_json(found)}, indent=None))
        _tidy(file.parent)
    return found


def _key(prices: PriceList, workload: Workload, top: int, given: Mapping[str, Any]) -> str:
    runtime = {**asdict(prices.traits), "whole_logits": prices.whole_logits}
    about = prices.facts.to_json(), asdict(prices.cluster), runtime, asdict(workload), top, dict(given)
    return key_of(_code(), np.__version__, *about)


@cache
def _code() -> str:
    root = Path(__file__).parents[1]
    files = [file for package in CODE for file in sorted((root / package).rglob("*.py"))]
    return key_of([file.read_text(encoding="utf-8") for file in files])


def _to_json(found: Found) -> dict[str, Any]:
    return {
        "best": [str(estimate.layout) for estimate in found.best],
        "fastest": found.fastest and str(found.fastest.layout),
        "options": found.options,
        "legal": found.legal,
        "fitting": found.fitting,
        "closest": found.closest and str(found.closest.layout),
    }


def _read(file: Path, prices: PriceList, workload: Workload) -> Found:
    """Read a stored answer. Raises `ValueError`, `TypeError`, `LookupError` or `UserError` if the file has none."""
    tree = read_signed(file)
    if tree["name"] != file.name:
        raise ValueError(f"{file.name} is that of another question")

    def estimated(layout: str) -> Estimate:
        return Step(prices, Layout.parse(layout), workload).estimate()

    return Found(
        best=tuple(map(estimated, tree["best"])),
        fastest=tree["fastest"] and estimated(tree["fastest"]),
        options=tuple(tree["options"]),
        legal=tree["legal"],
        fitting=tree["fitting"],
        closest=tree["closest"] and estimated(tree["closest"]),
    )


def _tidy(folder: Path) -> None:
    """Keep the newest files."""
    with suppress(OSError):
        for file in sorted(folder.glob("*.json"), key=lambda file: file.lstat().st_mtime)[:-MOST_FILES]:
            with suppress(OSError):  # skip what cannot be deleted, such as a folder
                file.unlink()
