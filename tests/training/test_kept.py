"""The last whole step, which a rank keeps in the memory of its node when others are gone: it is what a save of that
step holds, and another world goes on from it."""

import io
import json
import shutil
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import partial
from math import nan
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.checkpoint import step_folder
from fivefold.config import RunConfig
from fivefold.core import history
from fivefold.core.kept_steps import KeptStep, MemoryOfNode, kept_in, newest_kept
from fivefold.core.run_folder import steps
from fivefold.launch.world import World
from fivefold.parallel.dtensor import local
from fivefold.training import checkpoints, evaluation
from fivefold.training import run as run_module
from fivefold.training import step as step_module
from fivefold.training.part import LiveRun
from tests.pool import run_ranks
from tests.tiers import put_off
from tests.training.bodies import Ran, column, run_dir, run_file, state

pytestmark = pytest.mark.full

KEYS: dict[str, Any] = {"train__micro_batch_size": 1, "train__max_steps": 6, "checkpoint__async": False}
PLACES: dict[str, tuple[Any, str]] = {
    "in an update": (step_module, "clip_"), "its row": (LiveRun, "row"), "evaluation": (evaluation, "mean_loss"),
}  # fmt: skip
CUT_OFF = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500"


def on_rank(
    tree: Mapping[str, Any],
    node: Mapping[int, int],
    folder: Path,
    *,
    cut_at: int,
    within: str,
    kept: KeptStep,
    room: int,
) -> Ran:
    """Train on this rank, of node `node[rank]` with its memory in `folder`. `cut_at`: the step, row or evaluation
    `within` which (see `PLACES`) the other ranks are gone; 0: none. `kept`: the step of round 1 to go on from. `room`:
    free bytes of memory."""
    config, rank, screen = RunConfig.model_validate(tree), dist.get_rank(), io.StringIO()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    mine, number = node[rank], 2 if kept.step else 1
    memory = MemoryOfNode(
        str(folder / f"node-{mine}"), mine, before=1, kept=kept, round=number,
        acts=rank == min(other for other in node if node[other] == mine),
    )  # fmt: skip
    Path(memory.folder).mkdir(parents=True, exist_ok=True)
    place = PLACES.get(within, (step_module, "_squared_norms"))
    plain = getattr(*place)

    def cut(*args: Any, **named: Any) -> Any:
        nonlocal cut_at
        cut_at -= 1
        if not cut_at and within == "not finite":
            local(next(args[0].parameters())).detach().fill_(nan)
        if not cut_at:
            raise RuntimeError(CUT_OFF)
        return plain(*args, **named)

    with (
        patch.object(*place, cut),
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
    tree: Any, nodes: list[int], folder: Path, *, cut_at: int = 0, within: str = "step", kept: KeptStep | None = None,
    room: int = 2**30,
) -> Ran:  # fmt: skip
    """Train on a rank for each of `nodes`; what the first one saw."""
    options = {"cut_at": cut_at, "within": within, "kept": kept or KeptStep(), "room": room}
    return run_ranks(len(nodes), partial(on_rank, tree, dict(enumerate(nodes)), folder, **options))[0]


def found(folder: Path, *nodes: int) -> KeptStep:
    """The step that these nodes hold."""
    return newest_kept([kept_in(folder / f"node-{node}") for node in nodes], round=1, newer_than=0)


def layout(**degrees: int) -> dict[str, Any]:
    return {f"layout__{name}": size for name, size in ({"dp_shard": 1} | degrees).items()}


@pytest.mark.parametrize("degrees", [{}, *map(put_off, ({"dp_shard": 2}, {"tp": 2}, {"pp": 2}))], ids=str)
def test_a_step_that_one_replica_keeps_is_what_a_save_of_it_holds(degrees: dict[str, int], tmp_path: Path) -> None:
    inner = degrees.get("dp_shard", 1) * degrees.get("tp", 1)
    size = 2 * inner * degrees.get("pp", 1)
    nodes = [rank // inner % 2 for rank in range(size)]  # a replica each
    alone = run_file(tmp_path, run__name="alone", **KEYS)
    assert train(alone, [0], tmp_path / "none").error is None
    tree = run_file(tmp_path, run__name="run", checkpoint__every=1, **KEYS, **layout(dp_replicate=2, **degrees))
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


CASES = ("each sends a shard", "a byte is flipped", "a file is gone", "no room", "no room after all")


@pytest.mark.parametrize("case", CASES)
def test_nodes_send_each_other_what_they_lack_or_go_on_from_the_disk(case: str, apart: Path, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    shutil.copytree(apart / "memory", memory)
    assert found(memory, 0).step == found(memory, 1).step == 0
    kept = found(memory, 0, 1)
    assert (kept.step, kept.holders) == (4, {0: 0, 1: 1})
    file = memory / "node-1" / "round-000001" / step_folder(4) / "weight-00001.safetensors"
    here = memory / "node-0" / "round-000001" / step_folder(4)
    here.with_name(step_folder(5)).mkdir()  # of a rank that was one ahead
    if case == "a byte is flipped":
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    elif case == "a file is gone":
        file.with_name("part-00001.json").unlink()
    elif case == "no room after all":
        (here / ".weight-00001.safetensors").symlink_to("/dev/full")
    tree = run_file(apart, run__name=case.replace(" ", "-"), checkpoint__every=3, **KEYS, **layout(dp_shard=2))
    shutil.copytree(apart / "run", run_dir(tree))
    start = {"each sends a shard": 4, "no room": 0}.get(case, 3)
    if not start:  # nor has the disk any
        shutil.rmtree(run_dir(tree) / "checkpoints")
    ran = train(tree, [0, 1], memory, kept=kept, room=10 if case == "no room" else 2**30)
    assert ran.error is None
    assert (f"step {start} of 6" in ran.screen) == (start > 0) and ("from memory" in ran.screen) == (start == 4)
    says = {"a byte is flipped": "not those that were saved", "a file is gone": "is gone", "no room": "no room for"}
    says["no room after all"] = "No space left on device"
    assert says.get(case, "") in ran.screen and ("DAMAGED" in ran.screen) == (start < 4)
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]
    assert not any(memory.glob("node-*/round-*/step-*"))


@pytest.mark.parametrize("case", ["too little room", put_off("not finite"), "in an update", put_off("its row")])
def test_what_cannot_be_gone_on_from_is_not_kept(case: str, tmp_path: Path) -> None:
    tree, room = run_file(tmp_path, **KEYS, **layout(dp_replicate=2)), 1000 if case == "too little room" else 2**30
    ran = train(tree, [0, 1], tmp_path / "memory", cut_at=3, within=case, room=room)
    assert CUT_OFF in str(ran.error)
    assert found(tmp_path / "memory", 0, 1) == KeptStep()


@pytest.mark.parametrize(
    "keys", [{"checkpoint__every": 4}, put_off({"train__max_steps": 4})], ids=["due", "the last step"]
)
def test_a_step_that_was_to_be_saved_is_saved_first(keys: dict[str, int], apart: Path, tmp_path: Path) -> None:
    shutil.copytree(apart / "memory", memory := tmp_path / "memory")
    tree = run_file(apart, run__name=f"due-{next(iter(keys))}", **(KEYS | keys), **layout(dp_shard=2))
    shutil.copytree(apart / "run", run_dir(tree))
    assert train(tree, [0, 1], memory, kept=found(memory, 0, 1)).error is None
    assert steps(run_dir(tree) / "checkpoints") == sorted({3, 4, tree["train"]["max_steps"]})
    assert history.load(run_dir(tree)).starts[-1].how == "finished"


@pytest.mark.parametrize("number", [put_off(2), 3], ids=["step 4 of 6", "the last step"])
def test_an_evaluation_that_was_cut_off_is_done_again(number: int, tmp_path: Path) -> None:
    keys = {**KEYS, "data__validation": str(tmp_path / "corpus.txt"), "eval__every": 2, "eval__max_tokens": 500}
    alone, tree = (run_file(tmp_path, run__name=name, **keys) for name in ("alone", "run"))
    assert train(alone, [0], tmp_path / "none").error is None
    tree["layout"] = {"dp_replicate": 2, "dp_shard": 1}
    assert CUT_OFF in str(train(tree, [0, 1], tmp_path / "memory", cut_at=number, within="evaluation").error)
    assert column(tree, "step")[-1] == 2 * number - 1
    kept = found(tmp_path / "memory", 0, 1)
    assert kept.step == 2 * number
    ran = train(tree, [0, 1], tmp_path / "memory", kept=kept)
    assert ran.error is None and f"from memory, step {kept.step} of 6" in ran.screen
    for name in ("step", "train/tokens_seen", "eval/best_step"):
        assert column(tree, name) == column(alone, name)
    for name in ("train/loss", "eval/loss"):
        assert column(tree, name) == [value and pytest.approx(value, rel=1e-5) for value in column(alone, name)]
    assert state(tree, 6).keys() == state(alone, 6).keys()
