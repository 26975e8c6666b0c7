"""The settings that must be unchanged for a run to continue from a checkpoint.

The model, the tokenizer, the data, the seed, the row length, the batch, the optimizer and its schedule determine the
result of each step. The computation may change: the layout with its options (micro batch, recompute, precision),
logging, evaluation, samples, checkpoints, and the length of the run (`max_steps` may grow).

The base of an adapter belongs to them: its checkpoint has the adapter alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fivefold.config import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.text import shortened
from fivefold.models.build import weights_folder
from fivefold.models.sources import RandomInit, TensorSource, digest_of_samples, open_weights
from fivefold.parallel.layout import KEYS

FINGERPRINT = "data.fingerprint"
WARMUP = "scheduler.warmup_steps"
STATES = "optimizer.state_dtype"
WEIGHTS = "weights of "  # prefix; the key of their path follows
_SECTIONS = ("model", "tokenizer", "data", "optimizer", "scheduler")
_VOLATILE = ("transformers_version", "dtype", "torch_dtype", "use_cache", "architectures", "_name_or_path")
_COMPUTED = ("data.balance_rows",)  # keys of these sections that change who computes what
_TRAIN_KEYS = ("global_batch_size", "seed")
_MORE = "a run goes on under any layout, but only with the same model, tokenizer, data, seed, batch and optimizer"


def agreement(
    config: RunConfig, fingerprint: str, model_config: Mapping[str, Any] | None = None, *, bos: bool = False,
    weights: Mapping[str, str] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The keys that must agree, as the run file names them, with their resolved values: plain JSON.

    `fingerprint` identifies the rows by their contents (`PreparedData.fingerprint`). `model_config` is the resolved
    config.json, as the folder of a model's name may have changed. `bos`: documents begin with BOS, a choice that
    `data.bos: auto` leaves to the tokenizer. `weights`: the result of `weights_beside`.
    """
    tree = config.model_dump(mode="json", by_alias=True)
    keys = {f"{section}.{key}": value for section in _SECTIONS for key, value in tree[section].items()}
    keys = {key: value for key, value in keys.items() if value is not None}  # None: a key of another optimizer
    keys = {key: value for key, value in keys.items() if key not in _COMPUTED}
    if keys[STATES] == KEYS["state_dtype"].file_default:  # absent, as in checkpoints older than the key
        del keys[STATES]
    keys["data.bos"] = bos
    default = type(config.balance)().model_dump()
    keys |= {f"balance.{key}": value for key, value in tree["balance"].items() if value != default[key]}
    whole = type(config.adapter)().model_dump()
    keys |= {f"adapter.{key}": value for key, value in tree["adapter"].items() if value != whole[key]}
    plain = type(config.objective)().model_dump(mode="json")  # lists, as in `tree`
    keys |= {f"objective.{key}": value for key, value in tree["objective"].items() if value != plain[key]}
    if config.outer.every:  # replicas have weights and optimizer state of their own
        keys |= {f"outer.{key}": tree["outer"][key] for key in ("every", *tree["outer"])}
        keys["layout.dp_replicate"] = config.written_layout.dp_replicate
    # A run may go on where the file lies elsewhere, or was changed; its history says the change.
    keys |= {key: f"{Path(keys[key]).name}" for key in config.code if key in keys}
    resolved = {f"model.config.{key}": value for key, value in (model_config or {}).items() if key not in _VOLATILE}
    resolved |= {f"{WEIGHTS}{key}": digest for key, digest in (weights or {}).items()}
    return keys | resolved | {f"train.{key}": tree["train"][key] for key in _TRAIN_KEYS} | {FINGERPRINT: fingerprint}


def check_agreement(saved: Mapping[str, Any], current: Mapping[str, Any], *, where: str = "the checkpoint") -> None:
    """Raise `UserError` naming the first key whose value differs from the one the checkpoint was trained with.

    Both are results of `agreement`. Data with the same fingerprint are the same, wherever their files are.
    """
    same_rows = saved.get(FINGERPRINT) == current.get(FINGERPRINT)
    absent = {"data.bos": False, "data.streaming": False, "data.balance_documents": 1}
    saved = {**absent, **saved}  # of checkpoints older than the keys
    for key in [*current, *(key for key in saved if key not in current)]:
        before, now = (values.get(key, "(not set)") for values in (saved, current))
        if before == now or key.startswith(WEIGHTS) or (same_rows and key in ("data.train", "data.validation")):
            continue
        if key == WARMUP and not isinstance(now, int):  # auto, or a part of the run: it keeps its value
            continue
        if key == FINGERPRINT:
            what = f"data.train: the text is not the one that {where} was trained on"
            fix = "put the files back, or start afresh with another run.name (earlier versions held out other parts)"
            raise UserError(what, fix=fix, more=_MORE)
        if key in ("data.train", "data.validation"):
            key, before, now = _inner(key, before, now)
        raise UserError(
            f"{key} is {_short(now)}, but {where} was trained with {_short(before)}",
            fix=f"set {key} back, or start afresh with another run.name",
            more=_MORE,
        )
    check_weights(saved, current, where=where)


def check_weights(saved: Mapping[str, Any], current: Mapping[str, Any], *, where: str) -> None:
    """Raise `UserError` if files that a run reads at every start have other weights under the same name. (A checkpoint
    of an earlier version does not identify them.)"""
    for key, digest in current.items():
        if key.startswith(WEIGHTS) and saved.get(key, digest) != digest:
            named = key.removeprefix(WEIGHTS)
            raise UserError(
                f"{named}: the weights of {current[named]} are not those that {where} was trained with",
                fix="put the files back, or start afresh with another run.name",
                more=_MORE,
            )


def _inner(key: str, before: Any, now: Any) -> tuple[str, Any, Any]:
    """The first differing key inside data sources, with both values. Example: `data.train[0].train_on`."""
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        parts = [(f"{key}[{at}]", *pair) for at, pair in enumerate(zip(before, now, strict=True))]
    elif isinstance(before, dict) and isinstance(now, dict):
        names = [*now, *(name for name in before if name not in now)]
        parts = [(f"{key}.{name}", before.get(name, "(not set)"), now.get(name, "(not set)")) for name in names]
    else:
        return key, before, now
    return next((_inner(*part) for part in parts if part[1] != part[2]), (key, before, now))


def _short(value: Any) -> str:
    return shortened(str(value).lower() if isinstance(value, bool) else str(value), 100)


# ---- the initial weights of a run, the base of its adapter -----------------------------------------------------------


def base_source(config: RunConfig, model: Any) -> TensorSource:
    """Base weights of a run's `model` on the meta device, without an adapter. Raises `UserError` if they are gone."""
    if config.model.init == "random":
        return RandomInit(model, config.train.seed)
    try:
        return open_weights(weights_folder(config.model.name_or_path), model)
    except UserError as error:
        if config.adapter.lora is None:
            raise
        raise UserError(
            f"the model that the adapter is beside, {config.model.name_or_path}, cannot be read: {error.what}",
            fix=error.fix or "put its folder back, or run the command where it is found",
        ) from error


def weights_beside(config: RunConfig) -> dict[str, str]:
    """Digests of the weights that a run reads at every start, by the key of their path: those of its adapter's base, of
    its reference, of its teacher."""
    given, keys = config.objective, dict[str, str]()
    if config.model.init == "pretrained" and (config.adapter.lora or given.compares):
        keys["model.name_or_path"] = config.model.name_or_path
    if given.compares and given.reference not in ("auto", "base"):
        keys["objective.reference"] = given.reference
    if given.name == "distill":
        keys["objective.teacher"] = given.teacher
    return {key: digest_of_samples(weights_folder(name)) for key, name in keys.items()}


def check_base(config: RunConfig, saved: Mapping[str, Any], where: str) -> None:
    """Raise `UserError` if an adapter's base weights are not those it was trained with; `saved`: the agreement of its
    checkpoint."""
    if config.model.init == "pretrained":
        key, name = "model.name_or_path", config.model.name_or_path
        digest = digest_of_samples(weights_folder(name))
        check_weights(saved, {f"{WEIGHTS}{key}": digest, key: name}, where=where)
