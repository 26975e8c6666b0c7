"""A pipeline's step as bars: a lane for each rank, a bar for each slot, in the time that it took."""

from collections.abc import Mapping
from typing import Any

from fivefold.report.boxes import WIDTH, Box, Figure

LANE, BAR = 26.0, 22.0  # pixels
PALER = 0.55  # opacity of a rank's later stages
FILLS = {"F": "rank-0", "B": "rank-1", "I": "rank-1", "W": "rank-2"}
WORDS = {"F": "forward", "B": "backward", "I": "backward, of the input", "W": "backward, of the weights"}


def timeline(title: str, found: Mapping[str, Any], *, unit: str, ideal: float | None = None) -> Figure:
    """`found`: `ranks`, `bubble` and `slots`, each with rank, stage, kind, micro_batch, start and end in `unit`, and,
    where it was measured, how long it `waited` before its start for what another rank sends. `ideal`: the closed form
    of the bubble, where there is one."""
    slots, ranks = found["slots"], range(found["ranks"])
    first = min(each["start"] for each in slots)
    scale = WIDTH / (max(each["end"] for each in slots) - first)
    lowest = {rank: min(each["stage"] for each in slots if each["rank"] == rank) for rank in ranks}
    bars = []
    for each in slots:
        rank, number, seconds = each["rank"], str(each["micro_batch"]), each["end"] - each["start"]
        what = f"rank {rank}, stage {each['stage']}, micro batch {number}: {WORDS[each['kind']]}"
        waited = f", after waiting {each['waited']:.4g}" if each.get("waited") else ""
        hint = f"{what}, {seconds:.4g} {unit} from {each['start'] - first:.4g}{waited}"
        at = (each["start"] - first) * scale, rank * LANE, seconds * scale, BAR
        opacity = PALER if each["stage"] != lowest[rank] else 1.0
        bars.append(Box(*at, FILLS[each["kind"]], hint, number, opacity))
    kinds = [kind for kind in WORDS if any(each["kind"] == kind for each in slots)]
    says = f"bubble {100 * found['bubble']:.1f} % of the time"
    if ideal is not None:
        says += f"; {100 * ideal:.1f} % by the closed form"
    names = [(rank * LANE + BAR / 2, f"rank {rank}") for rank in ranks]
    words = list(dict.fromkeys((FILLS[kind], WORDS[kind]) for kind in kinds))
    return Figure(title, says, LANE * len(ranks), names, bars, words)
