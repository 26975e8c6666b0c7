"""The run folder, `runs/NAME`: its files, metrics and steps, and suggestions for a missing name. No torch.

A row of `metrics.jsonl` has `step` and a name a number; groups stand in front of a slash. Trackers and reports take the
same names.
"""

import re
from collections.abc import Iterable
from pathlib import Path

RUN_FILES = {
    "run.yaml": "the resolved run file: every key with its value; `fivefold train runs/NAME` reads it",
    "metrics.jsonl": "a row for each logged step, one JSON object a line",
    "samples.jsonl": "a line for each sample: step, prompt, text, and messages of a conversation; only with "
    "sample.prompts, messages or file",
    "history.jsonl": "a line for each start, its end, and events between: versions, machine, layout, data, schedule",
    "spread.json": "which rank holds what, what a step sends, when the slots of a pipeline ran; for fivefold report",
    "checkpoints/step-NNNNNN/": "a checkpoint; the newest checkpoint.keep are kept, and the best checkpoint.keep_best",
    "checkpoints/step-NNNNNN/manifest.json": "how every tensor is cut, and the size and checksum of each file",
    "checkpoints/step-NNNNNN/weight-RRRRR.safetensors": "slices of the weights that rank R wrote",
    "checkpoints/step-NNNNNN/optimizer-RRRRR.safetensors": "slices of the optimizer state that rank R wrote",
    "checkpoints/step-NNNNNN/run.yaml": "the resolved run file of that step",
    "checkpoints/step-NNNNNN/model/": "config, tokenizer, processors, licence: a Hugging Face folder without weights",
    "logs/rank-N.log": "output of rank N in the newest start; that of rank 0 goes to the terminal",
    "logs/failure-N.json": "why rank N ended: error, stacks, last collective; only after a failure",
    "logs/request.json": "what the launcher asked the workers to do",
    "hf/": "a Hugging Face folder of the last step, or of the best; only with checkpoint.export_hf",
    "tensorboard/": "events of TensorBoard; only with log.to: [tensorboard]",
    "report.html": "the page of fivefold report",
    "NAME.damaged": "lines of a .jsonl file that were damaged, set aside",
    "logs/round-N/": "logs and failures of one round of nodes; only with train.nodes",
    ".round-N/, checkpoints/.round-N/": "what the last round of nodes is about to write; only with train.nodes",
    ".nodes/": "where the nodes of a run meet; only with train.nodes",
    ".lock": "held by the run that writes to the folder; the system drops it when its owner ends",
}


_STEP_FOLDER = re.compile(r"step-(\d{6,})")


def step_folder(step: int) -> str:
    """The folder name of a step: `step-000250`."""
    return f"step-{step:06d}"


def steps_of(names: Iterable[str]) -> list[int]:
    """The steps among these folder names, ascending."""
    return sorted(int(match[1]) for match in map(_STEP_FOLDER.fullmatch, names) if match)


def steps(directory: Path) -> list[int]:
    """Steps with an entry in `directory` (`runs/NAME/checkpoints`), ascending, complete or not. An entry may be a link,
    even to a disk that is not mounted: reading its manifest then raises `UserError`."""
    return steps_of(path.name for path in directory.iterdir()) if directory.is_dir() else []


_SHOWN = 6


def run_files(folder: Path) -> str:
    """`run files here: a.yaml, b.yaml` for the YAML files in `folder`; empty when there are none."""
    return _listed(f"run files {_where(folder)}", [path.name for path in _inside(folder) if _is_yaml(path)])


def runs(folder: Path) -> str:
    """`runs in runs: demo, notes` for the run folders in `folder`; empty when there are none."""
    return _listed(f"runs {_where(folder)}", [path.name for path in _inside(folder) if is_run(path)])


def is_run(folder: Path) -> bool:
    return (folder / "run.yaml").is_file()


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _where(folder: Path) -> str:
    return "here" if folder == Path() else f"in {folder}"


def _listed(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(names[:_SHOWN])}{more}" if names else ""


METRICS = {
    "step": "count; optimizer steps done, skipped ones included",
    "kl": "nats; baseline of kto: how much likelier answers to other prompts became, at least 0",
    "train/loss": "nats per target; cross entropy summed over all targets of the global batch, divided by their "
    "number; under a preference objective, the mean of that objective",
    "train/grad_norm": "number; norm of the whole gradient, before clipping",
    "train/learning_rate": "number; rate of this step",
    "train/tokens_seen": "count; input tokens since the run began, without padding",
    "train/skipped_steps": "count; steps since the run began whose loss or gradient was not finite",
    "perf/tokens_per_second": "tokens/s; input tokens of this step, over all devices",
    "perf/tokens_per_second_per_device": "tokens/s; the same, divided by the number of devices",
    "perf/tflops_per_device": "TFLOP/s; model FLOPs of this step, with causal attention halved and no recompute",
    "perf/mfu_pct": "%; these FLOPs against the peak of the device; null if the peak is unknown",
    "perf/matmul_pct": "%; these FLOPs against the large matmuls that fivefold calibrate measured; CPUs with "
    "layout.hardware alone",
    "perf/step_seconds": "s; wall clock of this step",
    "perf/data_wait_pct": "%; part of the step that waited for rows",
    "perf/elapsed_seconds": "s; time since the run began, summed over its starts",
    "memory/peak_gib": "GiB; allocated at the peak since this start, the largest of all ranks; on a CPU resident "
    "memory, less that before the model was built",
    "memory/peak_reserved_gib": "GiB; reserved by the caching allocator at the peak, the largest of all ranks; "
    "GPUs alone",
    "eval/loss": "nats per target; loss on the held-out rows, at steps with an evaluation",
    "eval/best": "unit of eval.metric; the best value of it at any evaluation so far",
    "eval/best_step": "count; the step of that evaluation, of equal ones the first",
    "eval/kl": "nats; kl on the held-out rows",
    "moe/aux_loss": "number; loss for uneven load of experts, before its coefficient",
    "moe/z_loss": "number; loss for large router logits, before its coefficient",
    "moe/load_max": "number; tokens of the busiest expert over the mean of its layer, the largest of all layers",
    "moe/idle_pct": "%; experts without a token",
    "moe/load": "counts, a list for each layer; tokens that each router picked each expert for, dropped ones included",
    "moe/dropped": "count; picks beyond balance.capacity_factor",
    "moe/dropped_pct": "%; part of all picks that was dropped",
    "rewards/chosen": "number; beta times the log-probability of chosen answers, less that of the reference "
    "where there is one; mean over pairs",
    "rewards/rejected": "number; the same of rejected answers",
    "rewards/margins": "number; difference of the two, mean over pairs",
    "rewards/accuracies": "part of 1; pairs whose chosen answer has the larger reward",
    "logps/chosen": "nats; log-probability of chosen answers, mean over pairs; orpo and simpo: per token",
    "logps/rejected": "nats; the same of rejected answers",
}
METRICS |= {
    f"eval/{name}": f"{meaning}; on the held-out rows"
    for name, meaning in METRICS.items()
    if name.startswith(("rewards/", "logps/"))
}
