"""Keys of FSDP and of data parallelism. No torch."""

from dataclasses import dataclass

from fivefold.core.keys import LayoutPart, key


@dataclass(frozen=True, kw_only=True)
class FsdpKeys(LayoutPart):
    """Replicas, shards, and what of a parameter's state is sharded."""

    dp_replicate: int = key(
        1, "layout.dp_replicate", "full copies of the shards, all-reduced once a step; devices, -1 = the rest",
        peers="data_parallel_replicate_degree dp_replicate_degree", priced="",
    )  # fmt: skip
    dp_shard: int = key(
        1, "layout.dp_shard", "FSDP shards; devices, -1 = the rest", file_default=-1,
        peers="data_parallel_shard_degree dp_shard_degree fsdp_size",
        answers={
            "dp dp_size dp_degree data_parallel data_parallel_size data_parallel_degree": "set layout.dp_shard (FSDP "
            "over so many ranks; -1: all that are left), or layout.dp_replicate (full copies)",
            "fsdp fsdp_config sharding_strategy": "set layout.dp_shard: -1, which is FSDP over every device that is "
            "left; layout.zero is the stage",
        },
    )  # fmt: skip
    zero: int = key(
        3, "layout.zero", "ZeRO stage inside dp_shard x cp",
        choices=(1, 2, 3), prefix="zero", pattern="[123]", peers="zero_stage zero_optimization",
        priced="",
    )  # fmt: skip

    @property
    def data_ranks(self) -> int:
        """Ranks that read different rows: `dp_replicate * dp_shard`."""
        return self.dp_replicate * self.dp_shard
