"""The command, as a user has it: what it prints, what it writes, how it ends; and `train --verify`."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.cli import main
from fivefold.config import OptimizerSection, load_config
from fivefold.core.errors import UserError
from fivefold.launch.world import World
from fivefold.parallel.balance.runtime import BalanceOptions
from fivefold.parallel.layout import Layout
from fivefold.verification import VerifyRequest, ranks, resolve
from fivefold.verification.proof_case import ProofCase
from fivefold.verification.reduced_model import ModelFolder
from tests.commands import fivefold
from tests.tiers import put_off


@pytest.mark.full
def test_three_layouts_are_proved(tmp_path: Path) -> None:
    layouts = "tp2,shard2+fp32,pp2"  # the README proves shard2.tp2
    shown = fivefold(["verify", "--quick", "--layouts", layouts, "--json", "v.json", "--html", "v.html"], tmp_path)
    found = json.loads((tmp_path / "v.json").read_text())
    assert found["ok"] and [each["layout"] for each in found["layouts"]] == layouts.split(",")
    for each in found["layouts"]:
        most, like = (1.0, 1) if "fp32" in each["layout"] else (1e-10, 2)  # layouts whose checkpoints have its type
        assert each["ok"] and all(row["ok"] and row["error"] <= most for row in told(each["rows"]))
        assert {"what", "error", "tolerance", "ok", "where"} == set(each["rows"][0])
        kinds = {row["what"] for row in each["rows"]}
        assert {"weight", "output", "gradient, raw", "gradient, reduced", "gradient, clipped", "update"} < kinds
        assert {"losses of 5 steps", "replicas", "collectives", "rerun"} < kinds
        assert f"saved under {like} layout{'s' * (like > 1)}, loaded" in kinds
        outputs = [row["where"] for row in each["rows"] if row["what"] == "output"]
        assert outputs[0] == "model.embed_tokens" and outputs[-1] == "model.norm"
        assert {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj input"} < set(outputs)
    assert "PROVED  All 3 layouts match one process" in shown
    assert (tmp_path / "v.html").stat().st_size < 500_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["v.html", "v.json"]


def told(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the control, whose error is large on purpose."""
    return [row for row in rows if not row["what"].startswith("control")]


@pytest.mark.full
def test_a_layout_that_is_wrong_fails(tmp_path: Path) -> None:
    arguments = ["verify", "--quick", "--layouts", "tp2", "--json", "-"]
    rows = json.loads(fivefold(arguments, tmp_path, code=1, fault="partial_gradients_not_summed"))["layouts"][0]["rows"]
    first = next(row for row in rows if not row["ok"])
    assert (first["what"], first["where"]) == ("gradient, reduced", "model.norm.weight")


@pytest.mark.campaign
def test_a_layout_that_is_wrong_keeps_a_run_from_starting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["train", "--verify", "layout=tp2", "train.max_steps=1"]
    fivefold(arguments, tmp_path, code=1, fault="partial_gradients_not_summed")
    said = capsys.readouterr().err
    assert "does not compute what one process computes: first differs at gradient, reduced" in said
    assert not (tmp_path / "runs").exists()


@pytest.mark.full
@pytest.mark.parametrize("layouts", ["shard4", put_off("tp2,shard4")])
def test_inside_a_world_only_its_own_size_runs(layouts: str, tmp_path: Path) -> None:
    launched = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "fivefold"]
    arguments = ["verify", "--quick", "--layouts", layouts, "--json", "v.json"]
    ended = subprocess.run([*launched, *arguments], cwd=tmp_path, capture_output=True, timeout=300)
    assert ended.returncode == 1
    *first, second = json.loads((tmp_path / "v.json").read_text())["layouts"]
    assert all(each["ok"] and each["rows"] and each["not_run"] is None for each in first)
    assert len(first) == layouts.count(",") and (second["ok"], second["rows"], second["not_run"]) == (
        False, [], "it is for 4 ranks, and this world has 2",
    )  # fmt: skip
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("layouts", "expected"),
    [
        ([], "no layouts"),
        (["tp3"], "tp=3 does not fit"),
        (["tp2", "tp2"], "named twice"),
        (["shard-1"], "how many ranks"),
        (["pp2+v2"], "pp_schedule 1f1b has one stage a rank"),
        (["pp9"], "but the model has"),
        (["qq2"], "not a degree"),
    ],
)
def test_a_wrong_request_is_refused_before_anything_starts(layouts: list[str], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        resolve(None, [], layouts, "fp64")


def test_what_a_layout_does_not_state_is_the_runs() -> None:
    found = resolve(None, ["train.micro_batch_size=4"], ["tp2", "shard2+zero2+fp32"], "fp64")
    assert {name: str(layout) for name, layout in found.items()} == {
        "tp2": "tp2+mb4+fp64", "shard2+zero2+fp32": "shard2+zero2+mb4+fp32",
    }  # fmt: skip
    assert resolve(None, [], ["tp2"], "run")["tp2"].precision == load_config(None, []).precision.compute


def test_the_help_names_its_options(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["verify", "--help"])
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--layouts", "--quick", "--thin", "--json", "--html", "--precision"))


def test_an_objective_is_proved_in_fp8_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = VerifyRequest(
        config=load_config(None, ["objective.name=dpo", "objective.beta=0.7"]).to_yaml(),
        layouts={"tp2": "tp2+fp8"}, scratch=str(tmp_path),
    )  # fmt: skip
    monkeypatch.setattr(ranks, "make_folder", lambda *_, **__: ModelFolder(tmp_path, "X", 101, ()))
    monkeypatch.setattr(ranks, "load_model_config", lambda folder: None)
    monkeypatch.setattr(ranks, "balance_options", lambda *_: BalanceOptions())
    case = ranks.make_subject(request, [Layout.parse("tp2+fp8")])
    assert (case.objective.name, case.objective.beta, case.whole_rows) == ("dpo", 0.7, True)
    assert case.row_length % 2 == 0  # two answers fill a row


def test_the_reference_has_the_threads_that_the_user_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the layout in the same process those that it had before."""
    seen, before = list[int](), torch.get_num_threads()
    case = ProofCase(folder=tmp_path, model_class="X", vocabulary=101, rows=8, row_length=61, steps=1, seed=5,
                     optimizer=OptimizerSection())  # fmt: skip
    request = VerifyRequest(config="", layouts={"tp2": "tp2"}, scratch=str(tmp_path))
    monkeypatch.setattr(ranks, "prepare", lambda *_, **__: seen.append(torch.get_num_threads()))
    for is_thin, said, expected in ((False, "3", 3), (False, "2", 2), (True, "3", 1)):
        monkeypatch.setattr(ranks, "make_subject", lambda *_, thin=is_thin: replace(case, thin=thin))
        monkeypatch.setenv("OMP_NUM_THREADS", said)
        ranks._make_evidence(request, [Layout.parse("tp2")], World(), lambda text: None)
        assert (seen.pop(), torch.get_num_threads()) == (expected, before)
