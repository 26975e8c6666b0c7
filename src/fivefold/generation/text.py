"""From prompts to tokens, and from tokens to streamed text."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.data.tokenizer import put_bos
from fivefold.data.tokenizer_probe import template_ids
from fivefold.generation.decode import KvCache, decode, ready

_INCOMPLETE = "\ufffd"  # decoded form of bytes that are no whole character yet


def encode_prompt(
    tokenizer: Any, prompt: str, eos_token_ids: Collection[int], bos_token_ids: tuple[int, ...] | None = None
) -> Tensor:
    """The prompt as int64 [1, T], with `bos_token_ids` in front as in training; None: its tokenizer's own BOS.

    `tokenizer`: one of `tokenizers`, or one of `transformers`, which adds its own tokens. An empty prompt is the
    beginning of a document: BOS, else the EOS of the document before. Raises `UserError` if that is unknown too.
    """
    if hasattr(tokenizer, "apply_chat_template"):  # a tokenizer of transformers
        bos_token_ids, ids = (), list(tokenizer(prompt)["input_ids"])
    else:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    bos = template_ids(tokenizer) if bos_token_ids is None else bos_token_ids
    while ids and ids[-1] in eos_token_ids:  # a prompt may end with EOS
        ids = ids[:-1]
    ids = put_bos(ids, bos) or list(bos) or list(eos_token_ids)[:1]
    if not ids:
        raise UserError("the prompt is empty", fix="write a few words to continue")
    return torch.tensor([ids], dtype=torch.int64)


def pieces(
    model: Any,
    tokenizer: Any,
    prompt: Tensor,
    eos_token_ids: Collection[int],
    *,
    stop: Sequence[str] = (),
    seen: KvCache | None = None,
    **options: Any,
) -> Iterator[str]:
    """The text with which `model` continues `prompt` (int64 [1, T]), streamed in whole characters.

    `tokenizer`: a `tokenizers.Tokenizer`; `stop`: texts that end it and are left out; `seen`: tokens that the model has
    read already, which are not computed again; `options`: those of `decode`. Every rank consumes all pieces. The model
    is left ready for the next training step.
    """
    stream = StoppedText(tokenizer, stop)
    with ready(model):
        for token in decode(model, prompt, eos_token_ids=eos_token_ids, seen=seen, **options):
            if token not in eos_token_ids and (piece := stream.push(token)):
                yield piece
            if stream.is_over:
                return
    yield stream.finish()


class TextStream:
    """The text of a growing list of tokens, streamed in whole characters.

    Only the tokens since the last two character ends are decoded again, so the cost per token is constant however long
    the text grows. A piece is always decoded after its left neighbour, which decides about spaces.
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
        """The remaining text, with incomplete characters as the decoder writes them."""
        text, self._pending = self._new_text(), []
        return text

    def _new_text(self) -> str:
        before = self._tokenizer.decode(self._before)
        return str(self._tokenizer.decode(self._before + self._pending)[len(before) :])


class StoppedText:
    """A `TextStream` up to the first stop text, which is left out: a possible beginning of one is held back."""

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        """`tokenizer`: a `tokenizers.Tokenizer`; `stop`: no empty ones."""
        self._stream, self._stop, self._held = TextStream(tokenizer), tuple(stop), ""
        self.is_over = False

    def push(self, token: int) -> str:
        """The text that is certain after `token`."""
        return self._certain(self._stream.push(token))

    def finish(self) -> str:
        """The remaining text."""
        if self.is_over:
            return ""
        text, self._held = self._certain(self._stream.finish()) + self._held, ""
        return text

    def _certain(self, text: str) -> str:
        text = self._held + text
        found = min((at for stop in self._stop if (at := text.find(stop)) >= 0), default=None)
        if found is not None:
            self.is_over, self._held = True, ""
            return text[:found]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """The number of characters at the end of `text` with which `stop` begins."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if stop.startswith(text[-n:])), 0)
