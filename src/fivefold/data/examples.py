"""Records of conversations, and of prompts with their answers, as examples: a text, and which of it is trained.

| keys of a record | the text |
|---|---|
| `messages`, `conversations` (role and content, or from and value) | the tokenizer's chat template |
| `instruction` and `output`, with `input`, `system`; `question` and `answer` | the same, as two turns |
| `prompt` and `completion`, both texts | one after the other |
| `prompt` and `completion`, both lists of turns | the chat template; the answers of the completion are trained |
| `chosen` and `rejected`, texts or lists of turns, with or without `prompt` | a pair of the above with one beginning |
| any with an answer, and `label`, where the objective rates answers (kto) | it, and its prompt with another's answer |

An example is trained on what the assistant says. It is never cut over rows: what is longer than a row loses its end. A
pair of a chosen and a rejected answer is in one row as a whole; one that is longer than a row is left out.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from fivefold.core.errors import UserError
from fivefold.data.chat import ChatTemplate
from fivefold.data.spans import Span, Turn, inside, words

TrainOn = Literal["assistant", "all", "last"]

# What roles are called elsewhere -> what templates call them.
_ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "function_call": "assistant", "observation": "tool", "function": "tool", "function_response": "tool",
}  # fmt: skip
_KNOWN = ("system", "developer", "user", "assistant", "tool")


@dataclass(frozen=True)
class Example:
    """A record that is not rendered yet: `turns`, or `pair`, a prompt and its answer as plain texts. `where`: its
    place, for messages. `context`: so many turns at the front are trained under no circumstances. `tools`,
    `chat_template_kwargs`: what the template is given beside the turns."""

    where: str
    turns: tuple[Turn, ...] = ()
    pair: tuple[str, str] | None = None
    context: int = 0
    tools: tuple[Any, ...] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    train_on: TrainOn = "assistant"

    def __len__(self) -> int:
        """Characters, roughly."""
        return sum(map(len, self.pair or map(words, self.turns)))

    @property
    def plain(self) -> str:
        """All that is said in it, for a tokenizer to learn from."""
        return "\n".join(self.pair or map(words, self.turns))

    def rendered(self, template: ChatTemplate, eos: str) -> "Text":
        """Its text. `eos`: how the tokenizer writes the end of a document. Raises `UserError`."""
        if self.pair is not None:
            prompt, answer = self.pair
            text, spans = prompt + answer, [(len(prompt), len(prompt) + len(answer))]
        else:
            text, spans = self._chat(template)
        if self.train_on == "all":
            spans = [(0, len(text))]
        body = text.rstrip()
        ends = not body.endswith(eos)
        # An EOS will follow. Where it is trained, so is what stands between it and the answer: else nothing would teach
        # the model to get there.
        if ends and spans and spans[-1][1] >= len(body):
            spans[-1] = spans[-1][0], len(text)
        return Text(text, tuple(spans), ends=ends, by_template=self.pair is None)

    def _chat(self, template: ChatTemplate) -> tuple[str, list[Span]]:
        given: dict[str, Any] = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        try:
            text, answers = template.answers(self.turns, **given)
        except UserError as error:
            raise UserError(f"{self.where}: {error.what}", fix=error.fix, more="docs/data.md") from error
        trained = [
            spans
            for number, spans in sorted(answers.items())
            if number >= self.context and self.turns[number].get("weight", 1) != 0
        ]
        return text, [span for spans in (trained[-1:] if self.train_on == "last" else trained) for span in spans]


@dataclass(frozen=True)
class Preference:
    """Two answers to the same: each an example that is trained on the answer alone. The first is the chosen one; or it
    is `desirable` or not, and the second is the answer to something else."""

    first: Example
    second: Example
    desirable: bool | None = None

    def __len__(self) -> int:
        """Characters, roughly."""
        return len(self.first) + len(self.second)

    @property
    def plain(self) -> str:
        """All that is said in it, for a tokenizer to learn from."""
        return f"{self.first.plain}\n{self.second.plain}"


@dataclass(frozen=True)
class Rated:
    """An answer that is `desirable` or not: the turns of `example` behind its context, or the second of its texts."""

    example: Example
    desirable: bool

    def answered_by(self, other: "Rated") -> Example:
        """What was asked here, with the answer that was given there. Raises `UserError`."""
        own, others = self.example, other.example
        if (own.pair is None) != (others.pair is None):
            raise UserError(
                f"{own.where} holds {'turns' if own.turns else 'texts'} and {others.where} holds the other of the two",
                fix="write them to files of their own, and name each as a source",
            )
        if own.pair is not None and others.pair is not None:
            return replace(own, pair=(own.pair[0], others.pair[1]))
        return replace(own, turns=(*own.turns[: own.context], *others.turns[others.context :]))


Document = str | Example | Preference  # as a format gives it


def beside_others(answers: Iterable[Rated]) -> Iterator[Preference]:
    """Each rated answer of a file with that of the record before it; the first with that of the second. Raises
    `UserError` for one alone."""
    first: Rated | None = None
    before: Rated | None = None
    for each in answers:
        if first is not None and before is None:
            yield Preference(first.example, first.answered_by(each), first.desirable)
            before = first
        if before is not None:
            yield Preference(each.example, each.answered_by(before), each.desirable)
            before = each
        first = first or each
    if first is not None and before is None:
        raise UserError(
            f"{first.example.where}: one rated answer alone; kto compares with answers to other prompts",
            fix="add records",
        )


@dataclass(frozen=True)
class Text:
    """A document as it is tokenised. `trained`: spans of its characters; None: all of them. `ends`: EOS follows, if it
    is not there, and is trained where the last character is. `by_template`: a chat template wrote it, BOS too."""

    text: str
    trained: tuple[Span, ...] | None = None
    ends: bool = True
    by_template: bool = False

    def is_trained(self, ends: Sequence[int]) -> list[bool]:
        """Of tokens that end at these characters: a token is trained where its last character is. Example: of "Q: yes"
        with the answer "yes" the token " yes" is."""
        return inside(self.trained or (), ends)


def chat(
    where: str, turns: object, *, context: object = None, system: object = None, tools: object = None,
    train_on: TrainOn = "assistant",
) -> Example:  # fmt: skip
    """The example of a list of turns. `context`: turns before them that are not trained. `system`: the text of a first
    turn, where there is none. Raises `UserError`."""
    first, own = _turns(context, where) if context is not None else [], _turns(turns, where)
    if not own:
        raise UserError(f"{where}: a conversation without turns", fix="remove the record")
    told = "" if system is None else _string(system, where, "the system text")
    if told and (first or own)[0]["role"] not in ("system", "developer"):
        first = [{"role": "system", "content": told}, *first]
    return Example(where, (*first, *own), context=len(first), tools=_tools(tools, where), train_on=train_on)


def pair(where: str, prompt: object, answer: object, *, train_on: TrainOn = "assistant") -> Example:
    """The example of two texts, one of which goes on where the other ends. Raises `UserError`."""
    texts = _string(prompt, where, "the prompt"), _string(answer, where, "the answer")
    return Example(where, pair=texts, train_on=train_on)


def preference(
    where: str, chosen: object, rejected: object, *, prompt: object = None, system: object = None, tools: object = None,
    by_template: bool = False,
) -> Preference:  # fmt: skip
    """The pair of two answers, texts or lists of turns. Without a `prompt`, or where both lists repeat it, what both
    begin with is the prompt, up to a whole turn or a space. `by_template`: texts are turns too. Raises `UserError`."""
    answers = {"chosen": _turns_or_text(chosen), "rejected": _turns_or_text(rejected)}
    asked = _turns_or_text(prompt)
    if by_template or any(isinstance(each, list | tuple) for each in (asked, *answers.values())):
        said = {name: _said(answer, f"{where}, {name}") for name, answer in answers.items()}
        before: object = [{"role": "user", "content": asked}] if isinstance(asked, str) else asked
        least = max(0, min(map(len, said.values())) - 1)  # an answer has a turn, whatever it says
        both = said["chosen"][: min(_shared(said["chosen"], said["rejected"]), least)]
        if asked is None or (both and all(turn in both for turn in _turns(before, where))):
            before, said = both, {name: turns[len(both) :] for name, turns in said.items()}
        first, second = (chat(where, turns, context=before, system=system, tools=tools) for turns in said.values())
        return Preference(first, second)
    texts = [_string(answer, where, f"the {name} answer") for name, answer in answers.items()]
    if asked is None:
        shared = _shared(*texts)
        shared -= texts[0][:shared].endswith(" ")  # a space belongs to the word that it stands before
        asked, texts = texts[0][:shared], [text[shared:] for text in texts]
    told = "" if system is None else _string(system, where, "the system text")
    first, second = (
        pair(where, "\n\n".join(filter(None, (told, _string(asked, where, "the prompt")))), text) for text in texts
    )
    return Preference(first, second)


def _said(answer: object, where: str) -> list[Turn]:
    if isinstance(answer, list | tuple):
        return _turns(answer, where)
    return [{"role": "assistant", "content": _string(answer, where, "the answer")}]


def _shared(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many of their first elements are equal."""
    differ = (at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b)
    return next(differ, min(len(one), len(other)))


def history(value: object, where: str) -> list[Turn]:
    """The turns of pairs of what was asked and answered before. Raises `UserError`."""
    pairs = _parsed(value) or []
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs
    ):
        raise UserError(
            f"{where}: the history is no list of pairs", fix='[["what was asked", "what was answered"], ...]'
        )
    return [
        {"role": role, "content": said}
        for each in pairs
        for role, said in zip(("user", "assistant"), each, strict=True)
    ]


def _turns(value: object, where: str) -> list[Turn]:
    turns = _parsed(value)
    if not isinstance(turns, list | tuple):
        raise UserError(f"{where}: turns are a list, not {kind_of(turns)}", fix='[{"role": ..., "content": ...}]')
    return [_turn(each, f"{where}, turn {number}") for number, each in enumerate(turns, start=1)]


def _turn(value: object, where: str) -> Turn:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: {kind_of(value)}, not an object", fix='{"role": ..., "content": ...}')
    said = value.get("role", value.get("from"))
    role = _ROLES.get(str(said).lower(), str(said).lower())
    if role not in _KNOWN:
        raise UserError(f"{where}: there is no role {said!r}", fix=f"one of {', '.join(_KNOWN)}")
    content = value.get("content", value.get("value"))
    if isinstance(content, list):  # parts, as models of several senses take them
        if not all(isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content):
            raise UserError(f"{where}: not all of its parts are text", fix="leave such records out")
        content = [{**part, "text": encodable(part["text"], where)} for part in content]
    else:
        is_call = content is None and role == "assistant" and value.get("tool_calls")
        content = "" if is_call else _string(content, where, "its content")
    if value.get("weight", 1) not in (0, 1, None):
        raise UserError(f"{where}: its weight is {value['weight']!r}", fix="1 trains the turn, 0 does not")
    more = {
        key: each for key, each in value.items() if key not in ("role", "from", "content", "value") and each is not None
    }
    return {"role": role, "content": content, **more}


def _string(value: object, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {what} is {kind_of(value)}, not a string", fix="write it as a string")
    return encodable(value, f"{where}, {what}")


def encodable(text: str, where: str) -> str:
    """`text`. Raises `UserError` where it has half of a surrogate pair, which JSON can say and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half of a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start}",
            fix="it stands for no character; remove it or write the file again from its origin",
        ) from error
    return text


def kind_of(value: object) -> str:
    """How messages call what stands in the wrong place."""
    return "null" if value is None else f"a {type(value).__name__}"


def _tools(value: object, where: str) -> tuple[Any, ...] | None:
    tools = _parsed(value)
    if tools in (None, "", []):
        return None
    if not isinstance(tools, list | tuple):
        raise UserError(f"{where}: tools are a list, not {kind_of(tools)}", fix="write their JSON schemas in a list")
    return tuple(tools)


def _turns_or_text(value: object) -> object:
    """`value`, or the turns that a string of it writes as JSON; a text such as [1, 2] is a text."""
    found = _parsed(value)
    is_turns = isinstance(found, list) and bool(found) and all(isinstance(each, dict) for each in found)
    return found if is_turns else value


def _parsed(value: object) -> object:
    """What is written as JSON inside a string (a cell of CSV, of Parquet)."""
    if not isinstance(value, str) or not value.lstrip().startswith("["):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
