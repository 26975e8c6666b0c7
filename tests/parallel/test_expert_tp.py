"""`expert_tp`: the features of every expert split over tp, in fp64 to 1e-10 against the unmodified class."""

import pytest

from tests.parallel.test_parity import run
from tests.parity import Case, assert_proved

CASES = [
    Case("tp2+etp+mb4+fp64", "mixtral", steps=2),
    Case("tp2+etp+mb4+fp64+nosp", "gpt_oss", steps=2),
    Case("tp2+etp+mb8+fp64+full", "gpt_oss", steps=2),
    Case("shard2.tp2.ep2+etp+mb2+fp64", "gpt_oss", steps=2),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.family}-{case.layout}")
def test_layout_equals_one_process(case: Case) -> None:
    found, expected, per_rank = run(case)
    assert_proved(found, expected, per_rank)
