"""The keys of other trainers as keys of a run file, except those of data: one function per group of keys.

A rule yields keys of the run file with their values, followed by remarks on changed behaviour.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fivefold.convert.given import Given
from fivefold.core.objectives import OBJECTIVES

Keys = Iterator[tuple[Any, ...]]

_8BIT = {"optimizer.state_dtype": "8bit"}
_PAGED = {"memory.offload_optimizer": True}
_OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "adamw_torch": {}, "adamw_torch_fused": {}, "adamw_hf": {}, "adamw_apex_fused": {}, "adamw_bnb_8bit": _8BIT,
    "adamw_8bit": _8BIT, "adamw_torch_8bit": _8BIT, "paged_adamw_8bit": {**_8BIT, **_PAGED},
    "paged_adamw_32bit": _PAGED, "paged_adamw": _PAGED,
}  # fmt: skip

# Loss of each trainer -> objective. The formulas are the same: docs/howto/preferences.md.
_LOSSES: Mapping[str, Mapping[str, str]] = {
    "axolotl": {"sigmoid": "dpo", "ipo": "ipo"},
    "LLaMA-Factory": {"sigmoid": "dpo", "ipo": "ipo", "orpo": "orpo", "simpo": "simpo", "kto": "kto"},
    "TRL": {"nll": "sft", "chunked_nll": "sft", "sigmoid": "dpo", "ipo": "ipo", "kto": "kto"},
}
_LOGS = {"use_tensorboard": "tensorboard", "use_wandb": "wandb", "wandb_project": "wandb", "use_mlflow": "mlflow",
         "use_trackio": "trackio"}  # fmt: skip
_METRICS = {
    None: "eval/loss", "loss": "eval/loss", "rewards/accuracies": "eval/rewards/accuracies",
    "rewards/margins": "eval/rewards/margins",
}  # fmt: skip
_TRACKERS = sorted(set(_LOGS.values()))
_8_BITS = "frozen weights rest in 8 bits there"


def model(given: Given) -> Keys:
    name = given("model_name_or_path")
    yield "model.name_or_path", name
    if given("base_model_config") not in (None, name):
        given.refuse("base_model_config", "the config is that of the model's folder")
    if given("train_from_scratch"):
        yield "model.init", "random"
    if overrides := given("model_config"):
        yield "model.overrides", overrides
    if tokenizer := given("tokenizer_name"):
        yield "tokenizer.name_or_path", tokenizer
    if {key for key, token in (given("special_tokens") or {}).items() if token} - {"pad_token"}:
        given.refuse("special_tokens", "tokens are those of the folder: if these are, take them out")


def objective(given: Given) -> Keys:
    """Preference training: `rl` of axolotl, `stage` of LLaMA-Factory, `loss_type` of TRL."""
    name = _objective(given)
    if name is None:
        return
    there = "z is the mean over a micro batch of one device there, and over the global batch here"
    there += "; rows are shuffled, and are not there" if given.trainer == "TRL" else ""
    yield "objective.name", name, there if name == "kto" else ""
    more = given("trl") or {}
    if more.keys() - {"beta"}:
        given.refuse("trl", "of it, beta alone has a counterpart")
    asked = more.get("beta", given("beta"))
    yield "objective.beta", 0.1 if asked is None else asked
    if name == "simpo":
        yield "objective.gamma", given("simpo_gamma")
    if name == "kto":
        yield "objective.desirable_weight", given("desirable_weight")
        yield "objective.undesirable_weight", given("undesirable_weight")
    compares = OBJECTIVES[name].needs_reference
    if compares and (other := given("ref_model")):
        yield "objective.reference", other
    if compares and given("adapter_path"):
        given.refuse("adapter_path", "the reference would be the model with that adapter, and is the one without there")


def _objective(given: Given) -> str | None:
    """The name of an objective other than sft."""
    key = {"axolotl": "rl", "LLaMA-Factory": "stage", "TRL": "loss_type"}[given.trainer]
    asked = given(key)
    if asked in (None, False, "sft", "pt"):
        return None
    key, asked = ("loss_type", given("loss_type") or "sigmoid") if asked == "dpo" else (key, asked)
    losses = list(asked) if isinstance(asked, list | tuple) else [asked]
    name = _LOSSES[given.trainer].get(str(losses[0])) if len(losses) == 1 else None
    if name is None:
        given.refuse(key, f"{' and '.join(map(str, losses))} is not converted")
    return None if name == "sft" else name


def adapter(given: Given) -> Keys:
    """LoRA: `adapter` of axolotl, `finetuning_type` of LLaMA-Factory, `use_peft` of TRL."""
    key = next(key for key in ("adapter", "finetuning_type", "use_peft") if key in given.schema.becomes)
    asked = given(key)
    in_4_bits, in_8_bits = _bits(given)
    if asked in (None, False, "full"):
        if in_4_bits or in_8_bits:
            given.refuse(key, "quantised weights are trained beside an adapter alone")
        return
    if asked not in (True, "lora", "qlora"):
        given.refuse(key, f"{asked} is not built, but lora")
    rank, alpha = given("lora_r"), given("lora_alpha")
    if alpha is None and rank and given.trainer == "LLaMA-Factory":
        alpha = 2 * int(rank)
    path = given("adapter_path")
    for name, value in (("lora_r", rank), ("lora_alpha", alpha)):
        if value is None:
            given.refuse(name, "it is not said: write it" + (", as the adapter has it" if path else ""))
    yield "adapter.name", "lora"
    yield "adapter.rank", rank
    yield "adapter.alpha", alpha
    yield _targets(given)
    if parameters := given("lora_target_parameters"):
        yield "adapter.target_parameters", [parameters] if isinstance(parameters, str) else list(parameters)
    if given("use_rslora"):
        yield "adapter.rslora", True
    if asked == "qlora" or in_4_bits:
        yield "adapter.quantize", "nf4"
    elif in_8_bits:
        yield "adapter.quantize", "none", _8_BITS
    if dropout := given("lora_dropout"):
        if parameters:
            yield "adapter.dropout", 0, f"{dropout} there; beside experts nothing is dropped, and peft refuses it"
        else:
            yield "adapter.dropout", dropout
    if path:
        if "," in str(path):
            given.refuse("adapter_path", "name one adapter")
        yield "adapter.path", path


def _bits(given: Given) -> tuple[bool, bool]:
    """Two flags: frozen weights in 4 bits, and in 8."""
    bits = str(given("quantization_bit") or "")
    kinds = {given("quantization_type"), given("quantization_method")} if bits else set()
    if bits not in ("", "4", "8") or not kinds <= {None, "nf4", "bnb", "bitsandbytes"}:
        given.refuse("quantization_bit", "nf4 is built, and no other quantisation")
    return bool(given("load_in_4bit")) or bits == "4", bool(given("load_in_8bit")) or bits == "8"


def _targets(given: Given) -> tuple[Any, ...]:
    named, every = given("lora_target_modules"), given("all_linears")
    names = [str(name).strip() for name in (named.split(",") if isinstance(named, str) else named or ())]
    if every or names in (["all"], ["all-linear"]):
        return "adapter.targets", "auto", "routers and the linears of experts have none here"
    if not names and not given("lora_target_parameters"):
        given.refuse(
            "lora_target_modules", "it is not said, and peft chooses by the type of the model: name the linears"
        )
    if not all(re.fullmatch(r"[\w.]+", name) for name in names):
        given.refuse("lora_target_modules", "name linears by the ends of their names, not by a pattern")
    return "adapter.targets", names


def batch(given: Given) -> Keys:
    rows, accumulation = int(given("per_device_train_batch_size")), int(given("gradient_accumulation_steps"))
    split = 1
    for axis in ("tensor", "context", "expert"):
        degree = int(given(f"{axis}_parallel_size") or 1)
        if degree > 1:
            yield f"layout.{axis[0]}p", degree
            split *= 1 if axis == "expert" else degree
    ranks = max(1, given.devices // split)
    given.note(f"global_batch_size is {rows} rows x {accumulation} x {ranks} data ranks: for {given.devices} devices")
    yield "train.micro_batch_size", rows
    yield "train.global_batch_size", rows * accumulation * ranks
    yield "train.seed", 42 if given("seed") is None else given("seed")


def length(given: Given) -> Keys:
    steps, epochs = given("max_steps"), given("num_train_epochs")
    if steps and int(steps) > 0:
        yield "train.max_steps", int(steps)
    else:
        yield "train.max_epochs", epochs, "steps are whole across epochs; there the last one of an epoch may be smaller"
    tokens = given("seq_length")
    if tokens is None:
        given.refuse("seq_length", "rows have a length: write that of the longest example")
        return
    changed = ""
    if "objective.name" in given.found.keys:
        changed = "of both answers, twice the length of one; a longer pair is left out, and cut there"
        tokens = 2 * int(tokens)
    elif given.trainer == "axolotl" and given("excess_length_strategy") != "truncate":
        changed = "a longer example loses its end, and is left out there; a longer text goes on in the next row"
    elif given.trainer != "axolotl":
        changed = "of what is longer: an example loses its end, a text goes on in the next row; both are cut there"
    yield "data.seq_length", int(tokens), changed
    yield from _packing(given)


def _packing(given: Given) -> Keys:
    joined = "documents do not see each other; there they are joined, and cut into rows"
    if "objective.name" in given.found.keys:
        yield "data.packing", False
    elif given.trainer == "LLaMA-Factory":
        packing, neat = given("packing"), given("neat_packing")
        is_packed = bool(neat or (given("stage") == "pt" if packing is None else packing))
        yield "data.packing", is_packed, joined if is_packed and not neat else ""
    elif given.trainer == "axolotl":
        is_streamed = bool(given("pretraining_dataset")) and not given("packing")
        yield "data.packing", bool(given("packing")) or is_streamed, joined if is_streamed else ""
    else:
        is_packed = bool(given("packing"))
        yield "data.packing", is_packed, joined if is_packed and given("packing_strategy") == "wrapped" else ""


def optimizer(given: Given) -> Keys:
    name = str(given("optim") or "adamw_torch")
    for key, value in _OPTIMIZERS.get(name, {}).items():
        yield key, value, "blocks and codes are fivefold's: fivefold docs explain/memory" if value == "8bit" else ""
    if name not in _OPTIMIZERS:
        given.refuse("optim", f"{name} is not converted, but adamw_torch and its forms of 8 bits")
    if given("learning_rate") is None:
        given.refuse("learning_rate", "it is not said: write it")
    yield "optimizer.learning_rate", given("learning_rate")
    defaults = {"adam_beta1": 0.9, "adam_beta2": 0.999, "adam_epsilon": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
    beta1, beta2, eps, decay, norm = (unset if given(key) is None else given(key) for key, unset in defaults.items())
    yield "optimizer.betas", [beta1, beta2]
    yield "optimizer.eps", eps
    yield "optimizer.weight_decay", decay
    yield "optimizer.max_grad_norm", norm


def noise(given: Given) -> Keys:
    """NEFTune: noise on the embeddings."""
    if alpha := given("neftune_noise_alpha"):
        if "objective.name" in given.found.keys:
            given.refuse("neftune_noise_alpha", "noise is added for texts and examples alone")
        there = "its width follows from the tokens of a document; there from those of a padded row"
        yield "train.neftune_noise_alpha", alpha, there


def schedule(given: Given) -> Keys:
    name = str(given("lr_scheduler_type") or "cosine")  # axolotl allows null
    shape = _shape(given, name)
    if shape is None:
        given.refuse(
            "lr_scheduler_type", f"{name} with what is said of it has other rates: fivefold docs explain/learning_rate"
        )
        return
    yield "scheduler.name", shape[0]
    yield "scheduler.min_lr_ratio", shape[1]
    warmup, changed = (0, "") if name == "constant" else _warmup(given)
    if name == "constant" and (given("warmup_steps") or given("warmup_ratio")):
        changed = "constant has no warm-up there either; constant_with_warmup has"
    rises = "step k of the w has k/w of the rate, and (k - 1)/w there" if warmup else ""
    yield "scheduler.warmup_steps", warmup, rises, changed


def _shape(given: Given, name: str) -> tuple[str, float] | None:
    """The name and the lowest rate of the scheduler with the same rates after the warm-up."""
    more, peak, ratio = dict(given("lr_scheduler_kwargs") or {}), given("learning_rate"), given("cosine_min_lr_ratio")
    if ratio is not None and (name != "cosine" or more):
        return None
    if float(more.pop("num_cycles", 0.5)) != 0.5 or float(more.pop("power", 1)) != 1:
        return None
    if name == "polynomial":
        return ("linear", float(more.pop("lr_end", 1e-7)) / float(peak)) if not more.keys() - {"lr_end"} else None
    if name == "cosine_with_min_lr" and len(more) == 1 and more.keys() <= {"min_lr", "min_lr_rate"}:
        return "cosine", float(more["min_lr_rate"] if "min_lr_rate" in more else float(more["min_lr"]) / float(peak))
    plain = {"linear": 0.0, "cosine": float(ratio or 0.0), "constant": 1.0, "constant_with_warmup": 1.0}
    return (name.removesuffix("_with_warmup"), plain[name]) if name in plain and not more else None


def _warmup(given: Given) -> tuple[int | str, str]:
    """Steps or a part of the run, and a remark on changed behaviour."""
    steps, ratio, total = given("warmup_steps"), given("warmup_ratio"), int(given("max_steps") or -1)
    part = float(steps) if steps and 0 < float(steps) < 1 else float(ratio or 0) if not steps else 0.0
    if given.trainer != "axolotl":
        return (f"{100 * part:.10g}%" if part else int(steps or 0)), ""
    if steps is None and ratio is None:
        part = 0.03
    if total > 0 and steps is None:
        most = 100 if ratio is None else total
        steps, part = min(int(part * total), most), 0.0
    if part:
        there = ", and at most 100" if ratio is None else ""
        return f"{100 * part:.10g}%", f"rounded up, and down there{there}"
    return (2 if int(steps or 0) == 1 else int(steps or 0)), ""  # 2: as axolotl does


def precision(given: Given) -> Keys:
    names = ("bf16", "bfloat16", "pure_bf16")
    is_fp16 = bool(given("fp16") or given("float16"))
    is_bf16 = any(given(name) not in (None, False, "false") for name in names) or (
        given.trainer == "TRL" and given("bf16") is None and not is_fp16
    )
    for name in ("fp16", "float16"):
        if is_bf16 and given(name):
            given.leave(name, "bf16 is said beside it")
    there = "fp16" if is_fp16 else "the type of the model's weights" if given.trainer == "LLaMA-Factory" else ""
    changed = f"{there} there" if there and not is_bf16 else ""
    yield "precision.compute", "bf16" if is_bf16 or is_fp16 else "fp32", changed
    recomputes = given("gradient_checkpointing") or given("activation_checkpointing")
    if given.trainer == "LLaMA-Factory":
        recomputes = not given("disable_gradient_checkpointing")
        for name in ("gradient_checkpointing", "activation_checkpointing"):
            given.leave(name, "disable_gradient_checkpointing decides")
    if recomputes:
        yield "memory.recompute", "full"
    if given("activation_offloading"):
        yield "memory.offload_activations", True


def run(given: Given) -> Keys:
    if out := given("output_dir"):
        yield "run.dir", str(Path(out).parent)
        yield "run.name", Path(out).name
    strategy, every = given("save_strategy"), given("save_steps")
    if strategy in ("no", "best", False):
        yield "checkpoint.every", 0
    elif strategy in (None, "steps") and _is_count(every):
        yield "checkpoint.every", int(every)
    else:
        for name in ("save_strategy", "save_steps"):
            given.leave(name, "checkpoints are written every so many steps: checkpoint.every")
    if keep := given("save_total_limit"):
        yield "checkpoint.keep", keep
    if _is_count(given("logging_steps")):
        yield "log.every", int(given("logging_steps"))
    yield "checkpoint.export_hf", True
    said = given("report_to") or []
    to = [said] if isinstance(said, str) else list(said)
    to += [name for key, name in _LOGS.items() if given(key)]
    known = [name for name in dict.fromkeys(to) if name in _LOGS.values()]
    if others := set(to) - {*known, "none"}:
        given.leave("report_to", f"{', '.join(sorted(others))} gets nothing; log.to has {', '.join(_TRACKERS)}")
    if known:
        yield "log.to", ["jsonl", *known]


def _is_count(value: Any) -> bool:
    return value is not None and float(value) >= 1


def evaluation(given: Given) -> Keys:
    part = given("val_size") or given("test_split_size")
    if part and float(part) >= 1:
        given.refuse("val_size", f"{part} rows: write the part of the text that it is, such as 0.01")
    if "data.validation" not in given.found.keys:
        yield "data.validation", part or 0
    steps, strategy = given("eval_steps"), given("eval_strategy")
    if steps is None and strategy == "steps":
        steps = given("logging_steps")  # as TrainingArguments does
    if _is_count(steps):
        yield "eval.every", int(steps)
    elif strategy not in (None, "no", False):
        for name in ("eval_strategy", "eval_steps"):
            given.leave(name, "evaluations are made every so many steps: eval.every")


def best(given: Given) -> Keys:
    """The best checkpoint, and early stopping: of transformers' Trainer, which all of them have."""
    loads, saves, patience = (
        bool(given("load_best_model_at_end")), given("save_strategy") == "best", given("early_stopping_patience"),
    )  # fmt: skip
    keys, has = given.found.keys, loads or saves or patience
    validates = given("eval_strategy") not in (None, "no", False) or given("evals_per_epoch")
    if has and validates and keys.get("data.validation") and not keys.get("eval.every"):
        asked = {"load_best_model_at_end": loads, "save_strategy": saves, "early_stopping_patience": patience}
        for name in [name for name, is_set in asked.items() if is_set]:
            given.refuse(name, "validations are every so many steps here: write eval_strategy: steps, eval_steps: N")
        return
    if not (has and keys.get("eval.every") and keys.get("data.validation")):
        why = "no validation is made every so many steps" if has else "nothing asks for the best"
        unused = ("load_best_model_at_end", "early_stopping_patience", "early_stopping_threshold")
        for name in (*unused, "metric_for_best_model", "greater_is_better", *(["save_strategy"] if saves else [])):
            given.leave(name, why)
        return
    named, is_greater = given("metric_for_best_model"), given("greater_is_better")
    metric = _METRICS.get(named and str(named).removeprefix("eval_"))
    if metric is None:
        given.refuse("metric_for_best_model", f"{named} is not measured; eval_loss is")
    yield "eval.metric", metric
    if is_greater is not None:
        yield "eval.mode", "max" if is_greater else "min"
    if patience:
        threshold = float(given("early_stopping_threshold") or 0)
        changed = (
            "improvements of less than min_delta add up; there each is compared with the best" if threshold else ""
        )
        yield "eval.stop", {"patience": int(patience), "min_delta": threshold}, changed
    elif given("early_stopping_threshold"):
        given.leave("early_stopping_threshold", "early_stopping_patience is not set")
    limit = int(given("save_total_limit") or 0)
    if loads:
        yield "checkpoint.keep_best", 1
        yield (
            "checkpoint.export_hf",
            "best",
            "the folder hf is of the best step; the run ends with its last",
        )
        if limit:
            yield "checkpoint.keep", max(1, limit - 1)  # the best one is among them there
    elif saves:
        yield "checkpoint.keep_best", limit or 1, "" if limit else "the best one; there every one that was the best"
