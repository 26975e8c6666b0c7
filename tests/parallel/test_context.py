"""Context parallelism: which tokens a rank has, attention by every method, and what a layout with cp computes."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.core.errors import UserError, refuse
from fivefold.core.model_limits import CPMethod, ModelLimits, context_method
from fivefold.models import offdiagonal
from fivefold.models.config_facts import facts_of_config
from fivefold.models.kernels import AttentionParams
from fivefold.models.offdiagonal import local_cu_seqlens, offdiagonal_blocks
from fivefold.parallel.collectives import total as total_of
from fivefold.parallel.context.runtime import ContextParallel, _groups
from fivefold.parallel.context.spec import Pieces, SharedRows, hops
from fivefold.parallel.features import calls
from fivefold.parallel.layout import Layout
from fivefold.parallel.legality import violations
from fivefold.parallel.lower import lower
from fivefold.parallel.mesh import build_mesh, record
from fivefold.parallel.ranks import RankGrid, row_blocks, tokens_by_rank
from tests.parity import Case, refusal
from tests.plain_attention import reference_attention
from tests.pool import run_ranks
from tests.tiers import put_off

METHODS = ("ring", "allgather", "ulysses", "2x2")

# ---- which tokens a rank has -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("combine", [offdiagonal.combine, torch.compile(offdiagonal.combine, backend="aot_eager")])
@pytest.mark.parametrize("rows", [slice(None), [2, 0]])
def test_attention_to_two_sets_of_keys_is_that_to_all(rows: slice | list[int], combine: offdiagonal.Combine) -> None:
    """In place, for some rows and the queries 1 to 4; the others stay."""
    scores, values = torch.randn(3, 6, 2, 9).double(), torch.randn(9, 5).double()
    (out, lse), (more, more_lse) = (
        (scores[..., keys].softmax(-1) @ values[keys], scores[..., keys].logsumexp(-1))
        for keys in (slice(0, 4), slice(4, 9))
    )
    block = offdiagonal.OffdiagonalBlock(rows, slice(1, 4), slice(0, 5), 0)
    wanted, stat = out.clone(), lse.clone()
    wanted[rows, 1:4], stat[rows, 1:4] = (scores.softmax(-1) @ values)[rows, 1:4], scores.logsumexp(-1)[rows, 1:4]
    added = (each[rows, 1:4].transpose(1, 2) for each in (more, more_lse))
    offdiagonal.merge(block, out, lse, *added, combine)
    torch.testing.assert_close((out, lse), (wanted, stat), rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize(("cp", "tp"), [(1, 1), (2, 1), (3, 1), (4, 2), (2, 3)])
def test_ranks_have_every_token_once_and_equal_work(cp: int, tp: int) -> None:
    length = 2 * cp * tp * 3
    held = [row_blocks(length, cp, c, tp, t) for c in range(cp) for t in range(tp)]
    tokens = [token for blocks in held for start, stop in blocks for token in range(start, stop)]
    assert sorted(tokens) == list(range(length))
    assert {sum(stop - start for start, stop in blocks) for blocks in held} == {length // (cp * tp)}
    seen = [sum(t + 1 for start, stop in row_blocks(length, cp, c) for t in range(start, stop)) for c in range(cp)]
    assert len(set(seen)) == 1  # keys that the queries of each rank see


def test_the_order_of_tokens_is_stated() -> None:
    assert [row_blocks(16, 2, rank) for rank in (0, 1)] == [((0, 4), (12, 16)), ((4, 12),)]
    assert [row_blocks(16, 2, 0, 2, rank) for rank in (0, 1)] == [((0, 4),), ((12, 16),)]


@pytest.mark.parametrize("window", [None, 1, 3, 9])
@pytest.mark.parametrize("cp", [1, 2, 3])
def test_diagonals_and_rectangles_are_what_a_query_sees(cp: int, window: int | None) -> None:
    """Marked one by one in [T, T]: every pair once, no pair too many, and no query of an off-diagonal block without a
    key."""
    length, rows, edges = 24, 2, (0, 7, 24, 24 + 13, 24 + 15, 48)
    blocks = [row_blocks(length, cp, rank) for rank in range(cp)]
    places = [[t for start, stop in held for t in range(start, stop)] for held in blocks]
    found = np.zeros((rows, length, length), int)
    for mine, at in zip(blocks, places, strict=True):
        cu_seqlens = local_cu_seqlens(edges, rows, length, mine).tolist()
        for start, stop in pairwise(cu_seqlens):
            row, first = divmod(start, len(at))
            for i in range(first, first + stop - start):
                for j in range(first, i + 1):
                    found[row, at[i], at[j]] += window is None or at[i] - at[j] < window
        for keys, key_at in zip(blocks, places, strict=True):
            for part in offdiagonal_blocks(edges, rows, length, mine, keys, window):
                q, k = at[part.queries], key_at[part.keys]
                assert q[0] - k[0] == part.ahead
                for row in range(rows) if part.rows == slice(None) else part.rows:
                    for i in q:
                        visible = [j for j in k if window is None or i - j < window]
                        is_band = window is not None and part.farthest >= window
                        assert visible and (is_band or len(visible) == len(k))
                        found[row, i, visible] += 1
    document = np.searchsorted(edges, np.arange(rows * length), side="right").reshape(rows, length)
    same = document[:, :, None] == document[:, None, :]
    i, j = np.indices((length, length))
    expected = same & (j <= i) & (np.full_like(i, True, bool) if window is None else i - j < window)
    assert np.array_equal(found, expected)


# Documents over several edges, inside of a chunk, up to an edge and of one token, in unlike rows; and whole rows.
OF_TWO_ROWS = ((0, 7, 24, 24 + 13, 24 + 15, 48), (0, 6, 12, 13, 24, 24 + 4, 24 + 18, 48), (0, 24, 48))


@pytest.mark.parametrize(("window", "chunk"), [(None, None), (1, None), (4, None), (None, 5)])
@pytest.mark.parametrize("edges", OF_TWO_ROWS, ids=str)
@pytest.mark.parametrize("ring", [2, 3, 4])
def test_a_ring_sends_what_a_rank_attends_to_and_no_more(
    ring: int, edges: tuple[int, ...], window: int | None, chunk: int | None
) -> None:
    """Every key of another rank that a query sees, marked one by one."""
    rows, tokens = 2, tokens_by_rank(24, ring)
    shared = SharedRows(tokens, edges, window, chunk)
    held = [[t for start, stop in blocks for t in range(start, stop)] for blocks in tokens]

    def places(owner: int, user: int) -> set[tuple[int, int]]:
        """(row, place among the owner's tokens) of keys that a query of the other rank sees."""
        return {
            (row, place)
            for row in range(rows)
            for place, key in enumerate(held[owner])
            for query in held[user]
            if sees(row * 24 + query, row * 24 + key)
        }

    def sees(query: int, key: int) -> bool:
        first = max(edge for edge in edges if edge <= query)
        near = (window is None or query - key < window) and (
            chunk is None or (query - first) // chunk == (key - first) // chunk
        )
        return first <= key < query and near

    for rank in range(ring):
        for step, hop in enumerate(hops(shared, rank), 1):
            owner = (rank + step) % ring
            assert marked(hop.received) == places(owner, rank)
            assert hop.received == hops(shared, owner)[step - 1].sent


def marked(pieces: Pieces) -> set[tuple[int, int]]:
    found = [(row, place) for row, start, stop in pieces for place in range(start, stop)]
    assert len(set(found)) == len(found)
    return set(found)


@pytest.mark.parametrize("ring", [2, 3, 8])
def test_of_whole_rows_a_ring_sends_three_quarters_and_of_documents_between_edges_nothing(ring: int) -> None:
    tokens, chunk = tokens_by_rank(12 * ring, ring), 6
    sent = [
        sum(stop - start for rank in range(ring) for hop in hops(SharedRows(tokens, edges), rank)
            for _, start, stop in hop.sent)
        for edges in ((0, 12 * ring), tuple(range(0, 12 * ring + 1, chunk)), (0, 2, *range(6, 12 * ring + 1, chunk)))
    ]  # fmt: skip
    assert sent == [(ring - 1) * 12 * ring * 3 // 4, 0, 0]


@pytest.mark.parametrize("is_chunk", [False, True], ids=["window", "chunk"])
def test_a_window_lessens_what_a_ring_is_declared_to_send(is_chunk: bool) -> None:
    """By hand, of rank 1 of 4, with chunks 1 and 6 of 8192 tokens: a layer with a window of 4096 and one without.
    Attention within 4096 tokens of a document crosses no edge in whole rows, but documents that are not known may begin
    anywhere."""
    facts = facts_of_config("gemma-2-9b")
    if is_chunk:
        of_chunks = {name: replace(each, window=None, chunk=each.window) for name, each in facts.attends.items()}
        facts = replace(facts, attends=of_chunks)
    plan = lower(facts, Layout.parse("cp4+ring"), 1)
    token = 2 * 8 * 256 * 2  # bytes of keys and values
    for micro_batches in (1, 3):
        found = calls(plan, plan.step_shape(1, 65536, micro_batches))
        sent = [
            sum(call.bytes * call.times for call in found
                if call.layer == layer and call.kind == "send" and call.phase == "forward")
            for layer in plan.anatomy.layers[:2]
        ]  # fmt: skip
        assert sent == [micro_batches * 2 * 4095 * token, micro_batches * 4 * 8192 * token]
    assert facts.kinds[:4] == (0, 1, 0, 1)  # each is priced as its own


def test_micro_batches_of_the_same_documents_are_declared_one_by_one() -> None:
    """By hand, of the first rank of two: of documents of 6 and 10 tokens it sends 4 keys, of 4, 8 and 4 tokens none."""
    plan = lower(facts_of_config("llama-3.2-1b"), Layout.parse("cp2+ring"), 0)
    cut, whole = (0, 6, 16), (0, 4, 12, 16)
    token = 2 * 8 * 64 * 2  # bytes of keys and values
    for documents in ((cut,), (cut, whole, cut), (whole, whole)):
        shape = replace(plan.step_shape(1, 16, len(documents)), documents=documents)
        sent = sum(
            call.bytes * call.times for call in calls(plan, shape)
            if call.layer == plan.anatomy.layers[0] and call.kind == "send" and call.phase == "forward"
        )  # fmt: skip
        assert sent == documents.count(cut) * 4 * token


# ---- the method ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("cp", "query", "kv", "expected"),
    [
        (2, 32, 8, CPMethod(2, 1)),  # few key/value heads, few ranks
        (4, 32, 8, CPMethod(4, 1)),
        (8, 32, 8, CPMethod(1, 8)),
        (2, 32, 32, CPMethod(1, 2)),  # as much as the ring, evenly
        (8, 6, 1, CPMethod(8, 1)),
        (16, 32, 8, CPMethod(2, 8)),
    ],
)
def test_auto_sends_the_least(cp: int, query: int, kv: int, expected: CPMethod) -> None:
    assert context_method("auto", cp, query, kv) == expected


@pytest.mark.full
def test_methods_that_do_not_fit_are_refused_with_the_arithmetic() -> None:
    with pytest.raises(UserError, match="2 x 3 = 6 ranks, but cp is 4"):
        refuse(violations(Layout.parse("cp4+2x3"), ModelLimits(query=12, kv=12)))
    with pytest.raises(UserError, match="deals 6 query and 2 key/value heads of a rank out to 4") as caught:
        refuse(violations(Layout.parse("cp4+ulysses"), ModelLimits(query=6, kv=2)))
    assert "2x2" in str(caught.value.fix)
    assert context_method("ulysses", 4, 8, 2) == CPMethod(1, 4)  # two ranks share each key/value head
    error = run_ranks(4, refusal, Case("cp4+ulysses", kv_heads=1, overrides=(("num_attention_heads", 2),)))[0]
    assert error.startswith("UserError: cp_method ulysses deals 2 query and 1 key/value heads")


# ---- attention alone -------------------------------------------------------------------------------------------------

PACKINGS = {
    "documents": (2, [0, 7, 24, 24 + 13, 24 + 15, 48]),
    "whole rows": (2, None),
    "one-token documents": (1, [0, 1, 2, 11, 12, 13, 24]),
    "up to the edges": (2, list(OF_TWO_ROWS[1])),
}
SINKS = torch.tensor([0.5, -2.0, 3.0, 0.0, 8.0, -0.3, 1.1, -1.0], dtype=torch.float64)
RULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 5},
    "softcap": {"softcap": 0.8},
    "sinks": {"s_aux": SINKS},
    "all": {"sliding_window": 9, "softcap": 1.5, "s_aux": SINKS},
}
HEADS, LENGTH = 8, 24


def fold_of(cp: int, method: str, kv: int) -> ContextParallel:
    """A fold without a model, for one attention module."""
    chosen = context_method(method, cp, HEADS, kv)
    mesh = build_mesh(RankGrid(Layout(cp=cp), ulysses=chosen.ulysses), "cpu")
    return ContextParallel(mesh.groups["cp"], dist.get_rank(), cp, chosen, *_groups(mesh, chosen))


def attention_errors(cp: int, method: str, kv: int, dtype: torch.dtype) -> dict[str, float]:
    """Largest error of output and gradients on this rank, by packing and rule, relative to the largest value."""
    fold = fold_of(cp, method, kv)
    errors = {}
    for packing, (rows, edges) in PACKINGS.items():
        cu_seqlens = None if edges is None else torch.tensor(edges, dtype=torch.int32)
        for name, rule in RULES.items():
            torch.manual_seed(0)
            wholes = [torch.randn(rows, heads, LENGTH, 8, dtype=torch.float64).to(dtype) for heads in (HEADS, kv, kv)]
            weight = torch.randn(rows, LENGTH, HEADS, 8, dtype=torch.float64).to(dtype)
            expected = attended(
                lambda *x, rule=rule, cu_seqlens=cu_seqlens: twin(*x, cu_seqlens, rule), wholes, rule, weight
            )
            own = [fold.cut(each.transpose(1, 2)).transpose(1, 2) for each in wholes]
            made = AttentionParams(0.7, rule.get("sliding_window"), rule.get("softcap"))
            found = attended(
                lambda q, k, v, s, made=made, cu_seqlens=cu_seqlens: fold.attend(q, k, v, cu_seqlens, made, s), own,
                rule, fold.cut(weight),
            )  # fmt: skip
            for what, right in expected.items():
                part, mine = right, found[what]
                if what == "sinks":
                    dist.all_reduce(mine)
                else:
                    part = fold.cut(right)
                assert mine.dtype == dtype
                errors[f"{packing}, {name}: {what}"] = float((mine.double() - part).abs().max() / right.abs().max())
    return errors


def twin(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, cu_seqlens: Tensor | None, rule: dict[str, Any]
) -> Tensor:
    q, k, v = q.double(), k.double(), v.double()
    return reference_attention(q, k, v, cu_seqlens, 0.7, **rule | ({} if sinks is None else {"s_aux": sinks.double()}))


def attended(attend: Any, tensors: list[Tensor], rule: dict[str, Any], weight: Tensor) -> dict[str, Tensor]:
    """Output and gradients, tokens along dimension 1."""
    sinks = rule.get("s_aux")
    leaves = [each.detach().clone().requires_grad_() for each in tensors]
    leaves += [] if sinks is None else [sinks.to(tensors[0].dtype).requires_grad_()]
    out = attend(*leaves[:3], leaves[3] if sinks is not None else None)
    grads = torch.autograd.grad(out, leaves, weight.to(out.dtype))
    named = dict(zip("qkv", (each.transpose(1, 2) for each in grads), strict=False))
    return {"out": out.detach(), **named} | ({} if sinks is None else {"sinks": grads[3]})


@pytest.mark.full
@pytest.mark.parametrize(
    ("cp", "method", "kv"),
    [
        put_off(2, "ring", 8), put_off(2, "allgather", 2), (2, "ulysses", 1), (2, "ulysses", 4),
        (4, "ring", 1), (4, "allgather", 8), put_off(4, "ulysses", 2), (4, "2x2", 2), put_off(4, "2x2", 1),
    ],
)  # fmt: skip
def test_every_method_attends_as_one_process(cp: int, method: str, kv: int) -> None:
    for errors in run_ranks(cp, attention_errors, cp, method, kv, torch.float64):
        assert max(errors.values()) < 1e-13, max(errors, key=lambda key: errors[key])


def home_coming(layout: str) -> tuple[Tensor, dict[str, int]]:
    """What comes home of gradients of which rank 0 has 1 and each other 2^-9, half of what bf16 has beside 1; and the
    bytes."""
    mesh = build_mesh(RankGrid(Layout.parse(layout)), "cpu")
    exchange = _groups(mesh, context_method(layout.rpartition("+")[2], 4, 1, 1))[0]
    assert exchange is not None
    rows, total = SharedRows(tokens_by_rank(16, 4), (0, 16)), torch.zeros(2, 1, 4, 1, 1)
    with record(mesh) as found:
        for step, (_, kv) in enumerate(exchange.parts(torch.ones_like(total, dtype=torch.bfloat16), rows)):
            grad = torch.full_like(kv, 2.0**-9 if dist.get_rank() else 1.0, dtype=torch.float32)
            if step:
                exchange.return_dkv(step, grad, rows, torch.bfloat16)(total)
    return total, {each.kind: each.bytes for each in total_of(found)}


@pytest.mark.full
def test_gradients_of_keys_travel_in_the_models_type_and_are_added_up_in_fp32() -> None:
    for gradients, volume in run_ranks(4, home_coming, "cp4+allgather"):
        assert torch.equal(gradients, torch.full_like(gradients, 1 + 3 * 2.0**-9))
        assert volume == {"all_gather": 64, "all_to_all": 64}
    per_rank = run_ranks(4, home_coming, "cp4+ring")
    for gradients, _ in per_rank[1:]:
        assert gradients[:, :, :2].eq(1 + 2 * 2.0**-9).all()  # the first chunk: all see it
    kept = [volume["send"] for _, volume in per_rank]
    assert sum(kept) == sum(volume["recv"] for _, volume in per_rank) == 2 * 4 * 3 * 16 * 3 // 4


@pytest.mark.full
@pytest.mark.parametrize("dtype", [put_off(torch.float32), torch.bfloat16], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_in_lower_precision(method: str, dtype: torch.dtype) -> None:
    """A few roundings of the type: each part of an output is rounded once, then merged in fp32."""
    for errors in run_ranks(4, attention_errors, 4, method, 2, dtype):
        assert max(errors.values()) < 8 * torch.finfo(dtype).eps, max(errors, key=lambda key: errors[key])
