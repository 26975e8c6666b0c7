"""Push of an export to the Hugging Face hub, as one commit.

A repository contains after a push what was pushed: the commit removes every file of `transformers` and `peft` that the
export lacks. Files of others stay, and so does what others wrote into the model card.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from itertools import count
from pathlib import Path, PurePosixPath
from typing import Any

import yaml
from huggingface_hub import (
    CommitOperationAdd,
    CommitOperationDelete,
    HfApi,
    constants,
    get_session,
    get_token,
    hf_raise_for_status,
)
from huggingface_hub.errors import HfHubHTTPError
from transformers import utils

from fivefold.checkpoint.card import CARD, merged_card
from fivefold.core.errors import UserError, first_line
from fivefold.core.hub import SECONDS, Repository
from fivefold.core.text import listed
from fivefold.data.tokenizer import TOKENIZER_FILES
from fivefold.models import hf_internals

_TRIES = 3  # if others commit to the branch meanwhile
_HUBS_OWN = ".gitattributes"
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
class _Branch:
    """A branch: its newest commit, its files and its model card; those of the main one, from which a new one starts."""

    commit: str
    files: frozenset[str]
    card: str
    is_private: bool


def check_push(to: Repository) -> None:
    """Check that an export can be pushed, without changing anything on the hub.

    Raises `UserError` if the hub does not answer, the token must not write, the repository is public and should be
    private or the reverse, it has files that would mix with the export, or its model card cannot be read.
    """
    with to.errors():
        api = HfApi()
        branch = _read(api, to)
        _check_token(api, to, exists=branch is not None)
        if branch is not None:
            _check(to, branch)


def push_folder(to: Repository, folder: Path, files: Collection[str], message: str) -> Pushed:
    """Upload `files` of `folder` in one commit. Creates the repository and the branch where they do not exist. Raises
    `UserError` with the reason; the repository is then as it was, unless the error says that this is not known."""
    with to.errors(f"; {folder} is complete"):
        for attempt in count(1):
            branch = _opened(HfApi(), to)
            try:
                return _commit(HfApi(), to, branch, folder, files, message)
            except HfHubHTTPError as error:
                if error.response.status_code != 412 or attempt == _TRIES:  # 412: another commit came first
                    raise
    raise AssertionError("every attempt returns or raises")


def _commit(api: HfApi, to: Repository, branch: _Branch, folder: Path, files: Collection[str], message: str) -> Pushed:
    """Replace the files of an earlier model by `files`. Raises an error of the hub if `branch` is not the newest."""
    old = _of_models(branch.files)
    removed, others = sorted(old - set(files)), sorted(branch.files - old - {*files, _HUBS_OWN})
    ours = (folder / CARD).read_text(encoding="utf-8")
    card = merged_card(branch.card, ours)
    added = [CommitOperationAdd(name, str(folder / name)) for name in sorted(files) if name != CARD]
    added.append(CommitOperationAdd(CARD, card.encode()))
    # Without a text of our own, what a .gitignore of the repository lists is left out without an error.
    api.preupload_lfs_files(to.name, added, revision=to.revision, gitignore_content="#", free_memory=False)
    removals = [CommitOperationDelete(path, is_folder=False) for path in removed]
    try:
        api.create_commit(
            to.name, [*removals, *added], commit_message=message, revision=to.revision, parent_commit=branch.commit
        )
    except Exception as error:
        if isinstance(error, HfHubHTTPError) and error.response.status_code < 500:
            raise
        raise UserError(
            f"{to.name} may have been pushed or not: the hub did not say ({first_line(error)}); {folder} is complete",
            fix="look at the commits on its page; if it is not there, run it again with --force",
        ) from error
    place = f"/tree/{to.revision}" if to.revision else ""
    kept = (*others, *([f"what others wrote into {CARD}"] if card != ours else []))
    return Pushed(f"{api.endpoint}/{to.name}{place}", kept, tuple(removed), branch.commit)


def _opened(api: HfApi, to: Repository) -> _Branch:
    """The branch to push to, created if it does not exist."""
    api.create_repo(to.name, private=not to.public, exist_ok=True)
    if to.revision:
        api.create_branch(to.name, branch=to.revision, exist_ok=True)
    branch = _read(api, to)
    assert branch is not None, "the hub has what it created"
    _check(to, branch)
    return branch


def _read(api: HfApi, to: Repository) -> _Branch | None:
    """The branch as it is; None if the hub shows no such repository."""
    main = _info(api, to.name)
    if main is None:
        return None
    branch = (to.revision and _info(api, to.name, to.revision)) or main
    files = frozenset(file.rfilename for file in branch.siblings)
    return _Branch(branch.sha, files, _card(api, to.name, branch.sha) if CARD in files else "", bool(main.private))


def _info(api: HfApi, name: str, revision: str | None = None) -> Any:
    try:
        return api.model_info(name, revision=revision, timeout=SECONDS)
    except HfHubHTTPError as error:
        if error.response.status_code != 404:
            raise
        return None


def _card(api: HfApi, name: str, commit: str) -> str:
    """The model card of a commit. Raises `UserError` if an export's cannot be merged into it."""
    url, token = f"{api.endpoint}/{name}/resolve/{commit}/{CARD}", get_token()
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


def _check_token(api: HfApi, to: Repository, *, exists: bool) -> None:
    """Raise an error if the token must not write. What a hub does not answer shows at the upload."""
    try:
        if exists:
            api.auth_check(to.name, write=True)
        elif api.whoami().get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise UserError(f"{to.name} was not pushed: the token may only read", fix="log in with one that may write")
    except HfHubHTTPError as error:
        if error.response.status_code in (401, 403):
            raise


def _check(to: Repository, branch: _Branch) -> None:
    """Raise `UserError` if a repository cannot be pushed to as asked."""
    if to.public if branch.is_private else to.private:
        asked, is_now = ("private", "public") if to.private else ("public", "private")
        raise UserError(
            f"{to.name} is {is_now}, and a push does not change that",
            fix=f"make it {asked} in its settings on the hub, name a new repository, or leave out --{asked}",
        )
    if mixed := _mixed(branch.files):
        raise UserError(
            f"{to.name} has files of another model, which programs read in place of the pushed one or with it: "
            f"{listed(sorted(mixed), _MOST)}",
            fix="push to another repository or branch, or remove them there first",
        )


# Names of files.


def _of_models(files: Iterable[str]) -> set[str]:
    """The files that `transformers` or `peft` read of a folder: weights, configs, tokenizers, processors, templates."""
    return {path for path in files if _matches(path, _names())}


def _mixed(files: Iterable[str]) -> set[str]:
    """The other files that are read in place of a model's weights, or with them."""
    files = set(files)
    return {
        path
        for path in files - _of_models(files)
        if _matches(path, _MIXED) or any(fnmatchcase(PurePosixPath(path).name, each) for each in _MIXED_ANYWHERE)
    }


@cache
def _names() -> tuple[str, ...]:
    """Patterns of these files; of weights also the shards, variants and indexes."""
    names = {*hf_internals.file_names(), constants.TF2_WEIGHTS_NAME, constants.FLAX_WEIGHTS_NAME}
    stems = [name.rpartition(".")[::2] for name in names if name.endswith((".safetensors", ".bin", ".h5", ".msgpack"))]
    weights = [f"{stem}{form}.{kind}" for stem, kind in stems for form in ("", ".*", "-?????-of-?????*")]
    indexes = [f"{each}.index*.json" for each in weights]
    return (*TOKENIZER_FILES, f"{utils.CHAT_TEMPLATE_DIR}/*", *names, *weights, *indexes)


def _matches(path: str, patterns: Iterable[str]) -> bool:
    """True if `Path.glob` finds a path by one of the patterns."""
    return any(path.count("/") == each.count("/") and fnmatchcase(path, each) for each in patterns)
