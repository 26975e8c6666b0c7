"""Counts of FSDP's gathers of a unit's parameters, and of its reductions of gradients, in a step. No torch.

| zero | parameters gathered | gradients reduced |
| ---- | ------------------- | ----------------- |
| 1    | once a step         | once a step       |
| 2    | once a step         | per micro batch   |
| 3    | twice a micro batch (forward, backward) | per micro batch |

A secondary copy (`layout.hpz`) is left by the first forward, from which all later passes of the step gather.
"""

from collections import Counter
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass

from fivefold.core.schedule import Slot

WITHOUT_FSDP = 2  # the stage that resembles a single process: copies of parameters stay, gradients are added at once
DEFERRED = {"I": 1, "W": -1}  # what a slot adds to the waiting gradients of weights


@dataclass(frozen=True)
class Unshards:
    """Gathers and reductions of one unit in a step. `near_...`: gathers from the secondary copy."""

    forward: int
    backward: int
    reductions: int
    near_forward: int = 0
    near_backward: int = 0


def of_slots(
    order: Sequence[Slot], users: Mapping[str, frozenset[int]], micro_batches: int, own: Sequence[int], zero: int,
    copied: Container[str] = (),
) -> dict[str, Unshards]:  # fmt: skip
    """Apply the table at the top to a rank with slots in `order`. `users`: unit -> its stages here; `own`: all stages
    here. `copied`: units with a secondary copy.

    The model's own unit is gathered for every stage, like FSDP's root, and stays gathered after a forward.
    """
    progress, gathered = Progress(micro_batches, own, zero), set[str]()
    forward, backward, reductions = Counter[str](), Counter[str](), Counter[str]()
    near, near_forward, near_backward = set[str](), Counter[str](), Counter[str]()
    used = {stage: [name for name, stages in users.items() if name == "" or stage in stages] for stage in own}
    for slot in order:
        progress.note(slot)
        for name in used[slot.stage]:
            reductions[name] += progress.reduces(slot, users[name])
            if slot.kind != "W":
                far, close = (forward, near_forward) if slot.kind == "F" else (backward, near_backward)
                (close if name in near else far)[name] += name not in gathered
                stays = zero < 3 or (name == "" and slot.kind == "F")
                (gathered.add if stays else gathered.discard)(name)
                near |= {name} if name in copied else set()
    counts = forward, backward, reductions, near_forward, near_backward
    return {name: Unshards(*(count[name] for count in counts)) for name in users}


def reduced_together(
    order: Sequence[Slot], users: frozenset[int], micro_batches: int, own: Sequence[int], zero: int
) -> list[frozenset[int]]:
    """The micro batches whose gradients each reduction of a unit takes, one after the other; as `of_slots`."""
    progress, found, waiting = Progress(micro_batches, own, zero), list[frozenset[int]](), set[int]()
    for slot in order:
        progress.note(slot)
        if slot.stage in users and slot.kind in "BW":
            waiting.add(slot.micro_batch)
        if progress.reduces(slot, users):
            found.append(frozenset(waiting))
            waiting.clear()
    return found


class Progress:
    """Remaining backwards of this rank, and the ones after which FSDP reduces a unit.

    ZeRO-1 reduces a unit once, after its last backward. ZeRO-2 and 3 reduce after every backward, except (a) while
    weight gradients are still deferred, and (b) if several stages of this rank share the unit.
    """

    def __init__(self, micro_batches: int, own: Sequence[int], zero: int) -> None:
        self._zero = zero
        self._left = dict.fromkeys(own, micro_batches)
        self._waiting = dict.fromkeys(own, 0)

    def note(self, slot: Slot) -> None:
        """Note that a backward, or a part of one, is done."""
        if slot.kind in DEFERRED:
            self._waiting[slot.stage] += DEFERRED[slot.kind]
        if slot.kind in "BW":
            self._left[slot.stage] -= 1

    def is_last(self, users: frozenset[int]) -> bool:
        """True if no backward is left in the stages that add to a unit."""
        return not any(self._left[stage] for stage in users)

    def reduces(self, slot: Slot, users: frozenset[int]) -> bool:
        """True if the unit that `users` add to is reduced now, after `slot` was noted."""
        if slot.stage not in users or slot.kind not in "BW":
            return False
        return self.is_last(users) or (self._zero > 1 and len(users) == 1 and not self._waiting[slot.stage])
