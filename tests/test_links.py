"""Every relative link and anchor of README.md, CONTRIBUTING.md, SECURITY.md, CHANGELOG.md and docs/ resolves, and every
page is in the navigation of the site. `make docs` asks the same of the built site, whose anchors mkdocs makes."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from tests.pages import DOCS, ROOT

PAGES = [*sorted(ROOT.glob("*.md")), *DOCS]
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)\s]*)\)")
CODE = re.compile(r"^```.*?^```$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
OLD = re.compile(r"\bdocs/(?!index\.md)\w+\.md")  # a page outside of the folders of its kind
KINDS = {"start", "howto", "reference", "explain", "evidence"}
MAY_LINK_CODE = ("docs/explain/architecture.md", "docs/explain/extending.md", "README.md", "CONTRIBUTING.md")


def anchor(heading: str) -> str:
    """The anchor that a heading gets."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading.replace("`", "")).strip().lower()
    return re.sub(r"[^\w\- ]", "", text).replace(" ", "-")


def anchors(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [anchor(heading) for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)]


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_every_link_and_anchor_resolves(subtests: pytest.Subtests) -> None:
    known = {page.resolve(): anchors(page) for page in PAGES}
    found = 0
    for page in PAGES:
        with subtests.test(msg=name(page)):
            wrong = []
            for link in LINK.findall(CODE.sub("", page.read_text(encoding="utf-8"))):
                found += 1
                path, _, at = link.partition("#")
                target = (page.parent / path).resolve() if path else page.resolve()
                if not target.exists() or (at and at not in known.get(target, [at])):
                    wrong.append(link)
            assert wrong == []
    assert found > 200


def test_no_page_has_two_headings_of_one_name() -> None:
    """The second would have another anchor, and on the site another one than here."""
    twice = {name(page): [each for each, times in Counter(anchors(page)).items() if times > 1] for page in DOCS}
    assert {page: found for page, found in twice.items() if found} == {}


def test_every_page_is_of_a_kind_and_in_the_navigation() -> None:
    pages = {page.relative_to(ROOT / "docs").as_posix() for page in DOCS}
    assert {page.partition("/")[0] for page in pages - {"index.md"}} == KINDS
    listed = re.findall(r": ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(listed) == sorted(pages)


def test_the_site_fetches_nothing() -> None:
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    assert site["strict"] is True and site["theme"]["font"] is False
    assert not any("://" in each for each in [*site.get("extra_css", []), *site.get("extra_javascript", [])])


def test_no_path_of_an_earlier_place_is_left() -> None:
    files = [file for folder in ("src", "tests", "benchmarks", "tools") for file in (ROOT / folder).rglob("*")]
    texts = [file for file in files if file.suffix in (".py", ".yaml", ".toml", ".j2") and file != Path(__file__)]
    texts += [ROOT / "Makefile", ROOT / "pyproject.toml", *PAGES]
    left = {
        name(file): found
        for file in texts
        if (found := [each for each in OLD.findall(file.read_text(encoding="utf-8")) if "legacy" not in each])
    }
    assert left == {}


def test_pages_that_messages_name_are_there_and_installed() -> None:
    """A message names a page as `fivefold docs howto/data`: an installation has no folder `docs/`."""
    for file in (ROOT / "src").rglob("*"):
        if file.suffix in (".py", ".yaml"):
            text = file.read_text(encoding="utf-8")
            named = re.findall(r"\bfivefold docs ([a-z]+/\w+)", text)
            assert [page for page in named if not (ROOT / f"docs/{page}.md").exists()] == [], file
            texts = _texts(text) if file.suffix == ".py" else [text]
            assert [each for each in texts if re.search(r"\bdocs/[a-z]+/\w+\.md", each)] == [], file


def _texts(code: str) -> Iterator[str]:
    """Strings of code, without docstrings."""
    nodes = [*ast.walk(ast.parse(code))]
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {ast.get_docstring(node, clean=False) for node in nodes if isinstance(node, documented)}
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value not in docstrings:
            yield node.value


def test_pages_that_code_names_are_there() -> None:
    for folder in ("src", "benchmarks"):
        for file in (ROOT / folder).rglob("*"):
            if file.suffix in (".py", ".yaml", ".toml"):
                text = file.read_text(encoding="utf-8")
                gone = [
                    page for page in re.findall(r"\bdocs/[a-z]+/\w+\.(?:md|svg)", text) if not (ROOT / page).exists()
                ]
                assert gone == [], file


def test_user_pages_link_no_source() -> None:
    pages = [page for page in PAGES if name(page) not in MAY_LINK_CODE and name(page) != "CHANGELOG.md"]
    links = {name(page): [e for e in LINK.findall(page.read_text(encoding="utf-8")) if ".py" in e] for page in pages}
    assert {page: found for page, found in links.items() if found} == {}
