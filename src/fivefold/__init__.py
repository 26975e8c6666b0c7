"""fivefold: train any Hugging Face causal language model, unchanged, in five dimensions of parallelism."""

import importlib as _importlib
import typing as _typing

if _typing.TYPE_CHECKING:
    from fivefold.api import Run, compare, export, generate, rehearse, train, verify
    from fivefold.config import RunConfig, load_config
    from fivefold.core.errors import RunFailed, UserError
    from fivefold.own_loop import (
        ParallelModel,
        clip_grad_norm_,
        evaluate,
        gather,
        gradients,
        load,
        logits,
        parallelize,
        save,
        scatter,
        train_step,
    )
    from fivefold.parallel.adapters.settings import Lora
    from fivefold.parallel.layout import Layout
    from fivefold.parallel.loss.own import LossRow
    from fivefold.planner.estimate import Estimate, Workload
    from fivefold.planner.plan import estimate, plan
    from fivefold.training.part import LiveRun, Part
    from fivefold.training.step import StepResult

    __version__: str

# Module -> its public names. Nothing is imported before its first use, above all torch.
_HOMES = {
    name: home
    for home, names in {
        "fivefold.api": ("Run", "compare", "export", "generate", "rehearse", "train", "verify"),
        "fivefold.config": ("RunConfig", "load_config"),
        "fivefold.core.errors": ("RunFailed", "UserError"),
        "fivefold.parallel.layout": ("Layout",),
        "fivefold.parallel.loss.own": ("LossRow",),
        "fivefold.parallel.adapters.settings": ("Lora",),
        "fivefold.own_loop": (
            "ParallelModel", "clip_grad_norm_", "evaluate", "gather", "gradients", "load", "logits", "parallelize",
            "save", "scatter", "train_step",
        ),
        "fivefold.planner.estimate": ("Estimate", "Workload"),
        "fivefold.planner.plan": ("estimate", "plan"),
        "fivefold.training.part": ("LiveRun", "Part"),
        "fivefold.training.step": ("StepResult",),
    }.items()
    for name in names
}  # fmt: skip
__all__ = [
    "Estimate", "Layout", "LiveRun", "Lora", "LossRow", "ParallelModel", "Part", "Run", "RunConfig", "RunFailed",
    "StepResult", "UserError", "Workload", "clip_grad_norm_", "compare", "estimate", "evaluate", "export", "gather",
    "generate", "gradients", "load", "load_config", "logits", "parallelize", "plan", "rehearse", "save", "scatter",
    "train", "train_step", "verify",
]  # fmt: skip


def __getattr__(name: str) -> _typing.Any:
    if name == "__version__":
        return _importlib.import_module("fivefold.core.system").version_of("fivefold")
    if name not in _HOMES:
        raise AttributeError(f"module 'fivefold' has no attribute {name!r}")
    return getattr(_importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*__all__, *filter(lambda name: name.startswith("__"), globals()), "__version__"})
