"""The tensors of a run of a few steps, by key, and distances of another run's tensors from them.

| key | content |
|---|---|
| `weight/P` | parameter P, or a router buffer, before the first step |
| `output/M` | output of module M over the packed rows [G, T, ...]; `M input`: its input |
| `backward/M` | gradient of the loss with respect to that output |
| `logits` | [G, T, V] |
| `evaluated` | the loss of the first batch without gradients, fp64 |
| `gradient/P`, `clipped/P`, `update/P` | in the first step: gradient before and after clipping, change of the weight |
| `second/P` | in the second step: the optimizer's gradient, which no clipping may have changed |
| `load/M` | in the first step: tokens that router M sends to each expert [E] |
| `exp_avg/P`, `exp_avg_sq/P`, `momentum_buffer/P` | optimizer state after the first step |
| `last/P` | parameter P after the last step |
| `losses`, `norms` | [steps], fp64 |
| `greedy` | [prompts, tokens] |

Legend: G rows of a global batch, T tokens of a row, V vocabulary, E experts.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from fivefold.parallel.sharding import Region

KS = (1, 5, 10, 50, 100, 0)  # top-k comparisons of logits; 0: the whole vocabulary


def logit_distances(found: Tensor, expected: Tensor) -> dict[str, float]:
    """Distances of logits [N, V]: the mean absolute error over the top k tokens of `expected`, the largest error, and
    the share of positions whose set of top k tokens differs."""
    found, expected = found.double(), expected.double()
    error = (found - expected).abs().nan_to_num(nan=float("inf"))
    distances = {"logits, largest error": float(error.max())}
    ordered = expected.argsort(dim=-1, descending=True)
    found_order = found.argsort(dim=-1, descending=True)
    for k in KS:
        width = min(k or expected.shape[-1], expected.shape[-1])
        top, found_top = ordered[:, :width], found_order[:, :width]
        distances[f"logits, mean error of top {k or 'all'}"] = float(error.gather(-1, top).mean())
        if k and width < expected.shape[-1]:
            same = (top.sort(-1).values == found_top.sort(-1).values).all(-1)
            distances[f"tokens, other top {k}"] = float((~same).double().mean())
    return distances


class ReferenceTensors:
    """The tensors of a reference run on disk, read by region, and their metadata `about` (JSON)."""

    def __init__(self, path: Path) -> None:
        self._file: Any = safe_open(path, framework="pt", device="cpu")
        self.about: dict[str, Any] = json.loads(path.with_suffix(".json").read_text())
        self.keys: set[str] = set(self.about["norms"])

    def __contains__(self, key: str) -> bool:
        return key in self.keys

    def whole(self, key: str) -> Tensor:
        """Read a whole tensor."""
        return torch.as_tensor(self._file.get_tensor(key))

    def read(self, key: str, region: Region) -> Tensor:
        """Read a region of a tensor."""
        return torch.as_tensor(self._file.get_slice(key)[region]) if region else self.whole(key)

    def norm(self, key: str) -> float:
        """The norm of a tensor."""
        return float(self.about["norms"][key])

    def values(self, key: str) -> int:
        """The number of values of a tensor that a proof compares: all, but for module outputs only real tokens."""
        return int(self.about["values"][key])

    def names(self, kind: str) -> list[str]:
        """The names under `kind/`, in the order of recording."""
        return [key.partition("/")[2] for key in self.about["norms"] if key.startswith(f"{kind}/")]

    def recorded(self) -> list[str]:
        """Every key compared as a tensor; each gradient twice, before and after its reduction."""
        keys = [key for key in self.about["norms"] if "/" in key and not key.startswith("raw/")]
        return keys + [f"raw/{name}" for name in self.names("gradient")]

    def numbers(self) -> list[str]:
        """The keys compared as numbers."""
        steps = len(self.whole("losses"))
        return [key for key in self.about["floors"] if "/" not in key] + [
            f"{w} of {steps} steps" for w in ("losses", "norms")
        ]


def save_reference_tensors(tensors: dict[str, Tensor], path: Path, **about: Any) -> None:
    """Write tensors, their norms and their metadata."""
    norms = {key: float(tensor.double().nan_to_num().norm()) for key, tensor in tensors.items()}
    save_file({key: tensor.detach().cpu().contiguous() for key, tensor in tensors.items()}, path)
    path.with_suffix(".json").write_text(json.dumps({"norms": norms, **about}))
