"""The Triton kernels of attention, compiled for an H100 and an A100 without either: they fit, and spill little."""

import json
import os
import subprocess
import sys
from collections import Counter
from typing import Any

import pytest

from fivefold.hardware.cluster import Cluster
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.stand_in import lacking

KIB = 2**10
pytestmark = [
    pytest.mark.rehearsal,
    pytest.mark.skipif(bool(lacking()), reason="it needs a CUDA build of torch, and a C compiler"),
]


def compiled(chip: str) -> list[dict[str, Any]]:
    environment = stand_in.environment(Cluster.parse(f"1x{chip}").chip, 1, base={**os.environ, "TRITON_INTERPRET": "0"})
    command = [sys.executable, "-m", "tests.rehearsed.compiled_attention"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(("chip", "shared"), [("H100", 227 * KIB), ("A100", 99 * KIB)])
def test_the_kernels_fit(chip: str, shared: int) -> None:
    """What an A100 is given fits the chips that have 99 KiB, too. Spills `inside` are of the loops over tiles."""
    found = compiled(chip)
    assert len({(each["kernel"], each["size"]) for each in found}) == 12
    for each in found:
        assert each["shared"] <= shared and each["spilled"] <= 160 and each["inside"] <= 14, each
    # Documents in a row and blocks between ranks are two programs, whatever their lengths and windows are.
    assert set(Counter((each["kernel"], each["size"]) for each in found).values()) == {2}
