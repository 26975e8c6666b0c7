"""The run folder: which one a run gets, and what is in it before the first step."""

from itertools import count
from pathlib import Path

from fivefold.config import RunConfig


def claim_fresh(config: RunConfig) -> RunConfig:
    """The same config under a name that no run has yet (`demo`, `demo-2`, ...); the folder is made to claim it."""
    base = config.run.name
    for number in count(1):
        name = base if number == 1 else f"{base}-{number}"
        try:
            (Path(config.run.dir) / name).mkdir(parents=True)
        except FileExistsError:
            continue
        return named(config, name)
    raise AssertionError("count() never ends")


def named(config: RunConfig, name: str) -> RunConfig:
    """The same config with another `run.name`."""
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def open_folder(config: RunConfig) -> Path:
    """Make the run folder and return its `logs/`.

    A new folder gets the resolved `run.yaml`; one that is there keeps its own until the run it describes has been
    compared with this one, which is for the training body to do.
    """
    logs = config.run_dir / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    if not (config.run_dir / "run.yaml").exists():
        (config.run_dir / "run.yaml").write_text(config.to_yaml(), encoding="utf-8")
    return logs
