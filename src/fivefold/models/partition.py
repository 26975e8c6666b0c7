"""How tensor parallelism splits a model: the role of every parameter, derived from the data flow.

`trace` finds the projections that read the residual stream, those that write back to it, and the features of each
attention head. Megatron's column/row pairs (arXiv:1909.08053) follow: columns are split over outputs, rows over inputs,
and the features between them go to the ranks by heads or one by one. If the model ships a tensor parallel plan, it is
compared with the result. Nothing here knows a layout.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from torch import Tensor
from transformers import PreTrainedModel

from fivefold.core.text import any_layer
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.facts import FeatureGroup, FeatureGroups, Owner, Partition, Role, RoleKind, TPBlock, TPInput
from fivefold.models.record import RESIDUAL, BlockTrace, ModuleCall, Trace, Untraceable, depends, gradients

NEARBY = 64  # features tried until one depends on a column at all


@dataclass(frozen=True)
class Pair:
    """A row, and the columns that feed it. Some stand `behind` latents: projections that read the residual for all
    heads at once (DeepSeek-V2, arXiv:2405.04434)."""

    row: str
    columns: tuple[str, ...]
    latents: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()

    @property
    def entered(self) -> list[str]:
        """The linears that read the residual."""
        return [name for name in (*self.latents, *self.columns) if name not in self.behind]


def pairs_of(block: BlockTrace) -> list[Pair]:
    """The pairs in order. A linear that reads the residual stream and feeds no row is in no pair: a gate that scales
    the stream, or a router. Raises `Untraceable` for a projection that is no column, row or latent either."""
    columns: list[str] = []
    behind: dict[str, frozenset[str]] = {}
    rows: dict[str, frozenset[str]] = {}
    called = {f"{event.name} (attention)": event.sources for event in block.events if event.kind == "attention"}
    attended = frozenset().union(*called.values())
    experts = {event.name for event in block.events if event.kind == "experts"}
    routers = {name for event in block.events if event.kind == "experts" for name in event.sources}
    for event in block.events:
        if event.kind == "opaque":
            raise Untraceable(f"{event.name} holds weights that are no linear's")
        if event.kind != "linear" or (event.name in routers and not _is_hidden(event, block)):
            continue
        direct = frozenset().union(*(called.get(name, {name}) for name in event.sources))
        on_residual = {name for name in direct if name == RESIDUAL or name in rows or name in experts}
        if on_residual and on_residual == direct:
            columns.append(event.name)
        elif event.name in attended and event.sources and event.sources <= set(columns):
            behind[event.name] = event.sources
        elif direct and direct <= {*columns, *behind} and event.leaf is not None and _is_hidden(event, block):
            rows[event.name] = direct.union(*(behind[name] for name in direct if name in behind))
        else:
            raise Untraceable(f"{event.name} reads {', '.join(sorted(direct)) or 'nothing'}: neither column nor row")
    used = [name for names in rows.values() for name in names]
    odd = sorted(set(behind) - set(used)) or sorted({name for name in used if used.count(name) > 1})
    if odd:
        raise Untraceable(f"{', '.join(odd)} feed no projection back to the residual stream, or several")
    if not rows:
        raise Untraceable(f"{block.layer} has no projections")
    latents = frozenset().union(*behind.values())
    return [
        Pair(
            row,
            tuple(name for name in (*columns, *behind) if name in names - latents),
            tuple(name for name in columns if name in names & latents),
            tuple(name for name in behind if name in names),
        )
        for row, names in rows.items()
    ]


def _is_hidden(event: ModuleCall, block: BlockTrace) -> bool:
    return event.leaf is not None and event.leaf.shape[-1] == block.leaves[RESIDUAL].shape[-1]


# ---- groups of features ----------------------------------------------------------------------------------------------


def by_heads(block: BlockTrace, row: str, columns: Sequence[str], called: ModuleCall) -> dict[str, FeatureGroups]:
    """Feature groups of an attention: every feature belongs to a query head or to a key/value head."""
    query, key, value = called.inputs
    leaves = [block.leaves[name] for name in columns]
    owners: list[list[set[tuple[Owner, int]]]] = [[set() for _ in range(leaf.shape[-1])] for leaf in leaves]

    def note(tensor: Tensor, owner: tuple[Owner, int]) -> None:
        for mine, mask in zip(owners, depends(tensor, leaves), strict=True):
            for feature in [] if mask is None else mask.nonzero().flatten().tolist():
                mine[feature].add(owner)

    for head in range(query.shape[1]):
        note(query[:, head], ("query", head))
    for head in range(key.shape[1]):
        note(key[:, head], ("kv", head))
        note(value[:, head], ("kv", head))
    reads, attended = block.linear(row).inputs[0], block.leaves[f"{called.name} (attention)"]
    size = attended.shape[-1]
    if reads.shape[-1] != query.shape[1] * size:
        raise Untraceable(f"{row} reads {reads.shape[-1]} features of {query.shape[1]} heads of {size}")
    for head in range(query.shape[1]):
        part = reads[..., head * size : (head + 1) * size]
        if not _only_head(part, attended, head):
            raise Untraceable(f"{row} does not read the heads of attention one after the other")
        note(part, ("query", head))  # a gate on the output, if there is one
    groups_of = {row: tuple(FeatureGroup(h * size, (h + 1) * size, "query", h) for h in range(query.shape[1]))}
    return groups_of | {name: _runs(name, mine) for name, mine in zip(columns, owners, strict=True)}


def _only_head(part: Tensor, attended: Tensor, head: int) -> bool:
    (grad,) = gradients(part, [attended])
    return grad is not None and (grad != 0).any(-1).flatten(0, 1).any(0).nonzero().flatten().tolist() == [head]


def _runs(name: str, owners: Sequence[set[tuple[Owner, int]]]) -> FeatureGroups:
    """Merge adjacent features of one owner into one group."""
    parts: list[FeatureGroup] = []
    for feature, mine in enumerate(owners):
        if len(mine) != 1:
            raise Untraceable(f"feature {feature} of {name} belongs to {len(mine)} heads")
        owner, index = next(iter(mine))
        if parts and (parts[-1].owner, parts[-1].index) == (owner, index):
            parts[-1] = FeatureGroup(parts[-1].start, feature + 1, owner, index)
        else:
            parts.append(FeatureGroup(feature, feature + 1, owner, index))
    return tuple(parts)


def by_features(block: BlockTrace, row: str, columns: Sequence[str]) -> dict[str, FeatureGroups]:
    """Feature groups of an MLP, whose features are element-wise. Three features are sampled.

    Feature j of the row's n inputs comes from feature j of a column. If the column makes gate and up at once (2n
    features), it comes from j and n + j (chunked: Phi-3), or from 2j and 2j + 1 (neighbours).
    """
    reads = block.linear(row).inputs[0]
    width = reads.shape[-1]
    groups_of: dict[str, FeatureGroups] = {row: (FeatureGroup(0, width, "even"),)}
    for name in columns:
        leaf = block.leaves[name]
        times, rest = divmod(leaf.shape[-1], width)
        if rest or not times:
            raise Untraceable(f"{row} reads {width} features, and {name} makes {leaf.shape[-1]}")
        seen = [_first_alive(reads, leaf, j) for j in dict.fromkeys((0, width // 2, width - 1))]
        looked_at, found = [j for j, _ in seen], [features for _, features in seen]
        is_chunked = found == [[j + k * width for k in range(times)] for j in looked_at]
        if not is_chunked and found != [[j * times + k for k in range(times)] for j in looked_at]:
            raise Untraceable(f"the features of {row} do not follow from those of {name} one by one")
        chunks = tuple(FeatureGroup(k * width, (k + 1) * width, "even", k) for k in range(times))
        groups_of[name] = chunks if is_chunked else (FeatureGroup(0, times * width, "even", unit=times),)
    return groups_of


def _first_alive(reads: Tensor, leaf: Tensor, near: int) -> tuple[int, list[int]]:
    """(feature of `reads` nearest to `near` that depends on `leaf`, the features of `leaf` that it depends on). The
    nearest is not always `near`: after a ReLU many features are zero for every token of the trace."""
    width = reads.shape[-1]
    for j in sorted(range(max(0, near - NEARBY), min(width, near + NEARBY)), key=lambda j: abs(j - near)):
        (mask,) = depends(reads[..., j], [leaf])
        if mask is not None:
            return j, mask.nonzero().flatten().tolist()
    return near, []


# ---- roles -----------------------------------------------------------------------------------------------------------


# Classes of `transformers` whose derived partition the tests compare with the unmodified model. Other classes are
# partitioned in the same way, and `parallel/probe.py` compares a small copy with the unmodified model before tensor
# parallelism starts. A class belongs here once `tests/families.py` has a small config of it.
PROVED = frozenset(
    {
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    }
)


def derive(model: PreTrainedModel, anatomy: Anatomy, traced: Trace) -> Partition:
    """The partition of `model`, which may be on the meta device and stays unchanged, from its trace."""
    name = type(model).__name__
    try:
        return _Derivation(model, anatomy, traced).partition()
    except Untraceable as error:
        refusal = f"{name}: {error}"
        return Partition(
            roles={}, tp_blocks=(), heads=(), across={}, refusal=refusal,
            sequence_parallel_refusal=refusal, is_proved=False,
        )  # fmt: skip


@dataclass
class _Derivation:
    model: PreTrainedModel
    anatomy: Anatomy
    traced: Trace
    tp_blocks: list[TPBlock] = field(default_factory=list)
    across: dict[str, FeatureGroups] = field(default_factory=dict)
    heads: dict[tuple[int, int], None] = field(default_factory=dict)

    def partition(self) -> Partition:
        if self.traced.streams:
            raise Untraceable(self.traced.streams)
        if self.anatomy.embedding in self.traced.looked_into:
            raise Untraceable(f"it reads the weights of {self.anatomy.embedding} directly, of which a rank has a part")
        roles = self._outside()
        known: dict[object, dict[str, FeatureGroups]] = {}
        for block in self.traced.blocks:
            roles |= self._block(block, known)
        plan = hf_internals.tensor_parallel_plan(self.model)
        contradicted = {}
        for name, _ in self.model.named_parameters():
            role = roles.get(name) or self._unknown(name)
            roles[name], contradiction = _compared(name, role, plan)
            if contradiction:
                contradicted[name] = contradiction
        unknown = [name for name, role in roles.items() if role.kind == "replicated"]
        refusal = None
        if unknown:
            refusal = f"{self._name} has parameters without a role: {_listing(unknown)}"
        elif contradicted:
            refusal = f"{self._name}: {next(iter(contradicted.values()))}"
        position = [name for name in self.traced.before if name != self.anatomy.embedding]
        alone = f"{_listing(position)} of {self._name} adds to the embeddings of all tokens" if position else None
        return Partition(
            roles={name: roles[name] for name, _ in self.model.named_parameters()},
            tp_blocks=tuple(self.tp_blocks), heads=tuple(self.heads), across=self.across,
            refusal=refusal, sequence_parallel_refusal=refusal or alone,
            is_proved=self._name in PROVED, to_logits=(*self.traced.to_logits, self.anatomy.head)[0],
        )  # fmt: skip

    @property
    def _name(self) -> str:
        return type(self.model).__name__

    def _outside(self) -> dict[str, Role]:
        """Roles of the embeddings, the head, and norms before or after the blocks."""
        roles: dict[str, Role] = {}
        for module, kind, reason in (
            (self.anatomy.head, "vocab_head", "the output head"),
            (self.anatomy.embedding, "vocab_embedding", "the token embedding"),
        ):
            roles |= self._roles_of(module, Role(kind, reason, 0))  # type: ignore[arg-type]
        for name in (*self.traced.before, *self.traced.after):
            if name not in (self.anatomy.embedding, self.anatomy.head):
                roles |= self._roles_of(name, Role("norm", "acts on the residual, outside the blocks"))
        for name in self.traced.to_logits:
            if name != self.anatomy.head:
                roles |= self._roles_of(name, Role("latent", "changes the last hidden states, for all tokens"))
        return roles

    def _unknown(self, name: str) -> Role:
        """The role of a parameter that no event mentions."""
        module = name.rpartition(".")[0]
        if is_within(name, [self.anatomy.base]) and module not in self.traced.entered:
            return Role("idle", "no token comes to it")
        return Role("replicated", "nothing in its forward says what it does")

    @cached_property
    def _names(self) -> dict[int, str]:
        return {id(parameter): name for name, parameter in self.model.named_parameters()}

    def _roles_of(self, module: str, role: Role) -> dict[str, Role]:
        """`role` for each parameter of a module itself, under the first of its names."""
        own = self.model.get_submodule(module).named_parameters(recurse=False)
        return {self._names[id(parameter)]: role for _, parameter in own}

    def _untrained(self, module: str) -> dict[str, Role]:
        """Roles of the untrained parameters next to experts: a bias on the choice of experts."""
        own = self.model.get_submodule(module).named_parameters(recurse=False)
        role = Role("router", "is not trained, and says where tokens go")
        return {f"{module}.{leaf}": role for leaf, parameter in own if not parameter.requires_grad}

    # ---- one block ---------------------------------------------------------------------------------------------------

    def _block(self, block: BlockTrace, known: dict[object, dict[str, FeatureGroups]]) -> dict[str, Role]:
        pairs, roles = pairs_of(block), {}
        attention = [event for event in block.events if event.kind == "attention"]
        rows = {pair.row for pair in pairs}
        experts = {event.name for event in block.events if event.kind == "experts"}
        for pair in pairs:
            row, columns = pair.row, pair.columns
            called = next((e for e in attention if f"{e.name} (attention)" in block.linear(row).sources), None)
            key = (called and tuple(e.shape[1] for e in called.inputs[:2]), self._shape_key(block, row, columns))
            if key not in known:
                groups_of = by_heads(block, row, columns, called) if called else by_features(block, row, columns)
                known[key] = {_within(block, name): groups for name, groups in groups_of.items()}
            groups_of = {f"{block.layer}.{name}": groups for name, groups in known[key].items()}
            if called:
                self.heads[_heads(called)] = None
                for name in called.parameters:
                    parts = tuple(FeatureGroup(h, h + 1, "query", h) for h in range(called.inputs[0].shape[1]))
                    roles[name] = Role("column", "one number per query head, passed to attention", 0, parts)
            self.tp_blocks.append(self._tp_block(block, pair, _heads(called) if called else None))
            for name in pair.latents:
                roles |= self._roles_of(name, Role("latent", "reads the residual, for all heads at once"))
            for name in columns:
                roles |= self._linear_roles(name, pair, groups_of[name])
            roles |= self._linear_roles(row, pair, groups_of[row])
        paired = {name for pair in pairs for name in (pair.row, *pair.columns, *pair.latents)}
        for event in block.events:
            if event.kind == "linear" and event.name not in paired:
                roles |= self._roles_of(event.name, Role("norm", "acts on the residual, beside the projections"))
        for event in block.events:
            if event.kind == "small":
                roles |= self._roles_of(event.name, self._small(event, block, rows | experts, roles))
        for of_layer in self.traced.experts:
            if of_layer.name in experts:
                roles |= self._roles_of(of_layer.name, Role("experts", "expert by expert"))
                roles |= self._roles_of(of_layer.router, Role("router", "says where tokens go"))
                roles |= self._untrained(of_layer.name.rpartition(".")[0])
        return roles

    def _shape_key(self, block: BlockTrace, row: str, columns: Sequence[str]) -> object:
        sizes = [
            (_within(block, name), block.linear(name).inputs[0].shape, block.leaves[name].shape) for name in columns
        ]
        return (_within(block, row), block.linear(row).inputs[0].shape, *sizes)

    def _linear_roles(self, name: str, pair: Pair, groups: FeatureGroups) -> dict[str, Role]:
        is_row = name == pair.row
        reads = "a latent" if name in pair.behind else "the residual"
        kind: RoleKind = "row" if is_row else "column"
        reason = _reason(groups, "gives back to the residual" if is_row else f"reads {reads}")
        module = self.model.get_submodule(name)
        out_dim, in_dim = hf_internals.linear_dims(module) or (0, 1)
        roles = {f"{name}.weight": Role(kind, reason, in_dim if is_row else out_dim, groups)}
        if getattr(module, "bias", None) is not None:
            bias = Role("row_bias", "added once, to the sum") if is_row else Role("column", reason, 0, groups)
            roles[f"{name}.bias"] = bias
        return roles

    def _tp_block(self, block: BlockTrace, pair: Pair, heads: tuple[int, int] | None) -> TPBlock:
        row, columns = pair.row, pair.columns
        owner = _common_parent((*pair.latents, *columns, row))
        adds = any(  # it adds to the residual inside (BERT), so its input is not for the projections alone
            {RESIDUAL, row} <= event.sources and event.name.startswith(f"{owner}.") for event in block.events
        )
        is_last = block.linear(row) is block.events[-1]
        called = [event.name for event in block.events if event.kind == "linear" and event.name in columns]
        shared = tuple(_by_input(block, called))
        if owner != block.layer and owner.startswith(block.layer) and not adds:
            where = block.hidden_arguments.get(owner, [])
            if len(where) != 1:
                raise Untraceable(f"{owner} is given {len(where)} tensors of hidden states, not one")
            return TPBlock(owner, columns, row, (TPInput((owner,), where[0]),), heads, is_last, shared)
        entries = tuple(map(TPInput, _by_input(block, pair.entered)))
        return TPBlock(owner, columns, row, entries, heads, is_last, shared)

    def _small(self, event: ModuleCall, block: BlockTrace, rows: set[str], roles: Mapping[str, Role]) -> Role:
        """The role of a module with few parameters, such as a norm."""
        on_residual = RESIDUAL in event.sources or bool(event.sources & rows)
        if not on_residual:
            if not event.sources:
                return Role("replicated", "it reads nothing that a block computes")
            if all((role := roles.get(f"{name}.weight")) and role.kind == "latent" for name in event.sources):
                return Role("latent", "acts on a latent, for all heads at once")
            if any(parameter.ndim > 1 for parameter in self.model.get_submodule(event.name).parameters()):
                return Role("replicated", "holds numbers per head, which are not dealt to the ranks yet")
            if event.wide and _is_sharded(groups := self._groups_of_input(event, roles)):
                self.across[event.name] = groups
                return Role("across", "acts on all features at once, which are gathered for it")
            return Role("local", "acts on heads or features that differ by rank")
        inside = [r for r in self.tp_blocks if event.name.startswith(r.owner + ".") and r.owner != block.layer]
        if any(tp_block.row not in event.sources for tp_block in inside):
            return Role("local", "acts on the gathered residual, before a projection")
        return Role("norm", "acts on the residual")

    def _groups_of_input(self, event: ModuleCall, roles: Mapping[str, Role]) -> FeatureGroups:
        """How ranks share the features that a wide module reads: those of one projection, or the row's inputs."""
        sources = {name.removesuffix(" (attention)") for name in event.sources}
        if len(event.sources) == 1 and (role := roles.get(f"{next(iter(event.sources))}.weight")):
            return role.groups or ()
        for tp_block in reversed(self.tp_blocks):
            if sources <= {*tp_block.columns, tp_block.owner}:
                return roles[f"{tp_block.row}.weight"].groups or ()
        raise Untraceable(f"{event.name} mixes the features of {', '.join(sorted(sources))}")


def _by_input(block: BlockTrace, names: Sequence[str]) -> Iterable[tuple[str, ...]]:
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(id(block.linear(name).inputs[0]), []).append(name)
    return map(tuple, found.values())


def _heads(called: ModuleCall) -> tuple[int, int]:
    query, key, _ = called.inputs
    return query.shape[1], key.shape[1]


def _is_sharded(groups: FeatureGroups) -> bool:
    """True if several ranks have a part of these features."""
    return len(groups) > 1 or any(part.owner == "even" for part in groups)


def _within(block: BlockTrace, name: str) -> str:
    return name.removeprefix(f"{block.layer}.")


def _common_parent(names: Iterable[str]) -> str:
    paths = [name.split(".")[:-1] for name in names]
    common = []
    for parts in zip(*paths, strict=False):
        if len(set(parts)) > 1:
            break
        common.append(parts[0])
    return ".".join(common)


# ---- words -----------------------------------------------------------------------------------------------------------


def _reason(groups: FeatureGroups, what: str) -> str:
    owners = {part.owner for part in groups}
    if owners == {"even"}:
        return what + (f", {len(groups)} projections in one" if len(groups) > 1 else "")
    heads = {"query": "query heads", "kv": "key/value heads"}
    return f"{what}: {' and '.join(heads[owner] for owner in ('query', 'kv') if owner in owners)}"


def _compared(name: str, role: Role, plan: Mapping[str, str]) -> tuple[Role, str | None]:
    """The role, its reason extended by the model's own plan; and an error text if the plan contradicts the role."""
    module = name.rpartition(".")[0]
    key = next((key for key in plan if _pattern(key).fullmatch(module)), None)
    if key is None or role.kind not in ("column", "row", "local"):
        return role, None
    said = hf_internals.PLAN_STYLES.get(plan[key])
    if said in ("column", "row") and role.kind in ("column", "row") and said != role.kind:
        return role, f"its plan says that {key} is {plan[key]}, and its forward uses it as a {role.kind}"
    return Role(role.kind, f"{role.reason} (plan: {plan[key]})", role.dim, role.groups), None


def _listing(names: Iterable[str]) -> str:
    """Names with layer indices as `*`, each once."""
    return ", ".join(dict.fromkeys(map(any_layer, names)))


def _pattern(key: str) -> re.Pattern[str]:
    """A plan key such as `layers.*.mlp.up_proj`, where `*` is a layer index."""
    return re.compile(re.escape(key).replace(r"\*", r"\d+"))
