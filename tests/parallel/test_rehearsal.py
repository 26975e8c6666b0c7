"""Every fold and schedule, on any rank, in bf16 and fp32: nothing fails, and blocks are compiled once.

One process stands for a world: see `tests/rehearsal.py`. What layouts compute is compared elsewhere, mostly in fp64;
errors of one dtype, of one rank, or of compiled blocks show here.
"""

from dataclasses import replace

import pytest

from fivefold.core.schedule import SCHEDULES as RECORDS
from fivefold.parallel.adapters.settings import Lora
from tests.rehearsal import Rehearsal, rehearse
from tests.tiers import every, first_of_each, put_off

pytestmark = pytest.mark.full

# Each with the fewest stages a rank, and zb with two as well.
SCHEDULES = (
    *(f"{name}+v2" if record.stages[0] == 2 and not record.is_v else name for name, record in RECORDS.items()),
    "zb+v2",
)
DENSE = (
    "single", "shard8", "dp2.shard4", "shard2.tp2.cp2", "pp2.shard2.tp2", "cp4", "cp4+ring", "cp4+allgather",
    "cp4+ulysses", "cp4+2x2", "tp8", "tp4+full", "tp2+nosp", "dp2.shard2.tp2+zero1", "shard4+zero2",
    *(f"pp2+{schedule}" for schedule in SCHEDULES), *(f"pp2.shard2+zero{zero}+zbv" for zero in (1, 2)),
    "pp4.dp2.tp2+zb", "pp2.cp2+zb+full",
)  # fmt: skip
OF_EXPERTS = (
    "shard4.ep4", "shard2.tp2.ep4", "shard4.tp2.ep4+etp", "pp2.shard4.ep2", "shard2.cp2.ep4+full", "tp4.ep4+nosp",
    "pp2.ep2.shard2+zb",
)  # fmt: skip
# Those with the most folds and options at once; the matrix proves each of them in fp64.
OFTEN = {
    "shard2.tp2.cp2",
    "cp4+ring",
    "cp4+2x2",
    "tp4+full",
    "dp2.shard2.tp2+zero1",
    "pp2+interleaved+v2",
    "pp2+dualpipev",
    "pp2.shard2+zero2+zbv",
    "pp2.cp2+zb+full",
    "shard4.tp2.ep4+etp",
    "tp4.ep4+nosp",
    "pp2.ep2.shard2+zb",
}
SIZES = (("num_hidden_layers", 4), ("num_attention_heads", 8), ("num_key_value_heads", 4))
DEEP = (("num_hidden_layers", 6),)
OTHERS = first_of_each(
    (
        Rehearsal(f"{layout}{precision}", rank, family)
        for layout, family in (("pp2.tp2", "gemma2"), ("tp2.shard2", "gemma2"), ("shard2.ep2", "deepseek_v3"))
        for precision, rank in (("", -1), ("+fp32", 0))
    ),
    lambda case: case.family,
)


def cases(precision: str, rank: int) -> list[Rehearsal]:
    """Every layout in this precision, on this rank."""
    of_families = (("llama", DENSE), ("mixtral", OF_EXPERTS))
    return [Rehearsal(f"{one}{precision}", rank, family, SIZES) for family, each in of_families for one in each]


# Both dtypes, and both ends of a world; first ranks in bf16 do what those in fp32 and last ones in bf16 do. What first
# ranks do in fp32 the matrix proves in fp64: every twelfth of them is tried.
CASES = [
    *(each if each.layout in OFTEN else put_off(each) for each in cases("", -1)),
    *every(cases("+fp32", 0), 12),
    *(put_off(each) for each in cases("", 0)),
]

# Two of its four layers are dense: stages of one and of three layers.
UNEVEN = Rehearsal("pp2+split1-3", 0, "deepseek_v3", (("num_hidden_layers", 4),))


def name(case: Rehearsal) -> str:
    return f"{case.layout}-{case.family}-rank{case.rank}"


@pytest.mark.parametrize("case", [*CASES, *OTHERS, UNEVEN], ids=name)
def test_nothing_fails_on_any_rank(case: Rehearsal) -> None:
    assert not rehearse(case).unlike


DROPPING = (("resid_pdrop", 0.1), ("embd_pdrop", 0.1), ("attn_pdrop", 0.1))


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "compiled"])
@pytest.mark.parametrize(
    "case",
    [
        Rehearsal("pp2.tp2+zb", -1, "qwen3", adapter=Lora(rank=4)),
        put_off(Rehearsal("shard2+selective", 0, "gpt2")),
        put_off(Rehearsal("tp2+fp8_delayed", 0, adapter=Lora(rank=4))),
        put_off(Rehearsal("shard2.tp2+fp8_rowwise+selective", -1)),
        put_off(
            Rehearsal(
                "shard2", 0, adapter=Lora(rank=4, targets=("q_proj",), quantize="nf4"), overrides=(("hidden_size", 64),)
            )
        ),
        put_off(Rehearsal("tp2.ep2+selective", 0, "mixtral")),
        Rehearsal("cp2+full", 0, "gpt2", DROPPING),
        put_off(Rehearsal("shard2", 0, adapter=Lora(rank=4, dropout=0.1))),
    ],
    ids=name,
)
def test_what_is_done_to_modules_is_what_the_plan_lists(case: Rehearsal, compiled: bool) -> None:
    """Also where several features replace one forward: an adapter, put off gradients, kept products, graphs."""
    assert not rehearse(replace(case, compiled=compiled)).unlike


@pytest.mark.parametrize("layout", [*map(put_off, ("shard2", "tp2", "shard2+full")), "pp2.shard2.tp2+zero1"])
def test_layers_are_compiled_once_whatever_the_documents(layout: str) -> None:
    """One graph of the first batch, and one whose number of documents is free, for six layers; three of the loss."""
    seen = rehearse(Rehearsal(layout, overrides=DEEP, compiled=True, steps=4))
    assert seen.graphs <= 2 + 3 and not seen.late_graphs
    assert not seen.breaks and not seen.given_up


def test_layers_that_drop_are_compiled_once() -> None:
    seen = rehearse(Rehearsal("shard2+full", 0, "gpt2", (*DROPPING, ("n_layer", 4)), compiled=True, steps=4))
    assert seen.graphs <= 2 + 3 and not seen.late_graphs
    assert not seen.breaks and not seen.given_up


@pytest.mark.parametrize("layout", ["tp2+nosp+full", put_off("tp2+full")])
def test_recomputed_layers_are_compiled_in_the_same_pieces(layout: str) -> None:
    """A graph ends before the last row of a layer, where its second forward stops; six layers as two."""
    two, six = (
        rehearse(Rehearsal(layout, overrides=(("num_hidden_layers", layers),), compiled=True, steps=4))
        for layers in (2, 6)
    )
    assert six.graphs == two.graphs <= 10 + 3 and not six.late_graphs
    assert sum(six.breaks.values()) == sum(two.breaks.values())
    assert not six.given_up


@pytest.mark.parametrize(
    "layout",
    [
        "tp2+full",
        *(
            put_off(one)
            for one in (
                "tp2",
                "pp2.tp2",
                "pp2.tp2+zb",
                "tp2.cp2",
                "tp2+selective",
                "shard2.tp2.cp2+full",
                "pp2.tp2+zb+full",
            )
        ),
    ],
)
def test_compiled_layers_send_what_the_plan_says(layout: str) -> None:
    """Also where backward gathers again, and where they run twice: a graph that is begun runs to its end, with all that
    it sends."""
    ran, said = rehearse(Rehearsal(layout, overrides=SIZES, compiled=True, aot=True)).sent
    assert ran == said and all(said.values())


def test_layers_with_experts_are_compiled_in_the_same_pieces() -> None:
    """Between the router and the experts, which are not compiled; six layers as two. Besides, the loss has three, and
    the rows of experts have three."""
    two, six = (
        rehearse(Rehearsal("shard2.ep2", 0, "mixtral", (("num_hidden_layers", layers),), compiled=True, steps=4))
        for layers in (2, 6)
    )
    assert six.graphs == two.graphs <= 6 + 3 + 3 and not six.late_graphs
    assert sum(six.breaks.values()) == sum(two.breaks.values())


@pytest.mark.parametrize(
    ("schedule", "compiled"),
    [
        ("zb", False),
        *(put_off(name, False) for name, record in RECORDS.items() if record.splits_backward and name != "zb"),
        ("zbv", True),
    ],
)
def test_weight_gradients_are_put_off_in_compiled_blocks_as_in_others(schedule: str, compiled: bool) -> None:
    """Seven linears a layer; four layers in two stages, or in four on a V."""
    seen = rehearse(Rehearsal(f"pp2+{schedule}", overrides=SIZES, compiled=compiled))
    assert seen.put_off == {14 if schedule == "zb" else 7}
    assert not seen.given_up


def test_layers_that_put_weight_gradients_off_are_compiled_once() -> None:
    """Between their linears: the pieces of one layer serve three."""
    seen = rehearse(Rehearsal("pp2+zb", overrides=DEEP, compiled=True, steps=3))
    assert seen.put_off == {21} and seen.graphs <= 16 + 3
    assert not seen.late_graphs and not seen.given_up


def test_experts_put_their_weight_gradients_off() -> None:
    """Four linears of attention and two of all experts; the router's is computed at once."""
    seen = rehearse(Rehearsal("pp2.ep2.shard2+zb", 0, "mixtral", SIZES))
    assert seen.put_off == {12}
