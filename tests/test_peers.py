"""Names that other trainers give to keys are answered with the exact key."""

import re
from pathlib import Path

import pytest

from fivefold.config import keys, load_config
from fivefold.config.peers import DIFFERENT, SAME
from fivefold.core.errors import UserError

KEYS = {key.name.replace("[]", "") for key in keys()}

ASKED = {
    "lr": "optimizer.learning_rate",
    "train.lr": "optimizer.learning_rate",
    "optimizer.lr": "optimizer.learning_rate",
    "learning_rate": "optimizer.learning_rate",
    "gradient_accumulation_steps": "train.global_batch_size = train.micro_batch_size x accumulation x data ranks",
    "num_train_epochs": "train.max_epochs",
    "per_device_train_batch_size": "train.micro_batch_size",
    "warmup_ratio": "scheduler.warmup_steps to a part of the run, such as 5%",
    "output_dir": "run.dir/run.name",
    "max_seq_length": "data.seq_length",
    "max_length": "data.seq_length",
    "block_size": "data.seq_length",
    "model_name_or_path": "model.name_or_path",
    "dataset": "data.train",
    "bf16": "precision.compute: bf16",
    "fp16": "fp16 is not built",
    "gradient_checkpointing": "memory.recompute: full",
    "lr_scheduler_type": "scheduler.name",
    "save_steps": "checkpoint.every",
    "eval_steps": "eval.every",
    "load_best_model_at_end": "checkpoint.keep_best: 1",
    "early_stopping_patience": "eval.stop.patience",
    "metric_for_best_model": "eval.metric",
    "logging_steps": "log.every",
    "report_to": "log.to",
    "tensor_parallel_size": "layout.tp",
    "tp_size": "layout.tp",
    "tensor_model_parallel_size": "layout.tp",
    "pipeline_parallel_size": "layout.pp",
    "context_parallel_size": "layout.cp",
    "tp": "layout.tp",
    "dp": "layout.dp_shard",
    "fsdp": "layout.dp_shard: -1",
    "zero_stage": "layout.zero",
    "deepspeed": "layout.zero",
    "seed": "train.seed",
    "max_grad_norm": "optimizer.max_grad_norm",
    "weight_decay": "optimizer.weight_decay",
    "lora.r": "set adapter: {name: lora",
    "peft.method": "set adapter: {name: lora",
    "precision.bf16": "precision.compute: bf16",
    "train.num-train-epochs": "train.max_epochs",
    "compile": "train.compile",
}


def test_on_the_command_line_and_in_a_file(subtests: pytest.Subtests, tmp_path: Path) -> None:
    for name in ASKED:
        with subtests.test(msg=name):
            with pytest.raises(UserError, match="is not a key") as raised:
                load_config(None, [f"{name}=1"])
            assert ASKED[name] in str(raised.value.fix)
            section, _, key = name.rpartition(".")
            file = tmp_path / "run.yaml"
            file.write_text(f"{section}:\n  {key}: 1\n" if section else f"# mine\n{key}: 1\n")
            with pytest.raises(UserError, match=r"run\.yaml:[12] \S+ is not a key") as raised:
                load_config(file)
            assert ASKED[name] in str(raised.value.fix)


@pytest.mark.parametrize(
    ("override", "key"), [("model=gpt2", "model.name_or_path"), ("optimizer=adamw", "optimizer.name")]
)
def test_a_value_where_a_section_belongs(override: str, key: str) -> None:
    with pytest.raises(UserError, match="should be a section of keys") as raised:
        load_config(None, [override])
    assert raised.value.fix == f"write {key}"


def test_every_key_that_an_answer_names_is_one() -> None:
    assert set(SAME) <= KEYS
    sections = {key.split(".")[0] for key in KEYS}
    for text in DIFFERENT.values():
        named = {word for word in re.findall(r"\b[a-z]+(?:\.[a-z_]+)+\b", text) if word.split(".")[0] in sections}
        assert named <= KEYS, text


def test_no_name_has_two_answers() -> None:
    names = [name for group in (*SAME.values(), *DIFFERENT) for name in group.split()]
    assert len(names) == len(set(names))


def test_a_key_s_own_name_in_the_wrong_place_is_found() -> None:
    last, sections = [key.last for key in keys()], {key.section for key in keys()}
    for key in keys():
        if last.count(key.last) == 1 and key.last not in sections and "[" not in key.name:
            with pytest.raises(UserError) as raised:
                load_config(None, [f"{key.last}=1"])
            assert raised.value.fix == f"did you mean {key.name}?"
