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
from fivefold.core.kept_steps import KeptStep, MemoryOfNode, kept_in, newest_kept
from fivefold.launch.world import World
from fivefold.training import run as run_module
from fivefold.training import step as step_module
from tests.pool import run_ranks
from tests.training.bodies import Ran, column, run_dir, run_file

pytestmark = pytest.mark.full

CUT_OFF = "[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:29500"


def on_rank(tree: Mapping[str, Any], node: Mapping[int, int], folder: Path, *, cut_at: int, kept: KeptStep) -> Ran:
    """Train on this rank, of node `node[rank]` with its memory in `folder`. `cut_at`: the step in whose gradients the
    other ranks are gone; 0: none. `kept`: the step of round 1 to go on from."""
    config, rank, screen = RunConfig.model_validate(tree), dist.get_rank(), io.StringIO()
    config.run_dir.mkdir(parents=True, exist_ok=True)
    mine, number = node[rank], 2 if kept.step else 1
    memory = MemoryOfNode(
        str(folder / f"node-{mine}"), mine, before=1, kept=kept, round=number,
        acts=rank == min(other for other in node if node[other] == mine),
    )  # fmt: skip
    Path(memory.folder).mkdir(parents=True, exist_ok=True)
    plain = step_module._squared_norms

    def squared_norms(model: Any) -> Any:
        nonlocal cut_at
        cut_at -= 1
        if not cut_at:
            raise RuntimeError(CUT_OFF)
        return plain(model)

    with patch.object(step_module, "_squared_norms", squared_norms), redirect_stdout(screen):
        try:
            world = World(rank=rank, size=dist.get_world_size(), round=number)
            run_module.train(config, world, memory=memory)
        except RuntimeError as caught:
            return Ran(screen.getvalue(), caught)
    return Ran(screen.getvalue(), None)


def train(tree: Any, nodes: list[int], folder: Path, *, cut_at: int = 0, kept: KeptStep | None = None) -> Ran:
    """Train on a rank for each of `nodes`; what the first one saw."""
    here = dict(enumerate(nodes))
    return run_ranks(len(nodes), partial(on_rank, tree, here, folder, cut_at=cut_at, kept=kept or KeptStep()))[0]


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
    keys = {"train__micro_batch_size": 1, "train__max_steps": 6, "checkpoint__async": False}
    alone = run_file(tmp_path, run__name="alone", **keys)
    assert train(alone, [0], tmp_path / "none").error is None
    tree = run_file(tmp_path, run__name="run", checkpoint__every=1, **keys, **layout(**degrees))
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
    ran = train(run_file(tmp_path, run__name="run", **keys, **layout(dp_shard=2)), [0, 1], memory, kept=kept)
    assert ran.error is None and "from memory, step 4 of 6" in ran.screen
    assert column(tree, "step") == [1, 2, 3, 4, 5, 6]
    assert column(tree, "train/tokens_seen") == column(alone, "train/tokens_seen")
    assert column(tree, "train/loss") == pytest.approx(column(alone, "train/loss"), rel=1e-5)
    assert not any(memory.glob("node-*/round-*/step-*"))
