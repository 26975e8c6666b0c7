"""The chunks of the loss: how many tokens have their logits at a time. No torch."""

CACHE_BYTES, MOST_BYTES = 8 * 2**20, 512 * 2**20  # fp32 logits of one chunk under `loss_chunks: auto`


def chunk_sizes(tokens: int, vocabulary: int, hidden: int, loss_chunks: int | None) -> tuple[int, ...]:
    """Tokens of each chunk, for `tokens` of one micro batch.

    `loss_chunks` None: chunks whose fp32 logits stay in cache (`CACHE_BYTES`), yet of 4 * hidden tokens at least, for
    every chunk adds up a gradient of [vocabulary, hidden]; and never more logits than `MOST_BYTES`.
    """
    row = 4 * vocabulary
    most = max(1, min(max(CACHE_BYTES // row, 4 * hidden), MOST_BYTES // row))
    chunks = loss_chunks or -(-tokens // most)
    size = -(-tokens // min(chunks, tokens))
    return tuple(min(size, tokens - start) for start in range(0, tokens, size))
