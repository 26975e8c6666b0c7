"""A tokenizer's chat template: from the turns of a conversation to the text that the model sees, and which of its
characters the assistant said.

Templates are Jinja. `transformers` renders them in a sandbox, in which they reach neither files nor Python.

Example, ChatML. Turns (user "2+2?", assistant "4") become

    <|im_start|>user\\n2+2?<|im_end|>\\n<|im_start|>assistant\\n4<|im_end|>\\n

of which `4<|im_end|>` is the assistant's: what it answers, and that it ends there.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.core.time_limit import TooLong, within
from fivefold.data.spans import Span, Turn, find_spans

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
BUILT_IN = "the built-in ChatML"
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
MOST_SECONDS = 30.0  # to write a conversation; one of 3,000 turns takes some milliseconds


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: the Jinja text, or several by name. `special`: names of special tokens -> how they are written.
    `name`: for messages."""

    source: str | Mapping[str, str] = CHATML
    special: Mapping[str, str] = field(default_factory=dict)
    name: str = BUILT_IN

    def text(self, tools: Sequence[Any] | None = None) -> str:
        """The Jinja text for a conversation with these tools. Raises `UserError` where none of several is for it."""
        from transformers import PreTrainedTokenizerBase

        read: Any = SimpleNamespace(chat_template=self.source)
        try:
            return str(PreTrainedTokenizerBase.get_chat_template(read, tools=tools))
        except ValueError as error:
            raise UserError(f"{self.name}: {error}", fix="name one of them `default`") from error

    @property
    def digest(self) -> str:
        """What identifies it."""
        return key_of(self.source, sorted(self.special.items()))

    def render(self, turns: Sequence[Turn], *, tools: Sequence[Any] | None = None, answer: bool = False) -> str:
        """The text of a conversation; with `answer`, up to where the assistant begins. Raises `UserError`."""
        return self._rendered(turns, tools, add_generation_prompt=answer)[0]

    def answers(self, turns: Sequence[Turn], *, tools: Sequence[Any] | None = None) -> tuple[str, dict[int, Span]]:
        """The text of a conversation, and of each turn of the assistant the characters that it says, with those that
        end its turn.

        A template may mark them itself (`{% generation %}`). Else they begin where a question for an answer ends, and
        end where the conversation up to there ends. A template that renders an early turn otherwise once there are
        later ones (Qwen3 leaves out what was thought) is asked where it puts a mark at the ends of the content.
        Raises `UserError` where that is not to be told.
        """
        own = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        if _MARKS_ANSWERS.search(self.text(tools)):
            text, marked = self._rendered(turns, tools, return_assistant_tokens_mask=True)
            if len(marked) != len(own):
                raise UserError(f"{self.name} marks {len(marked)} answers in a conversation of {len(own)}")
            return text, dict(zip(own, marked, strict=True))
        return find_spans(partial(self.render, tools=tools), turns, own, name=self.name)

    def _rendered(
        self, turns: Sequence[Turn], tools: Sequence[Any] | None, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with within(MOST_SECONDS):
                texts, marked = render_jinja_template(
                    conversations=[[dict(turn) for turn in turns]],
                    tools=None if tools is None else list(tools),
                    chat_template=self.text(tools),
                    **{**self.special, **options},
                )
            texts[0].encode("utf-8")  # Jinja can say half of a surrogate pair, which no tokenizer takes
        except TooLong as error:
            raise UserError(
                f"{self.name} is not done with a conversation of {len(turns)} turns after {MOST_SECONDS:g} s",
                fix="look for a loop in the template, or leave that conversation out",
            ) from error
        except Exception as error:  # of Jinja, of the template itself
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise UserError(f"{self.name} does not take the conversation: {said}") from error
        return texts[0], [(first, last) for first, last in (marked[0] if marked else [])]
