"""Recompute (activation checkpointing) as a policy: how often each site of a layer runs forward in a micro batch.

A layer that is recomputed runs forward a second time in its backward. That second forward stops at the last tensor that
backward needs, so a collective behind which its layer saves nothing is not issued again.

| policy | a site inside a layer | a site behind which its layer saves nothing |
|---|---|---|
| `none` | 1 | 1 |
| `full` | 2 | 1 |

Example: a Llama layer under tp2 and `full`. The all-gathers before attention and before the MLP run twice each. The
reduce-scatter after attention runs twice. The reduce-scatter after the MLP runs once, because the layer ends with it.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Site:
    """A module of a layer that computes or sends. `module`: its name. `is_last`: no module with weights runs after it
    in the layer, so nothing after it is saved for backward. `is_kept`: selective recompute keeps what it gives."""

    module: str
    is_last: bool = False
    is_kept: bool = False


@dataclass(frozen=True)
class Recompute:
    """The policy of a layout; `mode` is the word of the run file."""

    mode: str

    def wraps(self, layer: str) -> bool:
        """Whether `layer` keeps only its input, and runs forward again in backward."""
        return self.mode != "none"

    def keeps(self, layer: str) -> bool:
        """Whether `layer` also keeps what is dear: products, attention and what comes of most collectives."""
        return self.mode == "selective"

    def forwards(self, site: Site) -> int:
        """How often `site` runs forward in a micro batch."""
        is_kept = site.is_last or (site.is_kept and self.keeps(site.module))
        return 2 if self.wraps(site.module) and not is_kept else 1
