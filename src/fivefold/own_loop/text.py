"""Text that a parallelized model writes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fivefold.checkpoint.save import on_first_rank
from fivefold.core.errors import UserError
from fivefold.generation import SEED, TEMPERATURE, TOP_K
from fivefold.generation.decode import decode, ready
from fivefold.own_loop.model import READ_MORE, ParallelModel, check_parallel
from fivefold.training.batches import on_every_rank


def generate(
    model: ParallelModel,
    prompt: str | Tensor | Sequence[int],
    *,
    tokenizer: Any = None,
    max_new_tokens: int = 100,
    temperature: float = TEMPERATURE,
    top_k: int = TOP_K,
    seed: int = SEED,
    eos_token_ids: Sequence[int] | None = None,
) -> str | list[int]:
    """Continue `prompt` with a parallelized model: text with a `tokenizer` of `transformers` (or `tokenizers`), or
    tokens, [tokens] or [1, tokens], of which come tokens. Every rank passes the same, and gets the same."""
    check_parallel(model)
    ends = _end_tokens(model) if eos_token_ids is None else tuple(eos_token_ids)

    def read() -> Tensor:
        ids = _prompt_ids(prompt, tokenizer, ends)
        vocabulary = model.fivefold.plan.facts.vocabulary
        if not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise UserError(f"the prompt has tokens outside of the model's vocabulary of {vocabulary}", more=READ_MORE)
        for name, value, least in (
            ("max_new_tokens", max_new_tokens, 1), ("temperature", temperature, 0), ("top_k", top_k, 0),
        ):  # fmt: skip
            if not value >= least:
                raise UserError(f"{name} {value} is less than {least}", fix=f"{least} or more")
        return ids

    ids = on_every_rank(read)
    first = on_first_rank(lambda: ids.tolist())
    on_every_rank(lambda: _same_prompt(first, ids))
    options: Any = {"max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k or None, "seed": seed}
    with ready(model):
        tokens = list(decode(model, ids, eos_token_ids=ends, **options))
    if not isinstance(prompt, str):
        return tokens
    return str(tokenizer.decode([token for token in tokens if token not in ends]))


def _prompt_ids(prompt: str | Tensor | Sequence[int], tokenizer: Any, ends: tuple[int, ...]) -> Tensor:
    """int64 [1, T]."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise UserError("a text needs a tokenizer", fix="ff.generate(model, prompt, tokenizer=tokenizer)")
        from fivefold.generation.text import encode_prompt

        if hasattr(tokenizer, "apply_chat_template"):  # of transformers; encode_prompt takes one of tokenizers
            tokens = list(tokenizer(prompt)["input_ids"])
            while tokens and tokens[-1] in ends:
                tokens.pop()
            tokens = tokens or list(ends)[:1]
            if not tokens:
                raise UserError("the prompt is empty", fix="write a few words to continue")
            return torch.tensor([tokens], dtype=torch.int64)
        return encode_prompt(tokenizer, prompt, ends)
    ids: Tensor = torch.as_tensor(prompt)
    ids = ids.unsqueeze(0) if ids.ndim == 1 else ids
    if ids.ndim != 2 or len(ids) != 1 or not ids.numel() or ids.is_floating_point():
        raise UserError(
            f"the prompt is {ids.dtype} of shape {list(ids.shape)}",
            fix="pass the tokens of one text, int64 [tokens] or [1, tokens]; several one after the other",
            more=READ_MORE,
        )
    return ids.long().cpu()


def _same_prompt(first: list[list[int]], ids: Tensor) -> None:
    if ids.tolist() != first:
        raise UserError(
            "ranks were given different prompts", fix="every rank passes the same one: all compute it", more=READ_MORE
        )


def _end_tokens(model: Any) -> tuple[int, ...]:
    """Tokens that end a text for this model."""
    for settings in (getattr(model, "generation_config", None), model.config):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()
