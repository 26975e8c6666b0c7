"""`fivefold generate` on one rank: open the model, spread it, continue the prompt."""

import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import yaml
from transformers import PreTrainedModel

from fivefold.checkpoint.find import find_checkpoint, is_remote
from fivefold.checkpoint.model_folder import FOLDER as MODEL_FOLDER
from fivefold.checkpoint.model_folder import eos_token_ids
from fivefold.core.cache import cache_root
from fivefold.core.errors import UserError
from fivefold.core.hub import is_hub_id
from fivefold.core.layout import Layout
from fivefold.core.nearby import runs
from fivefold.core.terminal import shown
from fivefold.data.tokenizer import Bos, find_tokenizer
from fivefold.generation import GenerateRequest
from fivefold.generation.decode import encode_prompt, pieces
from fivefold.launch.world import World
from fivefold.models.build import build_meta, load_model_config, weights_folder
from fivefold.models.sources import SafetensorsFolder, TensorSource
from fivefold.parallel.apply import parallelize
from fivefold.parallel.data import PRECISION_OF


def generate(request: GenerateRequest, world: World, *, write: Callable[[str], object] | None = None) -> str:
    """Continue the prompt over a joined world; every rank calls it, and returns the new text.

    Rank 0 passes the prompt and then the text, piece by piece, to `write`. Raises `UserError` when the model, the
    step or the layout does not fit.
    """
    folder, open_source = _locate(request)
    found = find_tokenizer(str(folder), model=str(folder), corpus=(), root=cache_root(), bos=_bos_of(folder))
    tokenizer, ends = found.load(), eos_token_ids(folder) or (found.eos_token_id,)
    ids = encode_prompt(tokenizer, request.prompt, ends, found.bos_token_ids)
    config = load_model_config(folder)
    layout = _layout(request, config.dtype).resolve(world.size)
    model = build_meta(config)
    model = parallelize(model, layout, device=world.device, source=open_source(model))
    show = write if write and world.is_first else lambda text: None
    show(request.prompt)
    text = []
    for piece in pieces(
        model, tokenizer, ids, ends, max_new_tokens=request.max_new_tokens, temperature=request.temperature,
        top_k=request.top_k, seed=request.seed,
    ):  # fmt: skip
        show(piece)
        text.append(piece)
    return "".join(text)


def on_worker(request: Mapping[str, Any], world: World) -> None:
    """The body of a worker: the text also goes to the file `request["result"]` when it is done."""
    text = shown_to_user(GenerateRequest(**request["generate"]), world, quiet=request["quiet"])
    if world.is_first:
        Path(request["result"]).write_text(text, encoding="utf-8")


def shown_to_user(request: GenerateRequest, world: World, *, quiet: bool) -> str:
    """The text of `generate`, also on standard output unless `quiet`."""
    text = generate(request, world, write=None if quiet else to_screen)
    if world.is_first and not quiet:
        print(flush=True)
    return text


def to_screen(text: str) -> None:
    """Write at once; a character that the screen's encoding does not have becomes `?`.

    On a terminal no character is a command; in a file or a pipe the text is exactly what the model wrote.
    """
    text = shown(text) if sys.stdout.isatty() else text
    encoding = sys.stdout.encoding or "utf-8"
    sys.stdout.write(text.encode(encoding, errors="replace").decode(encoding))
    sys.stdout.flush()


def _locate(request: GenerateRequest) -> tuple[Path, Callable[[PreTrainedModel], TensorSource]]:
    """The folder of config and tokenizer, and what opens the weights."""
    path = Path(request.model)
    if is_remote(request.model) or (path / "checkpoints").is_dir() or (path / "run.yaml").is_file():
        checkpoint = find_checkpoint(request.model, request.step)
        return checkpoint.model_folder, lambda _: checkpoint.source()
    if request.step is not None:
        raise UserError(
            f"{path} is not a run folder, so it has no step {request.step}",
            fix="leave --step out",
            more="fivefold generate --help",
        )
    if not path.exists() and not is_hub_id(request.model):
        raise UserError(
            f"{path} is neither a run folder, a model folder nor a hub id",
            fix=runs(path.parent) or runs(Path("runs")) or "train one first: fivefold train",
            more="fivefold generate --help",
        )
    folder = weights_folder(request.model)
    return folder, lambda model: SafetensorsFolder(folder, model)


def _bos_of(folder: Path) -> Bos:
    """`data.bos` of the run whose checkpoint `folder` is of; auto where it is the folder of a model."""
    run = folder.parent / "run.yaml"
    if folder.name != MODEL_FOLDER or not run.is_file():
        return "auto"
    bos = (yaml.safe_load(run.read_text(encoding="utf-8")).get("data") or {}).get("bos", "auto")
    return bos if isinstance(bos, bool) else "auto"


def _layout(request: GenerateRequest, stored: torch.dtype | None) -> Layout:
    layout = Layout.parse(request.layout)
    default = Layout().precision
    return replace(layout, precision=PRECISION_OF[stored or torch.float32]) if layout.precision == default else layout
