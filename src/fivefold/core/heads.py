"""Attention heads and how many ranks can share them: arithmetic alone, done before torch is loaded."""

from dataclasses import dataclass
from typing import Any


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


@dataclass(frozen=True)
class CPMethod:
    """How `cp` = `ring` x `ulysses` ranks attend: keys and values go round rings, or are gathered there (`gathers`);
    neighbours, `ulysses` of them, deal out heads and have all their tokens."""

    ring: int
    ulysses: int
    gathers: bool = False


def context_method(text: str, cp: int, query: int, kv: int) -> CPMethod:
    """The method that `cp_method` names, for a tensor parallel rank's `query` and `kv` heads.

    `auto` sends the least. Of its tokens a rank of a ring of r sends keys and values r - 1 times, 2 kv (r - 1) heads;
    dealing heads out sends queries, keys, values and results once, 2 (query + kv) (u - 1) / u heads. So few key/value
    heads speak for the ring, and many ranks for dealing out. Of equals the latter: its work is equal for all, whatever
    the documents. Keys and values are never gathered unless asked: they would be whole on every rank.

    Whether ranks and heads fit what is named is asked of `legality`.
    """
    if text == "auto":
        sizes = [u for u in range(1, cp + 1) if cp % u == 0 and query % u == 0 and kv % u == 0]
        u = min(sizes, key=lambda u: (kv * (cp // u - 1) + (query + kv) * (u - 1) / u, -u))
        return CPMethod(cp // u, u)
    named = {"ring": CPMethod(cp, 1), "allgather": CPMethod(cp, 1, gathers=True), "ulysses": CPMethod(1, cp)}
    return named[text] if text in named else CPMethod(*map(int, text.split("x")))  # type: ignore[arg-type]
