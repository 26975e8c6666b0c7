"""Where generation runs."""

from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest

from fivefold.core.errors import UserError
from fivefold.generation import GenerateRequest, start
from fivefold.launch import once


def test_a_layout_larger_than_the_machine_is_refused_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(once, "device_kind", lambda _: "cuda")
    monkeypatch.setattr(once, "gpus", lambda: 1)
    with pytest.raises(UserError, match="tp 2 needs 2 GPUs, but this machine has 1") as caught:
        start(GenerateRequest(model="runs/demo", prompt="def ", layout="tp2"))
    assert "--device cpu" in str(caught.value.fix)


def test_quiet_reaches_the_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold

    seen: list[Any] = []

    def write(crew: Any, request: dict[str, Any], **_: object) -> None:
        seen.append(request)
        with open(request["result"], "w") as file:
            file.write('"text"')

    monkeypatch.setattr(once, "Workers", MagicMock())
    monkeypatch.setattr(once, "start_workers", write)
    assert fivefold.generate("runs/demo", "def ", layout="tp2", device="cpu", top_k=5) == "text"
    body = seen[0]["body"]
    assert (body["quiet"], body["generate"]["top_k"], seen[0]["device"]) == (True, 5, "cpu")


def test_a_run_that_is_not_there_is_answered_with_those_that_are(tmp_path: Path) -> None:
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "run.yaml").touch()
    with pytest.raises(UserError, match="neither a run folder") as caught:
        start(GenerateRequest(model=str(tmp_path / "dmeo"), prompt="def "), device="cpu")
    assert caught.value.fix == f"runs in {tmp_path}: demo"


def test_an_adapter_without_its_model_is_refused_with_what_to_name(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="is a PEFT adapter, without the model") as caught:
        start(GenerateRequest(model=str(tmp_path), prompt="def "), device="cpu")
    assert "--merge" in str(caught.value.fix)
