"""`fivefold generate` on one rank: open the model, spread it, continue a prompt, a file of them, or a conversation."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

from fivefold.core.terminal import shown
from fivefold.generation import GenerateRequest
from fivefold.generation.conversation import Chat, converse
from fivefold.generation.opened import Opened, open_model
from fivefold.generation.prompts import answer_file
from fivefold.generation.text import pieces
from fivefold.launch.once import as_worker, standard_input
from fivefold.launch.world import World


def generate(request: GenerateRequest, world: World, *, write: Callable[[str], object] | None = None) -> str:
    """Continue the prompt over a joined world; every rank calls it, and returns the new text.

    Rank 0 passes the prompt and then the text, piece by piece, to `write`; of a prompt of the chat template the text
    alone. Raises `UserError` when the model, the step or the layout does not fit.
    """
    opened = _open(request, world)
    assert request.prompt is not None
    show = write if write and world.is_first else lambda text: None
    options: dict[str, Any] = {"max_new_tokens": request.max_new_tokens, "seed": request.seed, **request.drawing}
    if request.chat:
        coming = Chat(opened, request).answer(request.prompt)
    else:
        show(request.prompt)
        ids = opened.prompt(request.prompt)
        coming = pieces(opened.model, opened.tokenizer, ids, opened.ends, stop=request.stop, **options)
    text = []
    for piece in coming:
        show(piece)
        text.append(piece)
    return "".join(text)


def on_rank(request: Mapping[str, Any], world: World) -> str:
    """The text of `generate`, also on standard output unless `request["quiet"]`; empty where there is no one text."""
    asked, quiet = GenerateRequest(**request["generate"]), request["quiet"]
    if asked.prompts is not None:
        answer_file(_open(asked, world), asked, world)
        return ""
    if asked.prompt is None:
        converse(Chat(_open(asked, world), asked), world, standard_input(request), to_screen)
        return ""
    text = generate(asked, world, write=None if quiet else to_screen)
    if world.is_first and not quiet:
        print(flush=True)
    return text


def _open(request: GenerateRequest, world: World) -> Opened:
    converses = request.chat or request.prompt is None  # records of a file may have turns
    return open_model(
        request.model, world, layout=request.layout, step=request.step, verb="generate", converses=converses
    )


on_worker = as_worker(on_rank)


def to_screen(text: str) -> None:
    """Write at once; a character that the screen's encoding does not have becomes `?`.

    On a terminal no character is a command; in a file or a pipe the text is exactly what the model wrote.
    """
    text = shown(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()
