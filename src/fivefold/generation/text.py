"""From a prompt to tokens, and from tokens back to text as it comes."""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.data.tokenizer import put_bos, template_ids
from fivefold.generation.decode import decode, ready

_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no whole character yet


class TextStream:
    """Text of a growing list of tokens, given out in whole characters.

    Only the tokens since the last two places where a character ended are decoded again, so the cost per token stays
    the same however long the text grows; a piece is always decoded behind its left neighbour, whose presence decides
    about spaces.
    """

    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`."""
        self._tokenizer = tokenizer
        self._before: list[int] = []
        self._pending: list[int] = []

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is still incomplete."""
        self._pending.append(token)
        text = self._new_text()
        if text.endswith(_INCOMPLETE):
            return ""
        if text:
            self._before, self._pending = self._pending, []
        return text

    def finish(self) -> str:
        """What is left, incomplete characters as the decoder writes them."""
        text, self._pending = self._new_text(), []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return str(self._tokenizer.decode(self._before + self._pending)[len(before) :])


def encode_prompt(
    tokenizer: Any, prompt: str, eos_token_ids: Collection[int], bos_token_ids: tuple[int, ...] | None = None
) -> Tensor:
    """The prompt as int64 [1, T], with `bos_token_ids` in front as in training; None: what its tokenizer puts there.

    An empty prompt is the beginning of a document: BOS, else the end of the document before. Raises `UserError` when
    that is not known either.
    """
    bos = template_ids(tokenizer) if bos_token_ids is None else bos_token_ids
    ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    while ids and ids[-1] in eos_token_ids:  # a prompt may say it
        ids = ids[:-1]
    ids = put_bos(ids, bos) or list(bos) or list(eos_token_ids)[:1]
    if not ids:
        raise UserError("the prompt is empty", fix="write a few words to continue")
    return torch.tensor([ids], dtype=torch.int64)


def pieces(model: Any, tokenizer: Any, prompt: Tensor, eos_token_ids: Collection[int], **options: Any) -> Iterator[str]:
    """The text with which `model` continues `prompt` (int64 [1, T]), in whole characters as they come.

    `tokenizer`: a `tokenizers.Tokenizer`; `options`: those of `decode`. Every rank takes them all. The model is left
    ready for the next training step.
    """
    stream = TextStream(tokenizer)
    with ready(model):
        for token in decode(model, prompt, eos_token_ids=eos_token_ids, **options):
            if token not in eos_token_ids and (piece := stream.push(token)):
                yield piece
    yield stream.finish()
