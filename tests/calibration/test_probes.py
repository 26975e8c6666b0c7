"""What a probe makes of the seconds that it measures, with a clock that always says the same."""

from dataclasses import dataclass, replace
from itertools import cycle
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fivefold.calibration import probes
from fivefold.calibration.fit import Measurements, Sizes, _joined
from fivefold.calibration.probes import Timer

SIZES = Sizes(rows=(16,), widths=(32,), lengths=(64,), traffic=1200, messages=(4096,), seconds=1e-4)


@dataclass(frozen=True)
class Fixed(Timer):
    """Every piece of work takes 42 seconds."""

    def seconds(self, work: Any, *, together: bool = False) -> float:
        work()
        return 42.0


TIMER = Fixed(torch.device("cpu"), 0.0)


def of(size: int) -> Any:
    """A group of so many ranks."""
    return SimpleNamespace(size=lambda: size)


def test_a_third_of_the_passes_of_a_matmul_is_its_forward() -> None:
    assert next(probes._matmuls(TIMER, SIZES)) == ("fp32", 16, 32, 32, 14.0)


def test_attention_is_2_flops_of_half_of_the_scores_twice() -> None:
    """8 heads of 64 features, 64^2 scores: 2 x 2 x 64 FLOPs for each, of half of them; 3.5 forwards in 42 s."""
    assert next(probes._attention(TIMER, SIZES)) == ("fp32", 2 * 8 * 64 * 64**2, 12.0)


def test_an_addition_reads_two_arrays_and_writes_one() -> None:
    assert probes._traffic(TIMER, 1200) == 3 * 1200 / 42


def test_an_operation_is_launched_forward_and_backward() -> None:
    assert probes._launch(TIMER) == 42 / 128


def test_bytes_of_a_collective_are_of_its_larger_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    """4,096 bytes over 4 ranks: each has 256 of 1,024 numbers."""
    sizes: dict[str, tuple[int, ...]] = {}
    names = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single")
    for name in names:
        call = lambda *tensors, name=name, group=None: sizes.update({name: tuple(each.numel() for each in tensors)})  # noqa: E731
        monkeypatch.setattr(probes.dist, name, call)
    monkeypatch.setattr(probes.dist, "barrier", lambda: None)
    monkeypatch.setattr(probes, "_pass_on", lambda mine, theirs, *_: sizes.update(send=(mine.numel(), theirs.numel())))
    found = list(probes._collectives(TIMER, (4096,), of(4)))
    assert found == [
        (kind, 4096, 42.0) for kind in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")
    ]
    assert sizes == dict(
        zip((*names, "send"), ((1024,), (1024, 256), (256, 1024), (1024, 1024), (1024, 1024)), strict=True)
    )
    assert list(probes._collectives(TIMER, (4096,), of(4), sends=False)) == found[:-1]
    assert list(probes._collectives(TIMER, (4096,), of(1))) == []


def test_ranks_meet_in_what_a_collective_takes_more_behind_a_matmul(monkeypatch: pytest.MonkeyPatch) -> None:
    """A matmul of 5 s, a collective of 2 s, and 8 s for one behind the other: 1 s. A rank alone meets nobody."""
    took = cycle((5.0, 2.0, 8.0))
    monkeypatch.setattr(probes.dist, "barrier", lambda: None)
    monkeypatch.setattr(type(TIMER), "seconds", lambda self, work, **how: next(took))
    assert probes._meeting(TIMER, SIZES, of(2)) == 1.0
    assert probes._meeting(TIMER, SIZES, of(1)) == 0.0


def test_a_send_says_nothing_of_how_ranks_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 1, 1, 2 and 3 s the median; the 50 s of a send do not count."""
    took = iter(number for more in (1.0, 1.0, 2.0, 3.0, 50.0) for number in (5.0, 2.0, 7.0 + more))
    monkeypatch.setattr(probes.dist, "barrier", lambda: None)
    monkeypatch.setattr(type(TIMER), "seconds", lambda self, work, **how: next(took))
    assert probes._meeting(TIMER, SIZES, of(2)) == 1.5


def test_seconds_are_of_one_call() -> None:
    """Of half a second each: blocks of ten last 5 s."""
    now, calls = [0.0], [0]

    def work() -> None:
        now[0] += 0.5
        calls[0] += 1

    assert Timer(torch.device("cpu"), 5.0, clock=lambda: now[0]).seconds(work) == 0.5
    assert calls == [2 + 10 * probes.BLOCKS]


def test_of_what_ranks_do_together_the_least_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of blocks of 3, 9, 4, 1 and 5 s 1 s, and of what a rank does by itself the median, 4 s."""
    took = cycle((1.0, 1.0, 3.0, 9.0, 4.0, 1.0, 5.0))  # the first two: what a first call sets up, and how often
    monkeypatch.setattr(probes.dist, "all_reduce", lambda *_: None)
    monkeypatch.setattr(Timer, "block", lambda self, work, repeats: next(took))
    timer = Timer(torch.device("cpu"), 1.0)
    assert timer.seconds(lambda: None, together=True) == 1.0
    assert timer.seconds(lambda: None) == 4.0


def test_workers_are_joined_by_the_median_and_the_worst() -> None:
    """A collective is as slow as its slowest rank; memory is that of the worker with the least."""
    one = Measurements(
        matmuls=[("fp32", 1, 1, 1, 1.0)], attention=[("fp32", 1.0, 1.0)], traffic=1.0, launch=1.0,
        collectives=[("send", 1, 1.0)], memory=1, context=1, host=1.0, meeting=1.0,
    )  # fmt: skip
    others = [
        replace(
            one, matmuls=[("fp32", 1, 1, 1, each)], traffic=each, launch=each, collectives=[("send", 1, each)],
            memory=int(each), context=int(each), host=each, meeting=each,
        )
        for each in (2.0, 9.0)
    ]  # fmt: skip
    found = _joined([one, *others])
    assert (found.matmuls[0][-1], found.traffic, found.launch) == (2, 2, 2)
    assert (found.collectives[0][-1], found.memory, found.context, found.host) == (9, 1, 9, 1)
    assert found.meeting == 9
