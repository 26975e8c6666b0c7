r"""Reads which regular expressions of a tokenizer are near: they cut a text alike from any place on.

Two readings of a text that begin apart meet at the first place where both end a match. A match of `"[^"]*"` or `<\w+>`
ends with a mark, and another may begin with it: a reading that takes closing marks for opening ones may never meet the
other. These alternatives are near:

- Characters of one kind: spaces, those of words, or marks, which are all others. ` +`, `\p{N}{1,3}`.
- Characters of one kind behind a single character or spaces, `[^\r\n\p{L}]?\p{L}+`. Others may follow, except for
  those of words: `[^\s\w]+[\r\n]*`.
- A repeated set that takes all it can and may begin anywhere, ` ?[^\s.,]+`, without `\b` or lookarounds. Spaces and
  words are not both in it.
- A word with an end of one apostrophe and written-out letters: `\p{L}+(?:'s|'t)?`.

No pattern has both an alternative that goes from words to another kind and one that goes from that kind to words,
such ends aside. A lookaround repeats characters of one kind. All else is far, unknown elements included: then the whole
text is encoded, which is right and takes more memory.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain, takewhile
from typing import Any, NamedTuple

import regex

# The elements of a pattern, in the notation of Oniguruma.
_ESCAPE = r"\\(?:[pP]\{[^}]*\}|x\{[0-9a-fA-F]{1,6}\}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|[dDwWsSnrtfv]|\W|_)"
_SET = rf"(?<set>\[\^?\]?(?:{_ESCAPE}|\[:\^?\w+:\]|(?!--|~~|\|\|)[^\[\]\\]|(?&set))*\])"
_PIECES = regex.compile(
    rf"""(?<cases>\A\(\?[im-]+\))|(?<edge>[\^$]|\\[bBAzZ])
    |(?<look>\(\?<?[=!])|(?<open>\((?:\?(?:[im-]*:|>|<\w+>)|(?![?*])))|(?<close>\))|(?<or>\|)
    |(?<times>[*+?][?+]?|\{{(?:\d+,?\d*|,\d+)\}}[?+]?)|(?<atom>{_ESCAPE}|{_SET}|[^\\\[{{(])""",
    regex.VERBOSE | regex.DOTALL,
)
_WRITTEN = re.compile(r"[^.\\\[]|\\[\W_]|\[\w{1,8}\]", re.DOTALL)
_KINDS = {"space": r"[ \t\n\r]", "word": r"[\p{L}\p{Nd}]", "mark": r"[[\p{P}\p{S}]&&\p{Common}&&\W]"}
_RARE = {"space": r"\s", "word": r"[\p{M}\p{N}]", "mark": r"."}


class _Part(NamedTuple):
    """A part of an alternative that matches characters of `kinds`, or is a condition without any."""

    kinds: frozenset[str]
    must: bool = True  # match something
    many: bool = False  # may be more than one character
    greedy: bool = False  # takes as many as there are of one set
    written: str = ""  # the one character, or several in brackets
    ends_words: bool = False  # is `'s` or another such text
    ways: tuple[tuple["_Part", ...], ...] = ()  # the alternatives of a group that is not repeated


_Way = tuple[_Part, ...]
_CONDITION = _Part(frozenset())


class _UnknownError(Exception):
    """An element, or a sequence of elements, that is not known to be near."""


def looks_far(tokenizer: Any) -> bool:
    """True unless all patterns in the normalizer and the pre-tokenizer of a `Tokenizer` are known to be near."""
    parts = (tokenizer.normalizer, tokenizer.pre_tokenizer)
    return any(_is_far(pattern) for part in parts if part for pattern in _patterns(json.loads(part.__getstate__())))


def _patterns(tree: Any) -> Iterator[str]:
    if isinstance(tree, dict) and isinstance(tree.get("Regex"), str):
        yield tree["Regex"]
    if isinstance(tree, dict) and tree.get("type") == "FixedLength":  # counts from the beginning, as this pattern does
        yield f".{{{tree['length']}}}"
    for branch in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from _patterns(branch)


def _is_far(pattern: str) -> bool:
    try:
        steps = set(chain.from_iterable(map(_steps, _flat(_Reader(pattern).read()))))
    except (_UnknownError, regex.error):
        return True
    return any("word" in step and step[::-1] in steps for step in steps)


def _flat(ways: tuple[_Way, ...]) -> Iterator[_Way]:
    """The alternatives, and in place of one that is a group those of the group."""
    for way in ways:
        if len(way) == 1 and way[0].ways:
            yield from _flat(way[0].ways)
        else:
            yield way


def _steps(way: _Way) -> Iterator[tuple[str, str]]:
    """Pairs of kinds of which a match goes from one to the other, or may do so within a set of both."""
    way, has_conditions = tuple(part for part in way if part.kinds), any(not part.kinds for part in way)
    if len(_kinds(way)) < 2:
        _refuse_ends(way)
        return
    if has_conditions and any(part.many and len(part.kinds) > 1 for part in way):
        raise _UnknownError
    opener = way[:1] if not way[0].many or way[0].kinds == {"space"} else ()
    rest = way[len(opener) :]
    body = tuple(takewhile(lambda part: part.kinds == rest[0].kinds, rest))
    behind = [part for part in rest[len(body) :] if part.must or not part.ends_words]
    _refuse_ends(body)
    if body and len(body[0].kinds) > 1:
        anywhere = not any(part.must for part in opener)
        if not (len(body) == 1 and body[0].greedy and anywhere) or {"space", "word"} <= body[0].kinds:
            raise _UnknownError
    if any(part.must or "word" in part.kinds or (part.many and not part.greedy) for part in behind):
        raise _UnknownError
    before = frozenset[str]()
    for part in (*opener, *body, *behind):
        if part.many and "word" in part.kinds:
            yield from (("word", kind) for kind in part.kinds - {"word"})
        yield from ((one, other) for one in before for other in part.kinds if one != other)
        before |= part.kinds


def _kinds(parts: _Way) -> frozenset[str]:
    return frozenset[str]().union(*(part.kinds for part in parts))


def _refuse_ends(parts: _Way) -> None:
    """Refuse marks that must end what is repeated, as in `-=*-`. (In `[A-Z]*[a-z]+` the end is in the same word.)"""
    repeated = next((at for at, part in enumerate(parts) if part.many), len(parts))
    if "mark" in _kinds(parts) and any(part.must for part in parts[repeated + 1 :]):
        raise _UnknownError


class _Reader:
    """Reads a pattern into its parts."""

    def __init__(self, pattern: str):
        self.pattern, self.at = pattern, 0

    def read(self, *, is_group: bool = False) -> tuple[_Way, ...]:
        """The alternatives up to the end of a group, or of the pattern."""
        ways: list[list[_Part]] = [[]]
        while self.at < len(self.pattern):
            piece = _PIECES.match(self.pattern, self.at)
            if piece is None or (piece["close"] and not is_group):
                raise _UnknownError
            self.at = piece.end()
            if piece["close"]:
                return tuple(map(tuple, ways))
            if piece["or"]:
                ways.append([])
            elif piece["look"]:
                parts = tuple(chain.from_iterable(self.read(is_group=True)))
                if len(_kinds(tuple(part for part in parts if part.many))) > 1:
                    raise _UnknownError
                ways[-1].append(_CONDITION)
            elif piece["open"]:
                ways[-1].append(_group(self.read(is_group=True)))
            elif piece["times"]:
                if not ways[-1] or not ways[-1][-1].kinds:
                    raise _UnknownError
                ways[-1].append(_repeated(ways[-1].pop(), piece["times"]))
            elif piece["edge"]:
                ways[-1].append(_CONDITION)
            elif atom := piece["atom"]:
                ways[-1].append(_Part(_kinds_of(atom), written=atom if _WRITTEN.fullmatch(atom) else ""))
        if is_group:
            raise _UnknownError
        return tuple(map(tuple, ways))


def _group(ways: tuple[_Way, ...]) -> _Part:
    parts = tuple(chain.from_iterable(ways))
    many = any(len(way) > 1 for way in ways) or any(part.many for part in parts)
    ends = all(way and way[0].written in ("'", "’") for way in ways) and all(part.written for part in parts)
    ends = ends and all(_kinds(way[1:]) == {"word"} for way in ways)
    return _Part(_kinds(parts), many=many, ends_words=ends, ways=ways)


def _repeated(part: _Part, times: str) -> _Part:
    once = times[0] == "?"
    unbounded = times[0] in "*+" or re.fullmatch(r"\{\d+,\}\+?", times) is not None
    greedy = unbounded and not times.endswith("?") and not (part.ways or part.many)
    must = part.must and not once and times[0] != "*" and re.match(r"\{0*,", times) is None
    return _Part(part.kinds, must, part.many or not once, greedy, ends_words=part.ends_words and once)


@cache
def _characters(kind: str) -> str:
    """All characters of a kind in the basic plane: a pattern may name any script."""
    planes = "".join(map(chr, chain(range(0xD800), range(0xE000, 0x10000))))
    return "".join(regex.findall(kind, planes, regex.V1 | regex.DOTALL))


@cache
def _kinds_of(atom: str) -> frozenset[str]:
    """The kinds of the characters that an atom matches. Rare ones, which may count for two kinds, decide alone."""
    atom = re.sub(r"\\x\{(\w+)\}", lambda code: f"\\U{code[1]:0>8}", atom)
    one = regex.compile(atom, regex.V1 | regex.DOTALL)
    if found := frozenset(kind for kind, some in _KINDS.items() if one.search(_characters(some))):
        return found
    return frozenset([next((kind for kind, some in _RARE.items() if one.search(_characters(some))), "mark")])
