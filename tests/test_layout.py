"""The `Layout` noun: its text, its legality, its arithmetic."""

from dataclasses import fields, replace

import pytest

from fivefold.core.errors import UserError
from fivefold.parallel.layout import Layout

TEXTS = [
    "single",
    "shard2",
    "shard-1.tp2",
    "tp2",
    "dp2.shard2",
    "shard2.tp2",
    "dp2.shard4.cp2.tp4.pp2.ep8",
    "shard2.tp2+zero1",
    "shard2+zero2+mb4",
    "tp2+nosp",
    "tp2.pp2+v2+split8-8-8-6+interleaved",
    "pp2+zbv",
    "cp4+ring",
    "cp4+2x2",
    "tp2.ep2+etp",
    "shard2+full+fp32",
    "shard2+offload+offload_optimizer+selective+fp64",
    "shard2+fp8",
    "shard2+fp8_rowwise",
    "shard2+8bit_states",
]


def test_text_round_trips(subtests: pytest.Subtests) -> None:
    for text in TEXTS:
        with subtests.test(msg=text):
            layout = Layout.parse(text)
            assert Layout.parse(str(layout)) == layout
            assert sorted(str(layout).replace("+", ".").split(".")) == sorted(text.replace("+", ".").split("."))


OTHER_VALUES = {
    "zero": 1,
    "sequence_parallel": False,
    "expert_tp": True,
    "pp_schedule": "zbv",
    "pp_virtual": 2,
    "pp_split": "2-3",
    "cp_method": "ring",
    "micro_batch_size": 3,
    "recompute": "full",
    "offload_activations": True,
    "offload_optimizer": True,
    "offload_parameters": True,
    "precision": "fp64",
    "fp8": "rowwise",
    "state_dtype": "bf16",
    "gathers": "int8",
    "reductions": "int8",
}


def test_every_field_survives_the_text(subtests: pytest.Subtests) -> None:
    for name in [field.name for field in fields(Layout)]:
        with subtests.test(msg=name):
            layout = replace(Layout(), **{name: OTHER_VALUES.get(name, 2)})
            assert Layout.parse(str(layout)) == layout


def test_words_come_in_a_fixed_order() -> None:
    """Names of files and of tests are made of them."""
    degrees = {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2, "pp": 2, "ep": 2}
    layout = Layout(**degrees, **OTHER_VALUES, fp8_high_layers=2)  # type: ignore[arg-type]
    assert str(layout) == (
        "dp2.shard2.cp2.tp2.pp2.ep2+zero1+zbv+v2+split2-3+ring+mb3+qwz+qgz+full+offload+offload_parameters+offload_optimizer"
        "+fp64+fp8_rowwise+hp2+bf16_states+nosp+etp"
    )


def test_a_split_of_one_number_names_one_stage() -> None:
    layout = Layout.parse("pp2+split8")
    assert layout.pp_split == "8"
    (found,) = layout.violations()
    assert found.what.startswith("pp_split 8 names 1 stages, and there are 2")


def test_a_stage_without_layers_is_refused() -> None:
    (found,) = Layout.parse("pp2+split8-0").violations()
    assert found.about == "pp_split" and found.what.endswith("of a layer or more each")


def test_equal_layouts_are_one_key_whatever_the_spelling() -> None:
    assert len({Layout.parse("tp2.shard2"), Layout.parse("shard2.tp2"), Layout(dp_shard=2, tp=2)}) == 1
    assert Layout(recompute="12 GiB") == Layout.parse("single+keep12GiB")


def test_what_is_not_understood_is_named(subtests: pytest.Subtests) -> None:
    cases = [
        ("tp", "'tp' is not a degree"),
        ("foo2", "'foo2' is not a degree"),
        ("tp0", "tp 0 is not a degree"),
        ("tp-1", "tp -1 is not a degree"),
        ("tp2.tp4", "sets tp twice"),
        ("tp2+zero4", "+zero4 is not an option"),
        ("tp2+zero1+zero2", "sets zero twice"),
        ("", "'' is not a degree"),
    ]
    for text, what in cases:
        with subtests.test(msg=repr(text)):
            with pytest.raises(UserError) as caught:
                Layout.parse(text)
            assert what in caught.value.what


def test_what_was_meant_is_asked(subtests: pytest.Subtests) -> None:
    cases = [
        ("shrd4", "did you mean shard4?"),
        ("fsdp8.tp2", "did you mean shard8?"),
        ("TP2", "did you mean tp2?"),
        ("dp_shard-1", "did you mean shard-1?"),
        ("shard4.zero1", "an option stands behind degrees and a +: +zero1"),
        ("fp32", "an option stands behind degrees and a +: single+fp32"),
        ("+fp32+full", "an option stands behind degrees and a +: single+fp32+full"),
        ("shard4,tp2", "write dpN, shardN"),
        ("tp2+interleave", "did you mean +interleaved?"),
        ("tp2+micro4", "options are zeroN"),
    ]
    for text, fix in cases:
        with subtests.test(msg=text):
            with pytest.raises(UserError) as caught:
                Layout.parse(text)
            assert caught.value.fix and caught.value.fix.startswith(fix)


def test_values_out_of_range_are_refused(subtests: pytest.Subtests) -> None:
    cases = [
        {"zero": 0},
        {"dp_shard": 0},
        {"pp_schedule": "x"},
        {"recompute": "some"},
        {"precision": "fp16"},
        {"fp8": "mx"},
        {"cp_method": "tree"},
        {"micro_batch_size": 0},
        {"pp_virtual": 0},
    ]
    for values in cases:
        with subtests.test(msg=str(values)), pytest.raises(UserError):
            Layout(**values)  # type: ignore[arg-type]


def test_more_ranks_than_can_be_counted_are_refused() -> None:
    assert Layout.parse("shard1024.tp1024").world == Layout.parse("cp1024").world * 1024
    with pytest.raises(UserError, match=r"dp_shard 1048576 x tp 1048576 is more than 1,048,576 ranks"):
        Layout.parse("shard1048576.tp1048576.ep7")
    with pytest.raises(UserError, match="is more than 1,048,576 ranks"):
        Layout.parse("shard-1.tp1048576.pp2")
    with pytest.raises(UserError, match="cp 1025 is not a degree") as caught:
        Layout.parse("cp1025")
    assert caught.value.fix == "cp is 1 to 1,024"


def test_degrees_multiply_but_for_ep() -> None:
    layout = Layout.parse("dp2.shard4.cp2.tp4.pp2.ep8")
    assert layout.world == 2 * 4 * 2 * 4 * 2
    assert layout.data_ranks == 8
    assert layout.shape == (2, 2, 4, 2, 4)
    assert layout.row_multiple == 16


def test_the_innermost_coordinate_is_that_of_tp() -> None:
    """Ranks that tp joins are neighbours; those of a pipeline are the furthest apart."""
    assert [Layout.parse("shard2.tp2.pp2").coordinates(rank) for rank in (1, 2, 4)] == [
        {"tp": 1, "dp_shard": 0, "pp": 0},
        {"tp": 0, "dp_shard": 1, "pp": 0},
        {"tp": 0, "dp_shard": 0, "pp": 1},
    ]


def test_the_dtypes_of_a_step_are_told_apart() -> None:
    """`fivefold verify` computes a reference for each of these texts."""
    texts = ("single", "tp2+fp32+bf16_states", "single+fp64+fp8_rowwise+hp2", "single+fp8_delayed+8bit_states")
    assert [Layout.parse(text).numerics for text in texts] == [
        "bf16",
        "fp32, bf16 states",
        "fp64 with fp8 rowwise but for 2 layers at each end",
        "bf16 with fp8 delayed, 8bit states",
    ]


def test_without_a_pipeline_a_schedule_is_1f1b() -> None:
    assert [Layout.parse(text).schedule.name for text in ("single+zb", "pp2+zb")] == ["1f1b", "zb"]


def test_the_rest_is_filled_in() -> None:
    assert Layout(dp_shard=-1, tp=2).resolve(8).dp_shard == 4
    assert Layout.parse("tp2").resolve(2) == Layout(tp=2)
    assert Layout.parse("dp-1.shard2").resolve(8) == Layout(dp_replicate=4, dp_shard=2)
    assert [Layout.parse(text).rest for text in ("dp-1", "dp2.shard-1", "dp2")] == ["dp_replicate", "dp_shard", ""]
    with pytest.raises(UserError, match="dp_shard and dp_replicate are both -1"):
        Layout(dp_shard=-1, dp_replicate=-1)
    with pytest.raises(UserError, match="ep 3 does not divide dp_shard 8"):
        Layout.parse("shard-1.ep3").resolve(8)
    with pytest.raises(UserError, match="not known yet"):
        Layout(dp_shard=-1).world  # noqa: B018


@pytest.mark.parametrize(
    ("text", "world", "what"),
    [
        ("shard3.cp2.tp4", 16, "dp_shard 3 x cp 2 x tp 4 = 24, but 16 workers started; dp_shard 2 fits"),
        ("shard-1.tp3", 8, "dp_shard -1 x tp 3, but 8 workers started; 3 does not divide 8, tp 2 or 4 does"),
        (
            "dp-1.shard3",
            8,
            "dp_replicate -1 x dp_shard 3, but 8 workers started; 3 does not divide 8, dp_shard 2 or 4 does",
        ),
        ("single", 2, "single = 1, but 2 workers started; dp_shard 2 fits"),
    ],
)
def test_a_world_that_does_not_fit_shows_the_arithmetic(text: str, world: int, what: str) -> None:
    layout = Layout.parse(text)
    with pytest.raises(UserError) as caught:
        layout.resolve(world)
    assert caught.value.what == what


def test_experts_alone_add_no_ranks_and_the_layout_to_write_is_said() -> None:
    with pytest.raises(UserError) as caught:
        Layout.parse("ep2").resolve(2)
    assert str(caught.value.fix).endswith("shard2.ep2")


def test_accumulation() -> None:
    layout = Layout.parse("dp2.shard2.tp2+mb4")
    assert layout.accumulation(64) == 4
    with pytest.raises(UserError) as caught:
        layout.accumulation(40)
    assert "micro_batch_size 4 x dp_replicate 2 x dp_shard 2 = 16" in caught.value.what
    assert caught.value.fix == "set train.global_batch_size to 32 or 48"
    with pytest.raises(UserError) as caught:
        layout.accumulation(3)
    assert caught.value.fix == "set train.global_batch_size to 16"


def test_the_designs_own_text_is_its_own_text() -> None:
    text = "dp2.shard4.cp2.tp4.pp2.ep8+zero1+zbv+v2+ring+mb2+full+fp8"
    assert str(Layout.parse(text)) == text
