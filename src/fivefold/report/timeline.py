"""A pipeline's step as bars: a lane for each rank, a bar for each slot, in the time that it took."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WIDTH, LANE, BAR = 1000.0, 26.0, 22.0  # pixels
FILLS = {"F": "rank-0", "B": "rank-1", "I": "rank-1", "W": "rank-2"}
WORDS = {"F": "forward", "B": "backward", "I": "backward, of the input", "W": "backward, of the weights"}
CHARACTER = 6.4  # pixels of a label


@dataclass(frozen=True)
class Bar:
    """A slot, in pixels. `label`: its micro batch, "" where it would not fit."""

    x: float
    y: float
    width: float
    fill: str
    faint: bool  # of a later one of the rank's stages
    label: str
    title: str


@dataclass(frozen=True)
class Drawing:
    """A step of all pipeline ranks. `words`: what the colours mean, as (fill, word)."""

    title: str
    says: str
    height: float
    lanes: tuple[tuple[float, str], ...]
    bars: tuple[Bar, ...]
    words: tuple[tuple[str, str], ...]


def drawing(title: str, timeline: Mapping[str, Any], *, unit: str, ideal: float | None = None) -> Drawing:
    """`timeline`: `ranks`, `bubble` and `slots`, each with rank, stage, kind, micro_batch, start and end in `unit`,
    and, where it was measured, how long it `waited` before its start for what another rank sends.
    `ideal`: the closed form of the bubble, where there is one."""
    slots = timeline["slots"]
    first = min(each["start"] for each in slots)
    scale = WIDTH / (max(each["end"] for each in slots) - first)
    lowest = {rank: min(each["stage"] for each in slots if each["rank"] == rank) for rank in range(timeline["ranks"])}
    bars = []
    for each in slots:
        rank, number, seconds = each["rank"], str(each["micro_batch"]), each["end"] - each["start"]
        label = number if seconds * scale > CHARACTER * len(number) + 2 else ""
        what = f"rank {rank}, stage {each['stage']}, micro batch {number}: {WORDS[each['kind']]}"
        waited = f", after waiting {each['waited']:.4g}" if each.get("waited") else ""
        when = f"{seconds:.4g} {unit} from {each['start'] - first:.4g}{waited}"
        is_later = each["stage"] != lowest[rank]
        at = (each["start"] - first) * scale, rank * LANE, seconds * scale
        bars.append(Bar(*at, FILLS[each["kind"]], is_later, label, f"{what}, {when}"))
    kinds = [kind for kind in WORDS if any(each["kind"] == kind for each in slots)]
    says = f"bubble {100 * timeline['bubble']:.1f} % of the time"
    if ideal is not None:
        says += f"; {100 * ideal:.1f} % by the closed form"
    return Drawing(
        title, says, LANE * timeline["ranks"],
        tuple((rank * LANE + BAR / 2, f"rank {rank}") for rank in range(timeline["ranks"])), tuple(bars),
        tuple(dict.fromkeys((FILLS[kind], WORDS[kind]) for kind in kinds)),
    )  # fmt: skip
