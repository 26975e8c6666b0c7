"""The versions that a bug report needs, read from the packages' metadata: none of them is imported."""

import platform
from importlib.metadata import PackageNotFoundError, version

_SHOWN = ("torch", "transformers")


def version_of(package: str) -> str:
    """The installed version of a package, `not installed` when there is none."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def versions() -> str:
    """`fivefold 0.1.0 (torch 2.13.0, transformers 5.23.0, Python 3.11.7)`."""
    others = ", ".join(f"{package} {version_of(package)}" for package in _SHOWN)
    return f"fivefold {version_of('fivefold')} ({others}, Python {platform.python_version()})"
