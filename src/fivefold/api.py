"""The Python API of the commands: the same functions with Python values as arguments and results."""

import inspect
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, overload

from fivefold.core import json_lines
from fivefold.core.errors import UserError
from fivefold.core.hub import repository
from fivefold.generation import SEED, TEMPERATURE, TOP_K, TOP_P

if TYPE_CHECKING:
    from torch import Tensor

    from fivefold.comparison.report import CompareReport
    from fivefold.own_loop import ParallelModel
    from fivefold.rehearsal.report import Rehearsal
    from fivefold.training.part import Part
    from fivefold.verification.report import VerifyReport


@dataclass(frozen=True, init=False)
class Run:
    """A run on disk: its folder and its metrics."""

    path: Path

    def __init__(self, path: str | Path) -> None:
        object.__setattr__(self, "path", Path(path))

    @property
    def best(self) -> tuple[int, float] | None:
        """The step of the best validation by `eval.metric`, and its value; None before the first."""
        rows = [row for row in self.metrics if row.get("eval/best") is not None]
        return (rows[-1]["eval/best_step"], rows[-1]["eval/best"]) if rows else None

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """The rows of `metrics.jsonl`, one per logged step, in order; empty before the first.

        Damaged lines are left out with a warning.
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
    on_step: Callable[[dict[str, Any]], object] | None = None,
    on_eval: Callable[[dict[str, Any]], object] | None = None,
    on_save: Callable[[Path], object] | None = None,
    parts: Sequence["str | type[Part]"] = (),
) -> Run:
    """Train a run file, or the built-in demo if `path` is None, as `fivefold train` does.

    `overrides` are dotted keys with Python values: `{"optimizer.learning_rate": 2e-5}`. `verify`: first prove the
    layout on a thin model. Starts its own workers unless this process is one already. Raises `UserError` and
    `RunFailed`.

    `on_step` receives the row of every step as in `metrics.jsonl`, `on_eval` the step and the `eval/` metrics of every
    evaluation, `on_save` the folder of every checkpoint once it is published. They run in this process, in order: in
    one of its threads, while the workers continue to train; if this process is a worker, on the first rank, between
    steps. An exception in one stops the run after a step, which is saved, and is raised here. After a restart, steps
    may be reported again.

    `parts`: `train.parts`, in place of those of the run file: classes that derive `fivefold.Part`, or `FILE.py:NAME`. A
    class has to be at the top of a file, which every worker runs.
    """
    from fivefold.launch.events import Listener
    from fivefold.training.launch import run
    from fivefold.verification import before_training

    if parts:
        overrides = {**(overrides or {}), "train.parts": [_named(part) for part in parts]}
    file, keys = _arguments(path, overrides)
    listener = Listener(on_step, on_eval, on_save) if on_step or on_eval or on_save else None
    with listener.raising() if listener else nullcontext():
        return Run(run(file, keys, nproc=nproc, prove=before_training if verify else None, listener=listener))


def _named(part: "str | type[Part]") -> str:
    """The `FILE.py:NAME` of a part. Raises `UserError` for a class that workers cannot find."""
    if isinstance(part, str):
        return part
    try:
        file, name = inspect.getfile(part), part.__qualname__
    except (OSError, TypeError):  # of an interactive session, or no class
        file, name = "", getattr(part, "__qualname__", repr(part))
    if not (file.endswith(".py") and name.isidentifier()):
        what = f"parts has {name}, which is no class at the top of a file"
        raise UserError(what, fix="write it to a file: parts=['my_parts.py:Mine']", more="fivefold docs howto/parts")
    return f"{Path(file).resolve()}:{name}"


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
    """Prove that layouts compute the same as one process, as `fivefold verify` does.

    The report's `.ok` is True if all do; `.rows` has every comparison. The options are those of
    `fivefold.verification.main`. Raises `UserError`.
    """
    from fivefold.verification import main

    return main(
        *_arguments(path, overrides), layouts=layouts, thin=thin, quick=quick, steps=steps, precision=precision,
        seq_length=seq_length, seed=seed, quiet=quiet,
    )  # fmt: skip


def compare(
    *paths: str | Path,
    overrides: Mapping[str, Any] | None = None,
    vary: Sequence[Mapping[str, Any]] = (),
    nproc: Sequence[int] = (),
    repeats: int = 3,
    steps: int | None = None,
    warmup: int = 2,
    out: str | Path | None = None,
    against: Sequence[str | Path] = (),
    quiet: bool = True,
) -> "CompareReport":
    """Train run files (none: the demo's) alternately and compare them, as `fivefold compare` does.

    `vary`: for one run file, the keys set in each further configuration: `[{"precision.fp8": "rowwise"}]`. The other
    options are those of `fivefold.comparison.Request`. The report's `.rows` are those of the table; `.ok` is
    True if every run was trained. Raises `UserError`.
    """
    from fivefold.comparison import Request, main

    request = Request(
        paths=[Path(item) for item in paths], overrides=_written(overrides), vary=[_written(item) for item in vary],
        nproc=nproc, repeats=repeats, steps=steps, warmup=warmup, out=None if out is None else Path(out),
        against=[str(folder) for folder in against],
    )  # fmt: skip
    return main(request, lambda report: None, quiet=quiet)


def rehearse(
    path: str | Path | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    cluster: str,
    rank: int | None = None,
    all_kinds: bool = False,
    steps: int = 2,
    synthetic: bool = False,
) -> "Rehearsal":
    """Run the real step of one rank of `cluster` (`"16x8xH100"`) without a GPU, as `fivefold rehearse` does.

    `all_kinds`: run the first, a middle and the last rank of a pipeline. `synthetic`: random documents in place of the
    run file's text. The result's `.ok` is True if it fits and sends what its plan declares; `.seen` has each rank's
    memory, syncs and collectives; `.expected` estimates the step's seconds and MFU. Raises `UserError` and `RunFailed`.
    """
    from fivefold.rehearsal.launch import rehearse as run

    return run(
        *_arguments(path, overrides), cluster=cluster, rank=rank, all_kinds=all_kinds, steps=steps,
        synthetic=synthetic,
    )  # fmt: skip


def _arguments(path: Any, overrides: Mapping[str, Any] | None) -> tuple[Path | None, list[str]]:
    """The run file, and the overrides as texts like on the command line. Raises `UserError` for any other `path`."""
    if path is not None and not isinstance(path, str | Path):
        raise UserError(
            f"the first argument is the run file, not a {type(path).__name__}",
            fix='overrides come second: ff.train("run.yaml", {"train.max_steps": 3}), or ff.train(None, {...}) for the '
            "demo",
        )
    return None if path is None else Path(path), _written(overrides)


def _written(overrides: Mapping[str, Any] | None) -> list[str]:
    """Convert keys with Python values to `key=value` texts, with values as JSON."""
    return [f"{key}={json.dumps(value, default=str, ensure_ascii=False)}" for key, value in (overrides or {}).items()]


def export(
    run: "Run | ParallelModel | str | Path",
    out: str | Path,
    *,
    step: int | None = None,
    best: bool = False,
    dtype: str | None = None,
    force: bool = False,
    merge: bool = False,
    push: str | None = None,
    private: bool = False,
    revision: str | None = None,
    public: bool = False,
) -> Path:
    """Write the model of a run, or a parallelized model in its current state, as a Hugging Face folder and return it,
    as `fivefold export` does. A run with an adapter gives a PEFT folder; with `merge`, the model with it merged in.
    `best`: the step of the best validation, in place of the newest.

    `dtype`: bf16, fp16 or fp32; None: that of the model the run started from, or fp32 if it has none. `force` replaces
    an existing model folder. `push`: `org/name`, the model repository of the Hugging Face hub to which the folder is
    uploaded; a new one is private unless `public`, and `private` refuses a public one; `revision` is a branch. For
    a parallelized model every rank calls this, and the first one writes; see `fivefold.own_loop.export`. Raises
    `UserError` if there is no such run or step, or if the hub refuses.
    """
    target = repository(push, private=private, revision=revision, public=public)
    if isinstance(run, Run | str | Path):
        from fivefold.checkpoint.export import export as export_run
        from fivefold.launch.memory import room

        where, free = run.path if isinstance(run, Run) else run, room()
        export_run(
            where, Path(out), step=step, best=best, dtype=dtype, force=force, merge=merge, push=target,
            room=free.free if free else None,
        )  # fmt: skip
        return Path(out)
    from fivefold import own_loop

    if step is not None or best:
        raise UserError("a parallelized model has no steps to choose from", fix="leave step and best out")
    if target is not None:
        raise UserError(
            "a parallelized model is not pushed",
            fix=f"ff.export(model, path), and hf upload {push} PATH . --delete '*.safetensors*'",
        )
    if merge:
        raise UserError(
            "the adapter of a parallelized model cannot be merged here",
            fix="ff.export(model, path), and peft.AutoPeftModelForCausalLM.from_pretrained(path).merge_and_unload()",
        )
    return own_loop.export(run, out, dtype=dtype, force=force)


@overload
def generate(
    model: "Run | str | Path", prompt: str, *, layout: str = "single", device: str = "auto", step: int | None = None,
    max_new_tokens: int = 100, temperature: float = TEMPERATURE, top_k: int = TOP_K, top_p: float = TOP_P,
    stop: Sequence[str] = (), seed: int = SEED, chat: bool = False, system: str | None = None, quiet: bool = True,
) -> str: ...  # fmt: skip


@overload
def generate(
    model: "ParallelModel", prompt: str, *, tokenizer: Any, max_new_tokens: int = 100, temperature: float = TEMPERATURE,
    top_k: int = TOP_K, top_p: float = TOP_P, seed: int = SEED,
    eos_token_ids: Sequence[int] | None = None,
) -> str: ...  # fmt: skip


@overload
def generate(
    model: "ParallelModel", prompt: "Tensor | Sequence[int]", *, max_new_tokens: int = 100,
    temperature: float = TEMPERATURE, top_k: int = TOP_K, top_p: float = TOP_P, seed: int = SEED,
    eos_token_ids: Sequence[int] | None = None,
) -> list[int]: ...  # fmt: skip


def generate(
    model: "Run | ParallelModel | str | Path", prompt: "str | Tensor | Sequence[int]", **options: Any
) -> "str | list[int]":
    """Continue `prompt` with a run or a Hugging Face model, as `fivefold generate` does, and return the new text.

    Tokens are sampled with `seed`; `temperature=0` takes the likeliest each time. `chat`: `prompt` is a user's turn in
    the tokenizer's chat template, and the text is the answer. Unless `quiet`, the text is printed as it is generated.

    A parallelized model runs in this process, on every rank of the world. It takes a text with a `tokenizer`, or tokens
    ([tokens] or [1, tokens]) and then returns tokens. Raises `UserError` for options that do not fit.
    """
    if isinstance(model, Run | str | Path):
        from fivefold.generation import GenerateRequest, start

        device, quiet = options.pop("device", "auto"), options.pop("quiet", True)
        name = str(model.path if isinstance(model, Run) else model)
        return start(GenerateRequest(model=name, prompt=cast(str, prompt), **options), device=device, quiet=quiet)
    from fivefold import own_loop

    return own_loop.generate(model, prompt, **options)
