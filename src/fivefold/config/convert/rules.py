"""What the keys of other trainers are called in a run file, but for data: a function for each group of keys."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.config.convert.given import Given
from fivefold.config.peers import answer

_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw_torch": {}, "adamw_torch_fused": {}, "adamw_hf": {}, "adamw_apex_fused": {}, "adamw_anyprecision": {},
    "adamw_bnb_8bit": {"optimizer.state_dtype": "8bit"}, "adamw_8bit": {"optimizer.state_dtype": "8bit"},
    "adamw_torch_8bit": {"optimizer.state_dtype": "8bit"},
    "paged_adamw_8bit": {"optimizer.state_dtype": "8bit", "memory.offload_optimizer": True},
    "paged_adamw_32bit": {"memory.offload_optimizer": True}, "paged_adamw": {"memory.offload_optimizer": True},
    "muon": {"optimizer.name": "muon"},
}  # fmt: skip
_SCHEDULES = {
    "linear": ("linear", 0.0), "cosine": ("cosine", 0.0), "constant": ("constant", 1.0),
    "constant_with_warmup": ("constant", 1.0), "cosine_with_min_lr": ("cosine", 0.1), "warmup_stable_decay": ("wsd", 0),
}  # fmt: skip

# The `loss_type` of TRL's DPOConfig and CPOConfig, the `pref_loss` of LLaMA-Factory -> the objective.
_LOSSES = {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"}

Keys = Iterator[tuple[str, Any]]


def model(given: Given) -> Keys:
    if given("finetuning_type") not in (None, "full", "lora"):
        given.leave("finetuning_type", str(answer("finetuning_type")))
    if given("stage") not in (None, "sft", "pt", "dpo", "kto"):
        given.leave("stage", "supervised and preference training are built, and no other stage")
    yield "model.name_or_path", given("model_name_or_path")
    if tokenizer := given("tokenizer_name"):
        yield "tokenizer.name_or_path", tokenizer


def objective(given: Given) -> Keys:
    """Preference training: `rl` of axolotl, `stage: dpo` of LLaMA-Factory, the `loss_type` of TRL's DPOConfig."""
    if teacher := given("teacher_model_name_or_path"):
        yield from _distillation(given, teacher)
        return
    asked, kind = given("rl"), given("loss_type", "sigmoid")
    if given("stage") == "kto" or {"desirable_weight", "undesirable_weight"} & given.names:
        asked = "kto"
    is_dpo = given("stage") == "dpo" or (given.trainer == "TRL" and {"loss_type", "beta", "ref_model"} & given.names)
    name = asked or (_LOSSES.get(str(kind), str(kind)) if is_dpo else None)
    if name is None:
        return
    if name not in _LOSSES.values():
        why = f"{name} is not built; dpo is what it becomes: see docs/preferences.md"
        given.leave("rl" if asked else "loss_type", why)
        name = "dpo"
    yield "objective.name", name
    yield "objective.beta", given("orpo_alpha" if name == "orpo" and "orpo_alpha" in given else "beta", 0.1)
    if name == "simpo":
        yield "objective.gamma", given("simpo_gamma", 0.5)
    for weight in ("desirable_weight", "undesirable_weight"):
        if name == "kto" and weight in given:
            yield f"objective.{weight}", given(weight)
    if (other := given("ref_model")) and name in ("dpo", "ipo", "kto"):
        yield "objective.reference", other
    given.note("a row holds the two sequences of a pair: data.seq_length is twice the length that is said there")
    if not given.found.keys.get("data.packing"):
        given.note("without packing a row is one pair; data.packing: true puts several whole pairs in a row")


def _distillation(given: Given, teacher: Any) -> Keys:
    """TRL's GKDConfig."""
    yield "objective.name", "distill"
    yield "objective.teacher", teacher
    yield "objective.temperature", given("temperature", 0.9)
    yield "objective.alpha", 1.0
    given.note("the teacher is followed on the text, by its likeliest tokens and the forward divergence (beta: 0)")
    for name in ("lmbda", "beta", "seq_kd"):
        if name in given:
            given.leave(name, "a teacher that judges what the student writes is not built")


# Defaults of each trainer's own: rank and alpha.
_LORA = {"axolotl": (8, 16), "LLaMA-Factory": (8, 16), "TRL": (16, 32)}


def adapter(given: Given) -> Keys:
    """LoRA: `adapter` of axolotl, `finetuning_type` of LLaMA-Factory, `use_peft` of TRL."""
    asked = given("adapter") or given("finetuning_type") or ("lora" if given("use_peft") else None)
    if asked == "dora":
        given.leave("adapter", "dora is not built; lora is what it becomes")
    if asked not in ("lora", "qlora", "dora"):
        return
    rank, alpha = _LORA[given.trainer]
    rank = int(given("lora_r", rank))
    yield "adapter.name", "lora"
    yield "adapter.rank", rank
    yield "adapter.alpha", given("lora_alpha", 2 * rank if given.trainer == "LLaMA-Factory" else alpha)
    named, every_linear = given("lora_target_modules"), given("lora_target_linear")
    every = every_linear or named in (None, "all", "all-linear", ["all"], ["all-linear"])
    names = named.split(",") if isinstance(named, str) else named or []
    yield "adapter.targets", "auto" if every else [str(name).strip() for name in names]
    if parameters := given("lora_target_parameters"):
        yield "adapter.target_parameters", [parameters] if isinstance(parameters, str) else list(parameters)
    if given("use_rslora"):
        yield "adapter.rslora", True
    if named is None and not every_linear and given.trainer != "LLaMA-Factory":
        given.note("lora_target_modules is not said there: peft takes a few linears of each layer by the model's type")
    in_four_bits = asked == "qlora", given("load_in_4bit"), str(given("quantization_bit")) == "4"
    if any(in_four_bits):
        yield "adapter.quantize", "nf4"
    if given("lora_dropout", 0.05 if given.trainer == "TRL" else None):
        given.leave("lora_dropout", "nothing is dropped in any run")
    if given("use_dora"):
        given.leave("use_dora", "dora is not built; lora is what it becomes")
    if path := given("lora_model_dir"):
        yield "adapter.path", path


def batch(given: Given) -> Keys:
    rows, accumulation = int(given("per_device_train_batch_size")), int(given("gradient_accumulation_steps"))
    split = 1
    for axis in ("tensor", "context", "pipeline", "expert"):
        name = f"{axis}_parallel_size"
        if name in given and (degree := int(given(name))) > 1:
            yield f"layout.{axis[0]}p", degree
            split *= 1 if axis == "expert" else degree
    ranks = max(1, given.devices // split)
    given.note(f"global_batch_size is {rows} rows x {accumulation} x {ranks} data ranks: for {given.devices} devices")
    yield "train.micro_batch_size", rows
    yield "train.global_batch_size", rows * accumulation * ranks
    yield "train.seed", given("seed")


def length(given: Given) -> Keys:
    steps, epochs = given("max_steps", -1), given("num_train_epochs")
    yield ("train.max_steps", steps) if isinstance(steps, int) and steps > 0 else ("train.max_epochs", epochs)
    sequences = 2 if "objective.name" in given.found.keys else 1  # of a row
    yield "data.seq_length", sequences * int(given("max_seq_length"))


def optimizer(given: Given) -> Keys:
    name = str(given("optim", "adamw_torch"))
    if name in _OPTIMIZERS:
        yield from _OPTIMIZERS[name].items()
    else:
        given.leave("optim", f"{name} is not built; adamw is what it becomes, and muon there is")
    of_pairs = given.trainer == "TRL" and "objective.name" in given.found.keys and "learning_rate" not in given
    yield "optimizer.learning_rate", 1e-6 if of_pairs else given("learning_rate")  # the default of DPOConfig
    yield "optimizer.betas", [given("adam_beta1"), given("adam_beta2")]
    yield "optimizer.eps", given("adam_epsilon")
    yield "optimizer.weight_decay", given("weight_decay")
    yield "optimizer.max_grad_norm", given("max_grad_norm")


def schedule(given: Given) -> Keys:
    name, more = str(given("lr_scheduler_type")), given("lr_scheduler_kwargs") or {}
    ours, last = _SCHEDULES.get(name, ("cosine", 0.0))
    if name not in _SCHEDULES:
        given.leave("lr_scheduler_type", f"{name} is not built; cosine is what it becomes")
    least = given("cosine_min_lr_ratio", more.get("min_lr_rate"))
    if least is None and more.get("min_lr") is not None:
        least = float(more["min_lr"]) / float(given("learning_rate"))
    yield "scheduler.name", ours
    yield "scheduler.min_lr_ratio", last if least is None else least
    ratio, steps = given("warmup_ratio"), given("warmup_steps")
    part = ratio if ratio else steps if isinstance(steps, float) and 0 < steps < 1 else None
    yield "scheduler.warmup_steps", f"{100 * float(part):g}%" if part else steps


def precision(given: Given) -> Keys:
    if given("fp16"):
        given.leave("fp16", "fp16 is not built; bf16 needs no loss scaling")
    is_bf16 = given("bf16") not in (False, "false") or given("fp16")
    yield "precision.compute", "bf16" if is_bf16 else "fp32"
    if given("fp8"):
        yield "precision.fp8", "rowwise"
    if given("gradient_checkpointing") and not given("disable_gradient_checkpointing"):
        yield "memory.recompute", "full"
    if given("activation_offloading"):
        yield "memory.offload_activations", True


def run(given: Given) -> Keys:
    if out := given("output_dir"):
        yield "run.dir", str(Path(out).parent)
        yield "run.name", Path(out).name
    given("run_name")  # the folder's name is the run's
    if given("save_strategy", "steps") == "steps":
        yield "checkpoint.every", given("save_steps")
    elif "save_strategy" in given:
        given.leave("save_strategy", "checkpoints are written every so many steps: checkpoint.every")
    if keep := given("save_total_limit"):
        yield "checkpoint.keep", keep
    yield "log.every", given("logging_steps")
    yield "checkpoint.export_hf", True
    said = given("report_to", [])
    to = [said] if isinstance(said, str) else list(said)
    to += ["wandb"] if given("wandb_project") or given("use_wandb") else []
    known = [name for name in dict.fromkeys(to) if name in ("tensorboard", "wandb", "mlflow", "trackio")]
    if known:
        yield "log.to", ["jsonl", *known]


def evaluation(given: Given) -> Keys:
    part, is_on = given("val_size"), given("eval_strategy", "no") not in ("no", False)
    if part and float(part) >= 1:
        given.leave("val_size", f"{part} rows; write the part of the text that it is, data.validation: 1%")
        part = None
    if "data.validation" not in given.found.keys:
        yield "data.validation", part or 0
    if steps := given("eval_steps"):
        yield "eval.every", steps
    elif is_on or part:
        given.note("eval.every is not said there as steps: it is the default, 250")
