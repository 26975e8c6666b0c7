"""Suggestions for a name that was not found: the run files and runs in a folder."""

from pathlib import Path

_SHOWN = 6


def run_files(folder: Path) -> str:
    """`run files here: a.yaml, b.yaml` for the YAML files in `folder`; empty when there are none."""
    return _listed(f"run files {_where(folder)}", [path.name for path in _inside(folder) if _is_yaml(path)])


def runs(folder: Path) -> str:
    """`runs in runs: demo, notes` for the run folders in `folder`; empty when there are none."""
    return _listed(f"runs {_where(folder)}", [path.name for path in _inside(folder) if is_run(path)])


def is_run(folder: Path) -> bool:
    """True if a folder is that of a run."""
    return (folder / "run.yaml").is_file()


def _is_yaml(path: Path) -> bool:
    return path.suffix in (".yaml", ".yml") and path.is_file()


def _inside(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []


def _where(folder: Path) -> str:
    return "here" if folder == Path() else f"in {folder}"


def _listed(what: str, names: list[str]) -> str:
    more = ", ..." if len(names) > _SHOWN else ""
    return f"{what}: {', '.join(names[:_SHOWN])}{more}" if names else ""
