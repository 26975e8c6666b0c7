"""The Python API of the commands: the same functions, with Python values in and out."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Run:
    """A run on disk: its folder, and what it measured."""

    path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one a logged step, in order; empty before the first."""
        file = self.path / "metrics.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line]


def train(
    path: str | Path | None = None, overrides: Mapping[str, Any] | None = None, *, nproc: int | None = None
) -> Run:
    """Train a run file, or the built-in demo when `path` is None, as `fivefold train` does.

    `overrides` are dotted keys with Python values: `{"optimizer.learning_rate": 2e-5}`. Starts its own workers
    unless this process is one already. Raises `UserError` and `RunFailed`.
    """
    from fivefold.launch.local import run

    written = [
        f"{key}={json.dumps(value, default=str, ensure_ascii=False)}" for key, value in (overrides or {}).items()
    ]
    return Run(run(None if path is None else Path(path), written, nproc=nproc))


def export(run: "Run | str | Path", out: str | Path, *, step: int | None = None) -> Path:
    """Write the model of a run as a Hugging Face folder and return it. Raises `UserError` when there is none."""
    from fivefold.checkpoint.export import export as export_run

    export_run(run.path if isinstance(run, Run) else run, Path(out), step=step)
    return Path(out)


def generate(
    model: "Run | str | Path",
    prompt: str,
    *,
    layout: str = "single",
    device: str = "auto",
    step: int | None = None,
    max_new_tokens: int = 100,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 1234,
    quiet: bool = True,
) -> str:
    """The text that continues `prompt`, by a run or a Hugging Face model, as `fivefold generate` does.

    Unless `quiet`, it is written to the screen as it comes. Raises `UserError` for what does not fit.
    """
    from fivefold.generation import main

    return main(
        str(model.path if isinstance(model, Run) else model), prompt, layout=layout, device=device, step=step,
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, quiet=quiet,
    )  # fmt: skip
