"""The characters of a rendered conversation that the assistant says.

A template writes turn after turn in a loop. `numbered` changes it so that each round of that loop begins with a mark,
the number of its turn. Without the marks the text must equal the template's own; the marks show where each turn begins
and ends, even if the template ends a turn differently when others follow.

An answer begins where its generation prompt (`add_generation_prompt`) ends. Rendering a probe in place of an answer
shows what the template writes before and after the words, and that it writes them at all.

An answer ends with what the model must write for a server to stop: what the template writes behind it, `<|im_end|>`. If
that is nothing (GLM-4.5), the token by which the next turn begins ends it, `<|user|>` or `<|observation|>`.
"""

import re
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any

from fivefold.core.errors import UserError

Turn = Mapping[str, Any]  # in the form of templates: role, content, and other keys (tool_calls, ...)
Span = tuple[int, int]  # characters, the end excluded
Write = Callable[..., tuple[str, list[Span]]]

PROBE, _CALL = "qvxjzkanswer", "qvxjzkcall"  # letters alone, which no filter changes
_NUMBER = "fivefold_number"  # the key of a turn that holds its mark
_MARK = re.compile("\ue0f5([0-9]+)\ue0f6")  # characters that no text has
_LOOP = re.compile(
    r"\{#.*?#\}"  # a comment is no loop
    r"|\{%[-+]?\s*(?P<word>for|endfor)\b(?:\s+(?P<each>\w+)\s+in\b)?(?P<over>.*?)(?P<close>[-+]?%\})",
    re.DOTALL,
)
_HEAD = 8  # characters that identify the beginning of an answer
_FEW = 4  # up to this many answers each get a prompt rendered; beyond, one per kind of turn before
_FIX = "put {% generation %} and {% endgeneration %} around the answer in the template"


class Endless(UserError):
    """A template takes more time or memory than any conversation needs: no other rendering is tried."""


@lru_cache(64)
def numbered(source: str) -> str:
    """A template whose outermost loops begin each round with the mark of the current turn, if they loop over turns."""
    depth = 0

    def with_mark(tag: re.Match[str]) -> str:
        nonlocal depth
        depth += {"for": 1, "endfor": -1}.get(tag["word"], 0)
        if tag["word"] != "for" or depth > 1 or not tag["each"]:
            return tag[0]
        by_index = re.search(rf"\w+\[{tag['each']}\]", source[tag.end() :]) if "range(" in tag["over"] else None
        turn, opened = by_index[0] if by_index else tag["each"], tag[0].removesuffix(tag["close"])
        # The end of a tag controls the space after it; that end now belongs to the added tag.
        return f"{opened}%}}{{% if true %}}{{{{ {turn}['{_NUMBER}'] }}}}{{% endif {tag['close']}"

    return _LOOP.sub(with_mark, source)


def find_spans(
    write: Write, turns: Sequence[Turn], *, name: str, encloses: bool = False, marks: "Marks | None" = None
) -> tuple[str, dict[int, list[Span]]]:
    """The text of a conversation, and for each assistant turn the spans of its words, including the characters that end
    the turn. If the template `encloses` answers in `{% generation %}`, the spans are the enclosed ones, possibly
    several per turn.

    `write(turns, answer=False, is_numbered=False)` renders turns, with the template or its `numbered` form, and returns
    the enclosed spans. `name`: of the template, for messages. `marks`: see `Marks`. Raises `UserError` if a turn cannot
    be located.
    """
    text, enclosed = write(turns)
    own = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    whole = _Written.of(write, turns)
    starts = [whole.turns[number][0] for number in sorted(whole.turns)]
    is_in_order = encloses or starts == sorted(starts)  # an answer ends where the next turn begins
    if whole.text != text or not whole.turns.keys() >= set(own) or not is_in_order:
        if encloses and len(enclosed) == len(own):
            return text, {number: [span] for number, span in zip(own, enclosed, strict=True)}
        raise UserError(f"{name} does not write turn after turn, and so does not tell whose a text is", fix=_FIX)
    answers, questions = _Answers(write, turns, name, whole, marks or Marks()), dict[Any, str | None]()
    spans: dict[int, list[Span]] = {number: [] for number in own}
    for number, span in whole.enclosed:
        spans.setdefault(number, []).append(span)
    for number in own:
        answers.check(number, whole.part(number))
        if not encloses:
            before = turns[number - 1] if number else {}
            kind = number if len(own) <= _FEW else (before.get("role"), *sorted(before))
            if kind not in questions:
                questions[kind] = answers.question(number)
            spans[number] = [(answers.begin(number, questions[kind]), answers.end(number))]
        answers.check(number, "".join(text[first:last] for first, last in spans[number]))
    return text, spans


@dataclass(frozen=True)
class _Written:
    """A rendered conversation: the text without marks, the span of each turn in it, and the spans that the template
    encloses in `{% generation %}`, each with the number of its turn."""

    text: str
    turns: Mapping[int, Span]
    enclosed: Sequence[tuple[int, Span]]

    @classmethod
    def of(cls, write: Write, turns: Sequence[Turn], **options: Any) -> "_Written":
        with_numbers = [{**turn, _NUMBER: f"\ue0f5{at}\ue0f6"} for at, turn in enumerate(turns)]
        text, enclosed = write(with_numbers, is_numbered=True, **options)
        marks = list(_MARK.finditer(text))
        ends, removed = [mark.end() for mark in marks], [0, *accumulate(len(mark[0]) for mark in marks)]

        def place(at: int) -> int:
            return at - removed[bisect_right(ends, at)]

        starts = [place(end) for end in ends]
        stops = [*starts[1:], place(len(text))]
        numbers = [int(mark[1]) for mark in marks]
        owners = [([-1, *numbers][bisect_right(ends, first)], (place(first), place(last))) for first, last in enclosed]
        # A template may loop over the turns before it writes them: the last loop counts.
        places = dict(zip(numbers, zip(starts, stops, strict=False), strict=True))
        return cls(_MARK.sub("", text), places, owners)

    def part(self, number: int) -> str:
        return self.text[slice(*self.turns.get(number, (0, 0)))]


@dataclass(frozen=True)
class Marks:
    """`tokens`: texts that are single tokens, and may end an answer. `tail`: what the template writes between the words
    of an answer and the next turn; None if that is unknown."""

    tokens: tuple[str, ...] = ()
    tail: str | None = None

    @classmethod
    def of(cls, write: Write, tokens: tuple[str, ...], turns: Sequence[Turn]) -> "Marks":
        """`turns`: an answer that says the probe, between two others."""
        try:
            _, is_there, tail = _Written.of(write, turns).part(1).rpartition(PROBE)
        except Endless:
            raise
        except UserError:
            is_there = ""
        return cls(tokens, tail.strip() if is_there else None)

    def ends(self, said: str) -> bool:
        """True if a turn ends by itself: as answers do, or by another token, as calls (`<|call|>`)."""
        return self.tail is None or (self.tail != "" and said.endswith((self.tail, *self.tokens)))

    def first(self, text: str) -> str:
        """The token that a text begins with, after space; empty if there is none."""
        text = text.lstrip()
        return max((token for token in self.tokens if text.startswith(token)), key=len, default="")


@dataclass(frozen=True)
class _Answers:
    """A conversation: `whole`, and with a `probe` in place of each answer, rendered on demand."""

    write: Write
    turns: Sequence[Turn]
    name: str
    whole: _Written
    marks: Marks

    @cached_property
    def probe(self) -> _Written:
        """The conversation with other words and other names of tools."""
        return self._probed(len(self.turns))

    def _probed(self, most: int) -> _Written:
        own = (_probe(turn) if turn["role"] == "assistant" else turn for turn in self.turns[:most])
        return _Written.of(self.write, list(own))

    def question(self, number: int) -> str | None:
        """The generation prompt for an answer, after the turns before it; None if these cannot be rendered alone."""
        before, front = list(self.turns[:number]), self.whole.text[: self.whole.turns[number][0]]
        if all(turn["role"] in ("system", "developer") for turn in before):  # the assistant begins
            before.append({"role": "user", "content": PROBE})
        last = len(before) - 1
        try:
            asked = _Written.of(self.write, before, answer=True)
            if last < number and asked.text.startswith(front):
                return asked.text[len(front) :]
            # An earlier part renders differently without the answer. The last turn before it may still be unchanged.
            said = _Written.of(self.write, [*before, self.turns[number]]).part(last)
            behind = asked.text[asked.turns[last][0] :]
        except Endless:
            raise
        except (UserError, KeyError):
            return None
        return behind.removeprefix(said) if behind.startswith(said) else None

    def begin(self, number: int, question: str | None) -> int:
        """The first character of an answer: after the generation prompt, or after the common text before its words."""
        start, said = self.whole.turns[number][0], self.whole.part(number)
        if question is not None and said.startswith(question):
            return start + len(question)
        lead, is_there, _ = self.probe.part(number).partition(PROBE)
        if not is_there:  # only calls: locate where words would begin instead
            words_alone = [*self.turns[:number], {"role": "assistant", "content": PROBE}]
            lead, is_there, _ = _Written.of(self.write, words_alone).part(number).partition(PROBE)
        lead = lead[: alike(lead, said)]
        if question and question in lead:  # first turn: after the beginning of the text
            return start + lead.index(question) + len(question)
        # EOS may stand in front of the prompt alone: the prompt then ends with what the answer begins with.
        ends = (length for length in range(len(lead), 0, -1) if question and question.endswith(lead[:length]))
        shared = len(lead) if question is None else max(alike(lead, question), next(ends, 0))
        if not (shared if question else is_there):
            raise self._untold(number)
        return start + shared

    def end(self, number: int) -> int:
        """The end of a turn, including its end marker: the beginning of the next turn, after an end marker in front of
        it (Jamba), or the marker of that turn (GLM-4.5), or the end of the text."""
        start, stop = self.whole.turns[number]
        if number == len(self.turns) - 1:
            stop = len(self.whole.text) - len(self.asks_again)
        elif not self.whole.part(number + 1):  # left out, or inside this turn, as a tool's result by Gemma 4
            until = self.write(self.turns[: number + 1])[0].rstrip()
            if not self.whole.text.startswith(until):
                raise self._untold(number)
            stop = min(stop, len(until))
        elif self.whole.text.startswith(self.closing, stop):
            stop += 0 if self.whole.part(number).rstrip().endswith(self.closing) else len(self.closing)
        said = self.whole.text[start:stop].rstrip()
        is_ended = self.marks.ends(said) or (self.closing and said.endswith(self.closing))
        return start + len(said) if is_ended else self._with_mark(number, start + len(said))

    def _with_mark(self, number: int, end: int) -> int:
        """The end of a turn that the marker of the next one ends. Of two answers in a row the second one's does not: it
        asks for more."""
        following = (turn["role"] for at, turn in enumerate(self.turns) if at > number and self.whole.part(at))
        behind = self.whole.text[end:]
        mark = "" if next(following, "assistant") == "assistant" else self.marks.first(behind)
        is_all = behind.strip() == mark  # of a last turn that says nothing; behind the end of a text EOS is trained
        return end if is_all else end + behind.index(mark) + len(mark)

    @cached_property
    def closing(self) -> str:
        """The text after the words of the last answer if no turn follows; empty if there is none."""
        last = max(at for at, turn in enumerate(self.turns) if turn["role"] == "assistant")
        written = self.probe if last == len(self.turns) - 1 else self._probed(last + 1)
        _, is_there, tail = written.part(last).rpartition(PROBE)
        return tail.strip() if is_there else ""

    @cached_property
    def asks_again(self) -> str:
        """The prompt for another answer, if the template always writes it after the last turn (Command A)."""
        lead, is_there, tail = self.probe.part(len(self.turns) - 1).partition(PROBE)
        at = tail.find(lead.strip()[:_HEAD]) if is_there and lead.strip() else -1
        if at < 0 or not self.whole.text.endswith(tail[at:]):
            return ""
        asked = self.write(self.turns, answer=True)[0]
        return tail[at:] if len(asked) - len(self.whole.text) < len(lead.strip()) else ""

    def check(self, number: int, said: str) -> None:
        """Raise `UserError` if the template leaves out the assistant's words: an empty answer would be learnt."""
        turn = self.turns[number]
        called, says = [call["function"]["name"] for call in turn.get("tool_calls") or ()], words(turn).strip()
        if not called and says in said:
            return
        written = self.probe.part(number)
        calls = written.count(_CALL)
        if calls < len(called):
            raise UserError(
                f"turn {number + 1} calls the tool {called[calls]!r}, and {self.name} leaves out tool_calls",
                fix="take a tokenizer whose template writes them, or write the calls into the content of the turn",
            )
        is_empty = said.strip() in ("", written.rpartition(PROBE)[2].strip())
        if (says and PROBE not in written) or is_empty:
            raise UserError(
                f"{self.name} writes nothing of what the assistant says in turn {number + 1} of {len(self.turns)}",
                fix="take a tokenizer whose template writes it, or leave such records out",
            )

    def _untold(self, number: int) -> UserError:
        return UserError(
            f"{self.name} does not tell where the assistant's turn {number + 1} of {len(self.turns)} begins and ends",
            fix=_FIX,
        )


def words(turn: Turn) -> str:
    """The text of a turn, also where its content is a list of parts."""
    content = turn.get("content") or ""
    return content if isinstance(content, str) else "".join(str(part.get("text") or "") for part in content)


def _probe(turn: Turn) -> Turn:
    """The turn with other words, and other names of tools."""
    probe = dict(turn)
    if words(turn).strip():
        probe["content"] = PROBE if isinstance(turn["content"], str) else [{"type": "text", "text": PROBE}]
    if turn.get("tool_calls"):
        probe["tool_calls"] = [{**call, "function": {**call["function"], "name": _CALL}} for call in turn["tool_calls"]]
    return probe


def alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """The number of equal elements at the front."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))
