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

from transformers import PreTrainedModel

from fivefold.core.text import any_layer
from fivefold.models import hf_internals
from fivefold.models.anatomy import Anatomy, is_within
from fivefold.models.facts import FeatureGroup, FeatureGroups, Partition, Role, RoleKind, TPBlock, TPInput
from fivefold.models.pairs import Pair, by_features, by_heads, pairs_of
from fivefold.models.record import RESIDUAL, BlockTrace, Event, Trace, Untraceable

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

    def _small(self, event: Event, block: BlockTrace, rows: set[str], roles: Mapping[str, Role]) -> Role:
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

    def _groups_of_input(self, event: Event, roles: Mapping[str, Role]) -> FeatureGroups:
        """How ranks share the features that a wide module reads: the features of one projection, or the row's
        inputs."""
        sources = {name.removesuffix(" (attention)") for name in event.sources}
        if len(event.sources) == 1 and (role := roles.get(f"{next(iter(event.sources))}.weight")):
            return role.groups or ()
        for tp_block in reversed(self.tp_blocks):
            if sources <= {*tp_block.columns, tp_block.owner}:
                return roles[f"{tp_block.row}.weight"].groups or ()
        raise Untraceable(f"{event.name} mixes the features of {', '.join(sorted(sources))}")


def _by_input(block: BlockTrace, names: Sequence[str]) -> Iterable[tuple[str, ...]]:
    """Linears grouped by their input tensor."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(id(block.linear(name).inputs[0]), []).append(name)
    return map(tuple, found.values())


def _heads(called: Event) -> tuple[int, int]:
    """Query and key/value heads of an attention."""
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
