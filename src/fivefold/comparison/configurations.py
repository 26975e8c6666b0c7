"""Configurations to compare, the runs of each, and the order in which they are trained."""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from shlex import split
from typing import Any

from fivefold.config import RunConfig, check_named, check_supported, load_config
from fivefold.config.runfile import READ_MORE
from fivefold.core.errors import UserError, refuse
from fivefold.core.plain_yaml import quoted
from fivefold.launch.model import check_model
from fivefold.launch.workers import gpus, worker_count
from fivefold.launch.world import device_kind
from fivefold.parallel import legality

# Set in every run: turns off what a comparison does not need, or what would count in its time.
ALWAYS = (
    "log.every=1", "log.to=[jsonl]", "sample.every=0", "checkpoint.keep=1", "checkpoint.export_hf=false",
    "checkpoint.remote=null", "checkpoint.resume=auto", "checkpoint.keep_best=0", "eval.stop.patience=0",
)  # fmt: skip
_DIFFERENT_TEXT = ("tokenizer", "data")  # if these sections differ, losses per token are not comparable


@dataclass(frozen=True)
class Configuration:
    """A run file with its overrides, and its name in the table and in the names of its folders."""

    name: str
    path: Path | None
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def slug(self) -> str:
        """Its name as part of a file name."""
        return slug(self.name)

    @property
    def tree(self) -> dict[str, Any]:
        """All its values, except where it is kept."""
        tree = self.config.model_dump(mode="json", by_alias=True)
        return {name: section for name, section in tree.items() if name != "run"}


@dataclass(frozen=True)
class PlannedRun:
    """One run: repeat `repeat`, from 1, of a configuration on a number of devices. Each repeat adds 1 to the seed."""

    configuration: Configuration
    devices: int
    repeat: int

    @property
    def name(self) -> str:
        return f"{self.configuration.slug}-on-{self.devices}-repeat-{self.repeat}"

    @property
    def seed(self) -> int:
        """The file's seed for the first repeat, then the next ones."""
        return self.configuration.config.train.seed + self.repeat - 1

    def overrides(self, out: Path) -> list[str]:
        """All overrides of the run file, for a folder in `out`."""
        return [
            *self.configuration.overrides, *ALWAYS, f"train.seed={self.seed}", f"run.dir={quoted(out)}",
            f"run.name={quoted(self.name)}",
        ]  # fmt: skip


def configurations(
    paths: Sequence[Path], overrides: Sequence[str], vary: Sequence[Sequence[str]], steps: int | None
) -> list[Configuration]:
    """Load each of `paths` (none: the demo); a single one also with each of `vary` set. Raises `UserError`."""
    if vary and len(paths) > 1:
        raise UserError("--vary is of one run file, and there are several", fix="name one, or leave --vary out")
    length = [f"train.max_steps={steps}"] if steps else []
    found: list[Configuration] = []
    files: Sequence[Path | None] = paths or [None]
    for path in files:
        for varied in [(), *vary]:
            keys = [*overrides, *varied, *length]
            config = load_config(path, keys)
            check_supported(config)
            check_named(config)
            name = ", ".join(map(_short, varied)) or _name(path, config)
            found.append(
                Configuration(fresh(name, [configuration.name for configuration in found]), path, tuple(keys), config)
            )
    return found


def words(varied: str) -> list[str]:
    """Split the `key=value` words of one `--vary`. Raises `UserError`."""
    try:
        found = split(varied)
    except ValueError:  # unbalanced quotation marks
        found = []
    if not found or not all("=" in word for word in found):
        raise UserError(f"--vary {varied!r} is not key=value", fix="--vary precision.fp8=tensorwise", more=READ_MORE)
    return found


def _short(word: str) -> str:
    """Shorten `precision.fp8=rowwise` to `fp8=rowwise`."""
    key, _, value = word.replace('"', "").partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _name(path: Path | None, config: RunConfig) -> str:
    if path is None:
        return config.run.name
    return path.resolve().name if path.is_dir() else path.stem


def slug(name: str) -> str:
    """Turn `a, b` into `a-b`, which any file system takes."""
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", name).strip("-.") or "run"


def fresh(name: str, taken: Sequence[str]) -> str:
    """Return `name`, or `name-2` if files of that name are taken."""
    slugs = {slug(name) for name in taken}
    names = chain([name], (f"{name}-{at}" for at in count(2)))
    return next(name for name in names if slug(name) not in slugs)


def devices_of(configuration: Configuration, asked: int | None) -> int:
    """Number of devices that it uses when asked to run on `asked` (None: as many as `fivefold train` would take).
    Raises `UserError` if it cannot, before anything is started."""
    config = configuration.config
    kind = device_kind(config.train.device)
    layout = config.written_layout
    workers = worker_count(layout, kind=kind, devices=gpus() if kind == "cuda" else 0, nproc=asked)
    if asked not in (None, workers):
        raise UserError(f"{layout.product} = {workers}, not {asked}")
    if config.is_automatic:
        check_model(config, layout=None)
        return workers
    resolved = layout.resolve(workers)
    refuse(legality.violations(resolved, batch=config.train.global_batch_size))
    check_model(config, layout=resolved)
    return workers


@dataclass(frozen=True)
class Contest:
    """All runs of a comparison: `runs`, in the order of training; `refused`: why a configuration does not run on a
    number of devices."""

    configurations: Sequence[Configuration]
    runs: Sequence[PlannedRun]
    refused: Mapping[tuple[str, int], str]

    @classmethod
    def of(cls, some: Sequence[Configuration], counts: Sequence[int | None], repeats: int) -> "Contest":
        """Plan each configuration on each of `counts`, `repeats` times. Raises `UserError` if one runs on none."""
        cells, refused = list[tuple[Configuration, int]](), dict[tuple[str, int], str]()
        for asked in counts:
            for configuration in some:
                try:
                    cell = (configuration, devices_of(configuration, asked))
                except UserError as error:
                    if asked is None:
                        raise
                    refused[configuration.name, asked] = error.what
                else:
                    cells += [cell] if cell not in cells else []
        for configuration in some:
            if not any(configuration is one for one, _ in cells):
                why = next(why for (name, _), why in refused.items() if name == configuration.name)
                raise UserError(
                    f"{configuration.name} cannot run with --nproc {','.join(map(str, counts))}: {why}",
                    fix="another --nproc, or layout",
                )
        return cls(some, list(in_turns(cells, repeats)), refused)

    @property
    def cells(self) -> list[tuple[str, int]]:
        """Pairs of configuration and devices in the table's order: fewest devices first, then as named."""
        order = {configuration.name: place for place, configuration in enumerate(self.configurations)}
        every = {*((run.configuration.name, run.devices) for run in self.runs), *self.refused}
        return sorted(every, key=lambda cell: (cell[1], order[cell[0]]))


def in_turns(cells: Sequence[tuple[Configuration, int]], repeats: int) -> Iterator[PlannedRun]:
    """Interleave: A1 B1 A2 B2 ... A machine that gets slower over minutes then slows all alike."""
    for repeat in range(1, repeats + 1):
        for configuration, devices in cells:
            yield PlannedRun(configuration, devices, repeat)


def unlike(some: Sequence[Configuration]) -> dict[str, str]:
    """Configurations whose losses are not comparable with the first's, with the key that differs."""
    first, *others = some
    found = {}
    for other in others:
        for section in _DIFFERENT_TEXT:
            own, base = other.tree[section], first.tree[section]
            keys = [key for key in own if own[key] != base[key] and key not in ("seq_length", "packing")]
            if keys:
                found[other.name] = f"{section}.{keys[0]}"
    return found
