"""The last whole step of a run, in the memory of its nodes: which step they go on from without a disk. No torch.

When a node is gone, workers of the others still hold the step that they have done last. Each writes what it holds to a
folder of its node's memory (`checkpoint/kept.py`), as the parts of a checkpoint, before it ends. The launchers tell
each other what is there (`launch/memory.py`): if together they have every part, the next round goes on from it.

    /dev/shm/fivefold-memory-XXXX/      private, of one launcher, removed when it ends
      round-000007/                     of one round of nodes
        step-000123/                    ranks may differ by a step
          claim-00000                   somebody writes, or has written, what the first replica has on rank 0
          weight-00000.safetensors, optimizer-00000.safetensors
          part-00000.json               written last
        ready-1                         rank 1 may still write

A part is named by the rank that has it in the first replica, whichever replica wrote it.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fivefold.core.run_folder import step_folder, steps

_PART = re.compile(r"part-(\d{5,})\.json")


@dataclass(frozen=True)
class KeptStep:
    """A step that nodes hold together. `holders`: the node that has each part; `why`: why there is none (`step` 0)."""

    step: int = 0
    holders: Mapping[int, int] = field(default_factory=dict)
    why: str = ""


@dataclass(frozen=True)
class MemoryOfNode:
    """The memory of a worker's `node`: the `folder` ("": none), its `round`, the one `before`, the step
    that is kept of that. `acts`: this worker acts for its node."""

    folder: str = ""
    node: int = 0
    before: int = 0
    kept: KeptStep = field(default_factory=KeptStep)
    round: int = 0
    acts: bool = False

    @property
    def here(self) -> Path:
        return round_folder(Path(self.folder), self.round)

    @property
    def step(self) -> Path:
        return self.here / step_folder(self.kept.step)

    def take(self) -> None:
        """Make the memory of the round before that of this one, if there is any. Nobody may use it in another way."""
        earlier = round_folder(Path(self.folder), self.before)
        if self.folder and earlier.is_dir():
            for flag in earlier.glob("ready-*"):  # of ranks that were killed
                flag.unlink()
            earlier.rename(self.here)

    @classmethod
    def of_request(cls, told: Mapping[str, Any] | None, *, round: int, acts: bool) -> "MemoryOfNode":
        """From a part of a request: fields as plain data, which have been JSON meanwhile."""
        if not told:
            return cls()
        kept = told["kept"]
        holders = {int(part): node for part, node in kept["holders"].items()}
        return cls(told["folder"], told["node"], told["before"], KeptStep(kept["step"], holders), round, acts)


def kept_in(folder: Path | None) -> str:
    """The steps kept in a folder, for other nodes: round -> step -> (number of all parts, part -> checksums)."""
    rounds = sorted(folder.glob("round-*")) if folder else []
    return json.dumps(
        {here.name: {str(step): parts_in(here / step_folder(step)) for step in steps(here)} for here in rounds}
    )


def round_folder(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}"


def part_file(part: int) -> str:
    """The file that describes a part."""
    return f"part-{part:05d}.json"


def parts_in(folder: Path) -> dict[str, Any]:
    """The parts of a step in a folder: `count` of all there are, and by number the checksums of each."""
    count, parts = 0, dict[str, dict[str, str]]()
    for name in os.listdir(folder):
        if named := _PART.fullmatch(name):
            told = json.loads((folder / name).read_text(encoding="utf-8"))
            count, files = told["count"], told["part"]["files"]
            parts[str(int(named[1]))] = {file: record["checksum"] for file, record in files.items()}
    return {"count": count, "parts": parts}


def newest_kept(told: Sequence[str], *, round: int, newer_than: int) -> KeptStep:
    """Newest step of this round for which the nodes together hold every shard, `newer_than` the one on disk; `step` 0:
    there is none. `told`: what each node holds."""
    here = [json.loads(text).get(round_folder(Path(), round).name, {}) for text in told]
    for step in sorted({int(step) for node in here for step in node}, reverse=True):
        if step <= newer_than:
            break
        of_step = [(node, held[str(step)]) for node, held in enumerate(here) if str(step) in held]
        copies: dict[int, list[tuple[int, Any]]] = {}
        for node, found in of_step:
            for part, sums in found["parts"].items():
                copies.setdefault(int(part), []).append((node, sums))
        if any(sums != held[0][1] for held in copies.values() for _, sums in held):
            return KeptStep(why=f"replicas differ at step {step}")
        if not copies or len(copies) < max(found["count"] for _, found in of_step):
            continue
        return KeptStep(step, {part: held[0][0] for part, held in sorted(copies.items())})
    return KeptStep()
