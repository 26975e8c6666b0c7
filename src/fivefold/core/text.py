"""Names and values in a sentence: as many and as long as a reader takes in."""

import re
from collections.abc import Iterable


def listed(names: Iterable[object], most: int) -> str:
    """`a, b and 3 more`, of which `most` are named."""
    every = [str(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def shortened(text: str, most: int) -> str:
    """At most `most` characters; where some are left out, the last three are dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def any_layer(name: str) -> str:
    """`layers.*.mlp` of `layers.12.mlp`: a name with `*` for every number in it."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
