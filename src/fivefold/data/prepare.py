"""From the run file to rows ready to be read: find the text and the tokenizer, tokenise once, pack, count.

Called before the process group exists, and again by every worker: what was done is found in the cache.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.config import DataSource, RunConfig
from fivefold.data.cache import Progress, cache_root, entry, key_of
from fivefold.data.counts import DataCounts, RowCounts
from fivefold.data.formats import discover
from fivefold.data.rows import PackedRows, RowIndex, build_index
from fivefold.data.source import FileList, Source, resolve
from fivefold.data.split import Blocks, Int64s, blocks_of, held_out, spans_of
from fivefold.data.store import TokenStore, store_for
from fivefold.data.tokenizer import TokenizerInfo, find_tokenizer
from fivefold.errors import UserError

_ROWS_VERSION = 1  # raise when the rows of the same tokens change

Stores = tuple[TokenStore, ...]


@dataclass(frozen=True, eq=False)
class PreparedData:
    """What a run reads. `tokenizer_dir` is a Hugging Face folder; `fingerprint` names the rows by origin: contents,
    tokenizer, split, seq_length and packing. Runs with the same fingerprint and seed read the same batches."""

    tokenizer_dir: Path
    vocab_size: int
    eos_token_id: int
    train: PackedRows
    validation: PackedRows | None
    counts: DataCounts
    fingerprint: str


def prepare(config: RunConfig, *, progress: Progress | None = None, cache: Path | None = None) -> PreparedData:
    """Tokenise and pack the data of `config` into the cache (`cache`, else `cache_root()`), or find it there.

    Safe against concurrent callers. Raises UserError for bad input, naming file and row.
    """
    root = cache_root(cache)
    train, validation = _files(config)
    tokenizer = find_tokenizer(
        config.tokenizer.name_or_path, model=config.model.name_or_path, corpus=train, root=root, progress=progress
    )
    stores = tuple(store_for(one, tokenizer, root, progress) for one in train)
    held = tuple(store_for(one, tokenizer, root, progress) for one in validation)
    return _open(_Plan.of(config, stores, held), tokenizer, config.train.seed, root, [*train, *validation])


def _files(config: RunConfig) -> tuple[list[FileList], list[FileList]]:
    formats = discover()
    held = config.data.validation
    lists = {"data.train": config.data.train, "data.validation": held if isinstance(held, tuple) else ()}
    train, validation = (
        [resolve(_source(one, name if len(sources) == 1 else f"{name}[{i}]"), formats) for i, one in enumerate(sources)]
        for name, sources in lists.items()
    )
    return train, validation


def _source(given: DataSource, label: str) -> Source:
    if given.weight != 1.0:
        raise UserError(
            f"{label}.weight: {given.weight:g}: mixtures by weight are not available yet",
            fix=f"leave {label}.weight at 1",
        )
    return Source(path=given.path, label=label, format=given.format, text_key=given.text_key)


@dataclass(frozen=True, eq=False)
class _Plan:
    """Everything that decides the rows."""

    stores: Stores
    held: Stores  # of a validation list
    fraction: float
    seq_length: int
    packing: bool

    @classmethod
    def of(cls, config: RunConfig, stores: Stores, held: Stores) -> "_Plan":
        asked = config.data.validation
        fraction = asked if isinstance(asked, float | int) else 0.0
        return cls(stores, held, fraction, config.data.seq_length, config.data.packing)

    @property
    def key(self) -> str:
        contents = [[[store.meta.content, store.meta.tokenizer] for store in side] for side in (self.stores, self.held)]
        return key_of(_ROWS_VERSION, contents, self.fraction, self.seq_length, self.packing)

    def build(self, folder: Path) -> None:
        """Write the row indices of both sides and their counts."""
        blocks = blocks_of(self.stores)
        out = held_out(blocks, self.fraction)
        counts: dict[str, Any] = {
            "train": self._side(folder / "train", spans_of(blocks, ~out)),
            "validation": None,
            "repeated": 0,
        }
        if not counts["train"]["rows"]:
            raise UserError(
                f"data.train: no document has two tokens or more ({counts['train']['spans']:,} documents)",
                fix="add text",
            )
        if self.held or out.any():
            other = blocks_of(self.held) if self.held else blocks
            side = np.ones(len(other.hash), np.bool_) if self.held else out
            counts["validation"] = self._side(folder / "validation", spans_of(other, side))
            counts["repeated"] = _repeated(other, blocks) if self.held else 0
        (folder / "counts.json").write_text(json.dumps(counts))

    def _side(self, folder: Path, spans: tuple[Int64s, Int64s]) -> dict[str, int]:
        index, counts = build_index(*spans, seq_length=self.seq_length, packing=self.packing)
        index.save(folder)
        return asdict(counts)


def _repeated(validation: Blocks, train: Blocks) -> int:
    """Blocks of a validation list that stand in the training text too (with a fraction the hash keeps them apart)."""
    return int(np.isin(validation.hash, train.hash).sum())


def _open(plan: _Plan, tokenizer: TokenizerInfo, seed: int, root: Path, files: Sequence[FileList]) -> PreparedData:
    folder = entry(root / "rows" / plan.key, is_valid=_is_valid, build=plan.build)
    counts = json.loads((folder / "counts.json").read_text())
    numbers = {side: RowCounts(**counts[side]) if counts[side] else None for side in ("train", "validation")}

    def rows(side: str, stores: Stores) -> PackedRows | None:
        number = numbers[side]
        if number is None or not number.rows:
            return None
        return PackedRows(RowIndex.load(folder / side), stores, number, plan.seq_length, tokenizer.eos_token_id, seed)

    train = rows("train", plan.stores)
    assert train is not None and numbers["train"] is not None
    return PreparedData(
        tokenizer_dir=tokenizer.folder,
        vocab_size=tokenizer.vocab_size,
        eos_token_id=tokenizer.eos_token_id,
        train=train,
        validation=rows("validation", plan.held or plan.stores),
        counts=DataCounts(
            files=sum(len(one.files) for one in files),
            files_left_out=sum(len(one.left_out) for one in files),
            documents=sum(store.meta.documents for store in (*plan.stores, *plan.held)),
            tokens=sum(store.meta.tokens for store in (*plan.stores, *plan.held)),
            seq_length=plan.seq_length,
            train=numbers["train"],
            validation=numbers["validation"],
            validation_asked=bool(plan.held) or plan.fraction > 0,
            repeated=counts["repeated"],
        ),
        fingerprint=plan.key,
    )


def _is_valid(folder: Path) -> bool:
    try:
        counts = json.loads((folder / "counts.json").read_text())
        return all(
            len(RowIndex.load(folder / side)) == counts[side]["rows"]
            for side in ("train", "validation")
            if counts[side]
        )
    except (OSError, EOFError, ValueError, KeyError, TypeError):
        return False
