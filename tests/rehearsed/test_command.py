"""`fivefold rehearse` on this machine: what it refuses, and a rank on the CPU where there is no CUDA build of torch."""

import json
from pathlib import Path
from typing import Any

import pytest

from fivefold import cli
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.stand_in import Lack

RUN = """
model: {name_or_path: demo, init: random, overrides: {hidden_size: 32, intermediate_size: 32, num_hidden_layers: 2}}
tokenizer: {name_or_path: byte}
data: {seq_length: 32, validation: 1%}
train: {global_batch_size: 8}
precision: {compute: fp32}
layout: pp2.shard2.tp2
"""


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(("rehearse", *arguments))
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A run file, on a machine without a CUDA build of torch."""
    lack = Lack("this torch is built without CUDA", "install another")
    monkeypatch.setattr(stand_in, "lacking", lambda: [lack])
    (tmp_path / "run.yaml").write_text(RUN)
    return str(tmp_path / "run.yaml")


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        ([], "rehearse needs a cluster", "--cluster 8xH100"),
        (["--cluster", "8xX9"], "chip 'X9' is not known", ""),
        (["--cluster", "eight"], "'eight' is not a cluster", "16x8xH100"),
        (["--cluster", "4xH100"], "but 1x4xH100 has 4 devices", ""),
        (["--cluster", "8xH100", "--rank", "8"], "--rank 8: 1x8xH100 has the ranks 0 to 7", ""),
        (["--cluster", "8xH100", "--rank", "1", "--ranks", "all-kinds"], "exclude each other", "leave one of them out"),
        (["--cluster", "8xH100", "--ranks", "some"], "--ranks", "rehearse --help"),
    ],
)
def test_a_wrong_request_is_refused(arguments: list[str], what: str, fix: str, file: str, capsys: Any) -> None:
    assert run(file, *arguments) == 2
    said = capsys.readouterr()
    assert what in said.err and fix in said.err and not said.out


def test_a_chip_without_cuda_is_refused(file: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(stand_in, "lacking", lambda: [])
    assert run(file, "--cluster", "8xMI300X") == 2
    assert "MI300X is no CUDA device" in capsys.readouterr().err


@pytest.mark.full
def test_a_rank_on_the_cpu(file: str, tmp_path: Path, capsys: Any) -> None:
    """The run of the last rank of eight: two steps, an evaluation, a save; it sends what its plan says."""
    html, out = tmp_path / "page.html", tmp_path / "seen.json"
    options = ("--synthetic", "--rank", "7", "--json", str(out), "--html", str(html))
    assert run(file, "--cluster", "8xH100", *options) == 0, capsys.readouterr()
    seen = json.loads(out.read_text())
    (rank,) = seen["ranks"]
    assert [each["name"] for each in rank["phases"]] == ["build", "step 1", "step 2", "evaluation", "save"]
    assert rank["coordinates"] == {"pp": 1, "dp_shard": 1, "tp": 1}
    assert {each["axis"] for each in rank["sent"]} >= {"pp", "tp", "dp_shard", "world"}
    assert all(each["count"] == each["declared"] for each in rank["sent"])
    assert 0 < seen["estimate"]["mfu"] < 1 and seen["estimate"]["launches"] is None
    assert "Not a full rehearsal: this torch is built without CUDA; install another." in capsys.readouterr().out
    assert "not seen" in html.read_text()
    assert not (tmp_path / "runs").exists()
