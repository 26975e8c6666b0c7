"""Recompute (activation checkpointing) as a policy: how often each site of a layer runs forward in a micro batch.

A recomputed layer runs forward a second time in its backward. That second forward stops at the last tensor that
backward needs, so a collective after the last saved tensor is not issued again. Under `selective` the layer also keeps
its expensive results: the outputs of linears, of attention, and of collectives. Gathered inputs of linears are the
exception: they are many times as large as one rank's part.

| policy | kept besides the layer's input | forwards of a site | of a kept site | of one after the last saved tensor |
|---|---|---|---|---|
| `none` | all that backward needs | 1 | 1 | 1 |
| `selective` | products, attention | 2 | 1 | 1 |
| `full` | nothing | 2 | 2 | 1 |

Example: a Llama layer under tp2. With `full`, the all-gathers before attention and before the MLP run twice each, and
so does the reduce-scatter after attention. The reduce-scatter after the MLP runs once, because the layer ends with it.
With `selective`, the two all-gathers run twice, and each reduce-scatter once.
"""

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from fivefold.core.errors import UserError
from fivefold.core.units import GIB, many

Mode = Literal["none", "selective", "full"]
MODES: tuple[Mode, ...] = get_args(Mode)
BUDGET = r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?GiB"  # what a rank may keep, in place of a mode


@dataclass(frozen=True)
class Site:
    """A module of a layer that computes or communicates, named `module`. `is_last`: no module with weights runs after
    it in the layer, so nothing after it is saved for backward. `is_kept`: selective recompute saves its output."""

    module: str
    is_last: bool = False
    is_kept: bool = False


@dataclass(frozen=True)
class Recompute:
    """Recompute policy of a layout. `mode`: that of every layer, or a budget, such as `12GiB`. `by_layer`: the modes
    chosen for a budget. `kept`: bytes that the layers of this rank keep under it."""

    mode: str
    by_layer: Mapping[str, Mode] = field(default_factory=dict, hash=False)
    kept: int = 0

    def of(self, module: str) -> Mode:
        """Recompute mode of a layer, or of the layer of a module."""
        if self.mode in MODES:
            return self.mode
        parts = module.split(".")
        outer = (".".join(parts[:size]) for size in range(len(parts), 0, -1))
        found = next((name for name in outer if name in self.by_layer), None)
        assert found is not None, f"the budget of {self.mode} is not spent for {module} yet"
        return self.by_layer[found]

    def wraps(self, layer: str) -> bool:
        """True if `layer` runs forward again in backward."""
        return self.of(layer) != "none"

    def keeps(self, layer: str) -> bool:
        """True if `layer` runs forward again, but keeps its expensive results."""
        return self.of(layer) == "selective"

    def forwards(self, site: Site) -> int:
        """Number of times that `site` runs forward in a micro batch."""
        if site.is_last or not self.wraps(site.module):
            return 1
        return 1 if site.is_kept and self.keeps(site.module) else 2

    def __str__(self) -> str:
        """For people: `10 layers none, 18 selective, 4 full: 11.7 of 12 GiB`."""
        if self.mode in MODES:
            return self.mode
        counts = Counter(self.by_layer.values())
        parts = [f"{counts[mode]:,} {mode}" for mode in MODES if counts[mode]]
        first, _, mode = parts[0].partition(" ") if parts else ("0", "", "none")
        parts[:1] = [f"{many(int(first.replace(',', '')), 'layer')} {mode}"]
        return f"{', '.join(parts)}: {self.kept / GIB:.4g} of {self.mode.removesuffix('GiB')} GiB"


# ---- a budget --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Choice:
    """A layer under one mode: `kept` bytes from forward to backward, of all micro batches in flight, and the work that
    its backward repeats (`again`), in any unit of time."""

    kept: int
    again: float

    def in_flight(self, count: int) -> "Choice":
        """Scale what one micro batch keeps to `count` of them."""
        return replace(self, kept=count * self.kept)


def budget_bytes(mode: str) -> int | None:
    """Bytes of a budget such as `12GiB`; None for a mode."""
    found = re.fullmatch(BUDGET, mode)
    return round(float(found[1]) * GIB) if found else None


def fit_recompute_budget(mode: str, layers: Mapping[str, Mapping[Mode, Choice]]) -> Recompute:
    """Choose the mode of each layer of a rank, such that the layers keep at most the budget and repeat little work.

    All layers begin with `none`. Greedily apply the change that frees the most bytes per repeated work, until the
    budget holds. If the last change frees more than needed, the cheapest that frees enough takes its place. Equal
    layers change in their order. Raises `UserError` if the layers exceed the budget even with `full` everywhere.
    """
    budget = budget_bytes(mode)
    assert budget is not None, f"{mode} is no budget"
    chosen: dict[str, Mode] = dict.fromkeys(layers, "none")
    kept = sum(layers[name]["none"].kept for name in layers)
    while kept > budget:
        changes = [
            (layers[name][now].kept - choice.kept, choice.again - layers[name][now].again, name, to)
            for name, now in chosen.items()
            for to, choice in layers[name].items()
            if choice.kept < layers[name][now].kept
        ]
        if not changes:
            least = -(-1000 * kept // GIB) / 1000
            raise UserError(
                f"memory.recompute {mode}: with full recompute the layers of a rank still keep {least:g} GiB",
                fix=f"{least:g} GiB or more, fewer rows in a micro batch, or shorter ones",
                more="fivefold docs explain/memory",
            )
        enough = [change for change in changes if kept - change[0] <= budget]
        best = max(changes, key=lambda change: change[0] / max(change[1], 1e-30))
        if enough and kept - best[0] <= budget:
            best = min(enough, key=lambda change: change[1])
        freed, _, name, to = best
        chosen[name], kept = to, kept - freed
    return Recompute(mode, chosen, kept)
