"""Which rank says an error."""

from datetime import timedelta

import pytest

from fivefold.core.errors import UserError
from fivefold.launch.failure import one_voice, speaks
from fivefold.launch.world import World


@pytest.mark.parametrize(("rank", "local_rank", "is_said"), [(0, 0, True), (1, 1, False), (2, 0, True), (3, 1, False)])
def test_one_rank_of_every_machine_speaks_before_the_ranks_are_joined(
    rank: int, local_rank: int, is_said: bool
) -> None:
    world = World(rank=rank, local_rank=local_rank, size=4, local_size=2)
    with pytest.raises(UserError if is_said else SystemExit) as caught, one_voice(world):
        raise UserError("notes.txt does not exist", fix="copy it")
    if is_said:
        assert str(caught.value).endswith("notes.txt does not exist\ncopy it")
        assert (f"rank {rank}:" in str(caught.value)) == (rank > 0)


@pytest.mark.parametrize(("met_by", "said_by"), [([0, 1, 2], [0]), ([2, 1], [2]), ([1], [1])])
def test_joined_ranks_say_it_once(met_by: list[int], said_by: list[int]) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    patience = timedelta(milliseconds=50)
    assert [rank for rank in met_by if speaks(World(rank=rank, size=3), store, patience=patience)] == said_by
