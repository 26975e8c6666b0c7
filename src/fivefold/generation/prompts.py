"""Prompts: a file of them, answered in batches (one JSON object per prompt, in the order of the file), and
conversations, whose turns go through the tokenizer's chat template and reuse the cache of earlier ones.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from fivefold.core import strict_json
from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.core.files import writing
from fivefold.data import examples
from fivefold.data.chat import ChatTemplate
from fivefold.data.spans import Turn
from fivefold.generation import GenerateRequest
from fivefold.generation.decode import KvCache, decode_rows, ready
from fivefold.generation.opened import OpenModel
from fivefold.generation.sampling import Sampling
from fivefold.generation.text import StoppedText, pieces
from fivefold.launch.world import World
from fivefold.parallel.plain import check_alike, of_first

_MORE = "fivefold docs howto/generate"


@dataclass(frozen=True)
class Prompt:
    """`ids`: its tokens. `given`: its record, for the result. `ends`, `stop`: tokens and texts that end the answer."""

    ids: Sequence[int]
    given: Mapping[str, Any]
    ends: Sequence[int]
    stop: Sequence[str]


@dataclass
class Answer:
    """The text and the number of its `tokens`, including the one that ended it; `is_over`: it ended by itself."""

    stream: StoppedText
    parts: list[str] = field(default_factory=list)
    tokens: int = 0
    is_over: bool = False

    @property
    def text(self) -> str:
        """The whole text, once there are no more tokens."""
        return "".join(self.parts)


def answer_file(opened: OpenModel, request: GenerateRequest, world: World) -> None:
    """Answer the prompts of `request.prompts` over a joined world; every rank calls this, and the first one writes to
    `request.out`, or to standard output. Raises `UserError`, naming the line, before any computation."""
    prompts = read_prompts(opened, request)
    check_alike(lambda: {f"the hash of {request.prompts}": key_of([prompt.given for prompt in prompts])})
    with _out(request) if request.out and world.is_first else nullcontext(sys.stdout) as file:
        for first in range(0, len(prompts), request.batch_size):
            batch = prompts[first : first + request.batch_size]
            for prompt, found in zip(batch, answers(opened, batch, request, first=first), strict=True):
                result = {
                    **prompt.given, "completion": found.text, "finish_reason": "stop" if found.is_over else "length",
                    "prompt_tokens": len(prompt.ids), "completion_tokens": found.tokens,
                }  # fmt: skip
                if world.is_first:
                    file.write(f"{json.dumps(result, ensure_ascii=False)}\n")
            if world.is_first:
                file.flush()


@contextmanager
def _out(request: GenerateRequest) -> Iterator[TextIO]:
    """The output file `request.out`: an older file stays until the last answer is written, and answers of an
    interrupted run stay in `FILE.part`. Devices and pipes are written directly, and links are followed. Raises
    `UserError` if it cannot be written."""
    path = Path(str(request.out))
    is_replaced = path.is_file() or not path.exists()
    place = Path(os.path.realpath(path)) if is_replaced else path
    written = place.with_name(f"{place.name}.part") if is_replaced else path
    with writing(path, instead="name another file: --out FILE"):
        place.parent.mkdir(parents=True, exist_ok=True)
        with written.open("w", encoding="utf-8") as file:
            yield file
        if is_replaced:
            written.replace(place)


def answers(opened: OpenModel, prompts: Sequence[Prompt], request: GenerateRequest, *, first: int = 0) -> list[Answer]:
    """The answers to prompts, computed in one batch. `first`: the number of the first one; each prompt is drawn with
    `request.seed` plus its number."""
    found = [Answer(StoppedText(opened.tokenizer, prompt.stop)) for prompt in prompts]
    steps = decode_rows(
        opened.model, [prompt.ids for prompt in prompts], max_new_tokens=request.max_new_tokens,
        sampling=Sampling(**request.drawing), is_over=partial(_take, prompts, found),
        seeds=[request.seed + first + number for number in range(len(prompts))],
    )  # fmt: skip
    with ready(opened.model):
        for _ in steps:
            pass
    for answer in found:
        answer.parts.append(answer.stream.finish())
    return found


def _take(prompts: Sequence[Prompt], found: Sequence[Answer], number: int, token: int) -> bool:
    """Add a token to its answer. Returns True if the answer is over."""
    answer = found[number]
    answer.tokens += 1
    answer.is_over = token in prompts[number].ends
    if not answer.is_over:
        answer.parts.append(answer.stream.push(token))
        answer.is_over = answer.stream.is_over
    return answer.is_over


def read_prompts(opened: OpenModel, request: GenerateRequest) -> list[Prompt]:
    """The prompts of a file: its lines, or for .jsonl the `prompt` or the `messages` of each record."""
    path = Path(str(request.prompts))
    try:
        options: dict[str, Any] = {"chat": request.chat, "system": request.system, "stop": request.stop}
        found = [prompt_of(opened, record, where, **options) for record, where in read_records(path)]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}", fix="a text file, one prompt a line", more=_MORE) from error
    if not found:
        raise UserError(f"{path} has no prompts", fix="write one a line", more=_MORE)
    return found


def read_records(path: Path) -> Iterator[tuple[dict[str, Any], str]]:
    """The record of each line of a file, and its place. Raises `UserError`, `OSError`, `UnicodeDecodeError`."""
    lines = path.read_text(encoding="utf-8-sig").split("\n")  # `splitlines` splits at other characters, too
    texts = (({"prompt": line}, f"{path}, line {n}") for n, line in enumerate(lines, 1) if line.strip())
    yield from _records(path, lines) if path.suffix in (".jsonl", ".json", ".ndjson") else texts


def _records(path: Path, lines: Sequence[str]) -> Iterator[tuple[dict[str, Any], str]]:
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            record = strict_json.loads(line)  # NaN would be copied to the answers
        except ValueError as error:
            raise UserError(f"{where}: not JSON: {error}", fix='{"prompt": "..."} on each line', more=_MORE) from error
        if not isinstance(record, dict) or len({"prompt", "messages"} & set(record)) != 1:
            raise UserError(
                f"{where}: not an object with one of 'prompt' and 'messages'", fix='{"prompt": "..."}', more=_MORE
            )
        examples.encodable(json.dumps(record, ensure_ascii=False), where)  # the whole record is written with the answer
        yield record, where


@contextmanager
def _at(where: str) -> Iterator[None]:
    """Add the place of a record to its errors."""
    try:
        yield
    except UserError as error:
        raise UserError(f"{where}: {error.what}", fix=error.fix, more=_MORE) from error


def prompt_of(
    opened: OpenModel, record: dict[str, Any], where: str, *,
    chat: bool = False, system: str | None = None, stop: Sequence[str] = (),
) -> Prompt:  # fmt: skip
    """The prompt of a record with `prompt` or `messages`; `chat`: a text is a user's turn, too. `system`: the system's
    turn of conversations without one; `stop`: more texts that end the answer. Raises `UserError` naming `where`."""
    said = record.get("messages", record.get("prompt"))
    if isinstance(said, str) and not chat:
        text = examples.encodable(said, where)
        with _at(where):
            return Prompt(opened.prompt(text)[0].tolist(), record, opened.ends, (*stop, *opened.stop))
    turns = [{"role": "user", "content": said}] if isinstance(said, str) else said
    example = examples.chat(where, turns, system=record.get("system", system), tools=record.get("tools"))
    if example.turns[-1]["role"] == "assistant":
        raise UserError(f"{where}: the last turn is the assistant's", fix="leave it out: it is to be written")
    ends, of_template = endings(opened)
    with _at(where):
        ids = asked_ids(opened, example.turns, example.tools)
    return Prompt(ids, record, ends, (*stop, *of_template))


# ---- conversations ---------------------------------------------------------------------------------------------------


HELP = "/reset forgets what was said, /exit ends (so do Ctrl-D and Ctrl-C)"


def asked_ids(opened: OpenModel, turns: Sequence[Turn], tools: Sequence[Any] | None = None) -> list[int]:
    """The tokens of a conversation up to the beginning of the assistant's answer: those of `apply_chat_template`, as in
    training. Raises `UserError`."""
    text = opened.info.template.render(turns, tools=tools, answer=True)
    if not (ids := opened.encode(text)):
        raise UserError(f"{opened.info.template.name} writes nothing of the conversation", fix="leave --chat out")
    return ids


def end_of_turn(template: ChatTemplate) -> str:
    """The end marker of a template's answers, such as `<|im_end|>`; empty if unknown. Extra text after the last answer
    is left out if it begins with the marker of earlier answers (Phi-3), and so is its lack (GLM-4.5)."""
    early, last = template.ends or ("", "")
    return early if not last or (early and last.startswith(early)) else last


def endings(opened: OpenModel) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Tokens and texts that end an answer, including the template's end of a turn."""
    ending = end_of_turn(opened.info.template)
    ids = opened.tokenizer.encode(ending, add_special_tokens=False).ids if ending else []
    if len(ids) == 1:
        return (*opened.ends, ids[0]), opened.stop
    return opened.ends, (*opened.stop, ending) if ending else opened.stop


class Chat:
    """A conversation of a user with a model. Every rank has one, and makes the same calls."""

    def __init__(self, opened: OpenModel, request: GenerateRequest) -> None:
        self.opened, self.request, self.seen = opened, request, KvCache()
        self.ends, stop = endings(opened)
        self.stop = (*request.stop, *stop)
        self.turns: list[Turn] = []
        self.reset()

    def reset(self) -> None:
        """Forget the conversation."""
        system = self.request.system
        self.turns = [] if system is None else [{"role": "system", "content": system}]

    def answer(self, text: str) -> Iterator[str]:
        """Stream the answer to the user's text; then both join the conversation. Raises `UserError` for a conversation
        that the template does not take, and leaves it unchanged."""
        turns = [*self.turns, {"role": "user", "content": text}]
        ids, said = torch.tensor([asked_ids(self.opened, turns)]), []
        for piece in pieces(
            self.opened.model, self.opened.tokenizer, ids, self.ends, stop=self.stop, seen=self.seen,
            max_new_tokens=self.request.max_new_tokens, seed=self.request.seed + len(turns) // 2,
            **self.request.drawing,
        ):  # fmt: skip
            said.append(piece)
            yield piece
        self.turns = [*turns, {"role": "assistant", "content": "".join(said)}]


def converse(chat: Chat, world: World, lines: Iterator[str], write: Callable[[str], object]) -> None:
    """Answer line after line until `/exit` or the end. The first rank reads `lines` and passes answers to `write`."""
    show = write if world.is_first else lambda text: None
    shows_prompt = world.is_first and sys.stdout.isatty()
    if shows_prompt:
        show(f"{HELP}\n")
    while True:
        if shows_prompt:
            show("> ")
        line = of_first(next(lines, None) if world.is_first else None)
        if line is None or line.strip() == "/exit":
            if line is None and shows_prompt:
                show("\n")
            return
        if line.strip() == "/reset":
            chat.reset()
        elif line.strip():
            try:
                for piece in chat.answer(line):
                    show(piece)
            except UserError as error:
                show(str(error))
            show("\n")
