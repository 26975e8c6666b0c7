"""Text from a trained model, under any layout. No torch until it is asked for."""

from typing import Any


def main(model: str, prompt: str, *, layout: str = "single", device: str = "auto", **options: Any) -> str:
    """Continue `prompt` on the screen, over as many workers as `layout` says; returns the new text.

    `options` are those of `GenerateRequest`. Inside a world that is there already (torchrun), uses that world.
    Raises `UserError` when the model, the layout or an option does not fit.
    """
    from fivefold.generation.launch import start

    return start({"model": model, "prompt": prompt, "layout": layout, **options}, device=device)
