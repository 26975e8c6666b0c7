"""From tokens to the following tokens, with a key/value cache, on a model under any layout.

All ranks run the same forward and take the tokens of rank 0, so that no rank can stop earlier than another. FSDP
gathers as usual; a small enough model is gathered once. Under tensor and context parallelism activations are
replicated: a single token cannot be split along the sequence.

Texts of unequal lengths form a batch with padding in front. Padding is a document of its own, as in training, and no
token sees it: a text gets the same tokens as alone.

Legend: B texts, T tokens of each in a forward, V vocabulary.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache

from fivefold.core.errors import UserError
from fivefold.generation.sampling import Sampling, TokenChooser
from fivefold.parallel import passes
from fivefold.parallel.dtypes import COMPUTE_DTYPES
from fivefold.parallel.fsdp.copies import Copies
from fivefold.parallel.fsdp.runtime import leave_after_forward, reshard
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.state import ParallelState, state_of

GATHER_ONCE_BYTES = 2 * 2**30  # most bytes of a rank's parameters to keep gathered for a whole text
_PAD = 0  # any token id: no token sees padding


class KvCache:
    """Texts that a model has read: `ids` of a single text (empty for a batch), and the keys and values of all."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.cache = DynamicCache()
        self.length = 0  # tokens of each text, padding included

    def reuse(self, ids: Sequence[int]) -> int:
        """Drop the tokens after the common beginning with `ids`. Returns the number kept: fewer than `ids` has."""
        same = next((at for at, (a, b) in enumerate(zip(self.ids, ids, strict=False)) if a != b), len(self.ids))
        same = min(same, len(ids) - 1)
        self.cache.crop(same - self.length)  # a negative number
        self.ids, self.length = self.ids[:same], same
        return same


def decode(
    model: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    eos_token_ids: Collection[int] = (),
    seen: KvCache | None = None,
) -> Iterator[int]:
    """Yield the tokens that continue `input_ids` (int64 [1, T], T > 0), an end-of-text token last if one comes.

    `temperature`, `top_k`, `top_p`: see `Sampling`; `model.generation_config` may change the probabilities. The same
    `seed` draws the same tokens under any layout. `seen`: tokens that the model has read; a common beginning with
    `input_ids` is not computed again, and it is updated. Every rank iterates to the end, or closes the iterator at the
    same place. The model must be in the state set by `ready`.
    """
    steps = decode_rows(
        model, input_ids.tolist(), max_new_tokens=max_new_tokens, seeds=[seed], seen=seen,
        sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
        is_over=lambda _, token: token in eos_token_ids,
    )  # fmt: skip
    for step in steps:
        yield step[0][1]


def decode_rows(
    model: Any,
    rows: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    sampling: Sampling,
    seeds: Sequence[int],
    is_over: Callable[[int, int], bool],
    seen: KvCache | None = None,
) -> Iterator[list[tuple[int, int]]]:
    """Yield, step by step, (number of a text, its next token) for each unfinished text of `rows`, in order.

    `is_over(number, token)` decides, given the new token, if a text ends with it; it is called once per token, with the
    same result on every rank. A finished text leaves the batch. `seeds`: one per text. `seen`: only for a single text.
    Otherwise as `decode`.
    """
    _check_positions(model, rows)
    seen, device = seen or KvCache(), next(model.parameters()).device
    choices = [
        TokenChooser(model, row, sampling, seed=seed, max_new_tokens=max_new_tokens)
        for row, seed in zip(rows, seeds, strict=True)
    ]
    past = seen.reuse(rows[0]) if len(rows) == 1 else 0
    ids_BT, padding = padded([row[past:] for row in rows])
    alive = list(range(len(rows)))
    for _ in range(max_new_tokens):
        for part_BT in _parts(model, ids_BT, seen.length):
            logits_BV = next_logits(model, part_BT.to(device), cache=seen.cache, past=seen.length, padding=padding)
            seen.length += part_BT.shape[1]
        seen.ids += ids_BT[0].tolist() if len(rows) == 1 else []
        chosen = [choices[row].choose(logits_V) for logits_V, row in zip(logits_BV, alive, strict=True)]
        tokens = _agreed(chosen, device)
        step = list(zip(alive, tokens, strict=True))
        for row, token in step:
            choices[row].add(token)
        yield step
        left = [place for place, (row, token) in enumerate(step) if not is_over(row, token)]
        if not left:
            return
        if len(left) < len(alive):
            seen.cache.batch_select_indices(torch.tensor(left, device=device))
            alive, padding = [alive[place] for place in left], [padding[place] for place in left]
        ids_BT = torch.tensor([[tokens[place]] for place in left])


def _check_positions(model: Any, rows: Sequence[Sequence[int]]) -> None:
    """Raise `UserError` for a text that leaves no position for another token."""
    positions, longest = getattr(model.config.get_text_config(), "max_position_embeddings", None), max(map(len, rows))
    if positions and longest >= positions:
        raise UserError(
            f"a prompt of {longest:,} tokens, and the model has {positions:,} positions (max_position_embeddings)",
            fix="shorten the prompt",
            more="fivefold docs howto/generate",
        )


def padded(rows: Sequence[Sequence[int]]) -> tuple[Tensor, list[int]]:
    """Texts as int64 [B, T] with padding in front, and the number of padding tokens of each."""
    longest = max(map(len, rows))
    padding = [longest - len(row) for row in rows]
    return torch.tensor([[_PAD] * pad + list(row) for row, pad in zip(rows, padding, strict=True)]), padding


def _parts(model: Any, ids_BT: Tensor, past: int) -> Sequence[Tensor]:
    """Split tokens to join a cache: after its first tokens, none may cross a chunk of chunked attention."""
    chunk = getattr(model.config.get_text_config(), "attention_chunk_size", None)
    if not (past and chunk):
        return [ids_BT]
    first = min(ids_BT.shape[1], chunk - past % chunk)
    return [ids_BT[:, :first], *(part for part in torch.split(ids_BT[:, first:], chunk, 1) if part.numel())]


@torch.no_grad()
def next_logits(
    model: Any, ids_BT: Tensor, *, cache: Any = None, past: int = 0, padding: Sequence[int] = (), keep: int = 1
) -> Tensor:
    """Logits [B, V] of the token after the last one; with `keep`, [B, keep, V] of those after the last `keep`.

    `past` tokens are in the cache already, and `ids_BT` joins them. `padding`: tokens in front of each text."""
    (rows, length), pads = ids_BT.shape, torch.tensor(padding or [0] * len(ids_BT))
    places_BT = torch.arange(past, past + length).expand(rows, -1)
    before_BT = torch.where(places_BT < pads[:, None], 0, pads[:, None])
    logits_BTV = passes.logits(
        model, ids_BT, (places_BT - before_BT).to(ids_BT.device), past_key_values=cache, use_cache=cache is not None,
        logits_to_keep=keep, cu_seqlens=_bounds(pads, past + length) if any(padding) else None,
    )  # fmt: skip
    return logits_BTV[:, -1] if keep == 1 else logits_BTV


def _bounds(pads: Tensor, length: int) -> Tensor:
    """int32 on the CPU: the starts of padding and of texts, together `length` tokens each, and the end of all."""
    starts = torch.arange(len(pads) + 1) * length
    bounds: Tensor = torch.unique(torch.cat([starts, starts[:-1] + pads]))
    return bounds.int()


@contextmanager
def ready(model: nn.Module) -> Iterator[None]:
    """Prepare a parallelized model for `decode`, then restore it for training: mode, shards, sequence parallelism."""
    state = state_of(model)
    was_training = model.training
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # otherwise every length would compile again
        stack.enter_context(state.whole_sequences())
        stack.enter_context(_gathered(model, state))
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


@contextmanager
def _gathered(model: nn.Module, state: ParallelState) -> Iterator[None]:
    """Keep small models gathered inside; afterwards every unit is sharded, with its own rule."""
    units = {unit: model.get_submodule(unit.name) for unit in state.plan.feature(FsdpPlan).sharded}
    once = gathered_bytes(state) <= GATHER_ONCE_BYTES
    try:
        for module in units.values():
            assert isinstance(module, FSDPModule)
            if once:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
        state.live(Copies).hold()
        yield
    finally:
        state.live(Copies).put_back()
        for unit, module in units.items():
            assert isinstance(module, FSDPModule)
            leave_after_forward(module, unit, state.mesh)
        reshard(model)


def gathered_bytes(state: ParallelState) -> int:
    """Bytes of this rank's parameters with all of them gathered by FSDP."""
    numel = sum(
        prod(state.placement.gathered_shape(name)) for name in state.placement.shards if state.placement.holds(name)
    )
    return numel * COMPUTE_DTYPES[state.plan.layout.precision].itemsize


def _agreed(tokens: list[int], device: torch.device) -> list[int]:
    """The tokens of rank 0, on every rank: a difference in the last bit must not make ranks diverge."""
    if dist.get_world_size() == 1:
        return tokens
    shared = torch.tensor(tokens, device=device)
    dist.broadcast(shared, src=0)
    return list(shared.tolist())
