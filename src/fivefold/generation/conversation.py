"""Conversations: turns through the tokenizer's chat template, reusing the cache of earlier turns."""

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from fivefold.core.errors import UserError
from fivefold.data.chat import ChatTemplate
from fivefold.data.spans import Turn
from fivefold.generation import GenerateRequest
from fivefold.generation.decode import Seen
from fivefold.generation.opened import Opened
from fivefold.generation.text import pieces
from fivefold.launch.world import World
from fivefold.parallel.plain import of_first

HELP = "/reset forgets what was said, /exit ends (so do Ctrl-D and Ctrl-C)"


def asked_ids(opened: Opened, turns: Sequence[Turn], tools: Sequence[Any] | None = None) -> list[int]:
    """The tokens of a conversation up to the beginning of the assistant's answer: those of `apply_chat_template`, as in
    training. Raises `UserError`."""
    text = opened.info.template.render(turns, tools=tools, answer=True)
    if not (ids := opened.encode(text)):
        raise UserError(f"{opened.info.template.name} writes nothing of the conversation", fix="leave --chat out")
    return ids


def end_of_turn(template: ChatTemplate) -> str:
    """The end marker of a template's answers, such as `<|im_end|>`; empty if unknown. Extra text after the last answer
    is left out if it begins with the marker of earlier answers (Phi-3), and so is its lack (GLM-4.5)."""
    early, last = template.ends or ("", "")
    return early if not last or (early and last.startswith(early)) else last


def endings(opened: Opened) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Tokens and texts that end an answer, including the template's end of a turn."""
    ending = end_of_turn(opened.info.template)
    ids = opened.tokenizer.encode(ending, add_special_tokens=False).ids if ending else []
    if len(ids) == 1:
        return (*opened.ends, ids[0]), opened.stop
    return opened.ends, (*opened.stop, ending) if ending else opened.stop


class Chat:
    """A conversation of a user with a model. Every rank has one, and makes the same calls."""

    def __init__(self, opened: Opened, request: GenerateRequest) -> None:
        self.opened, self.request, self.seen = opened, request, Seen()
        self.ends, stop = endings(opened)
        self.stop = (*request.stop, *stop)
        self.turns: list[Turn] = []
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        system = self.request.system
        self.turns = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """Stream the answer to the user's text; then both join the conversation. Raises `UserError` for a conversation
        that the template does not take, and leaves it unchanged."""
        turns = [*self.turns, {"role": "user", "content": text}]
        ids, said = torch.tensor([asked_ids(self.opened, turns)]), []
        for piece in pieces(
            self.opened.model, self.opened.tokenizer, ids, self.ends, stop=self.stop, seen=self.seen,
            max_new_tokens=self.request.max_new_tokens, seed=self.request.seed + len(turns) // 2,
            **self.request.drawing,
        ):  # fmt: skip
            said.append(piece)
            yield piece
        self.turns = [*turns, {"role": "assistant", "content": "".join(said)}]


def converse(chat: Chat, world: World, lines: Iterator[str], write: Callable[[str], object]) -> None:
    """Answer line after line until `/exit` or the end. The first rank reads `lines` and passes answers to `write`."""
    show = write if world.is_first else lambda text: None
    shows_prompt = world.is_first and sys.stdout.isatty()
    if shows_prompt:
        show(f"{HELP}\n")
    while True:
        if shows_prompt:
            show("> ")
        line = of_first(next(lines, None) if world.is_first else None)
        if line is None or line.strip() == "/exit":
            if line is None and shows_prompt:
                show("\n")
            return
        if line.strip() == "/reset":
            chat.reset()
        elif line.strip():
            try:
                for piece in chat.answer(line):
                    show(piece)
            except UserError as error:
                show(str(error))
            show("\n")
