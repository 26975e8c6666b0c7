"""Everything known about a model before a layout is chosen: a frozen value without tensors, serialisable to JSON.

`discover.py` finds the facts, once per config. The plan of a layout (`parallel/plan.py`), FLOPs, the split of a
pipeline and `fivefold doctor` are computed from them alone. No torch here, and nothing here knows a layout.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, cached_property
from math import prod
from typing import Any, Literal

from pydantic import TypeAdapter

from fivefold.core.errors import UserError
from fivefold.models.anatomy import Anatomy, is_within


class Untrainable(UserError):
    """A model that no layout can train. The message begins with its class."""


# ---- groups of features ----------------------------------------------------------------------------------------------

Owner = Literal["query", "kv", "even"]


@dataclass(frozen=True)
class FeatureGroup:
    """Adjacent features [start, stop) of a projection with one owner. Features of `query` or `kv` go to the tp rank
    that has head `index`. Every rank gets an equal share of `even` features, in multiples of `unit` features."""

    start: int
    stop: int
    owner: Owner
    index: int = 0
    unit: int = 1


FeatureGroups = tuple[FeatureGroup, ...]

# ---- the role of every parameter -------------------------------------------------------------------------------------

RoleKind = Literal[
    "vocab_embedding",
    "vocab_head",
    "column",
    "row",
    "row_bias",
    "norm",
    "local",
    "latent",
    "across",
    "router",
    "experts",
    "idle",
    "replicated",
]


@dataclass(frozen=True)
class Role:
    """The role of one parameter in tensor parallelism.

    | kind | weights | where |
    |---|---|---|
    | `vocab_embedding` | split over the vocabulary | the token embedding |
    | `vocab_head` | split over the vocabulary | the output head |
    | `column` | split over outputs, biases too | reads the gathered residual stream |
    | `row` | split over inputs | its output is a partial sum |
    | `row_bias` | whole on every rank | added once, after the partial sums are reduced |
    | `norm` | whole on every rank | acts on the residual stream, split over the sequence under sequence parallel |
    | `local` | whole on every rank | acts on data that differs by rank (q_norm): gradients are summed over tp |
    | `latent` | whole on every rank | acts on all tokens, for heads that differ by rank: gradients are summed over tp |
    | `across` | whole on every rank | acts on all features of a split projection, after a gather |
    | `router` | whole on every rank | routes tokens; under sequence parallelism a rank has a part of them |
    | `experts` | distributed over the ranks of ep, expert by expert | acts on the tokens routed to it |
    | `idle` | whole on every rank | no token reaches it (a tower for images): it has no gradient |
    | `replicated` | whole on every rank | no role is known; tensor parallel is refused |

    `groups` assigns the split dimension `dim` to the ranks; None for a vocabulary, which is split evenly.
    """

    kind: RoleKind
    reason: str
    dim: int | None = None
    groups: FeatureGroups | None = None


@dataclass(frozen=True)
class TPInput:
    """The entry of hidden states into a column/row pair: `modules` that read the same tensor (such as `q_proj`,
    `k_proj` and `v_proj`), and the `argument` that carries it."""

    modules: tuple[str, ...]
    argument: int | str = 0


@dataclass(frozen=True)
class TPBlock:
    """One column/row pair: the `columns` are split over outputs, the `row` over inputs, and the row's outputs are
    summed over tp. `owner`: the smallest module that holds all of them and the latent projections before them. `heads`:
    query and key/value heads of an attention, else None. `is_last`: nothing with weights runs after the row in its
    layer. `shared`: columns that read the same tensor, in the order in which they are called. Example: `q_proj`,
    `k_proj`, `v_proj`, which share their input, and the row `o_proj` under the owner `self_attn`."""

    owner: str
    columns: tuple[str, ...]
    row: str
    entries: tuple[TPInput, ...]
    heads: tuple[int, int] | None
    is_last: bool
    shared: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Partition:
    """The role of every parameter (tied ones under the embedding's name), and the column/row pairs in order.

    `tp_blocks`: the column/row pairs. `heads`: query and key/value heads of each kind of layer (MiMo-V2 has several).
    `across`: module that needs all features of a split projection -> how ranks share these features. `to_logits`: the
    module that reads the last hidden states: the head, or a transform before it (BERT). `refusal`: why tp cannot split
    the model, or None.
    """

    roles: Mapping[str, Role]
    tp_blocks: tuple[TPBlock, ...]
    heads: tuple[tuple[int, int], ...]
    across: Mapping[str, FeatureGroups]
    refusal: str | None
    sequence_parallel_refusal: str | None
    is_proved: bool
    to_logits: str = ""

    @cached_property
    def entries(self) -> tuple[TPInput, ...]:
        return tuple(entry for tp_block in self.tp_blocks for entry in tp_block.entries)

    def of_layers(self, layers: Sequence[str]) -> "Partition":
        """The part of these layers; roles stay whole."""
        return replace(
            self,
            tp_blocks=tuple(tp_block for tp_block in self.tp_blocks if is_within(tp_block.row, layers)),
            across={name: groups for name, groups in self.across.items() if is_within(name, layers)},
        )


# ---- experts ---------------------------------------------------------------------------------------------------------

Block = tuple[int, int]
Order = Callable[[Block, int], tuple[Block, ...]]  # features [start, stop) of I -> their inputs

# How an activation reads its inputs: name -> (inputs per feature, the inputs of features [start, stop) of I).
ORDERS: Mapping[str, tuple[int, Order]] = {
    "one by one": (1, lambda block, _: (block,)),
    "gate, then up": (2, lambda block, size: (block, (size + block[0], size + block[1]))),
    "gate beside up": (2, lambda block, _: ((2 * block[0], 2 * block[1]),)),
}


@dataclass(frozen=True)
class ExpertFeatures:
    """Positions of the inner features of a layer's experts in their parameters.

    `first`: the parameter whose output the activation reads. `made`, `read`: the output and input dimensions of a
    matrix. `order`: one of `ORDERS`. `refusal`: why the features cannot be split, or None.
    """

    first: str
    made: int
    read: int
    order: str
    refusal: str | None = None


@dataclass(frozen=True)
class Experts:
    """A module with the weights of a layer's experts, and its router. `top_k`: experts per token. `is_last`: nothing
    with weights runs after it in its layer. `has_logits`: the router returns logits, weights and picks."""

    name: str
    router: str
    experts: int
    top_k: int
    is_last: bool
    has_logits: bool = False
    features: ExpertFeatures | None = None


# ---- the cost of a layer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Matmul:
    """A matrix that a token is multiplied with. `times`: matrices of this shape per token, 1 except for experts (8 for
    a token that goes to 8 of 128)."""

    name: str
    inputs: int
    outputs: int
    times: int = 1

    @property
    def weights(self) -> int:
        """Weights that a token is multiplied with."""
        return self.inputs * self.outputs * self.times


@dataclass(frozen=True)
class AttentionShape:
    """One attention module: heads of queries, heads of keys and values, features of a key and of a value. `window`,
    `chunk`: what a query sees of its document (`attention.Mask`)."""

    query: int
    kv: int
    key_size: int
    value_size: int
    window: int | None = None
    chunk: int | None = None

    @property
    def size(self) -> int:
        """Features of the widest head."""
        return max(self.key_size, self.value_size)


@dataclass(frozen=True)
class Saved:
    """Saved activations: numbers that one token leaves in a layer for backward, without recompute.

    `residual`: numbers of the residual stream; sequence parallelism splits them. `entered`: inputs of column-parallel
    linears; every tp rank has all of them. `inside`: numbers between a column and a row; tensor parallelism splits
    them. `rows`, `features`: of experts, numbers as wide as the hidden states, and those between their matrices. Tensor
    parallelism splits tokens for them; with `expert_tp` it splits features, and every rank has all tokens' rows.
    """

    residual: float = 0.0
    entered: float = 0.0
    inside: float = 0.0
    rows: float = 0.0
    features: float = 0.0

    def on_rank(self, tp: int, *, sequence_parallel: bool, expert_tp: bool = False) -> float:
        """The saved numbers on each of `tp` ranks."""
        dense = self.residual / (tp if sequence_parallel else 1) + self.entered + self.inside / tp
        return dense + self.rows / (1 if expert_tp else tp) + self.features / tp


@dataclass(frozen=True)
class LayerCost:
    """The cost of a layer. FLOPs, `pp_split: auto`, slot durations and saved activations are all computed from it.

    `saved`: in one type. `mixed`: in bf16 with norms in fp32; a number in fp32 counts twice. `fused`: like `mixed`, for
    a compiled layer (`record.BlockTrace.fused`).
    """

    matmuls: tuple[Matmul, ...]
    attention: tuple[AttentionShape, ...]
    saved: Saved
    mixed: Saved
    fused: Saved

    def kept(self, compute_bytes: int, *, compiled: bool) -> Saved:
        """The saved activations of one token, in numbers of `compute_bytes` each."""
        return self.fused if compiled else self.mixed if compute_bytes == 2 else self.saved

    @property
    def active(self) -> int:
        """Weights that a token is multiplied with; for experts, those of its own picks."""
        return sum(matmul.weights for matmul in self.matmuls)


# ---- all facts of a model --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockFormat:
    """Format of a weight at rest: `block` numbers of a row are `size` bytes, which stay together."""

    block: int
    size: int

    def row_bytes(self, numbers: int) -> int:
        return numbers // self.block * self.size


@dataclass(frozen=True)
class Parameter:
    """Shape of a parameter, trained or frozen. `packing`: the format of a frozen one, if it is not that of numbers."""

    shape: tuple[int, ...]
    is_trained: bool = True
    packing: BlockFormat | None = None

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class Counted:
    """Module `name` counts the tokens of a row, across documents (Llama 4); harmless up to `most` tokens."""

    name: str
    most: int


DropoutKind = Literal["module", "call", "noise", "embedding", "branch", "attention"]


@dataclass(frozen=True)
class DropoutSite:
    """A place that drops elements in training, each with probability `p`, or draws noise.

    `kind`: the `module` is an `nn.Dropout`; its forward makes the `number`-th `call` of `F.dropout`; it is a linear
    with a `branch`, whose input is dropped; or it is an `attention`, whose probabilities are dropped. Or its forward
    makes the `number`-th call of `Tensor.uniform_` on hidden states: `noise` of the width 2 `p`. Or it is an
    `embedding`, to whose output NEFTune's noise with the alpha `p` is added. `features`: of the tensor that is dropped,
    over all tp ranks; for attention its query heads. `caller`: of a `module` that is called several times in a pass,
    the one whose forward does so; `number` counts the calls.
    """

    module: str
    kind: DropoutKind
    p: float
    features: int
    number: int = 0
    caller: str = ""

    @property
    def name(self) -> str:
        """Its name, which no other site of the model has, whatever the layout."""
        return f"{self.module}/{self.kind}{self.number}"


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Everything that a layout is planned from.

    `parameters`: tied ones once, in the model's order.
    `attends`: attention module -> its heads.
    `before`, `after`: modules with parameters that run before the first layer and after the last.
    `forgetful`: (layer, attention module) of layers that do not pass `cu_seqlens` on.
    `looked_into`: embeddings whose weights the model reads directly, not through the module.
    `in_tuples`: layers that return their hidden states in a tuple.
    `carried`: why layers pass more than hidden states to each other, or None. Pipelines are then refused.
    `padding`: the padding token of a model that counts positions from it (`forwards.py`), else None.
    `router_buffers`: buffers that are trained without a gradient -> shape.
    `costs`, `kinds`: the cost of each kind of layer; the kind of each layer, as an index into `costs`.
    `outside`: linears outside of the layers, the head included.
    `dropouts`: the sites that drop something in training, in order.
    """

    anatomy: Anatomy
    hidden_size: int
    parameters: Mapping[str, Parameter]
    partition: Partition
    experts: tuple[Experts, ...] = ()
    attends: Mapping[str, AttentionShape] = field(default_factory=dict)
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    forgetful: tuple[tuple[str, str], ...] = ()
    looked_into: tuple[str, ...] = ()
    in_tuples: tuple[str, ...] = ()
    carried: str | None = None
    counted: Counted | None = None
    padding: int | None = None
    router_buffers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    costs: tuple[LayerCost, ...] = ()
    kinds: tuple[int, ...] = ()
    outside: tuple[Matmul, ...] = ()
    dropouts: tuple[DropoutSite, ...] = ()

    @property
    def model_class(self) -> str:
        return self.anatomy.model_class

    @property
    def size(self) -> int:
        """Number of parameters."""
        return sum(parameter.size for parameter in self.parameters.values())

    @cached_property
    def has_adapter(self) -> bool:
        """True if adapters are trained beside a frozen model. (A user may freeze parameters without one.)"""
        return any(".lora_A." in name for name in self.parameters)

    @cached_property
    def branches(self) -> Mapping[str, tuple[str, ...]]:
        """Frozen linear -> the weights of its branch: trained linears inside of it, added to its output."""
        found = dict[str, tuple[str, ...]]()
        for name, parameter in self.parameters.items() if self.has_adapter else ():
            linear = name.rsplit(".", 2)[0]
            weight = self.parameters.get(f"{linear}.weight")
            if parameter.is_trained and weight and not weight.is_trained:
                found[linear] = (*found.get(linear, ()), name)
        return found

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding: all valid token ids. (Mllama's head makes logits of 8 less.)"""
        return self.parameters[self.anatomy.embedding_weight].shape[0]

    @property
    def layer_costs(self) -> tuple[LayerCost, ...]:
        return tuple(self.costs[kind] for kind in self.kinds)

    @property
    def head_cost(self) -> int:
        """Weights of the head that a token is multiplied with, tied or not."""
        return sum(matmul.weights for matmul in self.outside if matmul.name == self.anatomy.head)

    def only(self, layers: Sequence[str]) -> "ModelFacts":
        """The facts of the same model without its other layers.

        Example: among 80 equal layers the first stands for all, and queries on it are 80 times faster.
        """
        dropped = frozenset(self.anatomy.layers) - set(layers)

        def names_dropped(value: Any) -> bool:
            if isinstance(value, str):
                parts = value.split(".")
                return any(".".join(parts[:size]) in dropped for size in range(1, len(parts) + 1))
            if isinstance(value, tuple):
                return any(map(names_dropped, value))
            if is_dataclass(value) and not isinstance(value, type):
                return any(names_dropped(getattr(value, attribute.name)) for attribute in fields(value))
            return False

        def kept(value: Any) -> Any:
            if isinstance(value, Mapping):
                return {name: item for name, item in value.items() if not names_dropped(name)}
            if isinstance(value, tuple):
                return tuple(item for item in value if not names_dropped(item))
            if isinstance(value, Anatomy | Partition):
                return replace(
                    value, **{attribute.name: kept(getattr(value, attribute.name)) for attribute in fields(value)}
                )
            return value

        of_layers = (attribute.name for attribute in fields(self) if attribute.name not in ("costs", "kinds"))
        named = {name: kept(getattr(self, name)) for name in of_layers}
        own = [number for number, layer in enumerate(self.anatomy.layers) if layer not in dropped]
        return replace(self, **named, kinds=tuple(self.kinds[number] for number in own))

    def with_layers(self, layers: Sequence[str], like: Sequence[int]) -> "ModelFacts":
        """The facts of the same model with these layers; `like` maps each to the own layer that it copies.

        For a model with a dense layer and one with experts, [0, 0, 0, 1, 1] gives three dense layers and two with
        experts. Raises `ValueError` if something stands between the layers, or belongs to several.
        """
        if self.counted:
            raise ValueError("what counts the tokens of a row is not repeated with its layer")
        deeper: ModelFacts = _Deeper(self.anatomy.layers, layers, like).of(self)
        return replace(deeper, kinds=tuple(self.kinds[own] for own in like))

    def to_json(self) -> dict[str, Any]:
        """The facts as JSON values. Each of the few distinct roles is stored once, with its parameters."""
        of_role: dict[Role, list[str]] = {}
        for name, role in self.partition.roles.items():
            of_role.setdefault(role, []).append(name)
        facts, roles = _json_types()
        without_roles = replace(self, partition=replace(self.partition, roles={}))
        return {
            "facts": facts.dump_python(without_roles, mode="json"),
            "roles": [
                [{**role, "groups": role["groups"] and _runs(role["groups"])}, names]
                for role, names in roles.dump_python([*of_role.items()], mode="json")
            ],
        }

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> "ModelFacts":
        """Rebuild facts from the result of `to_json`. Raises `ValueError` or `LookupError` for anything else."""
        facts, roles = _json_types()
        found = facts.validate_python(value["facts"])
        written = [
            ({**role, "groups": role["groups"] and _groups(role["groups"])}, own) for role, own in value["roles"]
        ]
        of_role = {name: role for role, names in roles.validate_python(written) for name in names}
        ordered = {name: of_role[name] for name in found.parameters if name in of_role}
        return replace(found, partition=replace(found.partition, roles=ordered))


@cache
def _json_types() -> tuple[TypeAdapter[ModelFacts], TypeAdapter[list[tuple[Role, list[str]]]]]:
    """Converters to and from JSON values: of facts, and of each role with the parameters that have it."""
    return TypeAdapter(ModelFacts), TypeAdapter(list[tuple[Role, list[str]]])


def _runs(groups: list[dict[str, Any]]) -> list[list[Any]]:
    """Run-length encode groups with the same owner, size and unit that follow each other head by head: 64 query heads
    of 128 features are [0, 128, "query", 0, 1, 64]."""
    runs: list[list[Any]] = []
    for group in groups:
        start, stop, owner, index, unit = (group[key] for key in ("start", "stop", "owner", "index", "unit"))
        if runs and _next_of(runs[-1]) == [start, stop, owner, index, unit]:
            runs[-1][-1] += 1
        else:
            runs.append([start, stop, owner, index, unit, 1])
    return runs


def _next_of(run: list[Any]) -> list[Any]:
    """The group that would extend a run by one."""
    start, stop, owner, index, unit, count = run
    return [start + count * (stop - start), stop + count * (stop - start), owner, index + count, unit]


def _groups(runs: list[list[Any]]) -> list[dict[str, Any]]:
    """Undo `_runs`."""
    keys = ("start", "stop", "owner", "index", "unit")
    return [dict(zip(keys, _next_of([*run[:-1], at]), strict=True)) for run in runs for at in range(run[-1])]


class _Deeper:
    """Facts with other `layers`, each copied from the `own` layer that `like` names."""

    def __init__(self, own: Sequence[str], layers: Sequence[str], like: Sequence[int]) -> None:
        self.own, self.layers, self.like = own, layers, like
        # (id, layer) -> a value that does not name the layer; held so that no other value gets the same id.
        self.untouched: dict[tuple[int, str], Any] = {}

    def of(self, value: Any) -> Any:
        """A value of the model in which the parts of its layers are repeated for each of the new ones, in order."""
        if isinstance(value, Mapping):
            return dict(self._repeated(tuple(value.items())))
        if isinstance(value, tuple):
            return self._repeated(value)
        if is_dataclass(value) and not isinstance(value, type):
            return replace(
                value, **{attribute.name: self.of(getattr(value, attribute.name)) for attribute in fields(value)}
            )
        return value

    def _repeated(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        of_layer: dict[int, list[Any]] = {at: [] for at in range(len(self.own))}
        places = []
        for place, value in enumerate(values):
            for at in self._owners(value):
                of_layer[at].append(value)
                places.append(place)
        if not places:
            return values
        first, stop = places[0], places[-1] + 1
        if places != [*range(first, stop)]:
            raise ValueError("not everything between the first layer and the last one belongs to one layer")
        named = zip(self.layers, self.like, strict=True)
        repeated = (self._moved(value, self.own[at], layer) for layer, at in named for value in of_layer[at])
        return (*values[:first], *repeated, *values[stop:])

    def _owners(self, value: Any) -> list[int]:
        return [at for at, layer in enumerate(self.own) if self._moved(value, layer, "?") is not value]

    def _moved(self, value: Any, old: str, new: str) -> Any:
        """A value of layer `old` renamed to layer `new`; the same object if it does not name the layer."""
        if isinstance(value, str):
            return new + value.removeprefix(old) if value == old or is_within(value, [old]) else value
        if (id(value), old) in self.untouched:
            return value
        moved = value
        if isinstance(value, tuple):
            parts = tuple(self._moved(item, old, new) for item in value)
            moved = parts if any(a is not b for a, b in zip(parts, value, strict=True)) else value
        elif is_dataclass(value) and not isinstance(value, type):
            changed = {
                attribute.name: self._moved(getattr(value, attribute.name), old, new) for attribute in fields(value)
            }
            is_same = all(changed[attribute.name] is getattr(value, attribute.name) for attribute in fields(value))
            moved = value if is_same else replace(value, **changed)
        if moved is value:
            self.untouched[id(value), old] = value
        return moved
