"""A tokenizer's chat template: renders the turns of a conversation to text, and locates the assistant's characters.

Templates are Jinja. `transformers` renders them in a sandbox without access to files and Python.

Example, ChatML. Turns (user "2+2?", assistant "4") become

    <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>\\n

in which `4<|im_end|>` is the assistant's: its answer, and the end of it.
"""

import json
import os
import re
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache, cached_property, partial
from inspect import signature
from types import FrameType, SimpleNamespace
from typing import Any

from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.data.spans import PROBE, Endless, Marks, Span, Turn, find_spans, numbered, words

# ---- time and memory limits for code from elsewhere ------------------------------------------------------------------


class TooLong(Exception):
    """The time limit has passed."""


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise `TooLong` in this context after so many seconds of CPU time: on a busy machine it takes longer. This ends
    Python code, and native code that lets signals through.

    Nothing is limited outside the main thread, where Python handles no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    is_over = False

    def late(number: int, _: FrameType | None) -> None:
        nonlocal is_over
        is_over = True
        raise TooLong

    before = signal.signal(signal.SIGPROF, late)
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        yield
    except Exception as error:
        if is_over:  # a library may turn the exception into another: Jinja rewrites tracebacks
            raise TooLong from error
        raise
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before or signal.SIG_DFL)


@cache
def _sizes(process: int) -> int:
    """Descriptor of this process's sizes, kept open: a limit is set for each of many conversations."""
    return os.open(f"/proc/{process}/statm", os.O_RDONLY)


@contextmanager
def with_memory(more: int) -> Iterator[None]:
    """Limit this process to `more` bytes of memory beyond what it has; `MemoryError` is raised beyond. Only in the main
    thread, so that no two undo each other's limit. Without /proc nothing is limited."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_AS)
    with suppress(OSError, ValueError):  # ValueError: the previous limit is lower
        most = int(os.pread(_sizes(os.getpid()), 32, 0).split()[0]) * resource.getpagesize() + more
        resource.setrlimit(resource.RLIMIT_AS, (most, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


# ---- templates -------------------------------------------------------------------------------------------------------

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILT_IN = "the built-in ChatML"
MOST_BYTES = 2**30  # extra memory to render a conversation
MOST_SECONDS = 4.0  # to render a conversation; 3,000 turns take some milliseconds
_ENCLOSES = re.compile(r"\{%[-+]?\s*generation\s*[-+]?%\}")
_TODAY = re.compile(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""")
_ASKED_AGAIN: tuple[Turn, ...] = tuple({"role": role, "content": PROBE} for role in ("user", "assistant", "user"))
_QUOTED = re.compile(f"""["']{PROBE}.?["']""")  # in a list, as Python or JSON writes it


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: the Jinja text, or several by name. `special`: names of special tokens -> their text. `name`: for
    messages. `tokens`: the texts of added tokens, which may end an answer. `stops`: those at which its
    model's generation config says to stop."""

    source: str | Mapping[str, str] = CHATML
    special: Mapping[str, str] = field(default_factory=dict)
    name: str = BUILT_IN
    tokens: tuple[str, ...] = ()
    stops: tuple[str, ...] = ()

    def text(self, tools: Sequence[Any] | None = None) -> str:
        """The Jinja text for a conversation with these tools. Raises `UserError` if none of several fits."""
        if isinstance(self.source, str):
            return self.source
        from transformers import PreTrainedTokenizerBase

        read: Any = SimpleNamespace(chat_template=self.source)
        given: Any = tools
        try:
            return str(PreTrainedTokenizerBase.get_chat_template(read, tools=given))
        except ValueError as error:
            raise UserError(f"{self.name}: {error}", fix="name one of them `default`") from error

    @property
    def digest(self) -> str:
        return key_of(self.source, sorted(self.special.items()))

    def on(self, day: date) -> "ChatTemplate":
        """The template with the current date fixed to `day`."""
        several = {"": self.source} if isinstance(self.source, str) else self.source
        dated = {name: _TODAY.sub(lambda now: repr(day.strftime(now[2])), text) for name, text in several.items()}
        return replace(self, source=dated[""] if isinstance(self.source, str) else dated)

    @with_memory(MOST_BYTES)
    def render(
        self, turns: Sequence[Turn], *, tools: Sequence[Any] | None = None, answer: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The text of a conversation; with `answer`, up to the beginning of the assistant's answer.
        `chat_template_kwargs`: further variables of the template. Raises `UserError`."""
        return self._write(self._in_form(turns), tools, chat_template_kwargs, answer=answer)[0]

    @with_memory(MOST_BYTES)
    def answers(
        self, turns: Sequence[Turn], *, tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[int, list[Span]]]:  # fmt: skip
        """The text of a conversation, and for each assistant turn the spans of its words, including the characters that
        end the turn: see `spans`. Raises `UserError` if they cannot be located."""
        write = partial(self._write, tools=tools, given=chat_template_kwargs)
        encloses = _ENCLOSES.search(self.text(tools)) is not None
        return find_spans(write, self._in_form(turns), name=self.name, encloses=encloses, marks=self._marks)

    @cached_property
    def ends(self) -> tuple[str, str] | None:
        """Trained ends behind the words of an answer that another turn follows, such as `<|im_end|>`, and behind
        those of the last; None if the template does not take a conversation of two questions."""
        try:
            text, spans = self.answers([{"role": role, "content": "ok"} for role in ("user", "assistant")] * 2)
        except Endless:
            raise
        except UserError:
            return None
        early, last = (text[spans[at][0][0] : spans[at][-1][1]].rpartition("ok")[2].strip() for at in (1, 3))
        return early, last

    def remarks(self) -> Iterator[str]:
        """Lines about answers whose end is not trained, or is no token, or the marker of another turn."""
        try:
            early, last = self.ends or ("unknown", "")
        except Endless:  # which other conversations need not be
            return
        if not early:
            how = "put it into {% generation %}" if _ENCLOSES.search(self.text()) else "write {{ eos_token }} there"
            yield f"the end of an answer that another turn follows is not trained: {self.name} writes none; {how}"
        elif self.ends and not last.startswith(early) and early not in self.stops:
            marker, unlike = ("", ", unlike the last") if last else ("the marker of the next turn, ", "")
            yield (
                f"{self.name} ends an answer by {marker}{early}{unlike}: a server stops there if eos_token_id in "
                "generation_config.json names it"
            )
        elif self.ends and self.tokens and not early.endswith(self.tokens):
            yield f"{self.name} ends an answer by {early!r}, which is no token: a server needs it as a stop string"

    def _in_form(self, turns: Sequence[Turn]) -> list[Turn]:
        """Convert turns to the form that the template takes: contents as texts or as lists of parts, call arguments as
        objects or as JSON."""
        found = [
            turn
            if turn.get("content") is None or isinstance(turn["content"], self._forms)
            else {**turn, "content": words(turn) if str in self._forms else [{"type": "text", "text": turn["content"]}]}
            for turn in turns
        ]
        calls = any(turn.get("tool_calls") for turn in turns)
        found = [_with_json(turn) for turn in found] if calls and self._takes_json else found
        return [{key: value for key, value in turn.items() if value is not None} for turn in found]

    @cached_property
    def _marks(self) -> Marks:
        return Marks.of(self._write, self.tokens, self._in_form(_ASKED_AGAIN)) if self.tokens else Marks()

    @cached_property
    def _takes_json(self) -> bool:
        """True if it takes call arguments only as JSON (DeepSeek-V3); other templates would write that as a string."""
        call = {"id": "0" * 9, "type": "function", "function": {"name": PROBE, "arguments": {}}}
        turns: list[Turn] = [
            {"role": "user", "content": ""},
            {"role": "assistant", "content": "", "tool_calls": [call]},
        ]
        return self._tried(turns) is None and self._tried([_with_json(turn) for turn in turns]) is not None

    @cached_property
    def _forms(self) -> tuple[type, ...]:
        """The supported types of contents; the template drops others, or writes their Python form."""
        parts = [{"type": "text", "text": f"{PROBE}{n}"} for n in range(2)]
        of_text, of_parts = (self._tried([{"role": "user", "content": content}]) or "" for content in (PROBE, parts))
        takes_parts = of_parts.count(PROBE) > 1 and not _QUOTED.search(of_parts)
        return (*[str] * (PROBE in of_text or not takes_parts), *[list] * takes_parts)

    @with_memory(MOST_BYTES)
    def _tried(self, turns: Sequence[Turn]) -> str | None:
        """The text of these turns; None if it does not take them."""
        try:
            return self._write(turns)[0]
        except Endless:
            raise
        except UserError:
            return None

    def _write(
        self, turns: Sequence[Turn], tools: Sequence[Any] | None = None, given: Mapping[str, Any] | None = None, *,
        answer: bool = False, is_numbered: bool = False,
    ) -> tuple[str, list[Span]]:  # fmt: skip
        """The text of `apply_chat_template`, and the spans that `{% generation %}` encloses."""
        from transformers.utils.chat_template_utils import render_jinja_template

        source, given = self.text(tools), given or {}
        if given and (own := sorted(given.keys() & _not_for_records())):
            raise UserError(
                f"chat_template_kwargs: {own[0]!r} is no variable that a record can set",
                fix="leave it out of the record",
            )
        try:
            with within(MOST_SECONDS):
                texts, enclosed = render_jinja_template(
                    conversations=[list(turns)],
                    tools=None if tools is None else list(tools),
                    chat_template=numbered(source) if is_numbered else source,
                    add_generation_prompt=answer,
                    return_assistant_tokens_mask=_ENCLOSES.search(source) is not None,
                    **{**self.special, **given},
                )
            texts[0].encode("utf-8")  # Jinja can write half of a surrogate pair, which no tokenizer takes
        except (TooLong, MemoryError) as error:
            most = f"after {MOST_SECONDS:g} s" if isinstance(error, TooLong) else f"with {MOST_BYTES >> 20:,} MiB"
            raise Endless(
                f"{self.name} is not done with a conversation of {len(turns)} turns {most}",
                fix="look for a loop in the template, or leave that conversation out",
            ) from error
        except Exception as error:  # from Jinja, or raised by the template itself
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"{self.name} does not take the conversation: {said}") from error
        return texts[0], [(first, last) for first, last in (enclosed[0] if enclosed else [])]


@cache
def _not_for_records() -> set[str]:
    """Variables and options of a rendering that are set elsewhere."""
    from transformers.utils.chat_template_utils import render_jinja_template

    return {"messages", *signature(render_jinja_template).parameters} - {"documents"}


def _with_json(turn: Turn) -> Turn:
    calls = [
        {**call, "function": {**call["function"], "arguments": json.dumps(arguments, ensure_ascii=False)}}
        if isinstance(arguments := call["function"].get("arguments"), Mapping)
        else call
        for call in turn.get("tool_calls") or ()
    ]
    return {**turn, "tool_calls": calls} if calls else turn
