"""Attention heads and how many ranks can share them: arithmetic alone, done before torch is loaded."""

from typing import Any

from fivefold.errors import UserError


def head_counts(config: Any) -> tuple[int, int, int]:
    """(query heads, key/value heads, features of one) of a `transformers` config."""
    query = config.num_attention_heads
    kv = getattr(config, "num_key_value_heads", None) or query
    return query, kv, getattr(config, "head_dim", None) or config.hidden_size // query


def kv_copies(kv: int, tp: int) -> int:
    """How many tp ranks share each of `kv` key/value heads."""
    return max(1, tp // kv)


def legal_degrees(query: int, kv: int) -> list[int]:
    """Tensor parallel degrees that deal `query` and `kv` heads evenly."""
    return [n for n in range(1, query + 1) if query % n == 0 and (kv % n == 0 or n % kv == 0)]


def check_heads(query: int, kv: int, tp: int) -> None:
    """Raise `UserError` with the arithmetic when `tp` cannot deal the heads evenly."""
    legal = legal_degrees(query, kv)
    if tp not in legal:
        raise UserError(
            f"tp={tp} does not fit num_attention_heads={query}, num_key_value_heads={kv}: "
            f"tp must divide the first, and divide or be a multiple of the second",
            fix=f"try tp {', '.join(map(str, legal))}",
            more="docs/layouts.md",
        )
