"""Which part of each parameter a rank holds: an exact partition, and the one FSDP2 really makes."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from fivefold.parallel.dtensor import local
from fivefold.parallel.sharding import ShardSpec, Split, fsdp_rows, local_regions, split_even
from fivefold.parallel.state import state_of
from tests.parity import Case, build, reference_model
from tests.pool import run_ranks
from tests.tiers import put_off

# Two fused projections (query, key and value; gate and up) over 3 tp ranks, as [start, stop) blocks in local order.
FUSED = (((0, 5), (15, 17), (21, 23)), ((5, 10), (17, 19), (23, 25)), ((10, 15), (19, 21), (25, 27)))
EXPERTS = (((0, 4),), ((4, 7),))
REPLICATED_KV = (((0, 3),), ((0, 3),), ((3, 6),), ((3, 6),))
SPECS = {
    "whole": ShardSpec("w", (13, 7), (), 3),
    "vector": ShardSpec("w", (11,), (), 2),
    "cube": ShardSpec("w", (5, 3, 2), (), 1),
    "column": ShardSpec.along("w", (29, 7), 0, [(b,) for b in split_even(29, 3)]),
    "row": ShardSpec.along("w", (7, 29), 1, [(b,) for b in split_even(29, 3)]),
    "bias": ShardSpec.along("w", (29,), 0, [(b,) for b in split_even(29, 4)]),
    "fused columns": ShardSpec.along("w", (27, 5), 0, FUSED),
    "fused rows": ShardSpec.along("w", (5, 27), 1, FUSED),
    "two dimensions": ShardSpec(
        "w", (7, 27, 3), (Split(0, EXPERTS * 3), Split(1, tuple(blocks for blocks in FUSED for _ in EXPERTS))), 6, "ep"
    ),
    "few kv heads": ShardSpec.along("w", (6, 5), 0, REPLICATED_KV),
}


def expected_local(spec: ShardSpec, values: np.ndarray, tp_rank: int, fsdp_rank: int, fsdp_size: int) -> np.ndarray:
    """The plain twin: slice and concatenate the blocks, then `torch.chunk` along dim 0."""
    for split in spec.splits:
        values = np.concatenate([values.take(range(*b), split.dim) for b in split.blocks[tp_rank]], split.dim)
    chunks = torch.chunk(torch.from_numpy(values), fsdp_size)
    return chunks[fsdp_rank].numpy() if fsdp_rank < len(chunks) else values[:0]


def test_regions_are_what_slicing_gives(subtests: pytest.Subtests) -> None:
    for name, fsdp_size in product(SPECS, [1, 2, 3, 4, 8, 16]):
        with subtests.test(name=name, fsdp_size=fsdp_size):
            spec = SPECS[name]
            values = np.arange(np.prod(spec.shape)).reshape(spec.shape)
            for tp_rank in range(spec.parts):
                for fsdp_rank in range(fsdp_size):
                    expected = expected_local(spec, values, tp_rank, fsdp_rank, fsdp_size)
                    found = np.full(expected.shape, -1)
                    pairs = local_regions(spec, tp_rank, fsdp_rank, fsdp_size)
                    for global_region, local_region in pairs:
                        assert (found[local_region] == -1).all(), "two regions share an element"
                        found[local_region] = values[global_region]
                    np.testing.assert_array_equal(found, expected)
                    assert bool(pairs) == bool(expected.size)


def test_owners_hold_every_element_once(subtests: pytest.Subtests) -> None:
    for name, fsdp_size in product(SPECS, [1, 2, 3, 5, 16]):
        with subtests.test(name=name, fsdp_size=fsdp_size):
            spec = SPECS[name]
            held = np.zeros(spec.shape, int)
            for tp_rank in filter(spec.is_owner, range(spec.parts)):
                for fsdp_rank in range(fsdp_size):
                    for global_region, _ in local_regions(spec, tp_rank, fsdp_rank, fsdp_size):
                        held[global_region] += 1
            assert (held == 1).all()


def test_replicas() -> None:
    assert {name: spec.replicas for name, spec in SPECS.items()} == {
        "whole": 3, "vector": 2, "cube": 1, "column": 1, "row": 1, "bias": 1, "fused columns": 1, "fused rows": 1,
        "two dimensions": 1, "few kv heads": 2,
    }  # fmt: skip


def test_even_split(subtests: pytest.Subtests) -> None:
    for size, parts in product([1, 2, 7, 29, 101], [1, 2, 3, 4]):
        with subtests.test(size=size, parts=parts):
            lengths = [stop - start for start, stop in split_even(size, parts)]
            assert sum(lengths) == size and max(lengths) - min(lengths) <= 1
            assert lengths == sorted(lengths, reverse=True)


def test_fsdp_leaves_the_last_ranks_without_rows() -> None:
    assert [fsdp_rows(5, rank, 4) for rank in range(4)] == [(0, 2), (2, 4), (4, 5), (5, 5)]
    assert [fsdp_rows(1, rank, 3) for rank in range(3)] == [(0, 1), (1, 1), (1, 1)]


# ---- against what FSDP2 holds ----------------------------------------------------------------------------------------

LAYOUTS = ("single", "shard2", "shard4", "dp2.shard2", "tp2", "tp4", "shard2.tp2")
UNEVEN = (("intermediate_size", 5), ("num_hidden_layers", 1))  # 5 rows on 4 FSDP ranks: the last has none


def held(case: Case) -> dict[str, tuple[Any, ...]]:
    """Parameter -> (tp-local shape, local shape, is owner, regions), as DTensor and as `ShardSpec` say."""
    model = build(case)
    state = state_of(model)
    found = {}
    for name, parameter in model.named_parameters():
        spec, regions = state.placement.shards[name], state.placement.regions(name)
        assert tuple(parameter.shape) == spec.local_shape(state.placement.coords.tp), name
        here = local(parameter)
        covered = torch.zeros(here.shape, dtype=torch.int)
        for global_region, local_region in regions:
            covered[local_region] += 1
            assert here[local_region].shape == torch.empty(spec.shape, device="meta")[global_region].shape, name
        assert (covered == 1).all(), name
        edges = [tuple((s.start, s.stop) for s in global_region) for global_region, _ in regions]
        found[name] = (tuple(here.shape), state.placement.is_owner(name), edges)
    return found


@pytest.mark.full
@pytest.mark.parametrize("layout", [each if each in ("tp4", "shard2.tp2") else put_off(each) for each in LAYOUTS])
@pytest.mark.parametrize(("family", "kv_heads"), [("llama", 1), put_off("qwen3", 2)])
def test_dtensors_hold_what_the_specs_say(layout: str, family: str, kv_heads: int) -> None:
    case = Case(f"{layout}+fp32", family=family, kv_heads=kv_heads, overrides=UNEVEN)
    per_rank = run_ranks(case.parsed.world, held, case)
    for name, parameter in reference_model(case).named_parameters():
        count = np.zeros(tuple(parameter.shape), int)
        for rank in per_rank:
            _, is_owner, regions = rank[name]
            for edges in regions:
                count[tuple(slice(*edge) for edge in edges)] += is_owner
        assert (count == 1).all(), name
    if layout == "shard4":
        assert per_rank[3]["model.layers.0.mlp.gate_proj.weight"][0][0] == 0
