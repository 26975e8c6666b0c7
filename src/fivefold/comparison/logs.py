"""Steps of a run, as its log has them: logs of fivefold, and of other trainers.

Supported formats: a run folder of fivefold, JSON lines or CSV with a column of each kind in `COLUMNS`,
`trainer_state.json` of Hugging Face's Trainer, and the printed lines of Megatron-LM and torchtitan. Values missing in a
log follow its path: `train.log devices=8 seq_length=4096`.
"""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from fivefold.core import history, strict_json
from fivefold.core.errors import UserError, first_line
from fivefold.core.json_lines import needed
from fivefold.core.run_folder import is_run
from fivefold.core.units import parse_length

MORE = "fivefold docs howto/compare says what is read of a log"
# Quantity -> names of its column; the first that exists counts. Tokens are input tokens seen since the first step.
COLUMNS: Mapping[str, tuple[str, ...]] = {
    "step": ("step", "iteration", "global_step", "_step"),
    "tokens": ("train/tokens_seen", "tokens_seen", "n_tokens_seen", "num_input_tokens_seen", "tokens"),
    "loss": ("train/loss", "loss", "lm loss", "loss_metrics/global_avg_loss"),
    "eval_loss": ("eval/loss", "eval_loss", "validation_metrics/loss"),
    "speed": (
        "perf/tokens_per_second_per_device", "tokens_per_second_per_device", "throughput(tps)", "tps",
        "tokens/train_per_sec_per_gpu",
    ),
    "whole_speed": ("tokens_per_second", "tokens_per_sec"),
    "seconds": ("seconds", "step_seconds", "elapsed_seconds_per_step"),
    "peak_gib": ("memory/peak_gib", "memory/max_active(GiB)", "memory/max_reserved(GiB)", "peak_gib"),
    "mfu_pct": ("perf/mfu_pct", "mfu(%)", "mfu_pct"),
}  # fmt: skip
_MEGATRON = {
    "step": r"iteration\s+(\d+)/", "samples": r"consumed samples:\s*(\d+)", "loss": r"lm loss:\s*([-+.\deE]+)",
    "milliseconds": r"elapsed time per iteration \(ms\):\s*([\d.]+)", "rows": r"global batch size:\s*(\d+)",
}  # fmt: skip
# Validation after a step, or at the end of training; a test set's line says `on test set`.
_MEGATRON_VALIDATION = {
    "step": r"validation loss at iteration\s+(\d+)(?: on validation set)?\s*\|",
    "eval_loss": r"\|\s*lm loss value:\s*([-+.\deE]+)",
}
_TORCHTITAN = {
    "step": r"step:\s*(\d+)", "loss": r"loss:\s*([-+.\deE]+)", "tps": r"tps:\s*([\d,]+)",
    "mfu_pct": r"mfu:\s*([\d.]+)%", "peak_gib": r"memory:\s*([\d.]+)GiB",
}  # fmt: skip
_COLOUR = re.compile(r"\x1b\[[\d;]*m")
_GIVEN = ("devices", "seq_length", "tokens_per_step")


@dataclass(frozen=True)
class LoggedStep:
    """One row of a log, after `step` steps. `tokens`: seen so far. None: the log does not say."""

    step: int
    tokens: float | None = None
    loss: float | None = None
    eval_loss: float | None = None
    speed: float | None = None  # tokens per second and device
    peak_gib: float | None = None
    mfu_pct: float | None = None


@dataclass(frozen=True)
class TrainerLog:
    """A log that was read. `says`: the columns used, in words."""

    name: str
    steps: tuple[LoggedStep, ...]
    devices: int | None
    says: str


def steps_of_run(folder: Path) -> list[LoggedStep]:
    """Logged steps of a fivefold run folder. Raises `UserError`."""
    return [_step(row, _columns([row]), {}) for row in needed(folder / "metrics.jsonl").rows]


def without_warm_up(steps: Sequence[LoggedStep], starts: Iterable[int], warmup: int) -> list[LoggedStep]:
    """Drop the first `warmup` steps after each of `starts`, the steps from which starts continued."""
    firsts = sorted({0, *starts})
    return [step for step in steps if step.step - max((s for s in firsts if s < step.step), default=0) > warmup]


def read(asked: str) -> TrainerLog:
    """Read the log `PATH [devices=N] [seq_length=N] [tokens_per_step=N]`. Raises `UserError`."""
    path, given = _asked(asked)
    try:
        if path.is_dir() and is_run(path):
            path, given = path / "metrics.jsonl", _of_run(path) | given
        text = strict_json.content(path, strict_json.MOST_BYTES).decode("utf-8-sig", errors="replace")
    except FileNotFoundError:
        raise UserError(f"{path}: there is no such log", fix="name a file, or a run folder", more=MORE) from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read: {first_line(error)}", more=MORE) from error
    try:
        kind, rows = _rows(text)
    except csv.Error as error:
        raise UserError(f"{path} is not CSV: {error}", more=MORE) from error
    columns = _columns(rows)
    steps = [_step(row, columns, given) for row in rows if _number(row, columns.get("step"))]
    if not steps or not {"loss", "eval_loss", "speed", "whole_speed", "seconds"} & set(columns):
        names = "; ".join(f"{what}: {', '.join(names)}" for what, names in list(COLUMNS.items())[:4])
        raise UserError(f"{path} has no rows with a step and a loss or a speed", fix=f"columns are {names}", more=MORE)
    says = ", ".join(f"{what.replace('_', ' ')} from {name}" for what, name in columns.items())
    beside = "".join(f", {what} {value:,}" for what, value in given.items())
    name = path.parent.name if path.name in ("metrics.jsonl", "trainer_state.json") else path.stem
    return TrainerLog(
        name or path.stem, tuple(steps), given.get("devices"), f"{len(steps):,} rows of {kind}: {says}{beside}"
    )


def _asked(asked: str) -> tuple[Path, dict[str, int]]:
    first, *others = [asked] if _exists(asked) else asked.split(" ")
    words = list(takewhile(lambda word: not word or "=" in word, reversed(others)))  # a path may have spaces
    path, given = " ".join([first, *others[: len(others) - len(words)]]), {}
    for word in filter(None, reversed(words)):
        key, _, value = word.partition("=")
        try:
            if key not in _GIVEN or (number := parse_length(value)) < 1:
                raise ValueError
        except ValueError:
            raise UserError(
                f"--against {asked!r}: {word} is none of {', '.join(f'{key}=N' for key in _GIVEN)}",
                fix=f'--against "{path} devices=8 tokens_per_step=65536"', more=MORE,
            ) from None  # fmt: skip
        given[key] = number
    return Path(path), given


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # too long for a path
        return False


def _of_run(folder: Path) -> dict[str, int]:
    """Number of devices, from a run's history."""
    starts = history.load(folder).starts
    world = starts[-1].about.get("world") if starts else None
    return {"devices": world} if isinstance(world, int) else {}


def _rows(text: str) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """The kind of file, and its rows."""
    if text.lstrip()[:1] == "{":
        whole = _object(text)
        if isinstance(whole.get("log_history"), list):
            return "trainer_state.json", _joined([row for row in whole["log_history"] if isinstance(row, dict)])
        return "JSON lines", list(filter(None, map(_object, text.splitlines())))
    lines = [_COLOUR.sub("", line) for line in text.splitlines()]
    if lines and set(lines[0].replace('"', "").replace(" ", "").split(",")) & set(COLUMNS["step"]):
        return "CSV", list(csv.DictReader(lines, skipinitialspace=True))
    megatron = [_found(line, _MEGATRON) for line in lines if "lm loss:" in line and "iteration" in line]
    if megatron:
        validations = (_found(line, _MEGATRON_VALIDATION) for line in lines if "validation loss at" in line)
        return "Megatron-LM", _joined([*megatron, *(row for row in validations if len(row) == 2)])
    return "torchtitan", _joined([_titan(line) for line in lines if re.search(_TORCHTITAN["step"], line)])


def _titan(line: str) -> dict[str, Any]:
    """Read a line of a step; of a validation only its loss, since its speed and memory are not those of training."""
    found = _found(line, _TORCHTITAN)
    return {"step": found["step"], "eval_loss": found.get("loss")} if "validate step:" in line else found


def _joined(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Merge rows of the same step: a Trainer writes an evaluation as a row of its own."""
    by_step: dict[Any, dict[str, Any]] = {}
    for row in rows:
        by_step.setdefault(_number(row, "step"), {}).update(row)
    return list(by_step.values())


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _found(line: str, patterns: Mapping[str, str]) -> dict[str, Any]:
    """Numbers of a printed line, under the names of `COLUMNS` and the others that `_step` knows."""
    found = {
        name: match[1].replace(",", "") for name, pattern in patterns.items() if (match := re.search(pattern, line))
    }
    if milliseconds := _number(found, "milliseconds"):
        found["seconds"] = str(milliseconds / 1000)
    return found


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Quantity -> the column that has it, if any row does."""
    there = {name for row in rows for name in row}
    found = {what: next((name for name in names if name in there), None) for what, names in COLUMNS.items()}
    return {what: name for what, name in found.items() if name}


def _step(row: Mapping[str, Any], columns: Mapping[str, str], given: Mapping[str, int]) -> LoggedStep:
    """Build a step. `given` fills in what the log lacks: tokens from steps or rows, one device's speed from all."""
    of = {what: _number(row, name) for what, name in columns.items()}
    step, samples, rows = int(of.get("step") or 0), _number(row, "samples"), _number(row, "rows")
    length, per_step, devices = given.get("seq_length"), given.get("tokens_per_step"), given.get("devices")
    if per_step is None and rows and length:
        per_step = int(rows * length)
    tokens = of.get("tokens")
    if tokens is None:
        tokens = samples * length if samples and length else step * per_step if per_step else None
    seconds = of.get("seconds")
    whole = of.get("whole_speed") or (per_step / seconds if per_step and seconds else None)
    speed = of.get("speed") or (whole / devices if whole and devices else None)
    return LoggedStep(step, tokens, of.get("loss"), of.get("eval_loss"), speed, of.get("peak_gib"), of.get("mfu_pct"))


def _number(row: Mapping[str, Any], name: str | None) -> float | None:
    """A finite number from a column; CSV has it as text."""
    value = row.get(name) if name else None
    if isinstance(value, bool) or value in (None, ""):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):  # a JSON integer has any number of digits
        return None
    return number if math.isfinite(number) else None
