"""The column/row pairs of a block: which projections read the residual stream, and which write back to it."""

from dataclasses import dataclass

from fivefold.models.trace import RESIDUAL, BlockTrace, Event, Untraceable


@dataclass(frozen=True)
class Pair:
    """A row, and the columns whose features it takes. Some stand `behind` latents: projections that read the residual
    for all heads at once (DeepSeek-V2, arXiv:2405.04434)."""

    row: str
    columns: tuple[str, ...]
    latents: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()

    @property
    def entered(self) -> list[str]:
        """What reads the residual."""
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
