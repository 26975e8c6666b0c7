"""The log-probabilities of all pairs of a run under the reference model. They are computed once, before the first step,
under the layout of the run, and cached by a key over all inputs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from fivefold.checkpoint.agreement import base_source
from fivefold.config import RunConfig
from fivefold.core.cache import cache_root, digest_of_contents, entry, key_of, locked
from fivefold.core.errors import UserError
from fivefold.core.integrity import check_file, file_checksum, read_signed, signed
from fivefold.core.units import many
from fivefold.data.batch import MicroBatch
from fivefold.data.prepare import PreparedData
from fivefold.data.rows import PackedRows
from fivefold.models.build import weights_folder
from fivefold.models.sources import TensorSource, open_weights
from fivefold.parallel import plain
from fivefold.parallel.loss.own import TokenLoss
from fivefold.parallel.state import fill, state_of
from fivefold.training.distillation import Teacher
from fivefold.training.objectives import Objective
from fivefold.training.preference import ObjectiveSpec, Table, table

_VERSION = 2  # raise when the numbers change
_FILE = "log_probs.npy"


@dataclass(frozen=True)
class ObjectiveSpecs:
    """The objectives of the steps and evaluations of a run; None: the mean over targets. `told`: describes the
    reference, for the header. `loss`: one of the user's own, in place of cross entropy. `teacher`: of distillation."""

    train: ObjectiveSpec | None = None
    validation: ObjectiveSpec | None = None
    told: str = ""
    loss: TokenLoss | None = None
    teacher: Teacher | None = None


@dataclass(frozen=True)
class Reference:
    """The reference of a run. `source`: its weights; None: the run's first ones. `digest`: a hash of the weights."""

    source: TensorSource | None
    first: TensorSource  # weights of the run
    digest: str

    @classmethod
    def of(cls, config: RunConfig, model: PreTrainedModel) -> "Reference | None":
        """The reference for a model on the meta device, before it is parallelized; None if the objective needs none.
        Raises `UserError` if another model is named as the reference of an adapter."""
        if not objective_of(config).needs_reference:
            return None
        first = base_source(config, model)
        other = config.objective.reference
        if other not in ("auto", "base") and config.adapter.lora is not None:
            raise UserError(
                f"objective.reference: {other}: an adapter is compared with the model that it is beside",
                fix="leave objective.reference out; or train the whole model, adapter.name: none",
            )
        if other not in ("auto", "base"):
            folder = weights_folder(other)
            return cls(open_weights(folder, model), first, digest_of_contents(folder))
        is_random = config.model.init == "random"
        start = (
            key_of("random", config.train.seed)
            if is_random
            else digest_of_contents(weights_folder(config.model.name_or_path))
        )
        lora = config.adapter.lora
        if lora is not None and lora.quantize != "none":  # the reference has the quantized weights
            start = key_of(start, lora.quantize, lora.targets)
        if config.adapter.path:
            start = key_of(start, config.adapter.model_dump(mode="json"), digest_of_contents(Path(config.adapter.path)))
        return cls(None, first, start)


def objective_of(config: RunConfig) -> Objective:
    """The objective that the run file asks for."""
    section = config.objective
    return Objective(section.name, section.beta, section.gamma, section.desirable_weight, section.undesirable_weight)


def goals(config: RunConfig, data: PreparedData, model: Any, compared: Reference | None) -> ObjectiveSpecs:
    """ObjectiveSpecs of a run whose `model` has its first weights, which stay the same. Every rank calls this."""
    objective = objective_of(config)
    if not objective.has_pairs:
        return ObjectiveSpecs()
    sides = {"train": data.whole, "validation": data.validation}
    if compared is None:
        return ObjectiveSpecs(ObjectiveSpec(objective), ObjectiveSpec(objective))
    found, computed = dict[str, ObjectiveSpec | None](), 0
    for side, rows in sides.items():
        found[side] = None
        if rows is not None:
            numbers, is_new = _table(config, data, model, compared, side, rows)
            found[side], computed = ObjectiveSpec(objective, numbers), computed + is_new * len(numbers)
    pairs = sum(len(spec.reference) for spec in found.values() if spec and spec.reference is not None)
    how = "computed now" if computed == pairs else "from the cache" if not computed else "in part from the cache"
    name = "the first weights" if compared.source is None else config.objective.reference
    return ObjectiveSpecs(
        found["train"], found["validation"], f"with {name}: log-probabilities of {many(pairs, 'pair')}, {how}"
    )


def _table(
    config: RunConfig, data: PreparedData, model: Any, compared: Reference, side: str, rows: PackedRows
) -> tuple[Table, bool]:
    """Log-probabilities of a side, and whether they were computed now. The first rank reads and writes the cache."""
    root, pairs, device = cache_root(), len(rows.index.pieces), next(model.parameters()).device
    precision = [*config.precision.model_dump(exclude={"reduce"}).values()]
    parts = (data.fingerprint, side, pairs, compared.digest, model.config.to_json_string(), precision)
    folder = root / "reference" / key_of(_VERSION, *parts)
    shared, is_there = torch.zeros(pairs, 2, dtype=torch.float64, device=device), False
    if dist.get_rank() == 0:
        try:
            shared.copy_(torch.from_numpy(_read(folder, root, pairs)))
            is_there = True
        except (OSError, ValueError, UserError):
            is_there = False
    if plain.of_first(is_there):
        dist.broadcast(shared, 0)
        return shared.cpu().numpy(), False
    if dist.get_rank() == 0:
        with locked(folder):  # fails now, and not after the computation, if the cache cannot be written
            print(f"computing log-probabilities of {many(pairs, 'pair')} ({side}) ...", flush=True)
    with _as_reference(model, compared):
        numbers = table(model, _batches(model, rows), pairs)
    if dist.get_rank() == 0:
        entry(folder, read=partial(_read, root=root, pairs=pairs), build=lambda beside, _: _write(beside, numbers))
    dist.barrier()
    return numbers, True


@contextmanager
def _as_reference(model: Any, compared: Reference) -> Iterator[None]:
    """Give the model the weights of the reference inside the block."""
    if compared.source is None:
        yield
        return
    fill(model, compared.source)
    try:
        yield
    finally:
        fill(model, compared.first)


def _batches(model: Any, rows: PackedRows) -> Iterator[MicroBatch]:
    placement = state_of(model).placement
    layout = placement.layout
    return rows.sequential(
        data_rank=placement.data_rank, data_ranks=layout.data_ranks, micro_batch_size=layout.micro_batch_size,
        row_multiple=layout.row_multiple,
    )  # fmt: skip


def _write(folder: Path, numbers: Table) -> None:
    np.save(folder / _FILE, numbers, allow_pickle=False)
    (folder / "meta.json").write_text(signed({"array": file_checksum(folder / _FILE)}), encoding="utf-8")


def _read(folder: Path, root: Path, pairs: int) -> Table:
    """Read a cache entry. Raises `OSError`, `ValueError` or `UserError` (damage) if it cannot be used."""
    check_file(folder / _FILE, read_signed(folder / "meta.json")["array"], root)
    numbers: Table = np.load(folder / _FILE, allow_pickle=False)
    if numbers.shape != (pairs, 2) or numbers.dtype != np.float64 or not np.isfinite(numbers).all():
        raise ValueError(f"{folder}: {numbers.dtype} {list(numbers.shape)}, not finite float64 [{pairs}, 2]")
    return numbers
