"""The model of a run or of a Hugging Face folder with its tokenizer, parallelized for generation and evaluation."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from tokenizers import Tokenizer
from torch import Tensor
from transformers import PreTrainedModel

from fivefold.checkpoint.agreement import base_source, check_base
from fivefold.checkpoint.find import find_checkpoint, is_remote
from fivefold.checkpoint.load import Checkpoint
from fivefold.checkpoint.manifest import MANIFEST
from fivefold.checkpoint.model_folder import MODEL_FOLDER
from fivefold.config import RunConfig
from fivefold.core.alike import digests, program
from fivefold.core.cache import cache_root, say_aloud
from fivefold.core.errors import UserError
from fivefold.core.hub import is_hub_id
from fivefold.core.run_folder import runs
from fivefold.data.tokenizer import Bos, TokenizerInfo, encoding, find_tokenizer, tokenizer_files
from fivefold.generation.sampling import check_values, end_tokens, stop_texts
from fivefold.generation.text import encode_prompt
from fivefold.launch.world import World
from fivefold.models import hf_internals
from fivefold.models.build import build_meta, config_values, load_model_config, weights_folder, without_dropout
from fivefold.models.discover import facts_of
from fivefold.models.sources import TensorSource, folder_digests, open_weights
from fivefold.parallel.adapters.peft_folder import PEFT_CONFIG, adapter_digests, lora_of, with_peft_folder
from fivefold.parallel.adapters.sources import Layered
from fivefold.parallel.apply import parallelize
from fivefold.parallel.dtypes import PRECISION_OF
from fivefold.parallel.layout import Layout
from fivefold.parallel.plain import check_alike


@dataclass(frozen=True)
class OpenModel:
    """`folder`: of config and tokenizer. `ends`, `stop`: tokens and texts that end a text. `run`: the settings of the
    model's run; empty if it has none."""

    folder: Path
    model: Any
    tokenizer: Tokenizer
    info: TokenizerInfo
    ends: tuple[int, ...]
    run: dict[str, Any]
    stop: tuple[str, ...] = ()

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special ones. Raises `UserError` for tokens beyond the model's vocabulary."""
        with encoding(self.info.folder, self.tokenizer, [text]):
            ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        check_vocabulary(max(ids, default=0), self.model.config, self.info, "the text")
        return ids

    def prompt(self, text: str) -> Tensor:
        """The tokens of a text to continue, int64 [1, T]: see `encode_prompt`. Raises `UserError`."""
        with encoding(self.info.folder, self.tokenizer, [text]):
            ids_1T = encode_prompt(self.tokenizer, text, self.ends, self.info.bos_token_ids)
        check_vocabulary(int(ids_1T.max()), self.model.config, self.info, "the prompt")
        return ids_1T


def open_model(
    name: str, world: World, *, layout: str, step: int | None, verb: str, converses: bool = False
) -> OpenModel:
    """Open and parallelize a model. `name`: a run folder or the address of its copy, a Hugging Face folder, or a hub
    id. `layout` is a text; by default, the model computes in the type of its stored weights. `step`: a run's
    checkpoint, None the newest. `verb`: for messages. `converses`: texts are turns of a conversation. Unexpected
    properties of the tokenizer are reported on stderr. Raises `UserError` if the model, the step or the layout does not
    fit."""
    if not world.is_local:
        check_alike(lambda: _read(name, step, verb) | {"the layout": layout})
    folder, weights, open_source = _locate(name, step, verb)
    run = _run_of(folder)
    trained = _with_adapter(run)
    place = name if is_hub_id(name) else str(folder)  # a hub id: the files of its tokenizer are fetched too
    info = find_tokenizer(place, model=place, corpus=(), root=cache_root(), bos=_bos_of(run))
    for remark in info.remarks(converses=converses) if world.is_first else ():
        say_aloud(f"tokenizer: {remark}")
    config = without_dropout(load_model_config(folder))
    if config.dtype not in (None, *PRECISION_OF):
        raise UserError(f"{folder}/config.json: dtype is {config.dtype}, in which no model computes", fix="take it out")
    resolved = _layout(layout, config.dtype).resolve(world.size)
    model = build_meta(config, weights=weights)
    source = open_source(model)
    lora = trained.adapter.lora if trained else None
    if trained is not None:
        source = Layered(source, base_source(trained, model))
        check_base(trained, Checkpoint.open(folder.parent).agreement, str(folder.parent))
    elif weights and (weights / PEFT_CONFIG).is_file():  # an adapter next to its base: transformers loads both
        lora = lora_of(weights)
        source = with_peft_folder(weights, lora, facts_of(model), source)
    model = parallelize(model, resolved, device=world.device, source=source, adapter=lora)
    model.generation_config = hf_internals.generation_config(folder)
    check_values(model, folder)
    ends = end_tokens(model) or (info.eos_token_id,)
    return OpenModel(folder, model, info.load(), info, ends, run, stop_texts(model))


def check_vocabulary(largest: int, config: Any, tokenizer: TokenizerInfo, what: str) -> None:
    """Raise `UserError` if the `largest` token id of `what` is beyond the model's vocabulary."""
    size = config.get_text_config().vocab_size
    if largest >= size:
        token = tokenizer.load().id_to_token(largest)
        raise UserError(
            f"{what} has the token {token!r}, number {largest}, and the model's vocabulary has {size} entries: its "
            f"tokenizer knows {tokenizer.vocab_size}",
            fix="leave out what makes that token, or name a model and a tokenizer that belong together",
        )


def _read(name: str, step: int | None, verb: str) -> dict[str, Any]:
    """The files of a model that every rank reads, to compare."""
    folder, weights, _ = _locate(name, step, verb)
    trained = _with_adapter(_run_of(folder))
    base = weights_folder(trained.model.name_or_path) if trained and trained.model.init == "pretrained" else None
    return {
        **program(),
        f"{name}: config.json": config_values(load_model_config(folder)),
        f"{name}": digests(folder, [*folder.glob("generation_config.json"), *tokenizer_files(folder)]),
        f"{name}: weights": folder_digests(weights) if weights else digests(folder.parent, [folder.parent / MANIFEST]),
        f"{name}: adapter": adapter_digests(weights) if weights and (weights / PEFT_CONFIG).is_file() else None,
        f"the model of {name}": folder_digests(base) if base else None,
    }


def _with_adapter(run: dict[str, Any]) -> RunConfig | None:
    """The settings of the model's run, if it trained an adapter."""
    has_adapter = (run.get("adapter") or {}).get("name", "none") != "none"
    return RunConfig.model_validate(run) if has_adapter else None


def _locate(
    name: str, step: int | None, verb: str
) -> tuple[Path, Path | None, Callable[[PreTrainedModel], TensorSource]]:
    """The folder of config and tokenizer, that of the weights if there is one, and the function that opens them."""
    path, more = Path(name), f"fivefold {verb} --help"
    if is_remote(name) or (path / "checkpoints").is_dir() or (path / "run.yaml").is_file():
        checkpoint = find_checkpoint(name, step)
        return checkpoint.model_folder, None, lambda _: checkpoint.source()
    if step is not None:
        raise UserError(f"{path} is not a run folder, so it has no step {step}", fix="leave --step out", more=more)
    if not path.exists() and not is_hub_id(name):
        raise UserError(
            f"{path} is neither a run folder, a model folder nor a hub id",
            fix=runs(path.parent) or runs(Path("runs")) or "train one first: fivefold train",
            more=more,
        )
    if (path / PEFT_CONFIG).is_file() and not (path / "config.json").is_file():
        raise UserError(
            f"{path} is a PEFT adapter, without the model that it is beside",
            fix=f"name the run, or the folder of fivefold export RUN {path}-merged --merge",
            more="fivefold docs howto/adapters",
        )
    folder = weights_folder(name, reads_adapter=True)
    return folder, folder, lambda model: open_weights(folder, model)


def _run_of(folder: Path) -> dict[str, Any]:
    run = folder.parent / "run.yaml"
    if folder.name != MODEL_FOLDER or not run.is_file():
        return {}
    return dict(yaml.safe_load(run.read_text(encoding="utf-8")))


def _bos_of(run: dict[str, Any]) -> Bos:
    """`data.bos` of a run; auto without one."""
    bos = (run.get("data") or {}).get("bos", "auto")
    return bos if isinstance(bos, bool) else "auto"


def _layout(text: str, stored: torch.dtype | None) -> Layout:
    layout = Layout.parse(text)
    default = Layout().precision
    return replace(layout, precision=PRECISION_OF[stored or torch.float32]) if layout.precision == default else layout
