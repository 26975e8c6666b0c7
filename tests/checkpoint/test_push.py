"""A pushed export: the hub has the files of the folder, and a hub that refuses is an error with its fix."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from huggingface_hub import constants

from fivefold import cli
from fivefold.checkpoint import card, export, push
from fivefold.config import load_config
from fivefold.core.errors import UserError
from fivefold.core.hub import Repository
from fivefold.data.source import HUB
from tests import fake_hub
from tests.checkpoint.folders import OVERRIDES, hf_folder, save_run
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import put_off


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, case = tmp_path_factory.mktemp("push"), Case("single+fp32", overrides=OVERRIDES)
    base = hf_folder(case, folder / "hf")
    (base / "README.md").write_text("---\nlicense: apache-2.0\n---\n# It\n")
    run_ranks(1, save_run, case.layout, base, folder / "runs" / "one", 12)
    return folder / "runs" / "one"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_hub.Hub]:
    with fake_hub.running() as hub:
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "ENDPOINT", hub.address)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", fake_hub.TOKEN)
        yield hub


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.full
def test_a_pushed_export_is_the_folder(
    hub: fake_hub.Hub, run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as ended:
        cli.main(["export", str(run), str(out), "--push", "me/it", "--private", "--revision", "step-12"])
    said, failed = capsys.readouterr()
    assert ended.value.code == 0, failed
    assert hub.repositories == {"me/it": True} and hub.messages == ["step 12 of one"]
    assert hub.files["me/it", "step-12"] == {".gitattributes": b"", **files_of(out)}
    assert set(hub.files["me/it", "main"]) == {".gitattributes"}
    assert f"pushed to {hub.address}/me/it/tree/step-12" in said and "vllm serve me/it --revision step-12" in said
    assert "pretrained=me/it,revision=step-12" in said and 'from_pretrained("me/it", revision="step-12")' in said
    text = (out / "README.md").read_text()
    assert yaml.safe_load(text.split("---")[1])["license"] == "apache-2.0"
    assert 'from_pretrained("me/it", revision="step-12")' in text
    again = export(run, out, force=True, push=Repository("me/it"))
    assert (
        again.push is not None
        and again.push.address == f"{hub.address}/me/it"
        and hub.files["me/it", "main"]["config.json"]
    )


@pytest.mark.full
@pytest.mark.parametrize(("status", "at"), [(401, "create"), put_off(403, "preupload"), put_off(404, "preupload")])
def test_a_hub_that_refuses_says_how_to_log_in(
    hub: fake_hub.Hub, run: Path, tmp_path: Path, status: int, at: str
) -> None:
    hub.status, hub.fails_at = status, at
    with pytest.raises(UserError, match="me/it was not pushed: the hub does not let you write to it") as refused:
        export(run, tmp_path / "out", push=Repository("me/it"))
    assert "hf auth login" in str(refused.value.fix)
    is_written = at != "create"  # nothing is written where the first request is refused
    assert (tmp_path / "out" / "model.safetensors").exists() == is_written == ("is complete" in refused.value.what)


def test_a_hub_that_does_not_answer_is_named_before_anything_is_written(
    hub: fake_hub.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match="cannot be reached") as refused:
        push.check_push(Repository("me/it"))
    assert "when the hub answers" in str(refused.value.fix)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="HF_HUB_OFFLINE forbids it"):
        push.check_push(Repository("me/it"))
    for name in ("it", "a/b/c", "me/", "../it"):
        with pytest.raises(UserError, match="is no repository of the hub"):
            Repository(name)


def test_a_curve_is_ten_rows_with_both_ends() -> None:
    assert card._spread([3, 5]) == [3, 5] and card._spread(range(11)) == [0, 1, 2, 3, 4, 6, 7, 8, 9, 10]


def test_data_of_the_hub_is_named_once_without_its_split() -> None:
    train = [{"path": f"{HUB}{path}"} for path in ("me/one?split=a", "me/two", "me/one?split=b")]
    config = load_config(None, [f"data.train={json.dumps([*train, {'path': 'here.txt'}])}"])
    assert card._datasets(config) == ["me/one", "me/two"]


@pytest.mark.parametrize(("adapted", "relation"), [(0, "finetune"), (8, "adapter")])
def test_what_an_export_is_to_its_base(tmp_path: Path, adapted: int, relation: str) -> None:
    options = ["model.name_or_path=org/base", "model.init=pretrained", "data.train=here.txt"]
    (tmp_path / "run.yaml").write_text(load_config(None, options).to_yaml())
    (tmp_path / "origin.json").write_text(json.dumps({"hub": "org/base"}))  # as the run found it, wherever it is now
    manifest = SimpleNamespace(step=3, state={"tokens_seen": 7}, versions={}, layout="single")
    checkpoint: Any = SimpleNamespace(path=tmp_path, manifest=manifest, model_folder=tmp_path)
    text = card.model_card(checkpoint, tmp_path, arguments='"me/it"', dtype="bfloat16", adapted=adapted)
    front = yaml.safe_load(text.split("---")[1])
    assert (front["base_model"], front["base_model_relation"]) == ("org/base", relation)
    assert (
        front["library_name"] == ("peft" if adapted else "transformers") and "| weights stored in | bfloat16 |" in text
    )
