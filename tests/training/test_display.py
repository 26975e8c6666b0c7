"""What is on the screen: lines without a terminal, a panel with one."""

import io

import pytest
from rich.console import Console

from fivefold.core.best import Best
from fivefold.training.display import (
    LiveDisplay,
    PlainDisplay,
    RemainingTime,
    clock_time,
    details,
    open_display,
    sparkline,
)

ROW = {
    "train/loss": 2.61234,
    "train/grad_norm": 0.934,
    "train/learning_rate": 8.1e-4,
    "train/tokens_seen": 1_000_000,
    "perf/tokens_per_second": 9321.0,
    "perf/tokens_per_second_per_device": 4660.5,
    "perf/tflops_per_device": 0.3,
    "perf/mfu_pct": None,
    "perf/step_seconds": 0.5,
    "perf/data_wait_pct": 1.4,
    "memory/peak_gib": 0.41,
}


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def console(*, terminal: bool, width: int = 80) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False, color_system=None)


def printed(of: Console) -> str:
    assert isinstance(of.file, io.StringIO)
    return of.file.getvalue()


def plain(*, total_steps: int, seconds: float) -> str:
    """A whole run of `total_steps` steps of `seconds` each, as lines."""
    screen, clock = console(terminal=False), Clock()
    with PlainDisplay(screen, total_steps=total_steps, clock=clock) as display:
        display.header([("model", "LlamaForCausalLM 4.7M parameters"), ("", "more of it " * 12), ("recompute", "full")])
        for step in range(1, total_steps + 1):
            clock.now += seconds
            display.step(ROW | {"step": step})
        display.evaluated(total_steps, 2.7)
        display.sampled(total_steps, "def ", "f(x):\n    return x")
        display.note("step 3: the loss is not finite; the update was skipped")
        display.closing([("done", "validation loss 2.700")])
    return printed(screen)


def test_plain_lines_come_every_few_seconds_and_at_both_ends() -> None:
    lines = [line for line in plain(total_steps=100, seconds=0.5).splitlines() if line.startswith("step ")]
    steps = [int(line.split()[1].split("/")[0]) for line in lines if "grad" in line]
    assert steps == [*range(1, 100, 10), 100]
    assert lines[1].startswith("step 11/100  loss 2.6123  9.32k tok/s  lr 8.1e-4  grad 0.93  data wait 1%  0.41 GiB")
    assert lines[1].endswith("0:44 left")


def test_plain_lines_hold_everything_and_no_escape_codes() -> None:
    text = plain(total_steps=2, seconds=1.0)
    assert "model    LlamaForCausalLM 4.7M parameters\n" in text
    assert "more of it " * 12 in text  # never wrapped: a log is for tools as well
    assert "recompute full\n" in text
    assert "step 2/2  validation loss 2.7000\n" in text
    assert "sample @2  'def f(x):\\n    return x'\n" in text
    assert "note: step 3" in text and "done     validation loss 2.700\n" in text
    assert "\x1b" not in text


def test_a_loss_that_is_not_finite_is_said() -> None:
    screen = console(terminal=False)
    PlainDisplay(screen, total_steps=1).step({"step": 1, "train/loss": None, "train/grad_norm": None})
    assert "loss not finite" in printed(screen)


def panel(display: LiveDisplay, width: int) -> list[str]:
    screen = console(terminal=True, width=width)
    screen.print(display.panel())
    return printed(screen).splitlines()


@pytest.mark.parametrize("width", [40, 80, 120])
def test_the_panel_fits_the_terminal(width: int) -> None:
    clock = Clock()
    screen = console(terminal=True, width=width)
    display = LiveDisplay(screen, total_steps=200, total_tokens=1_670_000, clock=clock)
    assert len(panel(display, width)) == 3  # before the first step
    for step in range(1, 121):
        clock.now += 0.5
        display.step(ROW | {"step": step, "train/loss": 10.0 - step / 20, "perf/elapsed_seconds": clock.now})
    best = Best()
    for step, loss in ((25, 2.9), (50, 2.4), (100, 2.66)):
        best = best.after(step, loss)
        display.evaluated(step, loss, best)
    lines = panel(display, width)
    assert len(lines) == 6
    assert {len(line) for line in lines} == {width}
    text = "\n".join(lines)
    assert "step 120/200, 1M of 1.67M tokens" in text and "loss 4.000" in text
    assert "1:00 elapsed, 0:40 left" in text and "val  2.660 @100   best 2.400 @50" in text
    clock.now += 5.0
    assert "1:05 elapsed" in "\n".join(panel(display, width))  # it goes on between two steps
    if width >= 80:
        assert "best 2.400 @50   before 2.400 @50" in text and "█" in text and "▁" in text
        assert "9.32k tok/s   lr 8.1e-4   grad 0.93   data wait 1%   0.41 GiB" in text
        assert "mfu" not in text  # unknown on this device: left out


def test_evaluations_samples_and_notes_scroll_above_the_panel() -> None:
    screen = console(terminal=True)
    with LiveDisplay(screen, total_steps=10) as display:
        display.header([("model", "Llama"), ("", "of one layer")])
        display.step(ROW | {"step": 5})
        display.evaluated(5, 3.0)
        display.evaluated(10, 2.5)
        display.sampled(10, "import ", "os\n\n\nimport [red]sys[/red]\n" + "x = 1\n" * 9)
        display.note("step 7: skipped")
        display.closing([("done", "10 steps")])
    text = printed(screen)
    for said in ("model  Llama", "validation loss 2.500  (-0.500)", "import os", "import [red]sys[/red]", "x = 1 ..."):
        assert said in text
    assert "step 7: skipped" in text and "done" in text
    assert text.count("\x1b[?25l") == text.count("\x1b[?25h")  # the cursor is back


def test_another_metric_is_named_beside_the_best() -> None:
    display = LiveDisplay(console(terminal=True), total_steps=10)
    display.step(ROW | {"step": 5})
    best = Best("eval/rewards/accuracies", "max")
    display.evaluated(5, 0.6, best)
    assert "best" not in "".join(panel(display, 80))  # no value is finite yet
    display.evaluated(10, 0.5, best.after(10, 0.75))
    assert "val  0.500 @10   best eval/rewards/accuracies 0.750 @10   before 0.600 @5" in "".join(panel(display, 80))


def test_plain_lines_name_the_best_validation() -> None:
    screen = console(terminal=False)
    display = PlainDisplay(screen, total_steps=9, total_tokens=9e6)
    display.evaluated(1, 2.0, Best().after(1, 2.0))
    display.evaluated(2, 2.5, Best().after(1, 2.0).after(2, 2.5))
    display.evaluated(3, float("nan"), Best())
    display.step(ROW | {"step": 9, "perf/elapsed_seconds": 65.0, "perf/matmul_pct": 43.2})
    first, second, third, fourth = printed(screen).splitlines()
    assert first == "step 1/9  validation loss 2.0000  (best)"
    assert second == "step 2/9  validation loss 2.5000  best: step 1: eval/loss 2.0000"
    assert third == "step 3/9  validation loss nan"
    assert "matmul 43%" in fourth and fourth.endswith("1M of 9M tokens  1:05 elapsed, 0:00 left")


def test_an_error_leaves_the_terminal_in_order() -> None:
    screen = console(terminal=True)
    with pytest.raises(RuntimeError), LiveDisplay(screen, total_steps=10) as display:
        display.header([("model", "Llama")])
        raise RuntimeError
    assert printed(screen).count("\x1b[?25l") == printed(screen).count("\x1b[?25h")


def test_the_terminal_decides() -> None:
    assert isinstance(open_display(total_steps=1, console=console(terminal=True)), LiveDisplay)
    assert isinstance(open_display(total_steps=1, console=console(terminal=False)), PlainDisplay)


def test_the_pace_is_that_of_the_last_steps_and_of_the_resumed_part() -> None:
    clock = Clock()
    pace = RemainingTime(1000, 500, clock)
    assert pace.remaining() is None
    clock.now = 100.0  # the first step compiles
    pace.mark(501)
    assert pace.remaining() == pytest.approx(49_900)
    for step in range(502, 602):
        clock.now += 2.0
        pace.mark(step)
    assert pace.remaining() == pytest.approx(2.0 * 399)


def test_small_pieces() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([1.0], 10) == "▁"
    assert sparkline([3.0, 2.0, 1.0], 10) == "█▅▁"
    assert len(sparkline([float(n) for n in range(1000)], 30)) == 30
    assert [clock_time(s) for s in (None, 5, 65, 3725)] == ["-:--", "0:05", "1:05", "1:02:05"]
    assert details({}) == []
    assert details({"perf/mfu_pct": 41.23}) == ["mfu 41.2%"]
