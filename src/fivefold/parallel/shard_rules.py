"""Rules for the shard of every parameter: by its role under tensor parallelism, and by experts. No torch.

`sharding.py` defines shards. This module assigns one to each parameter, and finds gradients that ranks hold in part.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import product

from fivefold.core.errors import UserError
from fivefold.core.model_limits import ranks_per_kv_head
from fivefold.models.facts import ORDERS, Experts, FeatureGroups, ModelFacts, Partition, Role
from fivefold.parallel.adapters.facts import A
from fivefold.parallel.layout import Layout
from fivefold.parallel.ranks import joined
from fivefold.parallel.sharding import Block, ShardSpec, Split, split_even


def partition_of(facts: ModelFacts, tp: int) -> Partition:
    """The partition of tensor parallelism over `tp` ranks; over one, nothing is split."""
    if tp > 1:
        return facts.partition
    return replace(facts.partition, roles={}, tp_blocks=(), heads=(), across={}, is_proved=True)


def shard_specs(facts: ModelFacts, layout: Layout) -> dict[str, ShardSpec]:
    """Shard every parameter, in the model's order; one without a role is whole. `layout` is legal for the model."""
    roles = partition_of(facts, layout.tp).roles
    by_role = {
        name: _shard(name, parameter.shape, roles.get(name), layout.tp) for name, parameter in facts.parameters.items()
    }
    return by_role | _of_experts(facts, layout)


# ---- by role ---------------------------------------------------------------------------------------------------------


def _shard(name: str, shape: tuple[int, ...], role: Role | None, tp: int) -> ShardSpec:
    if role is None or role.dim is None:
        return ShardSpec(name, shape, (), tp)
    if role.groups is None:
        return ShardSpec.along(name, shape, role.dim, [(block,) for block in split_even(shape[role.dim], tp)])
    return ShardSpec.along(name, shape, role.dim, feature_blocks(role.groups, tp))


@lru_cache(maxsize=256)  # few groups differ, and every layer asks
def feature_blocks(groups: FeatureGroups, tp: int) -> tuple[tuple[Block, ...], ...]:
    """Blocks of features of each tp rank, in global order, adjacent blocks joined.

    Every rank has the same number of whole query heads, and the key/value heads that these attend to. Example: q, k and
    v in one projection with 4 query and 2 key/value heads of 8 features, tp2. Rank 0 has (0, 16), (32, 40), (48, 56).
    """
    return tuple(joined(_blocks(groups, rank, tp)) or ((0, 0),) for rank in range(tp))


def _blocks(groups: FeatureGroups, rank: int, tp: int) -> Iterator[Block]:
    query, kv = (max((part.index + 1 for part in groups if part.owner == of), default=0) for of in ("query", "kv"))
    copies = ranks_per_kv_head(kv, tp) if kv else 1
    mine = {
        "query": range(rank * query // tp, (rank + 1) * query // tp),
        "kv": range(rank // copies * kv * copies // tp, (rank // copies + 1) * kv * copies // tp),
    }
    for part in groups:
        if part.owner == "even":
            start, stop = split_even((part.stop - part.start) // part.unit, tp)[rank]
            yield part.start + start * part.unit, part.start + stop * part.unit
        elif part.index in mine[part.owner]:
            yield part.start, part.stop


def kv_copies(facts: ModelFacts, tp: int) -> int:
    """Number of tp ranks that share each key/value head. Raises `UserError` if layers differ in that."""
    kinds = [kv for _, kv in partition_of(facts, tp).heads]
    if len({ranks_per_kv_head(kv, tp) for kv in kinds}) > 1:
        raise UserError(
            f"tp={tp} is more than the {min(kinds)} key/value heads that some layers of {facts.model_class} have, and "
            "others have more",
            fix=f"use tp {min(kinds)} or less",
        )
    return ranks_per_kv_head(kinds[0], tp) if kinds else 1


def gradient_sums(partition: Partition, specs: Mapping[str, ShardSpec], *, sequence_parallel: bool) -> dict[str, str]:
    """Parameters whose gradients on a rank cover only its tokens or heads -> the axis over which they are summed.

    Without such a sum the logits and the loss of the first step stay exact. Only gradients and replicas show the error.
    """
    sums = {}
    for name, role in partition.roles.items():
        spec, kind = specs[name], role.kind
        if kind == "experts":
            if spec.replicas > 1:  # whole next to split features: A of a column's adapter, B of a row's
                sums[name] = "tp"
        elif spec.splits and spec.replicas > 1:
            sums[name] = "tp_kv"
        elif kind in ("local", "latent", "across") or (sequence_parallel and kind in ("norm", "row_bias", "router")):
            sums[name] = "tp"
    return sums


# ---- experts ---------------------------------------------------------------------------------------------------------


def _of_experts(facts: ModelFacts, layout: Layout) -> dict[str, ShardSpec]:
    """Shard the experts' parameters: dimension 0 in blocks over `ep`, with `expert_tp` features over tp too."""
    ep, pieces = layout.ep, layout.etp
    specs = {}
    for experts in facts.experts:
        shapes = _shapes(facts, experts)
        features = feature_splits(experts, shapes, pieces) if pieces > 1 else {}
        for leaf, shape in shapes.items():
            name = f"{experts.name}.{leaf}"
            splits = [Split(0, tuple((block,) for block in split_even(shape[0], ep)))]
            splits += [features[leaf]] if leaf in features else []
            specs[name] = ShardSpec(name, shape, _crossed(splits), ep * pieces, over="ep")
    return specs


def feature_splits(experts: Experts, shapes: Mapping[str, tuple[int, ...]], parts: int) -> dict[str, Split]:
    """Cut the parameters of a module of experts into `parts`, which is legal; `shapes`: of all of them.

    An expert computes `down(act(gate_up(x)))` through I inner features. A rank holds some of these features: the
    columns of `gate_up_proj` that make them and the rows of `down_proj` that read them. Its result is a partial sum
    over features. `ExpertFeatures.order` says which columns make a feature. Example: I = 6 over tp2, gate before up.
    Rank 0 has the features 0 to 2, so the columns 0 to 2 (gate) and 6 to 8 (up).

    Each rank holds `down_proj_bias` for its share of the outputs, and adds it to its partial sum. So every number of
    the bias lies on one rank and is added once.

    In an adapter, A [E, r, I] reads what its matrix reads, and B [E, O, r] makes what it makes. If the matrix is not
    cut, neither are they, and every rank has the whole.
    """
    features = experts.features
    assert features is not None, "they are found with the facts"
    first, made, read = features.first, features.made, features.read
    size, outputs = shapes["down_proj"][read], shapes["down_proj"][made]
    blocks = split_even(size, parts)
    in_first = tuple(ORDERS[features.order][1](block, size) for block in blocks)
    splits = {
        first: Split(made, in_first),
        f"{first}_bias": Split(1, in_first),
        "down_proj": Split(read, tuple((block,) for block in blocks)),
        "down_proj_bias": Split(1, tuple((block,) for block in split_even(outputs, parts))),
    }
    for leaf, shape in shapes.items():
        holder, _, of = leaf.rpartition(".")
        if holder:
            own, dim = splits[of], 2 if holder == A else 1
            is_cut = (own.dim == read) == (holder == A)
            splits[leaf] = Split(dim, own.blocks if is_cut else (((0, shape[dim]),),) * parts)
    return {leaf: splits[leaf] for leaf in shapes}


def _shapes(facts: ModelFacts, experts: Experts) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters of a module of experts, by their names in it."""
    inside = f"{experts.name}."
    return {name.removeprefix(inside): p.shape for name, p in facts.parameters.items() if name.startswith(inside)}


def _crossed(splits: Sequence[Split]) -> tuple[Split, ...]:
    """Cross splits of several dimensions, for all pairs of their parts. Example: a split into 2 parts and one into 3
    give two splits into 6 parts; part 4 = 1 x 3 + 1 has part 1 of the first and part 1 of the second."""
    sizes = [len(split.blocks) for split in splits]
    places = list(product(*map(range, sizes)))
    return tuple(
        Split(split.dim, tuple(split.blocks[place[at]] for place in places)) for at, split in enumerate(splits)
    )
