"""The model card of an export: base model, training data, settings and results."""

from pathlib import Path
from typing import Any

import yaml

from fivefold.checkpoint.find import is_remote
from fivefold.checkpoint.load import Checkpoint
from fivefold.config import RunConfig, parse_config
from fivefold.core import json_lines
from fivefold.core.hub import is_hub_id

CARD = "README.md"


def model_card(checkpoint: Checkpoint, run: str | Path, *, dtype: str) -> str:
    """The text of README.md: front matter as the hub reads it, and a table. Unknown entries are left out, except the
    licence, which is stated as unknown. Files are named without their folders."""
    file = checkpoint.path / "run.yaml"
    config = parse_config(file.read_text(encoding="utf-8")) if file.is_file() else None
    name = config.run.name if config else Path(str(run)).name
    front: dict[str, Any] = {"library_name": "transformers", "license": "unknown", "tags": ["fivefold"]}
    if config and config.model.init == "pretrained" and is_hub_id(config.model.name_or_path):
        front["base_model"] = config.model.name_or_path
    rows = {**(_training(config) if config else {}), **_results(checkpoint, run, dtype)}
    table = "".join(f"| {what} | {value} |\n" for what, value in rows.items())
    return (
        f"---\n{yaml.safe_dump(front, sort_keys=False)}---\n\n# {name}\n\n"
        f"Trained with fivefold.\n\n| | |\n|---|---|\n{table}\n"
        "Licence: unknown. Those of the base model and of the data apply.\n"
    )


def _training(config: RunConfig) -> dict[str, str]:
    model, train, optimizer = config.model, config.train, config.optimizer
    start = "its own weights" if model.init == "pretrained" else f"random weights, seed {train.seed}"
    sources = [f"{_shown(one.path)} (weight {one.weight:g})" for one in config.data.train]
    return {
        "base model": f"{_shown(model.name_or_path)}, {start}",
        "tokenizer": _shown(config.tokenizer.name_or_path),
        "data": ", ".join(sources),
        "rows": f"{train.global_batch_size} per step, {config.data.seq_length} tokens each",
        "optimizer": f"{optimizer.name}, peak learning rate {optimizer.learning_rate:g}, {config.scheduler.name}",
        "computed in": config.precision.compute,
    }


def _results(checkpoint: Checkpoint, run: str | Path, dtype: str) -> dict[str, str]:
    manifest = checkpoint.manifest
    tokens = manifest.state.get("tokens_seen")
    metrics = {} if is_remote(run) else _metrics(Path(run) / "metrics.jsonl", manifest.step)
    rows = {"steps": f"{manifest.step:,}"} | ({"tokens": f"{tokens:,}"} if isinstance(tokens, int) else {})
    rows |= {name: f"{value:.4f}, nats per token" for name, value in metrics.items()}
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return {**rows, "layout": f"`{manifest.layout}`", "weights stored in": dtype, "versions": versions}


def _metrics(file: Path, step: int) -> dict[str, float]:
    """The last training and validation losses up to `step`."""
    found: dict[str, float] = {}
    for row in json_lines.read(file).rows:
        if row["step"] <= step:
            for key, name in (("train/loss", "training loss"), ("eval/loss", "validation loss")):
                if isinstance(row.get(key), float):
                    found[name] = row[key]
    return found


def _shown(name: str) -> str:
    """A name as written; for a path elsewhere on this machine, its last part only."""
    return Path(name).name if Path(name).is_absolute() or name.startswith(("~", "..")) else name
