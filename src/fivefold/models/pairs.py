"""The column/row pairs of a block: the projections that read the residual stream, those that write back to it, and the
groups of their features that must stay on one rank."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fivefold.models.facts import FeatureGroup, FeatureGroups, Owner
from fivefold.models.record import RESIDUAL, BlockTrace, Event, Untraceable, depends, gradients

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


def _is_hidden(event: Event, block: BlockTrace) -> bool:
    return event.leaf is not None and event.leaf.shape[-1] == block.leaves[RESIDUAL].shape[-1]


# ---- groups of features ----------------------------------------------------------------------------------------------


def by_heads(block: BlockTrace, row: str, columns: Sequence[str], called: Event) -> dict[str, FeatureGroups]:
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
