"""Datasets of the hub: `datasets` reads a local folder in their place, and the hub's answers are put in its mouth."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import datasets
import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from huggingface_hub import errors

from fivefold.core.errors import UserError
from fivefold.data import PreparedData, prepare
from fivefold.data.formats.hub import Address
from tests.data.helpers import config_for, prepare_texts, random_texts, whole, write_jsonl

TEXTS = random_texts(0, 97)
COMMITS = {"main": "a" * 40, "v2": "b" * 40}
CARD = """---
configs:
- {config_name: plain, default: true, data_files: [{split: train, path: data/train*}, {split: odd, path: data/odd*}]}
- {config_name: a b+c, data_files: data/other*}
---
"""


class Hub:
    """What was asked of the hub, and what it answers: one dataset, `org/name`."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.asked, self.loaded = folder, [], []
        self.failure: Exception | None = None
        (folder / "data").mkdir(parents=True)
        self.write("train-0", text=TEXTS[:50], id=range(50))
        self.write("train-1", text=TEXTS[50:], id=range(47))
        self.write("odd", text=["fine", None])
        self.write("other", body=["another"], n=[1])
        (folder / "README.md").write_text(CARD)

    def write(self, name: str, **columns: Any) -> None:
        pq.write_table(pa.table(columns), self.folder / "data" / f"{name}.parquet")

    def dataset_info(self, name: str, *, revision: str, timeout: float) -> Any:
        self.asked.append((name, revision))
        if self.failure:
            raise self.failure
        return SimpleNamespace(sha=COMMITS.get(revision))

    def load_dataset(self, path: str, name: str | None, *, revision: str, **options: Any) -> Any:
        self.loaded.append((path, name, revision))
        assert path == "org/name" and options.pop("streaming") is True and options.keys() == {"split"}
        return LOAD(str(self.folder), name, streaming=True, **options)


LOAD = datasets.load_dataset


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(datasets, "load_dataset", hub.load_dataset)
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return hub


def read(folder: Path, path: str, **source: Any) -> PreparedData:
    tokenizer = source.pop("tokenizer", "byte")
    return prepare(config_for([{"path": path, **source}], tokenizer=tokenizer), cache=folder / "cache")


def refusal(folder: Path, path: str, **source: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        read(folder, path, **source)
    assert caught.value.exit_code == 2 and len(str(caught.value).splitlines()) in (2, 3)
    assert caught.value.fix and "\n" not in caught.value.what
    assert not list((folder / "cache").glob("stores/*/*"))
    return caught.value


def answer(kind: type[errors.HfHubHTTPError], status: int) -> errors.HfHubHTTPError:
    return kind("no", response=Mock(status_code=status))


def test_the_documents_are_those_of_the_split_and_are_tokenised_once(tmp_path: Path, hub: Hub) -> None:
    first = read(tmp_path, "hub:org/name")
    expected = prepare_texts(tmp_path, TEXTS)
    for batch, other in zip(whole(first.train), whole(expected.train), strict=True):
        assert batch.input_ids.tolist() == other.input_ids.tolist()
    assert hub.loaded == [("org/name", None, "a" * 40)]
    assert any(f"hub:org/name?split=train&revision={'a' * 40}: 97 documents" in line for line in first.counts.lines())
    assert read(tmp_path, "hub:org/name").fingerprint == first.fingerprint
    assert len(hub.loaded) == len(hub.asked) == 1  # the commit is remembered, the tokens are there


def test_prompts_with_answers_are_examples_and_the_answers_alone_are_said(tmp_path: Path, hub: Hub) -> None:
    hub.write("other", prompt=["a question"], completion=["a long, long answer"])
    assert read(tmp_path, "hub:org/name?config=a%20b+c").counts.train.examples == 1
    (line,) = read(tmp_path, "hub:org/name?config=a%20b+c", text_key="completion").counts.answers_alone
    assert "'completion' alone is trained on; 'prompt' is left out" in line


def test_the_commit_the_part_and_the_column_are_what_is_cached(tmp_path: Path, hub: Hub) -> None:
    other = "hub:org/name?config=a%20b+c"
    same = [read(tmp_path, path).fingerprint for path in ("hub:org/name", "hub:org/name?split=train&revision=main")]
    assert len(set(same)) == 1
    differing = {
        *same,
        read(tmp_path, "hub:org/name?revision=v2").fingerprint,
        read(tmp_path, other, text_key="body").fingerprint,
    }
    assert len(differing) == 3
    parts = [("org/name", None, "a" * 40), ("org/name", None, "b" * 40)]
    assert hub.loaded == [*parts, ("org/name", "a b+c", "a" * 40)]


def test_a_commit_that_is_named_is_not_asked_for(tmp_path: Path, hub: Hub) -> None:
    hub.failure = ConnectionError("no network")
    read(tmp_path, f"hub:org/name?revision={'c' * 40}")
    assert hub.asked == [] and hub.loaded == [("org/name", None, "c" * 40)]


def test_a_moved_branch_is_read_where_it_was(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    first = read(tmp_path, "hub:org/name")
    monkeypatch.setitem(COMMITS, "main", "d" * 40)
    assert read(tmp_path, "hub:org/name").fingerprint == first.fingerprint


def test_a_tokenizer_is_trained_on_it_and_it_mixes_with_files(tmp_path: Path, hub: Hub) -> None:
    local = write_jsonl(tmp_path / "texts.jsonl", random_texts(1))
    sources = [{"path": "hub:org/name", "weight": 2}, {"path": str(local)}]
    data = prepare(config_for(sources, tokenizer="train:300"), cache=tmp_path / "cache")
    assert data.tokenizer.vocab_size == 300 and data.counts.documents == 97 + 53
    assert [source.documents for source in data.counts.sources] == [97, 53]


@pytest.mark.parametrize(
    ("failure", "what", "fix"),
    [
        (OSError("[Errno -2] unknown"), "the Hugging Face hub cannot be reached ([Errno -2] unknown)", "network"),
        (
            errors.OfflineModeIsEnabled("offline mode"),
            "this machine has no copy of it, and HF_HUB_OFFLINE forbids to fetch one",
            "network",
        ),
        (
            answer(errors.RepositoryNotFoundError, 404),
            "the hub has no such repository, or it is private",
            "hf auth login",
        ),
        (
            answer(errors.GatedRepoError, 403),
            "the hub asks who you are (the repository is gated)",
            "hf auth login",
        ),
        (answer(errors.RevisionNotFoundError, 404), "the hub has no such revision of it", "spelling"),
        (None, "the hub names no commit of it", "?revision=COMMIT"),
    ],
)
def test_what_the_hub_refuses(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, failure: Exception | None, what: str, fix: str
) -> None:
    hub.failure = failure
    monkeypatch.delitem(COMMITS, "main")
    error = refusal(tmp_path, "hub:org/name")
    assert error.what == f"data.train: hub:org/name: {what}" and fix in str(error.fix)
    hub.failure, COMMITS["main"] = None, "e" * 40
    assert read(tmp_path, "hub:org/name")  # a refusal is not remembered


@pytest.mark.parametrize(
    ("path", "what", "fix"),
    [
        ("hub:org/name?split=odd", ":2: 'text' holds null, not a string", "names the column"),
        ("hub:org/name?split=no", ": cannot be read: Bad split: no. Available splits: ['train', 'odd']", "split=S"),
        ("hub:org/name?config=no", ": cannot be read: BuilderConfig 'no' not found. Available: ['plain'", "config=C"),
        ("hub:org/name?config=a%20b%2Bc", ":1: no column 'text'; the columns are 'body', 'n'", "text_key=body"),
    ],
)
def test_what_is_not_in_the_dataset(tmp_path: Path, hub: Hub, path: str, what: str, fix: str) -> None:
    error = refusal(tmp_path, path)
    assert error.what.startswith(f"data.train: hub:org/name{what}") and fix in str(error.fix)


@pytest.mark.parametrize(
    ("failure", "said"),
    [
        (ConnectionError("Couldn't reach 'org/name'"), "Couldn't reach 'org/name'"),
        (RuntimeError("Dataset scripts are no longer supported, but found name.py"), "scripts are no longer supported"),
        (ValueError("Config name is missing.\nPick one: ['a']\nExample of usage:\n\tx"), "missing. Pick one: ['a']"),
    ],
)
def test_what_fails_while_it_is_read(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, failure: Exception, said: str
) -> None:
    def fail(*parts: Any, **options: Any) -> Any:
        raise failure

    monkeypatch.setattr(datasets, "load_dataset", fail)
    what = refusal(tmp_path, "hub:org/name").what
    assert what.startswith("data.train: hub:org/name: cannot be read: ") and said in what


@pytest.mark.parametrize(
    "path", ["hub:name", "hub:", "hub:a/b/c", "hub:org/name?splits=x", "hub:org/name?split", "hub:o/n?x"]
)
def test_an_address_that_is_none_asks_nothing(tmp_path: Path, hub: Hub, path: str) -> None:
    assert refusal(tmp_path, path).what.startswith(f"data.train: {path}: ")
    assert hub.asked == []


def test_a_folder_of_the_same_name_is_not_read_instead(
    tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert refusal(tmp_path, "hub:org/name").what == "data.train: hub:org/name: a folder 'org' is here"


@pytest.mark.parametrize("installed", [None, SimpleNamespace(__version__="4.9.1")])
def test_what_to_install_is_said(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch, installed: Any) -> None:
    monkeypatch.setitem(sys.modules, "datasets", installed)
    assert "fivefold[hub]" in str(refusal(tmp_path, "hub:org/name").fix)


def test_an_address_is_read_back_as_it_is_written() -> None:
    for address in (Address("o/n"), Address("o/n", "a b+c&d=é/f", "x+y", "refs/pr/1")):
        assert Address.parse(str(address), "data.train") == address
