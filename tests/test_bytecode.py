"""Bytecode is kept in the cache where Python keeps none beside a package, and nowhere else."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.core import bytecode

pytestmark = pytest.mark.full

SOURCE = Path(bytecode.__file__).parents[2]
SAYS = "import json, os, sys; print(json.dumps([sys.pycache_prefix, sys.dont_write_bytecode]))"
KEEP = f"from fivefold.core import bytecode; bytecode.keep(); {SAYS}"
NO_WORD = dict.fromkeys(("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"), "")  # an empty one counts as none


@pytest.fixture
def packages(tmp_path):
    """Packages of the names of the large ones, which take no time."""
    for name in bytecode.PACKAGES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("import fractions\n")
    return tmp_path


def run(packages, *command, **env):
    surroundings = os.environ | NO_WORD | {"FIVEFOLD_CACHE": str(packages / "cache")} | env
    surroundings["PYTHONPATH"] = os.pathsep.join((str(packages), str(SOURCE)))
    return subprocess.run([sys.executable, *command], env=surroundings, capture_output=True, text=True, check=True)


def test_packages_without_bytecode_get_it_in_the_cache_once(packages):
    """In the processes that a command starts as well, and in all later commands: the second one compiles nothing."""
    child = (
        f"{KEEP}; import subprocess, torch; subprocess.run([sys.executable, '-v', '-c', 'import torch, transformers'])"
    )
    first = run(packages, "-c", child, PYTHONDONTWRITEBYTECODE="1")
    kept = packages / "cache" / "bytecode"
    assert f'["{kept}", false]' in first.stdout and kept.stat().st_mode & 0o777 == 0o700
    assert read_from(first, packages / "torch") == [kept], "the parent has kept it"
    assert read_from(first, packages / "transformers") == [packages]
    again = run(packages, "-c", child, PYTHONDONTWRITEBYTECODE="1")
    assert read_from(again, packages / "torch") == read_from(again, packages / "transformers") == [kept]
    assert not list(packages.glob("torch/**/*.pyc")), "not beside the package, where the user wants none"


def read_from(done, package):
    """Where the code of a package comes from, as `python -v` says: its source, or bytecode that is kept."""
    found = re.findall(r"# code object from '?([^'\n]*)", done.stderr)
    of_package = [Path(file) for file in found if str(package / "__init__") in file]
    kept = package.parent / "cache" / "bytecode"
    return [kept if kept in file.parents else package.parent for file in of_package]


def test_a_python_that_keeps_bytecode_itself_is_left_alone(packages):
    assert run(packages, "-c", KEEP).stdout == "[null, false]\n"
    assert not (packages / "cache").exists()


def test_bytecode_that_is_there_is_used_where_it_is(packages):
    for name in bytecode.PACKAGES:
        run(packages, "-m", "py_compile", str(packages / name / "__init__.py"))
    assert run(packages, "-c", KEEP, PYTHONDONTWRITEBYTECODE="1").stdout == "[null, true]\n"


def test_the_users_own_prefix_stays(packages):
    own = {"PYTHONPYCACHEPREFIX": str(packages / "own"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert run(packages, "-c", KEEP, **own).stdout == f'["{packages / "own"}", true]\n'


def test_a_cache_that_others_can_write_to_is_not_run_from(packages):
    (packages / "cache" / "bytecode").mkdir(parents=True)
    (packages / "cache" / "bytecode").chmod(0o777)
    said = run(packages, "-c", KEEP, PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(packages)).stdout
    assert said == f'["{packages}/fivefold-{os.getuid()}/bytecode", false]\n'


def test_without_a_cache_it_is_kept_among_temporary_files(packages):
    (packages / "cache").write_text("a file")
    said = run(packages, "-c", KEEP, PYTHONDONTWRITEBYTECODE="1", TMPDIR=str(packages)).stdout
    assert said == f'["{packages}/fivefold-{os.getuid()}/bytecode", false]\n'


def test_without_a_place_a_command_runs_as_it_would(packages):
    nowhere = "from fivefold.core import code_cache; code_cache._changed_by_others = str"
    done = run(packages, "-c", f"{nowhere}; {KEEP}", PYTHONDONTWRITEBYTECODE="1")
    assert done.stdout == "[null, true]\n"


@pytest.mark.parametrize("module", ["fivefold", "fivefold.cli"])
def test_every_way_into_a_command_keeps_it(packages, module):
    run(packages, "-m", module, "--help", PYTHONDONTWRITEBYTECODE="1")
    assert list((packages / "cache" / "bytecode").rglob("typer/*.pyc")) or module == "fivefold.cli"
    assert (packages / "cache" / "bytecode").exists()
