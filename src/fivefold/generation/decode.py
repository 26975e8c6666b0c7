"""From a prompt to tokens, token by token with a key/value cache, and back to text; on a model under any layout.

All ranks run the same forward and take the token of rank 0, so that no rank can stop earlier than another. FSDP
gathers by itself; a model that is small enough is gathered once. Under tensor and context parallelism activations are
replicated: a single token cannot be split along the sequence.
"""

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from transformers import DynamicCache

from fivefold.core.errors import UserError
from fivefold.data.tokenizer import put_bos, template_ids
from fivefold.parallel import passes
from fivefold.parallel.data import COMPUTE_DTYPES
from fivefold.parallel.plan import keeps_gathered
from fivefold.parallel.state import ParallelState, state_of

GATHER_ONCE_BYTES = 2 * 2**30  # parameters of a rank, gathered, that are kept for a whole text
_INCOMPLETE = "\ufffd"  # what a decoder writes for bytes that are no whole character yet


def encode_prompt(
    tokenizer: Any, prompt: str, eos_token_ids: Collection[int], bos_token_ids: tuple[int, ...] | None = None
) -> Tensor:
    """The prompt as int64 [1, T], with `bos_token_ids` in front as in training; None: what its tokenizer puts there.

    `tokenizer`: one of `tokenizers`, or one of `transformers`, which puts its own tokens around. An empty prompt is the
    beginning of a document: BOS, else the end of the document before. Raises `UserError` when that is not known either.
    """
    if hasattr(tokenizer, "apply_chat_template"):  # of transformers
        bos_token_ids, ids = (), list(tokenizer(prompt)["input_ids"])
    else:
        ids = tokenizer.encode(prompt, add_special_tokens=False).ids
    bos = template_ids(tokenizer) if bos_token_ids is None else bos_token_ids
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


def decode(
    model: Any,
    input_ids: Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    seed: int = 0,
    eos_token_ids: Collection[int] = (),
) -> Iterator[int]:
    """Yield the tokens that continue `input_ids` (int64 [1, T], T > 0), an end-of-text token last if one comes.

    `temperature` 0 takes the likeliest token; otherwise tokens are drawn from the `top_k` likeliest (0: all), the
    same ones for the same `seed` whatever the layout. Every rank iterates to the end, or closes the iterator at the
    same place. The model must be in the state that `ready` leaves it in.
    """
    generator = torch.Generator().manual_seed(seed)
    cache = DynamicCache()
    device = next(model.parameters()).device
    ids_BT, past = input_ids.to(device), 0
    for _ in range(max_new_tokens):
        logits_V = next_logits(model, ids_BT, cache=cache, past=past)
        token = _agreed(choose(logits_V, temperature, top_k, generator), device)
        yield token
        if token in eos_token_ids:
            return
        past += ids_BT.shape[1]
        ids_BT = torch.tensor([[token]], device=device)


@torch.no_grad()
def next_logits(model: Any, ids_BT: Tensor, *, cache: Any = None, past: int = 0) -> Tensor:
    """Logits [V] of the token after the last one; `past` tokens are in the cache already, and `ids_BT` joins them."""
    positions_BT = torch.arange(past, past + ids_BT.shape[1], device=ids_BT.device).unsqueeze(0)
    logits_BTV = passes.logits(
        model, ids_BT, positions_BT, past_key_values=cache, use_cache=cache is not None, logits_to_keep=1
    )
    return logits_BTV[0, -1]


def choose(logits_V: Tensor, temperature: float, top_k: int, generator: torch.Generator) -> int:
    """The likeliest token, or one drawn by inverting the cumulative distribution in fp64 with one uniform number."""
    if temperature == 0:
        return int(logits_V.argmax())
    scores_V = logits_V.double().cpu() / temperature
    if 0 < top_k < scores_V.numel():
        lowest = scores_V.topk(top_k).values[-1]
        scores_V = scores_V.masked_fill(scores_V < lowest, float("-inf"))
    cumulative_V = scores_V.softmax(-1).cumsum(-1)
    uniform = torch.rand((), generator=generator, dtype=torch.float64) * cumulative_V[-1]
    return int(torch.searchsorted(cumulative_V, uniform, right=True).clamp(max=scores_V.numel() - 1))


@contextmanager
def ready(model: nn.Module) -> Iterator[None]:
    """Set a parallelized model up for `decode`, and back for training as it was: mode, shards, sequence parallelism."""
    state = state_of(model)
    was_training = model.training
    with ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # or every length would compile anew
        stack.enter_context(state.whole_sequences())
        stack.enter_context(_gathered(model, state))
        model.eval()
        try:
            yield
        finally:
            model.train(was_training)


@contextmanager
def _gathered(model: nn.Module, state: ParallelState) -> Iterator[None]:
    """Keep small models gathered inside; leave every unit sharded and its own rule in force."""
    units = {unit.name: model.get_submodule(unit.name) for unit in state.plan.units}
    once = gathered_bytes(state) <= GATHER_ONCE_BYTES
    try:
        for unit in units.values():
            assert isinstance(unit, FSDPModule)
            if once:
                unit.set_reshard_after_forward(False, recurse=False)
                unit.unshard()
        yield
    finally:
        for name, unit in units.items():
            assert isinstance(unit, FSDPModule)
            unit.set_reshard_after_forward(not keeps_gathered(state.plan.layout, name), recurse=False)
            unit.reshard()


def gathered_bytes(state: ParallelState) -> int:
    """Bytes of this rank's parameters when FSDP has gathered all of them."""
    numel = sum(prod(state.plan.gathered_shape(name)) for name in state.plan.shards if state.plan.holds(name))
    return numel * COMPUTE_DTYPES[state.plan.layout.precision].itemsize


def _agreed(token: int, device: torch.device) -> int:
    """The token of rank 0, on every rank: a last bit that differs must not send ranks separate ways."""
    if dist.get_world_size() == 1:
        return token
    shared = torch.tensor(token, device=device)
    dist.broadcast(shared, src=0)
    return int(shared)
