"""Stand-ins for wandb, mlflow and trackio: as much of each as is called, writing down what it is told."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import patch

NAMES = ("wandb", "mlflow", "trackio")


@dataclass
class Told:
    """What a stand-in was told: how a run began, its parameters where they go apart, its rows, its tables of samples as
    (step, columns), how it ended. MLflow's tables have no step of their own."""

    started: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    tables: list[tuple[int | None, dict[str, list[Any]]]] = field(default_factory=list)
    ended: list[Any] = field(default_factory=list)

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.rows]


@contextmanager
def stand_ins(fail_at: int = 0, fail_to_start: bool = False) -> Iterator[dict[str, Told]]:
    """Inside, the three packages are stand-ins; row number `fail_at` and, if asked, starting raise an error."""
    told = {name: Told() for name in NAMES}

    def start(name: str, /, **options: Any) -> None:
        told[name].started.append(options)
        if fail_to_start:
            raise ConnectionError("no route to host\nand more lines")

    def log(name: str, values: dict[str, Any], step: int) -> None:
        if "samples" in values:
            told[name].tables.append((step, values["samples"]))
            return
        assert all(type(value) in (int, float) for value in values.values())
        told[name].rows.append((step, values))
        if len(told[name].rows) == fail_at:
            raise ConnectionError("no route to host\nand more lines")

    modules = {name: ModuleType(name) for name in NAMES}
    for name, module in modules.items():
        module.__spec__ = ModuleSpec(name, None)
    with patch.dict(sys.modules, modules):
        _fill_wandb(modules["wandb"], told["wandb"], start, log)
        _fill_mlflow(modules["mlflow"], told["mlflow"], start, log)
        _fill_trackio(modules["trackio"], told["trackio"], start, log)
        yield told


def _fill_wandb(module: Any, told: Told, start: Any, log: Any) -> None:
    def init(
        *, id: str, config: dict[str, Any], allow_val_change: bool, settings: Any, project: str = "", name: str = "",
        dir: str = "", resume: str = "",
    ) -> Any:  # fmt: skip
        assert allow_val_change and settings.console == "off"
        start("wandb", id=id, resume=resume, project=project, name=name, dir=dir)
        told.config.update(config)
        return SimpleNamespace(log=lambda values, step: log("wandb", values, step), finish=finish)

    def finish(exit_code: int) -> None:
        told.ended.append(exit_code)

    def table(columns: list[str], data: list[tuple[Any, ...]]) -> dict[str, list[Any]]:
        return {name: [row[at] for row in data] for at, name in enumerate(columns)}

    module.init, module.Settings, module.Table = init, SimpleNamespace, table


def _fill_mlflow(module: Any, told: Told, start: Any, log: Any) -> None:
    def start_run(run_id: str | None = None, run_name: str | None = None) -> Any:
        start("mlflow", id=run_id, name=run_name)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "3f0e"))

    module.set_experiment = lambda name: None
    module.start_run = start_run
    module.log_params = told.config.update
    module.log_metrics = lambda values, step: log("mlflow", values, step)
    module.end_run = told.ended.append
    module.log_table = lambda data, artifact_file: told.tables.append((None, data))


def _fill_trackio(module: Any, told: Told, start: Any, log: Any) -> None:
    def init(project: str, name: str, config: dict[str, Any], resume: str) -> None:
        start("trackio", name=name, resume=resume, project=project)
        told.config.update(config)

    module.init, module.Table = init, lambda dataframe: dataframe.to_dict("list")
    module.log = lambda values, step: log("trackio", values, step)
    module.finish = lambda: told.ended.append("finished")
