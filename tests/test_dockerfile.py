"""The Dockerfile, taken apart: what it copies is there and let through, versions are pinned, nothing runs as root."""

import re
import tomllib
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = (ROOT / "constraints.txt").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def instructions() -> list[tuple[str, str]]:
    """(instruction, its arguments) of every line, continued ones joined."""
    lines = [line for line in (ROOT / "Dockerfile").read_text(encoding="utf-8").splitlines() if line.strip()]
    text = "\n".join(line for line in lines if not line.lstrip().startswith("#")).replace("\\\n", " ")
    pairs = [line.partition(" ") for line in text.splitlines()]
    return [(name, re.sub(r"\s+", " ", rest).strip()) for name, _, rest in pairs]


def of(name: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == name]


def test_it_has_known_instructions_alone() -> None:
    assert {name for name, _ in instructions()} == {
        "ARG", "FROM", "ENV", "RUN", "WORKDIR", "COPY", "USER", "ENTRYPOINT", "CMD",
    }  # fmt: skip


def test_what_it_starts_from_is_one_version_that_the_project_allows() -> None:
    (base,), arguments = of("FROM"), dict(argument.split("=") for argument in of("ARG"))
    assert re.fullmatch(r"python:\$\{PYTHON\}-slim-\w+", base)
    version = re.fullmatch(r"(\d+)\.(\d+)\.\d+", arguments["PYTHON"])
    assert version and PROJECT["requires-python"] == ">=3.11" and (int(version[1]), int(version[2])) >= (3, 11)


def test_every_package_of_python_has_the_tested_version() -> None:
    installs = [part for run in of("RUN") for part in re.split(r"&&|;;", run) if "pip install" in part]
    assert len(installs) == 2 and all("--constraint constraints.txt" in install for install in installs)
    assert installs[0].split()[-1] == "torch" and re.search(r"^torch==[\d.]+$", CONSTRAINTS, re.MULTILINE)
    (extras,) = (each.partition("=")[2] for each in of("ARG") if each.startswith("EXTRAS="))
    assert installs[1].endswith('".[$EXTRAS]"') and {*extras.split(",")} <= {*PROJECT["optional-dependencies"]}


def test_both_variants_name_their_index() -> None:
    (chosen,) = (run for run in of("RUN") if "$VARIANT" in run)
    assert "VARIANT=cuda" in of("ARG")
    assert [*re.findall(r"(\w+)\) index=(\S+)", chosen)] == [
        ("cuda", "https://pypi.org/simple"), ("cpu", "https://download.pytorch.org/whl/cpu"),
    ]  # fmt: skip
    assert re.search(r"\*\) echo .* exit 2", chosen)


def test_packages_of_the_system_leave_no_lists_behind() -> None:
    (run,) = (run for run in of("RUN") if "apt-get" in run)
    assert run.startswith("apt-get update &&") and run.endswith("rm -rf /var/lib/apt/lists/*")
    assert "install --yes --no-install-recommends" in run


def test_it_does_not_run_as_root() -> None:
    assert "RUN_AS=1000" in of("ARG") and of("USER") == ["${RUN_AS}"]
    names = [name for name, _ in instructions()]
    assert "RUN" not in names[names.index("USER") :]
    assert of("WORKDIR")[-1] == "/work" and "--owner 1000 --group 1000 /work" in of("RUN")[-1]


def test_what_it_copies_is_all_that_is_sent_and_that_an_install_needs() -> None:
    copied = {name for copy in of("COPY") for name in copy.split()[:-1]}
    rules = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line and line[0] != "#"]
    assert rules[0] == "*" and {rule[1:] for rule in rules if rule[0] == "!"} == copied
    needed = {"pyproject.toml", "src", PROJECT["readme"], *PROJECT["license-files"]}
    assert needed <= copied and all((ROOT / name).exists() for name in copied)
    assert any(fnmatch("src/fivefold/__pycache__", rule) for rule in rules[1:] if rule[0] != "!")


def test_its_command_is_fivefold_s() -> None:
    assert PROJECT["scripts"] == {"fivefold": "fivefold.__main__:main"}
    assert (of("ENTRYPOINT"), of("CMD")) == (['["fivefold"]'], ['["doctor"]'])
