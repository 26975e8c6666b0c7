"""`fivefold generate` on one rank: open and parallelize the model, continue a prompt, a file, or a conversation."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.core.cache import say_aloud
from fivefold.core.text import listed, shown
from fivefold.generation import GenerateRequest
from fivefold.generation.opened import OpenModel, open_model
from fivefold.generation.prompts import Chat, answer_file, converse
from fivefold.generation.sampling import Sampling, not_used
from fivefold.generation.text import pieces
from fivefold.launch.once import as_worker, standard_input
from fivefold.launch.world import World


def generate(request: GenerateRequest, world: World, *, write: Callable[[str], object] | None = None) -> str:
    """Open the model and continue the prompt over a joined world; every rank calls it, and returns the new text. Raises
    `UserError` if the model, the step or the layout does not fit."""
    return continued(_open(request, world), request, world, write=write)


def continued(
    opened: OpenModel, request: GenerateRequest, world: World, *, write: Callable[[str], object] | None = None
) -> str:
    """The text that continues the prompt. Rank 0 passes the prompt and then the text, piece by piece, to `write`; with
    the chat template only the text."""
    assert request.prompt is not None
    show = write if write and world.is_first else lambda text: None
    options: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "seed": request.seed, **request.drawing}
    if request.chat:
        coming = Chat(opened, request).answer(request.prompt)
    else:
        show(request.prompt)
        ids = opened.prompt(request.prompt)
        stop = (*request.stop, *opened.stop)
        coming = pieces(opened.model, opened.tokenizer, ids, opened.ends, stop=stop, **options)
    text = []
    for piece in coming:
        show(piece)
        text.append(piece)
    return "".join(text)


def on_rank(request: Mapping[str, Any], world: World) -> str:
    """The text of `generate`, also printed unless `request["quiet"]`; empty unless there is exactly one text."""
    asked, quiet = GenerateRequest(**request["generate"]), request["quiet"]
    opened = _open(asked, world)
    if world.is_first and not quiet:
        say_not_used(opened, asked)
    if asked.prompts is not None:
        answer_file(opened, asked, world)
        return ""
    if asked.prompt is None:
        converse(Chat(opened, asked), world, standard_input(request), to_screen)
        return ""
    text = continued(opened, asked, world, write=None if quiet else to_screen)
    if world.is_first and not quiet:
        print(flush=True)
    return text


def _open(request: GenerateRequest, world: World) -> OpenModel:
    converses = request.chat or request.prompt is None  # records of a file may contain turns
    return open_model(
        request.model, world, layout=request.layout, step=request.step, verb="generate", converses=converses
    )


on_worker = as_worker(on_rank)


def say_not_used(opened: OpenModel, request: GenerateRequest) -> None:
    """Name the unused settings of the model's generation config, on standard error."""
    found = not_used(opened.model.generation_config, Sampling(**request.drawing), request.max_new_tokens)
    if found:
        said = listed([f"{key} {value}" for key, value in sorted(found.items())], 12)
        say_aloud(f"not used of the model's generation_config.json: {said} (fivefold docs howto/generate)")


def to_screen(text: str) -> None:
    """Write at once; characters that the screen's encoding lacks become `?`.

    On a terminal control characters are escaped; in a file or a pipe the text is exactly what the model wrote.
    """
    text = shown(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
