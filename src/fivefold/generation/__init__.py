"""Text from a trained model, under any layout. Torch is imported only on use."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from fivefold.core.errors import UserError
from fivefold.launch.once import run_once

# The defaults of the command and of the Python API. Greedy decoding makes small models repeat themselves.
TEMPERATURE, TOP_K, TOP_P, SEED = 0.8, 50, 1.0, 1234
MAX_NEW_TOKENS, MAX_NEW_TOKENS_CHAT = 100, 1024
BATCH_SIZE = 16


def check_options(given: Mapping[str, Any], *, more: str) -> None:
    """Raise `UserError` for a number out of range."""
    for name, least in (("max_new_tokens", 1), ("temperature", 0), ("top_k", 0), ("batch_size", 1)):
        if not given.get(name, least) >= least:
            raise UserError(f"{name} {given[name]} is less than {least}", fix=f"write {least} or more", more=more)
    if not 0 < given.get("top_p", 1) <= 1:
        raise UserError(f"top_p {given['top_p']} is not a probability", fix="write more than 0, up to 1", more=more)


@dataclass(frozen=True, kw_only=True)
class GenerateRequest:
    """A request to continue text. `model`: a run folder or the address of its copy, a Hugging Face folder or a hub id.

    One of: `prompt`, a text; `prompts`, a file of them, whose answers go to the file `out` (None: to the screen), in
    batches of `batch_size`; neither, with `chat`: a conversation. `chat`: prompts are the user's words, wrapped in the
    tokenizer's chat template; `system`: the text of the system's turn.

    `layout` is its text form; by default, the model computes in the type its weights are stored in. `step`: a run's
    checkpoint, None the newest. `temperature` 0: always the likeliest token. `top_k` 0: all; `top_p` 1: all. `stop`:
    texts that end an answer and are left out. Raises `UserError` for a number out of range and for options that do not
    belong together.
    """

    model: str
    prompt: str | None = None
    prompts: str | None = None
    out: str | None = None
    chat: bool = False
    system: str | None = None
    layout: str = "single"
    step: int | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    temperature: float = TEMPERATURE
    top_k: int = TOP_K
    top_p: float = TOP_P
    stop: tuple[str, ...] = ()
    seed: int = SEED
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        more = "fivefold generate --help"
        object.__setattr__(self, "stop", tuple(self.stop))  # a list if it comes from JSON
        check_options(vars(self), more=more)
        if not all(self.stop):
            raise UserError("an empty stop text would end every answer at once", fix="leave --stop out", more=more)
        if self.prompt is not None and self.prompts is not None:
            raise UserError("a prompt and a file of prompts", fix="give one of --prompt and --prompts", more=more)
        if self.prompt is None and self.prompts is None and not self.chat:
            raise UserError(
                "there is nothing to continue", fix="give --prompt TEXT, --prompts FILE or --chat", more=more
            )
        if self.out is not None and self.prompts is None:
            raise UserError("--out takes the answers to a file of prompts", fix="add --prompts FILE", more=more)
        if self.system is not None and not self.chat:
            raise UserError("a system text belongs to a conversation", fix="add --chat", more=more)

    @property
    def drawing(self) -> dict[str, Any]:
        """The options of `decode` that choose tokens."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}


def start(request: GenerateRequest, *, device: str = "auto", quiet: bool = False) -> str:
    """Continue the text of `request`, over the workers of its layout; also print it unless `quiet`. Returns the new
    text of a prompt, and "" for a file of prompts and for a conversation.

    `device`: auto, cpu or cuda. Inside an existing world (torchrun), use that world. Raises `UserError` if the model,
    the layout or an option does not fit.
    """
    talks = request.prompt is None and request.prompts is None
    body = {"generate": asdict(request), "quiet": quiet}
    try:
        found = run_once(
            "fivefold.generation.run", body, layout=request.layout, device=device, what="generate", reads=talks
        )
    except KeyboardInterrupt:
        if not talks:
            raise
        print(flush=True)  # Ctrl-C ends a conversation
        return ""
    return str(found)
