"""Context parallelism: the tokens of a row over the ranks of `cp`, for any model that attends through `transformers`.

Rank r of n has chunks r and 2n-1-r of the 2n equal chunks of each row, so that causal attention is the same work for
every rank. All modules but attention work token by token, on the tokens of this rank. Attention exchanges keys and
values, or heads (`kv_exchange.py`). Hooks from outside add context parallelism to a model:

    base: whole rows -> cut -> [B, L, D] -> ... attention calls `ContextParallel.attend` ... -> head -> whole logits
    (in the chunked loss logits stay where they are, and labels are cut)

Positions are always explicit, and count through the whole row. `cu_seqlens` cover the whole row too.

Legend: B rows, T tokens of a row, L = T/n of them on this rank, n ranks of cp in rings of r and groups of u; H query
heads, G key/value heads, D head size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.core.errors import UserError
from fivefold.core.model_limits import CPMethod
from fivefold.models import kernels, offdiagonal
from fivefold.models.attention import CONTEXT
from fivefold.models.forwards import check_slices
from fivefold.models.kernels import AttentionParams
from fivefold.models.offdiagonal import Blocks
from fivefold.models.packed import packed_attention, packed_attention_backward, sinks_gradient
from fivefold.ops.dropout import AttentionDrops
from fivefold.ops.keep import kept
from fivefold.parallel.context import spec
from fivefold.parallel.context.kv_exchange import (
    AllGatherKV,
    Exchange,
    PendingSum,
    Ring,
    gathered,
    tokens_for_heads,
    ulysses_all_to_all,
)
from fivefold.parallel.context.spec import SharedRows
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.mesh import Mesh
from fivefold.parallel.plan import Edit
from fivefold.parallel.ranks import Tokens, tokens_by_rank
from fivefold.parallel.state import Builders, LivePart, ParallelState
from fivefold.parallel.tensor.mappings import mapping

# ---- context parallelism of a model ----------------------------------------------------------------------------------


@dataclass
class ContextParallel(LivePart):
    """Context parallelism of one model on this rank.

    Every model has one. `group` is None if cp is 1: then rows stay as they are. `is_on` changes during a run:
    generation with a cache works on whole rows, and every rank computes the same. `head_in_chunks`: logits stay with
    their tokens, in the chunked loss.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    method: CPMethod
    exchange: Exchange | None  # None: every rank has whole rows of its heads
    ulysses: dist.ProcessGroup | None
    is_on: bool = True
    head_in_chunks: bool = False
    combine: offdiagonal.Combine = offdiagonal.combine  # or compiled
    whole_sequences: ClassVar = {"is_on": False}
    chunked_head: ClassVar = {"head_in_chunks": True}

    @classmethod
    def make(cls, state: ParallelState) -> Self:
        plan, group = state.plan, state.mesh.groups.get("cp")
        combine = state.live(Compiled).block("attention over cp", offdiagonal.combine)
        if group is None:
            return cls(None, 0, 1, plan.cp_method, None, None, is_on=False, combine=combine)
        exchange, ulysses = _groups(state.mesh, plan.cp_method)
        rank, ranks = plan.placement.coords.cp, plan.layout.cp
        return cls(group, rank, ranks, plan.cp_method, exchange, ulysses, combine=combine)

    @property
    def row_groups(self) -> list[dist.ProcessGroup]:
        """Group of the ranks that have other tokens of the same rows, if there are any."""
        return [] if self.group is None else [self.group]

    def share(self, tokens: int) -> int:
        """Number of this rank's tokens, for `tokens` of a row."""
        return tokens // self.size if self.is_on else tokens

    def cut(self, x_BT: Tensor) -> Tensor:
        """Cut rows [B, T, ...] to this rank's tokens [B, L, ...]. Raises `UserError` for rows that cannot be cut."""
        length = x_BT.shape[1]
        if self.group is None:
            return x_BT
        if length % (2 * self.size):
            unit = 2 * self.size
            raise UserError(
                f"context parallelism cuts a row into {unit} chunks: 2 x cp {self.size} does not divide {length}",
                fix=f"pad the rows to {-(-length // unit) * unit} tokens",
                more="fivefold docs explain/context",
            )
        return torch.cat([x_BT[:, start:stop] for start, stop in tokens_by_rank(length, self.size)[self.rank]], 1)

    # A graph break under torch.compile: `record` would not see collectives within an operator of its own.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        cu_seqlens: Tensor | None,
        rule: AttentionParams,
        sinks: Tensor | None,
        drops: AttentionDrops | None = None,
    ) -> Tensor:
        """Attend: query [B,H,L,D], key and value [B,G,L,D] of this rank's tokens -> [B,L,H,D]. `cu_seqlens` are over
        the B*T tokens of whole rows, None: each row is a document. `drops` too are of whole rows. See
        `attention.attention_forward`."""
        q_BLHD, k_BLGD, v_BLGD = (heads.transpose(1, 2) for heads in (query, key, value))
        (rows, local, heads, _), u = q_BLHD.shape, self.method.ulysses
        length = local * self.size
        edges = tuple(range(0, (rows + 1) * length, length)) if cu_seqlens is None else tuple(cu_seqlens.tolist())
        first = self.rank // u * u  # its Ulysses group together has the tokens of one rank of a ring of cp / u
        rings, group = tokens_by_rank(length, self.size // u), tokens_by_rank(length, self.size)[first : first + u]
        if self.ulysses is not None:
            shared = max(1, k_BLGD.shape[2] // u)
            dealt = [_by_rank_of_heads(heads, u) for heads in (q_BLHD, k_BLGD, v_BLGD)]
            mixed = ulysses_all_to_all(torch.cat(dealt, 3), self.ulysses, group)
            q_BLHD, k_BLGD, v_BLGD = torch.split(mixed, [heads // u, shared, shared], 2)
            sinks = sinks if sinks is None else torch.chunk(sinks, u)[self.ulysses.rank()]
            drops = drops and AttentionDrops(drops.queries, drops.keys.chunk(u, 2)[self.ulysses.rank()], drops.p)
        if rule.window is not None and rule.window >= length:
            rule = AttentionParams(rule.scale, None, rule.softcap)
        job = CPAttentionArgs(edges, rows, length, rings, self.exchange, rule, self.combine, drops)
        out_BLHD: Tensor = _Attention.apply(q_BLHD, k_BLGD, v_BLGD, sinks, job)  # type: ignore[no-untyped-call]
        return out_BLHD if self.ulysses is None else tokens_for_heads(out_BLHD, self.ulysses, group).flatten(2, 3)


def _by_rank_of_heads(x_BLHD: Tensor, u: int) -> Tensor:
    """Group heads by rank of u: [B,L,u,h,D]. Ranks may share key/value heads: 2 over 4 ranks are 0, 0, 1, 1."""
    heads = x_BLHD.shape[2]
    if heads % u:
        x_BLHD = x_BLHD[:, :, [rank * heads // u for rank in range(u)]]
    return x_BLHD.unflatten(2, (u, -1))  # type: ignore[no-any-return,no-untyped-call]


def _whole_rows(x_BLx: Tensor, fold: ContextParallel) -> Tensor:
    """Gather [B,L,...] of this rank's tokens to [B,T,...] on every rank, where all must compute the same with them."""
    assert fold.group is not None, "rows are whole already"
    return gathered(x_BLx, fold.group, tokens_by_rank(x_BLx.shape[1] * fold.size, fold.size))


_gather_rows = mapping(_whole_rows, lambda grad, fold: fold.cut(grad))


# ---- attention -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class CPAttentionArgs:
    """Arguments of one attention call. `edges`: `cu_seqlens` of `rows` rows of `length` tokens. `tokens`: the blocks of
    each rank that exchanges keys. `exchange`: the way they do; None if every rank has whole rows."""

    edges: tuple[int, ...]
    rows: int
    length: int
    tokens: Tokens
    exchange: Exchange | None
    rule: AttentionParams
    combine: offdiagonal.Combine
    drops: AttentionDrops | None = None  # of whole rows

    @property
    def mine(self) -> Blocks:
        return self.tokens[self.exchange.group.rank() if self.exchange else 0]

    @property
    def cu_seqlens(self) -> Tensor:
        """`cu_seqlens` of this rank's tokens: block edges end documents too."""
        return _cu_seqlens(self.edges, self.rows, self.length, self.mine)

    @property
    def shared(self) -> SharedRows:
        return SharedRows(self.tokens, self.edges, self.rule.window)

    def parts(self, kv: Tensor) -> Iterator[tuple[Blocks, Tensor]]:
        """Yield (blocks, their keys and values) that the queries of this rank attend to."""
        return self.exchange.parts(kv, self.shared) if self.exchange else iter([((), kv)])

    def return_dkv(self, step: int, grad: Tensor, wire: torch.dtype) -> PendingSum:
        """Send the gradient of part `step` to the owner of its kv; see `Exchange.return_dkv`."""
        return self.exchange.return_dkv(step, grad, self.shared, wire) if self.exchange else lambda total: None

    def drops_of(self, keys: Blocks) -> AttentionDrops | None:
        """Drops of this rank's queries and the keys of these blocks."""
        if self.drops is None:
            return None
        queries, of_keys = _cut(self.drops.queries, self.mine), _cut(self.drops.keys, keys)
        return AttentionDrops(queries, of_keys, self.drops.p)

    def dropping(self) -> tuple[Any, ...]:
        """Drops of this rank's queries and its own keys, as arguments of the packed operators."""
        drops = self.drops_of(self.mine)
        return () if drops is None else (drops.queries, drops.keys, drops.p)

    def offdiagonal_blocks(self, keys: Blocks) -> Sequence[offdiagonal.OffdiagonalBlock]:
        """Off-diagonal blocks of this rank's queries and the keys of these blocks."""
        return offdiagonal.offdiagonal_blocks(self.edges, self.rows, self.length, self.mine, keys, self.rule.window)


def _cut(x_BTx: Tensor, blocks: Blocks) -> Tensor:
    return torch.cat([x_BTx[:, start:stop] for start, stop in blocks], 1) if blocks else x_BTx[:, :0]


_cu_seqlens = lru_cache(maxsize=64)(offdiagonal.local_cu_seqlens)


class _Attention(torch.autograd.Function):
    """Attention of this rank: q, k, v [B,L,H or G,D], sinks [H] or None -> [B,L,H,D]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, job: CPAttentionArgs) -> Tensor:
        kv, ctx.job = torch.stack([k, v]), job
        out, lse = kept(lambda: _attended(q, kv, sinks, job))
        ctx.save_for_backward(q, kv, out, lse, sinks)
        return out  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (q, kv, out, lse, sinks), job, rule = ctx.saved_tensors, ctx.job, ctx.job.rule
        grad, parts = grads[0], job.parts(kv)
        first = next(parts)
        own = packed_attention_backward(
            grad, *(tensor.transpose(1, 2) for tensor in (q, *kv)), out, lse, job.cu_seqlens, rule.scale, rule.window,
            rule.softcap, *job.dropping(),
        )  # fmt: skip
        dq, *dkv = (tensor.transpose(1, 2).to(lse.dtype) for tensor in own)
        total, arriving = torch.stack(dkv), list[PendingSum]()
        for step, (blocks, part_kv) in enumerate(chain([first], parts)):
            more = torch.zeros_like(part_kv, dtype=lse.dtype)
            drops = job.drops_of(blocks)
            for part in job.offdiagonal_blocks(blocks):
                found = offdiagonal.backward(part, grad, q, part_kv[0], part_kv[1], out, lse, rule, drops)
                offdiagonal.add(dq, part.rows, part.queries, found[0])
                for whole, piece in zip(more, found[1:], strict=True):
                    offdiagonal.add(whole, part.rows, part.keys, piece)
            while arriving:
                arriving.pop()(total)
            arriving.append(job.return_dkv(step, more, kv.dtype))
            del more  # while the next keys are put in place
        arriving.pop()(total)
        dk, dv = total.to(kv.dtype)
        dsinks = None if sinks is None else sinks_gradient(grad, out, lse, sinks)
        return dq.to(q.dtype), dk, dv, dsinks, None


def _attended(q: Tensor, kv: Tensor, sinks: Tensor | None, job: CPAttentionArgs) -> tuple[Tensor, Tensor]:
    """Compute output [B,L,H,D] and log-sum-exp [B,L,H] of this rank's queries."""
    rule, parts = job.rule, job.parts(kv)
    first = next(parts)  # from here on the next is in transit
    own, lse = packed_attention(
        *(tensor.transpose(1, 2) for tensor in (q, *kv)), job.cu_seqlens, rule.scale, rule.window, rule.softcap,
        None, *job.dropping(),
    )  # fmt: skip
    out: Tensor = own.to(lse.dtype)
    for blocks, (keys, values) in chain([first], parts):
        drops = job.drops_of(blocks)
        for part in job.offdiagonal_blocks(blocks):
            found, stat = offdiagonal.forward(part, q, keys, values, rule, drops)
            offdiagonal.merge(part, out, lse, found, stat, job.combine)
    if sinks is not None:
        kernels.join_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


# ---- context parallelism in a model ----------------------------------------------------------------------------------


def builders(state: ParallelState) -> Builders:
    fold = state.live(ContextParallel)

    def cut_rows(base: nn.Module, _: Edit) -> None:  # prepended: before anything counts tokens
        base.register_forward_pre_hook(_cut_rows(fold), with_kwargs=True, prepend=True)

    def whole_rows(head: nn.Module, _: Edit) -> None:
        head.register_forward_hook(
            lambda _, args, out: _gather_rows(out, fold) if fold.is_on and not fold.head_in_chunks else out
        )

    return {
        spec.CutRows: cut_rows,
        spec.WholeRows: whole_rows,
        spec.ExchangeKV: lambda attention, _: setattr(attention, CONTEXT, fold),
    }


def _groups(mesh: Mesh, method: CPMethod) -> tuple[Exchange | None, dist.ProcessGroup | None]:
    """(exchange of keys and values, Ulysses group); None for the one that the method does not use."""
    if method.ring == 1:
        return None, mesh.groups["cp"]
    if method.gathers:
        return AllGatherKV(mesh.groups["cp"]), None
    ring = mesh.groups["cp" if method.ulysses == 1 else "cp_ring"]
    # NCCL connects a group in its first call, which all of its ranks must make: some have nothing to send in a hop.
    dist.all_reduce(torch.zeros((), device=mesh.meshes["dp_shard"].device_type), group=ring)
    return Ring(ring), mesh.groups.get("cp_ulysses")


def _cut_rows(fold: ContextParallel) -> Callable[..., tuple[Any, Any]]:
    """Pre-hook of the base that cuts whole rows to this rank's tokens, with their positions in the whole rows."""

    def hook(base: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if not fold.is_on:
            return args, kwargs
        kwargs = {**dict(zip(("input_ids",), args, strict=False)), **kwargs}
        given = {name: kwargs[name] for name in ("input_ids", "inputs_embeds") if kwargs.get(name) is not None}
        rows, length = next(iter(given.values())).shape[:2]
        positions = kwargs.get("position_ids")
        if positions is None:
            positions = torch.arange(length, device=next(iter(given.values())).device)
        given["position_ids"] = positions.expand(rows, -1)
        check_slices(base.config, given["position_ids"])
        return args[1:], kwargs | {name: fold.cut(tensor) for name, tensor in given.items()}

    return hook
