"""A config of another trainer as it was written, and the run file that comes of it."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from fivefold.config.peers import answer
from fivefold.config.schema import ExactDumper

# What is done where a file says nothing. Of `transformers`: its TrainingArguments, which a test holds against this.
TRANSFORMERS: Mapping[str, Any] = {
    "learning_rate": 5e-5, "weight_decay": 0.0, "adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8,
    "max_grad_norm": 1.0, "num_train_epochs": 3.0, "lr_scheduler_type": "linear", "warmup_steps": 0,
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "seed": 42, "save_steps": 500,
    "logging_steps": 500, "bf16": False,
}  # fmt: skip
_AXOLOTL = {
    "num_train_epochs": 1, "per_device_train_batch_size": 1, "lr_scheduler_type": "cosine", "warmup_steps": "3%",
    "max_seq_length": 512, "bf16": "auto",
}  # fmt: skip
DEFAULTS: Mapping[str, Mapping[str, Any]] = {
    "axolotl": {**TRANSFORMERS, **_AXOLOTL},
    "LLaMA-Factory": {**TRANSFORMERS, "max_seq_length": 2048, "gradient_checkpointing": True},
    "TRL": {
        **TRANSFORMERS, "learning_rate": 2e-5, "logging_steps": 10, "max_seq_length": 1024, "bf16": True,
        "gradient_checkpointing": True,
    },
}  # fmt: skip

# Other names of the same thing -> the name that the rules below read.
_SAME = {
    "model_name_or_path": "base_model model_name",
    "tokenizer_name": "tokenizer_config tokenizer_name_or_path",
    "max_seq_length": "sequence_len cutoff_len max_length",
    "packing": "sample_packing neat_packing",
    "num_train_epochs": "num_epochs",
    "per_device_train_batch_size": "micro_batch_size",
    "lr_scheduler_type": "lr_scheduler",
    "optim": "optimizer",
    "eval_strategy": "evaluation_strategy",
    "val_size": "val_set_size",
    "train_on_prompt": "train_on_inputs",
    "run_name": "wandb_name",
    "beta": "pref_beta rl_beta dpo_beta",
    "loss_type": "pref_loss",
    "lora_r": "lora_rank",
    "lora_target_modules": "lora_target",
    "use_rslora": "peft_use_rslora",
    "use_dora": "peft_use_dora",
    "lora_model_dir": "adapter_name_or_path",
    "desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "ref_model": "ref_model_name_or_path base_model_ref",
    "tensor_parallel_size": "tp_size",
    "context_parallel_size": "cp_size sequence_parallel_degree sequence_parallel_size",
}
_NAMES = {other: name for name, others in _SAME.items() for other in others.split()}

# Keys that change nothing here: of speed, of caches, of screens, of code that is never run from a model folder.
_WITHOUT_EFFECT = """
    flash_attention flash_attn attn_implementation sdp_attention xformers_attention use_cache liger use_liger_kernel
    enable_liger_kernel plugins pad_to_sequence_len padding_free eval_sample_packing group_by_length
    preprocessing_num_workers dataset_num_proc dataset_processes dataset_prepared_path overwrite_cache tokenized_path
    dataloader_num_workers dataloader_pin_memory dataloader_prefetch_factor remove_unused_columns ddp_timeout
    gradient_checkpointing_kwargs ddp_find_unused_parameters logging_first_step logging_dir plot_loss tf32
    include_num_input_tokens_seen overwrite_output_dir do_train do_eval special_tokens model_type tokenizer_type
    strict local_rank save_safetensors save_only_model trust_remote_code per_device_eval_batch_size
    eval_batch_size torch_dtype dtype
"""
_TEACHER = (
    "set objective: {name: distill, teacher: FOLDER}: the teacher is asked here, its log-probabilities are not read"
)
_STEPS = "it is counted in optimizer steps: {}"
_INSTEAD = {
    "evals_per_epoch": _STEPS.format("eval.every"),
    "saves_per_epoch": _STEPS.format("checkpoint.every"),
    "max_samples": "cut the file; all of a source is read",
    "load_best_model_at_end": "the last checkpoints are kept; the log says which had the lowest loss",
    "early_stopping_patience": "a run ends when its length is reached",
    **dict.fromkeys(("kd_trainer", "kd_alpha", "kd_ce_alpha", "kd_temperature"), _TEACHER),
    "neftune_noise_alpha": "noise on embeddings is not built",
}
_BREAKS = re.compile(r"[\r\n\x0b\x0c\x1c-\x1e\x85\u2028\u2029]")  # what would end a comment


@dataclass
class Converted:
    """`keys`: of the run file, by dotted name. `left`: keys of the other file without a counterpart -> what to do
    instead. `notes`: what is done otherwise than there."""

    trainer: str
    file: str
    keys: dict[str, Any] = field(default_factory=dict)
    left: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    without_effect: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """The run file; what was left is a comment at its head."""
        head = [f"from {self.file}, of {self.trainer}", *self.notes]
        if self.left:
            alike = {why: [name for name, said in self.left.items() if said == why] for why in self.left.values()}
            head += ["not carried over:", *(f"  {', '.join(names)}: {why}" for why, names in alike.items())]
        if self.without_effect:
            head.append(f"without effect here: {', '.join(self.without_effect)}")
        comment = "".join(f"# {_BREAKS.sub(' ', line)}\n" for line in head)
        return comment + str(yaml.dump(self.tree, Dumper=ExactDumper, sort_keys=False, allow_unicode=True, width=120))

    @property
    def tree(self) -> dict[str, Any]:
        """The sections of the run file."""
        sections: dict[str, Any] = {}
        for name, value in self.keys.items():
            section, _, key = name.partition(".")
            sections.setdefault(section, {})[key] = value
        return sections


class Given:
    """The other trainer's file, with what it does where the file is silent. What has been read is not left over."""

    def __init__(self, tree: Mapping[str, Any], trainer: str, folder: Path, devices: int, found: Converted) -> None:
        self.trainer, self.folder, self.devices, self.found = trainer, folder, devices, found
        self._written = {_NAMES.get(name, name): name for name in tree}  # the name that rules read -> as it was written
        self._values = {_NAMES.get(name, name): value for name, value in tree.items()}
        self._done: set[str] = set()

    @property
    def names(self) -> set[str]:
        """The names that rules read, of all keys that are written."""
        return set(self._written)

    def __contains__(self, name: str) -> bool:
        return self._values.get(name) is not None

    def __call__(self, name: str, default: Any = None) -> Any:
        """The value of a key, or what the other trainer does without it."""
        self._done.add(name)
        value = self._values.get(name)
        return DEFAULTS[self.trainer].get(name, default) if value is None else value

    def leave(self, name: str, why: str) -> None:
        """Say why a key has no counterpart."""
        self._done.add(name)
        self.found.left[self._written.get(name, name)] = why

    def note(self, text: str) -> None:
        self.found.notes.append(text)

    def leave_the_rest(self) -> None:
        """What no rule has read: with the answer that a run file gives to such a key. What is switched off is none."""
        for name, written in self._written.items():
            if name in self._done or self._values[name] in (None, False, "", "none", [], {}):
                continue
            if written in _WITHOUT_EFFECT.split():
                self.found.without_effect.append(written)
            else:
                self.leave(name, _INSTEAD.get(written) or answer(written) or "fivefold has no counterpart")
