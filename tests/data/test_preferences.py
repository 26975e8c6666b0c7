"""Records of a chosen and a rejected answer: what both are, where they lie in rows, and what is trained of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.data import IGNORE, MicroBatch, PreparedData, prepare
from fivefold.data.shown import examine
from tests.data.helpers import SEQ, config_for, segments

ASKED = [{"role": "user", "content": "q"}]
TOLD = {"role": "system", "content": "s"}
GOOD, BAD = ({"role": "assistant", "content": each} for each in ("good", "b"))
LISTS = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
CHAT = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"


def config(path: Path, objective: str = "dpo", source: dict[str, Any] | None = None, **changes: Any) -> RunConfig:
    tree = config_for([{"path": str(path), **(source or {})}], **changes)
    return tree.model_copy(update={"objective": type(tree.objective)(name=objective)})


def read(folder: Path, records: list[dict[str, Any]], **options: Any) -> PreparedData:
    path = folder / "records.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return prepare(config(path, **options), cache=folder / "cache")


def answers(batch: MicroBatch) -> list[tuple[str, str]]:
    """(text of the sequence, trained text) of each answer in a row, by their numbers."""
    found = {}
    for number, (tokens, labels, _) in enumerate(segments(batch)):
        own = {int(each) for each in _segment(batch.answers, batch, number) if each >= 0}
        if own:
            (answer,) = own
            trained = [label for label in labels if label != IGNORE]
            assert _segment(batch.answers, batch, number).tolist() == [
                answer if label != IGNORE else -1 for label in labels
            ]
            found[answer] = (_text(tokens), _text(trained))
    return [found[number] for number in sorted(found)]


def _segment(array: Any, batch: MicroBatch, number: int) -> Any:
    return array.reshape(-1)[batch.cu_seqlens[number] : batch.cu_seqlens[number + 1]]


def _text(tokens: list[int]) -> str:
    return "".join("$" if token == 256 else chr(token) for token in tokens)


@pytest.mark.parametrize(
    ("record", "source", "prompt", "chosen", "rejected"),
    [
        ({"prompt": "a b", "chosen": " c", "rejected": " dd"}, {}, "a b", " c$", " dd$"),
        ({"chosen": "H: hi A: yes", "rejected": "H: hi A: yo"}, {}, "H: hi A: y", "es$", "o$"),
        ({"chosen": "H: hi A: yes", "rejected": "H: hi A: no"}, {}, "H: hi A:", " yes$", " no$"),
        ({"chosen": "yes", "rejected": "no"}, {}, "", "es$", "o$"),  # the first token has nothing before it
        ({"prompt": ASKED, "chosen": [GOOD], "rejected": [BAD]}, {}, CHAT, "good<|im_end|>$", "b<|im_end|>$"),
        ({"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}, {}, CHAT, "good<|im_end|>$", "b<|im_end|>$"),
        ({"prompt": "q", "chosen": [GOOD], "rejected": [BAD]}, {}, CHAT, "good<|im_end|>$", "b<|im_end|>$"),
        ({"prompt": "q", **LISTS}, {}, CHAT, "good<|im_end|>$", "b<|im_end|>$"),
        ({"prompt": ASKED, **LISTS}, {}, CHAT, "good<|im_end|>$", "b<|im_end|>$"),
        (  # of several ways in which the lists go on from the prompt, the longest
            {"prompt": [TOLD, *ASKED, BAD, *ASKED], **{key: [*ASKED, BAD, *each] for key, each in LISTS.items()}}, {},
            f"<|im_start|>system\ns<|im_end|>\n{CHAT}b<|im_end|>\n{CHAT}", "good<|im_end|>$", "b<|im_end|>$",
        ),
        ({"prompt": "[0, 1]", "chosen": "[1, 2]", "rejected": "[]"}, {}, "[0, 1]", "[1, 2]$", "[]$"),
        ({"question": "q", "chosen": "good", "rejected": "b"}, {}, CHAT, "good<|im_end|>$", "b<|im_end|>$"),
        (
            {"p": "x", "w": "yy", "l": "z"},
            {"columns": {"prompt": "p", "chosen": "w", "rejected": "l"}}, "x", "yy$", "z$",
        ),
        (
            {"messages": [*ASKED, GOOD], "prompt": "x", "chosen": "y", "rejected": "z"},
            {"format": "preference"}, "x", "y$", "z$",
        ),
    ],
)  # fmt: skip
def test_the_answers_of_a_record(
    tmp_path: Path, record: dict[str, Any], source: dict[str, Any], prompt: str, chosen: str, rejected: str
) -> None:
    data = read(tmp_path, [record], source=source, seq_length=400)
    found = answers(data.train.rows([0], row_multiple=1))
    assert data.counts.train.targets == sum(len(trained) for _, trained in found)
    first = prompt or None
    for (text, trained), answer in zip(found, (chosen, rejected), strict=True):
        # Behind a turn's end is the template's line break, which is trained too, up to the EOS.
        assert trained.replace("<|im_end|>\n$", "<|im_end|>$") == answer
        assert first is None or (text.startswith(first) and text == prompt + trained)


def random_records(seed: int, number: int = 97) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [
        {"prompt": "p" * asked, "chosen": "c" * chosen, "rejected": "r" * rejected}
        for asked, chosen, rejected in rng.integers(1, (9, 31, 31), (number, 3)).tolist()
    ]


@pytest.mark.parametrize("packing", [True, False])
def test_a_pair_is_in_one_row_as_a_whole_and_in_the_order_of_its_number(tmp_path: Path, packing: bool) -> None:
    records = random_records(3)
    data = read(tmp_path, records, packing=packing)
    fitting = [r for r in records if 2 * len(r["prompt"]) + len(r["chosen"]) + len(r["rejected"]) + 2 <= SEQ]
    assert 0 < len(records) - len(fitting) == data.counts.train.too_long
    seen: list[tuple[str, str, str]] = []
    numbers: list[int] = []
    for row in range(len(data.train)):
        batch = data.train.rows([row], row_multiple=1)
        assert batch.pairs is not None
        numbers += batch.pairs.tolist()
        found = answers(batch)
        assert len(found) == 2 * len(batch.pairs)
        for (text, chosen), (other, rejected) in zip(found[::2], found[1::2], strict=True):
            prompt = text.removesuffix(chosen)
            assert other == prompt + rejected
            seen.append((prompt, chosen[:-1], rejected[:-1]))
    assert numbers == list(range(len(fitting))) and data.counts.train.pairs == len(fitting)
    assert sorted(seen) == sorted(tuple(record[key] for key in ("prompt", "chosen", "rejected")) for record in fitting)
    assert any("longer than a row left out" in line for line in data.counts.lines())


def test_pairs_of_several_rows_are_numbered_as_they_lie(tmp_path: Path) -> None:
    data = read(tmp_path, random_records(5))
    batch = data.train.rows([2, None, 0], row_multiple=1)
    alone = [data.train.rows([row], row_multiple=1).pairs for row in (2, 0)]
    assert batch.pairs is not None and batch.pairs.tolist() == np.concatenate(alone).tolist()
    assert batch.answers is not None and set(batch.answers.flatten().tolist()) == {-1, *range(2 * len(batch.pairs))}
    assert (batch.answers[1] == -1).all()


def test_a_side_that_is_held_out_has_its_own_numbers(tmp_path: Path) -> None:
    data = read(tmp_path, random_records(7), validation=0.3)
    assert data.validation is not None
    first = data.validation.rows([0], row_multiple=1).pairs
    assert first is not None and first[0] == 0


def test_a_pair_of_which_one_has_no_answer_is_left_out_and_counted(tmp_path: Path) -> None:
    pair = {"chosen": [*ASKED, GOOD], "rejected": [*ASKED, BAD]}
    data = read(tmp_path, [pair, {**pair, "rejected": ASKED}, pair | {"rejected": pair["chosen"]}], seq_length=400)
    assert (data.counts.train.untrained, data.counts.train.pairs) == (1, 2)


@pytest.mark.parametrize("objective", ["dpo", "kto"])
def test_records_that_prefer_neither_answer_are_left_out_and_counted(tmp_path: Path, objective: str) -> None:
    verdicts = (0, "1", 1.0, None, -3, "-2.0", 0.0)
    records = [
        {"context": f"q{number}", "response1": "one", "response2": "two", "overall_preference": verdict}
        for number, verdict in enumerate(verdicts)
    ]
    data = read(tmp_path, records, objective=objective)
    if objective == "dpo":
        rows = (data.train.rows([row], row_multiple=1) for row in range(len(data.train)))
        found = sorted(text for row in rows for text, _ in answers(row)[::2])
        assert found == ["q1two$", "q2two$", "q4one$", "q5one$"]
    else:
        assert [(own, good) for _, own, _, good in rated(data)[:2]] == [("one$", False), ("two$", True)]
        assert len(rated(data)) == 8
    learned = read(tmp_path, records, objective=objective, tokenizer="train:300")  # from records that are read for it
    for counts in (data.counts, learned.counts):
        assert "; 3 records left out: 'overall_preference' prefers neither answer" in "".join(counts.lines())


def test_records_of_which_none_prefers_an_answer_are_refused(tmp_path: Path) -> None:
    records = [{"prompt": "p", "response_0": "a", "response_1": "b", "better_response_id": None}]
    with pytest.raises(UserError):
        read(tmp_path, records)


def test_columns_that_are_named_go_before_a_verdict(tmp_path: Path) -> None:
    record = {"prompt": "p", "response_0": "a", "response_1": "b", "better_response_id": 1}
    data = read(tmp_path, [record], source={"columns": {"chosen": "response_0", "rejected": "response_1"}})
    assert [trained for _, trained in answers(data.train.rows([0], row_multiple=1))] == ["a$", "b$"]


@pytest.mark.parametrize(
    ("records", "options", "said"),
    [
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}], {"objective": "sft"}, "objective.name is sft"),
        ([{"prompt": "p", "completion": "a"}], {}, "holds no preference records, and objective.name is dpo"),
        ([{"text": "p"}], {}, "holds no preference records"),
        ([{"prompt": "p", "chosen": "a" * 70, "rejected": "b"}], {}, "no pair of answers fits in a row (1 pair)"),
        ([{"prompt": "p", "chosen": 3, "rejected": "b"}], {}, "records.jsonl:1: the chosen answer is a int"),
        ([{"prompt": "p", "chosen": "a"}], {"source": {"format": "preference"}}, "no preference record; the keys are"),
        ([{"prompt": "p", "chosen": "a", "rejected": "b"}], {"source": {"train_on": "all"}}, "train_on: all"),
        (
            [{"prompt": "p", "chosen": "a", "rejected": "b"}, {"prompt": "p", "completion": "a"}], {},
            "holds pairs of answers and other examples",
        ),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, records: list[dict[str, Any]], options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError) as refused:
        read(tmp_path, records, **options)
    assert said in refused.value.what and refused.value.fix


def test_they_are_shown(tmp_path: Path) -> None:
    data = read(tmp_path, [{"prompt": "ask ", "chosen": "yes", "rejected": "no"}])
    report = examine(data, 1)
    assert "1 pair of answers" in "".join(report.lines)
    said = [(each.answer, "".join(part.text for part in each.parts if part.trained)) for each in report.rows[0]]
    assert [(which, text[: len(want)]) for (which, text), want in zip(said, ("yes", "no"), strict=True)] == [
        ("chosen", "yes"), ("rejected", "no"),
    ]  # fmt: skip


# ---- rated answers ---------------------------------------------------------------------------------------------------

RATED: list[dict[str, Any]] = [
    {"prompt": "a", "completion": " bb", "label": True},
    {"prompt": "cc", "completion": " d", "label": False},
    {"prompt": "e", "completion": " fff", "label": True},
]


def rated(data: PreparedData) -> list[tuple[str, str, str, bool]]:
    """(prompt, its answer, the answer to another prompt, whether it is desirable) of each record."""
    found = []
    for row in range(len(data.train)):
        batch = data.train.rows([row], row_multiple=1)
        assert batch.desirable is not None
        each = answers(batch)
        for (text, own), (other, others), good in zip(each[::2], each[1::2], batch.desirable.tolist(), strict=True):
            prompt = text.removesuffix(own)
            assert other == prompt + others
            found.append((prompt, own, others, good))
    return sorted(found)


def test_a_rated_answer_has_that_of_the_record_before_beside_it(tmp_path: Path) -> None:
    data = read(tmp_path, RATED, objective="kto")
    assert rated(data) == [("a", " bb$", " d$", True), ("cc", " d$", " bb$", False), ("e", " fff$", " d$", True)]
    assert any("3 rated answers" in line for line in data.counts.lines())
    (row, *_) = examine(data, 5).rows
    assert {document.answer for document in row} == {"desirable", "undesirable", "answer to another prompt"}


def test_a_pair_is_two_rated_answers(tmp_path: Path) -> None:
    records = [{"prompt": "p", "chosen": " good", "rejected": " bad"}]
    assert rated(read(tmp_path, records, objective="kto")) == [
        ("p", " bad$", " good$", False), ("p", " good$", " bad$", True),
    ]  # fmt: skip


@pytest.mark.parametrize("answered", [[GOOD], None])
def test_rated_turns(tmp_path: Path, answered: Any) -> None:
    """The last turn is the answer; of a completion all of its turns are."""
    records: list[dict[str, Any]] = []
    for said, label in ((GOOD, "true"), (BAD, 0)):
        if answered:
            records.append({"prompt": ASKED, "completion": [said], "label": label})
        else:
            records.append({"messages": [*ASKED, BAD, *ASKED, said], "kto_tag": label})
    found = rated(read(tmp_path, records, objective="kto", seq_length=400))
    assert [(own.split("<")[0], other.split("<")[0], good) for _, own, other, good in found] == [
        ("b", "good", False), ("good", "b", True),
    ]  # fmt: skip


def test_labels_change_nothing_where_answers_are_not_rated(tmp_path: Path) -> None:
    data = read(tmp_path, RATED, objective="sft")
    assert not data.counts.train.pairs and data.counts.train.examples == 3


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([{"prompt": "a", "completion": "b"}] * 2, "no rated answer; the keys are"),
        ([RATED[0], {**RATED[1], "label": "maybe"}], ":2: 'label' is 'maybe', not true or false"),
        ([{**RATED[0], "label": None}], "'label' is None, not true or false"),
        (RATED[:1], ":1: one rated answer alone"),
        ([RATED[0], {"prompt": ASKED, "completion": [GOOD], "label": True}], ":1 holds texts and .*:2 holds the other"),
        ([{"text": "a", "label": True}] * 2, "no rated answer"),
    ],
)
def test_what_is_not_rated_is_refused(tmp_path: Path, records: list[dict[str, Any]], said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, records, objective="kto")


def test_a_pair_as_long_as_a_row_fits(tmp_path: Path) -> None:
    rows = [{"prompt": "p", "chosen": "c" * length, "rejected": "r"} for length in (SEQ - 5, SEQ - 4)]
    data = read(tmp_path, rows)
    assert (data.counts.train.pairs, data.counts.train.too_long) == (1, 1)
