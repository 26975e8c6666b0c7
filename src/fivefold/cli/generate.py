"""`fivefold generate`."""

from enum import StrEnum
from typing import Annotated

import typer

from fivefold.cli.options import Debug, place
from fivefold.generation import (
    BATCH_SIZE,
    MAX_NEW_TOKENS,
    MAX_NEW_TOKENS_CHAT,
    SEED,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    GenerateRequest,
)


class Device(StrEnum):
    """The device to compute on."""

    AUTO, CPU, CUDA = "auto", "cpu", "cuda"


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="A run folder or its s3:// copy, a Hugging Face folder or a hub id."
        ),
    ],
    prompt: Annotated[str | None, typer.Option(help="The text to continue.", show_default=False)] = None,
    prompts: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Prompts, one a line; or .jsonl with prompt or messages. Answers are JSON lines, in order.",
            show_default=False,
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
    system: Annotated[str | None, typer.Option(help="With --chat: the system's turn.", show_default=False)] = None,
    layout: Annotated[str, typer.Option(help="How to spread the model, such as tp2.")] = "single",
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    step: Annotated[
        int | None, typer.Option(help="Step of the checkpoint of a run.", show_default="the newest")
    ] = None,
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
    stop: Annotated[
        list[str] | None, typer.Option(help="End before this text; may be repeated.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Fixes the choices.")] = SEED,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts of --prompts computed together.")] = BATCH_SIZE,
    debug: Debug = False,
) -> None:
    """Continue a text with a trained model, answer a file of prompts, or chat.

    Example: fivefold generate runs/demo --prompt "def "
    """
    from fivefold.generation.launch import start

    request = GenerateRequest(
        model=model, prompt=prompt, prompts=prompts, out=out, chat=chat, system=system, layout=layout, step=step,
        max_new_tokens=max_new_tokens or (MAX_NEW_TOKENS_CHAT if chat else MAX_NEW_TOKENS), temperature=temperature,
        top_k=top_k, top_p=top_p, stop=tuple(stop or ()), seed=seed, batch_size=batch_size,
    )  # fmt: skip
    start(request, device=device.value)
