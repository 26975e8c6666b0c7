"""The Python API of the commands: the same functions, with Python values in and out."""

import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold import json_lines
from fivefold.generation import SEED, TEMPERATURE, TOP_K

if TYPE_CHECKING:
    from fivefold.verification.report import VerifyReport


@dataclass(frozen=True)
class Run:
    """A run on disk: its folder, and what it measured."""

    path: Path

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one a logged step, in order; empty before the first.

        A damaged line is left out, with a warning that names it.
        """
        lines = json_lines.read(self.path / "metrics.jsonl")
        for damaged in lines.damaged:
            warnings.warn(f"{damaged}; it is left out", stacklevel=2)
        return list(lines.rows)


def train(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    nproc: int | None = None,
    verify: bool = False,
) -> Run:
    """Train a run file, or the built-in demo when `path` is None, as `fivefold train` does.

    `overrides` are dotted keys with Python values: `{"optimizer.learning_rate": 2e-5}`. `verify`: first prove the
    layout on a thin model. Starts its own workers unless this process is one already. Raises `UserError` and
    `RunFailed`.
    """
    from fivefold.launch.local import run

    return Run(run(None if path is None else Path(path), _written(overrides), nproc=nproc, verify=verify))


def verify(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    layouts: Sequence[str],
    thin: bool = False,
    quick: bool = False,
    steps: int | None = None,
    precision: str = "fp64",
    seq_length: int | None = None,
    seed: int = 1234,
    quiet: bool = True,
) -> "VerifyReport":
    """Prove that layouts compute what one process computes, as `fivefold verify` does.

    The report's `.ok` says whether all do; `.rows` has every comparison. The options are those of
    `fivefold.verification.main`. Raises `UserError`.
    """
    from fivefold.verification import main

    return main(
        None if path is None else Path(path), _written(overrides), layouts=layouts, thin=thin, quick=quick, steps=steps,
        precision=precision, seq_length=seq_length, seed=seed, quiet=quiet,
    )  # fmt: skip


def _written(overrides: Mapping[str, Any] | None) -> list[str]:
    """Overrides as the command line writes them."""
    return [f"{key}={json.dumps(value, default=str, ensure_ascii=False)}" for key, value in (overrides or {}).items()]


def export(
    run: "Run | str | Path",
    out: str | Path,
    *,
    step: int | None = None,
    dtype: str | None = None,
    force: bool = False,
) -> Path:
    """Write the model of a run as a Hugging Face folder and return it, as `fivefold export` does.

    `dtype`: bf16, fp16 or fp32; None: that of the model the run started from, fp32 where it has none. `force`
    replaces a model folder that is there. Raises `UserError` when there is no such run or step.
    """
    from fivefold.checkpoint.export import export as export_run

    export_run(run.path if isinstance(run, Run) else run, Path(out), step=step, dtype=dtype, force=force)
    return Path(out)


def generate(
    model: "Run | str | Path",
    prompt: str,
    *,
    layout: str = "single",
    device: str = "auto",
    step: int | None = None,
    max_new_tokens: int = 100,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    seed: int = SEED,
    quiet: bool = True,
) -> str:
    """The text that continues `prompt`, by a run or a Hugging Face model, as `fivefold generate` does.

    Tokens are drawn, by `seed`; `temperature=0` takes the likeliest each time. Unless `quiet`, the text is written to
    the screen as it comes. Raises `UserError` for what does not fit.
    """
    from fivefold.generation import main

    return main(
        str(model.path if isinstance(model, Run) else model), prompt, layout=layout, device=device, step=step,
        max_new_tokens=max_new_tokens, temperature=temperature, top_k=top_k, seed=seed, quiet=quiet,
    )  # fmt: skip
