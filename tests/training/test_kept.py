"""The last whole step, which a rank keeps in the memory of its node when others are gone: it is what a save of that
step holds, and another world goes on from it."""

import io
import json
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.checkpoint import step_folder
from fivefold.config import RunConfig
from fivefold.core import history
from fivefold.core.kept_steps import KeptStep, MemoryOfNode, kept_in, newest_kept
from fivefold.core.step_folders import steps
from fivefold.launch.world import World
from fivefold.parallel.dtensor import local
from fivefold.training import checkpoints
from fivefold.training import run as run_module
from fivefold.training import step as step_module
from tests.pool import run_ranks
from tests.training.bodies import Ran, column, run_dir, run_file

pytestmark = pytest.mark.full

KEYS: dict[str, Any] = {"train__micro_batch_size": 1, "train__max_steps": 6, "checkpoint__async": False}
CUT_OFF = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500"
PLACES: dict[str, tuple[Any, str]] = {
    "in an update": (step_module, "clip_"), "in an evaluation": (run_module, "mean_loss")
}  # fmt: skip


def on_rank(
    tree: Mapping[str, Any], node: Mapping[int, int], folder: Path, *, cut_at: int, kept: KeptStep, room: int,
    case: str,
) -> Ran:  # fmt: skip
    """Train on this rank, of node `node[rank]` with its memory in `folder`. `cut_at`: the step in whose gradients the
    other ranks are gone, or where `case` says; 0: none. `kept`: the step of round 1 to go on from. `room`: free bytes
    of memory."""
    config, rank, screen = RunConfig.model_validate(tree), dist.get_rank(), io.StringIO()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    mine, number = node[rank], 2 if kept.step else 1
    memory = MemoryOfNode(
        str(folder / f"node-{mine}"), mine, before=1, kept=kept, round=number,
        acts=rank == min(other for other in node if node[other] == mine),
    )  # fmt: skip
    Path(memory.folder).mkdir(parents=True, exist_ok=True)
    module, name = PLACES.get(case, (step_module, "_squared_norms"))
    plain = getattr(module, name)

    def cut(model: Any, *args: Any) -> Any:
        nonlocal cut_at
        cut_at -= 1
        if case == "not finite" and not cut_at:
            local(next(model.parameters())).detach().fill_(float("nan"))
        if not cut_at:
            raise RuntimeError(CUT_OFF)
        return plain(model, *args)

    with (
        patch.object(module, name, cut),
        patch.object(checkpoints, "free_bytes", lambda _: room),
        redirect_stdout(screen),
    ):
        try:
            world = World(rank=rank, size=dist.get_world_size(), round=number)
            run_module.train(config, world, memory=memory)
        except RuntimeError as caught:
            return Ran(screen.getvalue(), caught)
    return Ran(screen.getvalue(), None)


def train(
    tree: Any, nodes: list[int], folder: Path, *, cut_at: int = 0, kept: KeptStep | None = None, room: int = 2**30,
    case: str = "",
) -> Ran:  # fmt: skip
    """Train on a rank for each of `nodes`; what the first one saw."""
    here, kept = dict(enumerate(nodes)), kept or KeptStep()
    body = partial(on_rank, tree, here, folder, cut_at=cut_at, kept=kept, room=room, case=case)
    return run_ranks(len(nodes), body)[0]


def found(folder: Path, *nodes: int) -> KeptStep:
    """The step that these nodes hold."""
    return newest_kept([kept_in(folder / f"node-{node}") for node in nodes], round=1, newer_than=0)


def layout(**degrees: int) -> dict[str, Any]:
    return {f"layout__{name}": size for name, size in ({"dp_shard": 1} | degrees).items()}


@pytest.mark.parametrize(
    "degrees", [{"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 2}], ids=["dp2", "dp2.shard2"]
)
def test_a_step_that_one_replica_keeps_is_what_a_save_of_it_holds(degrees: dict[str, int], tmp_path: Path) -> None:
    size = degrees["dp_replicate"] * degrees.get("dp_shard", 1)
    nodes = [2 * rank // size for rank in range(size)]  # a replica each
    alone = run_file(tmp_path, run__name="alone", **KEYS)
    assert train(alone, [0], tmp_path / "none").error is None
    tree = run_file(tmp_path, run__name="run", checkpoint__every=1, **KEYS, **layout(**degrees))
    memory = tmp_path / "memory"
    assert CUT_OFF in str(train(tree, nodes, memory, cut_at=5).error)
    saved = run_dir(tree) / "checkpoints" / step_folder(4)
    manifest = json.loads((saved / "manifest.json").read_text())
    for node in (0, 1):
        kept = found(memory, node)
        assert (kept.step, kept.why, len(kept.holders)) == (4, "", size // 2)
        here = memory / f"node-{node}" / "round-000001" / step_folder(4)
        for file in saved.glob("*.safetensors"):
            assert (here / file.name).read_bytes() == file.read_bytes()
        for file in here.glob("part-*.json"):
            part = json.loads(file.read_text())
            assert part["state"] == manifest["state"] and part["agreement"] == manifest["agreement"]
    # The second node goes on with one that is new, on one rank each, and no disk.
    shutil.rmtree(run_dir(tree) / "checkpoints")
    shutil.rmtree(memory / "node-0")
    kept = found(memory, 1)
    kept = KeptStep(kept.step, {part: 0 for part in kept.holders})
    (memory / "node-1").rename(memory / "node-0")
    ran = train(run_file(tmp_path, run__name="run", **KEYS, **layout(dp_shard=2)), [0, 1], memory, kept=kept)
    assert ran.error is None and "from memory, step 4 of 6" in ran.screen
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]
    assert column(tree, "train/tokens_seen") == column(alone, "train/tokens_seen")
    assert column(tree, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-5)
    assert not any(memory.glob("node-*/round-*/step-*"))


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of dp2.shard2 that was cut off in step 5, with a checkpoint of step 3; each of two nodes has a shard."""
    folder = tmp_path_factory.mktemp("apart")
    tree = run_file(folder, **KEYS, checkpoint__every=3, **layout(dp_replicate=2, dp_shard=2))
    assert CUT_OFF in str(train(tree, [0, 1, 0, 1], folder / "memory", cut_at=5).error)
    return folder


@pytest.mark.parametrize(
    "case", ["each sends a shard", "a byte is flipped", "a file is gone", "no room", "a full memory", "no disk"]
)
def test_nodes_send_each_other_what_they_lack_or_go_on_from_the_disk(case: str, apart: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    shutil.copytree(apart / "memory", memory)
    assert found(memory, 0).step == found(memory, 1).step == 0
    kept = found(memory, 0, 1)
    assert (kept.step, kept.holders) == (4, {0: 0, 1: 1})
    here, other = (memory / f"node-{node}" / "round-000001" / step_folder(4) for node in (0, 1))
    file = other / "weight-00001.safetensors"
    if case == "each sends a shard":
        here.with_name(step_folder(5)).mkdir()  # of a rank that was one ahead
    elif case == "a full memory":
        (other / ".part-00000.json").symlink_to("/dev/full")
    elif case in ("a byte is flipped", "no disk"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif case == "a file is gone":
        file.with_name("part-00001.json").unlink()
    tree = run_file(apart, run__name=case.replace(" ", "-"), checkpoint__every=3, **KEYS, **layout(dp_shard=2))
    shutil.copytree(apart / "run", run_dir(tree))
    if case == "no disk":
        shutil.rmtree(run_dir(tree) / "checkpoints")
    ran = train(tree, [0, 1], memory, kept=kept, room=10 if case == "no room" else 2**30)
    assert ran.error is None
    start = {"each sends a shard": 4, "no disk": 0}.get(case, 3)
    assert not start or f"step {start} of 6" in ran.screen
    assert ("from memory" in ran.screen) == (start == 4)
    says = {"a byte is flipped": "not those that were saved", "a file is gone": "is gone", "no room": "no room for"}
    says |= {"a full memory": "No space left", "no disk": "not those that were saved"}
    assert says.get(case, "") in ran.screen and ("DAMAGED" in ran.screen) == (start != 4)
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]
    assert not any(memory.glob("node-*/round-*/step-*"))


@pytest.mark.parametrize("keys", [{"checkpoint__every": 4}, {"train__max_steps": 4}], ids=["due", "the last step"])
def test_a_step_is_saved_if_the_nodes_have_changed_before_its_save(
    keys: dict[str, int], apart: Path, tmp_path: Path
) -> None:
    memory = tmp_path / "memory"
    shutil.copytree(apart / "memory", memory)
    tree = run_file(apart, run__name=f"due-{next(iter(keys))}", **(KEYS | keys), **layout(dp_shard=2))
    shutil.copytree(apart / "run", run_dir(tree))
    assert train(tree, [0, 1], memory, kept=found(memory, 0, 1)).error is None
    assert steps(run_dir(tree) / "checkpoints") == sorted({3, 4, tree["train"]["max_steps"]})
    assert history.load(run_dir(tree)).starts[-1].how == "finished"


@pytest.mark.parametrize("case", ["too little room", "not finite", "in an update", "in an evaluation"])
def test_what_cannot_be_gone_on_from_is_not_kept(case: str, tmp_path: Path) -> None:
    keys = KEYS | ({"eval__every": 1, "data__validation": 0.2} if case == "in an evaluation" else {})
    tree, room = run_file(tmp_path, **keys, **layout(dp_replicate=2)), 1000 if case == "too little room" else 2**30
    ran = train(tree, [0, 1], tmp_path / "memory", cut_at=3, room=room, case=case)
    assert CUT_OFF in str(ran.error)
    assert found(tmp_path / "memory", 0, 1) == KeptStep()
