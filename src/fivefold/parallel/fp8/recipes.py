"""fp8 recipes as data: how the operands of each product of a linear are scaled and rounded to eight bits. No torch.

A product sums over one dimension of both operands, the last: `a [M, K]` times `b [N, K]` is [M, N]. An operand is
divided into regions. Each region is scaled so that its largest value becomes the largest number of the format, and
rounded ("cast"). The recipes differ in regions and in formats:

| recipe | region of activations and gradients | region of weights | formats | source |
|---|---|---|---|---|
| `tensorwise` | tensor | tensor | e4m3, gradients e5m2 | arXiv:2209.05433 |
| `rowwise` | row | row | e4m3; scales are powers of 2 | torchao's recipe of that name |
| `rowwise_gw_hp` | row | row; in backward tensor | the same; weight gradients in the compute dtype | the same |
| `delayed` | tensor, from earlier steps | the same | e4m3, gradients e5m2 | Transformer Engine's DelayedScaling |
| `blockwise` | 1 x 128 | 128 x 128 | e4m3 | DeepSeek-V3, arXiv:2412.19437 |
| `mxfp8` | 1 x 32 | 1 x 32 | e4m3; scales are powers of 2 | OCP Microscaling, arXiv:2310.10537 |

Ranks that share a region must agree on its largest value, to cast it as one process would. So a row of activations
split over tp costs a collective, and a strip of 128 features never does.

Legend: M, N free dimensions, K the one summed over; I inputs and O outputs of a linear, S tokens.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

Format = Literal["e4m3", "e5m2"]
Dim = Literal["tokens", "inputs", "outputs"]
Product = Literal["output", "input_grad", "weight_grad"]
Operand = Literal["input", "weight", "gradient"]


@dataclass(frozen=True)
class Cast:
    """Cast of an operand [M, K]. `region`: how much of M and of K has one scale; None is all of it."""

    form: Format
    region: tuple[int | None, int | None]
    is_power_of_2: bool = False


Pair = tuple[Cast, Cast]


@dataclass(frozen=True)
class Recipe:
    """Casts of the two operands of each product; None: the product is multiplied in the compute dtype. `history`:
    the number of earlier steps whose largest values set the scale; 0: the tensor itself sets it."""

    output: Pair
    input_grad: Pair
    weight_grad: Pair | None
    history: int = 0

    @property
    def casts_once(self) -> bool:
        """True if each operand is cast once for both of its products (`tensorwise`): forward saves the cast input."""
        (x, w), (g, w_again), (g_again, x_again) = self.output, self.input_grad, self.weight_grad or (None, None)
        is_whole = all(cast.region == (None, None) for cast in (x, w, g))
        return is_whole and (x, w, g) == (x_again, w_again, g_again)

    def cast_for(self, product: Product) -> tuple[Operand, ...]:
        """Operands that are cast when a product is computed. The others are not cast, or were cast before: FSDP casts
        weights that are cast once, before it gathers them."""
        if getattr(self, product) is None or (self.casts_once and product == "weight_grad"):
            return ()
        return OPERANDS[product][: 1 if self.casts_once else 2]

    @property
    def block(self) -> int:
        """Numbers along K that share a scale; 1 if the scale spans all of K."""
        return self.output[0].region[1] or 1


@dataclass(frozen=True)
class Kernel:
    """Hardware on which PyTorch multiplies fp8: NVIDIA GPUs of compute capability `first` to `last`, from this version
    of CUDA. K must be a multiple of `summed`, and N of 16."""

    first: tuple[int, int]
    last: tuple[int, int] | None
    cuda: tuple[int, int]
    summed: int


# Numbers along K that share a scale (`Recipe.block`) -> its kernel, with the conditions in PyTorch's source.
KERNELS: Mapping[int, Kernel] = {
    1: Kernel((8, 9), None, (12, 0), 16),
    32: Kernel((10, 0), None, (12, 8), 32),
    128: Kernel((9, 0), (9, 0), (12, 9), 128),
}
# The same for a grouped matmul of experts, whose rows are 2-D and whose weights are 3-D.
GROUPED_KERNELS: Mapping[int, Kernel] = {1: Kernel((9, 0), (10, 9), (12, 0), 16)}
ALIGNED = 16  # N must be a multiple of this

# Product -> the dimensions M, N, K of its operands [M, K] and [N, K].
DIMS: Mapping[Product, tuple[Dim, Dim, Dim]] = {
    "output": ("tokens", "outputs", "inputs"),  # activations, weight
    "input_grad": ("tokens", "inputs", "outputs"),  # gradients, weight
    "weight_grad": ("outputs", "inputs", "tokens"),  # gradients, activations
}

KINDS: tuple[Operand, ...] = get_args(Operand)

# Product -> its operands: the first times the transpose of the second.
OPERANDS: Mapping[Product, tuple[Operand, Operand]] = {
    "output": ("input", "weight"),
    "input_grad": ("gradient", "weight"),
    "weight_grad": ("gradient", "input"),
}

# Role of a linear under tp -> the mesh axis that splits each of its dimensions, if any.
SPLIT_OVER: Mapping[Literal["column", "row", "dense"], Mapping[Dim, str]] = {
    "column": {"outputs": "tp", "tokens": "cp"},
    "row": {"inputs": "tp", "tokens": "cp"},
    "dense": {"tokens": "cp"},
}

_TENSOR, _GRADIENT = Cast("e4m3", (None, None)), Cast("e5m2", (None, None))
_ROW, _ROUND_TENSOR = Cast("e4m3", (1, None), is_power_of_2=True), Cast("e4m3", (None, None), is_power_of_2=True)
_STRIP, _BLOCK = Cast("e4m3", (1, 128)), Cast("e4m3", (128, 128))
_MICRO = Cast("e4m3", (1, 32), is_power_of_2=True)

RECIPES: Mapping[str, Recipe] = {
    "tensorwise": Recipe((_TENSOR, _TENSOR), (_GRADIENT, _TENSOR), (_GRADIENT, _TENSOR)),
    "rowwise": Recipe((_ROW, _ROW), (_ROW, _ROW), (_ROW, _ROW)),
    "rowwise_gw_hp": Recipe((_ROW, _ROW), (_ROW, _ROUND_TENSOR), None),
    "delayed": Recipe((_TENSOR, _TENSOR), (_GRADIENT, _TENSOR), (_GRADIENT, _TENSOR), history=16),
    "blockwise": Recipe((_STRIP, _BLOCK), (_STRIP, _BLOCK), (_STRIP, _STRIP)),
    "mxfp8": Recipe((_MICRO, _MICRO), (_MICRO, _MICRO), (_MICRO, _MICRO)),
}


def by_row(recipe: Recipe) -> Recipe:
    """Adapt a recipe to experts: cast activations and gradients row by row where it casts whole tensors. Scales are
    powers of 2, so that 16 bits hold a cast number's value."""

    def rows(pair: Pair) -> Pair:
        region = (1, pair[0].region[1])
        return replace(pair[0], region=region, is_power_of_2=True), replace(pair[1], is_power_of_2=True)

    return Recipe(rows(recipe.output), rows(recipe.input_grad), None)


def shared_dims(cast: Cast, free: Dim, summed: Dim) -> tuple[Dim, ...]:
    """Dimensions that the regions of an operand span: ranks that split one all-reduce amax."""
    return tuple(dim for dim, size in zip((free, summed), cast.region, strict=True) if size is None)


def agreements(recipe: Recipe, tokens: int, inputs: int, outputs: Sequence[int]) -> Iterator[tuple[Product, Dim, int]]:
    """Collectives of linears that share an input: (product, dimension, number of largest values) for each.

    The ranks that split the dimension take part. `outputs`: features of each linear. Values cast at the same time
    travel together. Example, q, k and v by `rowwise` of 16 tokens and 8 inputs: for the gradient of the input, 3 x 16
    largest values of gradients and 3 x 8 of weights go in one collective.
    """
    for product, (m, n, k) in DIMS.items():
        numbers = Counter[Dim]()
        for operand, cast, free in zip(OPERANDS[product], getattr(recipe, product) or (), (m, n), strict=False):
            of_each = () if operand not in recipe.cast_for(product) else outputs[:1] if operand == "input" else outputs
            for own in of_each:
                size = {"tokens": tokens, "inputs": inputs, "outputs": own}[free] if cast.region[0] else 1
                numbers.update(dict.fromkeys(shared_dims(cast, free, k), size))
        yield from ((product, dim, count) for dim, count in numbers.items())
