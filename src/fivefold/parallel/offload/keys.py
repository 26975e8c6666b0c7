"""Keys of offloading. No torch."""

from dataclasses import dataclass

from fivefold.core.keys import LayoutPart, key


@dataclass(frozen=True, kw_only=True)
class OffloadKeys(LayoutPart):
    """Keys of what is kept in host memory."""

    offload_activations: bool = key(
        False,
        "memory.offload_activations",
        "keep saved activations in host memory",
        words={"offload": True},
        priced="",
    )
    offload_parameters: bool = key(
        False,
        "memory.offload_parameters",
        "keep parameters in host memory",
        words={"offload_parameters": True},
        priced="shards",
    )
    offload_optimizer: bool = key(
        False, "memory.offload_optimizer", "keep optimizer state in host memory",
        words={"offload_optimizer": True}, file_after="offload_activations", priced="",
    )  # fmt: skip

    @property
    def rests_in_host(self) -> frozenset[str]:
        """State that is kept in host memory between steps, in words."""
        both = {"parameters": self.offload_parameters, "optimizer state": self.offload_optimizer}
        return frozenset(what for what, is_there in both.items() if is_there)
