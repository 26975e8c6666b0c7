"""Keys of expert parallelism, and the ranks and models that do not fit it. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import Violation
from fivefold.core.keys import key
from fivefold.core.model_limits import ModelLimits
from fivefold.parallel.context.keys import ContextKeys
from fivefold.parallel.fsdp.keys import FsdpKeys


@dataclass(frozen=True, kw_only=True)
class ExpertKeys(ContextKeys, FsdpKeys):
    """Ranks that experts are dealt to, taken from those of the other degrees."""

    ep: int = key(
        1, "layout.ep", "expert parallel; devices, taken from dp_shard, cp and tp",
        peers="ep_size ep_degree expert_parallel expert_parallel_size expert_parallel_degree "
        "expert_model_parallel_size",
        priced="work shards",
    )  # fmt: skip
    expert_tp: bool = key(
        False, "layout.expert_tp", "split each expert over tp; ep then takes dp_shard and cp alone",
        words={"etp": True}, is_last=True, after="sequence_parallel", priced="work shards",
    )  # fmt: skip

    @property
    def etp(self) -> int:
        """Number of ranks that share the features of each expert: `tp` with `expert_tp`."""
        return self.tp if self.expert_tp else 1

    @property
    def expert_shards(self) -> int:
        """Number of ranks over which FSDP shards an expert's parameters: `expert_ranks / ep`."""
        return self.expert_ranks // self.ep

    @property
    def expert_ranks(self) -> int:
        """Number of ranks that experts are distributed to and sharded over."""
        return self.dp_shard * self.cp * self.tp // self.etp

    def rank_violations(self) -> Iterator[Violation]:
        """`ep` divides the ranks that experts are dealt to."""
        ep, ranks = self.ep, self.expert_ranks
        if ranks % ep:
            fits = tuple(n for n in range(1, ranks + 1) if ranks % n == 0)
            product = f"dp_shard {self.dp_shard} x cp {self.cp}{'' if self.expert_tp else f' x tp {self.tp}'}"
            where = f"the ranks that experts are dealt to{' with expert_tp' if self.expert_tp else ''}"
            what = f"ep {ep} does not divide {product} = {ranks}, {where}"
            yield Violation("ep", what, f"try ep {', '.join(map(str, fits))}", fits)

    def model_violations(self, limits: ModelLimits, world: int | None = None) -> Iterator[Violation]:
        """`ep` needs a model with experts, at least one for each rank. `expert_tp` needs at least one feature of every
        expert for each tp rank."""
        ep, etp, experts, features = self.ep, self.etp, limits.experts, limits.expert_features
        whole = "set layout.expert_tp: false"
        if ep > 1 and experts == 0:
            yield Violation("ep", f"ep {ep}: {limits.name} has no experts to deal to ranks", "set layout.ep: 1", (1,))
        elif experts and ep > experts:
            what = f"ep {ep} is more than the {experts} experts of {limits.name}"
            yield Violation("ep", what, f"use ep {experts} or less", tuple(range(1, experts + 1)))
        if etp > 1 and experts == 0:
            yield Violation("expert_tp", f"expert_tp: {limits.name} has no experts to split over tp", whole)
        elif etp > 1 and (refusal := limits.refusals.get("expert_tp")):
            yield Violation("expert_tp", f"expert_tp: {refusal}", whole)
        elif features is not None and etp > features:
            what = f"expert_tp: an expert of {limits.name} has {features} features, and they cannot be split over {etp}"
            yield Violation("tp", what, f"use tp {features} or less", tuple(range(1, features + 1)))
