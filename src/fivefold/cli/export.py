"""`fivefold export`."""

from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.core.hub import Repository, repository
from fivefold.core.terminal import say
from fivefold.core.text import listed
from fivefold.core.units import human
from fivefold.launch.worker import imported

if TYPE_CHECKING:
    from fivefold.checkpoint.push import Pushed
    from fivefold.parallel.adapters.merge_check import MergeCheck

_MOST = 20  # files named in a line


class DType(StrEnum):
    """The type of the stored weights."""

    BF16, FP16, FP32 = "bf16", "fp16", "fp32"


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo, or its copy: s3://bucket/runs/demo.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint. Default: the newest.", show_default=False)
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The step of the best validation; checkpoint.keep_best keeps it.")
    ] = False,
    dtype: Annotated[
        DType | None,
        typer.Option(help="Type of the weights. Default: that of the model the run started from.", show_default=False),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model folder OUT.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Put a run's adapter into the weights of its model.")] = False,
    push: Annotated[
        str | None,
        typer.Option(metavar="ORG/NAME", help="Upload OUT to this model repository of the hub.", show_default=False),
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Refuse a public repository. A new one is private by default.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public, and refuse a private one.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch to push to. Default: the main one.", show_default=False)
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run's model as a plain Hugging Face folder.

    A run with an adapter gives a folder of PEFT, or the whole model with --merge.

    Example: fivefold export runs/demo my-model
    """
    imported("fivefold.checkpoint.export")
    from fivefold.checkpoint.export import export as export_run
    from fivefold.checkpoint.export import lacking
    from fivefold.launch.memory import room

    free, to = room(), repository(push, private=private, revision=revision, public=public)
    done = export_run(
        run, out, step=step, best=best, dtype=dtype.value if dtype else None, force=force, merge=merge,
        push=to, room=free.free if free else None,
    )  # fmt: skip
    if best:
        say(f"step {done.step} had the best validation")
    kind = str(done.dtype).removeprefix("torch.")
    if done.is_adapter:
        say(f"{out} is a PEFT adapter: {human(done.parameters)} parameters in {kind}, {human(done.bytes)}B")
        _say_pushed(done.push)
        for line in uses_of_adapter(to or out, run, str(out)):
            say(line)
        return
    say(f"{out} is a Hugging Face folder: {human(done.parameters)} parameters in {kind}, {human(done.bytes)}B")
    for line in lacking(done.lacks):
        say(line)
    if done.check is not None:
        say(_compared(done.check, kind))
    _say_pushed(done.push)
    for line in uses(to or out):
        say(line)


def _say_pushed(pushed: "Pushed | None") -> None:
    """Print where an export is on the hub, if it was pushed, and what else is or was there."""
    if pushed is None:
        return
    say(f"pushed to {pushed.address}")
    if pushed.removed:
        say(f"removed: {listed(pushed.removed, _MOST)}; commit {pushed.before[:8]} has them")
    if pushed.kept:
        say(f"kept: {listed(pushed.kept, _MOST)}")


def _compared(check: "MergeCheck", kind: str) -> str:
    """One line about the logits of a merged model."""
    if check.missing:
        return f"its logits were not compared with those of the adapter beside the model: {check.missing}"
    found = f"its logits are those of the adapter beside the model: {check.merged:.1e} apart in fp32"
    return found if check.written == check.merged else f"{found}, {check.written:.1e} with weights in {kind}"


def uses_of_adapter(place: Path | Repository, run: str, folder: str) -> list[str]:
    """Lines on how to use an exported adapter, in its folder or on the hub."""
    return [
        "",
        "from peft import AutoPeftModelForCausalLM",
        f"model = AutoPeftModelForCausalLM.from_pretrained({_arguments(place)})",
        "",
        f"fivefold export {quote(run)} {quote(folder + '-merged')} --merge   # a model folder with the adapter in it",
    ]


def uses(place: Path | Repository) -> list[str]:
    """Lines on how to use an exported model, to paste into a shell or into Python."""
    name, revision = (str(place), None) if isinstance(place, Path) else (place.name, place.revision)
    branch = f" --revision {quote(revision)}" if revision else ""
    loaded = f"pretrained={name}" + (f",revision={revision}" if revision else "")
    return [
        "",
        f"vllm serve {quote(name)}{branch}",
        f"lm_eval --model hf --model_args {quote(loaded)} --tasks hellaswag",
        "",
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        f"model = AutoModelForCausalLM.from_pretrained({_arguments(place)})",
        f"tokenizer = AutoTokenizer.from_pretrained({_arguments(place)})",
        "print(tokenizer.decode(model.generate(**tokenizer('The', return_tensors='pt'), max_new_tokens=20)[0]))",
    ]


def _arguments(place: Path | Repository) -> str:
    return repr(str(place)) if isinstance(place, Path) else place.arguments
