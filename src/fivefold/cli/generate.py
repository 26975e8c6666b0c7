"""`fivefold generate`."""

from enum import StrEnum
from typing import Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.generation import SEED, TEMPERATURE, TOP_K, GenerateRequest


class Device(StrEnum):
    """Where to compute."""

    AUTO, CPU, CUDA = "auto", "cpu", "cuda"


def generate(
    model: Annotated[
        str,
        typer.Argument(
            metavar="RUN_OR_MODEL", help="A run folder or its s3:// copy, a Hugging Face folder or a hub id."
        ),
    ],
    prompt: Annotated[str, typer.Option(help="The text to continue.")],
    layout: Annotated[str, typer.Option(help="How to spread the model, such as tp2.")] = "single",
    device: Annotated[Device, typer.Option(help="auto takes CUDA where there is one.")] = Device.AUTO,
    step: Annotated[int | None, typer.Option(help="Which checkpoint of a run.", show_default="the newest")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Tokens to write at most.")] = 100,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token each time.")] = TEMPERATURE,
    top_k: Annotated[int, typer.Option(min=0, help="Choose among the K likeliest tokens; 0 = among all.")] = TOP_K,
    seed: Annotated[int, typer.Option(help="Fixes the choices.")] = SEED,
    debug: Debug = False,
) -> None:
    """Continue a text with a trained model.

    Example: fivefold generate runs/demo --prompt "def "
    """
    from fivefold.generation.launch import start

    request = GenerateRequest(
        model=model, prompt=prompt, layout=layout, step=step, max_new_tokens=max_new_tokens, temperature=temperature,
        top_k=top_k, seed=seed,
    )  # fmt: skip
    start(request, device=device.value)
