"""What searches have found, kept between starts: one small file for each question, in the cache. No torch.

A file has the layouts that were found, and not their numbers, which are computed again. Its name is made from all that
the answer follows from, the planner's own code among it. A file that is damaged, or that stands under another's name,
is not believed: it has a checksum, and says its name.
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
from fivefold.core.layout import Layout
from fivefold.planner.estimate import Estimate, Step, Workload
from fivefold.planner.price import PriceList
from fivefold.planner.search import Found, search

TOP = 10  # layouts that are asked for where nobody says how many
MOST_FILES = 1000  # of about a kilobyte each: the oldest go first
CODE = ("core", "models", "parallel", "planner")  # packages that an answer depends on


def answer(
    prices: PriceList, workload: Workload, *, top: int = TOP, given: Mapping[str, Any] | None = None, anew: bool = False
) -> Found:
    """What `search` finds: read where it is known, else found and kept. `anew`: what is known is not read. A cache that
    is read-only or full keeps nothing: nothing depends on it."""
    try:
        file = cache_root() / "plans" / f"{_key(prices, workload, top, given or {})}.json"
    except UserError:  # there is no place for a cache
        return search(prices, workload, top=top, given=given)
    if not anew:
        with suppress(ValueError, TypeError, LookupError, UserError):  # none, damaged, or of other code
            return _read(file, prices, workload)
    found = search(prices, workload, top=top, given=given)
    with suppress(UserError):
        write_atomically(file, signed({"name": file.name, **_to_json(found)}, indent=None))
        _tidy(file.parent)
    return found


def _key(prices: PriceList, workload: Workload, top: int, given: Mapping[str, Any]) -> str:
    engine = {**vars(prices.engine), "split": prices.engine.split.__qualname__}
    about = prices.facts.to_json(), asdict(prices.cluster), engine, asdict(workload), top, dict(given)
    return key_of(_code(), np.__version__, *about)


@cache
def _code() -> str:
    root = Path(__file__).parents[1]
    files = [file for package in CODE for file in sorted((root / package).rglob("*.py"))]
    return key_of([file.read_text(encoding="utf-8") for file in files])


def _to_json(found: Found) -> dict[str, Any]:
    return {
        "best": [str(each.layout) for each in found.best],
        "fastest": found.fastest and str(found.fastest.layout),
        "options": found.options,
        "legal": found.legal,
        "fitting": found.fitting,
        "closest": found.closest and str(found.closest.layout),
    }


def _read(file: Path, prices: PriceList, workload: Workload) -> Found:
    """Raises `ValueError`, `TypeError`, `LookupError` or `UserError` for a file that is not such an answer."""
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
            with suppress(OSError):  # a folder of somebody's stays, and the others go
                file.unlink()
