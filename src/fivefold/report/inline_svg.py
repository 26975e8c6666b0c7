"""matplotlib's SVG made fit for a page: a third of the size, in the page's colours and font, naming nothing outside."""

import re
from collections.abc import Mapping
from xml.etree import ElementTree

_LEFT_OUT = ("metadata", "style")
_OWN_NAMES = re.compile(r"[a-z]+\d*[a-z\d.]*_\d+$")  # `line2d_7`: nothing refers to them


def inline_svg(text: str, colours: Mapping[str, str]) -> str:
    """The `<svg>` of an SVG file. `colours`: CSS variable -> the colour that stands for it."""
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text[text.index("<svg") :]).replace("xlink:href", "href")
    root = ElementTree.fromstring(text)
    _shrink(root, colours)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    return ElementTree.tostring(root, encoding="unicode")


def _shrink(element: ElementTree.Element, colours: Mapping[str, str]) -> None:
    element.tail = None
    if element.tag not in ("text", "tspan"):
        element.text = None
    if _OWN_NAMES.match(element.get("id", "")):
        del element.attrib["id"]
    for name, value in element.attrib.items():
        element.attrib[name] = _attribute(name, value, colours)
    children: list[ElementTree.Element] = []
    for child in element:
        _shrink(child, colours)
        if child.tag == "g" and not child.attrib:
            children += list(child)
        elif child.tag not in _LEFT_OUT and child.get("style") != "fill:none":
            children.append(child)
    element[:] = children
    _lift_style(element)


def _attribute(name: str, value: str, colours: Mapping[str, str]) -> str:
    """A value with fewer digits; a style with the page's colours and font."""
    if name in ("id", "href", "clip-path"):
        return value
    if name == "style":
        for variable, stand_in in colours.items():
            value = value.replace(stand_in, f"var(--{variable})")
        value = re.sub(r"font: (?:(bold|700) )?([\d.]+px) [^;]*", _font, value)  # matplotlib before 3.11
        value = re.sub(r"font-family: [^;]*(; )?", "", value)
        return value.replace(": ", ":").replace("; ", ";")
    value = re.sub(r"(\d\.\d)\d+", r"\1", value)
    return re.sub(r"\s+", " ", value).strip()


def _font(match: re.Match[str]) -> str:
    return f"font-size: {match[2]}" + ("; font-weight: 700" if match[1] else "")


def _lift_style(element: ElementTree.Element) -> None:
    """What all children of a group say of their style, the group says: every marker of a curve has the curve's."""
    styles = {child.get("style") for child in element}
    if element.tag == "g" and not element.get("style") and len(element) > 1 and len(styles) == 1:
        style = styles.pop()
        if style:
            element.set("style", style)
            for child in element:
                del child.attrib["style"]
