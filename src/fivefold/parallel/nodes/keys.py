"""Keys of FSDP over nodes whose links are slower than those inside. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import Violation
from fivefold.core.keys import key
from fivefold.parallel.experts.keys import ExpertKeys

_MORE = "fivefold docs explain/slow_links"
_RANKS = "FSDP's ranks of a node (its devices / tp)"


@dataclass(frozen=True, kw_only=True)
class NodeKeys(ExpertKeys):
    """FSDP's ranks of a node, which keep a second copy of the weights between them, and within which FSDP sends in a
    level of its own. Each of them is `tp` devices, which have parts of the same matrices."""

    hpz: int = key(
        0, "layout.hpz", "FSDP's ranks of a node (its devices / tp), which share a second copy of the weights within a "
        "step; 0 = no copy",
        least=0, prefix="hpz", after="zero", peers="zero_hpz_partition_size", priced="shards",
    )  # fmt: skip
    hierarchical: int = key(
        0, "layout.hierarchical", "FSDP's ranks of a node (its devices / tp), for collectives in two levels; "
        "0 = one level",
        least=0, prefix="hier", after="hpz", priced="shards",
    )  # fmt: skip

    gathers: str = key(
        "none", "precision.gathers", "FSDP gathers matrices in eight bits, with a scale for each block of a row",
        choices=("none", "int8"), words={"qwz": "int8"}, priced="shards",
        answers={"zero_quantized_weights": "set precision.gathers: int8 (fivefold docs explain/slow_links)"},
    )  # fmt: skip
    reductions: str = key(
        "none", "precision.reductions", "FSDP sends gradients of matrices in eight bits, with a scale for each block "
        "of a row, and sums them in the type of precision.reduce",
        choices=("none", "int8"), words={"qgz": "int8"}, priced="shards",
        answers={"zero_quantized_gradients": "set precision.reductions: int8 (fivefold docs explain/slow_links)"},
    )  # fmt: skip

    def dtype_words(self) -> str:
        """The types of gathers and of reductions, if they are others than those computed and summed in. What a
        reduction rounds depends on which rows have been summed before, and so on the layout."""
        gathers = "" if self.gathers == "none" else f" with {self.gathers} gathers"
        return gathers if self.reductions == "none" else f"{gathers} with {self.reductions} reductions of {self}"

    @property
    def node_ranks(self) -> int:
        """Number of FSDP's ranks in a node, if a key says it; else 0: a node has `tp` times as many devices."""
        return self.hpz or self.hierarchical

    def violations(self) -> Iterator[Violation]:
        """A node has several of FSDP's ranks, one number of them, and a second copy serves a backward that gathers."""
        if self.hpz == 1:
            what = "hpz 1 is a copy that no other rank shares: every rank would keep all weights gathered"
            fix = f"set layout.zero: 2, which keeps them, or layout.hpz to {_RANKS}"
            yield Violation("hpz", what, fix, more=_MORE)
        if self.hierarchical == 1:
            what = "hierarchical 1: nodes of one rank have no level inside"
            yield Violation("hierarchical", what, f"set it to {_RANKS}, or leave it out", (0,), more=_MORE)
        if self.hpz and self.hierarchical and self.hpz != self.hierarchical:
            what = f"hpz {self.hpz} and hierarchical {self.hierarchical}: nodes have one number of ranks"
            yield Violation("hierarchical", what, f"set both to {self.hpz}", (self.hpz,), more=_MORE)
        if self.hpz and self.zero < 3:
            what = f"hpz {self.hpz} with zero {self.zero}, whose weights stay gathered: backward gathers nothing"
            yield Violation("hpz", what, "set layout.zero: 3, or leave layout.hpz out", (0,), more=_MORE)

    def rank_violations(self) -> Iterator[Violation]:
        """The ranks of a node are a part of FSDP's, and hold whole groups of `ep`. Gathers and reductions have several
        ranks."""
        ranks, dealt, node = self.dp_shard * self.cp, self.ep * self.etp, self.node_ranks
        about = "hpz" if self.hpz else "hierarchical"
        sent = {"gathers": (self.gathers, "gathered"), "reductions": (self.reductions, "reduced")}
        for name, (dtype, done) in sent.items():
            if dtype != "none" and min(ranks, self.expert_shards) == 1:
                alone = "dp_shard 1 x cp 1" if ranks == 1 else f"ep {self.ep}, which leaves each expert to one rank"
                what = f"{name} {dtype} with {alone}: what is not {done} would stay as it is"
                yield Violation(name, what, f"leave precision.{name} out, or use more of dp_shard", more=_MORE)
        if not node:
            return
        fits = tuple(n for n in range(2, ranks) if ranks % n == 0)
        if node >= ranks or ranks % node:
            what = f"{about} {node} is no part of dp_shard {self.dp_shard} x cp {self.cp} = {ranks}, FSDP's ranks"
            fix = f"try {about} {', '.join(map(str, fits))}" if fits else f"leave layout.{about} out"
            yield Violation(about, what, fix, fits, more=_MORE)
        elif node * self.tp % dealt:
            what = f"{about} {node} x tp {self.tp} = {node * self.tp} ranks hold no whole groups of ep"
            what += f" {self.ep}{f' x tp {self.etp}' * self.expert_tp}"
            fits = tuple(n for n in fits if n * self.tp % dealt == 0)
            fix = f"try {about} {', '.join(map(str, fits))}" if fits else f"leave layout.{about} out"
            yield Violation(about, what, fix, fits, more=_MORE)
