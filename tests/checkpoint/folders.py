"""A Hugging Face folder, and a run that trained it, with the byte tokenizer."""

import shutil
from pathlib import Path

from fivefold.checkpoint import Metadata, save, step_folder
from fivefold.config import RunConfig
from fivefold.data.tokenizer import find_tokenizer
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.hf_internals import generation_config
from fivefold.models.origin import Origin
from fivefold.models.sources import SafetensorsFolder
from fivefold.parallel.apply import parallelize
from fivefold.training.optimizers import build_optimizer
from tests.generation.ranks import talkative
from tests.parity import OPTIONS, Case

VOCABULARY = 263  # prime, and more than the tokenizer has
OVERRIDES = (("vocab_size", VOCABULARY), ("bos_token_id", None), ("eos_token_id", 256), ("pad_token_id", None))


def hf_folder(case: Case, folder: Path) -> Path:
    """The talkative model of the case, saved by `transformers`, with a tokenizer and two tokens that end a text."""
    model = talkative(case)
    model.generation_config.update(eos_token_id=[256, 255], temperature=0.6, top_p=0.9, do_sample=True)
    model.config.use_cache = False
    model.save_pretrained(folder)
    tokenizer = find_tokenizer("byte", model="", corpus=(), root=folder.parent / "cache")
    for file in tokenizer.folder.iterdir():
        shutil.copyfile(file, folder / file.name)
    return folder


def save_run(layout: str, folder: Path, run: Path, step: int) -> None:
    """The checkpoint of a run that started from `folder`, trained no step, and was saved under `layout`."""
    case = Case(layout)
    model = build_meta(load_model_config(folder))
    model.generation_config, model.origin = generation_config(folder), Origin.read(str(folder), folder)
    model = parallelize(model, case.parsed, source=SafetensorsFolder(folder, model))
    config = RunConfig.model_validate({"model": {"name_or_path": str(folder)}, "run": {"name": run.name}})
    about = Metadata(step=step, state={}, config=config, tokenizer_dir=folder)
    save(model, build_optimizer(model, OPTIONS), run / "checkpoints" / step_folder(step), about, keep=3)
