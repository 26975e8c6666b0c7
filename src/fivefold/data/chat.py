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
from pathlib import Path
from typing import Any

from fivefold.core import strict_json
from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.core.time_limit import TooLong, within
from fivefold.data.spans import Span, Turn, find_spans, words

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_MARKS_ANSWERS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_SPECIAL = ("bos_token", "eos_token", "pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
_MOST_BYTES = 2**20  # of a template; the longest known has some 10 kB
MOST_SECONDS = 30.0  # to write a conversation; one of 3,000 turns takes some milliseconds


@dataclass(frozen=True)
class ChatTemplate:
    """`source`: the Jinja text. `special`: names of special tokens -> how they are written. `name`: for messages."""

    source: str = CHATML
    special: Mapping[str, str] = field(default_factory=dict)
    name: str = "the built-in ChatML"

    @classmethod
    def of(cls, folder: Path) -> "ChatTemplate":
        """That of a tokenizer's folder, or ChatML where it has none. Raises `UserError` for one that cannot be read."""
        config = tokenizer_json(folder / "tokenizer_config.json")
        special = {name: text for name in _SPECIAL if (text := token_text(config.get(name)))}
        found = _read(folder / "chat_template.jinja") or _default(config.get("chat_template"))
        if found is None:
            return cls(special=special)
        return cls(found, special, f"the chat template of {folder}")

    @property
    def digest(self) -> str:
        """What identifies it."""
        return key_of(self.source, sorted(self.special.items()))

    def render(
        self, turns: Sequence[Turn], *, tools: Sequence[Any] | None = None, answer: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:  # fmt: skip
        """The text of a conversation; with `answer`, up to where the assistant begins. Raises `UserError`."""
        return self._rendered(turns, tools, **{**(chat_template_kwargs or {}), "add_generation_prompt": answer})[0]

    def answers(
        self, turns: Sequence[Turn], *, tools: Sequence[Any] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> tuple[str, dict[int, Span]]:  # fmt: skip
        """The text of a conversation, and of each turn of the assistant the characters that it says, with those that
        end its turn.

        A template may mark them itself (`{% generation %}`). Else they begin where a question for an answer ends, and
        end where the conversation up to there ends. A template that renders an early turn otherwise once there are
        later ones (Qwen3 leaves out what was thought) is asked where it puts a mark at the ends of the content.
        Raises `UserError` where that is not to be told.
        """
        own = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
        if _MARKS_ANSWERS.search(self.source):
            given = {**(chat_template_kwargs or {}), "return_assistant_tokens_mask": True}
            text, marked = self._rendered(turns, tools, **given)
            if len(marked) != len(own):
                raise UserError(f"{self.name} marks {len(marked)} answers in a conversation of {len(own)}")
            return text, dict(zip(own, marked, strict=True))
        render = partial(self.render, tools=tools, chat_template_kwargs=chat_template_kwargs)
        return find_spans(render, turns, own, name=self.name)

    def _rendered(
        self, turns: Sequence[Turn], tools: Sequence[Any] | None, **options: Any
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            with within(MOST_SECONDS):
                texts, marked = render_jinja_template(
                    conversations=[[{**turn, "content": words(turn)} for turn in turns]],
                    tools=None if tools is None else list(tools),
                    chat_template=self.source,
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


def _read(path: Path) -> str | None:
    if not path.is_file():
        return None
    if path.stat().st_size > _MOST_BYTES:
        raise UserError(f"{path}: more than {_MOST_BYTES >> 20} MiB", fix="copy the file from its origin again")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not readable: {error}", fix="copy the file from its origin again") from error


def tokenizer_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file of a tokenizer's folder; empty where there is none. Raises `UserError` for a file that
    cannot be read."""
    try:
        tree = strict_json.read_config(path)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not JSON: {error}", fix="copy the file from its origin again") from error
    return tree if isinstance(tree, dict) else {}


def token_text(token: Any) -> str | None:
    """How a special token is written, by what such a file says of it: a text, or an object with one."""
    content = token.get("content") if isinstance(token, Mapping) else token
    return content if isinstance(content, str) else None


def _is_default(template: Any) -> bool:
    return isinstance(template, Mapping) and template.get("name") == "default"


def _default(template: Any) -> str | None:
    """A folder may have several, with names."""
    if isinstance(template, str):
        return template
    several = template if isinstance(template, list) else []
    found = next((each.get("template") for each in several if _is_default(each)), None)
    return found if isinstance(found, str) else None
