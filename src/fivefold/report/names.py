"""Names of parameters and modules, short enough for a plot, and the layer they belong to."""

import re
from collections import Counter
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

# The first number in a dotted name is its layer: model.layers.3.mlp.up_proj, transformer.h.3.attn
_LAYER = re.compile(r"^(?P<stem>(?:[^.\d][^.]*\.)+)(?P<number>\d+)(?:\.(?P<inner>.+))?$")
_SHORTER = (
    ("self_attn", "attn"), ("self_attention", "attn"), ("post_attention", "post_attn"), ("layernorm", "norm"),
)  # fmt: skip
LONGEST = 26  # characters of a short name


class Layer(NamedTuple):
    """A layer of the model: `model.layers.3.mlp.up_proj` is in the one with stem `model.layers` and number 3."""

    stem: str
    number: int


def in_layer(name: str) -> tuple[Layer | None, str]:
    """Split `name` into its layer, None outside all layers, and its name there."""
    match = _LAYER.match(name)
    if match is None:
        return None, name
    return Layer(match["stem"].rstrip("."), int(match["number"])), match["inner"] or ""


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten to `3 attn.q_proj` or `embed_tokens`: unique among `names`, or else cut from the whole names."""
    short = [_cut(_short(name)) for name in names]
    counts = Counter(short)
    return [cut if counts[cut] == 1 else _cut(name) for cut, name in zip(short, names, strict=True)]


def _short(name: str) -> str:
    layer, inner = in_layer(name)
    if layer is None:
        text = name.removesuffix(".weight").partition(".")[2] or name.removesuffix(".weight")
        text = text if text != "weight" else name
    else:
        inner = inner.removesuffix(".weight")
        text = f"{layer.number} {inner}" if inner else f"layer {layer.number}"
    for long, short in _SHORTER:
        text = text.replace(long, short)
    return text.removesuffix(" input") + " in" * text.endswith(" input")


def _cut(text: str) -> str:
    """Keep both ends of a text that is too long; its end tells most."""
    return text if len(text) <= LONGEST else f"{text[:7]}…{text[8 - LONGEST :]}"


def layers_of(names: Sequence[str]) -> dict[int, tuple[int, int]]:
    """Layer -> the first and the last position of its names."""
    found: dict[int, tuple[int, int]] = {}
    for number, own in groupby(enumerate(names), key=lambda pair: (layer := in_layer(pair[1])[0]) and layer.number):
        xs = [x for x, _ in own]
        if number is not None:
            found.setdefault(number, (xs[0], xs[-1]))
    return found


def ranks_text(ranks: Sequence[int], world: int) -> str:
    """Format rank numbers as `0–3,6`; `all 8` for all of several."""
    if len(ranks) == world > 1:
        return f"all {world}"
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}–{run[-1]}" if len(run) > 2 else ",".join(map(str, run)) for run in runs]
    return ",".join(texts)


def of_ranks(ranks: Sequence[int], world: int) -> str:
    """Format as `rank 3` or `ranks 0–3,6`."""
    return f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks, world)}"
