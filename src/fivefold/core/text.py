r"""Text for the reader: shortened names, and lines for a terminal in which no character is a command.

Escape sequences move the cursor, set titles and answer back; a carriage return overwrites a line, and bidirectional
controls reorder it (CVE-2021-42574). Each is shown as Python writes it, `\x1b`; line feeds and tabs stay.
"""

import re
import sys
from collections.abc import Iterable
from typing import TextIO


def listed(names: Iterable[object], most: int) -> str:
    """`a, b and 3 more`, with the first `most` named."""
    every = [str(name) for name in names]
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")


def shortened(text: str, most: int) -> str:
    """At most `most` characters of `text`; a shortened text ends in three dots."""
    return text if len(text) <= most else text[: most - 3] + "..."


def any_layer(name: str) -> str:
    """Write `*` for every number in a name: `layers.*.mlp` for `layers.12.mlp`."""
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


_BIDIRECTIONAL = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_LINES = (0x2028, 0x2029)  # not a line feed, though some programs end a line there
_CONTROLS = (*range(0x20), *range(0x7F, 0xA0))
_SHOWN = {code: ascii(chr(code))[1:-1] for code in (*_CONTROLS, *_LINES, *_BIDIRECTIONAL) if chr(code) not in "\n\t"}


def shown(text: str) -> str:
    """`text` with its control characters written out."""
    return text.translate(_SHOWN)


def folded(name: str, width: int, *, before: str, indent: str = " ") -> str:
    """Fold a long name into lines of `width` characters, without breaking its parts: a line ends before one of the
    characters `before`, and the next begins with `indent`. A part that is longer than a line gets its own."""
    first, *parts = re.split(f"(?=[{re.escape(before)}])", name)
    lines = [first]
    for part in parts:
        if lines[-1].strip() and len(lines[-1]) + len(part) > width:
            lines.append(indent)
        lines[-1] += part
    return "\n".join(lines)


def say(text: object, *, stream: TextIO | None = None) -> None:
    """Print a line that may hold text from elsewhere. `stream` None: standard output."""
    print(shown(str(text)), file=stream or sys.stdout, flush=True)
