"""The rooms of `src/`: each imports only from those before it, so that no two need each other; and none asks which
parallelism is on, but the plan of it and the parallelism itself."""

import ast
import importlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from fivefold.parallel.layout import OF_PARTS, PARTS

ROOT = Path(__file__).parents[1] / "src" / "fivefold"
# Each package, or module of the root, imports only from those to its left, anywhere in its code.
TRAINS = {
    "core", "hardware", "config", "data", "torch_internals", "ops", "models", "parallel", "checkpoint", "launch",
    "generation", "training", "own_loop",
}  # fmt: skip
ORDER = [
    *("core", "hardware", "config", "report", "data", "convert", "torch_internals", "ops", "models", "parallel"),
    *("planner", "checkpoint", "launch", "generation", "training", "own_loop", "evaluation", "verification"),
    *("comparison", "jobs", "rehearsal", "calibration", "doctor", "api", "cli"),
]
ASKS_THE_PLANNER = "training/advice.py"  # inside functions: what a run does not ask is not loaded
# The layout, its keys and their values, and an adapter's: these files of parallel/ import core and each other alone,
# and every room but core may import them.
LAYOUT = {
    *("parallel.layout", "parallel.legality", "parallel.fp8.recipes", "parallel.recompute.policy"),
    "parallel.adapters.settings",
} | {f"parallel.{file.parent.name}.keys" for file in ROOT.glob("parallel/*/keys.py")}
FACES = {"__init__.py", "__main__.py"}  # of the root: what they import is what they are for
WITHOUT_TORCH = "core", "config", "report"

# Who asks whether a parallelism is on: those that say what a layout may be, and what it is to a model and a rank; and
# those that choose or show a layout. The parallelisms themselves do nothing on an axis of one rank.
SETTLE = {
    "core", "config", "layout.py", "keys.py", "plan.py", "lower.py", "placement.py", "spec.py", "ranks.py",
    "shard_rules.py",
}  # fmt: skip
SHOW = {"doctor", "record.py", "planner"}
REFUSE = {"guard.py"}  # a call of a model of which this rank has some layers
DEGREES = {"tp", "cp", "pp", "ep", "etp"}
FOLDS = {"tensor", "context", "pipeline", "experts", "balance", "partition", "cp_method", "staged"}

# Files that name fp8 outside of its folder.
NAME_FP8 = {
    *(f"parallel/{name}.py" for name in ("features", "layout", "lower")),  # lists of all
    "parallel/linears/runtime.py",  # products of linears
    *("training/header.py", "verification/reference.py"),  # the same: lines of a header, what a reference does by hand
    "parallel/adapters/spec.py",  # a rule of the reference's pages, in words
    *("hardware/chip.py", "planner/timing.py"),  # rates and bytes by dtype
    *("torch_internals.py", "models/hf_internals.py"),  # interfaces of torch and transformers
    *("api.py", "cli/layouts.py", "comparison/configurations.py"),  # an example for users
}


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
    assert rooms - {"__pycache__", "pages"} == set(ORDER)


def test_imports_go_one_way(subtests: pytest.Subtests) -> None:
    for room in ORDER:
        with subtests.test(msg=room):
            allowed = {*ORDER[: ORDER.index(room) + 1]}
            own = [(place, name.split(".")) for place, name in _imports(ROOT / room) if name.startswith("fivefold")]
            own = [(place, name) for place, name in own if room == "core" or not _is_of_layout(".".join(name))]
            assert [f"{place} imports {'.'.join(name)}" for place, name in own if not {*name[1:2]} <= allowed] == []


def _is_of_layout(name: str) -> bool:
    return any(f"{name}.".startswith(f"fivefold.{module}.") for module in LAYOUT)


def test_the_layout_imports_core_alone() -> None:
    assert len(LAYOUT) > 10
    for module in sorted(LAYOUT):
        names = [name for _, name in _imports(ROOT / module.replace(".", "/"))]
        heavy = [name for name in names if name.split(".")[0] in ("torch", "transformers", "numpy", "pydantic")]
        assert heavy + [
            name
            for name in names
            if name.startswith("fivefold") and not (name.startswith("fivefold.core.") or _is_of_layout(name))
        ] == []  # fmt: skip


def test_every_feature_with_keys_is_a_part_of_the_layout() -> None:
    assert {part.__module__ for part in PARTS} == {f"fivefold.{name}" for name in LAYOUT if name.endswith(".keys")}
    names = Counter(name for part in PARTS for name in vars(part) if not name.startswith("__"))
    assert {name for name, times in names.items() if times > 1} <= {*OF_PARTS}  # else one would hide the other


def test_what_trains_imports_no_tool() -> None:
    tools = {*ORDER} - TRAINS - {"api", "cli"}
    assert {"planner", "verification", "rehearsal", "comparison", "doctor", "report"} <= tools
    asked = [
        f"{place} imports {name}"
        for room in sorted(TRAINS)
        for place, name in _imports(ROOT / room)
        if name.startswith("fivefold.") and name.split(".")[1] in tools
    ]
    assert [line for line in asked if not line.startswith(ASKS_THE_PLANNER)] == []


@pytest.mark.full
def test_a_run_loads_no_tool(tmp_path: Path) -> None:
    code = (
        "import sys, fivefold.training.run, fivefold.training.launch, fivefold.own_loop\n"
        f"tools = {sorted({*ORDER} - TRAINS - {'api', 'cli'})}\n"
        "print([name for name in sys.modules if name.startswith('fivefold.') and name.split('.')[1] in tools])"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_files_do_not_import_in_circles() -> None:
    """Not for the name of a type either: to be read, one of them asks for all."""
    modules = {".".join(file.relative_to(ROOT).with_suffix("").parts): file for file in ROOT.rglob("*.py")}
    modules = {name.removesuffix(".__init__"): file for name, file in modules.items()}
    needs = {name: _needs(file, modules.keys()) - {name} for name, file in modules.items()}
    assert {name for name in needs if name in _reached(name, needs)} == set()


def _reached(first: str, needs: Mapping[str, set[str]]) -> set[str]:
    """All modules that one needs, and those that they need; itself only in a circle."""
    found, left = set[str](), [first]
    while left:
        new = needs[left.pop()] - found
        found |= new
        left += new
    return found


def _needs(file: Path, modules: Collection[str]) -> set[str]:
    """The modules that a file imports, for types alone too."""
    found = set[str]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fivefold"):
            package = (node.module or "").removeprefix("fivefold").lstrip(".")
            named = {f"{package}.{each.name}".lstrip(".") for each in node.names}
            found |= {each if each in modules else package for each in named}
    return found & {*modules}


def test_fp8_is_named_in_its_folder() -> None:
    files = [file for file in ROOT.rglob("*.py") if ROOT / "parallel" / "fp8" not in file.parents]
    naming = {str(file.relative_to(ROOT)) for file in files if "fp8" in file.read_text(encoding="utf-8").lower()}
    assert naming == NAME_FP8


def test_no_module_imports_what_another_keeps_for_itself() -> None:
    assert [place for place, name in _imports(ROOT) if re.match(r"fivefold\..*\._[a-z]", name)] == []


def test_the_torch_free_rooms_never_name_torch(subtests: pytest.Subtests) -> None:
    for room in WITHOUT_TORCH:
        with subtests.test(msg=room):
            imported = _imports(ROOT / room)
            assert [place for place, name in imported if name.split(".")[0] in ("torch", "transformers")] == []


def test_what_features_decide_names_no_torch() -> None:
    specs = {str(file.relative_to(ROOT)) for name in ("spec", "memory") for file in ROOT.glob(f"parallel/*/{name}.py")}
    assert len(specs) > 10
    imported = _imports(ROOT / "parallel")
    heavy = {place.partition(":")[0] for place, name in imported if name.split(".")[0] in ("torch", "transformers")}
    assert specs & heavy == set()


def _asks(node: ast.AST) -> bool:
    """Whether code asks if a parallelism is on: `layout.tp > 1`, `state.pipeline is None`, `if state.pipeline`."""
    if isinstance(node, ast.Compare) and isinstance(node.comparators[0], ast.Constant):
        value = node.comparators[0].value
        return (value is None and _is_fold(node.left)) or (value == 1 and _last_name(node.left) in DEGREES)
    tests = [getattr(node, "test", None), *getattr(node, "ifs", ())]
    tests += node.values if isinstance(node, ast.BoolOp) else []
    return any(_is_fold(each.operand if isinstance(each, ast.UnaryOp) else each) for each in tests)


def _is_fold(node: ast.AST | None) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in FOLDS


def _last_name(node: ast.AST) -> str:
    """`tp` of `tp`, `layout.tp` and `state.plan.layout.tp`."""
    return str(getattr(node, "attr", getattr(node, "id", "")))


def test_a_parallelism_alone_knows_whether_it_is_on() -> None:
    asked = {}
    for file in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        asked[file.relative_to(ROOT)] = [node.lineno for node in ast.walk(tree) if _asks(node)]
    elsewhere = {
        str(file): lines for file, lines in asked.items()
        if lines and not {*file.parts} & {*SETTLE, *SHOW, *REFUSE}
    }  # fmt: skip
    assert elsewhere == {}
    assert (
        sum(len(lines) for file, lines in asked.items() if "planner" not in file.parts) <= 36
    )  # and there they are few


@pytest.mark.full
def test_the_plan_of_a_layout_loads_no_torch() -> None:
    script = "import sys, fivefold.doctor.model; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)


@pytest.mark.full
def test_what_stands_before_a_run_loads_no_torch() -> None:
    script = (
        """
import sys, pkgutil, importlib, fivefold, fivefold.cli.train, fivefold.data.prepare, fivefold.training.launch
import fivefold.verification
import fivefold.comparison, fivefold.generation, fivefold.calibration
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


def test_the_files_and_names_of_the_pages_on_the_code_are_there() -> None:
    """A file under the root, `docs/`, `src/fivefold/`, a room of it or a feature's folder; a name anywhere in the code.
    What has a space is a command or a line of code; a file with a word in capitals is one to write."""
    top = ROOT.parents[1]
    pages = [top / "docs" / "explain" / f"{name}.md" for name in ("architecture", "extending", "tests")]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    page = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    files = [
        file for folder in ("src", "tests") for file in sorted((top / folder).rglob("*.py")) if file != Path(__file__)
    ]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files)
    folders = [top, ROOT, *(ROOT / room for room in ORDER), ROOT / "parallel" / "tensor"]
    for word in re.findall(r"`([^`\n]+)`", page):
        if " " in word or ("/" in word and re.search("NAME|VERB", word)):
            continue
        if "/" in word or word.endswith((".py", ".md", ".toml")):
            assert any((folder / word).exists() for folder in folders), f"{word} is no file"
        else:
            leaf = word.partition("(")[0].rpartition(".")[2]
            assert leaf in code, f"{word} is nowhere in the code"


def test_the_package_has_its_public_names_alone() -> None:
    import fivefold

    assert [name for name in dir(fivefold) if not name.startswith("_")] == sorted(fivefold.__all__)
    own = {name for name, value in vars(fivefold).items() if not isinstance(value, ModuleType)}
    assert {name for name in own if not name.startswith("_")} <= {*fivefold.__all__}


def test_benchmarks_and_tools_import_what_is_there() -> None:
    """Most of them run in a campaign alone."""
    missing = set()
    for file in sorted(each for folder in ("benchmarks", "tools") for each in (ROOT.parents[1] / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fivefold"):
                module = importlib.import_module(str(node.module))
                missing |= {
                    f"{file.name}: {node.module}.{alias.name}"
                    for alias in node.names
                    if not hasattr(module, alias.name)
                    and not (hasattr(module, "__path__") and find_spec(f"{node.module}.{alias.name}"))
                }
    assert not missing
