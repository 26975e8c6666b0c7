"""Keys of fp8. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import Violation
from fivefold.core.keys import LayoutPart, key
from fivefold.parallel.fp8.recipes import RECIPES


@dataclass(frozen=True, kw_only=True)
class Fp8Keys(LayoutPart):
    """Linears that multiply in fp8."""

    fp8: str = key(
        "none", "precision.fp8", "scaling of fp8 matmuls",
        choices=("none", *RECIPES), priced="work shards",
        words={"fp8": "tensorwise", "mxfp8": "mxfp8", **{f"fp8_{name}": name for name in [*RECIPES][1:-1]}},
        answers={"fp8_recipe fp8_recipe_name": "set precision.fp8: rowwise, or one of fivefold docs explain/fp8"},
    )  # fmt: skip
    fp8_high_layers: int = key(
        0,
        "precision.fp8_high_layers",
        "layers at each end that stay in precision.compute",
        least=0,
        prefix="hp",
        priced="",
    )

    @property
    def matmul_words(self) -> str:
        """The precision of layers' matmuls, if it is not `precision.compute`: `fp8 rowwise`."""
        return "" if self.fp8 == "none" else f"fp8 {self.fp8}"

    @property
    def matmul_dtype(self) -> str:
        """Dtype of the matmuls of layers, as chips name their rates; empty for the compute dtype."""
        return "" if self.fp8 == "none" else "fp8"

    @property
    def has_tensor_scales(self) -> bool:
        """True if matmuls have one scale for a whole tensor, so that a token's result depends on all others."""
        return self.fp8 != "none" and RECIPES[self.fp8].casts_once

    def chunk_multiple(self) -> int:
        """If a recipe has a scale for each block of tokens, chunks are whole blocks."""
        return 1 if self.fp8 == "none" else RECIPES[self.fp8].block

    def dtype_words(self) -> str:
        """The recipe, and the layers without it."""
        recipe = f" with {self.matmul_words}" if self.matmul_words else ""
        return recipe + (f" but for {self.fp8_high_layers} layers at each end" if self.fp8_high_layers else "")

    def violations(self) -> Iterator[Violation]:
        """`fp8_high_layers` needs fp8."""
        if self.fp8_high_layers and self.fp8 == "none":
            what, fix = f"fp8_high_layers {self.fp8_high_layers} without fp8", "set precision.fp8, or leave"
            yield Violation("fp8_high_layers", what, f"{fix} fp8_high_layers out", more="fivefold docs explain/fp8")
