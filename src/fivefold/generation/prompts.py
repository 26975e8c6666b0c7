"""A file of prompts, answered in batches: one JSON object per prompt, in the order of the file."""

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from fivefold.core import strict_json
from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.core.files import writing
from fivefold.data import examples
from fivefold.generation import GenerateRequest
from fivefold.generation.conversation import asked_ids, endings
from fivefold.generation.decode import decode_rows, ready
from fivefold.generation.opened import Opened
from fivefold.generation.sampling import Sampling
from fivefold.generation.text import StoppedText
from fivefold.launch.world import World
from fivefold.parallel.alike import check_alike

_MORE = "docs/howto/generate.md"


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


def answer_file(opened: Opened, request: GenerateRequest, world: World) -> None:
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


def answers(opened: Opened, prompts: Sequence[Prompt], request: GenerateRequest, *, first: int = 0) -> list[Answer]:
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


def read_prompts(opened: Opened, request: GenerateRequest) -> list[Prompt]:
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
    opened: Opened, record: dict[str, Any], where: str, *,
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
