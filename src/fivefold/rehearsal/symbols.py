"""Imports of a shared library: the undefined names in its dynamic symbol table."""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_DYNSYM = 11  # type of the section of dynamic symbols
_SECTION, _SYMBOL = "<IIQQQQIIQQ", "<IBBHQQ"  # of a 64-bit ELF file, little endian


@dataclass(frozen=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int  # the section of its names


def undefined(library: Path) -> frozenset[str]:
    """Names that `library` (64-bit ELF, little endian) imports from other libraries. Raises `ValueError` for another
    kind of file."""
    with library.open("rb") as file:
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            raise ValueError(f"{library} is no 64-bit ELF file")
        start, size, count = (*struct.unpack_from("<Q", head, 40), *struct.unpack_from("<HH", head, 58))
        file.seek(start)
        sections = [_section(*struct.unpack(_SECTION, file.read(size))) for _ in range(count)]
        parts = {}
        for section in sections:
            if section.kind == _DYNSYM:
                for part in (section, sections[section.link]):
                    file.seek(part.offset)
                    parts[part] = file.read(part.size)
                return frozenset(_undefined(parts[section], parts[sections[section.link]]))
    return frozenset()


def _section(_: int, kind: int, flags: int, address: int, offset: int, size: int, link: int, *__: int) -> _Section:
    return _Section(kind, offset, size, link)


def _undefined(symbols: bytes, names: bytes) -> Iterator[str]:
    for name, _, _, section, _, _ in struct.iter_unpack(_SYMBOL, symbols):
        if name and not section:
            yield names[name : names.index(b"\0", name)].decode()
