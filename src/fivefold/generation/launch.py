"""Where generation runs."""

from dataclasses import asdict

from fivefold.generation import GenerateRequest
from fivefold.launch.once import run_once


def start(request: GenerateRequest, *, device: str = "auto", quiet: bool = False) -> str:
    """Continue what `request` says, over as many workers as the layout says; also on the screen unless `quiet`. Returns
    the new text of a prompt; nothing of a file of prompts, nor of a conversation.

    `device`: auto, cpu or cuda. Inside a world that is there already (torchrun), uses that world. Raises `UserError`
    when the model, the layout or an option does not fit.
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
        print(flush=True)  # the way to end a conversation
        return ""
    return str(found)
