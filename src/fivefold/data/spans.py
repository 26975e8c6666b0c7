"""Which characters of a conversation, as a chat template writes it, the assistant said.

A template is asked by what it writes of the turns up to one, which is work for each turn that grows with the turns
before it. In a long conversation a few turns of each kind are asked about. The others are found by marks around their
content, all in one text, where what stands around them is what stands around the turns that were asked about.
"""

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fivefold.core.errors import UserError

Turn = Mapping[str, Any]  # as templates take it: role, content, and what else a template reads (tool_calls, ...)
Span = tuple[int, int]  # characters, the end excluded
Render = Callable[..., str]

_MARK = "\ue0f5\ue0f6"  # characters that no text has, and no template takes away
_FEW = 4  # answers that are asked about one by one


def find_spans(render: Render, turns: Sequence[Turn], own: Sequence[int], *, name: str) -> tuple[str, dict[int, Span]]:
    """The text of a conversation, and of each of the assistant's turns `own` the characters that it says.

    `render(turns, answer=False)` writes turns. `name`: of the template, for messages. Raises `UserError` where a turn
    is not to be told.
    """
    text = render(turns)
    spans = {} if len(own) <= _FEW else _by_kind(render, turns, own, text, name)
    return text, {number: spans.get(number) or _span(render, turns, number, text, name) for number in own}


# ---- a turn by itself ------------------------------------------------------------------------------------------------


def _span(render: Render, turns: Sequence[Turn], number: int, text: str, name: str) -> Span:
    after = render(turns[: number + 1]).rstrip()
    try:
        asked, before = render(turns[:number], answer=True), render(turns[:number])
    except UserError:  # a template that looks at the first turn, where the assistant begins and none is before it
        start = _front(render, turns, number, text)
    else:
        start = len(asked) if text.startswith(asked) else _front(render, turns, number, text)
        if start is None and text.startswith(before) and asked.startswith(before):
            start = _alike(text, asked)  # a question for an answer that begins to answer itself
    end = len(after) if text.startswith(after) else _back(render, turns, number, text)
    if start is None or end is None or end < start:
        raise UserError(
            f"{name} does not tell where the assistant's turn {number + 1} of {len(turns)} begins and ends",
            fix="put {% generation %} and {% endgeneration %} around the answer in the template",
        )
    return start, end


def _alike(one: str, other: str) -> int:
    """How many characters at the front are the same."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def _front(render: Render, turns: Sequence[Turn], number: int, text: str) -> int | None:
    """Where the content of a turn begins in `text`, if a mark in front of it tells."""
    found = _marked(render, turns, number, text, "{mark}{content}")
    return found and found[0]


def _back(render: Render, turns: Sequence[Turn], number: int, text: str) -> int | None:
    """Where what ends a turn ends in `text`, if a mark behind its content tells."""
    found = _marked(render, turns, number, text, "{content}{mark}")
    if found is None:
        return None
    at, marked = found
    ending = render(marked[: number + 1]).partition(_MARK)[2].rstrip()
    return at + (len(ending) if text.startswith(ending, at) else 0)


def _marked(render: Render, turns: Sequence[Turn], number: int, text: str, form: str) -> tuple[int, list[Turn]] | None:
    """Where a mark at the content of a turn lands in `text`, and the turns with it; None where it changes the text.

    It is tried once more without the space around the content, which templates take away."""
    content = str(turns[number].get("content") or "")
    for each in (content, content.strip()):
        turn = {**turns[number], "content": form.format(mark=_MARK, content=each)}
        marked = [*turns[:number], turn, *turns[number + 1 :]]
        found = render(marked)
        if found.replace(_MARK, "") == text and _MARK in found:
            return found.index(_MARK), marked
    return None


# ---- many turns at once ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Around:
    """What stands around the content of a turn: `lead` and `trail` are parts of what the assistant says. `asked`: how
    a question for an answer goes on after the place where the content begins."""

    lead: str
    trail: str
    asked: str


def _by_kind(render: Render, turns: Sequence[Turn], own: Sequence[int], text: str, name: str) -> dict[int, Span]:
    """The spans of turns that are like others. Those that are not are left to `_span`."""
    contents, found = _contents(render, turns, own, text), dict[int, Span]()
    kinds: dict[Any, list[int]] = {}
    for number in contents:
        kinds.setdefault(_kind(turns, number), []).append(number)
    for members in kinds.values():
        samples = sorted({members[0], members[len(members) // 2], members[-1]})
        found |= {number: _span(render, turns, number, text, name) for number in samples}
        around = {_around(render, turns, number, text, found[number], contents[number]) for number in samples}
        if len(around) == 1 and (like := around.pop()) is not None:
            found |= {number: span for number in members if (span := _like(text, contents[number], like))}
    return found


def _kind(turns: Sequence[Turn], number: int) -> tuple[Any, ...]:
    """What templates look at beside the words: the neighbours, further keys, and space around the content."""
    before, after = (turns[at]["role"] if 0 <= at < len(turns) else None for at in (number - 1, number + 1))
    front, _, back = _stripped(turns[number])
    return before, after, tuple(sorted(turns[number])), front, back, number == 0


def _stripped(turn: Turn) -> tuple[str, str, str]:
    """The content of a turn: the space in front, the words, the space behind."""
    content = str(turn.get("content") or "")
    words = content.strip()
    at = content.index(words)
    return content[:at], words, content[at + len(words) :]


def _contents(render: Render, turns: Sequence[Turn], own: Sequence[int], text: str) -> dict[int, Span]:
    """Where the words of these turns stand in `text`; of none where marks around them change it."""
    marked, numbers = list(turns), [number for number in own if _stripped(turns[number])[1]]
    for number in numbers:
        front, words, back = _stripped(turns[number])
        marked[number] = {**turns[number], "content": f"{front}{_MARK}{words}{_MARK}{back}"}
    try:
        parts = render(marked).split(_MARK)
    except UserError:
        return {}
    if len(parts) != 2 * len(numbers) + 1 or "".join(parts) != text:
        return {}
    found, at = {}, 0
    for number, between, words in zip(numbers, parts[::2], parts[1::2], strict=False):
        if words != _stripped(turns[number])[1]:
            return {}  # of another turn, or changed
        at += len(between)
        found[number] = at, at + len(words)
        at += len(words)
    return found


def _around(render: Render, turns: Sequence[Turn], number: int, text: str, span: Span, content: Span) -> _Around | None:
    """What stands around the content of a turn that was asked about; None where it depends on the content."""
    (start, end), (first, last) = span, content
    try:
        asked = render(turns[:number], answer=True)
    except UserError:
        return None
    if start > first or end < last or asked[:first] != text[: min(first, len(asked))]:
        return None
    return _Around(text[start:first], text[last:end], asked[first:])


def _like(text: str, content: Span, around: _Around) -> Span | None:
    """The span of a turn around which stands the same; None where it does not."""
    first, last = content
    start, end = first - len(around.lead), last + len(around.trail)
    if text[start:first] != around.lead or text[last:end] != around.trail:
        return None
    if around.asked and text.startswith(around.asked, first):
        return None  # it begins with what the question for an answer has said
    return start, end


def words(turn: Turn) -> str:
    """The text of a turn, also where its content is a list of parts."""
    content = turn.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


def inside(spans: Sequence[Span], ends: Sequence[int]) -> list[bool]:
    """Whether each of these ends lies in one of some spans, behind its first character."""
    firsts, most, lasts = [], 0, []
    for first, last in sorted(spans):
        most = max(most, last)
        firsts.append(first)
        lasts.append(most)
    places = [bisect_left(firsts, end) - 1 for end in ends]
    return [at >= 0 and end <= lasts[at] for at, end in zip(places, ends, strict=True)]
