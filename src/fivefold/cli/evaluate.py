"""`fivefold evaluate`."""

from dataclasses import asdict
from typing import Annotated

import typer

from fivefold.cli.generate import Device
from fivefold.cli.options import Debug, Json
from fivefold.evaluation import BATCH_SIZE, EvaluateRequest


def evaluate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="A run folder or its s3:// copy, a Hugging Face folder or a hub id."
        ),
    ],
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
        typer.Option(
            help="Tasks of lm-eval by name, or a folder of your own; several with commas, or repeated.",
            show_default=False,
        ),
    ] = None,
    num_fewshot: Annotated[
        int | None, typer.Option(min=0, help="Examples in the prompt of a task.", show_default="the task's")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Samples of each task at most.", show_default="all")] = None,
    chat: Annotated[bool, typer.Option("--chat", help="Prompts of tasks through the chat template.")] = False,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests of tasks computed together.")] = BATCH_SIZE,
    layout: Annotated[str, typer.Option(help="How to spread the model, such as tp2.")] = "single",
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint of a run.", show_default="the newest")
    ] = None,
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
    from fivefold.launch.once import run_once
    from fivefold.report.table import write

    names = tuple(name.strip() for listed in tasks or () for name in listed.split(",") if name.strip())
    request = EvaluateRequest(
        model=model, text=text, format=format, text_key=text_key, layout=layout, step=step, seq_length=seq_length,
        max_tokens=max_tokens, tasks=names, num_fewshot=num_fewshot, limit=limit, chat=chat, batch_size=batch_size,
    )  # fmt: skip
    found = run_once(
        "fivefold.evaluation.run", {"evaluate": asdict(request)}, layout=layout, device=device.value, what="evaluate"
    )
    write(EvaluateReport.of(found), json=json)
