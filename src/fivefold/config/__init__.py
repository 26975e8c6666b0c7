"""The run file: its schema, how it is read, and what is said of a mistake in it. No torch."""

from fivefold.config.schema import (
    DEMO,
    BalanceSection,
    DataSource,
    ObjectiveSection,
    OptimizerSection,
    RunConfig,
    check_supported,
    keys,
    load_config,
    parse_config,
)

__all__ = [
    "DEMO",
    "BalanceSection",
    "DataSource",
    "ObjectiveSection",
    "OptimizerSection",
    "RunConfig",
    "check_supported",
    "keys",
    "load_config",
    "parse_config",
]
