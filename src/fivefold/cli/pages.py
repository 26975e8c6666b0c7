"""`fivefold docs`: the pages of the documentation, as they are installed with the package."""

import sys
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from fivefold.cli.options import Debug
from fivefold.core.errors import UserError

FOLDER = Path(__file__).parents[1] / "pages"


def docs(
    page: Annotated[str | None, typer.Argument(metavar="PAGE", help="Such as howto/data; without it, all.")] = None,
    debug: Debug = False,
) -> None:
    """Show a page of the documentation, or list all pages.

    Example: fivefold docs
    Example: fivefold docs howto/data
    """
    pages = {str(file.relative_to(FOLDER).with_suffix("")): file for file in sorted(FOLDER.rglob("*.md"))}
    if page is None:
        for name, file in pages.items():
            print(f"{name:<30} {title(file)}")
        return
    name = page.split("#")[0].removeprefix("docs/").removesuffix(".md")
    if name not in pages:
        near = [f"fivefold docs {other}" for other in pages if other.endswith(f"/{name}")]
        near += [f"fivefold docs {other}" for other in get_close_matches(name, pages, n=1)]
        raise UserError(f"there is no page {page}", fix=" or ".join(near) or "fivefold docs lists all pages")
    text = pages[name].read_text(encoding="utf-8")
    if not sys.stdout.isatty():
        print(text)
        return
    from rich.console import Console
    from rich.markdown import Markdown

    console = Console(width=min(Console().width, 110))
    with console.pager(styles=True):
        console.print(Markdown(text))


def title(page: Path) -> str:
    """The first heading of a page."""
    return next(line[2:] for line in page.read_text(encoding="utf-8").splitlines() if line.startswith("# "))
