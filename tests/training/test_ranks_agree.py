"""A rank that was asked for something else is found before step 0, and every rank says which field it is."""

import socket
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist

from fivefold.config import RunConfig
from fivefold.core import alike
from fivefold.core.errors import UserError
from fivefold.launch.world import World
from fivefold.training import preflight
from fivefold.training import run as run_module
from tests.pool import run_ranks
from tests.training.bodies import Ran, on_rank, run_dir, run_file

pytestmark = pytest.mark.full


def each_its_own(trees: list[dict[str, Any]], torch_version: str = "") -> Ran:
    """Train the tree of this rank; rank 1 with another version of torch, if one is given."""
    rank, plain = dist.get_rank(), alike.version

    def version(package: str) -> str:
        return torch_version if torch_version and package == "torch" and rank == 1 else plain(package)

    with patch.object(alike, "version", version):
        return on_rank(trees[rank])


def at(*ranks: int) -> str:
    return f"rank {', '.join(map(str, ranks))} ({socket.gethostname()})"


def refusals(trees: list[dict[str, Any]], torch_version: str = "") -> set[str]:
    results = run_ranks(len(trees), each_its_own, trees, torch_version)
    assert all(isinstance(result.error, UserError) for result in results)
    return {result.error.what for result in results}


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("train__seed", 8, "train.seed is 7 on {0}, and 8 on {1}"),
        ("optimizer__learning_rate", 0.5, "optimizer.learning_rate is 0.01 on {0}, and 0.5 on {1}"),
        ("eval__every", 3, "eval.every is 250 on {0}, and 3 on {1}"),
    ],
)
def test_a_key(tmp_path: Path, key: str, value: Any, said: str) -> None:
    trees = [run_file(tmp_path), run_file(tmp_path, **{key: value})]
    assert refusals(trees) == {said.format(at(0), at(1))}
    assert not (run_dir(trees[0]) / "metrics.jsonl").exists()


def test_the_rows(tmp_path: Path) -> None:
    """The same run file where the files differ: here, by a fingerprint that is another on rank 1."""
    (said,) = {result.error.what for result in run_ranks(2, with_other_rows, run_file(tmp_path))}
    assert said.startswith("the fingerprint of the rows is ") and said.endswith(f"and another on {at(1)}")


def with_other_rows(tree: dict[str, Any]) -> Ran:
    plain = run_module.prepare

    def prepare(config: Any) -> Any:
        data = plain(config)
        return replace(data, fingerprint="another") if dist.get_rank() == 1 else data

    with patch.object(run_module, "prepare", prepare):
        return on_rank(tree)


def test_a_version(tmp_path: Path) -> None:
    (said,) = refusals([run_file(tmp_path)] * 2, torch_version="2.11.0")
    assert said.startswith("the version of torch is 2.13") and said.endswith(f"and 2.11.0 on {at(1)}")


def test_several_ranks(tmp_path: Path) -> None:
    trees = [run_file(tmp_path), *[run_file(tmp_path, train__seed=8)] * 3]
    trees = [tree | {"layout": {"dp_shard": 4}} for tree in trees]
    assert refusals(trees) == {f"train.seed is 7 on {at(0)}, and 8 on {at(1, 2, 3)}"}


def test_a_key_that_rank_0_does_not_know() -> None:
    """As in another version of the program."""
    assert run_ranks(2, with_more_on_rank_1) == [f"log.new is not there on {at(0)}, and 1 on {at(1)}"] * 2


def with_more_on_rank_1() -> str:
    config = RunConfig.model_validate({})
    fields = {"train.seed": 7} | ({"log.new": 1} if dist.get_rank() else {})
    with patch.object(preflight, "agreed_fields", lambda *_: fields), pytest.raises(UserError) as caught:
        preflight.check_ranks_agree(config, None, World(is_local=True))  # type: ignore[arg-type]
    return caught.value.what
