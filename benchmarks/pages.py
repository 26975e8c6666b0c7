"""Tables of results in the pages of `docs/`, each between two marks."""

from pathlib import Path


def put_between(begin: str, end: str, text: str, page: Path) -> None:
    """Replace what stands between the two marks of `page` by `text`. Exits with a sentence when a mark is missing."""
    before, found, rest = page.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(end)
    if not (found and ended):
        raise SystemExit(f"{page} lacks the marks {begin} and {end}")
    page.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}", encoding="utf-8")
