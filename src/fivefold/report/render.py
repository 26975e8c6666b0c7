"""Rendering of templates: every page is one self-contained HTML file."""

from base64 import b64encode
from collections.abc import Iterable
from datetime import datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fivefold.core.files import put
from fivefold.core.system import versions
from fivefold.core.text import shown
from fivefold.report import curves
from fivefold.report.findings import Findings, On, Plot, parts_of
from fivefold.report.slices import SliceMap

SCRIPT = Path(curves.__file__).with_name("curves.js")


def to_html(findings: Findings) -> str:
    """Render as one HTML file."""
    shown_here = [part for section in findings.shown_on(On.PAGE) for part in parts_of(section.parts)]
    drawings = [part.drawing for part in shown_here if isinstance(part, Plot)]
    has_curves = any(isinstance(drawing, curves.Drawing) for drawing in drawings)
    return render(
        "findings.html.j2", [drawing for drawing in drawings if isinstance(drawing, SliceMap)],
        script=SCRIPT if has_curves else None, findings=findings, page=On.PAGE,
    )  # fmt: skip


def write_page(findings: Findings, path: str) -> None:
    """Write one HTML file, and make its folder if it is missing."""
    write(to_html(findings), Path(path), instead="name another file: --html FILE")


def render(template: str, maps: Iterable[SliceMap], *, script: Path | None = None, **values: Any) -> str:
    """Render `template` with `values`; control characters are written out as on a terminal. `maps`: the slice maps on
    the page. `script`: the only script that the page's policy allows, by its hash."""
    environment = Environment(
        loader=PackageLoader("fivefold.report", "."),
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined,
    )  # fmt: skip
    environment.filters["pixels"] = lambda value: f"{value:.1f}".removesuffix(".0")
    stripes = sorted({fill for slices in maps for fill in slices.fills if fill.startswith("ranks-")})
    when = datetime.now().astimezone().strftime("%Y-%m-%d %H:%M %Z")
    text = script.read_text(encoding="utf-8") if script else ""
    page = environment.get_template(template).render(
        stripes=stripes,
        versions=list(versions().items()),
        when=when,
        script=Markup(text),
        policy=_policy(text),
        **values,
    )
    return shown(page)


def _policy(script: str) -> str:
    """Security policy: nothing is fetched, and only `script` runs, if any."""
    allowed = f"script-src 'sha256-{b64encode(sha256(script.encode()).digest()).decode()}'; " if script else ""
    return f"default-src 'none'; {allowed}style-src 'unsafe-inline'; img-src data:"


def write(html: str, path: Path, *, instead: str) -> None:
    """Write a page; see `put`."""
    put(path, html.encode(), instead=instead)
