"""An export is a Hugging Face folder like any other: the same weights, the same logits, tokenizer and stop tokens."""

import errno
import fcntl
import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch
import yaml
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from fivefold import cli
from fivefold.checkpoint import export, find_checkpoint
from fivefold.checkpoint.model_folder import beside, cast, export_dtype, publish, save_tensors
from fivefold.core.errors import UserError
from fivefold.data.tokenizer import find_tokenizer
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.sources import SafetensorsFolder
from tests.checkpoint.folders import OVERRIDES, hf_folder, save_run
from tests.data import tokenizers_zoo as zoo
from tests.data.test_tokenizer_zoo import same
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import put_off


def make_run(tmp_path: Path, case: Case) -> tuple[Path, Path]:
    """(the Hugging Face folder that a run started from, the run)."""
    folder, run = hf_folder(case, tmp_path / "hf"), tmp_path / "runs" / "one"
    run_ranks(case.parsed.world, save_run, case.layout, folder, run, 12)
    return folder, run


@pytest.mark.full
@pytest.mark.parametrize(
    "case",
    [
        Case("shard2.tp2+fp32", overrides=OVERRIDES),
        put_off(Case("tp4+fp32", tied=True, kv_heads=1, overrides=OVERRIDES)),
        Case("shard4+fp32", "qwen3", tied=True, overrides=OVERRIDES),
    ],
    ids=lambda case: f"{case.layout}-{case.family}",
)
def test_the_export_is_the_model(tmp_path: Path, case: Case) -> None:
    folder, run = make_run(tmp_path, case)
    done = export(run, tmp_path / "out")
    assert done.step == 12 and done.path == tmp_path / "out" and done.bytes == 4 * done.parameters
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, done.path))
    assert after.dtype == torch.float32 and type(after) is type(before)
    ids = torch.arange(40).view(2, 20)
    with torch.no_grad():
        assert torch.equal(before(ids).logits, after(ids).logits)
    for key in ("hidden_size", "rope_parameters", "tie_word_embeddings", "eos_token_id", "use_cache", "vocab_size"):
        assert getattr(after.config, key) == getattr(before.config, key), key
    with safe_open(done.path / "model.safetensors", "pt") as file:
        assert ("lm_head.weight" in file.keys()) is not case.tied  # noqa: SIM118
        assert file.metadata() == {"format": "pt"}


@pytest.mark.full
def test_tokenizer_and_stop_tokens_travel_along(tmp_path: Path) -> None:
    case, run = Case("single+fp32", overrides=OVERRIDES), tmp_path / "runs" / "one"
    folder = hf_folder(case, tmp_path / "hf")
    zoo.chat_files(folder)
    zoo.put(folder, "special_tokens_map.json", {"bos_token": "<s>", "additional_special_tokens": ["<tool>"]})
    run_ranks(case.parsed.world, save_run, case.layout, folder, run, 12)
    out = export(run, tmp_path / "out").path
    same(AutoTokenizer.from_pretrained(folder), find_tokenizer(str(out), model="", corpus=(), root=tmp_path / "cache"))
    assert AutoTokenizer.from_pretrained(out).chat_template == AutoTokenizer.from_pretrained(folder).chat_template
    generation = GenerationConfig.from_pretrained(out)
    assert generation.eos_token_id == [256, 255] and generation.temperature == 0.6
    text = "naïve façade"
    ids = AutoTokenizer.from_pretrained(out)(text).input_ids
    assert ids == AutoTokenizer.from_pretrained(folder)(text).input_ids == list(text.encode())


@pytest.mark.full
def test_several_files_another_type_and_back(tmp_path: Path) -> None:
    case = Case("shard2.tp2+fp32", overrides=OVERRIDES)
    folder, run = make_run(tmp_path, case)
    out = export(run, tmp_path / "out", dtype="bf16", file_bytes=20_000).path
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in out.glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == files and len(files) > 3
    assert all((out / name).stat().st_size < 20_000 + 5_000 or "embed" in name for name in files)
    assert not (out / "model.safetensors").exists()
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (folder, out))
    assert after.dtype == torch.bfloat16
    for name, parameter in before.named_parameters():
        assert torch.equal(parameter.bfloat16(), after.get_parameter(name)), name
    model = build_meta(load_model_config(out))
    assert SafetensorsFolder(out, model).names() == set(dict(before.named_parameters()))


@pytest.mark.full
@pytest.mark.parametrize(("there", "back"), [("shard2.tp2+fp32", "tp2+fp32"), put_off("tp2+fp32", "shard4+fp32")])
def test_through_transformers_and_back_changes_no_bit(tmp_path: Path, there: str, back: str) -> None:
    """Run -> export -> `transformers` -> its own folder, in several files -> another run under another layout."""
    _, run = make_run(tmp_path, Case(there, tied=True, overrides=OVERRIDES))
    out = export(run, tmp_path / "out").path
    AutoModelForCausalLM.from_pretrained(out).save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert len(list((tmp_path / "again").glob("*.safetensors"))) > 3
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "again" / name).write_bytes((out / name).read_bytes())
    other = tmp_path / "runs" / "other"
    run_ranks(Case(back).parsed.world, save_run, back, tmp_path / "again", other, 1)
    before, after = find_checkpoint(run).source(), find_checkpoint(other).source()
    assert before.ordered == after.ordered
    assert all(torch.equal(before.whole(name), after.whole(name)) for name in before.ordered)


@pytest.mark.full
def test_refusals(tmp_path: Path) -> None:
    _, run = make_run(tmp_path, Case("single+fp32", overrides=OVERRIDES))
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes").touch()
    for force in (False, True):
        with pytest.raises(UserError, match="is not a model folder"):
            export(run, tmp_path / "full", force=force)
    assert (tmp_path / "full" / "notes").exists()
    with pytest.raises(UserError, match=r"no checkpoint of step 13\nsteps: 12"):
        export(run, tmp_path / "out", step=13)
    with pytest.raises(UserError, match="dtype 'int4' is not known"):
        export(run, tmp_path / "out", dtype="int4")
    with pytest.raises(UserError, match="is not a run folder"):
        export(tmp_path / "absent", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    for length in (300, 252):  # too long to look at, and with room for no letter more
        with pytest.raises(UserError, match=r"cannot write .*x: File name too long"):
            export(run, tmp_path / ("x" * length))
    (tmp_path / "empty").mkdir()
    assert export(run, tmp_path / "empty", step=12).step == 12
    assert not list(tmp_path.glob(".tmp-*"))


@pytest.mark.full
def test_the_type_that_came_in_is_the_default(tmp_path: Path) -> None:
    """A run that started from bf16 trains fp32 copies; what it exports is bf16 again unless asked otherwise."""
    folder = hf_folder(Case("single+fp32", overrides=OVERRIDES), tmp_path / "hf")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    run_ranks(1, save_run, "single+fp32", folder, tmp_path / "run", 1)
    stored = find_checkpoint(tmp_path / "run").source()
    assert stored.dtype(stored.ordered[0]) == torch.float32
    for asked, expected in ((None, torch.bfloat16), ("fp32", torch.float32), ("fp16", torch.float16)):
        done = export(tmp_path / "run", tmp_path / "out", dtype=asked, force=True)
        assert done.dtype == expected
        with safe_open(done.path / "model.safetensors", "pt") as file:
            assert {file.get_tensor(name).dtype for name in file.keys()} == {expected}  # noqa: SIM118
        assert AutoModelForCausalLM.from_pretrained(done.path).dtype == expected
        assert not (done.path / "origin.json").exists()
    assert export_dtype(None, came_in=None) == export_dtype(None, came_in="complex64") == torch.float32
    assert export_dtype(None, came_in=torch.bfloat16) == torch.bfloat16


def test_a_weight_beyond_fp16_is_refused() -> None:
    with pytest.raises(UserError, match=r"a\.weight has values beyond fp16, which ends at 65,504\nchoose bf16"):
        cast("a.weight", torch.tensor([1.0, -7e4]), torch.float16)
    assert cast("a.weight", torch.tensor([1.0, -7e4]), torch.bfloat16).isfinite().all()
    assert cast("count", torch.tensor([3]), torch.float16).dtype == torch.int64


@pytest.mark.full
def test_sigterm_leaves_nothing_beside(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, signal, sys; from fivefold.checkpoint.model_folder import beside\n"
        "with beside(pathlib.Path(sys.argv[1])) as folder: os.kill(os.getpid(), signal.SIGTERM)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], timeout=120)
    assert done.returncode == 128 + signal.SIGTERM and list(tmp_path.iterdir()) == []


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    """Files of two exports to one folder would mix. What a killed one has left is removed."""
    out, temporary = tmp_path / "out", tmp_path / ".tmp-out"
    with beside(out) as first:
        (first / "a").touch()
        with pytest.raises(UserError, match=r"another process writes .*\.tmp-out"), beside(out):
            raise AssertionError
        assert (first / "a").exists()
    assert not list(tmp_path.iterdir())
    temporary.mkdir()
    (temporary / "a").touch()
    with beside(out) as second:
        assert not list(second.iterdir())
    with patch.object(fcntl, "flock", Mock(side_effect=OSError(errno.EBADF, "a disk without locks"))), beside(out):
        assert temporary.is_dir()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("call", [1, 2])
def test_a_kill_while_a_folder_is_replaced_loses_neither(tmp_path: Path, call: int) -> None:
    real, names = os.rename, ["new", "out"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()

    def rename(*paths: Path) -> None:
        if mock.call_count == call:
            raise KeyboardInterrupt
        real(*paths)

    with patch("os.rename", Mock(side_effect=rename)) as mock, pytest.raises(KeyboardInterrupt):
        publish(tmp_path / "new", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.glob("*/*")) == names
    publish(tmp_path / "new", tmp_path / "out")
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["out", "out/new"]


@pytest.mark.full
def test_force_replaces_a_model_folder_whole(tmp_path: Path) -> None:
    _, run = make_run(tmp_path, Case("single+fp32", overrides=OVERRIDES))
    out = export(run, tmp_path / "out").path
    (out / "old.safetensors").touch()
    with pytest.raises(UserError, match="is not empty") as refused:
        export(run, out)
    assert "--force" in str(refused.value.fix)
    export(run, out, force=True)
    assert not (out / "old.safetensors").exists() and (out / "model.safetensors").exists()
    (tmp_path / "link-out").symlink_to("out")
    (out / "old.safetensors").touch()
    export(run, tmp_path / "link-out", force=True)
    assert (tmp_path / "link-out").is_symlink() and not (out / "old.safetensors").exists()
    assert sorted(path.name for path in tmp_path.iterdir() if "out" in path.name) == ["link-out", "out"]
    with pytest.raises(UserError, match="model holds weights that "):
        export(run, find_checkpoint(run).model_folder, force=True)


@pytest.mark.full
def test_the_card_says_what_it_is_and_the_printed_lines_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _, run = make_run(tmp_path, Case("single+fp32", overrides=OVERRIDES))
    rows = [
        {"step": 11, "train/loss": 2.5, "eval/loss": 2.25},
        {"step": 12, "train/loss": 2.0},
        {"step": 13, "train/loss": 1.0},
    ]
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows) + '{"step": 1')
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", "runs/one", "my out"])
    assert ended.value.code == 0
    card = (tmp_path / "my out" / "README.md").read_text()
    front = yaml.safe_load(card.split("---")[1])
    assert front == {
        "library_name": "transformers",
        "license": "unknown",
        "pipeline_tag": "text-generation",
        "tags": ["fivefold"],
    }  # a folder is no hub id
    for row in (
        "| base model | hf, its own weights |", "| steps | 12 |",
        "| 11 | 2.5000 | 2.2500 |", "| 12 | 2.0000 |  |", 'AutoModelForCausalLM.from_pretrained("my out")',
        "| layout | `single+fp32` |", "| weights stored in | float32 |", "transformers", "Licence: unknown.",
    ):  # fmt: skip
        assert row in card, row
    assert str(tmp_path) not in card and "| 13 |" not in card
    python = capsys.readouterr().out.split("\n\n")[-1]
    assert python.count("\n") == 4
    exec(python, {})
    assert "The" in capsys.readouterr().out


def test_tensors_are_as_readable_as_other_files(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        save_tensors({"a": torch.ones(3)}, tmp_path / "model.safetensors")
        (tmp_path / "config.json").touch()
    finally:
        os.umask(before)
    assert {stat.S_IMODE(each.stat().st_mode) for each in tmp_path.iterdir()} == {0o640}
