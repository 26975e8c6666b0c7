"""What signals do while a run trains."""

import signal
from collections.abc import Iterator

import pytest

from fivefold.core.interrupts import StopRequest


@pytest.fixture
def deadly() -> Iterator[None]:
    """SIGTERM raises where it would end this process."""

    def ended(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGTERM, ended)
    yield
    assert signal.signal(signal.SIGTERM, before) is ended


@pytest.mark.usefixtures("deadly")
@pytest.mark.parametrize("first", [signal.SIGTERM, signal.SIGINT])
def test_sigterm_cuts_nothing_short_however_often_it_comes(first: signal.Signals) -> None:
    stop = StopRequest()
    with stop.listening():
        assert stop.by is None
        for number in (first, signal.SIGTERM, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.by == first


@pytest.mark.usefixtures("deadly")
@pytest.mark.parametrize("before", [[], [signal.SIGTERM, signal.SIGTERM]])
def test_a_second_ctrl_c_does(before: list[signal.Signals]) -> None:
    stop = StopRequest()
    with stop.listening():
        for number in (*before, signal.SIGINT):
            signal.raise_signal(number)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)
    assert stop.by == [*before, signal.SIGINT][0]
