"""`fivefold convert`: configs of other trainers become run files that load, and nothing they say is lost silently."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from fivefold.config import RunConfig, load_config
from fivefold.config.convert import convert
from fivefold.config.convert.given import TRANSFORMERS
from fivefold.core.errors import UserError

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: false
datasets:
  - {path: teknium/GPT4-LLM-Cleaned, type: alpaca}
  - {path: org/chats, type: chat_template, field_messages: conversations, split: train, name: small}
  - {path: data/pages.jsonl, type: completion, field: body}
val_set_size: 0.1
output_dir: ./outputs/first
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 2
micro_batch_size: 3
num_epochs: 2
optimizer: adamw_bnb_8bit
learning_rate: 2e-4
warmup_ratio: 0.1
gradient_checkpointing: true
context_parallel_size: 2
flash_attention: true
evals_per_epoch: 4
some_new_switch: 7
an_old_switch: false
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
dataset: identity,talks
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-5
lr_scheduler_type: cosine
bf16: true
mask_history: true
"""
TRL = """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
eval_strategy: steps
eval_steps: 50
max_steps: 70
optim: adafactor
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 2.0e-6}
report_to: [wandb, tensorboard]
"""


def loaded(tmp_path: Path, text: str, **options: Any) -> tuple[RunConfig, str]:
    """The run file of `text`, read back, and as it is printed."""
    other = tmp_path / "other.yaml"
    other.write_text(text)
    printed = str(convert(other, **options))
    run = tmp_path / "run.yaml"
    run.write_text(printed)
    return load_config(run), printed


def test_axolotl(tmp_path: Path) -> None:
    config, printed = loaded(tmp_path, AXOLOTL, devices=8)
    assert config.model.name_or_path == "NousResearch/Llama-3.2-1B"
    assert [(each.path, each.format, each.text_key) for each in config.data.train] == [
        ("hub:teknium/GPT4-LLM-Cleaned", "auto", "text"),
        ("hub:org/chats?config=small&split=train", "chat", "text"),
        ("data/pages.jsonl", "auto", "body"),
    ]
    assert config.data.train[1].columns == {"messages": "conversations"}
    assert (config.data.seq_length, config.data.packing, config.data.validation) == (4096, True, 0.1)
    # 3 rows x 2 x 4 data ranks: of 8 devices, every two share their rows.
    assert (config.train.micro_batch_size, config.train.global_batch_size, config.written_layout.cp) == (3, 24, 2)
    assert (config.train.max_epochs, config.train.max_steps) == (2, None)
    assert (config.optimizer.learning_rate, config.optimizer.state_dtype) == (2e-4, "8bit")
    # What axolotl does where nothing is said, and a run file would do otherwise.
    assert (config.optimizer.betas, config.optimizer.weight_decay, config.train.seed) == ((0.9, 0.999), 0.0, 42)
    assert (config.scheduler.name, config.scheduler.min_lr_ratio) == ("cosine", 0.0)
    assert config.scheduler.warmup_steps == pytest.approx(0.1)
    assert (config.memory.recompute, config.precision.compute) == ("full", "bf16")
    assert (config.run.dir, config.run.name) == ("outputs", "first")
    assert "some_new_switch: fivefold has no counterpart" in printed
    assert "evals_per_epoch: it is counted in optimizer steps: eval.every" in printed
    assert "without effect here: flash_attention" in printed
    assert "an_old_switch" not in printed and "load_in_4bit" not in printed  # off


def test_llama_factory_reads_its_list_of_datasets(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data/dataset_info.json").write_text(
        '{"talks": {"file_name": "talks.json", "formatting": "sharegpt"}, '
        '"identity": {"hf_hub_url": "org/identity", "columns": {"prompt": "ask", "response": "say"}}}'
    )
    config, printed = loaded(tmp_path, LLAMA_FACTORY, devices=2)
    first, second = config.data.train
    assert (first.path, first.columns) == ("hub:org/identity?split=train", {"prompt": "ask", "completion": "say"})
    assert (second.path, second.format) == (str(tmp_path / "data/talks.json"), "chat")
    assert [each.train_on for each in config.data.train] == ["last", "last"]
    assert (config.train.global_batch_size, config.train.max_epochs) == (16, 3)
    assert (config.data.packing, config.memory.recompute, config.scheduler.warmup_steps) == (False, "full", 0)
    assert "not carried over" not in printed


def test_trl(tmp_path: Path) -> None:
    config, printed = loaded(tmp_path, TRL)
    assert [each.path for each in config.data.train] == ["hub:trl-lib/Capybara?split=train"]
    assert config.data.validation[0].path == "hub:trl-lib/Capybara?split=test"  # type: ignore[index,union-attr]
    assert (config.eval.every, config.train.max_steps, config.data.seq_length) == (50, 70, 1024)
    assert (config.train.global_batch_size, config.optimizer.learning_rate) == (8, 2e-5)
    assert config.scheduler.min_lr_ratio == pytest.approx(0.1)
    assert config.log.to == ("jsonl", "wandb", "tensorboard")
    assert "optim: adafactor is not built" in printed and "train_on: all" in printed


def test_what_is_done_where_a_file_is_silent_is_what_transformers_does() -> None:
    own = {each.name: each.default for each in fields(TrainingArguments)}
    assert {name: own[name] for name in TRANSFORMERS} == dict(TRANSFORMERS)


def test_no_text_of_the_other_file_ends_a_comment(tmp_path: Path) -> None:
    odd = yaml.safe_dump({"base_model": "a/b", "x\nrun": {"name": "evil"}, "optimizer": "x\u2028model:\x85  init: y"})
    config, printed = loaded(tmp_path, odd)
    assert all(line.startswith("#") for line in printed.split("model:\n  name_or_path")[0].splitlines()[:-1])
    assert config.run.name != "evil" and config.optimizer.name == "adamw"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {name_or_path: demo}", "no config of axolotl, LLaMA-Factory, TRL"),
        ("[1, 2]", "not a run file"),
        ("base_model: a/b\nmicro_batch_size: many", "what it says of the batch cannot be read"),
        ("base_model: a/b\ndatasets: [4]", "what it says of the data cannot be read"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(UserError) as refused:
        loaded(tmp_path, text)
    assert says in refused.value.what


def test_a_value_that_a_run_file_does_not_take_is_left_with_its_reason(tmp_path: Path) -> None:
    config, printed = loaded(tmp_path, "base_model: a/b\nmax_grad_norm: -1\ncontext_parallel_size: 1")
    assert config.optimizer.max_grad_norm == 1.0
    assert "optimizer.max_grad_norm: -1 is no value of it" in printed


# ---- preferences -----------------------------------------------------------------------------------------------------

RANKED = {"ranked": {"file_name": "r.json", "ranking": True, "formatting": "sharegpt",
                     "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}},
          "rated": {"file_name": "r.json", "formatting": "sharegpt",
                    "columns": {"messages": "talk", "kto_tag": "good"}}}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "objective", "more"),
    [
        (
            "base_model: a/b\nrl: ipo\nrl_beta: 0.2\nsequence_len: 512\nlearning_rate: 5e-7\n"
            "datasets: [{path: d.jsonl, type: chat_template.default, field_messages: talk, field_chosen: good}]\n",
            {"name": "ipo", "beta": 0.2},
            {"train": [{"path": "d.jsonl", "format": "preference", "columns": {"prompt": "talk", "chosen": "good"}}]},
        ),
        (
            "model_name_or_path: a/b\nstage: dpo\ncutoff_len: 512\npref_beta: 0.3\npref_loss: simpo\nsimpo_gamma: 1.5\n"
            "dataset: ranked\ndataset_dir: .\n",
            {"name": "simpo", "beta": 0.3, "gamma": 1.5},
            {"train": [{
                "format": "preference", "columns": {"prompt": "talk", "chosen": "good", "rejected": "bad"},
            }]},
        ),
        (
            "model_name_or_path: a/b\ndataset_name: d.jsonl\nmax_length: 512\nloss_type: sigmoid\nref_model: c/d\n",
            {"name": "dpo", "beta": 0.1, "reference": "c/d"},
            {"train": [{"path": "d.jsonl"}]},
        ),
        (
            "base_model: a/b\nrl: kto\nrl_beta: 0.2\nkto_undesirable_weight: 0.5\nsequence_len: 512\n"
            "learning_rate: 5e-7\ndatasets: [{path: d.jsonl, type: llama3.ultra}]\n",
            {"name": "kto", "beta": 0.2, "undesirable_weight": 0.5},
            {"train": [{"path": "d.jsonl"}]},
        ),
        (
            "model_name_or_path: a/b\nstage: kto\ncutoff_len: 512\npref_beta: 0.3\nkto_chosen_weight: 2.0\n"
            "dataset: rated\ndataset_dir: .\n",
            {"name": "kto", "beta": 0.3, "desirable_weight": 2.0},
            {"train": [{"format": "chat", "columns": {"messages": "talk", "label": "good"}}]},
        ),
        (
            "model_name_or_path: a/b\ndataset_name: d.jsonl\nmax_length: 512\nloss_type: kto\n",
            {"name": "kto", "beta": 0.1},
            {"train": [{"path": "d.jsonl"}]},
        ),
    ],
    ids=["axolotl", "LLaMA-Factory", "TRL", "axolotl kto", "LLaMA-Factory kto", "TRL kto"],
)  # fmt: skip
def test_preference_configs(tmp_path: Path, text: str, objective: dict[str, Any], more: dict[str, Any]) -> None:
    (tmp_path / "dataset_info.json").write_text(json.dumps(RANKED))
    (tmp_path / "r.json").write_text("[]")
    (tmp_path / "other.yml").write_text(text)
    found = convert(tmp_path / "other.yml")
    assert found.tree["objective"] == objective and not found.left
    (source,) = found.tree["data"]["train"]
    assert {key: source[key] for key in more["train"][0]} == more["train"][0]
    assert found.tree["data"]["seq_length"] == 1024  # two sequences of 512
    rates = {"axolotl": 5e-7, "LLaMA-Factory": 5e-5, "TRL": 1e-6}
    assert float(found.tree["optimizer"]["learning_rate"]) == rates[found.trainer]
    assert RunConfig.model_validate(found.tree).objective.name == objective["name"]


def test_an_objective_that_is_not_built_is_said(tmp_path: Path) -> None:
    (tmp_path / "other.yml").write_text("base_model: a/b\nrl: grpo\ndatasets: [{path: d.jsonl}]\n")
    found = convert(tmp_path / "other.yml")
    assert "grpo is not built" in found.left["rl"] and found.tree["objective"]["name"] == "dpo"


@pytest.mark.parametrize(
    ("text", "section", "left"),
    [
        (
            "base_model: a/b\nadapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n"
            "peft_use_rslora: true\ndatasets: [{path: d.jsonl, type: alpaca}]\n",
            {"name": "lora", "rank": 32, "alpha": 16, "targets": "auto", "rslora": True}, set(),
        ),
        (
            "model_name_or_path: a/b\nstage: sft\nfinetuning_type: lora\nlora_target: q_proj,v_proj\n"
            "lora_dropout: 0.1\ndataset: none\ndataset_dir: .\n",
            {"name": "lora", "rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"]}, {"lora_dropout"},
        ),
        (
            "model_name_or_path: a/b\ndataset_name: d.jsonl\nuse_peft: true\nlora_target_modules: [k_proj]\n"
            "lora_target_parameters: [down_proj]\n",
            {"name": "lora", "rank": 16, "alpha": 32, "targets": ["k_proj"], "target_parameters": ["down_proj"]},
            {"lora_dropout"},  # 0.05 unsaid
        ),
        (
            "base_model: a/b\nadapter: qlora\nload_in_4bit: true\ndatasets: [{path: d.jsonl, type: alpaca}]\n",
            {"name": "lora", "rank": 8, "alpha": 16, "targets": "auto", "quantize": "nf4"}, set(),
        ),
    ],
    ids=["axolotl", "LLaMA-Factory", "TRL", "qlora"],
)  # fmt: skip
def test_adapters(tmp_path: Path, text: str, section: dict[str, Any], left: set[str]) -> None:
    (tmp_path / "other.yml").write_text(text)
    found = convert(tmp_path / "other.yml")
    assert found.tree["adapter"] == section and left == set(found.left)
    lora = RunConfig.model_validate(found.tree).adapter.lora
    assert lora is not None and lora.rank == section["rank"]


def test_linears_that_peft_would_choose_are_said(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text("model_name_or_path: a/b\ndataset_name: d.jsonl\nuse_peft: true\n")
    assert "lora_target_modules is not said there" in str(convert(tmp_path / "other.yaml"))


def test_a_teacher_of_trl(tmp_path: Path) -> None:
    """GKD's beta is not DPO's."""
    text = "model_name_or_path: a/b\ndataset_name: c/d\nteacher_model_name_or_path: big/one\nlmbda: 0.5\nbeta: 0.1\n"
    (tmp_path / "gkd.yaml").write_text(text + "temperature: 1.5\ntrust_remote_code: false\n")
    found = convert(tmp_path / "gkd.yaml")
    expected = {"name": "distill", "teacher": "big/one", "temperature": 1.5, "alpha": 1.0}
    assert found.tree["objective"] == expected and {"lmbda", "beta"} <= set(found.left)
