"""A proof case as a line of three words, and the model that its last word names.

`step LAYOUT MODEL`: all that `fivefold verify` compares of that layout and model. `load LAYOUT MODEL`: what a
checkpoint that `tp2` saved becomes in it. `run LAYOUT MODEL`: a run that goes on from its checkpoint under its standing
checks.
"""

from dataclasses import dataclass, replace
from typing import Any

from fivefold.parallel.layout import Layout
from tests.verification.faults.fault import Kind, Model

LAYERS = "num_hidden_layers"
KINDS = ["sliding_attention", "full_attention"] * 2
OF_FOUR_LAYERS = {family: (("layer_types", KINDS),) for family in ("gemma3", "gpt_oss")}
IN_FOUR_BITS = (("hidden_size", 128), ("head_dim", 32), ("intermediate_size", 256))  # blocks of 64 numbers
PUBLISHED = (("resid_pdrop", 0.1), ("embd_pdrop", 0.1), ("attn_pdrop", 0.1))  # of GPT-2
MARKS: dict[str, dict[str, Any]] = {
    "kv1": {"kv_heads": 1}, "kv4": {"kv_heads": 4}, "tied": {"tied": True}, "muon": {"optimizer": "muon"},
    "class": {"optimizer": "python"},
    "capacity": {"capacity": 0.9}, "dpo": {"objective": "dpo"}, "kto": {"objective": "kto"},
    "distill": {"objective": "distill"}, "python": {"objective": "python"}, "lora": {"adapter": True},
    "drops": {"dropout": 0.05}, "pdrop": {"changes": PUBLISHED}, "experts": {"of_experts": True},
    "nf4": {"quantize": "nf4", "changes": IN_FOUR_BITS}, "inner56": {"changes": (("intermediate_size", 56),)},
    "unchunked": {"is_chunked": False}, "neftune": {"neftune": 5.0},
    "balanced": {"balanced": True},
}  # fmt: skip


@dataclass(frozen=True)
class ProvedCase:
    """A layout (a text) of a model; `kind` as of a fault."""

    kind: Kind
    layout: str
    model: Model

    def __str__(self) -> str:
        return f"{self.kind} {self.layout} {name_of(self.model)}"

    @property
    def ranks(self) -> int:
        return Layout.parse(self.layout).world

    @staticmethod
    def parse(line: str) -> "ProvedCase":
        kind, layout, model = line.split()
        return ProvedCase(kind, layout, model_of(model))  # type: ignore[arg-type]


def name_of(model: Model) -> str:
    """Its family, its layers where they are not two, and its marks: `gpt_oss/3`, `llama-lora-nf4`, `olmo2-kv4`."""
    changes = dict(model.changes)
    marks = {
        "kv1": model.kv_heads == 1, "kv4": model.kv_heads == 4, "tied": model.tied, "muon": model.optimizer == "muon",
        "class": model.optimizer == "python",
        "capacity": model.capacity is not None, model.objective: model.objective != "sft", "lora": model.adapter,
        "drops": model.dropout > 0, "pdrop": "attn_pdrop" in changes, "experts": model.of_experts,
        "nf4": model.quantize == "nf4", "inner56": changes.get("intermediate_size") == 56,
        "unchunked": not model.is_chunked, "neftune": model.neftune is not None,
        "balanced": model.balanced,
    }  # fmt: skip
    family = f"{model.family}/{changes[LAYERS]}" if LAYERS in changes else model.family
    return "-".join([family, *(mark for mark, is_on in marks.items() if is_on)])


def model_of(name: str) -> Model:
    """The model of a name. Raises `KeyError` for a mark that is not one."""
    family, *marks = name.split("-")
    family, _, layers = family.partition("/")
    changes = OF_FOUR_LAYERS.get(family, ()) if layers == "4" else ()
    model = Model(family, changes=((LAYERS, int(layers)), *changes) if layers else ())
    for mark in marks:
        model = replace(model, **MARKS[mark])
    return model
