"""The standing checks: silent where all is well, under every layout; each fault found, and its place named."""

from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from fivefold.checkpoint import steps
from fivefold.core.errors import RunFailed
from fivefold.core.history import load
from fivefold.data import PackedRows
from fivefold.launch.failure import Suspected
from fivefold.training import checks
from fivefold.training.checks import Finding, _outvoted
from fivefold.training.standing_checks import Pace
from tests.allpairs import all_pairs
from tests.data.helpers import prepare_texts, random_texts
from tests.parity import Case
from tests.pool import run_ranks
from tests.tiers import every, first_of_each, put_off
from tests.training import checked
from tests.training.bodies import Stopped, column, run_dir, run_file, same, state, train
from tests.training.checked import hash_of

NORM, KEY, UP = "model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.layers.2.mlp.up_proj.weight"
BYTES = (("vocab_size", 263),)
ROWS = 8


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> PackedRows:
    return prepare_texts(tmp_path_factory.mktemp("rows"), random_texts(3)).train


def found(layout: str, rows: PackedRows, *rest: Any, **options: Any) -> list[Finding]:
    """What every rank finds, the same on each."""
    own = {name: options.pop(name) for name in ("plant", "steps", "rate") if name in options}
    case = Case(layout, rows=ROWS, overrides=BYTES, **options)
    results = run_ranks(case.parsed.world, partial(checked.findings, case, rows, *rest, **own))
    assert all(each == results[0] for each in results)
    return results[0]


def texts(findings: list[Finding]) -> list[str]:
    return [f"{each.what}: {each}" for each in findings]


# ---- nothing where nothing is wrong ----------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "layout": ("single", "shard2", "dp2", "tp2", "tp4", "dp2.shard2", "shard2.tp2", "dp2.tp2"),
    "zero": (1, 2, 3),
    "micro": (1, 2),
    "optimizer": ("adamw", "muon"),
    "tied": (False, True),
    "kv_heads": (1, 2, 4),
    "precision": ("fp32", "fp64", "bf16"),
    "sequence_parallel": (True, False),
    "family": ("llama", "qwen3"),
}


def case_of(choice: dict[str, Any]) -> dict[str, Any]:
    text = f"{choice['layout']}+zero{choice['zero']}+mb{choice['micro']}"
    text += "" if choice["precision"] == "bf16" else f"+{choice['precision']}"
    text += "" if choice["sequence_parallel"] else "+nosp"
    return {"layout": text, **{name: choice[name] for name in ("optimizer", "tied", "kv_heads", "family")}}


def sequence_parallel_has_tp(choice: dict[str, Any]) -> bool:
    return "tp" in choice.get("layout", "tp") or choice.get("sequence_parallel", True)


CLEAN = [case_of(each) for each in all_pairs(OPTIONS, legal=sequence_parallel_has_tp)]


@pytest.mark.full
@pytest.mark.parametrize("options", every(CLEAN, 16), ids=lambda o: "-".join(map(str, o.values())))
def test_a_healthy_run_raises_nothing(rows: PackedRows, options: dict[str, Any]) -> None:
    """Three steps with accumulation, over more than an epoch."""
    assert found(rows=rows, steps=3, **options) == []


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("by", every([0.0, 1e-20, 1e-12, 1e-38, 1e-7], 4))
def test_an_update_that_rounding_swallows_is_no_finding(rows: PackedRows, by: float, optimizer: str) -> None:
    """Nor is a step without any gradient: decay moves the matrices, and norms rightly stay."""
    plant = partial(checked.tiny_gradients, by=by)
    assert found("tp2+mb2+fp32", rows, plant, optimizer=optimizer, steps=2) == []


@pytest.mark.full
@pytest.mark.parametrize("rate", every([1e-9, 0.0, 1e-12, 1e-7], 4))
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_rate_that_rounding_swallows_is_no_finding(rows: PackedRows, rate: float, optimizer: str) -> None:
    assert found("shard2+mb2+fp32", rows, rate=rate, optimizer=optimizer, steps=2) == []


# ---- replicas --------------------------------------------------------------------------------------------------------

REPLICAS = {
    "norms not summed over tp": (
        "tp2", partial(checked.sums_lost, axis="tp"), f"replicas: {NORM} differs over tp: rank 0 against rank 1",
    ),
    "norms not summed over tp, in two data ranks": (
        "shard2.tp2", partial(checked.sums_lost, axis="tp"),
        f"replicas: {NORM} differs over tp: rank 0 against rank 1, rank 2 against rank 3",
    ),
    "shared key heads not summed": (
        "tp4", partial(checked.sums_lost, axis="tp_kv"),
        f"replicas: {KEY} differs over tp: rank 0 against rank 1, rank 2 against rank 3",
    ),
    "a copy missed an update": (
        "dp2", partial(checked.no_gradient, name=UP, on=[1]),
        f"replicas: {UP} differs over dp_replicate: rank 0 against rank 1",
    ),
    "an ulp over dp_replicate": (
        "dp2.shard2", partial(checked.changed, name=UP, on=[3], how="ulp"),
        f"replicas: {UP} differs over dp_replicate: rank 1 against rank 3",
    ),
    "an ulp over tp": (
        "tp4", partial(checked.changed, name=NORM, on=[2], how="ulp"),
        f"replicas: {NORM} differs over tp: ranks 0, 1, 3 against rank 2",
    ),
    "an order": (
        "dp2", partial(checked.changed, name=UP, on=[0], how="swapped"),
        f"replicas: {UP} differs over dp_replicate: rank 0 against rank 1",
    ),
    "a moment": (
        "dp2.shard2", partial(checked.changed, name=UP, on=[0], how="ulp", kind="exp_avg_sq"),
        f"replicas: exp_avg_sq of {UP} differs over dp_replicate: rank 0 against rank 2",
    ),
    "a moment of a shared head": (
        "tp4", partial(checked.changed, name=KEY, on=[3], how="doubled", kind="exp_avg"),
        f"replicas: exp_avg of {KEY} differs over tp: rank 2 against rank 3",
    ),
}  # fmt: skip


# What a smaller world shows too, a check of other bytes of the same tensors, and two groups of one axis once more.
RARE = {
    "norms not summed over tp, in two data ranks",
    "an order",
    "a moment of a shared head",
    "dropped",
    "stale on one shard",
    "shared key heads not summed",
    "an ulp over dp_replicate",
    "dropped on one tp rank",
}


def often(faults: dict[str, Any]) -> list[Any]:
    """The names of the faults, those of `RARE` for a campaign."""
    return [put_off(name) if name in RARE else name for name in faults]


@pytest.mark.full
@pytest.mark.parametrize("fault", often(REPLICAS))
def test_copies_that_differ(rows: PackedRows, fault: str) -> None:
    layout, plant, expected = REPLICAS[fault]
    assert expected in texts(found(f"{layout}+mb2+fp32", rows, plant))


@pytest.mark.full
def test_copies_that_differ_are_told_by_axis(rows: PackedRows) -> None:
    """A rank that differs from all others differs over both axes."""
    plant = partial(checked.changed, name=NORM, on=[3], how="ulp")
    assert texts(found("dp2.tp2+mb2+fp32", rows, plant)) == [
        f"replicas: {NORM} differs over dp_replicate: rank 1 against rank 3",
        f"replicas: {NORM} differs over tp: rank 2 against rank 3",
    ]


@pytest.mark.full
def test_a_momentum_of_muon_that_differs(rows: PackedRows) -> None:
    plant = partial(checked.changed, name=UP, on=[1], how="ulp", kind="momentum_buffer")
    assert texts(found("dp2+mb2+fp32", rows, plant, optimizer="muon")) == [
        f"replicas: momentum_buffer of {UP} differs over dp_replicate: rank 0 against rank 1"
    ]


def test_a_hash_knows_every_bit_and_place() -> None:
    torch.manual_seed(3)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        plain = torch.randn(1009, dtype=dtype)
        changes = [plain.clone() for _ in range(4)]
        changes[0][7] = torch.nextafter(plain[7], torch.tensor(9.0, dtype=dtype))
        changes[1][[3, 1000]] *= -1  # two signs
        changes[2][:2] = plain[:2].flip(0)
        changes[3] = -plain
        assert len({*hash_of(plain, *changes)}) == 5
        assert hash_of(plain) == hash_of(plain.clone()) != hash_of(plain[:-1])
    assert hash_of(None, torch.empty(0), torch.zeros(1), torch.zeros(2))[:2] == [0, 0]


def test_a_hash_does_not_depend_on_its_pieces_for_small_tensors_and_sees_all_of_large_ones() -> None:
    plain = torch.randn(1000)
    small = hash_of(plain[:64])
    assert hash_of(plain, plain[:64])[1:] == small, "nor on what is hashed beside it"
    with patch("fivefold.training.checks.PIECE_OF_CPU", 64):
        assert hash_of(plain[:64]) == small
        for at in (0, 63, 64, 500, 999):
            other = plain.clone()
            other[at] += 1
            assert hash_of(other) != hash_of(plain)
        assert hash_of(plain) != hash_of(torch.cat([plain[64:128], plain[:64], plain[128:]]))


# ---- movement --------------------------------------------------------------------------------------------------------

MOVED = {
    "dropped": ("shard2.tp2", partial(checked.dropped, name=NORM), NORM, "is in no group of the optimizer on rank"),
    "dropped on one tp rank": (
        "tp2", partial(checked.dropped, name=UP, on=[1]), UP, "is in no group of the optimizer on rank 1",
    ),
    "stale": (
        "shard2.tp2", partial(checked.stale, name=UP), UP, "did not take the update of its moments on ranks 0, 1, 2, 3"
    ),
    "stale on one shard": (
        "shard2", partial(checked.stale, name=UP, on=[1]), UP, "did not take the update of its moments on rank 1",
    ),
    "a copy of the optimizer's own": (
        "dp2", partial(checked.replaced, name=KEY), KEY, "is in no group of the optimizer on ranks 0, 1",
    ),
    "no step": ("tp2", checked.frozen_step, "the optimizer", "took no step on ranks 0, 1"),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("fault", often(MOVED))
def test_what_did_not_move(rows: PackedRows, fault: str) -> None:
    layout, plant, where, detail = MOVED[fault]
    faults = [each for each in found(f"{layout}+mb2+fp32", rows, plant) if each.what == "moved"]
    assert [each.where for each in faults] == [where] and faults[0].detail.startswith(detail)


@pytest.mark.full
@pytest.mark.parametrize("plant", [put_off(checked.stale), checked.forgotten])
def test_a_matrix_of_muon_that_did_not_move(rows: PackedRows, plant: Any) -> None:
    faults = found("shard2.tp2+mb2+fp32", rows, partial(plant, name=UP), optimizer="muon")
    assert texts(faults) == [f"moved: {UP} did not change at all on ranks 0, 1, 2, 3"]


# ---- finite ----------------------------------------------------------------------------------------------------------


NOT_FINITE = [("weight", "nan"), ("exp_avg", "inf"), ("exp_avg_sq", "nan")]
NOT_FINITE += [("weight", "inf"), ("exp_avg", "nan"), ("exp_avg_sq", "inf")]  # in a campaign


@pytest.mark.full
@pytest.mark.parametrize("case", first_of_each(NOT_FINITE, lambda case: case[0]), ids="-".join)
def test_what_is_not_a_number(rows: PackedRows, case: tuple[str, str]) -> None:
    kind, how = case
    label = UP if kind == "weight" else f"{kind} of {UP}"
    plant = partial(checked.changed, name=UP, on=[1, 3], how=how, kind=kind)
    assert texts(found("shard2.tp2+mb2+fp32", rows, plant)) == [f"finite: {label} is not finite on ranks 1, 3"]


# ---- rates -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [put_off("adamw"), "muon"])
def test_a_rate_that_is_not_the_schedule_s(rows: PackedRows, optimizer: str) -> None:
    plant = partial(checked.rate_is, rate=0.004, on=[1])
    group = {"adamw": 1, "muon": 2}[optimizer]
    expected = f"rates: the learning rate of group {group} is 0.004, not 0.003, on rank 1"
    assert expected in texts(found("tp2+mb2+fp32", rows, plant, optimizer=optimizer))


@pytest.mark.full
@pytest.mark.parametrize("optimizer", ["adamw", put_off("muon")])
def test_a_count_of_updates_that_is_not_the_run_s(rows: PackedRows, optimizer: str) -> None:
    faults = texts(found("shard2+mb2+fp32", rows, partial(checked.counts, by=-1), optimizer=optimizer))
    assert faults == ["rates: the optimizer counts 0 updates, not 1, on ranks 0, 1"]


# ---- the ledger ------------------------------------------------------------------------------------------------------

LEDGER = {  # two micro batches of two rows per data rank: rows 0, 1, 4, 5 are the first's
    "all read the same": ("shard2", checked.all_read_the_first_s, [
        "rank 1 read rows 0, 1, 4, 5 in place of rows 2, 3, 6, 7",
        "rows 0, 1, 4, 5 read more than once", "rows 2, 3, 6, 7 read by nobody",
    ]),
    "copies read the same": ("dp2", checked.all_read_the_first_s, [
        "rank 1 read rows 0, 1, 4, 5 in place of rows 2, 3, 6, 7",
        "rows 0, 1, 4, 5 read more than once", "rows 2, 3, 6, 7 read by nobody",
    ]),
    "tp ranks read different rows": ("shard2.tp2", checked.ranks_read_as_data_ranks, [
        "rank 1 read rows 2, 3, 6, 7 in place of rows 0, 1, 4, 5",
        "rank 2 read rows 0, 1, 4, 5 in place of rows 2, 3, 6, 7",
        "rows 0, 1, 4, 5 read more than once", "rows 2, 3, 6, 7 read by nobody",
    ]),
    "another's": ("dp2.tp2", checked.swapped_rows, [
        "ranks 0, 1 read rows 2, 3, 6, 7 in place of rows 0, 1, 4, 5",
        "ranks 2, 3 read rows 0, 1, 4, 5 in place of rows 2, 3, 6, 7",
    ]),
    "a row twice": ("shard2", checked.the_second_twice, [
        "rank 0 read row 1 in place of row 5", "row 1 read more than once", "row 5 read by nobody",
    ]),
    "shifted by one": ("shard2", checked.shifted, [
        "rank 0 read rows 1, 2, 5, 6 in place of rows 0, 1, 4, 5",
        "rank 1 read rows 3, 4, 7 in place of rows 2, 3, 6, 7", "row 0 read by nobody",
    ]),
    "another step": ("single", checked.the_step_before, [
        "rank 0 read what is no row of this step in place of rows 0, 1, 2, 3, 4, 5, 6, 7",
        "rows 0, 1, 2, 3, 4, 5, 6, 7 read by nobody",
    ]),
    "too little": ("shard2", checked.one_row_less, ["rank 1 read 3 rows, not 4", "row 7 read by nobody"]),
    "another label": ("tp2", checked.other_labels, ["rank 1 read what is no row of this step in place of row 7"]),
    "other bounds": ("tp2", checked.other_bounds, ["rank 1 read what is no row of this step in place of rows 0, 1"]),
}  # fmt: skip


@pytest.mark.full
@pytest.mark.parametrize("layout", dict.fromkeys(layout for layout, *_ in LEDGER.values()))
def test_rows_that_are_not_those_of_the_step(rows: PackedRows, layout: str, subtests: pytest.Subtests) -> None:
    """Of one model, which looks at what each fault reads."""
    faults = [name for name, (where, *_) in LEDGER.items() if where == layout]
    case = Case(f"{layout}+mb2+fp32", rows=ROWS, overrides=BYTES)
    per_rank = run_ranks(case.parsed.world, checked.misread, case, rows, [LEDGER[name][1] for name in faults])
    assert all(each == per_rank[0] for each in per_rank)
    for name, findings in zip(faults, per_rank[0], strict=True):
        with subtests.test(msg=name):
            assert texts(findings) == [f"ledger: {each}" for each in LEDGER[name][2]]


@pytest.mark.full
def test_rows_that_come_again_within_a_step_are_no_finding(tmp_path: Path) -> None:
    few = prepare_texts(tmp_path, random_texts(3, documents=7, longest=40), packing=False).train
    assert len(few) < ROWS and found("shard2+mb2+fp32", few, steps=3) == []


# ---- a run -----------------------------------------------------------------------------------------------------------


def test_an_error_says_what_where_and_what_to_do() -> None:
    several = [Finding("finite", f"w{i}", "is not finite on rank 0") for i in range(6)]
    checks.fail_on([], step=3, passed=None)
    with pytest.raises(RunFailed) as caught:
        checks.fail_on(several, step=300, passed=200)
    assert str(caught.value).splitlines() == [
        "standing check at step 300: w0 is not finite on rank 0",
        "what was trained after step 200 is wrong: remove its checkpoints, and prove the layout with fivefold verify",
        "also: w1 is not finite on rank 0; w2 is not finite on rank 0; w3 is not finite on rank 0; 2 more; "
        "see fivefold docs explain/checkpoints, Standing checks",
    ]
    assert caught.value.exit_code == 1 and not isinstance(caught.value, Suspected)
    with pytest.raises(RunFailed, match=r"try without train\.parts, which fivefold verify leaves out"):
        checks.fail_on(several, step=300, passed=200, has_parts=True)


@pytest.mark.full
def test_weights_that_come_in_unlike_are_found_before_the_first_step(tmp_path: Path) -> None:
    """In one bit, which the digests of what the nodes read may not cover."""
    tree = run_file(tmp_path, layout__dp_replicate=2)
    error = run_ranks(2, checked.train_unlike, tree)[0].error
    what = "standing check before the first step: lm_head.weight differs over dp_replicate: rank 0 against rank 1"
    assert isinstance(error, RunFailed) and error.what == what
    assert error.fix and error.fix.startswith("nothing was trained yet")
    assert column(tree, "step") == []


def test_an_error_names_the_ranks_only_if_all_findings_do() -> None:
    wrong = [Finding("replicas", "w", "differs", (3,)), Finding("ledger", "rank 1", "read row 2", (1,))]
    with pytest.raises(Suspected) as caught:
        checks.fail_on(wrong, step=3, passed=None)
    assert caught.value.ranks == (1, 3)
    with pytest.raises(RunFailed) as without:
        checks.fail_on([*wrong, Finding("moved", "w", "did not move")], step=3, passed=None)
    assert not isinstance(without.value, Suspected)


@pytest.mark.parametrize(
    ("values", "wrong"), [([7, 7, 8], (2,)), ([7, 8], ()), ([7, 8, 9], ()), ([7, 7, 8, 8], ()), ([7, 7, 7, 8], (3,))]
)
def test_of_copies_that_differ_those_are_wrong_that_most_are_not(values: list[int], wrong: tuple[int, ...]) -> None:
    copies = list(range(len(values)))
    seen = {rank: (copies, value) for rank, value in enumerate(values)}
    assert _outvoted(seen) == wrong


@pytest.mark.full
@pytest.mark.parametrize("may_leave", [False, True])
def test_a_run_names_its_straggler_and_ends_saved_if_it_may_leave(may_leave: bool, tmp_path: Path) -> None:
    tree = run_file(tmp_path, train__check_every=1)
    ran = run_ranks(2, partial(checked.with_slow_rank, tree, may_leave))[0]
    told = "rank 1 computes 3.0 times as slowly as the usual one"
    assert f"note: step 3: {told}" in ran.screen
    assert [(event.kind, event.step, event.what) for event in load(run_dir(tree)).events] == [("straggler", 3, told)]
    assert column(tree, "step") == ([1, 2, 3] if may_leave else [1, 2, 3, 4, 5, 6])
    assert (3 in steps(run_dir(tree) / "checkpoints")) == may_leave
    assert isinstance(ran.error, Suspected) == may_leave


def test_a_straggler_is_named_after_three_checks_in_a_row() -> None:
    pace, usual, slow = Pace(), [1.0, 1.1, 1.0, 0.9], [1.0, 1.1, 3.0, 0.9]
    assert [pace.see(each) for each in (slow, slow, usual, slow, slow)] == [[]] * 5
    assert pace.see(slow) == ["rank 2 computes 3.0 times as slowly as the usual one"] and pace.stragglers == [2]
    assert pace.see(slow) == [] and pace.stragglers == [2]  # it is named once
    assert pace.see(usual) == [] and pace.stragglers == []


@pytest.mark.full
@pytest.mark.parametrize(("layout", "axis"), [({"tp": 2}, "tp"), put_off({"dp_replicate": 2}, "dp_replicate")])
def test_a_run_ends_with_the_step_that_fails(tmp_path: Path, layout: dict[str, int], axis: str) -> None:
    """Found at the next check, before that step is saved: what went before a check that passed stands."""
    tree = run_file(tmp_path, train__max_steps=9, train__check_every=2, checkpoint__every=2) | {"layout": layout}
    results = run_ranks(2, checked.train_and_break, tree, 3)
    assert {type(ran.error) for ran in results} == {RunFailed} and len({str(ran.error) for ran in results}) == 1
    error = results[0].error
    assert isinstance(error, RunFailed) and error.exit_code == 1
    assert error.what == f"standing check at step 4: {NORM} differs over {axis}: rank 0 against rank 1"
    assert error.fix and "after step 2" in error.fix and error.more
    assert column(tree, "step") == [1, 2, 3, 4] and steps(run_dir(tree) / "checkpoints") == [2]


@pytest.mark.full
def test_a_run_that_is_wrong_from_its_start_ends_with_its_first_step(tmp_path: Path) -> None:
    tree = run_file(tmp_path, layout__tp=2)
    error = run_ranks(2, checked.train_and_break, tree, 1)[0].error
    assert isinstance(error, RunFailed) and error.what.startswith("standing check at step 1: ")
    assert error.fix and "since this start" in error.fix


@pytest.mark.full
@pytest.mark.parametrize("optimizer", [put_off("adamw"), "muon"])
def test_checks_change_no_number(tmp_path: Path, optimizer: str) -> None:
    never, always = (
        run_file(tmp_path, run__name=f"{every}", train__check_every=every, optimizer__name=optimizer, layout__tp=2)
        for every in (0, 1)
    )
    assert train(never).error is None and train(always).error is None
    for name in ("train/loss", "train/grad_norm"):
        assert column(never, name) == column(always, name)
    assert same(state(never, 6), state(always, 6))


@pytest.mark.full
def test_the_first_step_of_a_start_every_few_those_saved_and_the_last_are_checked(tmp_path: Path) -> None:
    """Resumed at step 3 of a run that skipped step 2: the optimizer's count of updates goes on."""
    tree = run_file(tmp_path, train__max_steps=7, train__check_every=4, checkpoint__every=3)
    assert isinstance(train(tree, stop_at=6, inf_gradient=(2,)).error, Stopped)
    assert column(tree, "train/skipped_steps")[-1] == 1
    for ran, at in run_ranks(2, checked.train_and_note, tree):
        assert ran.error is None and at == [4, 6, 7]  # 6 is saved
    other = run_file(tmp_path, run__name="other", train__check_every=4)
    assert [at for _, at in run_ranks(2, checked.train_and_note, other)] == [[1, 4, 6]] * 2
    never = run_file(tmp_path, run__name="never", train__check_every=0)
    assert [at for _, at in run_ranks(2, checked.train_and_note, never)] == [[], []]


OTHER_LAYOUTS = [{"dp_shard": 2, "tp": 2}, {"dp_replicate": 2, "dp_shard": 2}, {"dp_shard": 4}]


@pytest.mark.full
@pytest.mark.parametrize("layout", every(OTHER_LAYOUTS, 3))  # the matrix loads under each what another has saved
def test_a_run_resumed_under_another_layout_passes(tmp_path: Path, layout: dict[str, int]) -> None:
    tree = run_file(tmp_path, train__max_steps=7, train__check_every=1, checkpoint__every=3, train__micro_batch_size=1)
    assert isinstance(train(tree, stop_at=6).error, Stopped)
    assert train({**tree, "layout": layout}, world=4).error is None
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.full
def test_a_skipped_step_passes(tmp_path: Path) -> None:
    """Nothing moved, and the rate is that of the step before."""
    tree = run_file(tmp_path, train__check_every=1)
    assert train(tree, inf_gradient=(1, 3)).error is None
