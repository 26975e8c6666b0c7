"""The tokens of records, and which of them are trained, beside what TRL's trainers make of the same records."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold.data import IGNORE, prepare
from fivefold.data.shown import _pieces
from tests.data.helpers import config_for
from tests.data.tokenizers import byte_folder

TEMPLATE = (
    "{% if tools %}{{ '<tools>' + tools | tojson + '</tools>' }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'assistant' %}<assistant>{% generation %}{{ message.content }}</s>{% endgeneration %}"
    "{% else %}{{ '<' + message.role + '>' + message.content + '</s>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
SYSTEM, ASKED = {"role": "system", "content": "S"}, {"role": "user", "content": "What?"}
GOOD, BAD = ({"role": "assistant", "content": each} for each in ("Good, yes", "Bad"))
TOOLS = [{"type": "function", "function": {"name": "get", "parameters": {}}}]

Sequence = tuple[list[int], list[bool]]  # tokens, and which are trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("trl")
    return byte_folder(tmp_path_factory.mktemp("trl") / "tokenizer", TEMPLATE, eos="</s>")


def ours(folder: Path, record: dict[str, Any], objective: str, **source: Any) -> list[Sequence]:
    path = folder.parent / "records.jsonl"
    path.write_text(json.dumps(record) + "\n")
    config = config_for([{"path": str(path), **source}], tokenizer=folder, seq_length=500, packing=False)
    config = config.model_copy(update={"objective": type(config.objective)(name=objective)})
    batch = prepare(config, cache=folder.parent / "cache").train.rows([0], row_multiple=1)
    return [(ids.tolist(), [False, *(labels[:-1] != IGNORE).tolist()]) for ids, labels, _ in _pieces(batch)]


def of_trl(folder: Path, record: dict[str, Any], objective: str) -> list[Sequence]:
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DPOTrainer, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    args = SimpleNamespace(
        dataset_num_proc=None, dataset_text_field="text", max_length=None, shuffle_dataset=False, truncation_mode="",
        assistant_only_loss="messages" in record,
    )  # fmt: skip
    trainer: Any = SimpleNamespace(_tokenizer=tokenizer, chat_template=None, completion_only_loss=True)
    rows = Dataset.from_list([record])
    if objective == "sft":
        made = SFTTrainer._prepare_dataset(trainer, rows, tokenizer, args, False, None, "train")[0]
        return [(made["input_ids"], [False, *(label != IGNORE for label in made["labels"][1:])])]
    made = DPOTrainer._prepare_dataset(trainer, rows, tokenizer, args, "train")[0]
    prompt = made["prompt_ids"]
    return [
        (prompt + made[name], [at > 0 and at >= len(prompt) for at in range(len(prompt + made[name]))])
        for name in ("chosen_ids", "rejected_ids")
    ]


def test_tokens_and_masks_are_those_of_trl(subtests: pytest.Subtests, folder: Path) -> None:
    """What TRL does not read, a system text in a column and tools beside texts, stands in the record that it gets."""
    texts, both = {"prompt": "What? ", "completion": "Good"}, {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]}
    cases: list[tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = [
        ("sft", texts, texts, {}),
        ("sft", {**texts, "system": "S"}, {**texts, "prompt": "S\n\nWhat? "}, {}),
        (
            "sft", {"prompt": "What?", "completion": GOOD["content"], "system": "S"},
            {"prompt": [SYSTEM, ASKED], "completion": [GOOD]}, {"format": "chat"},
        ),
        ("sft", same := {"prompt": [SYSTEM, ASKED], "completion": [GOOD]}, same, {}),
        ("sft", same := {"messages": [SYSTEM, ASKED, GOOD, ASKED, BAD]}, same, {}),
        ("sft", same := {"messages": [ASKED, GOOD], "tools": TOOLS}, same, {}),
        ("sft", {"conversations": [{"from": "human", "value": "What?"}, {"from": "gpt", "value": "Bad"}]},
         {"messages": [ASKED, BAD]}, {}),
        ("dpo", same := {"prompt": "What? ", "chosen": "Good, yes", "rejected": "Bad"}, same, {}),
        ("dpo", same := {"chosen": "H: hi A: yes", "rejected": "H: hi A: no"}, same, {}),
        ("dpo", same := {"chosen": "H: hi A: yes", "rejected": "H: hi A: yo"}, same, {}),
        ("dpo", same := {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]}, same, {}),
        ("dpo", both, both, {}),
        ("dpo", {**both, "prompt": "What?", "messages": both["chosen"]}, both, {}),
        ("dpo", {"messages": [ASKED], "chosen": GOOD, "rejected": BAD}, both, {}),
        ("dpo", same := {"prompt": [SYSTEM, ASKED], "chosen": [GOOD], "rejected": [BAD], "tools": TOOLS}, same, {}),
        (
            "dpo", {"system": "S", "question": "What?", "chosen": GOOD["content"], "rejected": "Bad"},
            {"prompt": [SYSTEM, ASKED], "chosen": [GOOD], "rejected": [BAD]}, {},
        ),
    ]  # fmt: skip
    for objective, record, theirs, source in cases:
        with subtests.test(msg=str(record)):
            found = ours(folder, record, objective, **source)
            assert found == of_trl(folder, theirs, objective) and any(any(trained) for _, trained in found)
