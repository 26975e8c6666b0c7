"""`fivefold generate`, `evaluate`, `export` and `report`: a trained model."""

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Annotated

import typer

from fivefold.cli.options import Debug, Device, Json, RunOrModel, Step, place
from fivefold.core.hub import Repository, repository
from fivefold.core.text import listed, say
from fivefold.core.units import human
from fivefold.evaluation import EvaluateRequest
from fivefold.generation import (
    MAX_NEW_TOKENS,
    MAX_NEW_TOKENS_CHAT,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    GenerateRequest,
)
from fivefold.launch.memory import room
from fivefold.launch.once import run_once
from fivefold.launch.worker import imported
from fivefold.report.findings import write

if TYPE_CHECKING:
    from fivefold.checkpoint.push import Pushed
    from fivefold.parallel.adapters.merge_check import MergeCheck


def generate(
    model: RunOrModel,
    prompt: Annotated[str | None, typer.Option(help="The text to continue.")] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, one a line; or .jsonl with prompt or messages. Answers are JSON lines, in order.",
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="File for the answers to --prompts.", show_default="the screen", callback=place
        ),
    ] = None,
    chat: Annotated[
        bool, typer.Option("--chat", help="Prompts are turns of a conversation; without one, talk with the model.")
    ] = False,
    system: Annotated[str | None, typer.Option(help="With --chat: the system's turn.")] = None,
    layout: Annotated[str, typer.Option(help="How to spread the model, such as tp2.")] = "single",
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    step: Step = None,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            min=1, help="Tokens to write at most.", show_default=f"{MAX_NEW_TOKENS}; {MAX_NEW_TOKENS_CHAT} with --chat"
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = TEMPERATURE,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the K likeliest tokens; 0 = among all.")] = TOP_K,
    top_p: Annotated[
        float, typer.Option(help="Choose among the likeliest tokens that make up this probability; 1 = among all.")
    ] = TOP_P,
    stop: Annotated[list[str] | None, typer.Option(help="End before this text; may be repeated.")] = None,
    seed: Annotated[int, typer.Option(help="Fixes the choices.")] = SEED,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Prompts of --prompts computed together.")
    ] = GenerateRequest.batch_size,
    debug: Debug = False,
) -> None:
    """Continue a text with a trained model, answer a file of prompts, or chat.

    Example: fivefold generate runs/demo --prompt "def "
    """
    from fivefold.generation import start

    request = GenerateRequest(
        model=model, prompt=prompt, prompts=prompts, out=out, chat=chat, system=system, layout=layout, step=step,
        max_new_tokens=max_new_tokens or (MAX_NEW_TOKENS_CHAT if chat else MAX_NEW_TOKENS), temperature=temperature,
        top_k=top_k, top_p=top_p, stop=tuple(stop or ()), seed=seed, batch_size=batch_size,
    )  # fmt: skip
    start(request, device=device.value)


def evaluate(
    model: RunOrModel,
    text: Annotated[
        str | None,
        typer.Option(
            metavar="PATH",
            help="Text or data files, as data.train.path names them.",
            show_default="the run's validation rows",
        ),
    ] = None,
    format: Annotated[str, typer.Option(help="Format of --text, as data.train.format.")] = "auto",
    text_key: Annotated[str, typer.Option(help="Key of the text of --text, as data.train.text_key.")] = "text",
    tasks: Annotated[
        list[str] | None,
        typer.Option(help="Tasks of lm-eval by name, or a folder of your own; several with commas, or repeated."),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in the prompt of a task.", show_default="the task's")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task at most.", show_default="all")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts of tasks through the chat template.")] = False,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Requests of tasks computed together.")
    ] = EvaluateRequest.batch_size,
    layout: Annotated[str, typer.Option(help="How to spread the model, such as tp2.")] = "single",
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    step: Step = None,
    seq_length: Annotated[
        int | None, typer.Option(min=2, help="Tokens of a row of text.", show_default="the run's; else up to 2048")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens of text at most.", show_default="all; eval.max_tokens of a run's")
    ] = None,
    json: Json = None,
    debug: Debug = False,
) -> None:
    """Measure a trained model: the perplexity of a text, and tasks of lm-eval.

    Example: fivefold evaluate runs/demo --text notes.txt
    """
    from fivefold.evaluation.report import EvaluateReport

    names = tuple(name.strip() for listed in tasks or () for name in listed.split(",") if name.strip())
    request = EvaluateRequest(
        model=model, text=text, format=format, text_key=text_key, layout=layout, step=step, seq_length=seq_length,
        max_tokens=max_tokens, tasks=names, num_fewshot=num_fewshot, limit=limit, chat=chat, batch_size=batch_size,
    )  # fmt: skip
    found = run_once(
        "fivefold.evaluation.run", {"evaluate": asdict(request)}, layout=layout, device=device.value, what="evaluate"
    )
    write(EvaluateReport.of(found), json=json)


_MOST = 20  # files named in a line


class DType(StrEnum):
    """The type of the stored weights."""

    BF16, FP16, FP32 = "bf16", "fp16", "fp32"


def export(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo, or its copy: s3://bucket/runs/demo.")
    ],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="The folder to write.")],
    step: Annotated[int | None, typer.Option(min=0, help="Step of the checkpoint. Default: the newest.")] = None,
    best: Annotated[
        bool, typer.Option("--best", help="The step of the best validation; checkpoint.keep_best keeps it.")
    ] = False,
    dtype: Annotated[
        DType | None, typer.Option(help="Type of the weights. Default: that of the model the run started from.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the model folder OUT.")] = False,
    merge: Annotated[bool, typer.Option("--merge", help="Put a run's adapter into the weights of its model.")] = False,
    push: Annotated[
        str | None, typer.Option(metavar="ORG/NAME", help="Upload OUT to this model repository of the hub.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Refuse a public repository. A new one is private by default.")
    ] = False,
    public: Annotated[
        bool, typer.Option("--public", help="Make a new repository public, and refuse a private one.")
    ] = False,
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch to push to. Default: the main one.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a run's model as a plain Hugging Face folder.

    A run with an adapter gives a folder of PEFT, or the whole model with --merge.

    Example: fivefold export runs/demo my-model
    """
    imported("fivefold.checkpoint.export")
    from fivefold.checkpoint.export import export, lacking

    free, to = room(), repository(push, private=private, revision=revision, public=public)
    done = export(
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


def report(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run folder, such as runs/demo.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: RUN/report.html.")] = None,
    debug: Debug = False,
) -> None:
    """Write one offline HTML page of a run: curves, who holds what, what is sent.

    Says what fivefold plan expected of a step, beside what was measured.

    Example: fivefold report runs/demo
    """
    from fivefold.planner.of_run import expected
    from fivefold.report.run import main

    path = main(run, out, expect=expected, tell=say)
    say(f"{path}: {path.stat().st_size / 1000:.0f} kB, one file that opens anywhere and fetches nothing")
