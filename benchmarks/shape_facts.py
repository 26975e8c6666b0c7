"""Traces the built-in shapes and writes what is found beside each: `core/shapes/NAME/facts.json`.

    python benchmarks/shape_facts.py [NAME ...]

`fivefold plan` and `fivefold doctor` then answer for them without loading torch, while torch and transformers are of
the versions that were traced. To be run again where a test says that facts and what is shipped differ.
"""

import sys

from fivefold.core.shapes import shape_folder, shape_names
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.discover import cut_of, facts_of
from fivefold.models.facts_store import SHIPPED, ship_facts


def ship(name: str) -> str:
    """Trace one shape; what was written, in words."""
    model, folder = build_meta(load_model_config(name)), shape_folder(name)
    cut = cut_of(model)
    assert cut is not None and folder is not None, f"{name} cannot be cut"
    short, like = cut
    ship_facts(folder, facts_of(short), like)
    return f"{name}: {len(set(like))} of {len(like)} layers, {(folder / SHIPPED).stat().st_size / 1000:.1f} kB"


if __name__ == "__main__":
    for name in sys.argv[1:] or shape_names():
        print(ship(name), flush=True)
