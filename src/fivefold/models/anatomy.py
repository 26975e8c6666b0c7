"""Where a Hugging Face model keeps its parts, and what each parameter is to a tensor parallel run.

The roles come from the model's own tensor parallel plan; a family file (`models/families/`) adds the few facts that
plans leave out. Nothing here knows a layout.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import nn
from transformers import PreTrainedModel

from fivefold.errors import UserError
from fivefold.models import surfaces
from fivefold.models.families import Family, family_of

RoleKind = Literal["vocab_embedding", "vocab_head", "column", "row", "row_bias", "norm", "local", "replicated"]


@dataclass(frozen=True)
class Role:
    """What one parameter is to tensor parallelism.

    | kind | weights | where |
    |---|---|---|
    | `vocab_embedding` | split over the vocabulary (dim 0) | the token embedding |
    | `vocab_head` | split over the vocabulary (dim 0) | the output head |
    | `column` | split over outputs (dim 0), biases too | reads the gathered residual stream |
    | `row` | split over inputs (dim 1) | its output is a partial sum |
    | `row_bias` | whole on every rank | added once, after the partial sums are reduced |
    | `norm` | whole on every rank | acts on the residual stream, split over the sequence under sequence parallel |
    | `local` | whole on every rank | acts on data that differs by rank (q_norm): gradients are summed over tp |
    | `replicated` | whole on every rank | no role is known; tensor parallel is refused |

    `heads` says that dim 0 is made of query heads or of key/value heads, which must not be cut inside a head.
    """

    kind: RoleKind
    heads: Literal["query", "kv"] | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model, as names from the root of the model; see `Role` for `roles`.

    `roles` lists every parameter once: tied parameters under the embedding's name only. `regions` are the modules
    whose input is gathered over the sequence, and whose output is scattered, under sequence parallel.
    """

    model_class: str
    family: str | None
    base: str
    embedding: str
    layers: tuple[str, ...]
    final_norm: str
    head: str
    tied: bool
    roles: Mapping[str, Role]
    regions: tuple[str, ...]
    tp_refusal: str | None
    sequence_parallel_refusal: str | None

    @staticmethod
    def of(model: PreTrainedModel) -> "Anatomy":
        """Describe `model`, which may be on the meta device. Raises `UserError` where a part cannot be found."""
        return _describe(model)


def _describe(model: PreTrainedModel) -> Anatomy:
    family = family_of(type(model).__name__)
    names = {id(module): name for name, module in model.named_modules()}
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is None or head is None:
        raise UserError(f"{type(model).__name__} has no token embedding or no output head; only causal LMs are trained")
    layers = _layers(model, names)
    roles = _roles(model, family, names[id(embedding)], names[id(head)])
    refusal = _tp_refusal(model, family, roles)
    return Anatomy(
        model_class=type(model).__name__,
        family=family.name if family else None,
        base=surfaces.base_prefix(model),
        embedding=names[id(embedding)],
        layers=layers,
        final_norm=_final_norm(model, layers, exclude={names[id(embedding)], names[id(head)]}),
        head=names[id(head)],
        tied=head.weight is embedding.weight,
        roles=roles,
        regions=_regions(roles),
        tp_refusal=refusal,
        sequence_parallel_refusal=refusal or (family.sequence_parallel_refusal if family else None),
    )


def _layers(model: PreTrainedModel, names: Mapping[int, str]) -> tuple[str, ...]:
    """The decoder blocks: the list in the base model that has one entry per hidden layer."""
    count = model.config.get_text_config().num_hidden_layers
    blocks = surfaces.block_classes(model)
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    stated = [m for m in lists if all(type(layer).__name__ in blocks for layer in m)] or lists
    if len(stated) != 1:
        raise UserError(
            f"{type(model).__name__}: found {len(stated)} lists of {count} layers, expected one",
            fix="the model's layers must stand in one ModuleList of num_hidden_layers entries",
        )
    return tuple(names[id(layer)] for layer in stated[0])


def _final_norm(model: PreTrainedModel, layers: tuple[str, ...], *, exclude: set[str]) -> str:
    """The module after the last block: the only other one beside the blocks that holds 1-D parameters."""
    parent = layers[0].rsplit(".", 2)[0]
    for name, module in model.get_submodule(parent).named_children():
        full = f"{parent}.{name}"
        parameters = list(module.parameters())
        if full not in exclude and parameters and all(p.ndim == 1 for p in parameters):
            return full
    raise UserError(f"{type(model).__name__}: no norm was found between the last layer and the head")


def _roles(model: PreTrainedModel, family: Family | None, embedding: str, head: str) -> dict[str, Role]:
    plan = [(_pattern(key), key, style) for key, style in surfaces.tensor_parallel_plan(model).items()]
    base = surfaces.base_prefix(model)
    norms = [_pattern(f"{base}.{key}") for key in (family.residual_norms if family else ())]

    def role(name: str) -> Role:
        module, _, leaf = name.rpartition(".")
        if module == embedding:
            return Role("vocab_embedding", None, "the token embedding")
        if module == head:
            return Role("vocab_head", None, "the output head")
        for pattern, key, style in plan:
            if pattern.fullmatch(module):
                return _planned(style, key, module.rpartition(".")[2], leaf, family)
        if any(pattern.fullmatch(module) for pattern in norms):
            return Role("norm", None, "a norm on the residual stream")
        return Role("replicated", None, "neither the model's plan nor a family file names it")

    return {name: role(name) for name, _ in model.named_parameters()}


def _planned(style: str, key: str, projection: str, leaf: str, family: Family | None) -> Role:
    """The role of a parameter whose module the model's plan lists."""
    kind = surfaces.PLAN_STYLES.get(style)
    reason = f"the model's plan: {key} is {style}"
    heads = _heads(projection, family)
    if kind == "column":
        return Role("column", heads, reason)
    if kind == "row":
        return Role("row_bias" if leaf == "bias" else "row", None, reason)
    if kind == "local":
        return Role("local", None, reason)
    return Role("replicated", None, f"{reason}, a style that is not known here")


def _heads(projection: str, family: Family | None) -> Literal["query", "kv"] | None:
    if family and projection in family.query:
        return "query"
    return "kv" if family and projection in family.key_value else None


def _regions(roles: Mapping[str, Role]) -> tuple[str, ...]:
    """The parents of column and row linears, in the order of the model."""
    split = (name for name, role in roles.items() if role.kind in ("column", "row"))
    return tuple(dict.fromkeys(name.rsplit(".", 2)[0] for name in split))


def _tp_refusal(model: PreTrainedModel, family: Family | None, roles: Mapping[str, Role]) -> str | None:
    name = type(model).__name__
    unknown = list(_shorten(param for param, role in roles.items() if role.kind == "replicated"))
    listing = f"; parameters without a role: {', '.join(unknown)}" if unknown else ""
    if family is None:
        return f"tensor parallel is not known for {name}: no file in fivefold/models/families lists it{listing}"
    return f"tensor parallel is refused for {name}{listing}" if unknown else None


def _shorten(names: Iterator[str]) -> dict[str, None]:
    """Names with layer indices as `*`, each once."""
    return dict.fromkeys(re.sub(r"\.\d+\.", ".*.", name) for name in names)


def _pattern(key: str) -> re.Pattern[str]:
    """A plan key such as `layers.*.mlp.up_proj`, where `*` is a layer index."""
    return re.compile(re.escape(key).replace(r"\*", r"\d+"))
