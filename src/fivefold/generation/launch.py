"""Starts generation, over workers or in the current world."""

from dataclasses import asdict

from fivefold.generation import GenerateRequest
from fivefold.launch.once import run_once


def start(request: GenerateRequest, *, device: str = "auto", quiet: bool = False) -> str:
    """Continue the text of `request`, over the workers of its layout; also print it unless `quiet`. Returns the new
    text of a prompt, and "" for a file of prompts and for a conversation.

    `device`: auto, cpu or cuda. Inside an existing world (torchrun), use that world. Raises `UserError` if the model,
    the layout or an option does not fit.
    """
    talks = request.prompt is None and request.prompts is None
    body = {"generate": asdict(request), "quiet": quiet}
    try:
        found = run_once(
            "fivefold.generation.run", body, layout=request.layout, device=device, what="generate", reads=talks
        )
    except KeyboardInterrupt:
        if not talks:
            raise
        print(flush=True)  # Ctrl-C ends a conversation
        return ""
    return str(found)
