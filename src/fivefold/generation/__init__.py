"""Text from a trained model, under any layout. No torch until it is asked for."""

# The defaults of the command and of the Python API. Small models repeat themselves when they always take the likeliest.
TEMPERATURE, TOP_K, SEED = 0.8, 50, 1234


def main(
    model: str,
    prompt: str,
    *,
    layout: str = "single",
    device: str = "auto",
    step: int | None = None,
    max_new_tokens: int = 100,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    seed: int = SEED,
    quiet: bool = False,
) -> str:
    """Continue `prompt`, on the screen unless `quiet`, over as many workers as `layout` says; returns the new text.

    `model`, `step` and the rest are those of `GenerateRequest`; `device`: auto, cpu or cuda. Inside a world that is
    there already (torchrun), uses that world. Raises `UserError` when the model, the layout or an option does not fit.
    """
    from fivefold.generation.launch import start

    request = {
        "model": model, "prompt": prompt, "layout": layout, "step": step, "max_new_tokens": max_new_tokens,
        "temperature": temperature, "top_k": top_k, "seed": seed,
    }  # fmt: skip
    return start(request, device=device, quiet=quiet)
