"""The run file: its schema, its reader, and the error messages for mistakes in it. No torch."""

from fivefold.config.schema import (
    DEMO,
    BalanceSection,
    DataSource,
    ObjectiveSection,
    OptimizerSection,
    RunConfig,
    check_best,
    check_named,
    check_streaming,
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
    "check_best",
    "check_named",
    "check_streaming",
    "check_supported",
    "keys",
    "load_config",
    "parse_config",
]
