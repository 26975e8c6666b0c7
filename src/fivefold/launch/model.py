"""Checks of the model before any process starts: its config.json is read as JSON, without torch.

The training body checks all of it again on the model itself; here a wrong request costs no tokenising and no worker.
"""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError, refuse
from fivefold.core.files import expanded
from fivefold.core.folder_config import check_no_code, check_no_noise, check_not_gguf, read_folder_config
from fivefold.core.hub import config_file, is_hub_id
from fivefold.core.model_limits import ModelLimits
from fivefold.core.run_folder import runs
from fivefold.core.shapes import no_model, shape_folder
from fivefold.parallel.layout import Layout
from fivefold.parallel.legality import violations

if TYPE_CHECKING:
    from fivefold.data.prepare import PreparedData

READ_MORE = "fivefold train --keys"


def check_model(config: RunConfig, *, layout: Layout | None = None, weights: bool = True) -> None:
    """Raise `UserError` if the model cannot run as requested. For a hub id, config.json is fetched.

    `layout`: the run's layout with every degree known; its micro batches are checked as well. None: the layout in the
    run file, which is not final if the planner chooses. `weights`: also check that the initial weights exist.
    """
    name, (path, is_here) = config.model.name_or_path, _place(config)
    values = read_folder_config(path) | config.model.overrides
    check_no_code(values, name)
    check_no_noise(values, name)
    limits, rows = ModelLimits.of_config(values, name), None if layout is None else config.train.global_batch_size
    if layout is not None or not config.is_automatic:
        refuse(violations(layout or config.layout, limits, batch=rows))
    check_positions(values.get("max_position_embeddings"), config.data.seq_length)
    if weights and is_here and config.model.init == "pretrained":
        _check_weights(name, path)


def _place(config: RunConfig) -> tuple[Path, bool]:
    """The path of the model's config.json, and True if it is local: for a hub id it is fetched. Raises `UserError`."""
    name = config.model.name_or_path
    path = shape_folder(name) or expanded(name)
    if path.exists():
        return path, True
    if not is_hub_id(name):
        raise no_model(name, key="model.name_or_path", more=runs(Path(name).parent) or READ_MORE)
    return config_file(name), False


def check_data(config: RunConfig, data: "PreparedData") -> None:
    """Raise `UserError` if the model of `config`, going by its config.json, lacks tokens of the data."""
    if config.model.init == "random" and config.tokenizer.name_or_path != "auto":  # adopts its vocabulary
        return
    values = read_folder_config(_place(config)[0]) | config.model.overrides
    vocabulary = values.get("vocab_size")
    if isinstance(vocabulary, int) and "text_config" not in values:
        check_tokens(data, vocabulary)


def check_tokens(data: "PreparedData", vocabulary: int) -> None:
    """Raise `UserError` if a text contains a token outside a model's vocabulary. The tokenizer itself may have more
    tokens than the model (often a padding token)."""
    if data.tokenizer.vocab_size <= vocabulary:
        return
    if any(side.largest_token >= vocabulary for side in (data.train, data.validation) if side):
        raise UserError(
            f"the tokenizer has {data.tokenizer.vocab_size} tokens, the model's vocabulary {vocabulary}",
            fix="use the model's own tokenizer (tokenizer.name_or_path: auto), "
            f"or set model.overrides.vocab_size: {data.tokenizer.vocab_size} with model.init: random",
            more=READ_MORE,
        )


def check_positions(positions: Any, seq_length: int, *, teacher: str | None = None) -> None:
    """Raise `UserError` if rows are longer than a model's `positions`, if its config has any. `teacher`: the name of
    the model if it is not the run's."""
    if isinstance(positions, int) and 0 < positions < seq_length:
        whose = "the model's" if teacher is None else f"those of objective.teacher {teacher}:"
        instead = "model.overrides.max_position_embeddings" if teacher is None else "name another teacher"
        raise UserError(
            f"data.seq_length {seq_length} is more than {whose} max_position_embeddings {positions}",
            fix=f"set data.seq_length to {positions} or less, or {instead}",
            more=READ_MORE,
        )


def _check_weights(name: str, path: Path) -> None:
    if not path.is_dir():
        raise UserError(
            f"{name} is a config without weights, and model.init is pretrained",
            fix="set model.init: random, or name a folder or a hub id",
            more=READ_MORE,
        )
    if any(path.glob("*.safetensors")):
        return
    check_not_gguf(path, is_alone=True)
    pickled = sorted(file.name for file in path.glob("*.bin"))
    convert = "convert the .bin where you trust it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)"
    raise UserError(
        f"{name} holds no *.safetensors" + (f"; {pickled[0]} is a pickle, which can run code" if pickled else ""),
        fix=convert if pickled else "download the weights, or start from random ones: model.init: random",
        more=READ_MORE,
    )
