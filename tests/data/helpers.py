"""Corpora of prime sizes and the configs that read them."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from fivefold.config import RunConfig
from fivefold.data import IGNORE, MicroBatch, PackedRows, PreparedData, prepare

SEQ = 61  # prime, as are most sizes here: padding, cuts and straddled epochs all happen


def config_for(train: Any, **changes: Any) -> RunConfig:
    """A config of the byte tokenizer on `train`, a path or a list of sources, with `changes` of the data section."""
    tokenizer, seed = changes.pop("tokenizer", "byte"), changes.pop("seed", 7)
    model = changes.pop("model", "demo")
    sources = [{"path": str(train)}] if isinstance(train, str | Path) else train
    data = {"train": sources, "validation": 0, "seq_length": SEQ, **changes}
    return RunConfig.model_validate(
        {
            "model": {"name_or_path": str(model)},
            "tokenizer": {"name_or_path": str(tokenizer)},
            "data": data,
            "train": {"seed": seed},
        }
    )


def prepare_texts(folder: Path, texts: list[str], **changes: Any) -> PreparedData:
    """The data of `texts` as the records of one JSONL file, cached in `folder`."""
    return prepare(config_for(write_jsonl(folder / "texts.jsonl", texts), **changes), cache=folder / "cache")


def write_jsonl(path: Path, texts: list[str], key: str = "text") -> Path:
    path.write_text("".join(json.dumps({key: text}) + "\n" for text in texts), encoding="utf-8")
    return path


def random_texts(seed: int, documents: int = 53, longest: int = 211) -> list[str]:
    """Texts of distinct letters and lengths, 0 and 1 among them."""
    rng = np.random.default_rng(seed)
    lengths = [0, 1, *rng.integers(0, longest, documents - 2).tolist()]
    return ["".join(rng.choice(list("abcdefg hé\n"), length)) for length in lengths]


def byte_tokens(text: str) -> list[int]:
    """What the byte tokenizer must give, EOS included."""
    return [*text.encode(), 256]


def segments(batch: MicroBatch) -> list[tuple[list[int], list[int], list[int]]]:
    """(tokens, labels, positions) of each segment that `cu_seqlens` delimits, padding included."""
    flat = [array.reshape(-1).tolist() for array in (batch.input_ids, batch.labels, batch.position_ids)]
    cuts = zip(batch.cu_seqlens[:-1].tolist(), batch.cu_seqlens[1:].tolist(), strict=True)
    return [tuple(array[start:end] for array in flat) for start, end in cuts]  # type: ignore[misc]


def pieces(batch: MicroBatch) -> list[tuple[list[int], list[int]]]:
    """(tokens, targets) of each piece of the batch, padding left out (its segment has no target at all)."""
    return [
        (tokens, [label for label in labels if label != IGNORE])
        for tokens, labels, _ in segments(batch)
        if any(label != IGNORE for label in labels)
    ]


def whole(rows: PackedRows, **knobs: Any) -> list[MicroBatch]:
    """All rows in file order, for one rank, one row a micro batch."""
    single = {"data_rank": 0, "data_ranks": 1, "micro_batch_size": 1, "row_multiple": 1}
    return list(rows.sequential(**{**single, **knobs}))
