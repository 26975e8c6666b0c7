"""Before the first step a run takes the memory of all that it will do, and is the same run afterwards, bit for bit."""

import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from fivefold.config import load_config
from fivefold.core.errors import RunFailed
from fivefold.launch.world import World
from fivefold.training import evaluation, memory
from tests.families import TINY
from tests.training.bodies import MODEL, metrics, run_dir, run_file, same, state, train

MEASURED = ("perf/", "memory/")  # differ from run to run
EXPERTS: dict[str, Any] = {
    "model": {**MODEL, **TINY["deepseek_v3"], "architectures": None},
    "keys": {"layout__dp_shard": 2, "layout__ep": 2, "balance__bias_rate": 0.05, "balance__aux_loss": 0.01},
}
PIPELINE: dict[str, Any] = {"model": MODEL, "keys": {"layout__pp": 2, "precision__fp8": "tensorwise"}}


@pytest.mark.full
@pytest.mark.parametrize("case", [EXPERTS, PIPELINE], ids=["experts", "pipeline"])
def test_the_run_is_the_same_bit_for_bit(case: dict[str, Any], tmp_path: Path) -> None:
    """Weights, state, biases of routers and metrics, of a run that starts and of its resumption."""
    trees = {}
    for tries in (False, True):
        for steps in (1, 2):
            trees[tries] = run_file(
                tmp_path, run__name=f"tries-{tries}", memory__trial=tries, data__validation=0.2, eval__every=1,
                checkpoint__every=1, train__max_steps=steps, scheduler__name="constant", **case["keys"],
            )  # fmt: skip
            (tmp_path / "config.json").write_text(json.dumps(case["model"]))
            ran = train(trees[tries])
            assert ran.error is None and ("GiB in a step, an evaluation and a save" in ran.screen) is tries
    for step in (1, 2):
        assert same(state(trees[True], step), state(trees[False], step))
    alone, tried = (
        [{key: row[key] for key in row if not key.startswith(MEASURED)} for row in metrics(trees[tries])]
        for tries in (False, True)
    )
    assert tried == alone and len(alone) == 2


@pytest.mark.full
@pytest.mark.parametrize("lacks", ["backward", "an evaluation", "the memory of a save"])
def test_memory_runs_out_before_the_first_step(lacks: str, tmp_path: Path) -> None:
    error = train(run_file(tmp_path, data__validation=0.2, memory__trial=True), 1, lacks=lacks).error
    assert isinstance(error, RunFailed)
    assert error.what.startswith(f"rank 0: memory ran out in {lacks}, the trial before the first step: 2.50 GiB more")
    assert not (run_dir(run_file(tmp_path)) / "metrics.jsonl").exists()


def test_memory_as_large_as_the_state_is_taken_where_there_is_none_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_put_back", lambda model: nullcontext())
    monkeypatch.setattr(memory, "_step", lambda job: None)
    monkeypatch.setattr("fivefold.training.preflight.optimizer_bytes", lambda *_: (5, 2**60))
    tried: list[int] = []
    job: Any = SimpleNamespace(
        model=None, world=World(), config=load_config(None, ["eval.every=0"]), data=None,
        optimizer=SimpleNamespace(state={}, zero_grad=lambda **_: None),
        parts=[SimpleNamespace(try_memory=lambda _, more: tried.append(more))],
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="memory"):
        memory.try_memory(job)
    job.optimizer.state = {"of a resumed run": {}}
    memory.try_memory(job)
    assert tried == [0]


def test_the_loss_that_is_tried_is_that_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss of the user's own takes memory of its own, in a step and in an evaluation."""
    seen = list[Any]()
    monkeypatch.setattr(memory, "_put_back", lambda model: nullcontext())
    monkeypatch.setattr(memory, "inputs_of_step", lambda *_, loss: seen.append(loss))
    monkeypatch.setattr(evaluation, "mean_loss", lambda model, batches, loss: seen.append(loss))
    for name in ("passes", "state_of", "squared_norm", "all_reduce_sum"):
        monkeypatch.setattr(memory, name, MagicMock())
    job = MagicMock(config=load_config(None, ["eval.every=1"]), world=World(), parts=[evaluation.Evaluation()])
    job.batch.return_value = [SimpleNamespace(targets=3)]
    memory.try_memory(job)
    assert seen == [job.specs.loss, job.specs.loss]


def test_it_pays_on_a_gpu() -> None:
    cpu, gpu = World(), World(device="cuda:0", backend="nccl")
    for said, expected in (("auto", [False, True]), ("true", [True, True]), ("false", [False, False])):
        config = load_config(None, [f"memory.trial={said}"])
        assert [memory.pays(config, world) for world in (cpu, gpu)] == expected
