"""The keys of another trainer: their defaults, and the treatment of each. They are data, in `schemas/`."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

_FOLDER = Path(__file__).with_name("schemas")
NO_COUNTERPART, REFUSED, RULES = "no_counterpart", "refused", "rules"


@dataclass(frozen=True)
class Schema:
    """The keys of one trainer of another project.

    `names`: key -> its name in the rules. `defaults`: by the name in the rules. `becomes`: key -> (its treatment, why).
    `only`: keys of other trainers of the project that this one rejects.
    """

    version: str
    names: Mapping[str, str]
    defaults: Mapping[str, Any]
    becomes: Mapping[str, tuple[str, str]]
    only: frozenset[str] = frozenset()

    def name(self, key: str) -> str:
        """The name of `key` in the rules."""
        return self.names.get(key, key)


@cache
def schema(source: str, trainer: str = "") -> Schema:
    """The schema of a file in `schemas/`; `trainer`: one of the trainers that it describes."""
    tree = yaml.safe_load((_FOLDER / f"{source}.yaml").read_text(encoding="utf-8"))
    base = schema(tree["extends"]) if "extends" in tree else Schema("", {}, {}, {})
    names, defaults, becomes = dict(base.names) | tree["names"], dict(base.defaults), dict(base.becomes)
    groups = [(RULES, {"why": "", "keys": tree["rules"]})]
    groups += [(kind, group) for kind in (NO_COUNTERPART, REFUSED) for group in tree[kind]]
    for kind, group in groups:
        becomes |= {key: (kind, group["why"]) for key in group["keys"]}
        for key, default in group["keys"].items():
            if key not in names or default is not None:
                defaults[names.get(key, key)] = default
    trainers = tree.get("trainers", {})
    own = trainers.get(trainer, {"keys": (), "defaults": {}})
    others = {key for trainer in trainers.values() for key in trainer["keys"]}
    return Schema(tree["version"], names, defaults | own["defaults"], becomes, frozenset(others - set(own["keys"])))
