"""The data flow between the parts of a block, found by running a copy of the model with stand-ins for its large parts.

The copy (`recorder.py`) runs a few tokens several times: once for the record that the roles of parameters follow from,
and again to find out what depends on the tokens, on random numbers, or on the length of a row.
"""

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from transformers import PreTrainedModel

from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy
from fivefold.models.facts import Counted
from fivefold.models.forwards import base_gives, behind_padding, hand_on_cu_seqlens, head_only
from fivefold.models.record import WATCHED, BlockTrace, MixesTokens, Trace, Untraceable
from fivefold.models.recorder import ATTENTION, Recorder, register

PLACES = tuple(1024 << power for power in range(11))  # positions in a row at which a model's own count is tested

Run = Callable[..., Trace]


def trace(model: PreTrainedModel, anatomy: Anatomy) -> Trace:
    """Run a copy of `model`. Raises `Untraceable`."""
    register()
    traced = _traced(model, anatomy, [])
    if traced.forgetful and _traced(model, anatomy, traced.forgetful).forgetful:
        raise Untraceable("its attention is not given the bounds of packed documents")
    return traced


def _traced(model: PreTrainedModel, anatomy: Anatomy, forgetful: Sequence[tuple[str, str]]) -> Trace:
    copy = hf_internals.copy_on_meta(model, ATTENTION)
    copy.train()
    recorder = Recorder(copy, anatomy)
    hand_on_cu_seqlens(copy, forgetful)
    try:
        base = cast(PreTrainedModel, copy.get_submodule(anatomy.base))
    except AttributeError as error:
        raise Untraceable(f"it has no part {anatomy.base!r}, where its class says that its layers are") from error
    ids = torch.arange(recorder.tokens).unsqueeze(0) % model.config.get_text_config().vocab_size
    run = partial(recorder.run, base, input_ids=ids, use_cache=False, cu_seqlens=recorder.cu_seqlens)
    without_positions = run(stops_at_block=True)
    if recorder.longest:
        _check_masks(recorder, run, ids)
    whole = partial(run, position_ids=ids)
    traced = whole()
    if len(traced.blocks) != len(set(anatomy.layers)):
        raise Untraceable("its forward does not run every layer once")
    if not _same(without_positions.places, traced.places):
        traced.padding = _padding(run, ids, base.config.get_text_config().pad_token_id)
    traced.to_logits = _to_logits(recorder, copy, anatomy)
    _check_around(recorder, copy, anatomy, ids)
    traced.in_bf16 = _in_bf16(model, anatomy, forgetful)
    if traced.counts:
        traced.counted = Counted(traced.counts[0], _same_up_to(traced, whole))
    if traced.draws and not _same(traced.read, whole(noise=1).read):
        fix = "set its dropout, jitter or noise to 0 in model.overrides"
        raise Untraceable(f"{traced.draws[0]} computes with random numbers in training", fix=fix)
    return traced


def _in_bf16(model: PreTrainedModel, anatomy: Anatomy, forgetful: Sequence[tuple[str, str]]) -> list[BlockTrace]:
    """The blocks as they run in bf16; empty if the model's own code does not support that."""
    copy = hf_internals.copy_on_meta(model, ATTENTION)
    copy.train()
    recorder = Recorder(copy, anatomy, torch.bfloat16)
    hand_on_cu_seqlens(copy, forgetful)
    ids = torch.arange(recorder.tokens).unsqueeze(0) % model.config.get_text_config().vocab_size
    inputs = {"input_ids": ids, "position_ids": ids, "use_cache": False, "cu_seqlens": recorder.cu_seqlens}
    with suppress(Untraceable):
        return recorder.run(cast(PreTrainedModel, copy.get_submodule(anatomy.base)), **inputs).blocks
    return []


def _to_logits(recorder: Recorder, copy: PreTrainedModel, anatomy: Anatomy) -> tuple[str, ...]:
    """The modules with parameters between the base and the logits, in order; only the head if the trace cannot follow
    hidden states there."""
    hidden, found = torch.zeros(1, recorder.tokens, recorder.hidden), None
    with head_only(copy, anatomy) as logits_of, suppress(Untraceable):
        found = recorder.run(logits_of, hidden=hidden)
    if found is not None and found.dropouts:
        site, fix = found.dropouts[0], "set its dropout to 0 in model.overrides"
        raise Untraceable(
            f"{site.module or 'its forward'} drops between the last hidden states and the logits", fix=fix
        )
    return (anatomy.head,) if found is None else tuple(found.before)


def _check_around(recorder: Recorder, copy: PreTrainedModel, anatomy: Anatomy, ids: Tensor) -> None:
    """Check the model's forward around its base: training calls the base with tokens, and makes logits of some hidden
    states at a time. Raises `Untraceable` if the forward gives its base something else, or looks at tokens or at other
    hidden states to make the logits of one. If stand-ins cannot run it, the first training step will show it."""
    hidden = torch.randn(1, recorder.tokens, recorder.hidden, generator=torch.Generator().manual_seed(0))
    changed = hidden.clone()
    changed[0, WATCHED] += 1
    given, logits, base = list[dict[str, Any]](), list[Tensor](), copy.get_submodule(anatomy.base)
    for tokens, states in ((ids, hidden), (ids.flip(1), hidden), (ids, changed)):
        with base_gives(base, states) as took, suppress(Untraceable):
            recorder.run(lambda **inputs: logits.append(copy(**inputs).logits), input_ids=tokens, use_cache=False)
        given += took
    places = torch.arange(recorder.tokens).unsqueeze(0)
    with base_gives(base, hidden) as took, suppress(Untraceable):
        recorder.run(copy, input_ids=ids, position_ids=places, use_cache=False)
    positions = [kwargs["position_ids"] for kwargs in took if isinstance(kwargs.get("position_ids"), Tensor)]
    fix = f"do so inside of {anatomy.base}, whose forward is run in training, or in a layer"
    if any(kwargs.get("inputs_embeds") is not None for kwargs in given):
        raise Untraceable(f"its forward gives {anatomy.base} embeddings that it has made, and no tokens", fix=fix)
    if not all(_same([ids], [places]) for ids in positions):
        raise Untraceable(f"its forward gives {anatomy.base} other positions than it is given", fix=fix)
    if len(logits) < 3:
        return
    if not _same(logits[:1], logits[1:2]):
        raise Untraceable("its forward looks at the tokens again to make logits of hidden states", fix=fix)
    others = torch.arange(recorder.tokens) != WATCHED
    if not _same([logits[0][:, others]], [logits[2][:, others]]):
        raise MixesTokens("its forward lets tokens meet between the last hidden states and the logits")


def _padding(run: Run, ids: Tensor, padding: int | None) -> int:
    """The padding token, if the model counts its tokens from it. Raises `Untraceable` otherwise."""
    if padding is not None:
        ids = ids.clone()
        ids[0, WATCHED] = padding
        counted = behind_padding(ids, torch.arange(ids.shape[1]).unsqueeze(0), padding)
        found = [run(stops_at_block=True, input_ids=ids, position_ids=given).places for given in (None, counted)]
        if _same(*found):
            return int(padding)
    raise Untraceable("the positions that it counts for itself are not 0, 1, 2 and so on from a document's start")


def _check_masks(recorder: Recorder, run: Run, ids: Tensor) -> None:
    """Compare each `Mask` with a mask function that looks at tokens (Gemma 4's, for images), in a long row of text."""
    tokens, recorder.tokens = recorder.tokens, recorder.longest
    run(stops_at_block=True, input_ids=ids[:, torch.arange(recorder.tokens) % ids.shape[1]])
    recorder.tokens = tokens


def _same_up_to(traced: Trace, run: Run) -> int:
    """The longest row, found to an eighth, in which the model's own count of tokens changes nothing. Raises
    `Untraceable` if the count already matters in the shortest row tried."""

    def changes(place: int) -> bool:
        try:
            return not _same(traced.read, run(place=place).read)
        except Untraceable:  # the model has no entry for that place
            return True

    if changes(PLACES[0]):
        raise Untraceable(f"{traced.counts[0]} counts the tokens of a row, whatever documents are in it")
    other = next((place for place in PLACES[1:] if changes(place)), None)
    if other is None:
        return PLACES[-1]
    same = other // 2  # the place before it
    while other - same > same // 8:
        middle = (same + other) // 2
        same, other = (same, middle) if changes(middle) else (middle, other)
    return same


def _same(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """True if all tensors are equal. Tensors on meta, to which some models move ids, have no values to compare."""
    return len(one) == len(other) and all(
        x.shape == y.shape and (x.is_meta or torch.equal(x, y)) for x, y in zip(one, other, strict=True)
    )
