"""The pages of docs/reference/ are what the code says, and the code says all of it."""

import re
from pathlib import Path

from tools import reference

import fivefold
from fivefold.config import keys
from fivefold.core import history
from fivefold.core.run_folder import METRICS, RUN_FILES
from fivefold.parallel.layout import KEYS
from fivefold.training import record
from fivefold.training.objectives import METRICS as OF_PAIRS
from fivefold.training.objectives import RATED_METRICS

SOURCE = Path(fivefold.__file__).parent


def test_every_page_is_what_the_code_says() -> None:
    """Where it is not: python tools/reference.py"""
    assert reference.stale() == []
    assert {file.name for file in reference.FOLDER.glob("*.md")} == reference.PAGES.keys()


def test_every_rule_of_a_layout_has_an_example() -> None:
    assert reference.untouched() == []


def test_everything_has_a_description() -> None:
    assert [key.name for key in keys() if not key.help] == []
    assert [name for name, key in KEYS.items() if not key.help] == []
    for name, text in reference.pages().items():
        assert re.findall(r"^\| [^|]*\|.*\|  \|$", text, re.MULTILINE) == [] or name in ("commands.md", "python.md")
    options = re.findall(r"^\| `(--[\w-]+)`.*\|  \|$", reference.commands_page(), re.MULTILINE)
    assert options == []


def test_every_metric_of_the_code_is_described() -> None:
    found = set()
    for file in [*(SOURCE / "training").rglob("*.py"), *(SOURCE / "parallel" / "balance").glob("*.py")]:
        text = file.read_text(encoding="utf-8")
        found |= set(re.findall(r'"((?:train|perf|memory|eval|moe|rewards|logps)/[a-z_]+)"', text))
    assert len(found) > 20
    assert found <= METRICS.keys()
    assert {*OF_PAIRS, *RATED_METRICS} <= METRICS.keys()
    assert all("; " in said for said in METRICS.values())


def test_every_file_of_a_run_that_has_a_name_is_described() -> None:
    assert {history.NAME, record.NAME} <= RUN_FILES.keys()
