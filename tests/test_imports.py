"""The rooms of `src/`: each imports only from those before it, so that no two need each other."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1] / "src" / "fivefold"
# Each package, or module of the root, imports only from those to its left, anywhere in its code.
ORDER = [
    *("core", "config", "report", "data", "torch_internals", "ops", "models", "parallel", "checkpoint", "launch"),
    *("generation", "training", "verification", "doctor", "own_loop", "api", "cli"),
]
FACES = {"__init__.py", "__main__.py"}  # of the root: what they import is what they are for
WITHOUT_TORCH = "core", "config", "report"


def _imports(folder: Path) -> Iterator[tuple[str, str]]:
    """(`file:line`, imported name) of every import statement, those inside functions included."""
    for file in sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{name}" for name in names]
            yield from ((f"{file.relative_to(ROOT)}:{node.lineno}", name) for name in names)


def test_every_room_has_its_place_in_the_order() -> None:
    rooms = {path.stem for path in ROOT.iterdir() if path.is_dir() or (path.suffix == ".py" and path.name not in FACES)}
    assert rooms - {"__pycache__"} == set(ORDER)


@pytest.mark.parametrize("room", ORDER)
def test_imports_go_one_way(room: str) -> None:
    allowed = {*ORDER[: ORDER.index(room) + 1]}
    own = [(place, name.split(".")) for place, name in _imports(ROOT / room) if name.startswith("fivefold")]
    assert [f"{place} imports {'.'.join(name)}" for place, name in own if not {*name[1:2]} <= allowed] == []


def test_no_module_imports_what_another_keeps_for_itself() -> None:
    assert [place for place, name in _imports(ROOT) if re.match(r"fivefold\..*\._[a-z]", name)] == []


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_the_torch_free_rooms_never_name_torch(room: str) -> None:
    assert [place for place, name in _imports(ROOT / room) if name.split(".")[0] in ("torch", "transformers")] == []


def test_the_plan_of_a_layout_loads_no_torch() -> None:
    script = "import sys, fivefold.doctor.plan; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_what_stands_before_a_run_loads_no_torch() -> None:
    script = (
        """
import sys, pkgutil, importlib, fivefold, fivefold.cli.train, fivefold.data.prepare, fivefold.training.launch
for room in ("core", "config", "report"):
    for module in pkgutil.walk_packages([f"{fivefold.__path__[0]}/{room}"], f"fivefold.{room}."):
        importlib.import_module(module.name)
try:
    fivefold.cli.main(["train", "--help"])
except SystemExit:
    pass
"""
        + "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, stdout=subprocess.DEVNULL)
