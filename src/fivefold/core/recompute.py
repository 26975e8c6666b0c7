"""Recompute (activation checkpointing) as a policy: how often each site of a layer runs forward in a micro batch.

A layer that is recomputed runs forward a second time in its backward. That second forward stops at the last tensor that
backward needs, so a collective behind which its layer saves nothing is not issued again. Under `selective` the layer
also keeps what is dear: the products of its linears, attention, and what comes of every collective but those that
gather what a linear reads, which is many times as large as one rank's part.

| policy | kept besides the layer's input | a site in a layer | one that is kept | one behind which nothing is saved |
|---|---|---|---|---|
| `none` | all that backward needs | 1 | 1 | 1 |
| `selective` | products, attention | 2 | 1 | 1 |
| `full` | nothing | 2 | 2 | 1 |

Example: a Llama layer under tp2. With `full`, the all-gathers before attention and before the MLP run twice each, and
so does the reduce-scatter after attention. The reduce-scatter after the MLP runs once, because the layer ends with it.
With `selective`, the two all-gathers run twice, and each reduce-scatter once.
"""

from dataclasses import dataclass
from typing import Literal

Mode = Literal["none", "selective", "full"]


@dataclass(frozen=True)
class Site:
    """A module of a layer that computes or sends. `module`: its name. `is_last`: no module with weights runs after it
    in the layer, so nothing after it is saved for backward. `is_kept`: selective recompute keeps what it gives."""

    module: str
    is_last: bool = False
    is_kept: bool = False


@dataclass(frozen=True)
class Recompute:
    """The policy of a layout; `mode` is that of every layer."""

    mode: str

    def of(self, module: str) -> Mode:
        """How a layer, or the layer of a module, is recomputed."""
        return self.mode  # type: ignore[return-value]

    def wraps(self, layer: str) -> bool:
        """Whether `layer` runs forward again in backward."""
        return self.of(layer) != "none"

    def keeps(self, layer: str) -> bool:
        """Whether `layer` runs forward again, and keeps what is dear."""
        return self.of(layer) == "selective"

    def forwards(self, site: Site) -> int:
        """How often `site` runs forward in a micro batch."""
        is_kept = site.is_last or (site.is_kept and self.keeps(site.module))
        return 2 if self.wraps(site.module) and not is_kept else 1
