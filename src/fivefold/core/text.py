"""Names and values in a sentence, shortened for the reader."""

import re
from collections.abc import Iterable


def listed(names: Iterable[object], most: int) -> str:
    """`a, b and 3 more`, with the first `most` named."""
    every = [str(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def shortened(text: str, most: int) -> str:
    """At most `most` characters of `text`; a shortened text ends in three dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def any_layer(name: str) -> str:
    """Write `*` for every number in a name: `layers.*.mlp` for `layers.12.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)
