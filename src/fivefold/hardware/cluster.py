"""Hardware that a layout runs on: nodes of one kind of device, and the links between them. No torch.

Text form, as `--cluster` takes it: `16x8xH100` is 16 nodes of 8 H100, `8xH100` one node, `8x8xH200@p5e` nodes of
another type. Or a TOML file, whose tables override values of the chip or of its node:

    cluster = "16x8xH100@p5"

    [chip]
    memory_gib = 94
    [chip.matmul_fraction]
    bf16 = 0.72

    [node.between]
    gbs = 25
    decay = 0.1

The fields are those of `Chip`, `NodeType` and `Link`.
"""

import json
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fivefold.core import strict_json
from fivefold.core.errors import UserError, first_line
from fivefold.core.files import expanded
from fivefold.hardware.chip import (
    Chip,
    Link,
    NodeType,
    Table,
    chip_of_table,
    chip_table,
    node_of_table,
    node_table,
    overridden,
)
from fivefold.parallel.layout import MOST_RANKS

FORM = "a cluster is NODESxDEVICESxCHIP, such as 16x8xH100, or 8xH100 for one node, or a TOML file"
_TEXT = re.compile(r"(?:([0-9]{1,9})x)?([0-9]{1,9})x([a-z][\w.-]*)(?:@([\w.-]+))?", re.IGNORECASE)


@dataclass(frozen=True)
class Span:
    """Placement of a group's ranks. A node here is all that the inside link joins: 72 devices of an NVL72 rack.

    `link`: the slowest that they use. `nodes`: how many they touch. `per_node`: how many ranks the fullest node has.
    """

    link: Link
    nodes: int
    per_node: int


@dataclass(frozen=True)
class Cluster:
    """`nodes` nodes of `devices_per_node` devices each; global ranks fill one node after the other."""

    nodes: int
    devices_per_node: int
    chip: Chip
    node: NodeType

    @staticmethod
    def parse(text: str, size: tuple[int, int] | None = None) -> "Cluster":
        """Parse a text or a TOML file. `size`: nodes, and devices of each, to use instead of its own. Raises
        `UserError`."""
        text = text.strip()
        return _from_file(expanded(text), size) if text.endswith(".toml") else _from_text(text, {}, size)

    @staticmethod
    def of_toml(content: str, name: str = "what was measured", size: tuple[int, int] | None = None) -> "Cluster":
        """Parse the content of a TOML file; errors call it `name`. `size`: see `parse`. Raises `UserError`."""
        try:
            tree = tomllib.loads(content)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{name} cannot be read as a cluster: {first_line(error)}", fix=FORM) from None
        text = tree.pop("cluster", None)
        if not isinstance(text, str):
            raise UserError(f"{name} does not say its cluster", fix='write cluster = "16x8xH100" at its top')
        if wrong := [key for key, value in tree.items() if key not in ("chip", "node") or not isinstance(value, dict)]:
            raise UserError(f"{name}: {wrong[0]} is no table of a cluster", fix="the tables are [chip] and [node]")
        try:
            return _from_text(text, tree, size)
        except UserError as error:
            raise UserError(f"{name}: {error.what}", fix=error.fix) from None

    @property
    def world(self) -> int:
        """Number of devices."""
        return self.nodes * self.devices_per_node

    @property
    def crowding(self) -> float:
        """Devices per core of a server whose devices are processes: 2 for 4 of them on 2 cores; else 1."""
        return max(1.0, self.devices_per_node / self.node.cores) if self.node.cores else 1.0

    @property
    def threads(self) -> int:
        """Cores per device where devices are processes; else 1."""
        return max(1, self.node.cores // self.devices_per_node)

    @property
    def text(self) -> str:
        """`16x8xH100`, or `16x8xH100@p5`: the text that `parse` reads, without the changes of a user's file."""
        type_of_nodes = "" if self.node.name == "dgx" else f"@{self.node.name}"
        return f"{self.nodes}x{self.devices_per_node}x{self.chip.name}{type_of_nodes}"

    @property
    def domain(self) -> int:
        """Number of consecutive ranks that the inside link joins: a node, or the whole nodes of a rack.

        8 for nodes of 8 H100; 72 for nodes of 4 GB200.
        """
        return max(self.node.domain_devices // self.devices_per_node, 1) * self.devices_per_node

    def tier_of(self, ranks: Iterable[int]) -> Span:
        """Placement of a group of global ranks, and its link.

        On 2x8xH100: ranks 0..7 use NVLink, 1 node, 8 a node; ranks 0 and 8 use the network, 2 nodes, 1 a node.
        """
        a_node = Counter(rank // self.domain for rank in ranks)
        link, per_node = self.node.inside if len(a_node) == 1 else self.node.between, max(a_node.values())
        if len(a_node) > 1 == per_node:
            link = replace(link, fraction=link.fraction * link.one_per_node)
        return Span(link, nodes=len(a_node), per_node=per_node)


def nodes_of(size: int, local_size: int) -> tuple[int, int]:
    """(nodes, devices of each) of `size` workers, `local_size` of them on the first machine. If the last machine has
    fewer, each worker counts as a node of its own: links are then underestimated, never overestimated."""
    return (size // local_size, local_size) if size % local_size == 0 else (size, 1)


def to_toml(tables: Mapping[str, Any], about: str = "") -> str:
    """Format as TOML, as `Cluster.parse` reads it: `about` as a comment, the text form of the `cluster`, the tables
    `chip` and `node`, if any."""
    head = [*(f"# {line}".rstrip() for line in about.splitlines()), f"cluster = {json.dumps(tables['cluster'])}"]
    found = ((name, tables[name]) for name in ("chip", "node") if tables.get(name))
    return "\n".join([*head, *(line for name, table in found for line in _lines(name, table)), ""])


def _lines(name: str, table: Mapping[str, Any]) -> Iterator[str]:
    yield from ("", f"[{name}]")
    for key, value in table.items():
        if not isinstance(value, Mapping):
            yield f"{key} = {json.dumps(value, ensure_ascii=False)}"
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _lines(f"{name}.{key}", value)


def _from_text(text: str, changes: Table, size: tuple[int, int] | None = None) -> Cluster:
    """Cluster of a text form, with a file's changes to the chip and the node."""
    match = _TEXT.fullmatch(text)
    if match is None:
        raise UserError(f"{text!r} is not a cluster", fix=FORM)
    nodes, devices = size or (int(match[1] or 1), int(match[2]))
    name, table = chip_table(match[3])
    type_of_nodes = (match[4] or "dgx").lower()
    node = overridden(node_table(type_of_nodes, name, table["node"]), changes.get("node", {}), "[node]")
    chip = overridden({key: value for key, value in table.items() if key != "node"}, changes.get("chip", {}), "[chip]")
    _check_size(nodes, devices, node["most_devices"], text, name)
    cluster = Cluster(nodes, devices, chip_of_table(name, chip), node_of_table(type_of_nodes, node))
    return _shared_out(cluster) if cluster.node.cores else cluster


def _shared_out(cluster: Cluster) -> Cluster:
    """Scale the speeds of devices that are processes to several cores each, or to a part of one, while all compute.

    On 2 cores: 1 process computes twice as fast as a core; each of 4 half as fast, and sends half as fast.
    """
    node, crowding = cluster.node, cluster.crowding
    chip = cluster.chip.times(cluster.threads / crowding)
    inside = replace(
        node.inside, gbs=node.inside.gbs / crowding, latency_us=node.inside.latency_us * crowding,
        meet_us=node.inside.meet_us * crowding,
    )  # fmt: skip
    return replace(cluster, chip=replace(chip, launch_us=chip.launch_us * crowding), node=replace(node, inside=inside))


def _from_file(file: Path, size: tuple[int, int] | None = None) -> Cluster:
    try:
        content = strict_json.content(file, strict_json.MOST_CONFIG_BYTES).decode()
    except (OSError, ValueError) as error:
        raise UserError(f"{file} cannot be read as a cluster: {first_line(error)}", fix=FORM) from None
    return Cluster.of_toml(content, str(file), size)


def _check_size(nodes: int, devices: int, most: int, text: str, chip: str) -> None:
    if nodes * devices == 0:
        raise UserError(f"{text} has no devices", fix=FORM)
    if devices > most:
        fits = f"{-(-nodes * devices // most)}x{most}x{chip}"
        raise UserError(f"{text}: a node of {chip} has at most {most} devices, not {devices}", fix=f"write {fits}")
    if nodes * devices > MOST_RANKS:
        raise UserError(f"{text} has more than {MOST_RANKS:,} devices", fix="write fewer nodes")
