"""A hub id: every file that `AutoTokenizer` would read is fetched, and what has none says so."""

import shutil
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects
from transformers import AutoTokenizer

from fivefold.core.errors import UserError
from fivefold.data import prepare, tokenizer
from fivefold.data.tokenizer import TokenizerInfo, find_tokenizer
from tests.data import tokenizers_zoo as zoo
from tests.data.helpers import config_for
from tests.data.test_tokenizer_zoo import plain, same

BY_NAME = "deepseek-ai/deepseek-coder-one"  # `AutoTokenizer` goes by its name, not by the class that its files say


class Hub:
    """A repository, `org/name`, and this machine's cache of it, in place of `huggingface_hub`'s functions."""

    def __init__(self, folder: Path) -> None:
        self.repository, self.cache = folder / "repository", folder / "hub"
        self.is_there, self.asked = True, 0

    def model_info(self, name: str, **_: Any) -> None:
        self.asked += 1
        if not self.is_there:
            raise ConnectionError("no network")

    def snapshot_download(self, name: str, *, allow_patterns: list[str], local_files_only: bool = False) -> str:
        assert name in ("org/name", BY_NAME)
        if local_files_only:
            if not self.cache.is_dir():
                raise FileNotFoundError
            return str(self.cache)
        there = [str(path.relative_to(self.repository)) for path in self.repository.rglob("*") if path.is_file()]
        for path in filter_repo_objects(there, allow_patterns=allow_patterns):
            (self.cache / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.repository / path, self.cache / path)
        return str(self.cache)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


def named(tmp_path: Path) -> TokenizerInfo:
    return find_tokenizer("org/name", model="", corpus=(), root=tmp_path / "cache")


def test_every_folder_of_the_zoo_comes_whole(subtests: pytest.Subtests, tmp_path: Path, hub: Hub) -> None:
    for number, name in enumerate(zoo.FOLDERS):
        with subtests.test(msg=name):
            hub.repository, hub.cache = tmp_path / f"repository{number}", tmp_path / f"hub{number}"
            zoo.made(name, hub.repository)
            (hub.repository / "modeling.py").write_text("raise SystemExit")
            (hub.repository / "pytorch_model.bin").touch()
            folder = tokenizer._folder_of("org/name", auto=False)
            theirs, ours = ({path.relative_to(at) for path in at.rglob("*")} for at in (hub.repository, folder))
            assert theirs - ours == {Path("modeling.py"), Path("pytorch_model.bin")} and ours <= theirs
    same(plain(hub.repository), named(tmp_path))


def test_a_copy_without_the_template_is_completed_and_else_said(tmp_path: Path, hub: Hub) -> None:
    """Earlier versions fetched no chat_template.jinja, so that ChatML was trained and exported."""
    zoo.made("template: a folder", hub.repository)
    hub.cache.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(hub.repository / name, hub.cache / name)
    hub.is_there = False
    assert named(tmp_path).template.name == "the built-in ChatML"
    (records := tmp_path / "chat.jsonl").write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(UserError, match="no document has a trained token"):
        prepare(config_for(records, tokenizer="org/name"), cache=tmp_path / "cache")
    records.write_text('{"prompt": "q", "completion": "a"}\n')
    lines = prepare(config_for(records, tokenizer="org/name"), cache=tmp_path / "cache").counts.lines()
    assert "tokenizer   it has no chat template: conversations are written in the built-in ChatML" in lines
    hub.is_there = True
    assert named(tmp_path).template.source == {"default": zoo.CHATML, "tool_use": zoo.WITH_TOOLS}
    hub.is_there = False  # now this machine's copy is whole
    assert named(tmp_path).template.source == {"default": zoo.CHATML, "tool_use": zoo.WITH_TOOLS}


def test_a_name_that_decides_the_class_is_followed(tmp_path: Path, hub: Hub) -> None:
    hub.cache = tmp_path / f"models--{BY_NAME.replace('/', '--')}" / "snapshots" / ("0" * 40)
    hub.repository.mkdir()
    zoo.saved(zoo.digits(), hub.repository)
    zoo.config(hub.repository, "GPT2Tokenizer")
    zoo.put(hub.repository, "config.json", {"model_type": "llama"})
    ours = find_tokenizer(BY_NAME, model="", corpus=(), root=tmp_path / "cache")
    (refs := hub.cache.parent.parent / "refs").mkdir()
    (refs / "main").write_text("0" * 40)
    theirs = AutoTokenizer.from_pretrained(BY_NAME, cache_dir=tmp_path, local_files_only=True)
    same(theirs, ours)
    assert theirs("12 34", add_special_tokens=False)["input_ids"] != plain(hub.cache)("12 34")["input_ids"]
    assert ours.kind == type(theirs).__name__ == "TokenizersBackend"
    same(theirs, find_tokenizer(str(ours.saved), model="", corpus=(), root=tmp_path / "cache"))


def test_a_repository_without_a_tokenizer_is_named(tmp_path: Path, hub: Hub) -> None:
    hub.repository.mkdir()
    (hub.repository / "config.json").write_text("{}")
    with pytest.raises(UserError, match="'org/name' on the hub holds no tokenizer"):
        named(tmp_path)
