"""Random documents in place of `data.train`, to rehearse a run without its text or tokenizer on this machine."""

from pathlib import Path

import numpy as np

from fivefold.config import RunConfig
from fivefold.data.counts import DataCounts, SourceCounts
from fivefold.data.prepare import PreparedData
from fivefold.data.rows import PackedRows, Pool, build_index
from fivefold.data.store import StoreMeta, TokenStore
from fivefold.data.tokenizer import TokenizerInfo
from fivefold.models.build import load_model_config

DOCUMENTS, ROWS = 4, 16  # documents of a row; rows of the data, which repeat
SEED = 1234


def synthetic(config: RunConfig, folder: Path) -> PreparedData:
    """Build rows of four documents each, the same for training and validation, from the model's whole vocabulary.
    `folder`: where they are written."""
    vocabulary = int(load_model_config(config.model.name_or_path, config.model.overrides).get_text_config().vocab_size)
    length, tokenizer = config.data.seq_length, TokenizerInfo(folder, "synthetic", vocabulary, 0)
    size = max(length // DOCUMENTS, 2)
    tokens = np.random.default_rng(SEED).integers(0, vocabulary, ROWS * DOCUMENTS * size, dtype=np.uint32)
    tokens.tofile(folder / "tokens.bin")
    meta = StoreMeta(
        kind="synthetic", version=0, content="", tokenizer="", vocab_size=vocabulary, eos_token_id=0, bos=(),
        dtype="uint32", documents=ROWS * DOCUMENTS, tokens=len(tokens), blocks=0, answers_alone=(), files={},
    )  # fmt: skip
    starts = np.arange(0, len(tokens), size, dtype=np.int64)
    stores, sizes = (TokenStore(folder, meta),), np.full_like(starts, size)
    index, counts = build_index(
        stores, starts, sizes, seq_length=length, packing=config.data.packing, ranks=config.data.balance_documents
    )
    pool = Pool(1.0, counts.rows, counts.tokens)
    rows = PackedRows(index, stores, counts, (pool,), length, 0, config.train.seed)
    is_held_out = bool(config.data.validation)
    source = SourceCounts("synthetic", meta.documents, counts.tokens, 1.0, 1.0)
    return PreparedData(
        tokenizer=tokenizer,
        train=rows,
        validation=rows if is_held_out else None,
        counts=DataCounts(
            files=0, files_left_out=0, documents=meta.documents, tokens=meta.tokens, seq_length=length, train=counts,
            sources=(source,), validation=counts if is_held_out else None, validation_asked=is_held_out, repeated=0,
        ),
        fingerprint="synthetic",
    )  # fmt: skip
