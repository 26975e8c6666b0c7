"""Weights that are read or drawn in pieces are those that are read at once."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from fivefold.models.build import build_meta
from fivefold.models.random_stream import Region
from fivefold.models.sources import RandomInit
from fivefold.parallel import state
from fivefold.parallel.apply import parallelize
from fivefold.parallel.dtensor import local
from fivefold.parallel.layout import Layout
from tests.parity import Case, hf_config
from tests.pool import run_ranks

pytestmark = pytest.mark.full


@pytest.mark.parametrize("layout", ["tp2", "shard2"])
def test_pieces_give_the_whole(layout: str) -> None:
    assert all(run_ranks(2, _are_equal, layout))


def _are_equal(layout: str) -> bool:
    whole, _ = _weights(layout, 2**26)
    pieces, most = _weights(layout, 1000)
    row = max(each.nbytes // max(len(each), 1) for each in whole.values())
    assert most <= max(1000, row)  # a row is never cut
    return all(torch.equal(pieces[name], whole[name]) for name in whole)


def _weights(layout: str, at_once: int) -> tuple[dict[str, Tensor], int]:
    """Of this rank, and the most bytes that were drawn at once."""
    sizes, read = [0], RandomInit.read

    def counted(source: Any, name: str, region: Region) -> Tensor:
        values = read(source, name, region)
        sizes.append(values.nbytes)
        return values

    with patch.object(state, "_AT_ONCE", at_once), patch.object(RandomInit, "read", counted):
        model = parallelize(build_meta(hf_config(Case("single"))), Layout.parse(f"{layout}+fp32"), device="cpu", seed=5)
    return {name: local(each).clone() for name, each in model.named_parameters()}, max(sizes)
