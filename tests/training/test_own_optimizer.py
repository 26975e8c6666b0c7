"""Runs whose optimizer is a class of the user's own, which the run file names."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fivefold.checkpoint import agreement
from fivefold.config import OptimizerSection, RunConfig, check_supported, load_config
from fivefold.core.errors import UserError
from fivefold.core.named_code import NamedCode
from fivefold.training.optimizers import Weights, rule_for
from fivefold.training.optimizers.python import PythonOptimizer
from fivefold.training.optimizers.trial import why_not
from tests.tiers import put_off
from tests.training.bodies import Stopped, column, run_file, same, state, train

# Its count is a Python number, and its momentum has a name of its own: neither is one of the library's optimizers.
LION = """
import torch

class Lion(torch.optim.Optimizer):  # arXiv:2302.06675, with a bias correction
    def __init__(self, params, lr, weight_decay=0.0, betas=(0.9, 0.99)):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"], state["m"] = 0, torch.zeros_like(p)
                state["count"] += 1
                beta1, beta2 = group["betas"]
                update = state["m"] * beta1 + p.grad * (1 - beta1)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.tanh(update * 100), alpha=-group["lr"] * (1 - beta2 ** state["count"]) * 50)
                state["m"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
"""
OPTIONS: dict[str, Any] = {"train__max_steps": 5, "train__check_every": 1, "checkpoint__every": 2}


def tree_of(folder: Path, source: str = LION, *, name: str = "Lion", **changes: Any) -> dict[str, Any]:
    """A run that is trained by a class."""
    tree = run_file(folder, **changes)
    (folder / "my_optimizer.py").write_text(source)
    tree["optimizer"] = {
        "name": "python", "path": f"{folder / 'my_optimizer.py'}:{name}", "learning_rate": 1e-2, "weight_decay": 0.1,
    }  # fmt: skip
    return tree


@pytest.mark.full
def test_layouts_train_alike_and_a_run_goes_on_under_another(tmp_path: Path) -> None:
    """In fp64, where nothing is rounded that could hide a difference; its count comes back as a number, not in fp32."""
    fp64: dict[str, Any] = {**OPTIONS, "precision__compute": "fp64"}
    alone, stopped = (tree_of(tmp_path, run__name=name, **fp64) for name in ("alone", "stopped"))
    assert train(alone, 1).error is None
    stopped["layout"] = {"tp": 2}
    assert isinstance(train(stopped, stop_at=4).error, Stopped)
    stopped["layout"] = {"pp": 2}
    ran = train(stopped)
    assert ran.error is None and "step 2 of 5" in ran.screen
    shards = tree_of(tmp_path, run__name="shards", **fp64)
    assert train(shards).error is None
    for tree in (stopped, shards):
        assert column(tree, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-10)
    assert {key.partition("/")[0] for key in state(alone, 5)} == {"weight", "m"}
    assert column(alone, "train/loss")[-1] < column(alone, "train/loss")[0]


@pytest.mark.full
def test_resumed_it_is_bitwise_the_run_left_alone_and_a_changed_file_is_said(tmp_path: Path) -> None:
    alone, stopped = (tree_of(tmp_path, run__name=name, **OPTIONS) for name in ("alone", "stopped"))
    assert train(alone).error is None
    assert isinstance(train(stopped, stop_at=4).error, Stopped)
    before = NamedCode.read(stopped["optimizer"]["path"], "optimizer.path").digest
    assert train(stopped).error is None
    assert same(state(stopped, 5), state(alone, 5))
    (tmp_path / "my_optimizer.py").write_text(LION.replace("* 100", "* 99"))
    after = NamedCode.read(stopped["optimizer"]["path"], "optimizer.path").digest
    ran = train(stopped | {"train": stopped["train"] | {"max_steps": 6}})
    assert ran.error is None and f"the code of optimizer.path {before} → {after}" in ran.screen
    history = [json.loads(line) for line in (tmp_path / "stopped" / "history.jsonl").read_text().splitlines()]
    assert [e["code"]["optimizer.path"] for e in history if e["event"] == "start"] == [before, before, after]


SGD = """
import torch

class Sgd(torch.optim.Optimizer):
    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * group["lr"])
"""


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def Sgd(params, lr): ...", "Sgd: it is no class of a torch.optim.Optimizer"),
        (SGD.replace("lr)", "rate)").replace('"lr": lr', '"lr": rate'), "it takes no lr"),
        (SGD.replace('"lr": lr', '"lr": 2 * lr'), None),
        (SGD.replace('{"lr": lr}', '{"rate": lr}').replace('["lr"]', '["rate"]'), None),
        (SGD.replace('group["lr"]', "0.1"), "although the lr of its groups is 0"),
        (SGD.replace("p.sub_(", "self.count = getattr(self, 'count', 0) + 1; p.sub_("), "counts in count of self"),
        (SGD.replace("p.sub_(", "group['k'] = group.get('k', 0) + 1; p.sub_("), "counts in k of its parameter groups"),
        (SGD.replace("p.sub_(", "self.state[p]['seen'] = [1]; p.sub_("), "keeps seen as a list"),
        (SGD.replace("p.sub_(", "self.state[p]['seen'] = p * 1j; p.sub_("), "keeps seen in torch.complex64"),
        (SGD.replace("p.sub_(", "self.state['all'] = 1; p.sub_("), "keeps self.state['all'], which belongs to no"),
        (SGD.replace("p.sub_(", "s = self.state[p]; s.update({} if s else {'n': 1, 'most': None}); s['most']; p.sub_("),
         "from a checkpoint its step raises KeyError: 'most'"),
        (SGD.replace("p.sub_(", "self.seen = [*getattr(self, 'seen', []), 1]; p.sub_(len(self.seen) * "),
         "from a checkpoint it goes on otherwise"),
        (SGD.replace("p.sub_(", "p.sub_(torch.rand(()) * "), "it draws random numbers"),
        (SGD.replace("p.sub_(", "p.data = p.data.sub("), "it gives parameters other memory"),
        (SGD.replace("step(self)", "step(self, closure)"), "its step needs closure"),
        (SGD + "    def train(self): ...\n    def eval(self): ...\n", "it has train() and eval()"),
        (SGD.replace("__init__(params", "__init__([{'params': params[0]['params'][:1]}]"), "leave out parameters"),
        (SGD.replace("p.sub_(", "q.sub_("), "my_optimizer.py:12: NameError: name 'q' is not defined"),
        (SGD.replace("(params, {", "(params, 3, {"), "my_optimizer.py:6: TypeError"),
        ("import nothing_like_it\n" + SGD, "my_optimizer.py:1: ModuleNotFoundError"),
        ("", "my_optimizer.py has no Sgd"),
    ],
)  # fmt: skip
def test_a_class_that_a_run_cannot_use_is_refused(tmp_path: Path, source: str, said: str | None) -> None:
    (tmp_path / "my_optimizer.py").write_text(source)
    options = OptimizerSection(name="python", path=f"{tmp_path / 'my_optimizer.py'}:Sgd")
    if said is None:  # `defaults` are for groups that are given none
        said = "parameter groups do not have the lr"
    with pytest.raises(UserError) as error:
        rule_for(options)
    assert said in error.value.what


OWN_DECAY = """
class Own(torch.optim.Optimizer):
    def __init__(self, params, lr, weight_decay=0.3):
        super().__init__(params, {"lr": lr})
        self.decay = weight_decay

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * self.decay)
"""
BY_OPTIONS = """
class Adam(torch.optim.AdamW):
    def __init__(self, params, lr, **options):
        super().__init__([{**group, "params": [p]} for group in params for p in group["params"]], lr=lr, **options)
"""


def test_weights_decay_as_the_run_file_says(tmp_path: Path) -> None:
    """By the groups, whether a class names its decay, takes it by `**options`, or makes groups of its own."""
    (tmp_path / "my_optimizer.py").write_text(f"import torch\n{OWN_DECAY}{BY_OPTIONS}")

    def decays(name: str, **options: Any) -> list[float]:
        section = OptimizerSection(name="python", path=f"{tmp_path / 'my_optimizer.py'}:{name}", **options)
        blocks, vectors = ([nn.Parameter(torch.ones(*shape)) for _ in range(2)] for shape in ((3, 2), (3,)))
        (made,) = rule_for(section).reference(Weights(blocks, [], vectors), section, 0.1)
        return [group["weight_decay"] for group in made.param_groups]

    assert decays("Adam") == [0, 0, 0, 0] and decays("Adam", weight_decay=0.2) == [0.2, 0.2, 0, 0]
    with pytest.raises(UserError, match="does not depend on the weight_decay of its groups"):
        decays("Own", weight_decay=0.2)
    section = OptimizerSection(name="python", path=f"{tmp_path / 'my_optimizer.py'}:Own")
    whole = nn.Parameter(torch.ones(3, 2))
    (made,) = rule_for(section).reference(Weights([whole], [], []), section, 0.1)
    made.step()
    assert torch.equal(whole, torch.ones(3, 2))  # not by a default of its own


def test_an_option_that_no_group_has_is_tried_as_it_is_given(tmp_path: Path) -> None:
    source = SGD.replace(
        "lr):", "lr, by='none'):\n        self._by = {'norm': torch.norm, 'none': torch.ones_like}[by]"
    )
    (tmp_path / "my_optimizer.py").write_text(source.replace("p.grad *", "p.grad / self._by(p.grad) *"))
    for by, is_refused in (("none", False), ("norm", True)):
        section = OptimizerSection(
            name="python", path=f"{tmp_path / 'my_optimizer.py'}:Sgd", options={"by": by}, learning_rate=1e-2
        )
        rule = rule_for(section)
        assert isinstance(rule, PythonOptimizer)
        (made,) = rule.reference(Weights([nn.Parameter(torch.ones(3, 2))], [], []), section, 0.1)
        found = why_not(made, "parts", rule.like(section))
        assert (found is not None) == is_refused


@pytest.mark.full
@pytest.mark.parametrize("layout", [{"dp_shard": 2}, put_off({"pp": 2})])
def test_an_update_of_whole_tensors_is_refused_on_parts_on_every_rank(tmp_path: Path, layout: dict[str, int]) -> None:
    """A norm that it keeps is a 0-d tensor of the mesh of its parameter, which a checkpoint has as a number."""
    kept = "self.state[p]['norm'] = p.grad.norm(); p.sub_("
    normed = SGD.replace("p.sub_(", kept).replace("p.grad *", "p.grad / self.state[p]['norm'] *")
    tree = tree_of(tmp_path, normed, name="Sgd", train__max_steps=2) | {"layout": layout}
    tree["optimizer"]["weight_decay"] = 0
    error = train(tree).error
    if "pp" in layout:  # every tensor is whole there
        assert error is None
        return
    assert isinstance(error, UserError)
    assert "my_optimizer.py: Sgd under shard2" in error.what
    assert "its update of an element depends on others of the tensor" in error.what


@pytest.mark.full
def test_plain_tensors_of_what_a_rank_holds_are_refused(tmp_path: Path) -> None:
    """A checkpoint would have them of one rank, in place of the whole."""
    held = "getattr(p, 'to_local', lambda: p)()"
    local = SGD.replace("p.sub_(", f"self.state[p].setdefault('m', torch.zeros_like({held})); p.sub_(")
    tree = tree_of(tmp_path, local, name="Sgd", train__max_steps=2)
    tree["optimizer"]["weight_decay"] = 0
    error = train(tree).error
    assert isinstance(error, UserError) and "it keeps m as a plain tensor of one rank" in error.what


def test_it_has_its_keys_and_no_others(tmp_path: Path) -> None:
    (tmp_path / "my_optimizer.py").write_text(LION)
    where = f"{tmp_path / 'my_optimizer.py'}:Lion"
    section = OptimizerSection(name="python", path=where, options={"betas": [0.9, 0.98]})
    assert section.weight_decay == 0.0 and OptimizerSection().weight_decay == 0.1
    assert rule_for(section).facts.state == {"m": "m"} and section.title == "my_optimizer.py:Lion"
    for changes, said in (
        ({"path": None}, "python needs optimizer.path"), ({"betas": (0.8, 0.9)}, "gets by options: {betas: ...}"),
        ({"options": {"lr": 1}}, "options has lr, which is optimizer.learning_rate"),
        ({"options": {"weight_decay": 1}}, "options has weight_decay, which is optimizer.weight_decay"),
        ({"name": "adamw"}, "which only python has"), ({"momentum": 0.9}, "which only muon has"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            OptimizerSection(**{"name": "python", "path": where, **changes})
    with pytest.raises(UserError, match=r"TypeError: .*nesterov"):
        rule_for(OptimizerSection(name="python", path=where, options={"nesterov": True}))
    (tmp_path / "my_optimizer.py").write_text(SGD)
    with pytest.raises(UserError, match=r"weight_decay is 0\.1, and it takes none"):
        rule_for(OptimizerSection(name="python", path=where.replace("Lion", "Sgd"), weight_decay=0.1))


def test_its_path_is_that_of_other_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative to the run file; not in the model's folder; its name is what a checkpoint must agree with."""
    tree = tree_of(tmp_path)
    own = agreement(RunConfig.model_validate(tree), "")
    assert own["optimizer.path"] == "my_optimizer.py:Lion" and own["optimizer.options"] == {}
    assert not {"optimizer.path", "optimizer.options"} & {*agreement(RunConfig.model_validate(run_file(tmp_path)), "")}
    tree["model"]["name_or_path"] = str(tmp_path)
    with pytest.raises(UserError, match="is in the folder of the model"):
        check_supported(RunConfig.model_validate(tree))
    (tmp_path / "run.yaml").write_text("optimizer: {name: python, path: my_optimizer.py:Lion}")
    monkeypatch.chdir("/")
    assert load_config(tmp_path / "run.yaml").optimizer.path == tree["optimizer"]["path"]
