"""The campaign: what it leaves to scripts, and that a script that finds something wrong does not exit with 0."""

import importlib
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def test_what_scripts_prove_is_left_out_of_the_tests() -> None:
    campaign: Any = importlib.import_module("campaign")
    commands = dict(campaign.parts())
    for each in campaign.PROVED_BY_SCRIPTS:
        file, function = each.split("::")
        assert f"--deselect={each}" in commands[file]
        assert re.search(rf"^def {function}\(", (ROOT / file).read_text(encoding="utf-8"), re.MULTILINE)
    assert commands["faults"][-1].endswith("faults.py")
    assert not any("--deselect" in each for each in commands["tests/checkpoint/test_reshard.py"])


@pytest.mark.full
def test_a_part_ends_well_with_0_and_pytest_also_without_tests() -> None:
    campaign: Any = importlib.import_module("campaign")
    found = [campaign.run("a part", [sys.executable, "-c", f"import sys; sys.exit({code})"]).ok for code in (0, 1, 5)]
    assert found == [True, False, False]
    assert campaign.run("no tests", [sys.executable, "-m", "pytest", "-q", "-k", "nothing", __file__]).ok


@pytest.mark.parametrize("field", ["gradient", "loss", "norm", "weight"])
@pytest.mark.parametrize("value", [1e-9, float("nan"), float("inf")])
def test_a_composition_that_is_off_fails(field: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    compositions: Any = importlib.import_module("compositions")
    good = compositions.Row("tp2", "tp", "llama", False, 2, 0.0, 0.0, 0.0, 0.0, True, 1.0)
    for row, code in ((good, 0), (replace(good, **{field: value}), 1), (replace(good, collectives=False), 1)):
        monkeypatch.setattr(compositions, "measure", lambda case, row=row: row)
        monkeypatch.setattr(sys, "argv", ["compositions.py", "--only", "tp2.pp2+gpipe"])
        assert compositions.main() == code


def test_compositions_that_do_not_exist_are_not_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    compositions: Any = importlib.import_module("compositions")
    monkeypatch.setattr(sys, "argv", ["compositions.py", "--only", "tp3"])
    with pytest.raises(SystemExit, match="2"):
        compositions.main()
    assert compositions._relative([1.0, float("nan")], [1.0, 1.0]) != 0  # NaN, though not the first


def test_a_fault_that_survives_or_is_named_otherwise_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    faults: Any = importlib.import_module("faults")
    name = next(iter(faults.FAULTS))
    row = faults.Row(name, "", "", "llama", "tp2", "step", True, "weight", "w", 1.0, 0.0, True, None)
    monkeypatch.setattr(sys, "argv", ["faults.py", "--only", name])
    wrong = replace(row, killed=False), replace(row, named=False)
    for found, control, code in ((row, True, 0), (row, False, 1), *((each, True, 1) for each in wrong)):
        monkeypatch.setattr(faults, "tried", lambda *_, found=found, **__: found)
        monkeypatch.setattr(faults, "control", lambda *_, control=control, **__: {"tp2": control})
        assert faults.main() == code


def test_clean_proofs_go_on_from_those_of_this_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    clean: Any = importlib.import_module("clean_proofs")
    mine = clean.Clean("llama", "fp64", "tp2", 1, "", 10, 0.5, "weight", clean.COMMIT)
    known = [mine, replace(mine, layout="tp4", commit="other"), replace(mine, layout="dp2", alarm="a weight differs")]
    file = tmp_path / "clean_proofs.json"
    monkeypatch.setattr(clean, "FILE", file)
    monkeypatch.setattr(sys, "argv", ["clean_proofs.py", "--more"])
    for alarm, code in (("", 0), ("a weight differs", 1)):
        file.write_text(json.dumps({"proofs": [vars(each) for each in known]}))
        asked = []

        def proofs(only: Any, known: Any, alarm: str = alarm, asked: list[Any] = asked) -> Any:
            asked.append(known)
            yield replace(mine, layout="tp4", alarm=alarm)

        monkeypatch.setattr(clean, "proofs", proofs)
        assert clean.main() == code
        assert asked == [{("llama", "fp64", "tp2")}]
        assert [each["layout"] for each in json.loads(file.read_text())["proofs"]] == ["tp2", "tp4"]
