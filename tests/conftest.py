"""What holds for every test."""

import signal
from collections import Counter
from typing import Any

import torch

AIM_MINUTES = 12  # of `make test` with lint and types, on two idle cores
DEAREST = 10  # files that are told

torch.set_num_threads(1)  # models are 32 wide: threads that wait for each other cost more than they save

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in the background of a script; commands inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """The seconds of the dearest files, and whether the run kept to its aim. It does not fail: machines are noisy."""
    reports = [each for kind in ("passed", "failed") for each in terminalreporter.stats.get(kind, [])]
    seconds: Counter[str] = Counter()
    for each in reports:
        seconds[each.nodeid.partition("::")[0]] += each.duration
    told = [f"{spent:7.1f}s {file}" for file, spent in seconds.most_common(DEAREST) if spent >= 1]
    if told:
        terminalreporter.section(f"dearest {len(told)} files")
        terminalreporter.write_line("\n".join(told))
    if (minutes := sum(seconds.values()) / 60) > AIM_MINUTES:
        terminalreporter.write_line(f"{minutes:.0f} minutes of tests: the aim on two idle cores is {AIM_MINUTES}")
