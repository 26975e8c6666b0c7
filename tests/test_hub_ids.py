"""A hub id that cannot be had: what it is, why, and what to do; within seconds, and before anything is started."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from fivefold import cli
from fivefold.config import load_config
from fivefold.core import hub
from fivefold.core.errors import UserError
from fivefold.generation import GenerateRequest
from fivefold.generation.run import generate
from fivefold.launch.model import check_model
from fivefold.launch.world import World
from fivefold.models.build import load_model_config

Ask = Callable[..., UserError]


class Answering(BaseHTTPRequestHandler):
    """Every request is answered by `status`, with the hub's `code` for it."""

    status, code = 404, "RepoNotFound"

    def do_GET(self) -> None:
        self.send_response(self.status)
        self.send_header("X-Error-Code", self.code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Puts the hub at an address, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)

    def put(address: str) -> None:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/{revision}/{filename}")

    return put


def refused(action: Callable[[], Any]) -> UserError:
    with pytest.raises(UserError) as raised:
        action()
    assert raised.value.exit_code == 2
    return raised.value


@pytest.mark.parametrize(
    ("status", "code", "what", "fix"),
    [
        (401, "RepoNotFound", "the hub has no such repository, or it is private", "hf auth login"),
        (404, "RepoNotFound", "the hub has no such repository, or it is private", "check the spelling"),
        (403, "GatedRepo", "the repository is gated", "accept its terms on its page, and log in"),
        (503, "", "the hub answered 503", "name a local folder"),
    ],
)
def test_what_the_hub_answers(server: str, at: Any, status: int, code: str, what: str, fix: str) -> None:
    at(server)
    Answering.status, Answering.code = status, code
    error = refused(lambda: hub.config_file("org/name"))
    assert error.what.startswith("model.name_or_path org/name: ") and what in error.what
    assert fix in str(error.fix)


def test_a_hub_that_never_answers_is_given_up_in_seconds(at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "SECONDS", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(1)
        at(f"http://127.0.0.1:{silent.getsockname()[1]}")
        started = time.monotonic()
        error = refused(lambda: hub.config_file("org/name"))
    assert "the Hugging Face hub cannot be reached" in error.what and time.monotonic() - started < 5


def test_offline_is_said(at: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    at("http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    error = refused(lambda: hub.config_file("org/name"))
    assert "HF_HUB_OFFLINE forbids" in error.what and "unset HF_HUB_OFFLINE" in str(error.fix)


@pytest.fixture
def unreachable(at: Any) -> Iterator[None]:
    with socket.socket() as shut:  # bound, and not listening
        shut.bind(("127.0.0.1", 0))
        at(f"http://127.0.0.1:{shut.getsockname()[1]}")
        yield


@pytest.mark.usefixtures("unreachable")
def test_every_way_to_the_hub_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    config = load_config(None, ["model.name_or_path=org/name", "model.init=pretrained", "data.seq_length=64"])
    ways: list[Callable[[], Any]] = [
        lambda: check_model(config),
        lambda: load_model_config("org/name"),
        lambda: generate(GenerateRequest(model="org/name", prompt="a"), World(is_local=True)),
    ]
    for way in ways:
        error = refused(way)
        assert error.what.startswith("model.name_or_path org/name: the Hugging Face hub cannot be reached")
        assert "name a local folder (hf download org/name" in str(error.fix)


@pytest.mark.full
@pytest.mark.usefixtures("unreachable")
@pytest.mark.parametrize(
    ("override", "key"),
    [("model.name_or_path=org/name", "model.name_or_path"), ("tokenizer.name_or_path=org/name", "tokenizer")],
)
def test_train_says_which_of_the_two_it_is(
    override: str, key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "notes.txt").write_text("a few words")
    with pytest.raises(SystemExit) as ended:
        cli.main(["train", override, "data.train=notes.txt", "data.seq_length=64", "train.device=cpu"])
    said = capsys.readouterr().err
    assert ended.value.code == 2 and said.startswith(key) and "org/name: the Hugging Face hub cannot be reached" in said
    assert "byte" not in said and not (tmp_path / "runs").exists()


@pytest.mark.usefixtures("unreachable")
def test_a_copy_on_this_machine_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "hub" / "models--org--name"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    (folder / "snapshots" / ("0" * 40)).mkdir(parents=True)
    (folder / "snapshots" / ("0" * 40) / "config.json").write_text(json.dumps({"num_attention_heads": 4}))
    assert json.loads(hub.config_file("org/name").read_text()) == {"num_attention_heads": 4}
    config = load_config(None, ["model.name_or_path=org/name", "layout=tp3"])
    assert "tp=3 does not fit num_attention_heads=4" in refused(lambda: check_model(config)).what
