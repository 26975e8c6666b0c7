"""Which step the nodes go on from, of those that they keep in memory."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from fivefold.core.kept_steps import KeptStep, MemoryOfNode, newest_kept


def test_a_step_without_all_of_its_parts_is_not_one() -> None:
    def told(*steps: tuple[int, Mapping[str, Any]], round: int = 7, count: int = 2) -> str:
        return json.dumps(
            {f"round-{round:06d}": {str(step): {"count": count, "parts": parts} for step, parts in steps}}
        )

    zero, one = {"0": {"weight": "a"}}, {"1": {"weight": "b"}}

    def step(*nodes: str, newer_than: int = 0) -> tuple[int, dict[int, int]]:
        kept = newest_kept(nodes, round=7, newer_than=newer_than)
        return kept.step, dict(kept.holders)

    assert step(told((5, zero)), told((5, one))) == (5, {0: 0, 1: 1})
    assert step(told((5, zero | one)), told((5, one))) == (5, {0: 0, 1: 0})
    assert step(told((5, zero)), told((6, one))) == (0, {})  # steps do not mix
    assert step(told((5, zero), (6, one)), told((5, one))) == (5, {0: 0, 1: 1})
    assert step(told((5, zero | one)), told((6, zero | one))) == (6, {0: 1, 1: 1})
    assert step(told((5, zero)), told((5, one)), newer_than=5) == (0, {})
    assert step(told((5, zero | one), round=6), told((5, one))) == (0, {})  # of a round that another has followed
    assert step("{}", told((5, zero | one))) == (5, {0: 1, 1: 1})
    differ = newest_kept([told((5, zero | one)), told((5, {"0": {"weight": "c"}}))], round=7, newer_than=0)
    assert (differ.step, differ.why) == (0, "replicas differ at step 5")
    newer = [told((6, zero), (5, zero | one)), told((6, {"0": {"weight": "c"}}))]
    assert newest_kept(newer, round=7, newer_than=0).why == "replicas differ at step 6"  # though it is not whole


def test_the_memory_of_a_request() -> None:
    memory = MemoryOfNode("/x", 1, 6, KeptStep(5, {0: 1}), 7, acts=True)
    request = {"folder": "/x", "node": 1, "before": 6, "kept": asdict(memory.kept)}
    assert MemoryOfNode.of_request(json.loads(json.dumps(request)), round=7, acts=True) == memory
    assert MemoryOfNode.of_request(None, round=7, acts=True) == MemoryOfNode()
