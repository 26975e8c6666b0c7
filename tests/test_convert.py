"""`fivefold convert`: configs of other trainers become run files that load. Every key of the other trainer keeps its
meaning, is said to be changed, is said to have no counterpart, or is refused."""

import json
from contextlib import suppress
from dataclasses import MISSING, fields
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import TrainingArguments, get_scheduler

from fivefold.config import RunConfig, check_best, load_config
from fivefold.convert import convert
from fivefold.convert.given import NO_COUNTERPART, REFUSED, RULES, Converted, schema
from fivefold.core.errors import UserError
from fivefold.training.schedule import learning_rate
from tests.commands import fivefold

AXOLOTL = """
base_model: NousResearch/Llama-3.2-1B
load_in_4bit: false
datasets:
  - {path: org/chats, type: chat_template, field_messages: conversations, split: train, name: small}
  - {path: data/pages.jsonl, type: completion, field: body}
  - {path: json, type: chat_template, data_files: [a.jsonl, b.jsonl]}
chat_template: llama3
val_set_size: 0.1
output_dir: ./outputs/first
sequence_len: 4096
sample_packing: true
gradient_accumulation_steps: 2
micro_batch_size: 3
num_epochs: 2
optimizer: adamw_bnb_8bit
lr_scheduler: cosine
learning_rate: 2e-4
warmup_ratio: 0.1
bf16: auto
gradient_checkpointing: true
context_parallel_size: 2
flash_attention: true
evals_per_epoch: 4
wandb_project:
special_tokens: {pad_token: <|end_of_text|>}
use_eaft: false
"""
LLAMA_FACTORY = """
model_name_or_path: meta-llama/Meta-Llama-3-8B-Instruct
stage: sft
finetuning_type: full
dataset: identity,talks
template: llama3
cutoff_len: 1024
per_device_train_batch_size: 1
gradient_accumulation_steps: 8
learning_rate: 1.0e-5
lr_scheduler_type: cosine
warmup_ratio: 0.1
bf16: true
mask_history: true
plot_loss: true
"""
TRL = """
model_name_or_path: Qwen/Qwen2-0.5B
dataset_name: trl-lib/Capybara
eval_strategy: steps
eval_steps: 50
max_steps: 70
lr_scheduler_type: cosine_with_min_lr
lr_scheduler_kwargs: {min_lr: 2.0e-6}
report_to: [wandb, tensorboard]
"""
# The least that each takes: source -> (text, trainer of TRL).
LEAST = {
    "axolotl": "base_model: a/b\nlearning_rate: 1e-5\ndatasets: [{path: d.jsonl, type: chat_template}]\n",
    "llamafactory": "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset: d\ndataset_dir: .\n",
    "trl": "model_name_or_path: a/b\ndataset_name: c/d\n",
}
INFO = {
    "d": {"file_name": "d.json"},
    "talks": {"file_name": "talks.json", "formatting": "sharegpt"},
    "asked": {"file_name": "asked.json", "columns": {"prompt": "ask", "response": "say", "system": "told"}},
    "input": {"file_name": "input.json", "columns": {
        "prompt": "instruction", "query": "input", "response": "output", "system": "system", "history": "history",
    }},
    "renamed": {"file_name": "other.json", "columns": {"prompt": "ask", "query": "with", "response": "output"}},
    "short": {"file_name": "input.json", "columns": {"prompt": "instruction", "response": "output"}},
    "identity": {"hf_hub_url": "org/identity"},
    "ranked": {"file_name": "r.json", "ranking": True, "formatting": "sharegpt",
               "columns": {"messages": "talk", "chosen": "good", "rejected": "bad"}},
    "rated": {"file_name": "r.json", "formatting": "sharegpt", "columns": {"messages": "talk", "kto_tag": "good"}},
    "pages": {"file_name": "p.json", "columns": {"prompt": "text"}},
    "seen": {"file_name": "s.json", "columns": {"messages": "talk", "images": "images"}, "formatting": "sharegpt"},
}  # fmt: skip


def converted(tmp_path: Path, text: str | dict[str, Any], **options: Any) -> Converted:
    """What becomes of a config; LLaMA-Factory's list of datasets lies beside it."""
    (tmp_path / "dataset_info.json").write_text(json.dumps(INFO))
    other = tmp_path / "other.yaml"
    other.write_text(text if isinstance(text, str) else yaml.safe_dump(text))
    return convert(other, **options)


def refusal(tmp_path: Path, text: str | dict[str, Any]) -> str:
    with pytest.raises(UserError) as refused:
        converted(tmp_path, text)
    return refused.value.what


def loaded(tmp_path: Path, text: str, **options: Any) -> tuple[RunConfig, str]:
    """The run file of `text`, read back, and as it is printed."""
    printed = str(converted(tmp_path, text, **options))
    run = tmp_path / "run.yaml"
    run.write_text(printed)
    return load_config(run), printed


# ---- one config of each ----------------------------------------------------------------------------------------------


def test_axolotl(tmp_path: Path) -> None:
    config, printed = loaded(tmp_path, AXOLOTL, devices=8)
    assert config.model.name_or_path == "NousResearch/Llama-3.2-1B"
    assert [(each.path, each.columns, each.text_key) for each in config.data.train] == [
        ("hub:org/chats?config=small&split=train", {"messages": "conversations"}, "text"),
        ("data/pages.jsonl", {}, "body"),
        ("a.jsonl", {"messages": "messages"}, "text"),
        ("b.jsonl", {"messages": "messages"}, "text"),
    ]
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
    assert (config.run.dir, config.run.name, config.log.to) == ("outputs", "first", ("jsonl",))
    assert "evals_per_epoch: what is evaluated, logged, saved or shown" in printed
    assert "flash_attention: speed and memory, not what is trained" in printed and "use_eaft: off" in printed
    assert "  train:  # changed: the template is the tokenizer's, or ChatML where it has none; llama3 of" in printed
    assert "  warmup_steps: 10%  # changed: step k of the w has k/w of the rate, and (k - 1)/w there;" in printed


def test_llama_factory_reads_its_list_of_datasets(tmp_path: Path) -> None:
    config, printed = loaded(tmp_path, LLAMA_FACTORY + f"dataset_dir: {tmp_path}\n", devices=2)
    first, second = config.data.train
    assert (first.path, first.format) == ("hub:org/identity?split=train", "chat")
    assert first.columns == {"prompt": "instruction", "input": "input", "completion": "output"}
    assert (second.path, second.columns) == (str(tmp_path / "talks.json"), {"messages": "conversations"})
    assert [each.train_on for each in config.data.train] == ["last", "last"]
    assert (config.train.global_batch_size, config.train.max_epochs) == (16, 3)
    assert (config.data.packing, config.memory.recompute, config.scheduler.warmup_steps) == (False, "full", 0.1)
    assert "llama3 of LLaMA-Factory there" in printed and "plot_loss: what is evaluated" in printed


def test_trl(tmp_path: Path) -> None:
    config, printed = loaded(tmp_path, TRL)
    (source,) = config.data.train
    assert (source.path, source.columns) == ("hub:trl-lib/Capybara?split=train", {"messages": "messages"})
    assert source.train_on == "all" and "  train:  # changed: read as messages, all of which TRL trains" in printed
    assert config.data.validation[0].path == "hub:trl-lib/Capybara?split=test"  # type: ignore[index,union-attr]
    assert (config.eval.every, config.train.max_steps, config.data.seq_length) == (50, 70, 1024)
    assert (config.train.global_batch_size, config.optimizer.learning_rate) == (8, 2e-5)
    assert config.scheduler.min_lr_ratio == pytest.approx(0.1)
    assert config.log.to == ("jsonl", "wandb", "tensorboard") and config.precision.compute == "bf16"


def test_continued_pre_training(tmp_path: Path) -> None:
    """Of all three: a text under its own key."""
    texts = {
        "axolotl": "base_model: a/b\nlearning_rate: 1e-5\nsequence_len: 64\nwarmup_steps: 5\n"
        "pretraining_dataset: [{path: p.jsonl, text_column: text}]\nmax_steps: 10\n",
        "llamafactory": "model_name_or_path: a/b\nstage: pt\nfinetuning_type: full\ndataset: pages\ndataset_dir: .\n",
        "trl": "model_name_or_path: a/b\ndataset_name: c/d\ndataset_text_field: text\npacking: true\n",
    }
    for text in texts.values():
        found = converted(tmp_path, text)
        (source,) = found.tree["data"]["train"]
        assert source["text_key"] == "text" and found.tree["data"]["packing"] is True
        assert "objective" not in found.tree and RunConfig.model_validate(found.tree)


def test_a_text_column_of_axolotl_has_its_name(tmp_path: Path) -> None:
    text = "base_model: a/b\nlearning_rate: 1e-5\nsequence_len: 64\nmax_steps: 10\n"
    found = converted(tmp_path, text + "pretraining_dataset: [{path: p.jsonl, text_column: body}]\n")
    assert [each["text_key"] for each in found.tree["data"]["train"]] == ["body"]


# ---- the best checkpoint ---------------------------------------------------------------------------------------------

ASKS = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 50, "save_total_limit": 3}
HELD_OUT = {"axolotl": {"val_set_size": 0.1}, "llamafactory": {"val_size": 0.1}, "trl": {}}


@pytest.mark.parametrize("source", LEAST)
def test_the_best_checkpoint_is_carried(tmp_path: Path, source: str) -> None:
    patience = {"early_stopping_steps" if source == "llamafactory" else "early_stopping_patience": 4}
    config = RunConfig.model_validate(
        converted(tmp_path, yaml.safe_load(LEAST[source]) | HELD_OUT[source] | ASKS | patience).tree
    )
    assert (config.checkpoint.keep_best, config.checkpoint.keep, config.checkpoint.export_hf) == (1, 2, "best")
    assert (config.eval.every, config.eval.metric, config.eval.direction) == (50, "eval/loss", "min")
    assert (config.eval.stop.patience, config.eval.stop.min_delta) == (4, 0.0)
    check_best(config)


def test_words_for_the_best_checkpoint(tmp_path: Path) -> None:
    least = yaml.safe_load(LEAST["trl"]) | ASKS
    dpo = least | {
        "loss_type": ["sigmoid"], "metric_for_best_model": "eval_rewards/accuracies", "greater_is_better": True,
        "early_stopping_patience": 2, "early_stopping_threshold": 0.01,
    }  # fmt: skip
    found = converted(tmp_path, dpo)
    config = RunConfig.model_validate(found.tree)
    assert (config.eval.metric, config.eval.mode, config.eval.stop.min_delta) == (
        "eval/rewards/accuracies",
        "max",
        0.01,
    )
    assert "add up" in found.changed["eval.stop"]
    check_best(config)
    assert "wer is not measured" in refusal(tmp_path, least | {"metric_for_best_model": "wer"})
    only_best = converted(tmp_path, least | {"load_best_model_at_end": False, "save_strategy": "best"}).tree
    assert only_best["checkpoint"] == {"every": 0, "keep": 3, "export_hf": True, "keep_best": 3}
    for without in ({"eval_strategy": "no", "eval_steps": None}, {"load_best_model_at_end": False}):
        left = converted(tmp_path, least | {"metric_for_best_model": "loss"} | without)
        assert "metric_for_best_model" in left.left and "keep_best" not in left.tree["checkpoint"]


@pytest.mark.parametrize("source", LEAST)
def test_a_best_of_validations_that_are_not_counted_in_steps_is_refused(tmp_path: Path, source: str) -> None:
    patience = "early_stopping_steps" if source == "llamafactory" else "early_stopping_patience"
    asks = {"load_best_model_at_end": True, patience: 2}
    least = yaml.safe_load(LEAST[source]) | HELD_OUT[source] | asks
    by_epoch = [{"eval_strategy": "epoch"}, {"eval_strategy": "steps", "eval_steps": 0.1}]
    by_epoch += [{"evals_per_epoch": 2}] if source == "axolotl" else []
    for counted in by_epoch:
        said = refusal(tmp_path, least | counted)
        assert "load_best_model_at_end" in said and patience in said and "eval_steps: N" in said


def test_validations_are_as_frequent_as_logs_unless_said(tmp_path: Path) -> None:
    least = yaml.safe_load(LEAST["trl"]) | {"eval_strategy": "steps", "load_best_model_at_end": True}
    assert converted(tmp_path, least).tree["eval"]["every"] == 10  # TRL's logging_steps
    assert converted(tmp_path, least | {"logging_steps": 7}).tree["eval"]["every"] == 7


# ---- every key of every schema ---------------------------------------------------------------------------------------


# Values that are not their default, where one more or another text is none that the trainer takes.
OTHERS = {"bf16": (False, True), "max_steps": (3,), "excess_length_strategy": ("truncate",)}


def said_of(found: Converted) -> tuple[Any, ...]:
    return found.tree, found.changed, found.left, found.notes


def another(value: Any) -> Any:
    """A value that is not this default."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int | float) else "other" if isinstance(value, str) else 7


def test_every_key_of_every_schema(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Keys without a counterpart are said, and those that ask for something else are refused, each by its name."""
    for source, text in LEAST.items():
        keys, least = schema(source, "sft"), yaml.safe_load(text)
        kinds = {
            kind: [key for key, (what, _) in keys.becomes.items() if what == kind] for kind in (NO_COUNTERPART, REFUSED)
        }
        with subtests.test(source=source):
            for key, name in keys.names.items():  # no name of the rules is another key of the trainer
                assert keys.becomes.get(name, ("", ""))[0] in ("", keys.becomes[key][0]), key
            silent = converted(tmp_path, text).tree
            for value in (lambda default: default, another):
                said = {key: value(keys.defaults.get(key)) for key in kinds[NO_COUNTERPART] if key not in keys.only}
                found = converted(tmp_path, {**least, **said})
                assert said.keys() <= found.left.keys() and found.tree == silent
            off = {key: keys.defaults.get(keys.name(key)) for key in kinds[REFUSED]}
            found = converted(tmp_path, {**least, **off})
            assert off.keys() <= found.left.keys() and found.tree == silent
            refused = refusal(tmp_path, {**least, **{key: another(value) for key, value in off.items()}})
            for key in off:
                assert f" {key}: " in refused, key


def test_every_key_that_a_rule_reads_is_seen(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Another value of it changes the run file, or is said, or is refused."""
    losses = {"dpo": {"loss_type": ["sigmoid"]}, "kto": {"loss_type": "kto"}}
    for source, trainer in [("axolotl", ""), ("llamafactory", ""), ("trl", "sft"), ("trl", "dpo"), ("trl", "kto")]:
        keys, least = schema(source, trainer), yaml.safe_load(LEAST[source]) | losses.get(trainer, {})
        before = said_of(converted(tmp_path, least))
        read = {key for key, (kind, _) in keys.becomes.items() if kind == RULES} - keys.only
        for key in sorted(read & schema("trl", "sft").only if trainer in losses else read):
            default = keys.defaults.get(keys.name(key))
            value = next((each for each in OTHERS.get(key, ()) if each != default), another(default))
            with subtests.test(source=source, trainer=trainer, key=key), suppress(UserError):
                assert said_of(converted(tmp_path, {**least, key: value})) != before


def default_of(field: Any) -> Any:
    value = field.default if field.default is not MISSING else None
    value = field.default_factory() if field.default_factory is not MISSING else value
    return getattr(value, "value", value) or (value if isinstance(value, bool | int | float | str) else None)


def test_the_schema_of_transformers_is_that_of_the_installed_version() -> None:
    keys = schema("transformers")
    own = {each.name: default_of(each) for each in fields(TrainingArguments)}
    assert own.keys() <= keys.becomes.keys()
    assert {name: keys.defaults.get(keys.name(name)) for name in own} == own


@pytest.mark.full
def test_the_schema_of_trl_is_that_of_the_installed_version(subtests: pytest.Subtests) -> None:
    trl = pytest.importorskip("trl")
    scripts = pytest.importorskip("trl.scripts.utils")
    shared = (trl.ModelConfig, scripts.ScriptArguments, scripts.DatasetMixtureConfig)
    for trainer, config in {"sft": trl.SFTConfig, "dpo": trl.DPOConfig, "kto": trl.KTOConfig}.items():
        with subtests.test(trainer=trainer):
            keys = schema("trl", trainer)
            own = {each.name: default_of(each) for each in (*fields(config), *(f for c in shared for f in fields(c)))}
            assert own.keys() <= keys.becomes.keys() - keys.only
            assert {name: keys.defaults.get(keys.name(name)) for name in own} == own


# ---- data ------------------------------------------------------------------------------------------------------------


def test_columns_of_llama_factory(tmp_path: Path, subtests: pytest.Subtests) -> None:
    (tmp_path / "input.json").write_text(
        '[{"instruction": "a", "input": "b", "output": "c", "system": "d", "history": []}]'
    )
    base = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset_dir: .\ndataset: "
    expected = {
        "asked": {"format": "chat", "columns": {"prompt": "ask", "completion": "say", "system": "told"}},
        "input": {
            "format": "chat",
            "columns": {
                "prompt": "instruction",
                "input": "input",
                "completion": "output",
                "system": "system",
                "history": "history",
            },
        },
        "renamed": {"format": "chat", "columns": {"prompt": "ask", "input": "with", "completion": "output"}},
        "d": {"format": "chat", "columns": {"prompt": "instruction", "input": "input", "completion": "output"}},
    }
    for name, source in expected.items():
        with subtests.test(dataset=name):
            (found,) = converted(tmp_path, base + name).tree["data"]["train"]
            assert found == {"path": str(tmp_path / INFO[name]["file_name"]), **source}
    assert "short.columns: they leave out history, system, which would be read" in refusal(tmp_path, base + "short")
    assert "seen.columns.images: text alone is trained" in refusal(tmp_path, base + "seen")
    assert "dataset: nowhere is not in" in refusal(tmp_path, base + "nowhere")


def test_more_records_than_were_asked_for_are_refused(tmp_path: Path) -> None:
    base = "model_name_or_path: a/b\nstage: sft\nfinetuning_type: full\ndataset_dir: .\ndataset: talks\nmax_samples: "
    (tmp_path / "talks.json").write_text('[{"conversations": []}, {"conversations": []}]')
    assert "max_samples: talks has more records" in refusal(tmp_path, base + "1")
    assert "all records" not in str(converted(tmp_path, base + "2"))
    (tmp_path / "talks.json").unlink()
    assert "# changed: all records are read; 2 of each there" in str(converted(tmp_path, base + "2"))


def test_records_of_trl_are_told_by_their_keys(tmp_path: Path, subtests: pytest.Subtests) -> None:
    base = f"model_name_or_path: a/b\ndataset_name: {tmp_path / 'd.jsonl'}\n"
    messages, pair = (
        {"columns": {"messages": "messages"}},
        {"columns": {"prompt": "prompt", "completion": "completion"}},
    )
    cases = [
        ({"messages": []}, "", {**messages, "train_on": "all"}),
        ({"messages": []}, "assistant_only_loss: true", {**messages, "train_on": "assistant"}),
        ({"prompt": "a", "completion": "b"}, "", {**pair, "train_on": "assistant"}),
        ({"prompt": "a", "completion": "b"}, "completion_only_loss: false", {**pair, "train_on": "all"}),
        ({"text": "a"}, "", {"text_key": "text"}),
        ({"body": "a"}, "dataset_text_field: body", {"text_key": "body"}),
    ]
    for record, more, expected in cases:
        with subtests.test(record=record, more=more):
            (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n")
            (source,) = converted(tmp_path, base + more).tree["data"]["train"]
            assert source == {"path": str(tmp_path / "d.jsonl"), **expected}
    (tmp_path / "d.jsonl").write_text('{"question": "a"}\n')
    assert "TRL reads messages, text, or prompt and completion; it has question" in refusal(tmp_path, base)


# Keys of a dataset: SFTDataset and DPODataset of axolotl, DatasetConfig of TRL, DatasetAttr of LLaMA-Factory.
OF_DATASETS = {
    "axolotl": """path split type input_transform shards shards_idx preprocess_shards conversation chat_template
        chat_template_jinja data_files input_format name ds_type field field_human field_model field_messages
        field_tools field_thinking template_thinking_key message_field_role message_field_content
        message_property_mappings message_field_training message_field_training_detail split_thinking
        logprobs_field temperature roles_to_train train_on_eos train_on_eot roles drop_system_message
        trust_remote_code revision field_chosen field_rejected skip text_column a_slip""",
    "trl": "path name data_dir data_files split columns fraction a_slip",
    "llamafactory": "hf_hub_url formatting ranking subset split folder num_samples columns tags script_url a_slip",
}


# Values of keys that are no texts.
OF_LISTS = {
    "data_files": ["x.json"], "roles_to_train": ["user"], "columns": {"messages": "x"}, "tags": {"role_tag": "x"},
    "roles": {"user": ["x"]}, "message_property_mappings": {"role": "x"},
}  # fmt: skip


def of_dataset(tmp_path: Path, source: str, more: dict[str, Any]) -> tuple[Any, ...]:
    """What is said of one dataset of the hub with these keys."""
    config = yaml.safe_load(LEAST[source]) | {"dataset_name": None, "dataset_dir": str(tmp_path / "list")}
    about = {"axolotl": {"path": "a/b", "name": "x", "type": "chat_template"}, "trl": {"path": "a/b", "name": "x"}}
    if source == "llamafactory":
        (tmp_path / "list").mkdir(exist_ok=True)
        info = {"d": {"hf_hub_url": "a/b", "subset": "x", "split": "x", **more}}
        (tmp_path / "list/dataset_info.json").write_text(json.dumps(info))
    else:
        config["datasets"] = [about[source] | more]
    known = schema(source, "sft").becomes
    return said_of(converted(tmp_path, {key: each for key, each in config.items() if key in known}))


def test_every_key_of_a_dataset(tmp_path: Path, subtests: pytest.Subtests) -> None:
    """Another value of it changes the run file, or is said, or is refused."""
    for source, keys in OF_DATASETS.items():
        before = of_dataset(tmp_path, source, {})
        for key in keys.split():
            if (source, key) != ("trl", "columns"):  # they choose columns, and rename none
                with subtests.test(source=source, key=key), suppress(UserError):
                    assert of_dataset(tmp_path, source, {key: OF_LISTS.get(key, "other")}) != before


def test_datasets_that_are_not_kept_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for more, says in [
        ("{path: d.jsonl, type: alpaca}", "datasets[0].type: alpaca writes texts of its own"),
        ("{path: d.jsonl, type: {field_output: x}}", "datasets[0].type: this type writes texts of its own"),
        ("{path: a/b, type: chat_template, data_files: [x.json]}", "datasets[0].data_files: name the files"),
        ("{path: a/b, type: chat_template, split: 'train[:5%]'}", "datasets[0].split: train[:5%] is a part"),
        ("{path: s3://x, type: chat_template}", "datasets[0].path: download it"),
        ("{path: d.jsonl, type: chat_template, train_on_eos: all}", "datasets[0].train_on_eos"),
        ("{path: d.jsonl, type: chat_template, roles_to_train: [user]}", "datasets[0].roles_to_train"),
        ("{path: d.jsonl, type: chat_template, message_field_training: train}", "datasets[0].message_field_training"),
        ("{path: d.jsonl, type: chat_template, message_property_mappings: {role: who}}", "message_property_mappings"),
        ("{path: d.jsonl, type: chat_template, roles: {assistant: [bot]}}", "datasets[0].roles"),
        ("{path: d.jsonl, type: chat_template, shards: 4}", "datasets[0].shards"),
    ]:
        with subtests.test(more):
            assert says in refusal(tmp_path, f"base_model: a/b\nlearning_rate: 1e-5\ndatasets: [{more}]\n")


# ---- rates, lengths and batches --------------------------------------------------------------------------------------


SCHEDULES: list[tuple[str, dict[str, float]]] = [
    ("linear", {}), ("cosine", {}), ("constant_with_warmup", {}), ("cosine_with_min_lr", {"min_lr": 2e-4}),
    ("polynomial", {"lr_end": 1e-4}),
]  # fmt: skip


def test_schedules(tmp_path: Path, subtests: pytest.Subtests) -> None:
    base = LEAST["trl"] + "learning_rate: 1.0e-3\n"
    for more, expected in [
        ("lr_scheduler_type: linear", ("linear", 0.0, 0)),
        ("lr_scheduler_type: cosine\nwarmup_steps: 7", ("cosine", 0.0, 7)),
        ("lr_scheduler_type: cosine\nwarmup_steps: 0.25", ("cosine", 0.0, 0.25)),
        ("lr_scheduler_type: constant\nwarmup_ratio: 0.1", ("constant", 1.0, 0)),  # transformers leaves it out
        ("lr_scheduler_type: constant_with_warmup\nwarmup_ratio: 0.1", ("constant", 1.0, 0.1)),
        ("lr_scheduler_type: cosine_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.2}", ("cosine", 0.2, 0)),
        ("lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {lr_end: 1.0e-4}", ("linear", 0.1, 0)),
        ("lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 0.5}", ("cosine", 0.0, 0)),
    ]:
        with subtests.test(more):
            scheduler = RunConfig.model_validate(converted(tmp_path, base + more).tree).scheduler
            assert (scheduler.name, scheduler.min_lr_ratio, scheduler.warmup_steps) == pytest.approx(expected)
    for more in [
        "lr_scheduler_type: cosine\nlr_scheduler_kwargs: {num_cycles: 1}", "lr_scheduler_type: inverse_sqrt",
        "lr_scheduler_type: polynomial\nlr_scheduler_kwargs: {power: 2}", "lr_scheduler_type: cosine_with_restarts",
        "lr_scheduler_type: cosine_warmup_with_min_lr\nlr_scheduler_kwargs: {min_lr_rate: 0.2}",
        "lr_scheduler_type: warmup_stable_decay\nlr_scheduler_kwargs: {num_decay_steps: 2}",
    ]:  # fmt: skip
        with subtests.test(more):
            assert "has other rates: fivefold docs explain/learning_rate" in refusal(tmp_path, base + more)


def test_a_converted_run_has_the_rates_of_transformers(tmp_path: Path, subtests: pytest.Subtests) -> None:
    for total, (name, more), warmup in product((1, 12), SCHEDULES, (0, 3)):
        with subtests.test(total=total, name=name, warmup=warmup):
            config = {**yaml.safe_load(LEAST["trl"]), "lr_scheduler_type": name, "lr_scheduler_kwargs": more or None}
            config |= {"learning_rate": 1e-3, "max_steps": total, "warmup_steps": warmup}
            run = RunConfig.model_validate(converted(tmp_path, config).tree)
            optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1e-3)
            scheduler = get_scheduler(name, optimizer, warmup, total, scheduler_specific_kwargs=more)
            for step in range(total):
                rate = learning_rate(
                    step, name=run.scheduler.name, peak=run.optimizer.learning_rate, total_steps=total,
                    warmup_steps=int(run.scheduler.warmup_steps), min_lr_ratio=run.scheduler.min_lr_ratio,
                )  # fmt: skip
                assert rate > 0 and (step < warmup or rate == pytest.approx(scheduler.get_last_lr()[0], rel=1e-12))
                optimizer.step()
                if step + 1 < total:
                    scheduler.step()


def test_warm_up_of_axolotl(tmp_path: Path) -> None:
    """Rounded down, and 3 % of at most 100 steps where nothing is said; a warm-up of one step is made two."""
    steps = {
        "max_steps: 50": 1 + 1,
        "max_steps: 5000": 100,
        "max_steps: 55\nwarmup_ratio: 0.1": 5,
        "warmup_steps: 1": 2,
    }
    for more, expected in steps.items():
        assert converted(tmp_path, LEAST["axolotl"] + more).tree["scheduler"]["warmup_steps"] == expected
    found = converted(tmp_path, LEAST["axolotl"])
    assert found.tree["scheduler"]["warmup_steps"] == "3%" and "at most 100" in found.changed["scheduler.warmup_steps"]


def test_what_is_asked_beside_is_kept_or_refused(tmp_path: Path) -> None:
    axolotl, trl = LEAST["axolotl"] + "sequence_len: 64\n", LEAST["trl"]
    assert "special_tokens: tokens are those of the folder" in refusal(
        tmp_path, axolotl + "special_tokens: {eos_token: X}"
    )
    converted(tmp_path, axolotl + "special_tokens: {pad_token: X}")
    assert "train+test is a part of a split" in refusal(tmp_path, trl + "dataset_train_split: train+test\n")
    assert "fp16" in converted(tmp_path, trl + "fp16: true\n").changed["precision.compute"]
    assert converted(tmp_path, trl + "eval_strategy: false\n").tree["data"]["validation"] == 0
    dpo = axolotl.replace("chat_template", "chat_template.default") + "rl: dpo\ntrl: {beta: 0.1, use_vllm: true}\n"
    assert "trl: of it, beta alone has a counterpart" in refusal(tmp_path, dpo)
    assert converted(tmp_path, dpo.replace("0.1, use_vllm: true", "0.3")).keys["objective.beta"] == 0.3
    experts = axolotl + "max_steps: 9\nmicro_batch_size: 1\ngradient_accumulation_steps: 1\nexpert_parallel_size: 2\n"
    assert converted(tmp_path, experts, devices=4).keys["train.global_batch_size"] == 4  # ranks of ep have other rows


def test_what_is_null_is_not_the_default(tmp_path: Path) -> None:
    assert "max_length: rows have a length" in refusal(tmp_path, LEAST["trl"] + "max_length: null")
    assert converted(tmp_path, LEAST["trl"]).tree["data"]["seq_length"] == 1024


def test_packing(tmp_path: Path, subtests: pytest.Subtests) -> None:
    sft = LEAST["llamafactory"]
    for text, packs, is_changed in [
        (sft, False, False), (sft + "packing: true", True, True), (sft + "neat_packing: true", True, False),
        (sft.replace("sft", "pt"), True, True), (sft.replace("sft", "pt") + "packing: false", False, False),
        (LEAST["trl"] + "packing: true", True, False),
        (LEAST["trl"] + "packing: true\npacking_strategy: wrapped", True, True),
        (LEAST["axolotl"] + "sample_packing: true", True, False),
    ]:  # fmt: skip
        with subtests.test(text):
            found = converted(tmp_path, text)
            assert found.tree["data"]["packing"] is packs and ("data.packing" in found.changed) is is_changed


def test_a_key_that_no_schema_has_is_refused(tmp_path: Path) -> None:
    for text in LEAST.values():
        assert "sample_pakcing: it is no key of" in refusal(tmp_path, text + "sample_pakcing: true")


def test_keys_that_are_false_where_true_is_the_default(tmp_path: Path) -> None:
    assert "shuffle_merged_datasets: rows are read" in refusal(
        tmp_path, LEAST["axolotl"] + "shuffle_merged_datasets: false"
    )
    assert "enable_thinking: the template" in refusal(tmp_path, LEAST["llamafactory"] + "enable_thinking: false")
    assert "memory" not in converted(tmp_path, LEAST["trl"] + "gradient_checkpointing: false").tree


# ---- what cannot be read ---------------------------------------------------------------------------------------------


def test_no_text_of_the_other_file_ends_a_comment(tmp_path: Path) -> None:
    odd = {
        "base_model": "a/b",
        "learning_rate": 1e-5,
        "wandb_name": "x",
        "x\nrun": None,
        "chat_template": "x\u2028model:\x85",
    }
    config, printed = loaded(tmp_path, yaml.safe_dump({**odd, "datasets": [{"path": "d\u2028", "type": "completion"}]}))
    assert all(line.startswith("#") for line in printed.split("model:\n  name_or_path")[0].splitlines()[:-1])
    assert config.run.name != "evil" and config.data.train[0].path == "d\u2028"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("model: {name_or_path: demo}", "no config of axolotl, LLaMA-Factory, TRL"),
        ("[1, 2]", "not a run file"),
        ("base_model: a/b\nlearning_rate: 1e-5\nmicro_batch_size: many", "what it says of the batch cannot be read"),
        ("base_model: a/b\ndatasets: [4]", "what it says of the data cannot be read"),
        ("base_model: a/b\nlearning_rate: 1e-5\nmax_grad_norm: -1", "optimizer.max_grad_norm would be -1: "),
        ("base_model: a/b\n", "learning_rate: it is not said"),
    ],
)
def test_what_cannot_be_converted(tmp_path: Path, text: str, says: str) -> None:
    assert says in refusal(tmp_path, text)


# ---- noise -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trainer", ["trl", "axolotl", "llamafactory"])
def test_noise_on_embeddings(tmp_path: Path, trainer: str) -> None:
    found = converted(tmp_path, LEAST[trainer] + "neftune_noise_alpha: 5\n")
    assert found.tree["train"]["neftune_noise_alpha"] == 5 and "train.neftune_noise_alpha" in found.changed
    assert "neftune_noise_alpha" not in converted(tmp_path, LEAST[trainer]).tree.get("train", {})


def test_noise_on_embeddings_of_pairs_is_refused(tmp_path: Path) -> None:
    pairs = "rl: ipo\nrl_beta: 0.2\nneftune_noise_alpha: 5\n"
    assert "noise is added for texts and examples alone" in refusal(
        tmp_path, "base_model: a/b\nlearning_rate: 5e-7\n" + pairs
    )


# ---- preferences -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "objective", "source"),
    [
        (
            "base_model: a/b\nrl: ipo\nrl_beta: 0.2\nsequence_len: 512\nlearning_rate: 5e-7\n"
            "datasets: [{path: d.jsonl, type: chat_template.default, field_messages: talk, field_chosen: good}]\n",
            {"name": "ipo", "beta": 0.2},
            {"path": "d.jsonl", "format": "preference",
             "columns": {"prompt": "talk", "chosen": "good", "rejected": "rejected"}},
        ),
        (
            "model_name_or_path: a/b\nstage: dpo\nfinetuning_type: full\ncutoff_len: 512\npref_beta: 0.3\n"
            "pref_loss: simpo\nsimpo_gamma: 1.5\ndataset: ranked\ndataset_dir: .\n",
            {"name": "simpo", "beta": 0.3, "gamma": 1.5},
            {"format": "preference", "columns": {"prompt": "talk", "chosen": "good", "rejected": "bad"}},
        ),
        (
            "model_name_or_path: a/b\ndataset_name: d.jsonl\nmax_length: 512\nloss_type: [sigmoid]\n",
            {"name": "dpo", "beta": 0.1},
            {"path": "d.jsonl", "format": "preference"},
        ),
        (
            "model_name_or_path: a/b\nstage: kto\nfinetuning_type: full\ncutoff_len: 512\npref_beta: 0.3\n"
            "kto_chosen_weight: 2.0\ndataset: rated\ndataset_dir: .\n",
            {"name": "kto", "beta": 0.3, "desirable_weight": 2.0, "undesirable_weight": 1.0},
            {"format": "chat", "columns": {"messages": "talk", "label": "good"}},
        ),
        (
            "model_name_or_path: a/b\ndataset_name: d.jsonl\nmax_length: 512\nloss_type: kto\n",
            {"name": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
            {"path": "d.jsonl"},
        ),
    ],
    ids=["axolotl", "LLaMA-Factory", "TRL", "LLaMA-Factory kto", "TRL kto"],
)  # fmt: skip
def test_preference_configs(tmp_path: Path, text: str, objective: dict[str, Any], source: dict[str, Any]) -> None:
    found = converted(tmp_path, text)
    assert found.tree["objective"] == objective
    (own,) = found.tree["data"]["train"]
    assert {"path": own["path"], **source} == own
    assert found.tree["data"]["seq_length"] == 1024  # two sequences of 512
    rates = {"axolotl": 5e-7, "LLaMA-Factory": 5e-5, "TRL": 1e-6}
    assert float(found.tree["optimizer"]["learning_rate"]) == rates[found.trainer]
    assert RunConfig.model_validate(found.tree).objective.name == objective["name"]


def test_objectives_that_are_not_kept_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    pairs = "datasets: [{path: d.jsonl, type: chat_template}]\nlearning_rate: 1e-6\n"
    for text, says in [
        (f"base_model: a/b\nrl: grpo\n{pairs}", "rl: grpo is not converted"),
        (f"base_model: a/b\nrl: orpo\n{pairs}", "rl: orpo is not converted"),
        (f"base_model: a/b\nrl: dpo\ndpo_loss_type: [hinge]\n{pairs}", "dpo_loss_type: hinge is not converted"),
        (LEAST["trl"] + "beta: 0.1", "beta is a key of several objectives"),  # of ORPO and GRPO as well
        (LEAST["trl"] + "beta: 0.04\nnum_generations: 8", "beta is a key of several objectives"),
        (LEAST["trl"] + "num_generations: 8", "num_generations: it is no key of trl 1.16.0"),
        (LEAST["trl"] + "loss_type: dft", "loss_type: dft is not converted"),
        (LEAST["trl"] + "loss_type: nll\nbeta: 0.2", "beta: another objective of TRL has it"),
        (LEAST["trl"] + "loss_type: [sigmoid, sft]\nloss_weights: [1, 1]", "sigmoid and sft is not converted"),
        (LEAST["trl"] + "loss_type: apo_zero_unpaired", "loss_type: apo_zero_unpaired is not converted"),
        (LEAST["trl"] + "desirable_weight: 1.5\nloss_type: apo_zero_unpaired", "apo_zero_unpaired is not converted"),
        (LEAST["trl"] + "teacher_model_name_or_path: big/one\nlmbda: 0.5", "teacher_model_name_or_path: it is no key"),
        (LEAST["llamafactory"].replace("sft", "rm"), "stage: rm is not converted"),
        (LEAST["llamafactory"].replace("sft", "dpo") + "pref_loss: hinge", "pref_loss: hinge is not converted"),
        (LEAST["llamafactory"] + "use_dft_loss: true", "use_dft_loss: this objective or loss is not built"),
    ]:
        with subtests.test(text):
            assert says in refusal(tmp_path, text)


# ---- adapters --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "section", "changed"),
    [
        (
            LEAST["axolotl"] + "adapter: lora\nlora_r: 32\nlora_alpha: 16\nlora_target_linear: true\n"
            "peft_use_rslora: true\n",
            {"name": "lora", "rank": 32, "alpha": 16, "targets": "auto", "rslora": True}, {"targets"},
        ),
        (
            "model_name_or_path: a/b\nstage: sft\nlora_target: q_proj,v_proj\nlora_dropout: 0.1\n"
            "dataset: d\ndataset_dir: .\n",
            {"name": "lora", "rank": 8, "alpha": 16, "targets": ["q_proj", "v_proj"], "dropout": 0.1}, set(),
        ),
        (
            LEAST["trl"] + "use_peft: true\nlora_target_modules: [k_proj]\nlora_target_parameters: [down_proj]\n",
            {"name": "lora", "rank": 16, "alpha": 32, "targets": ["k_proj"], "target_parameters": ["down_proj"],
             "dropout": 0}, {"dropout"},  # 0.05 unsaid, which peft refuses
        ),
        (
            LEAST["axolotl"] + "adapter: qlora\nload_in_4bit: true\nlora_r: 8\nlora_alpha: 16\n"
            "lora_target_linear: true\n",
            {"name": "lora", "rank": 8, "alpha": 16, "targets": "auto", "quantize": "nf4"}, {"targets"},
        ),
        (
            LEAST["llamafactory"].replace("full", "lora") + "quantization_bit: 8\n",
            {"name": "lora", "rank": 8, "alpha": 16, "targets": "auto", "quantize": "none"}, {"targets", "quantize"},
        ),
    ],
    ids=["axolotl", "LLaMA-Factory", "TRL", "qlora", "8 bits"],
)  # fmt: skip
def test_adapters(tmp_path: Path, text: str, section: dict[str, Any], changed: set[str]) -> None:
    found = converted(tmp_path, text)
    assert found.tree["adapter"] == section
    assert {key.removeprefix("adapter.") for key in found.changed if key.startswith("adapter.")} == changed
    lora = RunConfig.model_validate(found.tree).adapter.lora
    assert lora is not None and lora.rank == section["rank"]


def test_adapters_that_are_not_kept_are_refused(tmp_path: Path, subtests: pytest.Subtests) -> None:
    lora = LEAST["axolotl"] + "adapter: lora\nlora_r: 8\nlora_alpha: 16\n"
    for text, says in [
        (lora, "lora_target_modules: it is not said, and peft chooses"),
        (lora + "lora_target_modules: 'layers.[0-9]+.mlp'", "lora_target_modules: name linears by the ends"),
        (lora + "lora_target_linear: true\nlora_modules_to_save: [lm_head]", "lora_modules_to_save: of adapters"),
        (LEAST["axolotl"] + "adapter: llama-adapter", "adapter: llama-adapter is not built"),
        (LEAST["axolotl"] + "adapter: lora\nlora_target_linear: true", "lora_r: it is not said"),
        (LEAST["axolotl"] + "load_in_4bit: true", "adapter: quantised weights are trained beside an adapter alone"),
        (
            LEAST["llamafactory"].replace("full", "lora") + "quantization_bit: 4\nquantization_method: hqq",
            "nf4 is built",
        ),
        (LEAST["llamafactory"].replace("full", "freeze"), "finetuning_type: freeze is not built"),
        (LEAST["llamafactory"].replace("full", "lora") + "use_dora: true", "use_dora: of adapters"),
        (LEAST["trl"] + "use_peft: true", "lora_target_modules: it is not said"),
    ]:
        with subtests.test(text):
            assert says in refusal(tmp_path, text)


# ---- what is trained -------------------------------------------------------------------------------------------------

SAID = [{"role": "system", "content": "S"}, {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
ASKED = {"ask": "Q", "say": "A", "told": "S", "left": "L"}
INPUT = {"instruction": "Q", "input": "I", "output": "A", "system": "S", "history": [["q", "a"]]}


@pytest.mark.full
@pytest.mark.parametrize(
    ("file", "text", "rows"),
    [
        ({"d.json": [{"messages": SAID}]}, LEAST["axolotl"].replace("d.jsonl", "d.json"), "{S}{U}<A>[[A</>\n</s>]]"),
        (
            {"d.json": [{"messages": SAID}]}, LEAST["trl"].replace("c/d", "d.json"),
            "<[[|im_start|>system\nS</>\n{U}<A>A</>\n</s>]]",
        ),
        ({"d.json": [{"prompt": "Q", "completion": "A"}]}, LEAST["trl"].replace("c/d", "d.json"), "Q[[A</s>]]"),
        ({"asked.json": [ASKED]}, LEAST["llamafactory"].replace(": d\n", ": asked\n"), "{S}{U}<A>[[A</>\n</s>]]"),
        ({"input.json": [INPUT]}, LEAST["llamafactory"].replace(": d\n", ": input\n"),
         "{S}<|im_start|>user\nq</>\n<A>[[a</>]]\n<|im_start|>user\nQ\nI</>\n<A>[[A</>\n</s>]]"),
    ],
    ids=["axolotl", "TRL", "TRL, prompt and completion", "LLaMA-Factory", "LLaMA-Factory, input and history"],
)  # fmt: skip
def test_what_a_converted_run_trains(tmp_path: Path, file: dict[str, Any], text: str, rows: str) -> None:
    """By `fivefold data`, with ChatML and the tokenizer of bytes: trained tokens stand in brackets."""
    for name, records in file.items():
        (tmp_path / name).write_text(json.dumps(records))
    (tmp_path / "run.yaml").write_text(str(converted(tmp_path, text.replace("a/b", "demo"))))
    said = fivefold(["data", "run.yaml", "--rows", "1", "tokenizer.name_or_path=byte"], tmp_path)
    for short, long in {"{S}": "<|im_start|>system\nS</>\n", "{U}": "<|im_start|>user\nQ</>\n"}.items():
        rows = rows.replace(short, long)
    rows = rows.replace("<A>", "<|im_start|>assistant\n").replace("</>", "<|im_end|>").replace("</s>", "<|endoftext|>")
    assert said.rstrip().endswith(f" trained\n{rows}")
