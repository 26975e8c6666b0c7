"""The perplexity of a text is that of a plain loop of `transformers`, the same under every layout."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

import fivefold
from fivefold import cli
from fivefold.core.errors import UserError
from fivefold.evaluation import EvaluateRequest
from fivefold.launch.once import run_once
from fivefold.verification.by_hand import exactly
from tests.checkpoint.folders import OVERRIDES, hf_folder
from tests.evaluation.ranks import measured, scored
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import put_off

SEQ = 31  # prime, and shorter than some documents
DOCUMENTS = [
    "naïve façade",
    "x",
    "A text of more than one row: it is cut, and no token is lost on the way.",
    "ab",
]
LAYOUTS = [
    "pp2", "shard2.tp2", *map(put_off, ("cp2", "single", "shard2", "tp2", "pp2.cp2", "dp2", "shard2+mb2")),
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("evaluate")
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in DOCUMENTS)
    (root / "text.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return hf_folder(Case("single+fp32", overrides=(*OVERRIDES, ("max_position_embeddings", 128))), root / "hf")


def plain(folder: Path) -> tuple[float, int]:
    """Summed loss and tokens: each piece of a document its own sequence."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    summed, count = 0.0, 0
    for text in DOCUMENTS:
        ids = torch.tensor([*tokenizer(text, add_special_tokens=False).input_ids, 256])
        for start in range(0, len(ids) - 1, SEQ):
            targets = ids[start + 1 : start + 1 + SEQ]
            logits = model(ids[start : start + SEQ][None]).logits[0, : len(targets)]
            summed += float(cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    return summed, count


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_it_is_that_of_a_plain_loop(folder: Path, layout: str) -> None:
    with exactly("fp64"), torch.no_grad():
        summed, count = plain(folder)
    options = {"model": str(folder), "text": str(folder.parent / "text.jsonl"), "layout": f"{layout}+fp64"}
    world = Case(layout).parsed.world
    for found in run_ranks(world, measured, {**options, "seq_length": SEQ}):
        assert found["loss_sum"] == pytest.approx(summed, rel=1e-10)
        assert found["targets"] == count
        assert found["perplexity"] == pytest.approx(math.exp(summed / count), rel=1e-10)
        size = sum(len(text.encode()) for text in DOCUMENTS)
        assert found["bits_per_byte"] == pytest.approx(summed / math.log(2) / size, rel=1e-10)


def test_a_model_with_dropout_is_evaluated_without(folder: Path, tmp_path: Path) -> None:
    with_dropout = shutil.copytree(folder, tmp_path / "hf")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (with_dropout / "config.json").write_text(json.dumps({**config, "attention_dropout": 0.1}), encoding="utf-8")
    found = [
        run_once(
            "fivefold.evaluation.run",
            {"evaluate": {"model": str(model), "text": str(folder.parent / "text.jsonl"), "seq_length": SEQ}},
            layout="single", device="cpu", what="evaluate",
        )["text"]["loss_sum"]
        for model in (folder, with_dropout)
    ]  # fmt: skip
    assert found[0] == found[1]


@pytest.mark.full
def test_a_part_of_a_text_has_no_bits_per_byte(folder: Path) -> None:
    options = {"model": str(folder), "text": str(folder.parent / "text.jsonl"), "seq_length": SEQ, "max_tokens": 5}
    (found,) = run_ranks(1, measured, options)
    assert found["bits_per_byte"] is None and found["rows"] == 1


@pytest.mark.full
def test_of_conversations_the_answers_count(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "vier"}]
    file.write_text(json.dumps({"messages": turns}), encoding="utf-8")
    (found,) = run_ranks(1, measured, {"model": str(folder), "text": str(file), "seq_length": 100})
    said = len("vier<|im_end|>\n")
    assert (found["text_bytes"], found["targets"]) == (said, said + 1)  # and EOS
    (short,) = run_ranks(1, measured, {"model": str(folder), "text": str(file), "seq_length": 60})
    assert 0 < short["targets"] < said  # it lost its end
    assert short["text_bytes"] is None and short["bits_per_byte"] is None


def test_what_is_not_there(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"body": "a"}', encoding="utf-8")
    number = tmp_path / "number.jsonl"
    number.write_text('{"text": 5}', encoding="utf-8")
    for options, message, fix in (
        ({}, "is no run, so it has no validation rows", "--text"),
        ({"text": str(file)}, "no key 'text'", "--text-key body"),
        ({"text": str(number)}, "holds a int, not a string", "--text-key names the key"),
        ({"text": str(file), "text_key": "body", "seq_length": 129}, "--seq-length 129 is more than", "128, or less"),
    ):
        with pytest.raises(UserError, match=message) as caught:
            run_once(
                "fivefold.evaluation.run", {"evaluate": {"model": str(folder), **options}}, layout="single",
                device="cpu", what="evaluate",
            )  # fmt: skip
        assert fix in str(caught.value.fix)
    with pytest.raises(UserError, match="batch_size 0 is less than 1"):
        EvaluateRequest(model="m", batch_size=0)


@pytest.mark.full
def test_a_run_is_evaluated_as_it_was_while_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = (f"line {number} of a text, {number * number} words" for number in range(400))
    (tmp_path / "text.txt").write_text("\n".join(lines), encoding="utf-8")
    sizes = {"hidden_size": 32, "intermediate_size": 53, "num_hidden_layers": 2}
    run = fivefold.train(
        None,
        {
            "data.train": [{"path": "text.txt"}], "data.validation": "10%", "data.seq_length": 32,
            "model.overrides": sizes, "tokenizer.name_or_path": "byte", "train.max_steps": 2,
            "train.global_batch_size": 2, "eval.every": 2, "sample.every": 0, "train.device": "cpu",
            "precision.compute": "fp32",
        },
        nproc=1,
    )  # fmt: skip
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main(["evaluate", str(run.path), "--device", "cpu", "--json", "-"])
    assert ended.value.code == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["text"]["loss"] == pytest.approx(run.metrics[-1]["eval/loss"], rel=1e-6)


# ---- scores, which lm-eval asks for ----------------------------------------------------------------------------------

PAIRS = [([5, 71, 3], [44, 9]), ([17], [8]), ([8, 2, 99, 64, 31, 7, 77], [12, 50, 6, 23, 61]), ([61, 5], [20, 20, 3])]
PAIRS.append(([4, 9, 1, 2, 3, 30, 31, 32, 33, 34, 35, 36], [3]))  # the longest, with the fewest that are scored


@pytest.mark.full
@pytest.mark.parametrize("layout", ["cp2", *map(put_off, ("tp2", "pp2", "single", "shard2"))])
def test_scores_are_those_of_the_model_alone(folder: Path, layout: str) -> None:
    with exactly("fp64"), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
        pairs = [*PAIRS]
        first = model(torch.tensor([[5, 71, 3]])).logits[0, -1].argmax().item()
        pairs.append(([5, 71, 3], [first]))  # the likeliest
        expected = []
        for given, answer in pairs:
            chances = model(torch.tensor([[*given, *answer]])).logits[0].log_softmax(-1)
            places = range(len(given) - 1, len(given) + len(answer) - 1)
            summed = sum(float(chances[at, token]) for at, token in zip(places, answer, strict=True))
            greedy = all(int(chances[at].argmax()) == token for at, token in zip(places, answer, strict=True))
            expected.append((pytest.approx(summed, rel=1e-10), greedy))
    assert expected[-1][1] and not all(greedy for _, greedy in expected)
    world = Case(layout).parsed.world
    assert run_ranks(world, scored, str(folder), f"{layout}+fp64", pairs) == [expected] * world
