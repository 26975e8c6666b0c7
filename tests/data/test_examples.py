"""Conversations, and prompts with answers: the text is that of the tokenizer's template, and the answers are trained.

What is trained is read back as text: the targets of a piece that are not -100.
"""

import json
import resource
import shutil
import signal
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import ByteLevel

from fivefold import cli
from fivefold.core.errors import UserError
from fivefold.data import IGNORE, PreparedData, chat, formats, prepare, shown, store, units
from fivefold.data.chat import CHATML, ChatTemplate, within
from fivefold.data.examples import Example, Rated, Text, beside_others
from fivefold.data.examples import chat as chat_example
from fivefold.data.records import Records, example_of
from fivefold.data.source import Source, resolve
from fivefold.data.split import blocks_of
from fivefold.data.tokenizer import _byte_characters, find_tokenizer
from fivefold.generation.prompts import end_of_turn
from tests.data.helpers import config_for
from tests.data.tokenizers import byte_folder

LLAMA = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' "
    "+ message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# As Qwen3: what was thought is left out of all answers but the last, and the question for an answer has more in it.
THINKS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}"
    "{% if message.role == 'assistant' and not loop.last %}{{ message.content.split('</think>')[-1].lstrip('\n') }}"
    "{% else %}{{ message.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
MARKS = (
    "{% for message in messages %}{% if message.role == 'assistant' %}{% generation %}{{ message.content }}#"
    "{% endgeneration %}{% else %}{{ message.content }}?{% endif %}{% endfor %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<s>")


@pytest.fixture
def folder(tmp_path: Path) -> Any:
    """Makes a tokenizer's folder: bytes, and special tokens of their own; `trims` as GPT-2's and Llama's do."""

    def make(template: str | None = None, *, eos: str = "<|endoftext|>", trims: bool = True) -> Path:
        characters = {character: byte for byte, character in enumerate(_byte_characters())}
        merges = [("Ġ", "y"), ("Ċ", "Ċ")]
        vocabulary = characters | {a + b: 256 + number for number, (a, b) in enumerate(merges)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
        tokenizer.decoder = ByteLevel()
        tokenizer.add_special_tokens(list(SPECIAL))
        where = tmp_path / "tokenizer"
        where.mkdir(exist_ok=True)
        tokenizer.save(str(where / "tokenizer.json"))
        config = {"eos_token": eos, "bos_token": "<s>"} | ({"chat_template": template} if template else {})
        (where / "tokenizer_config.json").write_text(json.dumps(config))
        return where

    return make


def read(tmp_path: Path, records: list[dict[str, Any]], tokenizer: Path | str = "byte", **source: Any) -> PreparedData:
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    length = source.pop("seq_length", 400)
    config = config_for([{"path": str(path), **source}], tokenizer=tokenizer, seq_length=length, packing=False)
    return prepare(config, cache=tmp_path / "cache")


def texts(data: PreparedData, row: int = 0) -> tuple[str, str]:
    """What a row holds, and what of it is trained."""
    batch, tokenizer = data.train.rows([row], row_multiple=2), data.tokenizer.load()
    ids = batch.input_ids[0, : batch.tokens].tolist()
    labels = [label for label in batch.labels[0].tolist() if label != IGNORE]
    assert batch.targets == len(labels)
    # Labels are the targets of their positions.
    for position, label in enumerate(batch.labels[0, : batch.tokens - 1].tolist()):
        assert label in (IGNORE, ids[position + 1])
    return tuple(tokenizer.decode(each, skip_special_tokens=False) for each in (ids, labels))  # type: ignore[return-value]


TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "4\n\n  yes"},
    {"role": "user", "content": "Sure?"},
    {"role": "assistant", "content": "Yés."},
]


def test_the_answers_of_a_conversation_are_trained(tmp_path: Path, folder: Any) -> None:
    text, trained = texts(read(tmp_path, [{"messages": TALK}], folder()))
    assert text == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n4\n\n  yes"
        "<|im_end|>\n<|im_start|>user\nSure?<|im_end|>\n<|im_start|>assistant\nYés.<|im_end|>\n<|endoftext|>"
    )
    # The end of each answer too; and the way to EOS, which ends the last.
    assert trained == "4\n\n  yes<|im_end|>Yés.<|im_end|>\n<|endoftext|>"


@pytest.mark.parametrize("trims", [True, False])
def test_where_the_end_of_a_turn_is_eos_no_other_follows(tmp_path: Path, folder: Any, trims: bool) -> None:
    text, trained = texts(read(tmp_path, [{"messages": TALK}], folder(LLAMA, eos="<|eot_id|>", trims=trims)))
    assert text.startswith("<s><|start_header_id|>system") and text.count("<s>") == 1
    assert text.endswith("Yés.<|eot_id|>")
    assert trained == "4\n\n  yes<|eot_id|>Yés.<|eot_id|>"


PHI = (
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"
)
BARE = (
    "{% for m in messages %}{{ '<|' + m.role + '|>' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
MARKERS = ("<|user|>", "<|assistant|>", "<|end|>")


@pytest.mark.parametrize("trims", [{}, {"rstrip": True}, {"lstrip": True}, {"lstrip": True, "rstrip": True}])
def test_a_token_is_trained_by_its_own_characters(tmp_path: Path, trims: dict[str, bool]) -> None:
    """Not by the space that its flags take in: of a line behind the end of an answer, or of an answer's first space
    behind its header."""
    special = tuple(AddedToken(token, special=True, **trims) for token in MARKERS)
    turns = [
        {"role": role, "content": content}
        for role, content in (("user", "q"), ("assistant", "a "), ("user", "r"), ("assistant", " b"))
    ]
    tokenizer = byte_folder(tmp_path / "phi", PHI, eos="</s>", special=special)
    _, trained = texts(read(tmp_path, [{"messages": turns}], tokenizer))
    ends, starts = "" if trims.get("lstrip") else " ", "" if trims.get("rstrip") else " "
    line = "" if trims.get("rstrip") else "\n"
    assert trained == f"a{ends}<|end|>{starts}b<|end|>{line}</s>"
    tokenizer = byte_folder(tmp_path / "bare", BARE, eos="</s>", special=special)
    _, trained = texts(read(tmp_path, [{"messages": turns}], tokenizer))
    assert trained == f"a{ends}<|user|>{starts}b</s>"


def test_a_token_is_trained_if_one_of_its_characters_is() -> None:
    text = Text("0123456789", trained=((7, 9), (1, 4), (2, 3), (5, 5)))
    expected = {
        (0, 1): False, (0, 2): True, (3, 4): True, (4, 5): False, (4, 6): False, (6, 8): True, (9, 10): False,
        (1, 1): False, (4, 4): True,  # as the character before
    }  # fmt: skip
    assert text.is_trained(np.array([*expected])).tolist() == [*expected.values()]


def test_a_token_over_the_end_of_an_answer_is_trained(tmp_path: Path, folder: Any) -> None:
    """Which the model must write: as by `return_assistant_tokens_mask`."""
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{{ '\n\n' }}{% else %}{{ m.content }}: {% endif %}{% endfor %}"
    )
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "yes\n"}] * 2
    _, trained = texts(read(tmp_path, [{"messages": talk}], folder(template)))
    assert trained == " yes\n\n yes\n\n\n<|endoftext|>"  # of three lines in a row the first two are a token


def test_what_ends_answers_is_in_the_header(tmp_path: Path) -> None:
    tokenizer = byte_folder(tmp_path / "bare", BARE, eos="</s>", special=MARKERS)
    data = read(tmp_path, [{"messages": TALK[1:]}], tokenizer)
    assert texts(data)[1] == "4\n\n  yes<|user|>Yés.</s>"
    (line,) = (line for line in data.counts.lines() if line.startswith("tokenizer "))
    assert line == (
        f"tokenizer   the chat template of {tokenizer} ends an answer by the marker of the next turn, <|user|>: a "
        "server stops there if eos_token_id in generation_config.json names it"
    )
    assert end_of_turn(data.tokenizer.template) == "<|user|>"
    named = {"eos_token_id": [0, data.tokenizer.load().token_to_id("<|user|>")]}
    (tokenizer / "generation_config.json").write_text(json.dumps(named))
    data = read(tmp_path, [{"messages": TALK[1:]}], tokenizer)
    assert not [line for line in data.counts.lines() if line.startswith("tokenizer ")]
    (tmp_path / "texts").mkdir()
    assert not [
        line for line in read(tmp_path / "texts", [{"text": "a"}], tokenizer).counts.lines() if "marker" in line
    ]


def test_a_template_that_leaves_out_what_was_thought(tmp_path: Path, folder: Any) -> None:
    turns = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "<think>\nhm\n</think>\n\nb"},
        {"role": "user", "content": "c"}, {"role": "assistant", "content": "<think>\nso\n</think>\n\nd"},
    ]  # fmt: skip
    text, trained = texts(read(tmp_path, [{"messages": turns}], folder(THINKS, eos="<|im_end|>")))
    assert "hm" not in text
    assert trained == "b<|im_end|><think>\nso\n</think>\n\nd<|im_end|>"


def test_a_template_that_takes_away_space_and_what_was_thought() -> None:
    template = ChatTemplate(THINKS.replace("lstrip('\n')", "strip()"))
    assert "split('</think>')[-1].strip()" in template.source
    said = zip(("user", "assistant") * 2, ("a", " b ", "c", "d"), strict=True)
    turns = [{"role": role, "content": content} for role, content in said]
    text, answers = template.answers(turns)
    assert [text[slice(*answers[number][0])] for number in (1, 3)] == ["b<|im_end|>", "d<|im_end|>"]


def test_a_template_that_does_not_tell_is_refused(tmp_path: Path, folder: Any) -> None:
    hides = "{% for message in messages %}{{ message.content | length }}{{ loop.length }}{% endfor %}"
    with pytest.raises(
        UserError, match=r"records\.jsonl:1: .*writes nothing of what the assistant says in turn 3 of 5"
    ):
        read(tmp_path, [{"messages": TALK}], folder(hides))


def test_the_assistant_may_begin_where_a_template_looks_at_the_first_turn(tmp_path: Path, folder: Any) -> None:
    looks = "{% if messages[0].role == 'system' %}!{% endif %}" + CHATML
    _, trained = texts(read(tmp_path, [{"messages": [TALK[2], TALK[1], TALK[2]]}], folder(looks)))
    assert trained.count("4\n\n  yes<|im_end|>") == 2 and "2+2" not in trained


def test_a_template_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat, "MOST_SECONDS", 0.3)
    loop = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if a < 0 %}{{ b }}{% endif %}{% endfor %}{% endfor %}"
    )
    with pytest.raises(UserError, match=r"is not done with a conversation of 1 turns after 0\.3 s"):
        ChatTemplate(loop).render([{"role": "user", "content": "a"}])
    assert signal.getitimer(signal.ITIMER_PROF) == (0.0, 0.0)
    assert ChatTemplate().render([{"role": "user", "content": "a"}])
    tried = list[float]()

    def counted(seconds: float) -> Any:
        tried.append(seconds)
        return within(seconds)

    monkeypatch.setattr(chat, "within", counted)
    for use in (lambda: ChatTemplate(loop).answers(TALK), lambda: end_of_turn(ChatTemplate(loop))):
        with pytest.raises(UserError, match="is not done"):
            use()
    assert len(tried) == 2  # once each: no other form of the conversation is tried


@pytest.mark.parametrize(
    "harm",
    [
        "{{ 'a'.center(4000000000) }}",
        "{{ 'a'|center(4000000000) }}",
        "{% set ns = namespace(x='a' * 8) %}{% for i in range(40) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    ],
)
def test_a_template_that_takes_all_memory_is_stopped(harm: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    with pytest.raises(UserError, match=r"is not done with a conversation of 1 turns with 1,024 MiB"):
        ChatTemplate(harm + CHATML).render([{"role": "user", "content": "a"}])
    assert resource.getrlimit(resource.RLIMIT_AS) == before


def test_a_template_may_mark_the_answers_itself(tmp_path: Path, folder: Any) -> None:
    text, trained = texts(read(tmp_path, [{"messages": TALK}], folder(MARKS)))
    assert text == "Be brief.?2+2??4\n\n  yes#Sure??Yés.#<|endoftext|>"
    assert trained == "4\n\n  yes#Yés.#<|endoftext|>"


@pytest.mark.parametrize(("train_on", "said"), [("last", "Yés.<|im_end|>\n<|endoftext|>"), ("all", None)])
def test_what_is_trained_can_be_chosen(tmp_path: Path, folder: Any, train_on: str, said: str | None) -> None:
    text, trained = texts(read(tmp_path, [{"messages": TALK}], folder(), train_on=train_on))
    assert trained == (said or text.removeprefix("<|im_start|>"))  # the first token is no target


def test_other_forms_of_a_conversation(subtests: pytest.Subtests, tmp_path: Path, folder: Any) -> None:
    cases = [
        ({"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]}, "q|a"),
        ({"instruction": "do", "input": "it", "output": "a"}, "do\nit|a"),
        ({"instruction": "do", "input": "", "output": "a", "system": "s"}, "s|do|a"),
        ({"question": "q", "answer": "a", "id": 3}, "q|a"),
        ({"instruction": "q", "output": "a", "history": [["x", "y"]]}, "x|y|q|a"),
        ({"instruction": "q", "output": "a", "history": json.dumps([["x", "y"]])}, "x|y|q|a"),
        ({"prompt": TALK[:2], "completion": TALK[2:3]}, "Be brief.|2+2?|4\n\n  yes"),
        ({"messages": json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])}, "q|a"),
    ]
    for number, (record, said) in enumerate(cases):
        with subtests.test(msg=str(record)):
            place = tmp_path / str(number)
            place.mkdir()
            text, _ = texts(read(place, [record], folder()))
            turns = text.removesuffix("<|endoftext|>").split("<|im_start|>")[1:]
            assert "|".join(turn.partition("\n")[2].removesuffix("<|im_end|>\n") for turn in turns) == said


def test_a_prompt_and_its_completion_are_one_text(tmp_path: Path, folder: Any) -> None:
    records = [{"prompt": "Q: ", "completion": "yes"}, {"prompt": "Q:", "completion": " no"}]
    data = read(tmp_path, records, folder())
    # " y" is one token, which ends inside of the answer.
    assert [texts(data, row) for row in range(2)] == [
        ("Q: yes<|endoftext|>", " yes<|endoftext|>"), ("Q: no<|endoftext|>", " no<|endoftext|>"),
    ]  # fmt: skip
    named = read(tmp_path, [{"q": "Q", "a": "A", "text": "t"}], folder(), columns={"prompt": "q", "completion": "a"})
    assert texts(named) == ("QA<|endoftext|>", "A<|endoftext|>")
    turns = read(tmp_path, records[:1], folder(), format="chat")
    assert texts(turns)[1] == "yes<|im_end|>\n<|endoftext|>"


def test_examples_are_never_cut_over_rows(tmp_path: Path) -> None:
    long = {"prompt": "p" * 30, "completion": "c" * 100}
    late = {"prompt": "p" * 70, "completion": "c" * 9}
    data = read(tmp_path, [long, {"prompt": "p", "completion": "c" * 5}, late], seq_length=61)
    counts = data.counts.train
    assert (counts.rows, counts.examples, counts.shortened, counts.untrained, counts.split) == (2, 3, 2, 1, 0)
    assert counts.targets == sum(data.train.rows([row], row_multiple=2).targets for row in range(2)) == 31 + 6
    assert any("1 example without a trained token left out" in line for line in data.counts.lines())
    assert any("2 examples longer than a row lost the end" in line for line in data.counts.lines())


def test_packed_with_texts_of_another_source(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": "t" * n}) + "\n" for n in (5, 150)))
    (tmp_path / "b.jsonl").write_text(
        "".join(json.dumps({"prompt": "p" * n, "completion": "cc"}) + "\n" for n in (7, 9))
    )
    sources = [{"path": str(tmp_path / f"{name}.jsonl")} for name in "ab"]
    data = prepare(config_for(sources), cache=tmp_path / "cache")
    batch = data.train.rows(range(len(data.train)), row_multiple=2)
    trained = sorted(batch.labels[batch.labels != IGNORE].tolist())
    assert trained == sorted([*b"t" * 4, *b"t" * 149, 256, 256, *b"cc" * 2, 256, 256])
    assert batch.targets == len(trained) == data.counts.train.targets


def test_what_says_which_tokens_are_trained_is_checked_too(tmp_path: Path) -> None:
    records = [{"prompt": "Q: ", "completion": "yes"}]
    before = texts(read(tmp_path, records))
    (path,) = (tmp_path / "cache").rglob("trained.bin")
    path.chmod(0o644)
    path.write_bytes(bytes([1]) * path.stat().st_size)
    assert texts(read(tmp_path, records)) == before


def test_no_end_is_trained_behind_a_turn_of_the_user(tmp_path: Path, folder: Any) -> None:
    data = read(tmp_path, [{"messages": [*TALK, {"role": "user", "content": "Why?"}]}], folder(CHATML))
    assert texts(data)[1] == "4\n\n  yes<|im_end|>Yés.<|im_end|>"


def test_what_is_read_of_a_file_is_in_the_key_of_its_tokens(tmp_path: Path) -> None:
    records = [{"a": "first", "b": "second"}]
    found = [texts(read(tmp_path, records, text_key=key))[0] for key in ("a", "b")]
    assert found == ["first<|endoftext|>", "second<|endoftext|>"]


def test_examples_longer_than_a_block_have_each_a_hash_of_its_own(tmp_path: Path) -> None:
    long, short = ({"prompt": "p", "completion": each} for each in ("l" * 20_000, "s"))
    (both,), (alone,) = (
        read(tmp_path, records, seq_length=30_000).train.stores for records in ([long, short], [short])
    )
    assert blocks_of([both]).hash.tolist()[1:] == blocks_of([alone]).hash.tolist()


def test_an_example_is_one_block_beside_texts_that_are_cut() -> None:
    def store(trained: int | None, *lengths: int) -> Any:
        offsets, tokens = np.cumsum([0, *lengths]), np.arange(sum(lengths), dtype=np.uint16)
        meta = SimpleNamespace(trained=trained, documents=len(lengths), tokens=sum(lengths))
        return SimpleNamespace(meta=meta, offsets=offsets, tokens=tokens, block_hashes=np.arange(1, len(lengths) + 1))

    found = blocks_of([store(None, 5, 150), store(9, 300, 70)], size=64)
    assert found.length.tolist() == [5, 64, 64, 22, 300, 70]
    assert found.start.tolist() == [0, 5, 69, 133, 155, 455]
    assert found.hash[[0, 4, 5]].tolist() == [1, 1, 2]


def test_a_held_out_example_is_held_out_whole(tmp_path: Path) -> None:
    records = [{"prompt": f"{n}" * 40, "completion": f"{n}" * 60} for n in range(40)]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    data = prepare(config_for(path, validation=0.2, seq_length=300, packing=False), cache=tmp_path / "cache")
    assert data.validation is not None
    assert len(data.train) + len(data.validation) == 40 and 4 <= len(data.validation) <= 12


CALLS = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": {"name": "pay"}}]}


def test_what_is_no_example_is_refused_by_its_place(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases = [
        ({"messages": [{"role": "robot", "content": "x"}]}, {}, "records.jsonl:1, turn 1: there is no role 'robot'"),
        ({"messages": []}, {}, "records.jsonl:1: a conversation without turns"),
        ({"messages": [{"role": "user", "content": 3}]}, {}, "turn 1: its content is a int, not a string"),
        ({"messages": "hello"}, {}, "turns are a list, not a str"),
        ({"prompt": "p", "completion": None}, {}, "the answer is null, not a string"),
        ({"instruction": "q", "output": "a", "history": "x"}, {}, "records.jsonl:1, history: turns are a list, not a"),
        ({"instruction": "q", "output": "a", "history": [1]}, {}, "records.jsonl:1, history, turn 1: a int, not an"),
        ({"messages": TALK, "system": 3}, {}, "records.jsonl:1: the system text is a int, not a string"),
        ({"messages": [{**TALK[2], "weight": "0"}]}, {}, "records.jsonl:1, turn 1: its weight is '0'"),
        ({"messages": TALK[:2]}, {}, "no document has a trained token (1 example)"),
        ({"a": "x"}, {"format": "chat"}, "no chat record; the keys are 'a'"),
        ({"a": "x"}, {"columns": {"messages": "b"}}, "columns.messages: no record has 'b'; they have 'a'"),
        (
            {"messages": [*TALK[:2], CALLS]},
            {},
            "turn 3 calls the tool 'pay', and the built-in ChatML",
        ),
        ({"prompt": "p", "chosen": "a", "rejected": "b"}, {}, "holds preference records, and objective.name is sft"),
    ]
    for number, (record, source, said) in enumerate(cases):
        with subtests.test(msg=said, number=number):
            place = tmp_path / str(number)
            place.mkdir()
            with pytest.raises(UserError) as refused:
                read(place, [record], **source)
            assert said in refused.value.what and refused.value.fix


ROUND = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
TOLD = "{% if tools %}{{ tools[0].function.name }}{% endif %}" + CHATML


def test_what_else_a_record_may_say(subtests: pytest.Subtests) -> None:
    cases = [
        ({"messages": [{**ROUND[1], "weight": 0}, *ROUND]}, "a|q|a", ["a"]),
        ({"prompt": ROUND, "completion": ROUND}, "q|a|q|a", ["a"]),  # answers of a prompt are context
        ({"messages": [{"role": "system", "content": "s"}, *ROUND], "system": "t"}, "s|q|a", ["a"]),
        ({"messages": [{"role": "user", "content": [{"text": "q"}, {"text": "r"}]}, ROUND[1]]}, "qr|a", ["a"]),
        ({"messages": ROUND, "tools": [{"name": "TOOL"}]}, "TOOL|q|a", ["a"]),
        ({"prompt": "q", "instruction": "i", "context": "c", "answer": "a"}, "q\ni\nc|a", ["a"]),
        ({"instruction": "i", "output": "a", "response": "b"}, None, []),  # which of them is the answer?
        ({"messages": [{"role": "developer", "content": "s"}, *ROUND], "system": "t"}, "s|q|a", ["a"]),
        ({"messages": ROUND, "images": []}, "q|a", ["a"]),
        ({"messages": ROUND, "tools": ' [{"name": "TOOL"}]'}, "TOOL|q|a", ["a"]),
        ({"prompt": "q", "completion": ROUND[1:], "tools": [{"name": "TOOL"}]}, "TOOL|q|a", ["a"]),
        ({"prompt": ROUND[:1], "completion": ROUND[1:], "history": [["u", "v"]]}, "u|v|q|a", ["a"]),
        ({"instruction": "q", "output": '[{"a": 1}]'}, 'q|[{"a": 1}]', ['[{"a": 1}]']),  # JSON is a text, too
    ]
    for record, said, trained in cases:
        with subtests.test(msg=str(record)):
            example = example_of(record, Source("x", "data.train"), "x:1")
            if example is None:
                assert said is None
                continue
            assert isinstance(example, Example)
            text = example.rendered(ChatTemplate(TOLD), "<eos>")
            turns = text.text.replace("<|im_end|>\n", "<|im_start|>\n").split("<|im_start|>")
            assert "|".join(turn.partition("\n")[2] or turn for turn in turns if turn.strip()) == said
            said_by_it = [text.text[first:last] for first, last in text.trained or ()]
            assert [each.removesuffix("\n").removesuffix("<|im_end|>") for each in said_by_it] == trained


def test_a_column_that_is_named_takes_the_place_of_all_like_it() -> None:
    source = Source("x", "data.train", columns={"prompt": "q", "completion": "a"})
    example = example_of({"q": "q", "instruction": "i", "context": "c", "definition": "d", "a": "a"}, source, "x:1")
    assert isinstance(example, Example) and example.pair == ("q", "a")


def test_calls_and_tools_keep_what_stands_around_them() -> None:
    turns = [*ROUND[:1], {"role": "assistant", "tool_calls": [{"name": "f", "arguments": {}, "index": 1, "id": "x"}]}]
    example = chat_example("x:1", turns, tools="[]")
    function = {"name": "f", "arguments": {}}
    assert example.turns[1]["tool_calls"] == [{"type": "function", "index": 1, "id": "x", "function": function}]
    assert example.tools is None  # of several templates, not that for tools
    with pytest.raises(UserError, match="x:1, turn 1: no turn; its keys are"):  # what the third text is, nothing says
        chat_example("x:1", [{"question": "q", "answer": "a", "doubt": "d"}])


def test_an_answer_to_something_else_has_the_turns_before_it_of_its_own_question() -> None:
    system = {"role": "system", "content": "s"}
    one, other = ({"role": "assistant", "content": each} for each in "ab")
    first = Rated(Example("x:1", (ROUND[0], one), context=1), desirable=True)
    second = Rated(Example("x:2", (system, ROUND[0], other), context=2), desirable=False)
    pairs = list(beside_others([first, second]))
    assert pairs[0].second.turns == (ROUND[0], other) and pairs[1].second.turns == (system, ROUND[0], one)


def test_of_several_templates_the_tools_decide() -> None:
    template = ChatTemplate({"tool_use": "TOOLS", "default": "OWN", "rag": "RAG"})
    assert template.render(TALK) == "OWN" and template.render(TALK, tools=[{}]) == "TOOLS"
    with pytest.raises(UserError, match="multiple chat templates with no default specified"):
        ChatTemplate({"rag": "RAG"}).render(TALK)


def test_what_changes_the_tokens_of_examples_is_in_the_key_of_their_cache() -> None:
    assert ChatTemplate("x", {"bos_token": "a"}).digest != ChatTemplate("x", {"bos_token": "b"}).digest
    some: list[dict[str, Any]] = [
        {}, {"columns": {"prompt": "q", "completion": "a"}}, {"train_on": "last"}, {"format": "chat"}, {"pairs": True},
        {"rates": True}, {"text_key": "body"},
    ]  # fmt: skip
    options = [Records("json").options(Source("x", "data.train", **each)) for each in some]
    assert all(one != other for at, one in enumerate(options) for other in options[:at])


def test_units_of_before_a_repair_do_not_survive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do streams, which have the name of their units' folder in what a checkpoint must agree with."""
    (tmp_path / "records.jsonl").write_text(json.dumps({"messages": TALK}) + "\n")
    info, folders = find_tokenizer("byte", model="", corpus=(), root=tmp_path), set[Path]()
    for version in (store.READING, store.READING + 1):
        monkeypatch.setattr(units, "READING", version)
        files = resolve(Source(str(tmp_path / "records.jsonl"), "data.train"), formats.discover(), tmp_path)
        folders.add(units._folder(files, info, tmp_path, "units"))
    assert len(folders) == 2


def test_rows_of_before_a_repair_do_not_survive_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is trained is part of what names rows: in the cache, and for a checkpoint that goes on."""

    def whole(text: str, answers: dict[int, list[Any]]) -> tuple[str, dict[int, list[Any]]]:
        return text, {number: [(0, len(text))] for number in answers}

    records, answers = [{"messages": TALK}], ChatTemplate.answers
    with monkeypatch.context() as patch:  # an earlier version
        patch.setattr(store, "READING", 2)
        patch.setattr(ChatTemplate, "answers", lambda *given, **more: whole(*answers(*given, **more)))
        before = read(tmp_path, records)
    now = read(tmp_path, records)
    assert len(texts(before)[1]) > len(texts(now)[1]) == len("4\n\n  yes<|im_end|>Yés.<|im_end|>\n<|endoftext|>")
    assert before.fingerprint != now.fingerprint
    assert before.train.counts.targets != now.train.counts.targets == sum(now.train.row_targets)


def test_a_run_keeps_the_day_of_its_first_start(tmp_path: Path, folder: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = folder("{{ strftime_now('%d %b %Y') }}\n" + CHATML)

    def written(started: str | None) -> tuple[str, str]:
        run = tmp_path / "runs" / "demo"
        run.mkdir(parents=True, exist_ok=True)
        if started:
            starts = (0, started), (5, "2030-01-01")
            lines = ({"event": "start", "step": step, "time": f"{day}T23:59:59+01:00"} for step, day in starts)
            (run / "history.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        data = read(tmp_path, [{"messages": TALK}], tokenizer)
        return texts(data)[0].partition("\n")[0], data.fingerprint

    assert written(None)[0] == f"{date.today():%d %b %Y}"
    first = written("2024-02-29")
    assert first[0] == "29 Feb 2024"
    shutil.rmtree(tmp_path / "cache")  # as on another machine
    assert written("2024-02-29") == first != written("2024-03-01")


@pytest.mark.parametrize("key", ["messages", "tools"])
def test_json_in_a_string_that_is_nested_too_deep_is_no_list(tmp_path: Path, key: str) -> None:
    with pytest.raises(UserError, match=r"records.jsonl:1: t\w+ are a list, not a str"):
        read(tmp_path, [{"messages": TALK} | {key: "[" * 100_000}])


def test_a_template_that_is_no_text_is_refused(tmp_path: Path, folder: Any) -> None:
    with pytest.raises(UserError, match="its chat template is no text"):
        read(tmp_path, [{"messages": TALK}], folder(5))


@pytest.mark.parametrize("hostile", ["{{ ''.__class__.__mro__[1].__subclasses__() }}", "{{ '\\ud800' }}"])
def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path, folder: Any, hostile: str) -> None:
    with pytest.raises(UserError, match="does not take the conversation"):
        read(tmp_path, [{"messages": TALK}], folder(hostile))


def test_another_template_makes_other_tokens(tmp_path: Path, folder: Any) -> None:
    first = read(tmp_path, [{"messages": TALK}], folder())
    second = read(tmp_path, [{"messages": TALK}], folder(MARKS))
    assert texts(first) != texts(second) and first.fingerprint != second.fingerprint


def test_the_command_shows_rows_as_the_model_sees_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FIVEFOLD_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * n, "completion": "c\x1b[2J"}) + "\n" for n in (3, 40)))
    command = [
        "data",
        f"data.train.path={path}",
        "data.validation=0",
        "tokenizer.name_or_path=byte",
        "data.seq_length=99",
    ]
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--rows", "5"])
    out = capsys.readouterr().out
    assert not ended.value.code
    assert "ppp[[c\\x1b[2J<|endoftext|>]]" in out and "row 1: 2 documents, 55 tokens, 12 trained" in out
    assert "trained     12 tokens of 55 (21.8%), in 2 examples" in out
    with pytest.raises(SystemExit):
        cli.main([*command, "--json", "-"])
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 1


# ---- what `fivefold data` shows --------------------------------------------------------------------------------------


def test_of_a_long_document_the_first_characters_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = read(tmp_path, [{"prompt": "p" * 8, "completion": "c" * 8}])
    size = 16 + len("<|endoftext|>")
    for most, parts in (
        (size, ["p" * 8, "c" * 8 + "<|endoftext|>"]),
        (size - 1, None),
        (10, ["p" * 8, "cc"]),
        (3, ["ppp"]),
    ):
        monkeypatch.setattr(shown, "_MOST", most)
        ((document,),) = shown.examine(data, 1).rows
        assert document.cut == (most < size) and (document.tokens, document.trained) == (17, 9)
        assert parts is None or [part.text for part in document.parts] == parts
