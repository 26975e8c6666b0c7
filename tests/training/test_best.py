"""The best validations of a run: which they are, which checkpoints of them stay, and how a run stops early."""

import json
import shutil
from collections.abc import Sequence
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

import fivefold as ff
from fivefold.checkpoint import Remote, best_step, export, step_folder, steps
from fivefold.config import RunConfig, check_best, check_supported, load_config
from fivefold.core.best import Best, retained
from fivefold.core.errors import UserError
from fivefold.launch.folder import best_kept_step
from fivefold.report.run import _best
from fivefold.report.run import main as report
from fivefold.training.evaluation import of_evaluation
from tests.tiers import put_off
from tests.training.bodies import Stopped, column, run_dir, run_file, same, train

# ---- the record ------------------------------------------------------------------------------------------------------


def record(values: Sequence[float | None], **options: Any) -> Best:
    """The record after validations with these values at steps 10, 20, ..."""
    min_delta = options.pop("min_delta", 0.0)
    best = Best(**options)
    for at, value in enumerate(values, start=1):
        best = best.after(10 * at, value, min_delta=min_delta)
    return best


@pytest.mark.parametrize(
    ("values", "mode", "steps_"),
    [
        ([3.0, 2.0, 2.5], "min", (20, 30, 10)),
        ([3.0, 2.0, 2.5], "max", (10, 30, 20)),
        ([2.0, 2.0, 2.0], "min", (10, 20, 30)),  # of equal ones the first
        ([2.0, 2.0, 2.0], "max", (10, 20, 30)),
        ([None, 5.0, None, 4.0], "min", (40, 20)),  # what is no number is never the best
        ([None], "max", ()),
        ([*range(-200, 0)], "min", tuple(range(10, 1010, 10))),  # the first 100 are remembered
        ([*range(-200, 0)], "max", tuple(range(2000, 1000, -10))),
    ],
)
def test_the_ranking(values: list[float | None], mode: Any, steps_: tuple[int, ...]) -> None:
    assert record(values, mode=mode).steps == steps_


@pytest.mark.parametrize(
    ("values", "min_delta", "waited"),
    [
        ([3.0, 2.0, 2.0, 2.0], 0.0, 2),  # a tie is no improvement
        ([3.0, 2.0, 2.5, 1.9], 0.0, 0),
        ([3.0, 2.9, 2.8, 2.7], 0.25, 0),  # small steps add up to one
        ([3.0, 2.9, 2.8], 0.25, 2),
        ([3.0, 2.5], 0.5, 1),  # by more than that
        ([None, None], 0.0, 2),
        ([None, None, 4.0], 0.0, 0),
    ],
)
def test_how_many_validations_have_not_improved(values: list[float | None], min_delta: float, waited: int) -> None:
    best = record(values, min_delta=min_delta)
    assert best.waited == waited
    assert [best.is_over(patience) for patience in (0, waited, waited + 1)] == [False, waited > 0, False]
    assert record([value and -value for value in values], mode="max", min_delta=min_delta).waited == waited


def test_the_record_survives_json_and_a_change_of_metric_begins_anew() -> None:
    best = record([3.0, None, 2.0, 2.5])  # which is one validation without an improvement
    there = {"best": json.loads(json.dumps(best.to_json()))}
    assert Best.resumed(there, "eval/loss", "min") == (best, "step 30: eval/loss 2.0000")
    anew, told = Best.resumed(there, "eval/loss", "max")
    assert anew == Best("eval/loss", "max") and "by eval/loss (min) it was step 30" in told
    assert Best.resumed({}, "train/loss", "min") == (Best("train/loss", "min"), "")


def test_retention_keeps_the_newest_and_the_best_that_are_there() -> None:
    there = [10, 20, 30, 40, 50]
    assert retained(there, keep=2) == {40, 50}
    assert retained(there, keep=1, best=(20, 50, 30), keep_best=2) == {20, 50}
    assert retained(there, keep=1, best=(25, 10, 30), keep_best=1) == {10, 50}  # the save of 25 failed
    assert retained(there, keep=1, best=(20,), keep_best=0) == {50}


def test_the_best_that_is_kept_is_the_last_one_said(tmp_path: Path) -> None:
    config = RunConfig.model_validate(run_file(tmp_path))
    assert best_kept_step(config) is None
    (config.run_dir / "checkpoints" / step_folder(3)).mkdir(parents=True)
    lines = ({"step": step, "eval/best_step": best} for step, best in ((1, 1), (3, 3), (4, 3), (5, None)))
    (config.run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    assert best_kept_step(config) == 3
    (config.run_dir / "checkpoints" / step_folder(3)).rmdir()
    assert best_kept_step(config) is None


@pytest.mark.parametrize(("mode", "said"), [("min", "0.2500 at step 2, whose"), ("max", "0.7500 at step 3")])
def test_the_page_of_a_run_has_the_best_by_its_direction(mode: str, said: str) -> None:
    values = {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.75, 5: None}
    rows = [{"step": step, "eval/loss": value, "eval/best": 0.5} for step, value in values.items()]
    found = _best(load_config(None, [f"eval.mode={mode}"]), [*rows, {"step": 6, "eval/loss": 0.0}], [2, 6])
    assert f"eval/loss {said}" in found and found.endswith("is kept") == (mode == "min")


def test_what_is_no_number_is_null_in_a_row() -> None:
    found = of_evaluation(nan, {"rewards/margins": inf, "kl": 0.5})
    assert found == {"eval/loss": None, "eval/rewards/margins": None, "eval/kl": 0.5}


# ---- runs ------------------------------------------------------------------------------------------------------------


def best_run(folder: Path, **changes: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "train__max_steps": 8, "data__validation": str(folder / "corpus.txt"), "eval__every": 1,
        "eval__max_tokens": 200, "checkpoint__every": 0, "checkpoint__keep": 1, "checkpoint__keep_best": 1,
    }  # fmt: skip
    return run_file(folder, **options | changes)


def there(tree: dict[str, Any]) -> list[int]:
    return steps(run_dir(tree) / "checkpoints")


LOSSES = (5.0, 4.0, 3.0, 3.5, 3.0, 3.2, nan, 3.1)


@pytest.mark.full
def test_the_best_is_saved_at_its_validation_and_stays(tmp_path: Path) -> None:
    """`checkpoint.every` is another number; of the two equal ones the first stays."""
    tree = best_run(tmp_path)
    ran = train(tree, 1, evaluated=LOSSES)
    assert ran.error is None
    assert there(tree) == [3, 8]
    assert column(tree, "eval/best_step") == [1, 2, 3, 3, 3, 3, 3, 3]
    assert column(tree, "eval/best") == [5.0, 4.0, 3.0, 3.0, 3.0, 3.0, 3.0, 3.0]
    assert "best     step 3: eval/loss 3.0000\n" in ran.screen
    assert "--best" in ran.screen and "--step 3" in ran.screen
    assert ff.Run(run_dir(tree)).best == (3, 3.0)
    assert best_step(run_dir(tree)) == 3
    assert export(run_dir(tree), tmp_path / "best", best=True).step == 3
    assert export(run_dir(tree), tmp_path / "last").step == 8
    assert ff.export(ff.Run(run_dir(tree)), tmp_path / "api", best=True).is_dir()
    assert same(weights(tmp_path / "best"), weights(tmp_path / "api"))
    assert not same(weights(tmp_path / "best"), weights(tmp_path / "last"))
    with pytest.raises(UserError, match="both asked for"):
        export(run_dir(tree), tmp_path / "neither", best=True, step=3)
    page = report(run_dir(tree)).read_text()
    assert "eval/loss 3.0000 at step 3, whose checkpoint is kept" in page


def weights(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


@pytest.mark.full
def test_several_best_ones_and_a_direction(tmp_path: Path) -> None:
    tree = best_run(tmp_path, checkpoint__keep_best=2, eval__mode="max", eval__every=2)
    assert train(tree, 1, evaluated=(1.0, 3.0, 2.0, 0.5)).error is None
    assert there(tree) == [4, 6, 8]
    assert column(tree, "eval/best_step") == [None, 2, None, 4, None, 4, None, 4]


@pytest.mark.full
def test_the_loss_of_training_needs_no_held_out_text(tmp_path: Path) -> None:
    tree = best_run(tmp_path, eval__metric="train/loss", data__validation=0, log__every=5)
    assert train(tree, 1).error is None
    losses = dict(zip(column(tree, "step"), column(tree, "train/loss"), strict=True))
    assert list(losses) == [*range(1, 9)]  # rows with a validation are written
    best = min(losses, key=lambda step: losses[step])
    assert set(there(tree)) == {best, 8} and column(tree, "eval/best_step")[-1] == best


@pytest.mark.full
def test_a_best_that_is_not_kept_is_not_exported(tmp_path: Path) -> None:
    tree = best_run(tmp_path, checkpoint__keep_best=0, checkpoint__every=4, checkpoint__keep=2)
    ran = train(tree, 1, evaluated=LOSSES)
    assert "best     step 3: eval/loss 3.0000; not kept (checkpoint.keep_best)" in ran.screen
    assert "--best" not in ran.screen
    with pytest.raises(UserError) as refused:
        best_step(run_dir(tree))
    assert "step 3" in refused.value.what and "--step 8" in str(refused.value.fix)
    plain = run_file(tmp_path, run__name="plain", train__max_steps=1)
    assert train(plain, 1).error is None
    with pytest.raises(UserError, match="no validation"):
        best_step(run_dir(plain))


@pytest.mark.full
def test_early_stopping_ends_a_run_and_lasts(tmp_path: Path) -> None:
    """The best is a little better than the last improvement of more than `min_delta`."""
    tree = best_run(tmp_path, eval__stop={"patience": 2, "min_delta": 0.1}, checkpoint__export_hf="best")
    ran = train(tree, 1, evaluated=(5.0, 4.0, 3.0, 2.95, 3.0))
    assert ran.error is None
    why = "stopped early after step 5: eval/loss has not improved by more than 0.1 in 2 validations"
    assert why in ran.screen and column(tree, "step") == [1, 2, 3, 4, 5]
    assert there(tree) == [4, 5]
    assert "eval.stop.patience=0   # goes on" in ran.screen
    assert same(weights(run_dir(tree) / "hf"), weights_of(tree, 4))
    events = [json.loads(line) for line in (run_dir(tree) / "history.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events] == ["start", "stopped early", "end"]
    assert why in events[1]["what"] and events[2]["what"] == "finished"
    again = train(tree, 1, evaluated=LOSSES)
    assert again.error is None and why in again.screen and column(tree, "step") == [1, 2, 3, 4, 5]
    tree["eval"]["stop"]["patience"] = 0
    assert train(tree, 1, evaluated=(3.3, 2.0, 2.5)).error is None
    assert column(tree, "step") == [*range(1, 9)] and there(tree) == [7, 8]


def weights_of(tree: dict[str, Any], step: int) -> dict[str, Any]:
    out = Path(tree["run"]["dir"]) / f"hf-{step}"
    export(run_dir(tree), out, step=step)
    return weights(out)


@pytest.mark.full
@pytest.mark.parametrize(("layout", "world"), [put_off({}, 1), ({"tp": 2}, 2)])
def test_the_record_survives_a_kill_and_another_layout(tmp_path: Path, layout: dict[str, int], world: int) -> None:
    """Killed at step 7 of 8 after a save at 6: the best one, step 3, is neither lost nor gone on from."""
    options: dict[str, Any] = {"checkpoint__every": 6, "eval__stop": {"patience": 5}}
    alone, stopped = (best_run(tmp_path, run__name=name, **options) for name in ("alone", "stopped"))
    assert train(alone, 1, evaluated=LOSSES).error is None
    assert isinstance(train(stopped, 1, evaluated=LOSSES, stop_at=7).error, Stopped)
    assert there(stopped) == [3, 6]
    stopped["layout"] = layout
    ran = train(stopped, world, evaluated=LOSSES[6:])
    assert ran.error is None and "step 6 of 8" in ran.screen and "best     step 3: eval/loss 3.0000" in ran.screen
    for name in ("step", "eval/best", "eval/best_step"):
        assert column(stopped, name) == column(alone, name)
    assert there(stopped) == there(alone) == [3, 8]
    assert "stopped early after step 8" not in ran.screen  # all steps are done
    assert best_step(run_dir(stopped)) == 3


@pytest.mark.full
def test_a_kill_during_the_save_of_the_best(tmp_path: Path) -> None:
    """The one before stays until the new one is whole."""
    tree = best_run(tmp_path, checkpoint__async=False)
    ran = train(tree, 1, evaluated=LOSSES, unsaved=(3, Stopped))
    assert isinstance(ran.error, Stopped) and there(tree) == [2]
    assert train(tree, 1, evaluated=LOSSES[2:]).error is None
    assert there(tree) == [3, 8] and column(tree, "eval/best_step") == [1, 2, 3, 3, 3, 3, 3, 3]


@pytest.mark.full
def test_the_second_best_stays_where_the_best_cannot_be_saved(tmp_path: Path) -> None:
    tree = best_run(tmp_path, checkpoint__async=False)
    assert train(tree, 1, evaluated=(*LOSSES[:-1], 4.5), unsaved=(3, UserError)).error is None
    assert there(tree) == [2, 8]
    with pytest.raises(UserError, match="step 3") as refused:
        best_step(run_dir(tree))
    assert "--step 2" in str(refused.value.fix)


@pytest.mark.full
def test_copies_of_the_best_stay_too_and_another_machine_goes_on(tmp_path: Path) -> None:
    url = (tmp_path / "bucket").as_uri()
    tree = best_run(tmp_path, checkpoint__remote=url, checkpoint__every=6)
    assert isinstance(train(tree, 1, evaluated=LOSSES, stop_at=7).error, Stopped)
    assert Remote(f"{url}/run").steps() == [3, 6]
    shutil.rmtree(run_dir(tree))
    assert train(tree, 1, evaluated=LOSSES[6:]).error is None
    assert Remote(f"{url}/run").steps() == [3, 8] and there(tree) == [8]  # 3 was never on this machine
    assert best_step(f"{url}/run") == 3
    assert export(f"{url}/run", tmp_path / "best", best=True).step == 3


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "what"),
    [
        (["checkpoint.keep_best=1", "eval.every=0"], "eval.every is 0"),
        (["eval.stop.patience=1", "data.validation=0"], "no text is held out"),
        (["checkpoint.export_hf=best"], "checkpoint.keep_best is 0"),
        (["checkpoint.keep_best=1", "eval.metric=eval/rewards/margins"], "objective.name is sft"),
        (
            ["eval.stop.patience=1", "eval.metric=eval/rewards/accuracies", "objective.name=kto"],
            "kto rates single ones",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(overrides: list[str], what: str) -> None:
    config = load_config(None, overrides)
    with pytest.raises(UserError, match=what) as refused:
        check_supported(config)
    assert refused.value.fix


def test_a_text_of_which_nothing_could_be_held_out_is_refused() -> None:
    config = load_config(None, ["checkpoint.keep_best=1"])
    check_best(config, has_validation=True)
    with pytest.raises(UserError, match=r"checkpoint\.keep_best is set, but no text is held out"):
        check_best(config, has_validation=False)


@pytest.mark.parametrize(("metric", "mode", "direction"), [
    ("eval/loss", "auto", "min"), ("train/loss", "auto", "min"), ("eval/rewards/accuracies", "auto", "max"),
    ("eval/rewards/margins", "auto", "max"), ("train/loss", "max", "max"),
])  # fmt: skip
def test_the_direction_follows_the_metric(metric: str, mode: str, direction: str) -> None:
    assert load_config(None, [f"eval.metric={metric}", f"eval.mode={mode}"]).eval.direction == direction


def test_the_keys_of_a_section_inside_a_section_are_keys() -> None:
    config = load_config(None, ["eval.stop={patience: 3}", "eval.stop.min_delta=1e-3"])
    assert (config.eval.stop.patience, config.eval.stop.min_delta) == (3, 1e-3)
    with pytest.raises(UserError) as refused:
        load_config(None, ["eval.stop.patiense=3"])
    assert "eval.stop.patience" in str(refused.value.fix)
