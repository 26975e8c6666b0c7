"""Records of conversations, and of prompts with answers, as examples: a text, and the trained part of it.

| a record has | the text |
|---|---|
| a list of turns: role and content, from and value, or pairs, or alternating texts | the tokenizer's chat template |
| a question, as a text, and an answer | the same, as two turns; or concatenated, if both are plain |
| a list of turns, and an answer | the chat template; the answer is trained |
| two answers, one of them chosen | a pair of the above with one beginning |
| an answer rated desirable or not, for kto | it, and its prompt with another record's answer |

An example is trained on the words of the assistant. It is never cut over rows: beyond the length of a row its end is
dropped. A pair of a chosen and a rejected answer stays in one row; a pair longer than a row is left out.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, islice, pairwise
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fivefold.core.errors import UserError
from fivefold.core.units import many
from fivefold.data.chat import ChatTemplate
from fivefold.data.spans import Span, Turn, alike, words

TrainOn = Literal["assistant", "all", "last"]

# Names of questions and answers, in a record and in an exchange of a conversation.
ASKED = (
    "prompt", "instruction", "instructions", "question", "query", "problem", "input", "inputs", "user", "human",
)  # fmt: skip
ANSWERED = (
    "completion", "output", "outputs", "response", "answer", "answers", "solution", "generated_solution", "target",
    "targets", "reply", "generation", "demonstration", "assistant", "gpt", "bot",
)  # fmt: skip

_SAYS = (("system", ("system",)), ("user", ASKED), ("assistant", ANSWERED))
_CALL = "call"  # role of an assistant's turn with a tool call as content
# Role names of other formats -> those of templates.
_ROLES = {
    **dict.fromkeys(("human", "prompter"), "user"),
    **dict.fromkeys(("function_call", "tool_call"), _CALL),
    **dict.fromkeys(("gpt", "chatgpt", "bot", "model", "ai", "chatbot", "bing", "bard", "claude"), "assistant"),
    **dict.fromkeys(("observation", "function", "function_response", "tool_response"), "tool"),
}
_KNOWN = ("system", "developer", "user", "assistant", "tool")
_FUNCTION = '{"name": ..., "arguments": {...}}'
_TURN_KEYS = ("role", "from", "content", "value", "function_call", "tool_calls")
# Keys of a turn that are always used, and `tool_call_id`, which only links a result to its call.
_READ_KEYS = ("role", "content", "tool_calls", "weight", "tool_call_id")
_WEIGHTS = ("weight", "loss", "loss_weight", "train", "training")  # keys of several trainers: 0 leaves a turn untrained


@dataclass(frozen=True)
class Example:
    """A record that is not rendered yet: `turns`, or `pair`, a prompt and its answer as plain texts. `where`: its
    place, for messages. `context`: number of leading turns that are never trained. `tools`, `chat_template_kwargs`:
    further inputs of the template. `numbers`: of the record's numeric columns."""

    where: str
    turns: tuple[Turn, ...] = ()
    pair: tuple[str, str] | None = None
    context: int = 0
    tools: tuple[Any, ...] | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    train_on: TrainOn = "assistant"
    numbers: tuple[float, ...] = ()

    def __len__(self) -> int:
        """Approximate number of characters."""
        return sum(map(len, self.pair or map(words, self.turns)))

    @property
    def plain(self) -> str:
        return "\n".join(self.pair or map(words, self.turns))

    def rendered(self, template: ChatTemplate, eos: str) -> "Text":
        """Render its text. `eos`: the EOS token as text. Raises `UserError`."""
        if self.pair is not None:
            prompt, answer = self.pair
            if not answer.strip():
                raise self._empty("the answer")
            text, spans = prompt + answer, [(len(prompt), len(prompt) + len(answer))]
        else:
            text, spans = self._chat(template)
        if self.train_on == "all":
            spans = [(0, len(text))]
        body = text.rstrip()
        ends = not body.endswith(eos)
        # An EOS follows. If it is trained, so is the text between it and the answer: otherwise the model would never
        # learn to get there.
        if ends and spans and spans[-1][1] >= len(body):
            spans[-1] = spans[-1][0], len(text)
        left_out = () if self.pair else self._left_out(template, text)
        return Text(text, tuple(spans), ends=ends, by_template=self.pair is None, left_out=tuple(left_out))

    def _left_out(self, template: ChatTemplate, text: str) -> Iterator[str]:
        """The parts of the turns that are missing from the rendered text."""
        source, at = template.text(self.tools), 0
        for key in dict.fromkeys(key for turn in self.turns for key in turn):
            if key not in _READ_KEYS and not re.search(rf"\b{re.escape(key)}\b", source):
                yield repr(key)
        for turn in self.turns:
            content = turn.get("content") or ""
            for part in [content] if isinstance(content, str) else [part["text"] for part in content]:
                found = text.find(part.strip(), at)
                if found < 0 and part.strip() not in text and turn["role"] != "tool":  # which may be JSON
                    yield f"some of what the {turn['role']} says"
                at = max(at, found)

    def _chat(self, template: ChatTemplate) -> tuple[str, list[Span]]:
        given: dict[str, Any] = {"tools": self.tools, "chat_template_kwargs": self.chat_template_kwargs}
        try:
            text, answers = template.answers(self.turns, **given)
        except UserError as error:
            raise UserError(f"{self.where}: {error.what}", fix=error.fix, more="fivefold docs howto/data") from error
        trained = [number for number in sorted(answers) if number >= self.context]
        trained = [number for number in trained if self.turns[number].get("weight", 1) != 0]
        trained = trained[-1:] if self.train_on == "last" else trained
        for number in trained:
            written = "".join(text[first:last] for first, last in answers[number])
            # A template may enclose the marker by which a question begins.
            if self.turns[number]["role"] == "assistant" and _says_nothing(self.turns[number], written):
                raise self._empty(f"what the assistant says in turn {number + 1} of {len(self.turns)}")
        return text, [span for number in trained for span in answers[number]]

    def _empty(self, what: str) -> UserError:
        or_untrained = "" if self.pair else ", or leave the turn untrained: weight: 0"
        return UserError(
            f"{self.where}: {what} is empty, and would be learnt as an end without an answer",
            fix=f"write the answer, or leave the record out{or_untrained}",
            more="fivefold docs howto/data",
        )


def _says_nothing(turn: Turn, written: str) -> bool:
    """True if an answer has no words, no calls, and no other text (thoughts) that is `written`."""
    texts = [value.strip() for key, value in turn.items() if key != "role" and isinstance(value, str)]
    return not words(turn).strip() and not turn.get("tool_calls") and not any(one and one in written for one in texts)


@dataclass(frozen=True)
class Preference:
    """Two answers to the same prompt: each an example that is trained on the answer alone. The first is the chosen one;
    or it is rated `desirable` or not, and the second is the answer to another prompt."""

    first: Example
    second: Example
    desirable: bool | None = None

    def __len__(self) -> int:
        """Approximate number of characters."""
        return len(self.first) + len(self.second)

    @property
    def plain(self) -> str:
        return f"{self.first.plain}\n{self.second.plain}"


@dataclass(frozen=True)
class Rated:
    """An answer that is `desirable` or not: the turns of `example` after its context, or the second of its texts."""

    example: Example
    desirable: bool

    def answered_by(self, other: "Rated") -> Example:
        """This question with the answer of `other`. Raises `UserError`."""
        own, others = self.example, other.example
        if (own.pair is None) != (others.pair is None):
            raise UserError(
                f"{own.where} holds {'turns' if own.turns else 'texts'} and {others.where} holds the other of the two",
                fix="write them to files of their own, and name each as a source",
            )
        if own.pair is not None and others.pair is not None:
            return replace(own, pair=(own.pair[0], others.pair[1]))
        return replace(own, turns=(*own.turns[: own.context], *others.turns[others.context :]))


class NumberedText(str):
    """A text with the numbers of its record's numeric columns."""

    numbers: tuple[float, ...] = ()


@dataclass(frozen=True)
class TokenIds:
    """A document of token ids, integers [tokens], and its place for messages. `trained`: a mask of the trained tokens;
    None: all of them, of a document that may be cut over rows. `is_whole`: BOS and EOS belong around it. `is_packed`:
    it is one of a packed row. `tokenizer`: the name of the tokenizer that made it, if it is told."""

    where: str
    ids: NDArray[np.integer]
    trained: NDArray[np.bool_] | None = None
    is_whole: bool = True
    numbers: tuple[float, ...] = ()
    tokenizer: str = ""
    is_packed: bool = False

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def plain(self) -> str:
        """Raises `UserError`: it has no text to train a tokenizer on."""
        raise UserError(
            f"{self.where}: token ids hold no text to train a tokenizer on",
            fix="set tokenizer.name_or_path to the tokenizer that made them",
        )


Document = str | Example | Preference | TokenIds  # as formats yield it


def plain(document: Document) -> str:
    return document if isinstance(document, str) else document.plain


def beside_others(answers: Iterable[Rated]) -> Iterator[Preference]:
    """Pair each rated answer of a file with the answer of the record before it; the first with that of the second.
    Raises `UserError` for a single record."""
    answers = iter(answers)
    first = list(islice(answers, 2))
    if len(first) == 1:
        raise UserError(
            f"{first[0].example.where}: one rated answer alone; kto compares with answers to other prompts",
            fix="add records",
        )
    for before, answer in pairwise(chain(first[1:], first, answers)):
        yield Preference(answer.example, answer.answered_by(before), answer.desirable)


@dataclass(frozen=True)
class Text:
    """A document as it is tokenised. `trained`: spans of its characters; None: all of them. `ends`: append EOS if it is
    missing, trained if the last character is. `by_template`: rendered by a chat template, including BOS; `left_out`:
    the parts of the turns that it omitted."""

    text: str
    trained: tuple[Span, ...] | None = None
    ends: bool = True
    by_template: bool = False
    left_out: tuple[str, ...] = ()

    def is_trained(self, spans: NDArray[np.int64]) -> NDArray[np.bool_]:
        """A mask of trained tokens, given their characters, int64 [tokens, 2]: a token is trained if one of them is, as
        by `return_assistant_tokens_mask`. Example: in "Q: yes" with the answer "yes", the token " yes" is trained."""
        trained = [span for span in self.trained or () if span[0] < span[1]]
        firsts, lasts = np.array(sorted([(-1, -1), *trained])).T
        begins, ends = spans.T
        begins = np.minimum(begins, ends - 1)  # a token without characters counts as the one before its place
        return np.asarray(np.maximum.accumulate(lasts)[np.searchsorted(firsts, ends) - 1] > begins)


def chat(where: str, turns: object, *, train_on: TrainOn = "assistant", **beside: object) -> Example:
    """The example of a list of turns. `beside`: `history`, the turns before them; `system`, the text of a first turn if
    they lack one; `tools` and `chat_template_kwargs` for the template. Raises `UserError`."""
    return _example(where, [], _turns(turns, where), train_on, **beside)


def answered(
    where: str, asked: object, answers: Sequence[object], *, by_template: bool, train_on: TrainOn = "assistant",
    **beside: object,
) -> list[Example]:  # fmt: skip
    """The examples of one answer, or of a chosen and a rejected one, to one question: texts or turns. Texts are
    concatenated, unless `by_template`. `asked` None: the common beginning of both answers, up to a whole turn or a
    space. `beside`: as in `chat`. Raises `UserError`."""
    asked = _turns_or_text(asked)
    said = [_turns_or_text(answer, calls=bool(beside.get("tools"))) for answer in answers]
    names = ("the answer",) if len(said) == 1 else ("the chosen answer", "the rejected answer")
    if not by_template and not any(isinstance(text, list) for text in (asked, *said)):
        texts = [_string(answer, where, name) for answer, name in zip(said, names, strict=True)]
        found = _texts(asked, texts, beside.get("system"), where)
        return [Example(where, pair=pair, train_on=train_on) for pair in found]
    turns = [
        _said("assistant", text, f"{where}, {name}", is_whole=asked is None)
        for text, name in zip(said, names, strict=True)
    ]
    before = [] if asked is None or (asked == "" and len(said) == 2) else _said("user", asked, where)
    if len(turns) == 2:
        before, turns = _apart(before, turns, where)
    is_context = len(turns) == 2 or isinstance(asked, list)
    both = [(before, turn) if is_context else ([], [*before, *turn]) for turn in turns]
    return [_example(where, context, own, train_on, **beside) for context, own in both]


def _example(
    where: str, context: list[Turn], own: list[Turn], train_on: TrainOn, *, history: object = None,
    system: object = None, tools: object = None, chat_template_kwargs: object = None,
) -> Example:  # fmt: skip
    if not own:
        raise UserError(f"{where}: a conversation without turns", fix="remove the record")
    earlier = _turns(history or [], f"{where}, history")
    if earlier and earlier[-1]["role"] == (context or own)[0]["role"] == "user":
        raise UserError(f"{where}: the history ends with a question", fix="write its answer, or leave the question out")
    context, own = ([*earlier, *context], own) if context else ([], [*earlier, *own])
    told = "" if system is None else _string(system, where, "the system text")
    if told and (context or own)[0]["role"] not in ("system", "developer"):
        context = [{"role": "system", "content": told}, *context]
    options = _parsed(chat_template_kwargs) or {}
    if not isinstance(options, Mapping):
        raise UserError(f"{where}: chat_template_kwargs are an object, not {kind_of(options)}", fix="{NAME: VALUE}")
    return Example(
        where, (*context, *own), context=len(context), tools=_tools(tools, where), chat_template_kwargs=options,
        train_on=train_on,
    )  # fmt: skip


def _texts(asked: object, answers: list[str], system: object, where: str) -> list[tuple[str, str]]:
    """A prompt with each of the answers."""
    if asked is None:
        shared = alike(*answers)
        if not all(text[shared:].strip() for text in answers):  # one is the beginning of the other
            shared = max(0, answers[0].rstrip().rfind(" ", 0, shared))
        shared -= answers[0][:shared].endswith(" ")  # a space belongs to the following word
        asked, answers = answers[0][:shared], [text[shared:] for text in answers]
    told = "" if system is None else _string(system, where, "the system text")
    prompt = "\n\n".join(filter(None, (told, _string(asked, where, "the prompt"))))
    return [(prompt, answer) for answer in answers]


def _apart(before: list[Turn], said: list[list[Turn]], where: str) -> tuple[list[Turn], list[list[Turn]]]:
    """Separate the turns before two answers from the answers. If both answers repeat the turns before them, or there
    are none, their common beginning is moved there. Raises `UserError` if both begin with another question."""
    least = max(0, min(map(len, said)) - 1)  # an answer has at least one turn
    both = said[0][: min(alike(*said), least)]
    repeats = before[: len(both)] == both or all(turn in both for turn in before)
    if both and before and not repeats:
        common = max((n for n in range(len(both) + 1) if n and before[-n:] == both[:n]), default=0)
        if not common and before[-1]["role"] == "user" and both[0]["role"] != "assistant":
            raise UserError(
                f"{where}: the question of both answers, {words(both[0])[:80]!r}, is not that of the prompt",
                fix="leave one of the two out, as by columns: {chosen: KEY, rejected: KEY}",
            )
        return [*before, *both[common:]], [turns[len(both) :] for turns in said]
    if both:
        return both, [turns[len(both) :] for turns in said]
    return before[: -len(said[0])] if before[-len(said[0]) :] == said[0] else before, said


def _said(role: str, what: object, where: str, *, is_whole: bool = False) -> list[Turn]:
    """The turns in a list or in a text; `is_whole`: it is a whole conversation. Raises `UserError` for texts in a list
    that are alternative answers, or records in columns, and no turns."""
    turns = _turns(what if isinstance(what, list) else [{"role": role, "content": what}], where)
    are_texts = isinstance(what, list) and bool(what) and all(isinstance(text, str) for text in what)
    if are_texts and (turns[-1]["role"] != role or (role == "assistant" and not is_whole)):
        raise UserError(
            f"{where}: {many(len(turns), 'text')} in a list, and which is meant is not to be told",
            fix='write one of them, or turns: [{"role": ..., "content": ...}]',
        )
    return turns


# ---- turns -----------------------------------------------------------------------------------------------------------


def _turns(value: object, where: str) -> list[Turn]:
    turns = _parsed(value)
    lists = list(turns.values()) if isinstance(turns, Mapping) else []  # one list per key, as `datasets` stores them
    if lists and all(isinstance(column, list) and len(column) == len(lists[0]) for column in lists):
        turns = [dict(zip(turns, values, strict=True)) for values in zip(*lists, strict=True)]
    if not isinstance(turns, list | tuple):
        raise UserError(
            f"{where}: turns are a list, not {kind_of(turns)}",
            fix='write [{"role": ..., "content": ...}]; a column of texts is named by text_key',
        )
    places = [(turn, f"{where}, turn {number}") for number, turn in enumerate(turns, start=1)]
    return [
        _turn(message, place)
        for number, (turn, place) in enumerate(places)
        for message in _exchange(turn, "assistant" if number % 2 else "user")
    ]


def _exchange(turn: object, role: str) -> list[object]:
    """The turns of a pair, of a question-answer object, of a text said by `role`, or a single turn."""
    if isinstance(turn, str):
        return [{"role": role, "content": turn}]
    said: list[tuple[str, object]] = []
    if isinstance(turn, list | tuple) and len(turn) == 2:
        said = [("user", turn[0]), ("assistant", turn[1])]
    if isinstance(turn, Mapping) and "role" not in turn and "from" not in turn:
        given = {name.lower(): value for name, value in turn.items() if value is not None}
        said = [(role, given.pop(name)) for role, names in _SAYS for name in names if name in given]
        said = [] if given else said  # other keys: no exchange
    is_exchange = [role for role, _ in said][-2:] == ["user", "assistant"]
    return [{"role": role, "content": text} for role, text in said] if is_exchange else [turn]


def _turn(value: object, where: str) -> Turn:
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: {kind_of(value)}, not an object", fix='{"role": ..., "content": ...}')
    said = value.get("role") or value.get("from")
    role = _ROLES.get(str(said).lower(), str(said).lower())
    content = value["content"] if value.get("content") is not None else value.get("value")
    calls = value.get("tool_calls") or value.get("function_call")
    if role == _CALL:
        role, content, calls = "assistant", "", content
    if role not in _KNOWN:
        what = f"there is no role {said!r}" if said else f"no turn; its keys are {', '.join(map(repr, value))}"
        raise UserError(f"{where}: {what}", fix=f"a turn has content and a role, one of {', '.join(_KNOWN)}")
    if content is None and role == "assistant" and calls:
        content = ""
    weights = {name: value[name] for name in _WEIGHTS if value.get(name) is not None}
    if name := next((name for name, weight in weights.items() if weight not in (0, 1)), None):
        raise UserError(f"{where}: its {name} is {weights[name]!r}", fix="1 trains the turn, 0 does not")
    unknown = (key for key in value if key not in (*_TURN_KEYS, *_WEIGHTS) and value[key] is not None)
    more = {key: value[key] for key in unknown} | ({"weight": min(weights.values())} if weights else {})
    called = {"tool_calls": _calls(calls, where)} if calls else {}
    return {"role": role, "content": _content(content, where), **called, **more}


def _content(content: object, where: str) -> object:
    """A text, or a list of text parts, as multimodal models take them."""
    if not isinstance(content, list):
        return _string(content, where, "its content")
    for part in content:
        if not isinstance(part, Mapping) or not isinstance(part.get("text"), str):
            kind = part.get("type") if isinstance(part, Mapping) else kind_of(part)
            raise UserError(f"{where}: a part of its content is {kind!r}, not text", fix="leave such records out")
    return [{"type": "text", "text": _string(part["text"], where, "its content")} for part in content]


def _calls(value: object, where: str) -> list[Any]:
    """Tool calls in the form of templates, from one or several calls, with or without their wrapper."""
    calls = _parsed(value)
    found = [_call(call) for call in (calls if isinstance(calls, list | tuple) else [calls])]
    if not all(found):
        raise UserError(f"{where}: it calls no tool by name: {str(value)[:80]!r}", fix=f"write {_FUNCTION}")
    return found


def _call(value: object) -> dict[str, Any] | None:
    call = _wrapped(value) or {}
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        return None
    written = {"arguments": _parsed(function["arguments"])} if "arguments" in function else {}
    return {**call, "function": {**function, **written}}


def _wrapped(value: object) -> dict[str, Any] | None:
    """A call or a tool as `{"type": "function", "function": ...}`, the form of templates for both."""
    if not isinstance(value, Mapping):
        return None
    if "name" not in value:
        return {**({"type": "function"} if "function" in value else {}), **value}
    around = {"type": "function", **{key: item for key, item in value.items() if key in ("id", "index")}}
    return {**around, "function": {key: item for key, item in value.items() if key not in around}}


def _tools(value: object, where: str) -> tuple[Any, ...] | None:
    tools = _parsed(value)
    if tools in (None, "", []):
        return None
    tools = [tools] if isinstance(tools, Mapping) else tools
    if not isinstance(tools, list | tuple):
        raise UserError(f"{where}: tools are a list, not {kind_of(tools)}", fix="write their JSON schemas in a list")
    return tuple(_wrapped(_parsed(tool)) or tool for tool in tools)


# ---- values ----------------------------------------------------------------------------------------------------------


def _string(value: object, where: str, what: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"{where}: {what} is {kind_of(value)}, not a string", fix="write it as a string")
    return encodable(value, f"{where}, {what}")


def encodable(text: str, where: str) -> str:
    """Return `text`. Raises `UserError` for half of a surrogate pair, which JSON can contain and no tokenizer takes."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where}: half of a surrogate pair, \\u{ord(text[error.start]):04x}, at character {error.start}",
            fix="it stands for no character; remove it or write the file again from its origin",
        ) from error
    return text


def kind_of(value: object) -> str:
    """The name of a misplaced value's type, for messages."""
    return "null" if value is None else f"a {type(value).__name__}"


def _turns_or_text(value: object, *, calls: bool = False) -> object:
    """`value`, or the turns in it, also in a JSON string; a text such as [1, 2] stays a text. `calls`: also accept tool
    calls, as one turn."""
    found = _parsed(value)
    found = [found] if isinstance(found, Mapping) else found
    if not isinstance(found, list | tuple) or not found or not all(isinstance(part, Mapping) for part in found):
        return value
    if calls and all({"name", "arguments"} <= part.keys() for part in found):
        return [{"role": "function_call", "content": list(found)}]
    is_turns = not isinstance(value, str) or all("role" in part or "from" in part for part in found)
    return list(found) if is_turns else value


def _parsed(value: object) -> Any:
    """The JSON value of a string (a cell of CSV or Parquet), or the value itself."""
    if not isinstance(value, str) or not value.lstrip().startswith(("[", "{")):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
