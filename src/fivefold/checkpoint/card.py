"""The model card of an export: base model, training data, settings, results and how to load it."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from fivefold.checkpoint import model_folder
from fivefold.checkpoint.find import is_remote
from fivefold.checkpoint.load import Checkpoint
from fivefold.config import RunConfig, parse_config
from fivefold.core import json_lines
from fivefold.data.source import HUB

CARD = "README.md"
_POINTS = 10  # rows of the curve
_UNKNOWN = "unknown"
_TAGS = ("fivefold", "lora")
_TRAINED, _APPLY = "Trained with fivefold.", "of the base model and of the data apply."
# The text of a card of fivefold, from its title to its last sentence, or to a title that others wrote in between.
_SECTION = re.compile(
    rf"(?:^# .*\n\n)?^{re.escape(_TRAINED)}\n(?:(?!#|.*{re.escape(_APPLY)}).*\n)*(?:.*{re.escape(_APPLY)}\n?)?", re.M
)

_LOAD = """```python
from {package} import {model_class}
from transformers import AutoTokenizer

model = {model_class}.from_pretrained({arguments})
tokenizer = AutoTokenizer.from_pretrained({arguments})
```
"""


def model_card(checkpoint: Checkpoint, run: str | Path, *, arguments: str, dtype: str, adapted: int = 0) -> str:
    """The text of README.md: front matter as the hub reads it, tables, and the lines that load it.

    `arguments` of `from_pretrained` load it, as Python: `"me/it"`. `adapted`: parameters of an adapter, 0 for a model.
    Unknown entries are left out, except the licence: the base model's if its folder states one, else unknown. Files are
    named without their folders.
    """
    file = checkpoint.path / "run.yaml"
    config = parse_config(file.read_text(encoding="utf-8")) if file.is_file() else None
    is_adapter, package = adapted > 0, "peft" if adapted else "transformers"
    title = config.run.name if config else Path(str(run)).name
    folder, starts = checkpoint.model_folder, config is not None and config.model.init == "pretrained"
    licence = model_folder.origin(folder).get("licence")
    hub = model_folder.hub_id(folder, config.model.name_or_path) if config and starts else None
    front: dict[str, Any] = {
        "library_name": package,
        "license": licence or _UNKNOWN,
        "pipeline_tag": "text-generation",
        "tags": [*_TAGS[: 1 + is_adapter]],
    }
    if hub:
        front["base_model"] = hub
        front["base_model_relation"] = "adapter" if is_adapter else "finetune"
    if datasets := _datasets(config) if config else []:
        front["datasets"] = datasets
    rows = {**(_training(config, adapted) if config else {}), **_results(checkpoint, dtype)}
    load = _LOAD.format(
        package=package,
        model_class="AutoPeftModelForCausalLM" if is_adapter else "AutoModelForCausalLM",
        arguments=arguments,
    )
    terms = f"Licence of the base model: {licence}. The terms" if licence else "Licence: unknown. Those"
    return (
        f"{_front(front)}\n# {title}\n\n{_TRAINED}\n\n{load}\n{_table(('', ''), rows.items())}\n"
        f"{_curve(checkpoint, run)}{terms} {_APPLY}\n"
    )


def merged_card(old: str, new: str) -> str:
    """The card `new` of fivefold with what others wrote into `old`, that of a repository: keys of the front matter
    that `new` lacks, tags and datasets, and the text around fivefold's own. Raises `ValueError` or `yaml.YAMLError` for
    front matter that is no mapping."""
    theirs, before = _parted(old)
    ours, text = _parted(new)
    section = _SECTION.search(before)
    ours |= {key: kept for key, value in theirs.items() if (kept := _kept(key, value, ours, section)) is not None}
    start, end = section.span() if section else (0, 0)
    parts = (before[:start], text, _SECTION.sub("", before[end:]))
    return f"{_front(ours)}\n" + "\n\n".join(part for each in parts if (part := each.strip("\n"))) + "\n"


def _parted(card: str) -> tuple[dict[str, Any], str]:
    block = REGEX_YAML_BLOCK.search(card)
    front = yaml.safe_load(block[2]) if block else {}
    if not isinstance(front or {}, dict):
        raise ValueError("the front matter is no mapping")
    return front or {}, card[block.end() :] if block else card


def _kept(key: str, value: Any, ours: dict[str, Any], section: re.Match[str] | None) -> Any:
    """The value of a key that others wrote, None to drop it. Values that an earlier card of fivefold also has in its
    text are fivefold's own."""
    if key in ("tags", "datasets"):
        values = value if isinstance(value, list) else [value]
        mine = ours.get(key, [])
        return [*mine, *(v for v in values if v not in (*mine, *_TAGS) and not _has(section, v, key))] or None
    if key == "base_model_relation" or (key in ours and (key, ours[key]) != ("license", _UNKNOWN)):
        return ours.get(key)
    return None if key in ("base_model", "license") and _has(section, value, key) else value


def _has(section: re.Match[str] | None, value: object, key: str) -> bool:
    """True if an earlier card of fivefold names a value, other than a tag."""
    return key != "tags" and bool(section and re.search(rf"(?<![\w/-]){re.escape(str(value))}(?![\w/-])", section[0]))


def _front(values: dict[str, Any]) -> str:
    return f"---\n{yaml.safe_dump(values, sort_keys=False, allow_unicode=True)}---\n"


def _datasets(config: RunConfig) -> list[str]:
    """Repositories of the hub that the run was trained on, each once."""
    paths = (source.path.removeprefix(HUB) for source in config.data.train if source.path.startswith(HUB))
    return list(dict.fromkeys(path.partition("?")[0] for path in paths))


def _training(config: RunConfig, adapted: int) -> dict[str, str]:
    """Settings by name. `adapted`: parameters of the adapter, 0 if there is none."""
    model, train, optimizer, scheduler, adapter = (
        config.model, config.train, config.optimizer, config.scheduler, config.adapter,
    )  # fmt: skip
    start = "its own weights" if model.init == "pretrained" else f"random weights, seed {train.seed}"
    sources = [f"{_shown(source.path)} (weight {source.weight:g})" for source in config.data.train]
    targets = ", ".join([*adapter.targets, *adapter.target_parameters])
    size = f", {adapted:,} parameters" if adapted else ", merged"
    packed = f", frozen weights in {adapter.quantize}" if adapter.quantize != "none" else ""
    return {
        "base model": f"{_shown(model.name_or_path)}, {start}",
        **({"adapter": f"LoRA of rank {adapter.rank}, alpha {adapter.alpha:g}, on {targets}{size}{packed}"}
           if adapter.lora else {}),
        "tokenizer": _shown(config.tokenizer.name_or_path),
        **({"data": ", ".join(sources)} if sources else {}),
        "objective": config.objective.name,
        "rows": f"{train.global_batch_size} per step, {config.data.seq_length} tokens each",
        "optimizer": f"{optimizer.title}, weight decay {optimizer.weight_decay:g}",
        "learning rate": f"{optimizer.learning_rate:g} at its peak, {scheduler.name}, warm-up {scheduler.warmup_steps}",
        "clipping": f"gradient norm {optimizer.max_grad_norm:g}",
        "seed": str(train.seed),
        "computed in": config.precision.compute,
    }  # fmt: skip


def _results(checkpoint: Checkpoint, dtype: str) -> dict[str, str]:
    manifest = checkpoint.manifest
    tokens = manifest.state.get("tokens_seen")
    rows = {"steps": f"{manifest.step:,}"} | ({"tokens": f"{tokens:,}"} if isinstance(tokens, int) else {})
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    return {**rows, "layout": f"`{manifest.layout}`", "weights stored in": dtype, "versions": versions}


def _curve(checkpoint: Checkpoint, run: str | Path) -> str:
    """A table of losses up to the step of the checkpoint, or nothing for a run of which no metrics are here."""
    file = Path(str(run)) / "metrics.jsonl"
    known = [] if is_remote(run) else json_lines.read(file).rows
    found: dict[int, dict[str, float]] = {}
    for row in known:
        losses = {key: row[key] for key in ("train/loss", "eval/loss") if isinstance(row.get(key), float)}
        if row["step"] <= checkpoint.manifest.step and losses:
            found.setdefault(row["step"], {}).update(losses)
    validated = [step for step, losses in found.items() if "eval/loss" in losses]
    rows = [
        (f"{step:,}", *(f"{found[step][key]:.4f}" if key in found[step] else "" for key in ("train/loss", "eval/loss")))
        for step in _spread(sorted({*(validated or found), *[*found][-1:]}))
    ]
    return (
        _table(("step", "training loss", "validation loss"), rows) + "\nLosses are in nats per token.\n\n"
        if rows
        else ""
    )


def _spread(steps: Sequence[int]) -> list[int]:
    """At most `_POINTS` of `steps`, the first and the last among them."""
    if len(steps) <= _POINTS:
        return list(steps)
    return [steps[round(place * (len(steps) - 1) / (_POINTS - 1))] for place in range(_POINTS)]


def _table(head: Sequence[str], rows: Any) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _shown(name: str) -> str:
    """A name as written; for a path elsewhere on this machine, its last part only."""
    return Path(name).name if Path(name).is_absolute() or name.startswith(("~", "..")) else name
