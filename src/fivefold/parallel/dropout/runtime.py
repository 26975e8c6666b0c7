"""Dropout by global numbers in a live model: what a rank drops follows from its tokens and features, not from its rank.

`begin_rows` hashes the tokens of a micro batch. Each site mixes them with a key of its own (`ops/dropout.py`).
A pipeline begins a micro batch again before its backward, whose recomputed forwards then drop the same.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.models.attention import DROPS
from fivefold.models.facts import DropoutSite
from fivefold.ops.dropout import (
    AttentionDrops,
    CallsServed,
    Drop,
    attention_drops,
    feature_hashes,
    key_of,
    of_site,
    token_hashes,
    uniform,
)
from fivefold.parallel.context.runtime import ContextParallel
from fivefold.parallel.dropout.spec import AddNoise, DropCalls, DropInput, DropOutput, DropProbabilities
from fivefold.parallel.dtypes import master_dtype
from fivefold.parallel.ranks import Blocks
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.parallel.tensor.runtime import TensorParallel

STEP = "dropout_step"  # in the state of a checkpoint


@dataclass
class Dropout(LivePart):
    """Dropout of one model on this rank. Every model has one; without sites it does nothing.

    `step`: number of the step, from 0. `is_on`: False where nothing is dropped, whatever the model's mode.
    """

    seed: int
    sites: Sequence[DropoutSite]
    tensor: TensorParallel
    context: ContextParallel
    device: torch.device
    dtype: torch.dtype = torch.float32  # of noise before it is added
    step: int = 0
    is_on: bool = True
    deterministic: ClassVar = {"is_on": False}
    _whole: Tensor | None = None  # hashes of the tokens of whole rows, [B, T]
    _entered: Tensor | None = None  # of this cp rank's tokens
    _own: Tensor | None = None  # of those whose hidden states this rank has
    _lengths: tuple[Tensor, ...] = ()  # of the documents of own and entered tokens, for NEFTune

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        tensor, context = state.live(TensorParallel), state.live(ContextParallel)
        dtype = master_dtype(state.plan.layout.precision)
        return cls(state.seed, state.plan.facts.dropouts, tensor, context, state.device, dtype)

    @property
    def has_sites(self) -> bool:
        return bool(self.sites)

    def begin_rows(
        self, shape: Sequence[int], places: Sequence[int], cu_seqlens: Tensor | None, *, ends_step: bool
    ) -> None:
        step, self.step = self.step, self.step + ends_step
        if not self.has_sites:
            return
        rows, length = shape[:2]
        self._whole = token_hashes(self.seed, step, places, length, self.device)
        self._own, self._entered = self._parts(self._whole)
        if any(site.kind == "embedding" for site in self.sites):
            lengths = _document_lengths(cu_seqlens, rows, length)
            self._lengths = self._parts(lengths.to(self.device, self.dtype))

    def after_step(self, *, skipped: bool) -> None:
        self.step += 1

    def _parts(self, whole: Tensor) -> tuple[Tensor, Tensor]:
        """Cut [B, T] to the tokens whose hidden states this rank has, and to those of this cp rank."""
        entered = self.context.cut(whole) if self.context.is_on else whole
        parts = self.tensor.size if self.tensor.sequence_parallel else 1
        return entered.chunk(parts, 1)[self.tensor.rank if parts > 1 else 0], entered

    def state(self) -> dict[str, Any]:
        return {STEP: self.step} if self.has_sites else {}

    def load(self, state: Mapping[str, Any]) -> None:
        self.step = int(state.get(STEP, 0))

    # ---- at a site ---------------------------------------------------------------------------------------------------

    def tokens_of(self, x: Tensor) -> Tensor:
        """Hashes of the tokens of `x` [.., D]: those of this rank, or all that enter a column-parallel region."""
        tokens = prod(x.shape[:-1])
        for hashes in (self._own, self._entered):
            if hashes is not None and hashes.numel() == tokens:
                return hashes.reshape(x.shape[:-1])
        raise UserError(
            f"dropout in training mode of {tokens:,} tokens, which are not those of a micro batch",
            fix="model.eval() before what is no training",
            more="fivefold docs explain/dropout",
        )

    def site(self, site: DropoutSite, features: Blocks) -> Callable[[Tensor, float], Tensor]:
        """Function that drops elements of a tensor [.., D] with a probability."""
        hashes, key = self._hashes(site, features), self._key(site)

        def drop(x: Tensor, p: float) -> Tensor:
            if not (p and self.is_on):
                return x
            _check(x, hashes, site)
            return Drop.apply(x, of_site(self.tokens_of(x), key), hashes, p)  # type: ignore[no-any-return,no-untyped-call]

        return drop

    def noise(self, site: DropoutSite) -> Callable[[Tensor, float, float], Tensor]:
        """Function that fills a tensor [.., D] with numbers between two bounds; with their mean where nothing drops."""
        hashes, key = self._hashes(site, ((0, site.features),)), self._key(site)

        def fill(x: Tensor, low: float, high: float) -> Tensor:
            if not self.is_on:
                return x.fill_((low + high) / 2)
            _check(x, hashes, site)
            bits = of_site(self.tokens_of(x), key).unsqueeze(-1) * hashes
            return x.copy_(uniform(bits, low, high, x.dtype))

        return fill

    def neftune(self, site: DropoutSite) -> Callable[[Tensor], Tensor]:
        """Function that adds noise to embeddings [.., D]: within alpha / sqrt(L D) in a document of L tokens."""
        hashes, key = self._hashes(site, ((0, site.features),)), self._key(site)

        def add(x: Tensor) -> Tensor:
            if not self.is_on:
                return x
            tokens = self.tokens_of(x)
            length = next(part for part in self._lengths if part.numel() == tokens.numel()).view(tokens.shape)
            noise = uniform(of_site(tokens, key).unsqueeze(-1) * hashes, -site.p, site.p, length.dtype)
            return x + noise.mul_((length * site.features).rsqrt().unsqueeze(-1)).to(x.dtype)

        return add

    def attention(self, site: DropoutSite, heads: Blocks) -> Callable[[float], AttentionDrops | None]:
        """Function that makes the drops of an attention with a probability."""
        hashes, key = self._hashes(site, heads), self._key(site)

        def drops(p: float) -> AttentionDrops | None:
            if not self.is_on:
                return None
            assert self._whole is not None, "a micro batch is begun before it runs"
            return attention_drops(self._whole, key, hashes, p)

        return drops

    def _hashes(self, site: DropoutSite, features: Blocks) -> Tensor:
        numbers = torch.cat([torch.arange(*block, dtype=torch.int32, device=self.device) for block in features])
        return feature_hashes(self.seed, site.name, numbers)

    def _key(self, site: DropoutSite) -> Tensor:
        return torch.tensor(key_of(self.seed, site.name), dtype=torch.int32, device=self.device)


def _document_lengths(cu_seqlens: Tensor | None, rows: int, length: int) -> Tensor:
    """Tokens of the document of each token: [B, T]."""
    if cu_seqlens is None:
        return torch.full((rows, length), length)
    lengths = cu_seqlens.cpu().diff()
    return lengths.repeat_interleave(lengths).view(rows, length)


def _check(x: Tensor, hashes: Tensor, site: DropoutSite) -> None:
    if x.shape[-1] != len(hashes):
        raise UserError(
            f"{site.module} drops {x.shape[-1]} features here, and {site.features} in one process",
            fix="use tp 1, or set that dropout to 0 in model.overrides",
            more="fivefold docs explain/dropout",
        )


def builders(state: ParallelState) -> Builders:
    dropout = state.live(Dropout)

    def drop_output(module: Any, edit: DropOutput) -> None:
        drop = dropout.site(edit.site, ((0, edit.site.features),))
        module.forward = lambda x: drop(x, module.p) if module.training else x

    def drop_calls(module: Any, edit: DropCalls) -> None:
        drops = [dropout.site(site, ((0, site.features),)) for site in edit.sites if site.kind != "noise"]
        noises = [site for site in edit.sites if site.kind == "noise"]
        fills, hidden_size = [*map(dropout.noise, noises)], noises[0].features if noises else 0
        module.forward = _with_calls(edit.path, module.forward, drops, fills, hidden_size)

    def drop_input(linear: Any, edit: DropInput) -> None:
        drop, branch, p = dropout.site(edit.site, edit.features), linear.branch, edit.site.p
        linear.branch = lambda x: branch(drop(x, p) if linear.training else x)

    def add_noise(embedding: Any, edit: AddNoise) -> None:
        add = dropout.neftune(edit.site)
        embedding.register_forward_hook(lambda module, _, out: add(out) if module.training else out)

    return {
        AddNoise: add_noise,
        DropOutput: drop_output,
        DropCalls: drop_calls,
        DropInput: drop_input,
        DropProbabilities: lambda module, edit: setattr(module, DROPS, dropout.attention(edit.site, edit.heads)),
    }


def _with_calls(
    path: str, plain: Callable[..., Any], drops: Sequence[Callable[[Tensor, float], Tensor]],
    fills: Sequence[Callable[[Tensor, float, float], Tensor]], hidden_size: int,
) -> Callable[..., Any]:  # fmt: skip
    """Wrap a forward: calls of `F.dropout` go to `drops` in order, of `Tensor.uniform_` on hidden states to `fills`."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        waiting, filling = iter(drops), iter(fills)

        def drop(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
            if not (training and p):
                return x
            if (at_site := next(waiting, None)) is None:
                raise UserError(f"{path} drops more tensors than when it was traced", fix="set that dropout to 0")
            return at_site(x, p)

        def fill(x: Tensor, low: float = 0.0, high: float = 1.0, **options: Any) -> Tensor:
            at_site = next(filling, None) if x.shape[-1] == hidden_size else None
            return x.uniform_(low, high, **options) if at_site is None else at_site(x, low, high)

        with CallsServed(drop, fill):
            return plain(*args, **kwargs)

    return forward
