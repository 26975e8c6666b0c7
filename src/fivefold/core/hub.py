"""The Hugging Face hub: what counts as a name on it, and why a name cannot be fetched or pushed to. No torch."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fivefold.core.errors import UserError

MODEL = "model.name_or_path"
SECONDS = 10  # timeout of the first request to the hub
# When to push again, by the answer of the hub.
_AGAIN = {412: "others do not commit to it", **dict.fromkeys((400, 413, 422), "that is mended")}


def is_hub_id(name: str) -> bool:
    """True for `org/name`, unless `org` is a folder here: a mistyped path must not become a network call."""
    return looks_like_id(name) and not Path(name).parent.is_dir()


def looks_like_id(name: str) -> bool:
    """True for `org/name`, whatever is here."""
    return re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", name) is not None


def is_inside(path: Path, folder: Path) -> bool:
    """True if a path leads to a place in the folder, or, from a snapshot of the hub's cache, to one of its blobs."""
    place, root = path.resolve(), folder.resolve()
    blobs = root.parent.parent / "blobs" if root.parent.name == "snapshots" else root
    return place.is_relative_to(root) or place.is_relative_to(blobs)


def snapshot(name: str, files: Sequence[str], *, key: str) -> Path:
    """Return the folder of a hub id with its `files` (patterns): fetched if they changed, else this machine's copy.

    `key`: the key of the run file that names it. Raises `UserError` with the reason if there is none. An unreachable
    hub is asked once, for a few seconds.
    """
    from huggingface_hub import HfApi, snapshot_download

    try:
        HfApi().model_info(name, timeout=SECONDS)  # snapshot_download would wait forever, or retry for minutes
    except Exception as error:  # from huggingface_hub or its HTTP client
        try:
            return Path(snapshot_download(name, allow_patterns=[*files], local_files_only=True))
        except Exception:
            raise _not_fetched(key, name, error) from error
    try:
        return Path(snapshot_download(name, allow_patterns=[*files]))
    except Exception as error:
        raise _not_fetched(key, name, error) from error


def config_file(name: str) -> Path:
    """Fetch the config.json of a model on the hub; see `snapshot`."""
    file = snapshot(name, ["config.json"], key=MODEL) / "config.json"
    if not file.is_file():
        raise UserError(f"{MODEL} {name}: the repository holds no config.json", fix="name another model")
    return file


@dataclass(frozen=True)
class Repository:
    """A model repository of the hub to push to; `fivefold.checkpoint.push` does it.

    `private`, `public`: how others must see it; a new one is private unless `public`. `revision`: a branch, None for
    the main one.
    """

    name: str
    private: bool = False
    revision: str | None = None
    public: bool = False

    def __post_init__(self) -> None:
        if not looks_like_id(self.name):
            raise UserError(f"{self.name} is no repository of the hub", fix="write org/name, or user/name")
        if self.private and self.public:
            raise UserError("private and public are both asked for", fix="leave one out: a new repository is private")

    @property
    def arguments(self) -> str:
        """The arguments of `from_pretrained` that load what was pushed, as Python."""
        return f'"{self.name}"' + (f', revision="{self.revision}"' if self.revision else "")

    @contextmanager
    def errors(self, more: str = "") -> Iterator[None]:
        """Raise errors of the hub or its HTTP client as `UserError` with the reason, then `more`."""
        from huggingface_hub import errors as hub

        try:
            yield
        except UserError:
            raise
        except Exception as error:
            errors = list(_chain(error))
            answers = {one.response.status_code for one in errors if isinstance(one, hub.HfHubHTTPError)}
            when = next((_AGAIN[status] for status in answers if status in _AGAIN), "the hub answers")
            what, fix = reason(self.name, error)[0], f"run it again when {when} (--force if OUT is there)"
            if answers & {401, 403, 404} or any(isinstance(one, hub.LocalTokenNotFoundError) for one in errors):
                what = "the hub does not let you write to it"
                fix = "log in with a token that may: hf auth login, or HF_TOKEN"
            if any(isinstance(one, hub.OfflineModeIsEnabled) for one in errors):
                what, fix = "HF_HUB_OFFLINE forbids it", "unset HF_HUB_OFFLINE"
            raise UserError(f"{self.name} was not pushed: {what}{more}", fix=fix) from error


def repository(name: str | None, **options: Any) -> Repository | None:
    """The repository of a name and the other fields of `Repository`. Raises `UserError` for these without a name."""
    if name is not None:
        return Repository(name, **options)
    if any(options.values()):
        what = "private, public and revision are of a repository, and none is named"
        raise UserError(what, fix="name one: push org/name")
    return None


def _not_fetched(key: str, name: str, error: BaseException) -> UserError:
    """Error for a `name` that could not be fetched from the hub; `key`: that of the run file."""
    what, fix = reason(name, error, besides=", and this machine has no copy of it")
    return UserError(f"{key} {name}: {what}", fix=fix)


def reason(name: str, error: BaseException, *, besides: str = "", local: str = "") -> tuple[str, str]:
    """The problem and its fix. The most specific error counts, however deep it lies. `besides`: said of a hub that
    cannot be reached. `local`: what to do without it, if that is not to name a folder of the model."""
    from huggingface_hub import errors as hub

    errors = list(_chain(error))
    local = local or f"name a local folder (hf download {name} --local-dir DIR fills one where there is a network)"
    log_in = "check the spelling; if it is private, log in: hf auth login"
    for kind, what, fix in (
        (hub.GatedRepoError, "the hub asks who you are (the repository is gated)", "accept its terms on its page, and "
         "log in: hf auth login"),
        (hub.RepositoryNotFoundError, "the hub has no such repository, or it is private", log_in),
        (hub.RevisionNotFoundError, "the hub has no such revision of it", log_in),
        (hub.RemoteEntryNotFoundError, "the repository lacks a file that is needed", "name another model, or a folder"),
        (hub.OfflineModeIsEnabled, "this machine has no copy of it, and HF_HUB_OFFLINE forbids to fetch one",
         f"unset HF_HUB_OFFLINE, or {local}"),
    ):  # fmt: skip
        if any(isinstance(error, kind) for error in errors):
            return what, fix
    for error in errors:
        if isinstance(error, hub.HfHubHTTPError):
            words = "".join(f": {line}" for line in (error.server_message or "").splitlines()[:1])
            return f"the hub answered {error.response.status_code}{words}", f"try again later, or {local}"
    if any(isinstance(error, OSError) or "httpx" in type(error).__module__ for error in errors):
        why = getattr(errors[-1], "strerror", None) or str(errors[-1]) or type(errors[-1]).__name__
        return f"the Hugging Face hub cannot be reached ({why}){besides}", local
    return f"it cannot be read: {(str(errors[0]).splitlines() or [type(errors[0]).__name__])[0]}", local


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
