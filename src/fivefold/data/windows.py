"""The tokens of texts. A long text is encoded in windows, with the memory of short texts and on all cores.

`tokenizers` takes about 100 bytes per token and one core per text. The overlap of two windows is also encoded by
itself. The first window must end with the overlap's tokens, and the second begin with them, except for a quarter at the
respective other edge. The windows are joined in the middle of the tokens that all three share.

The joined tokens are those of the whole text, because each part of a tokenizer decides locally:

- BPE makes the merge of lowest rank first, of equal ones the leftmost. Take the first merge that would cross a boundary
  of the joined tokens. The two tokens at it are neighbours in a window too, and the merges inside them were made there
  in the same order. So this merge would have been made there, and was not.
- Other models encode word by word. Their windows are joined between two words.
- Normalizers, added tokens and the patterns that split words read from left to right, and look no further than the end
  of a run of like characters. Windows that share only a part of such a run disagree, or split it in the same way. A
  pattern may look further, `"[^"]*"` to a quote anywhere: only those of `_NEAR` are known not to.

Windows that disagree are encoded as one, up to the whole text for a tokenizer that decides globally. With another
pattern no text is split.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, repeat
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

_STEP = 2**16  # characters from the beginning of a window to that of the next
_SHARED = 2**11  # overlapping characters of adjacent windows
_TOGETHER = 16  # windows


class Encoded(NamedTuple):
    """The tokens of a part of a text, uint32 [tokens], and the characters of each, int64 [tokens, 2], if requested:
    without the space that a token with `lstrip` or `rstrip` takes in, which is no part of what it stands for."""

    ids: NDArray[np.uint32]
    spans: NDArray[np.int64]


class _Window(NamedTuple):
    """A part of a text that begins at the character `first`; `shared`: the encoding of its beginning."""

    first: int
    tokens: Encoded
    shared: Any


@dataclass(frozen=True)
class Encoder:
    """Encodes texts by a `Tokenizer` of `tokenizers`; `with_spans` also reports their characters."""

    tokenizer: Any
    with_spans: bool

    def encode(self, texts: Sequence[str]) -> Iterator[list[Encoded]]:
        """The tokens of each text, part after part."""
        longest = float("inf") if looks_far(self.tokenizer) else 2 * _STEP
        short = self._each([text for text in texts if len(text) <= longest])
        for text in texts:
            yield self._joined(text) if len(text) > longest else [next(short)]

    @cached_property
    def _strip(self) -> dict[int, Any]:
        """The added tokens that take in the space in front of them, or behind them, by their ids."""
        added = self.tokenizer.get_added_tokens_decoder()
        return {number: token for number, token in added.items() if token.lstrip or token.rstrip}

    def _each(self, texts: list[str], firsts: Iterable[int] = repeat(0)) -> Iterator[Encoded]:
        """The tokens of parts of a text that begin at the characters `firsts`."""
        # The fast one does not return offsets.
        many = self.tokenizer.encode_batch if self.with_spans else self.tokenizer.encode_batch_fast
        for text, encoding, first in zip(texts, many(texts, add_special_tokens=False), firsts, strict=False):
            ids = np.array(encoding.ids, np.uint32)
            spans = self._characters(text, ids, encoding.offsets) if self.with_spans else np.empty((0, 2), np.int64)
            yield Encoded(ids, spans + first)

    def _characters(self, text: str, ids: NDArray[np.uint32], offsets: list[tuple[int, int]]) -> NDArray[np.int64]:
        spans = np.fromiter(chain.from_iterable(offsets), np.int64, 2 * len(offsets)).reshape(-1, 2)
        for at in np.flatnonzero(np.isin(ids, [*self._strip])) if self._strip else ():
            (begin, end), token = spans[at], self._strip[int(ids[at])]
            begin += (end - begin - len(text[begin:end].lstrip())) * token.lstrip
            spans[at] = begin, begin + len(text[begin:end].rstrip() if token.rstrip else text[begin:end])
        return spans

    def _windows(self, text: str) -> Iterator[_Window]:
        firsts = range(0, len(text) - _SHARED, _STEP)
        for at in range(0, len(firsts), _TOGETHER):
            some = firsts[at : at + _TOGETHER]
            tokens = self._each([text[first : first + _STEP + _SHARED] for first in some], some)
            shared = [text[first : first + _SHARED] for first in some]
            yield from map(_Window, some, tokens, self.tokenizer.encode_batch(shared, add_special_tokens=False))

    def _joined(self, text: str) -> list[Encoded]:
        windows, parts, by_word = self._windows(text), list[Encoded](), _is_by_word(self.tokenizer)
        (first, tokens, _), begin, merged = next(windows), 0, 1
        for following in windows:
            if cut := _cut(tokens.ids, following, by_word=by_word):
                end = len(tokens.ids) - len(following.shared) + cut
                parts.append(Encoded(tokens.ids[begin:end], tokens.spans[begin:end]))
                (first, tokens, _), begin, merged = following, cut, 1
                continue
            more = islice(windows, merged - 1)  # double the number of merged windows each time
            last = max((window.first for window in more), default=following.first) + _STEP + _SHARED
            before, tokens, merged = tokens, next(self._each([text[first:last]], [first])), 2 * merged
            if not np.array_equal(tokens.ids[:begin], before.ids[:begin]):  # an earlier join was wrong
                return list(self._each([text]))
        return [*parts, Encoded(tokens.ids[begin:], tokens.spans[begin:])]


def _is_by_word(tokenizer: Any) -> bool:
    from tokenizers import models

    return not isinstance(tokenizer.model, models.BPE)


def _cut(before: NDArray[np.uint32], following: _Window, *, by_word: bool) -> int:
    """The number of shared tokens to take from the window before; 0 if the windows cannot be joined."""
    shared = np.array(following.shared.ids, np.uint32)
    edge = len(shared) // 4
    kept = len(shared) - edge
    ends, begins = before[len(before) - kept :], following.tokens.ids[:kept]
    if not (np.array_equal(ends, shared[edge:]) and np.array_equal(begins, shared[:kept])):
        return 0
    word = following.shared.token_to_word
    cuts = range(max(1, len(shared) // 2), kept)
    return next((at for at in cuts if not by_word or word(at) != word(at - 1)), 0)


# ---- regular expressions of tokenizers -------------------------------------------------------------------------------

_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_ENDS = (
    "",
    "(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])?",
)
_CASED = tuple(
    rf"[^\r\n\p{{L}}\p{{N}}]?{upper}{lower}{end}"
    for upper, lower in ((f"{_UPPER}*", f"{_LOWER}+"), (f"{_UPPER}+", f"{_LOWER}*"))
    for end in _ENDS
)
# The alternatives that published tokenizers split words by. Each matches characters of one kind (spaces, those of
# words, or marks), or some of one kind behind a mark or spaces, so that two readings that begin apart soon end a match
# at the same place. No two of them go from words to another kind and back.
_ALTERNATIVES = (
    *("'s", "'t", "'re", "'ve", "'m", "'ll", "'d", "(?i:'s|'t)", "'(?i:[sdmt]|ll|ve|re)"),
    *(end.removesuffix("?") for end in _ENDS[1:]),
    *(r" ?\p{L}+", r"\s?\p{L}+", r"[\p{L}]+", r"[^\r\n\p{L}\p{N}]?\p{L}+", r"[^\r\n\p{L}\p{N}]?+\p{L}++"),
    *(r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+", r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"),
    *(r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+", r"[\p{Han}]+", *_CASED),
    *(way.replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]") for way in _CASED),
    r"\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅḀ-ἕℂℇℊ-ℓＡ-Ｚａ-ｚ𐐀-𐑏𞤀-𞥃]+",
    *(r"\p{N}", r"[\p{N}]", r"\p{N}{1,3}", r"\p{N}{1,3}+", r"\p{N}+", r" ?\p{N}+", "[0-9][0-9][0-9]"),
    *(r"(?=(\d{3})+(?!\d))", r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|$))"),
    *(r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]++[\r\n]*+", r"\s?\p{P}+"),
    *(r" ?[^\s\p{L}\p{N}]+[\r\n/]*", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*"),
    *(r"[^\s\p{L}\p{N}]+", r"[\p{P}\$\+<=>\^~\|`]+"),
    *(r"\s+(?!\S)", r"\s+", r"\s", r"\s+$", r"\s++$", r"\s*[\r\n]+", r"\s*[\r\n]", r"[\r\n]", " {2,}"),
)
# The same for those with marks between words in one set, which stand by themselves.
_SETS = (
    *("[一-龥ࠀ-一가-\ud7ff]+", "[一-龥\u3040-ゟ゠-ヿ]+", "[가-힣ㄱ-ㆎ]+", "[ㄅ-ㄯ]+"),
    *("[！…“”‘’—：；，、-〿︰-﹏]+", r"\s?[!-/:-~！-／：-～‘-‟\u3000-。]+", r" ?[^(\s|[.,!?…。，、।۔،])]+"),
)


def _some_of(alternatives: Sequence[str]) -> str:
    one = "|".join(map(re.escape, alternatives))
    return rf"(?:{one})(?:\|(?:{one}))*"


_NEAR = re.compile(rf"{_some_of(_ALTERNATIVES)}|{_some_of(_SETS)}")


def looks_far(tokenizer: Any) -> bool:
    """True unless all patterns in the normalizer and the pre-tokenizer of a `Tokenizer` are known to be near."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    return not all(_is_near(json.loads(part.__getstate__())) for part in parts if part)


def _is_near(tree: Any) -> bool:
    if isinstance(tree, list):
        return all(map(_is_near, tree))
    if not isinstance(tree, dict):
        return True
    pattern = tree.get("Regex")
    is_known = not isinstance(pattern, str) or _NEAR.fullmatch(pattern) is not None
    # `FixedLength` counts from the beginning.
    return is_known and tree.get("type") != "FixedLength" and all(map(_is_near, tree.values()))
