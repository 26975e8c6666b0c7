"""How far the regular expressions of a tokenizer look: can a match continue through words and spaces alike?

`\\w+` and `[^\\s\\w]+` end with a run of like characters, so a text may be cut into words from any place near the cut.
A match of `"[^"]*"` or `<.*>` ends at a mark that may be anywhere: only the whole text from its beginning shows which
of two marks opens and which closes.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any

import regex

# The elements of a pattern, in the notation of Oniguruma.
_PIECES = re.compile(
    r"""(?P<open>\((?:\?(?:<?[=!]|[a-z-]*:|>|<\w+>))?)|(?P<close>\))
    |(?P<more>[*+][?+]?|\{\d*,\}[?+]?)|(?P<few>\?[?+]?|\{\d*,?\d+\}[?+]?)|(?P<or>\|)|(?P<edge>[\^$]|\\[bBAzZG])
    |(?P<atom>\\[pP]\{[^}]*\}|\\x\{\w+\}|\\.|\[\^?\]?(?:\\.|\[:\^?\w+:\]|[^\]\\])*\]|.)""",
    re.VERBOSE | re.DOTALL,
)
_SPACES = " \t\n\r"


def looks_far(tokenizer: Any) -> bool:
    """True if a pattern of a `Tokenizer` may match on through words and spaces: in its normalizer or its
    pre-tokenizer."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    return any(_runs_through(each) for part in parts if part for each in _patterns(json.loads(part.__getstate__())))


def _patterns(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict) and isinstance(tree.get("Regex"), str):
        yield tree["Regex"]
    for each in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _patterns(each)


@cache
def _letters() -> str:
    """The letters and digits of all scripts in the basic plane: a pattern may name any script."""
    return "".join(regex.findall(r"[\p{L}\p{Nd}]", "".join(map(chr, range(0x10000)))))


def _runs_through(pattern: str) -> bool:
    """True if an unbounded repetition matches spaces and letters or digits. Unreadable patterns count as such."""
    groups, last = [set[bool]()], set[bool]()
    try:
        for piece in _PIECES.finditer(pattern):
            if piece["open"] is not None:
                groups.append(set())
            elif piece["close"]:
                last = groups.pop()
                groups[-1] |= last
            elif piece["more"] and len(last) == 2:
                return True
            elif piece["atom"]:
                one = regex.compile(piece["atom"])
                last = {some is _SPACES for some in (_SPACES, _letters()) if one.search(some)}
                groups[-1] |= last
    except (regex.error, IndexError):
        return True
    return False
