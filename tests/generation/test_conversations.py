"""Conversations and files of prompts say what `transformers` says, alone and over workers."""

import io
import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tokenizers import AddedToken
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.core.errors import UserError
from fivefold.data.chat import CHATML, ChatTemplate
from fivefold.data.tokenizer import find_tokenizer
from fivefold.generation import GenerateRequest, prompts, start
from fivefold.generation.opened import OpenModel, open_model
from fivefold.generation.prompts import asked_ids, end_of_turn, endings, read_records
from fivefold.generation.text import StoppedText
from fivefold.launch.world import World, join
from tests.checkpoint.folders import OVERRIDES, hf_folder
from tests.models import tiny
from tests.parity import Case
from tests.tiers import put_off

TOKENS = 9
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": TOKENS}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    wide = (*OVERRIDES, ("max_position_embeddings", 512))
    return hf_folder(Case("single+fp32", overrides=wide), tmp_path_factory.mktemp("chat") / "hf")


class Plain:
    """`transformers`, its tokenizer and its own `generate`."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder, chat_template=CHATML)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def go_on(self, text: str) -> str:
        ids = torch.tensor([self.tokenizer(text, add_special_tokens=False).input_ids])
        out = self.model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=TOKENS, top_p=None,
            temperature=None, pad_token_id=0,
        )  # fmt: skip
        return str(self.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))

    def answer(self, turns: list[dict[str, str]]) -> str:
        text = self.tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return self.go_on(str(text))

    def conversation(self, *said: str) -> list[str]:
        turns: list[dict[str, str]] = []
        for each in said:
            turns.append({"role": "user", "content": each})
            turns.append({"role": "assistant", "content": self.answer(turns)})
        return [turn["content"] for turn in turns[1::2]]


@pytest.fixture(scope="module")
def plain(folder: Path) -> Plain:
    return Plain(folder)


# ---- chat ------------------------------------------------------------------------------------------------------------

SAID = "What?\nwhy so\n\n/reset\nWhat?\n/exit\nis not read\n"


def expected_answers(plain: Plain) -> str:
    return "".join(f"{text}\n" for text in (*plain.conversation("What?", "why so"), *plain.conversation("What?")))


def test_a_conversation_from_a_pipe(
    folder: Path, plain: Plain, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(SAID))
    start(GenerateRequest(model=str(folder), chat=True, **GREEDY), device="cpu")
    assert capfd.readouterr().out == expected_answers(plain)


@pytest.mark.full
@pytest.mark.parametrize("ended", [put_off("by a word"), "by the end of input"])
def test_a_conversation_over_workers(folder: Path, plain: Plain, ended: str) -> None:
    said = SAID if ended == "by a word" else SAID.partition("/exit")[0]
    done = subprocess.run(command(folder, "tp2"), input=said.encode(), capture_output=True, timeout=200, check=False)
    not_used = "do_sample True, temperature 0.6, top_p 0.9"
    said_beside = "tokenizer: it has no chat template: conversations are written in the built-in ChatML\n"
    said_beside += f"not used of the model's generation_config.json: {not_used} (fivefold docs howto/generate)\n"
    assert (done.returncode, done.stderr.decode()) == (0, said_beside)
    assert done.stdout.decode("utf-8", "replace") == expected_answers(plain)


def command(folder: Path, layout: str) -> list[str]:
    options = ["--chat", "--layout", layout, "--device", "cpu", "--temperature", "0", "--max-new-tokens", str(TOKENS)]
    return [sys.executable, "-m", "fivefold", "generate", str(folder), *options]


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("single"), "tp2"])
def test_ctrl_c_ends_a_conversation_on_a_terminal(folder: Path, layout: str) -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command(folder, layout), stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    screen = read_until(ours, "> ")
    os.write(ours, b"hello\n")
    screen += read_until(ours, "\n> ")
    time.sleep(1)  # the prompt stands there before the line is read, and Ctrl-C in between is lost to Python's input()
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(240) == 0  # a busy machine takes long to end processes
    assert "Traceback" not in screen and "/reset" in screen
    os.close(ours)


def read_until(terminal: int, words: str, seconds: float = 120) -> str:
    found, deadline = "", time.monotonic() + seconds
    while words not in found and time.monotonic() < deadline:
        found += os.read(terminal, 4096).decode("utf-8", "replace")
    return found


def test_one_question(folder: Path, plain: Plain, capfd: pytest.CaptureFixture[str]) -> None:
    turns = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2+2?"}]
    request = GenerateRequest(model=str(folder), prompt="2+2?", chat=True, system="Be brief.", **GREEDY)
    assert start(request, device="cpu") == plain.answer(turns)
    assert capfd.readouterr().out == plain.answer(turns) + "\n"


# ---- where an answer ends --------------------------------------------------------------------------------------------

LLAMA = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n{{ m.content | trim }}"
    "<|eot_id|>{% endfor %}{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
PHI = (  # EOS behind all
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}</s>{% endif %}"
)
OLMO = (  # the last answer ends otherwise than those before
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ '</s>' if loop.last else '<|im_end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize(
    ("source", "ending"), [(CHATML, "<|im_end|>"), (LLAMA, "<|eot_id|>"), (BARE, ""), (PHI, "<|end|>"), (OLMO, "</s>")]
)
def test_a_template_says_how_a_turn_ends(source: str, ending: str) -> None:
    assert end_of_turn(ChatTemplate(source, {"bos_token": "<s>"})) == ending


@pytest.mark.parametrize("is_token", [True, False])
def test_the_end_of_a_turn_is_a_token_or_a_text(is_token: bool, tmp_path: Path) -> None:
    info = find_tokenizer("byte", model="", corpus=(), root=tmp_path)
    tokenizer = info.load()
    if is_token:
        tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    opened = OpenModel(tmp_path, None, tokenizer, info, (256,), {})
    assert endings(opened) == (((256, 257), ()) if is_token else ((256,), ("<|im_end|>",)))


def test_a_template_that_writes_nothing_is_named(tmp_path: Path) -> None:
    info = replace(find_tokenizer("byte", model="", corpus=(), root=tmp_path), template=ChatTemplate(""))
    opened = OpenModel(tmp_path, SimpleNamespace(config=tiny.llama()), info.load(), info, (256,), {})
    with pytest.raises(UserError, match="writes nothing of the conversation"):
        asked_ids(opened, [{"role": "user", "content": "hi"}])


def test_a_text_ends_before_a_stop_and_nothing_of_it_is_shown(tmp_path: Path) -> None:
    tokenizer = find_tokenizer("byte", model="", corpus=(), root=tmp_path).load()
    stream, given = StoppedText(tokenizer, ["<end>", "!!"]), []
    for byte in b"a <e<en !? <end> more":
        given.append(stream.push(byte))
        if stream.is_over:
            break
    assert "".join(given) + stream.finish() == "a <e<en !? "
    assert given[:7] == ["a", " ", "", "", "<e", "", ""]  # what may be a stop is held back
    stream = StoppedText(tokenizer, ["<end>"])
    assert "".join(map(stream.push, b"a <en")) + stream.finish() == "a <en"


# ---- files of prompts ------------------------------------------------------------------------------------------------

LINES = ["def naïve(", "x", "A longer line than both of the others, by far.", "x y"]


@pytest.mark.full
@pytest.mark.parametrize("layout", [put_off("single"), "tp2"])
def test_a_file_of_prompts(folder: Path, plain: Plain, layout: str, tmp_path: Path) -> None:
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text("\n\n".join(LINES) + "\n", encoding="utf-8")
    request = GenerateRequest(model=str(folder), prompts=str(file), out=str(out), layout=layout, batch_size=3, **GREEDY)
    start(request, device="cpu")
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == LINES
    assert [row["completion"] for row in rows] == [plain.go_on(line) for line in LINES]
    assert [row["prompt_tokens"] for row in rows] == [len(line.encode()) for line in LINES]
    assert {row["finish_reason"] for row in rows} <= {"length", "stop"}


def test_a_prompt_draws_by_its_place_in_the_file(folder: Path, tmp_path: Path) -> None:
    """Whatever the batches; the same prompt once more draws something else."""
    file, out, said = tmp_path / "prompts.txt", tmp_path / "out.jsonl", []
    file.write_text("x\nx\nx\n", encoding="utf-8")
    for size in (1, 2, 3):
        drawn: dict[str, Any] = {**GREEDY, "temperature": 1.0, "batch_size": size}
        start(GenerateRequest(model=str(folder), prompts=str(file), out=str(out), **drawn), device="cpu")
        said.append([json.loads(line)["completion"] for line in out.read_text(encoding="utf-8").split("\n") if line])
    assert said[0] == said[1] == said[2] and len(set(said[0])) == 3


def test_records_are_prompts_and_conversations(
    folder: Path, plain: Plain, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    turns = [
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "2+2"},
    ]  # fmt: skip
    records = [{"prompt": "def f(", "id": 7}, {"messages": turns}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    start(GenerateRequest(model=str(folder), prompts=str(file), **GREEDY), device="cpu")
    rows = [json.loads(line) for line in capfd.readouterr().out.splitlines()]
    assert [{key: row[key] for key in given} for row, given in zip(rows, records, strict=True)] == records
    assert [row["completion"] for row in rows] == [plain.go_on("def f("), plain.answer(turns)]


def test_a_line_ends_where_a_line_of_a_file_does(tmp_path: Path) -> None:
    """Not at the other characters that end a line of text, which JSON need not escape."""
    said = "one\u2028two\x85three\x0cfour"
    records, texts = tmp_path / "prompts.jsonl", tmp_path / "prompts.txt"
    records.write_text(json.dumps({"prompt": said}, ensure_ascii=False) + "\n", encoding="utf-8")
    texts.write_bytes(f"{said}\r\nnext".encode())
    assert [record["prompt"] for record, _ in read_records(records)] == [said]
    assert [record["prompt"] for record, _ in read_records(texts)] == [said, "next"]


def test_an_answer_ends_before_a_stop_text(folder: Path, plain: Plain, tmp_path: Path) -> None:
    whole = plain.go_on(LINES[0])
    stop = whole[3:5]
    request = GenerateRequest(model=str(folder), prompt=LINES[0], stop=(stop,), **GREEDY)
    assert start(request, device="cpu", quiet=True) == whole[: whole.index(stop)]
    file, out = tmp_path / "prompts.txt", tmp_path / "out.jsonl"
    file.write_text(LINES[0], encoding="utf-8")
    start(GenerateRequest(model=str(folder), prompts=str(file), out=str(out), stop=(stop,), **GREEDY), device="cpu")
    row = json.loads(out.read_text(encoding="utf-8"))
    assert (row["completion"], row["finish_reason"]) == (whole[: whole.index(stop)], "stop")


@pytest.mark.parametrize("name", ["prompts.txt", "prompts.jsonl"])
def test_a_prompt_ends_where_its_line_does(folder: Path, tmp_path: Path, name: str) -> None:
    """Not at what else Unicode calls the end of a line; and a byte order mark is none of its text."""
    file, out, texts = tmp_path / name, tmp_path / "new" / "out.jsonl", ["a\u2028b", "c\x85d"]
    lines = [json.dumps({"prompt": each}, ensure_ascii=False) if file.suffix == ".jsonl" else each for each in texts]
    file.write_text("".join(f"{line}\r\n" for line in lines), encoding="utf-8-sig", newline="")
    start(GenerateRequest(model=str(folder), prompts=str(file), out=str(out), **GREEDY), device="cpu")
    written = out.read_text(encoding="utf-8").split("\n")
    assert [json.loads(line)["prompt"] for line in written if line] == texts


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_disk_is_told(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_text("a", encoding="utf-8")
    with pytest.raises(UserError, match="cannot write /dev/full"):
        start(GenerateRequest(model=str(folder), prompts=str(file), out="/dev/full", **GREEDY), device="cpu")


def answer(request: GenerateRequest) -> None:
    """In this process."""
    with join(World()) as world:
        opened = open_model(request.model, world, layout="single+fp32", step=None, verb="generate")
        prompts.answer_file(opened, request, world)


@pytest.mark.parametrize("error", [UserError("no room"), KeyboardInterrupt()])
def test_an_older_file_stays_until_the_last_answer(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    """What a run that ends before has answered is beside it. A link is followed."""
    file, out, link = tmp_path / "prompts.txt", tmp_path / "out.jsonl", tmp_path / "link"
    file.write_text("a\nb\n", encoding="utf-8")
    out.write_text("older", encoding="utf-8")
    link.symlink_to(out)
    request = GenerateRequest(model=str(folder), prompts=str(file), out=str(link), batch_size=1, **GREEDY)
    original = prompts.answers

    def some(*given: Any, first: int) -> list[prompts.Answer]:
        if first:
            raise error
        return original(*given, first=first)

    with monkeypatch.context() as changed, pytest.raises(type(error)):
        changed.setattr(prompts, "answers", some)
        answer(request)
    part = tmp_path / "out.jsonl.part"
    assert out.read_text(encoding="utf-8") == "older" and json.loads(part.read_text(encoding="utf-8"))["prompt"] == "a"
    answer(request)
    rows = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [row["prompt"] for row in rows] == ["a", "b"] and link.is_symlink() and not part.exists()


def test_what_is_no_prompt_is_named(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    for text, message in (
        ('{"prompt": "a"}\n{"prompt": ', "line 2: not JSON"),
        ('{"prompt": "a"}\n{"prompt": "b", "id": NaN}', "line 2: not JSON: NaN"),
        ('{"prompt": "a"}\n{"text": "b"}', "line 2: not an object with one of 'prompt' and 'messages'"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 1: the last turn is the assistant's"),
        ('{"messages": [{"role": "wizard", "content": "a"}]}', "line 1, turn 1: there is no role 'wizard'"),
        ('{"prompt": "a", "id": "\\ud800"}', "line 1: half of a surrogate pair"),
        ("", "has no prompts"),
    ):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UserError, match=message):
            start(GenerateRequest(model=str(folder), prompts=str(file)), device="cpu")


def test_options_that_do_not_belong_together() -> None:
    for options, message in (
        ({}, "nothing to continue"),
        ({"prompt": "a", "prompts": "b"}, "a prompt and a file of prompts"),
        ({"prompt": "a", "out": "b"}, "--out takes the answers"),
        ({"prompt": "a", "system": "b"}, "a system text belongs to a conversation"),
        ({"prompt": "a", "top_p": 0.0}, "top_p 0.0 is not a probability"),
        ({"prompt": "a", "top_p": 1.5}, "top_p 1.5 is not a probability"),
        ({"prompt": "a", "stop": ("",)}, "an empty stop text"),
    ):
        with pytest.raises(UserError, match=message):
            GenerateRequest(model="m", **options)


def test_a_byte_order_mark_is_no_part_of_the_first_prompt(tmp_path: Path) -> None:
    file = tmp_path / "prompts.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\ntwo\n")
    assert [record["prompt"].strip() for record, _ in read_records(file)] == ["one", "two"]


def test_half_of_a_surrogate_pair_is_refused_before_anything_is_generated(tmp_path: Path) -> None:
    """Also in what is only handed on: the answer's line could not be written."""
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "one", "note": "\\ud800"}\n')
    with pytest.raises(UserError, match="line 1: half of a surrogate pair"):
        list(read_records(file))


class Letters:
    """A model opened, without the model: a token is a letter."""

    ends, stop, model, tokenizer = (0,), ("<folder>",), None, None

    def __init__(self) -> None:
        source = "{% if tools %}[{{ tools[0].function.name }}]{% endif %}" + CHATML
        self.info = SimpleNamespace(template=ChatTemplate(source))
        self.tokenizer = SimpleNamespace(encode=lambda text, add_special_tokens: SimpleNamespace(ids=self.encode(text)))

    def encode(self, text: str) -> list[int]:
        return [ord(each) for each in text]


def test_a_record_says_its_system_text_and_its_tools() -> None:
    options: dict[str, Any] = {"chat": True, "system": "ours", "stop": ("#",)}
    record = {"messages": [{"role": "user", "content": "q"}], "system": "its", "tools": [{"name": "TOOL"}]}
    prompt = prompts.prompt_of(Letters(), record, "line 1", **options)  # type: ignore[arg-type]
    said = "".join(map(chr, prompt.ids))
    assert said == "[TOOL]<|im_start|>system\nits<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.stop == ("#", "<folder>", "<|im_end|>")
    del record["system"]
    prompt = prompts.prompt_of(Letters(), record, "line 1", **options)  # type: ignore[arg-type]
    assert "system\nours<|im_end|>" in "".join(map(chr, prompt.ids))


def test_each_answer_of_a_conversation_draws_other_numbers_and_ends_at_the_stops_of_the_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    given: list[dict[str, Any]] = []

    def pieces(*_: object, **options: Any) -> Iterator[str]:
        given.append(options)
        yield "a"

    monkeypatch.setattr(prompts, "pieces", pieces)
    chat = prompts.Chat(Letters(), GenerateRequest(model="x", chat=True, stop=("#",), seed=5))  # type: ignore[arg-type]
    assert [*chat.answer("q"), *chat.answer("r")] == ["a", "a"]
    assert [each["seed"] for each in given] == [5, 6]
    assert all(each["stop"] == ("#", "<folder>", "<|im_end|>") for each in given)
