"""Names of run file keys in other trainers: Hugging Face `TrainingArguments`, TRL, axolotl, LLaMA-Factory, DeepSpeed,
Megatron-LM, torchtitan, litgpt; and removed keys. The error for such a name gives the exact key to write. Each feature
declares those of its keys.
"""

import re

from fivefold.parallel.layout import KEYS

# Our key -> names that mean the same. `did_you_mean` finds the same name in another section.
SAME = {
    "model.name_or_path":
        "model model_name model_path model_id model_name_or_path base_model hf_model pretrained_model_name_or_path",
    "tokenizer.name_or_path":
        "tokenizer tokenizer_name tokenizer_path tokenizer_name_or_path tokenizer_model",
    "data.train":
        "data dataset datasets dataset_name dataset_path data_path train_file train_files train_data train_dataset "
        "training_data",
    "data.validation":
        "val_data validation_file validation_dataset eval_dataset val_size val_set_size validation_split "
        "validation_split_percentage",
    "data.train.text_key": "text_field text_column dataset_text_field",
    "data.seq_length":
        "seq_len sequence_len sequence_length max_seq_length max_seq_len max_length max_sequence_length block_size "
        "context_length cutoff_len model_max_length",
    "data.packing": "sample_packing",
    "train.max_steps": "max_iters train_iters train_steps training_steps total_steps num_steps iterations",
    "train.max_tokens": "train_tokens total_tokens",
    "train.max_epochs": "num_train_epochs num_epochs epochs n_epochs",
    "train.global_batch_size": "train_batch_size total_batch_size",
    "train.micro_batch_size":
        "per_device_train_batch_size per_device_batch_size local_batch_size device_batch_size "
        "train_micro_batch_size_per_gpu mbs",
    "train.seed": "random_seed data_seed",
    "train.compile": "torch_compile",
    "train.neftune_noise_alpha": "neftune_alpha noisy_embedding_alpha",
    "optimizer.name": "optimizer optim optim_name optimizer_name optimizer_type",
    "optimizer.learning_rate": "lr max_lr base_lr peak_lr",
    "optimizer.weight_decay": "wd",
    "optimizer.eps": "adam_epsilon adam_eps epsilon",
    "optimizer.max_grad_norm":
        "max_norm clip_grad grad_clip gradient_clipping gradient_clip_val grad_clip_norm",
    "scheduler.name": "scheduler lr_scheduler lr_scheduler_type lr_decay_style lr_schedule",
    "scheduler.warmup_steps": "warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps",
    **{key.place: key.peers for key in KEYS.values() if key.peers},
    "precision.compute": "precision dtype torch_dtype mixed_precision compute_dtype",
    "objective.beta": "dpo_beta pref_beta rl_beta",
    "objective.gamma": "simpo_gamma",
    "objective.teacher": "teacher_model teacher_model_name_or_path kd_teacher",
    "objective.temperature": "kd_temperature",
    "objective.alpha": "kd_alpha",
    "objective.reference": "reference_model ref_model ref_model_name_or_path",
    "checkpoint.every":
        "save_steps save_interval save_every save_freq checkpoint_interval checkpointing_steps",
    "checkpoint.keep": "save_total_limit keep_last",
    "checkpoint.keep_best": "save_top_k keep_best_n",
    "eval.metric": "metric_for_best_model monitor",
    "eval.stop.patience": "early_stopping_patience early_stopping_steps",
    "eval.stop.min_delta": "early_stopping_threshold",
    "eval.every": "eval_steps eval_interval eval_every eval_freq val_check_interval",
    "log.every": "logging_steps log_interval log_steps log_freq log_every_n_steps",
    "log.to": "report_to logger loggers",
    "run.name": "run_name experiment_name",
}  # fmt: skip

_LORA = "set adapter: {name: lora, rank: 16, alpha: 32}, with targets: [...] or auto"
_CHAT = "the chat template is that of the tokenizer's folder, and answers alone are trained: see fivefold data"
_PREFERENCE = "set objective: {name: dpo, beta: 0.1}, or ipo, orpo, simpo; reinforcement learning is not built"
_DATA_RANKS = "data ranks = layout.dp_replicate x layout.dp_shard"

# Names with another meaning or without a counterpart -> what to write instead.
DIFFERENT = {
    "batch_size": "train.global_batch_size counts the rows of an optimizer step, train.micro_batch_size those of a "
    "forward pass",
    "gradient_accumulation_steps grad_accum_steps gradient_accumulation accumulate_grad_batches": "set "
    f"train.global_batch_size = train.micro_batch_size x accumulation x data ranks; {_DATA_RANKS}",
    "warmup_ratio warmup_fraction lr_warmup_fraction": "set scheduler.warmup_steps to a part of the run, such as 5%",
    "min_lr min_learning_rate lr_min": "set scheduler.min_lr_ratio = lowest rate / optimizer.learning_rate",
    "adam_beta1 adam_beta2 beta1 beta2": "set both as optimizer.betas: [0.9, 0.95]",
    "output_dir out_dir save_dir checkpoint_dir": "the run folder is run.dir/run.name: for out/first set run.dir: out "
    "and run.name: first",
    "resume_from_checkpoint auto_resume": "checkpoint.resume: auto, the default, goes on from the newest "
    "checkpoint in the run folder",
    "load_best_model_at_end": "set checkpoint.keep_best: 1 and checkpoint.export_hf: best",
    "greater_is_better": "set eval.mode: max or min; auto follows eval.metric",
    "early_stopping": "set eval.stop.patience to a number of validations",
    "bf16": "set precision.compute: bf16, which is the default",
    "fp16": "fp16 is not built; precision.compute: bf16 needs no loss scaling",
    "fp32 tf32": "set precision.compute: fp32",
    "deepspeed deepspeed_config ds_config": "DeepSpeed is not used: its stage is layout.zero, its "
    "offload is memory.offload_optimizer",
    "parallelism parallel": "set the degrees under layout, or write a text: layout: shard2.tp2",
    "attn_implementation flash_attention use_flash_attention": "leave it out: the attention of fivefold is always used",
    "trust_remote_code": "leave it out: no code from a model folder is ever run",
    "push_to_hub hub_model_id hub_private_repo": "leave it out: fivefold export RUN OUT --push org/name uploads",
    "lora lora_r lora_rank lora_alpha lora_dropout lora_target_modules lora_target_parameters use_lora "
    "qlora peft peft_config use_peft finetuning_type": _LORA,
    "load_in_4bit quantization quantization_config quantization_bit bnb_config": "set adapter: {name: lora, quantize: "
    "nf4}, which is QLoRA",
    "load_in_8bit": "frozen weights rest in 16 bits, or in four: adapter.quantize: nf4",
    "chat_template template assistant_only_loss completion_only_loss sft": _CHAT,
    "train_on_inputs": "data.train: [{path: ..., train_on: all}] trains what is asked too",
    "dpo rl rlhf grpo": _PREFERENCE,
    **{names: answer for key in KEYS.values() for names, answer in key.answers.items()},
}

# Removed keys of `memory` -> the default, which run files of earlier runs have, and what to write instead.
REMOVED = {
    "mlp_chunks": (1, "leave it out: memory.recompute: full keeps less of long rows, and layout.cp shares them out"),
    "offload_to": ("host", "leave it out: what is offloaded lies in host memory"),
}

# Sections of other trainers with one answer for all their keys: `lora.r`, `peft.method`.
_WHOLE = (
    "lora", "qlora", "peft", "peft_config", "quantization", "quantization_config", "dpo", "deepspeed", "fsdp_config",
)  # fmt: skip

_ANSWERS = {
    **{name: f"write {key}" for key, names in SAME.items() for name in names.split()},
    **{name: answer for names, answer in DIFFERENT.items() for name in names.split()},
    **{name: answer for name, (_, answer) in REMOVED.items()},
}


def answer(written: str) -> str | None:
    """The advice for the unknown key `written` (`optimizer.lr`, `lora.r`); None for a name in no table."""
    parts = [part.replace("-", "_").lower() for part in re.split(r"[.\[\]]+", written) if part]
    if not parts:
        return None
    return _ANSWERS[parts[0]] if parts[0] in _WHOLE else _ANSWERS.get(parts[-1])
