"""FSDP gathers weights (`+qwz`) and reduces gradients (`+qgz`) in eight bits."""

from typing import Any

import pytest
import torch

from fivefold.core.errors import UserError
from fivefold.core.optimizers import block_length
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel.features import calls
from fivefold.parallel.layout import Layout
from fivefold.parallel.lower import lower
from fivefold.parallel.nodes.by_hand import sent
from fivefold.parallel.nodes.levels import Int8Wire, WirePart
from tests.rehearsal import Rehearsal, rehearse
from tests.tiers import put_off
from tests.verification.cases import ProvedCase
from tests.verification.mutation import prove


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_every_rank_gets_the_rounded_weights(dtype: torch.dtype) -> None:
    """Of two matrices and a vector between them, over two ranks; the reference rounds the same numbers another way. No
    error is more than half a step, 1 / 254 of its block's largest; a block of zeros stays."""
    generator = torch.Generator().manual_seed(1)
    first, vector, second = (torch.randn(*size, generator=generator).to(dtype) for size in ((6, 512), (10,), (4, 48)))
    first[0] = 0
    wire = Int8Wire([WirePart(3 * 512, block_length(512)), WirePart(5, 0), WirePart(2 * 48, block_length(48))])
    shards = [torch.cat([whole.chunk(2)[rank].flatten() for whole in (first, vector, second)]) for rank in range(2)]
    coded = wire.encode(torch.stack(shards))
    assert coded.shape == (2, 3 * 512 + 2 * 48 + max(4, dtype.itemsize) * (3 * 8 + 2 * 3) + 5 * dtype.itemsize)
    found = torch.empty(2, shards[0].numel(), dtype=dtype)
    wire.decode(coded, found, dtype)
    expected = [
        torch.cat([sent(w, dtype).chunk(2)[rank].flatten() for w in (first, vector, second)]) for rank in range(2)
    ]
    assert torch.equal(found, torch.stack(expected))
    error, largest = (
        (sent(first, dtype) - first).view(6, 8, 64).abs(),
        first.view(6, 8, 64).abs().amax(-1, keepdim=True),
    )
    assert (error <= largest / 254 * (1 + 2 * torch.finfo(torch.float32).eps) + largest * torch.finfo(dtype).eps).all()
    assert error.max() > largest.max() / 600


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_half_of_the_largest_is_no_tie(dtype: torch.dtype) -> None:
    """Gradients from few products in fp8 are often that, but for a last bit that the order of a sum decides."""
    half = torch.full((1, 16), 0.5, dtype=dtype)
    half[0, 0] = 1
    for each in (half, torch.nextafter(half, half.new_zeros(())), torch.nextafter(half, half.new_ones(()))):
        Int8Wire([WirePart(16, 16)]).decode(
            Int8Wire([WirePart(16, 16)]).encode(each), found := torch.empty_like(each), dtype
        )
        assert (found[0, 1:] > 0.5).all()
        torch.testing.assert_close(found, sent(each, dtype), rtol=0, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize(
    "line",
    [
        put_off("step shard2+qwz gemma2"), put_off("step shard4+hpz2+hier2+qwz mixtral"), "step shard2+qgz llama-lora",
        put_off("step shard2+qgz llama"), put_off("step shard2+qgz+fp8 llama"), put_off("step shard2.tp2+qgz llama"),
        put_off("step pp2.shard2+qgz llama-tied"), put_off("step shard2+qgz+offload llama-lora-nf4"),
        put_off("step shard4+hpz2+hier2+qwz+qgz llama"), put_off("step shard4.ep2+qgz mixtral"),
        put_off("step dp2.shard2+zero1+qgz llama-dpo"), put_off("step shard2.cp2+hier2+qgz llama"),
    ],
)  # fmt: skip
def test_a_layout_is_proved_with_it(line: str, tmp_path: Any) -> None:
    """The reference multiplies the rounded embedding of Gemma by the same number as without: a buffer in fp32."""
    case = ProvedCase.parse(line)
    proved = prove(case.kind, case.model, case.layout, tmp_path, steps=2)
    assert proved.found.rows and not proved.is_killed, proved.row or proved.found.refused


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "family"),
    [
        ("pp2.shard4+zbv+hpz2+qwz", "llama"), put_off("dp2.shard4.tp2+zero1+hier2+qwz", "llama"),
        put_off("shard4.cp2.ep2+hpz4+qwz", "mixtral"), ("dp2.shard4.tp2+zero2+qgz", "llama"),
        put_off("pp2.shard4+zbv+hier2+qwz+qgz", "llama"),
    ],
)  # fmt: skip
def test_what_is_done_and_sent_is_what_the_plan_lists(layout: str, family: str) -> None:
    overrides = (("num_hidden_layers", 4),)
    assert not rehearse(Rehearsal(layout, -1, family, overrides)).unlike


def test_a_block_that_tensor_parallelism_cuts_is_refused() -> None:
    """Each of 16 ranks has 688 numbers of a row: 21 blocks of 32 and a half."""
    facts = facts_of_config("llama-2-7b")
    for word, what in (("qwz", "gathers"), ("qgz", "reductions")):
        with pytest.raises(UserError, match=rf"{what} int8 of .* have blocks of 32 in a row of 11008"):
            lower(facts, Layout.parse(f"shard2.tp16+{word}"), 0)


def test_layouts_that_round_alike_have_the_same_reference() -> None:
    """A gather rounds the same numbers under every layout; what a reduction rounds depends on it."""
    for word, is_same in (("qwz", True), ("qgz", False)):
        one, other = (Layout.parse(f"{ranks}+{word}").numerics for ranks in ("shard2", "shard4"))
        assert (one == other) is is_same


def test_a_gather_has_half_the_bytes() -> None:
    """Of a layer of Llama 3.2 1B: 8 bits for each number in matrices, and 32 for each block of 256; norms stay."""
    facts = facts_of_config("llama-3.2-1b")
    plain, coded = (lower(facts, Layout.parse(text), 0) for text in ("shard16", "shard16+qwz"))
    sizes = [
        {call.bytes for call in calls(plan, plan.step_shape(1, 4096, 1))
         if call.layer == plan.anatomy.layers[0] and call.kind == "all_gather"}
        for plan in (plain, coded)
    ]  # fmt: skip
    matrices, norms = 60_817_408, 4096
    assert sizes == [{2 * (matrices + norms)}, {matrices + 4 * matrices // 256 + 2 * norms}]
