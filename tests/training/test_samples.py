"""Samples of a run: texts, conversations through the chat template, and the records of a file."""

import json
import shlex
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from fivefold.config import RunConfig, load_config
from fivefold.core.errors import UserError
from fivefold.data.prepare import prepare
from fivefold.generation import GenerateRequest, start
from fivefold.generation.prompts import Prompt
from fivefold.launch.folder import next_commands
from fivefold.training import evaluation
from fivefold.training.evaluation import OF_FILE, Samples, as_text
from tests.training.bodies import run_dir, run_file, train

TURNS = [
    {"role": "system", "content": "Kurz."}, {"role": "user", "content": "Wer?"},
    {"role": "assistant", "content": "Der kleine."}, {"role": "user", "content": "Wohin?"},
]  # fmt: skip


def chats(folder: Path, records: int = 40) -> Path:
    file = folder / "chats.jsonl"
    turns = [{"role": "user", "content": "Wer fährt?"}, {"role": "assistant", "content": "Der kleine Häwelmann."}]
    file.write_text("".join(json.dumps({"messages": turns, "id": at}) + "\n" for at in range(records)))
    return file


def chat_run(folder: Path, **changes: Any) -> dict[str, Any]:
    """A run on conversations, which bytes and the built-in template write."""
    options: dict[str, Any] = {"train__max_steps": 4, "sample__every": 2, "sample__max_new_tokens": 9}
    tree = run_file(folder, **options | changes)
    tree["data"] |= {"train": str(chats(folder)), "seq_length": 200}
    tree["model"]["overrides"] = {"max_position_embeddings": 256}
    return tree


def drawn(tree: dict[str, Any]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run_dir(tree) / "samples.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_texts_conversations_and_the_records_of_a_file(tmp_path: Path) -> None:
    """On two ranks; each answer is the one that `generate` gives of the checkpoint of that step."""
    asked = tmp_path / "asked.jsonl"
    asked.write_text(
        json.dumps({"messages": TURNS[1:2], "id": 7}) + "\n" + json.dumps({"prompt": "mit "}) + "\n", encoding="utf-8"
    )
    tree = chat_run(
        tmp_path, sample__prompts=["der "], sample__messages=["Hallo?", TURNS], sample__file=str(asked),
        checkpoint__every=2,
    )  # fmt: skip
    ran = train(tree)
    assert ran.error is None
    rows = drawn(tree)
    assert [row["step"] for row in rows] == [2] * 5 + [4] * 5
    assert [row["prompt"] for row in rows[:5]] == [
        "der ", "user: Hallo?\nassistant: ",
        "system: Kurz.\nuser: Wer?\nassistant: Der kleine.\nuser: Wohin?\nassistant: ",
        "user: Wer?\nassistant: ", "mit ",
    ]  # fmt: skip
    hello = [{"role": "user", "content": "Hallo?"}]
    assert [row.get("messages") for row in rows[:5]] == [None, hello, TURNS, TURNS[1:2], None]
    assert "user: Hallo?" in ran.screen
    chat = [
        shlex.split(line.removeprefix("next"), comments=True) for line in ran.screen.splitlines() if "generate" in line
    ]
    assert chat == [["fivefold", "generate", str(run_dir(tree)), "--chat", "--prompt", "Hallo?"]]
    for step in (2, 4):
        for row in (row for row in rows if row["step"] == step):
            one, out = tmp_path / "one.jsonl", tmp_path / "out.jsonl"
            given = {"messages": row["messages"]} if "messages" in row else {"prompt": row["prompt"]}
            one.write_text(json.dumps(given) + "\n")
            request = GenerateRequest(
                model=str(run_dir(tree)), step=step, prompts=str(one), out=str(out), max_new_tokens=9, temperature=0.7,
                top_k=40, top_p=1.0, seed=7,
            )  # fmt: skip
            start(request, device="cpu", quiet=True)
            assert json.loads(out.read_text())["completion"] == row["text"], given


@pytest.mark.full
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"sample__messages": [[{"role": "robot", "content": "x"}]]}, "sample.messages[0], turn 1: there is no role"),
        ({"sample__messages": ["Hi", TURNS[:3]]}, "sample.messages[1]: the last turn is the assistant's"),
        ({"sample__file": "gone.jsonl"}, "sample.file gone.jsonl cannot be read: No such file"),
    ],
)
def test_what_no_answer_can_be_drawn_for_is_refused_before_the_first_step(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    tree = chat_run(tmp_path, **changes)
    error = train(tree, 1).error
    assert isinstance(error, UserError) and said in error.what
    assert not (run_dir(tree) / "metrics.jsonl").exists()


@pytest.mark.full
def test_a_long_file_is_not_read_to_its_end(tmp_path: Path) -> None:
    tree = chat_run(tmp_path, train__max_steps=1, sample__max_new_tokens=1)
    tree["sample"]["file"] = str(tmp_path / "many.txt")
    Path(tree["sample"]["file"]).write_text("".join(f"der {at}\n" for at in range(40)))
    assert train(tree, 1).error is None
    assert [row["prompt"] for row in drawn(tree)] == [f"der {at}" for at in range(OF_FILE)]


@pytest.mark.parametrize(
    ("written", "conversations"),
    [
        ("Hi", [["Hi"]]),
        (["Hi", "Ho"], [["Hi"], ["Ho"]]),
        ([{"role": "user", "content": "Hi"}], [["Hi"]]),  # the turns of one conversation
        (["Hi", [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]], [["Hi"], ["S", "U"]]),
    ],
)
def test_forms_of_conversations(written: Any, conversations: list[list[str]]) -> None:
    config = load_config(None, [f"sample.messages={json.dumps(written)}"])
    assert [[turn["content"] for turn in turns] for turns in config.sample.messages] == conversations
    assert (
        config.sample.is_on
        and not load_config(None, [f"sample.messages={json.dumps(written)}", "sample.every=0"]).sample.is_on
    )
    assert RunConfig.model_validate(config.model_dump(mode="json", by_alias=True)) == config


def test_an_answer_ends_where_its_prompt_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = list[Any]()

    def pieces(model: Any, tokenizer: Any, ids: Any, ends: Any, **options: Any) -> list[str]:
        seen.append((ids.tolist(), ends, options))
        return ["a", "b"]

    monkeypatch.setattr(evaluation, "pieces", pieces)
    found = Samples.__new__(Samples)
    found._opened, found._options = Mock(), {"seed": 7}
    found._prompts = [Prompt([1, 2], {"prompt": "x"}, (5,), ("END",))]
    assert [one.row for one in found.draw(3)] == [{"step": 3, "prompt": "x", "text": "ab"}]
    assert seen == [([[1, 2]], (5,), {"stop": ("END",), "seed": 7})]


def test_a_conversation_for_people() -> None:
    assert as_text([]) == ""
    assert as_text(TURNS[1:2]) == "user: Wer?\nassistant: "
    assert as_text([{"role": "assistant", "content": None, "tool_calls": []}]) == "assistant: \nassistant: "


def test_a_run_on_conversations_is_told_from_one_on_texts(tmp_path: Path) -> None:
    """Of prompts and completions that are texts, no template writes anything."""
    cache = tmp_path / "cache"
    tree = chat_run(tmp_path)
    assert prepare(RunConfig.model_validate(tree), cache=cache).converses
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"prompt": f"{at} und", "completion": f" {at}"}) + "\n" for at in range(30)))
    tree["data"] |= {"train": [{"path": str(texts), "format": "completion"}]}
    found = prepare(RunConfig.model_validate(tree), cache=cache)
    assert found.counts.train.examples and not found.converses
    tree["data"] |= {"train": str(tmp_path / "corpus.txt")}
    assert not prepare(RunConfig.model_validate(tree), cache=cache).converses


def test_the_next_lines_talk_with_a_model_that_was_trained_to() -> None:
    config = load_config(None, ["run.name=x", 'sample.prompts=["der"]'])
    assert any("generate runs/x --prompt der" in line for line in next_commands(config, step=2, total_steps=2))
    for best, is_said in ((None, False), (1, True), (2, False)):  # the last step needs no number
        lines = next_commands(config, step=2, total_steps=2, best=best)
        assert any("--step 1" in line for line in lines) == any("--best" in line for line in lines) == is_said
        assert not any("--step 2" in line for line in lines)
    lines = next_commands(config, step=2, total_steps=2, converses=True)
    assert any("generate runs/x --chat --prompt Hello" in line for line in lines)
