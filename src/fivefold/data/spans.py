"""Which characters of a conversation, as a chat template writes it, the assistant said.

A template writes turn after turn in a loop. `numbered` changes it so that each round of that loop begins with a mark,
the number of its turn. Without the marks the text must be the one that the template writes itself; with them it says
where each turn begins and ends, however the template ends a turn that others follow, or that none does.

An answer begins where the question for one (`add_generation_prompt`) ends. What the template makes of another answer
in its place, a probe, tells what stands around the words, and that the words are written at all.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from os.path import commonprefix
from typing import Any

from fivefold.core.errors import UserError

Turn = Mapping[str, Any]  # as templates take it: role, content, and what else a template reads (tool_calls, ...)
Span = tuple[int, int]  # characters, the end excluded
Render = Callable[..., tuple[str, list[Span]]]

PROBE, _CALL = "qvxjzkanswer", "qvxjzkcall"  # letters alone, which no filter changes
_NUMBER = "fivefold_number"  # the key of a turn that holds its mark
_MARK = re.compile("\ue0f5([0-9]+)\ue0f6")  # characters that no text has
_LOOP = re.compile(
    r"\{#.*?#\}|\{%[-+]?\s*(?P<word>for|endfor)\b(?:\s+(?P<each>\w+)\s+in\b)?(?P<over>.*?)(?P<close>[-+]?%\})", re.DOTALL
)
_FEW = 4  # answers of one kind that are each asked for
_ENCLOSE = "put {% generation %} and {% endgeneration %} around the answer in the template"


@lru_cache(64)
def numbered(source: str) -> str:
    """A template whose outermost loops begin each round with the mark of the turn, if it is one, that they are at."""
    depth = 0

    def with_mark(tag: re.Match[str]) -> str:
        nonlocal depth
        depth += {"for": 1, "endfor": -1}.get(tag["word"], 0)
        if tag["word"] != "for" or depth > 1 or not tag["each"]:
            return tag[0]
        by_index = re.search(rf"(\w+)\[{tag['each']}\]", source[tag.end() :]) if "range(" in tag["over"] else None
        turn, opened = by_index[0] if by_index else tag["each"], tag[0].removesuffix(tag["close"])
        # The space behind a tag is taken away by its last characters, so another tag has them now.
        return f"{opened}%}}{{% if true %}}{{{{ {turn}['{_NUMBER}'] }}}}{{% endif {tag['close']}"

    return _LOOP.sub(with_mark, source)


@dataclass(frozen=True)
class _Written:
    """A text that a template has written: where each turn stands in it, and what `{% generation %}` encloses, with the
    number of the turn that it belongs to."""

    text: str
    turns: Mapping[int, Span]
    enclosed: Sequence[tuple[int, Span]]

    @classmethod
    def of(cls, render: Render, turns: Sequence[Turn], **options: Any) -> "_Written":
        marked, enclosed = render(
            [{**turn, _NUMBER: f"\ue0f5{at}\ue0f6"} for at, turn in enumerate(turns)], is_numbered=True, **options
        )
        marks = list(_MARK.finditer(marked))
        ends, removed = [mark.end() for mark in marks], [0, *accumulate(len(mark[0]) for mark in marks)]

        def place(at: int) -> int:
            return at - removed[bisect_right(ends, at)]

        stops = [place(mark.start()) for mark in marks[1:]] + [place(len(marked))]
        # A template may go through the turns before it writes them: the last time counts.
        places = {int(mark[1]): (place(mark.end()), stop) for mark, stop in zip(marks, stops, strict=False)}
        owners = [bisect_right(ends, first) - 1 for first, _ in enclosed]
        return cls(
            _MARK.sub("", marked),
            places,
            [
                (int(marks[owner][1]), (place(first), place(last)))
                for owner, (first, last) in zip(owners, enclosed, strict=True)
                if owner >= 0
            ],
        )

    def part(self, number: int) -> str:
        """What it has of a turn."""
        return self.text[slice(*self.turns.get(number, (0, 0)))]


def find_spans(
    render: Render, turns: Sequence[Turn], own: Sequence[int], *, name: str, encloses: bool = False
) -> tuple[str, dict[int, list[Span]]]:
    """The text of a conversation, and of each of the assistant's turns `own` the characters that it says, with those
    that end its turn. Where the template `encloses` answers in `{% generation %}`, they are what it encloses, and may
    be several spans.

    `render(turns, answer=False, is_numbered=False)` writes turns, by the template or by its `numbered` form, and says
    what is enclosed. `name`: of the template, for messages. Raises `UserError` where a turn is not to be told.
    """
    text, enclosed = render(turns)
    if not own:
        return text, {}
    whole = _Written.of(render, turns)
    if whole.text != text or not whole.turns.keys() >= set(own):
        if encloses and len(enclosed) == len(own):
            return text, {number: [span] for number, span in zip(own, enclosed, strict=True)}
        raise UserError(
            f"{name} does not write turn after turn, and which of the text is the assistant's is not to be told",
            fix=_ENCLOSE,
        )
    probes = [_probe(turn) if number in set(own) else turn for number, turn in enumerate(turns)]
    answers = _Answers(render, turns, name, whole, _Written.of(render, probes))
    for number in own:
        answers.check_written(number)
    if encloses:
        spans: dict[int, list[Span]] = {number: [] for number in own}
        for number, span in whole.enclosed:
            spans.setdefault(number, []).append(span)
    else:
        spans = {
            number: [(answers.begin(number, question), answers.end(number))]
            for number, question in answers.questions(own).items()
        }
    for number in own:
        answers.check_said(number, "".join(text[first:last] for first, last in spans[number]))
    return text, spans


@dataclass(frozen=True)
class _Answers:
    """A conversation: as it is `whole`, and with a `probe` in place of each answer."""

    render: Render
    turns: Sequence[Turn]
    name: str
    whole: _Written
    probe: _Written

    def questions(self, own: Sequence[int]) -> dict[int, str | None]:
        """What the template writes to ask for each answer. Of many after turns of one kind three are asked for, and
        stand for the others where they agree."""
        kinds: dict[Any, list[int]] = {}
        for number in own:
            before = self.turns[number - 1] if number else {}
            kinds.setdefault((before.get("role"), *sorted(before)), []).append(number)
        found: dict[int, str | None] = {}
        for same in kinds.values():
            few = same if len(same) <= _FEW else (same[0], same[len(same) // 2], same[-1])
            asked = {number: self._question(number) for number in few}
            agreed = len(set(asked.values())) == 1
            found |= asked | {
                number: asked[few[0]] if agreed else self._question(number) for number in same if number not in asked
            }
        return found

    def _question(self, number: int) -> str | None:
        """What it writes behind the turns before an answer to ask for it; None where it does not take them so."""
        before, front = list(self.turns[:number]), self.whole.text[: self.whole.turns[number][0]]
        if all(turn["role"] in ("system", "developer") for turn in before):  # the assistant begins
            before.append({"role": "user", "content": PROBE})
        last = len(before) - 1
        try:
            asked = _Written.of(self.render, before, answer=True)
            if last < number and asked.text.startswith(front):
                return asked.text[len(front) :]
            # It writes something of before otherwise now; the turn right before it may be as it is without others.
            said = _Written.of(self.render, [*before, self.turns[number]]).part(last)
            behind = asked.text[asked.turns[last][0] :]
        except (UserError, KeyError):
            return None
        return behind.removeprefix(said) if behind.startswith(said) else None

    def begin(self, number: int, question: str | None) -> int:
        """Where an answer begins: behind the question for it, or behind what both have in front of the words."""
        start, said = self.whole.turns[number][0], self.whole.part(number)
        if question is not None and said.startswith(question):
            return start + len(question)
        lead, is_there, _ = self.probe.part(number).partition(PROBE)
        shared = commonprefix([said, lead])
        if question is not None and question in shared:  # the first turn, behind what the text begins with
            return start + shared.index(question) + len(question)
        shared = commonprefix([shared, shared if question is None else question])
        if not (shared if question else is_there):
            raise self._untold(number)
        return start + len(shared)

    def end(self, number: int) -> int:
        """Where what ends the turn ends: where the next begins, or the text."""
        start, stop = self.whole.turns[number]
        if number == len(self.turns) - 1:
            stop = len(self.whole.text)
        elif not self.whole.part(number + 1):  # written within this one, as a tool's result is by Gemma 4, or left out
            until = self.render(self.turns[: number + 1])[0].rstrip()
            if not self.whole.text.startswith(until):
                raise self._untold(number)
            stop = min(stop, len(until))
        return start + len(self.whole.text[start:stop].rstrip())

    def check_written(self, number: int) -> None:
        """Raises `UserError` where the template leaves out what the assistant says: an empty answer would be learnt."""
        turn, written = self.turns[number], self.probe.part(number)
        for at, called in enumerate(_called(turn)):
            if _call(at) not in written:
                raise UserError(
                    f"turn {number + 1} calls the tool {called!r}, and {self.name} leaves out tool_calls",
                    fix="take a tokenizer whose template writes them, or write the calls into the content of the turn",
                )
        if words(turn).strip() and PROBE not in written:
            raise self._empty(number)

    def check_said(self, number: int, said: str) -> None:
        """The same of what is trained, where the template leaves out these words, and would write others."""
        ending = self.probe.part(number).rpartition(PROBE)[2].strip()
        if (words(self.turns[number]).strip() or _called(self.turns[number])) and said.strip() in ("", ending):
            raise self._empty(number)

    def _empty(self, number: int) -> UserError:
        return UserError(
            f"{self.name} writes nothing of what the assistant says in turn {number + 1} of {len(self.turns)}",
            fix="take a tokenizer whose template writes it, or leave such records out",
        )

    def _untold(self, number: int) -> UserError:
        return UserError(
            f"{self.name} does not tell where the assistant's turn {number + 1} of {len(self.turns)} begins and ends",
            fix=_ENCLOSE,
        )


def words(turn: Turn) -> str:
    """The text of a turn, also where its content is a list of parts."""
    content = turn.get("content")
    if isinstance(content, list | tuple):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


def _called(turn: Turn) -> list[Any]:
    """The names of the tools that a turn calls."""
    calls = turn.get("tool_calls")
    functions = [call.get("function", call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
    return [function.get("name") for function in functions if isinstance(function, Mapping)]


def _call(at: int) -> str:
    return f"{_CALL}{at}q"


def _probe(turn: Turn) -> Turn:
    """The turn with other words, and other names of tools."""
    probe, calls = dict(turn), turn.get("tool_calls")
    if words(turn).strip():
        probe["content"] = PROBE if isinstance(turn["content"], str) else [{"type": "text", "text": PROBE}]
    if _called(turn):
        functions = [{**call.get("function", call), "name": _call(at)} for at, call in enumerate(calls)]
        probe["tool_calls"] = [
            {**call, "function": function} if "function" in call else function
            for call, function in zip(calls, functions, strict=True)
        ]
    return probe


def inside(spans: Sequence[Span], ends: Sequence[int]) -> list[bool]:
    """Whether each of these ends lies in one of some spans, behind its first character."""
    firsts, most, lasts = [], 0, []
    for first, last in sorted(spans):
        most = max(most, last)
        firsts.append(first)
        lasts.append(most)
    places = [bisect_left(firsts, end) - 1 for end in ends]
    return [at >= 0 and end <= lasts[at] for at, end in zip(places, ends, strict=True)]
