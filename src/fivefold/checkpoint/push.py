"""Push of an export to the Hugging Face hub, as one commit.

A repository contains after a push what was pushed: the commit removes every file of `transformers` and `peft` that the
export lacks. Files of others stay, and so does what others wrote into the model card.
"""

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote

import yaml

from fivefold.checkpoint.card import CARD, merged_card
from fivefold.core.errors import UserError
from fivefold.core.hub import SECONDS, Repository
from fivefold.core.text import listed
from fivefold.data.tokenizer import TOKENIZER_FILES

_TRIES = 3  # if others commit to the branch meanwhile
_HUBS_OWN, _IGNORES = ".gitattributes", ".gitignore"
_MOST = 10  # files that an error names
# Files that programs read in place of the weights of `transformers`, or as what these are; by their path.
_MIXED = (
    "*.safetensors", "*.safetensors.index.json",  # vLLM: all of the folder, unless there is an index
    "params.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json",  # vLLM
    "model_index.json", "modules.json",  # diffusers, sentence-transformers
)  # fmt: skip
# The same by their name, in whichever folder they lie.
_MIXED_ANYWHERE = (
    "*.gguf", "*.onnx", "*.onnx_data*", "openvino_*.xml", "openvino_*.bin", "*.tflite", "*.mlmodel", "rust_model.ot",
    "consolidated*",  # Mistral's and Llama's own format
)  # fmt: skip


@dataclass(frozen=True)
class Pushed:
    """A finished push: its address, the `kept` files of others, and the `removed` ones, which commit `before` has."""

    address: str
    kept: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    before: str = ""


@dataclass(frozen=True)
class _Found:
    """A branch: its newest commit, its files and its model card. `is_new`: it does not exist yet, and these are those
    of the main branch, from which it will start."""

    commit: str
    files: frozenset[str]
    card: str
    is_private: bool
    is_new: bool


def check(to: Repository) -> None:
    """Check that an export can be pushed, without changing anything on the hub.

    Raises `UserError` if the hub does not answer, the token must not write, the repository is public and should be
    private or the reverse, it has files that would mix with the export, or its model card cannot be read.
    """
    from huggingface_hub import HfApi

    with to.errors():
        api = HfApi()
        found = _found(api, to)
        _check_token(api, to, exists=found is not None)
        if found is not None:
            _check(to, found)


def push(to: Repository, folder: Path, files: Collection[str], message: str) -> Pushed:
    """Upload `files` of `folder` in one commit. Creates the repository and the branch where they do not exist. Raises
    `UserError` with the reason; the repository is then as it was."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError

    with to.errors(f"; {folder} is complete"):
        for attempt in count(1):
            found = _opened(HfApi(), to)
            try:
                return _commit(HfApi(), to, found, folder, files, message)
            except HfHubHTTPError as error:
                if error.response.status_code != 412 or attempt == _TRIES:  # 412: another commit came first
                    raise
    raise AssertionError("every attempt returns or raises")


def _commit(api: Any, to: Repository, found: _Found, folder: Path, files: Collection[str], message: str) -> Pushed:
    """Replace the files of an earlier model by `files`. Raises an error of the hub if `found` is not its newest."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    old = _of_models(found.files) | (_mixed(found.files) if to.replace else set())
    removed, others = sorted(old - set(files)), sorted(found.files - old - {*files, _HUBS_OWN})
    ours = (folder / CARD).read_text(encoding="utf-8")
    card = merged_card(found.card, ours)
    added = [CommitOperationAdd(name, str(folder / name)) for name in sorted(files) if name != CARD]
    added.append(CommitOperationAdd(CARD, card.encode()))
    if _IGNORES in found.files:  # otherwise what it lists is left out without an error
        api.preupload_lfs_files(to.name, added, revision=to.revision, gitignore_content="#", free_memory=False)
    api.create_commit(
        to.name, [*(CommitOperationDelete(path, is_folder=False) for path in removed), *added],
        commit_message=message, revision=to.revision, parent_commit=found.commit,
    )  # fmt: skip
    place = f"/tree/{to.revision}" if to.revision else ""
    kept = (*others, *([f"what others wrote into {CARD}"] if card != ours else []))
    return Pushed(f"{api.endpoint}/{to.name}{place}", kept, tuple(removed), found.commit)


def _opened(api: Any, to: Repository) -> _Found:
    """The branch to push to, created if it does not exist."""
    found = _found(api, to)
    if found is None:
        api.create_repo(to.name, private=not to.public)
    if to.revision and (found is None or found.is_new):
        api.create_branch(to.name, branch=to.revision, exist_ok=True)
    found = found or _found(api, to)
    assert found is not None, "the hub has what it created"
    _check(to, found)
    return found


def _found(api: Any, to: Repository) -> _Found | None:
    """The branch as it is; None if the hub shows no such repository."""
    info = _info(api, to.name)
    if info is None:
        return None
    branch = _info(api, to.name, to.revision) if to.revision else info
    at = to.revision if branch else None
    files = frozenset(api.list_repo_files(to.name, revision=at))
    card = _card(api, to.name, at or "main") if CARD in files else ""
    return _Found((branch or info).sha, files, card, bool(info.private), branch is None)


def _info(api: Any, name: str, revision: str | None = None) -> Any:
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return api.model_info(name, revision=revision, timeout=SECONDS)
    except HfHubHTTPError as error:
        if error.response.status_code != 404:
            raise
        return None


def _card(api: Any, name: str, revision: str) -> str:
    """The newest model card of a branch, past the cache. Raises `UserError` if an export's cannot be merged into it."""
    from huggingface_hub import get_session, get_token, hf_raise_for_status

    url, token = f"{api.endpoint}/{name}/resolve/{quote(revision, safe='')}/{CARD}", get_token()
    response = get_session().get(url, headers={"Authorization": f"Bearer {token}"} if token else {}, timeout=SECONDS)
    hf_raise_for_status(response)
    return _text(name, response.content)


def _text(name: str, card: bytes) -> str:
    try:
        text = card.decode("utf-8-sig").replace("\r\n", "\n")
        merged_card(text, "")
    except (ValueError, yaml.YAMLError) as error:
        what = f"{name} was not pushed: its {CARD} is not UTF-8 that begins with keys in YAML"
        raise UserError(what, fix=f"mend or remove its {CARD}, on its page") from error
    return text


def _check_token(api: Any, to: Repository, *, exists: bool) -> None:
    """Raise an error if the token must not write. What a hub does not answer shows at the upload."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        role = api.auth_check(to.name, write=True) if exists else api.whoami()["auth"]["accessToken"]["role"]
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise
        return
    except (KeyError, TypeError):
        return
    if role == "read":
        raise UserError(f"{to.name} was not pushed: the token may only read", fix="log in with one that may write")


def _check(to: Repository, found: _Found) -> None:
    """Raise `UserError` if a repository cannot be pushed to as asked."""
    if to.public if found.is_private else to.private:
        asked, is_now = ("private", "public") if to.private else ("public", "private")
        raise UserError(
            f"{to.name} is {is_now}, and a push does not change that",
            fix=f"make it {asked} in its settings on the hub, name a new repository, or leave out --{asked}",
        )
    mixed = _mixed(found.files)
    if mixed and not to.replace:
        raise UserError(
            f"{to.name} has files of another model, which programs read in place of the pushed one or with it: "
            f"{listed(sorted(mixed), _MOST)}",
            fix="push to another repository or branch; --replace (replace=True) removes them",
        )


# Names of files.


def _of_models(files: Iterable[str]) -> set[str]:
    """The files that `transformers` or `peft` read of a folder: weights, configs, tokenizers, processors, templates."""
    return {path for path in files if _of_transformers().fullmatch(path) or _matches(path, TOKENIZER_FILES)}


def _mixed(files: Iterable[str]) -> set[str]:
    """The other files that are read in place of a model's weights, or with them."""
    files = set(files)
    return {
        path
        for path in files - _of_models(files)
        if _matches(path, _MIXED) or any(fnmatchcase(PurePosixPath(path).name, each) for each in _MIXED_ANYWHERE)
    }


@cache
def _of_transformers() -> re.Pattern[str]:
    """Paths of the files that have a name in `transformers`, in all forms of weights: shards, variants and indexes."""
    from huggingface_hub import constants
    from transformers import utils

    named = {value for key, value in vars(utils).items() if re.fullmatch("[A-Z_]+_(NAME|FILE)", key)}
    patterns = [rf"{utils.CHAT_TEMPLATE_DIR}/.+"]
    for name in {*named, constants.TF2_WEIGHTS_NAME, constants.FLAX_WEIGHTS_NAME}:
        stem, _, kind = name.rpartition(".")
        forms = r"(\.\w+)?(-\d+-of-\d+)?(\.\w+)?" if kind in ("safetensors", "bin", "h5", "msgpack") else ""
        index = r"(\.index(\.\w+)?\.json)?" if forms else ""
        patterns += [rf"{re.escape(stem)}{forms}\.{kind}{index}"] if stem else []
    return re.compile("|".join(patterns))


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """True if `Path.glob` finds a path by one of the patterns."""
    return any(path.count("/") == each.count("/") and fnmatchcase(path, each) for each in patterns)
