"""Runs whose replicas train apart between outer steps: kills and resumes, what is saved, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fivefold.checkpoint import Checkpoint, step_folder
from fivefold.config import RunConfig, check_supported
from fivefold.core.errors import UserError
from tests.training.bodies import Stopped, column, run_dir, run_file, same, state, train

OPTIONS: dict[str, Any] = {
    "layout__dp_replicate": 2, "outer__every": 3, "train__max_steps": 7, "train__check_every": 1,
    "checkpoint__every": 2, "train__global_batch_size": 4,
}  # fmt: skip
NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.full
def test_a_run_goes_on_bitwise_from_the_middle_of_a_period(tmp_path: Path) -> None:
    """Step 4 is in the second period: replicas have weights and moments of their own, and the outer step a momentum."""
    alone, stopped = (run_file(tmp_path, **OPTIONS, run__name=name) for name in ("alone", "stopped"))
    ran = train(alone)
    assert ran.error is None and "meet every 3 steps: SGD of rate 0.7 and Nesterov momentum 0.9" in ran.screen
    assert isinstance(train(stopped, stop_at=6).error, Stopped)
    saved = state(stopped, 4)
    kinds = {name.removesuffix(f"/{NAME}") for name in saved if name.endswith(NAME)}
    own = {f"replica{at}/{kind}" for at in (0, 1) for kind in ("weight", "exp_avg", "exp_avg_sq")}
    assert kinds == {"weight", "outer_momentum", *own}
    for kind in ("weight", "exp_avg"):
        assert not torch.equal(saved[f"replica0/{kind}/{NAME}"], saved[f"replica1/{kind}/{NAME}"])
    one = run_file(tmp_path, **OPTIONS, run__name="stopped")
    one["layout"] = {"dp_replicate": 1}
    refused = train(one, world=1).error
    assert isinstance(refused, UserError) and "outer.every 3" in refused.what
    ran = train(stopped)
    assert ran.error is None and "step 4 of 7" in ran.screen
    assert column(stopped, "train/loss") == column(alone, "train/loss")
    last = state(stopped, 7)
    assert same(last, state(alone, 7))
    for at in (0, 1):  # an outer step follows the last one
        assert torch.equal(last[f"weight/{NAME}"], last[f"replica{at}/weight/{NAME}"])
    without = run_file(tmp_path, **OPTIONS, run__name="stopped")
    without["train"]["max_steps"], without["outer"] = 8, {}
    refused = train(without).error
    assert isinstance(refused, UserError) and "outer.every is (not set), but" in refused.what


# A rate for each tensor, from the norms of what a replica has seen: a number that is its own.
TRUST = """
import torch

class Trust(torch.optim.Optimizer):  # as LAMB has it, arXiv:1904.00962
    def __init__(self, params, lr, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["ratio"], state["seen"] = 0.0, torch.zeros(())
                state["seen"] += 1
                state["ratio"] = 0.9 * state["ratio"] + 0.1 * float(p.norm() / (p.grad.norm() + 1e-6))
                ratio = min(state["ratio"] / (1 - 0.9 ** float(state["seen"])), 10.0)
                p.add_(p.grad + group["weight_decay"] * p, alpha=-group["lr"] * ratio)
"""


@pytest.mark.full
def test_a_replica_goes_on_with_its_own_numbers(tmp_path: Path) -> None:
    """Of a user's optimizer, in the middle of a period; a period later the weights of all replicas depend on them."""
    (tmp_path / "trust.py").write_text(TRUST)
    rule = {"name": "python", "path": f"{tmp_path / 'trust.py'}:Trust", "learning_rate": 1e-2, "weight_decay": 0.1}
    alone, stopped = (
        run_file(tmp_path, **OPTIONS, run__name=name) | {"optimizer": rule} for name in ("alone", "stopped")
    )
    assert train(alone).error is None
    assert isinstance(train(stopped, stop_at=6).error, Stopped)
    numbers = Checkpoint.open(run_dir(stopped) / "checkpoints" / step_folder(4)).manifest.scalars[NAME]
    assert {*numbers} == {f"replica{at}/{kind}" for at in (0, 1) for kind in ("ratio", "seen")}
    assert numbers["replica0/ratio"] != numbers["replica1/ratio"]
    assert train(stopped).error is None
    assert column(stopped, "train/loss") == column(alone, "train/loss")
    assert same(state(stopped, 7), state(alone, 7))


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"layout__dp_replicate": 1}, "dp_replicate is 1"),
        ({"optimizer__name": "muon"}, "with optimizer.name: muon"),
        ({"eval__every": 4, "data__validation": 0.1}, "eval.every 4 is no multiple of outer.every 3"),
        ({"sample__every": 5, "sample__prompts": ["a"]}, "sample.every 5 is no multiple"),
        ({"outer__every": 0, "outer__momentum": 0.5}, "outer.every is 0"),
    ],
)
def test_what_needs_equal_replicas_is_refused(tmp_path: Path, changes: dict[str, Any], what: str) -> None:
    plain = RunConfig.model_validate(run_file(tmp_path, **OPTIONS))
    check_supported(plain)
    with pytest.raises(UserError, match=what.replace(".", r"\.")):
        check_supported(RunConfig.model_validate(run_file(tmp_path, **OPTIONS | changes)))
