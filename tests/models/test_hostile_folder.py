"""Folders made to harm: each is refused in a sentence that names the file, little is read and nothing written."""

import json
import os
import resource
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from fivefold.core.errors import UserError
from fivefold.models.build import build_meta
from fivefold.models.sources import SafetensorsFolder
from fivefold.parallel.adapters.settings import Lora
from tests.models import tiny

CONFIG = tiny.llama()
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
GGUF = b"GGUF\x03\0\0\0" + bytes(16)
Tree = dict[str, Any]


def parts(file: Path) -> tuple[Tree, bytes]:
    """The header's tree of a safetensors file, and its tensors' bytes."""
    content = file.read_bytes()
    start = 8 + struct.unpack("<Q", content[:8])[0]
    return json.loads(content[8:start]), content[start:]


def put(file: Path, text: bytes, data: bytes, claimed: int | None = None) -> None:
    file.write_bytes(struct.pack("<Q", len(text) if claimed is None else claimed) + text + data)


def header(change: Callable[[Tree], Any]) -> Callable[[Path], None]:
    """Damage that changes the header's tree."""

    def damage(folder: Path) -> None:
        tree, data = parts(folder / SINGLE)
        change(tree)
        put(folder / SINGLE, json.dumps(tree).encode(), data)

    return damage


def raw(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage that changes the header's text."""

    def damage(folder: Path) -> None:
        tree, data = parts(folder / SINGLE)
        put(folder / SINGLE, change(json.dumps(tree).encode()), data)

    return damage


def content(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    """Damage that changes the file's bytes."""

    def damage(folder: Path) -> None:
        (folder / SINGLE).write_bytes(change((folder / SINGLE).read_bytes()))

    return damage


def index(change: Callable[[Tree], Any] | str) -> Callable[[Path], None]:
    """The folder in two files with an index, which is then changed (text: replaced)."""

    def damage(folder: Path) -> None:
        tree, _ = parts(folder / SINGLE)
        (folder / SINGLE).rename(folder / "a.safetensors")
        whole: Tree = {"weight_map": dict.fromkeys((key for key in tree if key != "__metadata__"), "a.safetensors")}
        if isinstance(change, str):
            (folder / INDEX).write_text(change)
            return
        change(whole)
        (folder / INDEX).write_text(json.dumps(whole))

    return damage


def elsewhere(name: str) -> Callable[[Path], None]:
    """One tensor is said to lie in `name`; a whole copy lies outside of the folder."""

    def damage(folder: Path) -> None:
        (folder.parent / "outside.safetensors").write_bytes((folder / SINGLE).read_bytes())
        path = name.replace("OUTSIDE", str(folder.parent / "outside.safetensors"))
        index(lambda tree: tree["weight_map"].update({"model.norm.weight": path}))(folder)

    return damage


def linked(folder: Path) -> None:
    (folder / SINGLE).rename(folder.parent / "outside.safetensors")
    (folder / SINGLE).symlink_to(folder.parent / "outside.safetensors")


def linked_folder(folder: Path) -> None:
    (folder.parent / "there").mkdir()
    (folder.parent / "there" / "b.safetensors").write_bytes((folder / SINGLE).read_bytes())
    (folder / "sub").symlink_to(folder.parent / "there")
    index(lambda tree: tree["weight_map"].update({"model.norm.weight": "sub/b.safetensors"}))(folder)


def pipe(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def a_folder(folder: Path) -> None:
    (folder / SINGLE).unlink()
    (folder / SINGLE).mkdir()


def by_gguf(folder: Path) -> None:
    (folder / "b.gguf").write_bytes(GGUF)
    index(lambda tree: tree["weight_map"].update({"model.norm.weight": "b.gguf"}))(folder)


def no_file(folder: Path) -> None:
    index(lambda tree: tree["weight_map"].update({"model.norm.weight": "b.safetensors"}))(folder)


def norm(**values: Any) -> Callable[[Tree], Any]:
    return lambda tree: tree["model.norm.weight"].update(values)


def overlap(tree: Tree) -> None:
    """Two tensors of one shape over the same bytes, and as many bytes that nobody claims."""
    tree["model.layers.1.input_layernorm.weight"] = dict(tree["model.layers.0.input_layernorm.weight"])


def shifted(tree: Tree) -> None:
    for entry in tree.values():
        if "data_offsets" in entry:
            entry["data_offsets"] = [offset + 8 for offset in entry["data_offsets"]]


def twice(text: bytes) -> bytes:
    tree = json.loads(text)
    again = json.dumps({"model.norm.weight": tree["model.norm.weight"]}).encode()
    return text[:-1] + b"," + again[1:]


HARM: dict[str, Callable[[Path], None]] = {
    "an empty file": content(lambda _: b""),
    "seven bytes": content(lambda c: c[:7]),
    "only the length": content(lambda c: c[:8]),
    "half of the header": content(lambda c: c[:100]),
    "one byte short": content(lambda c: c[:-1]),
    "half of the tensors": content(lambda c: c[: len(c) // 2]),
    "one byte more": content(lambda c: c + b"\0"),
    "a megabyte more": content(lambda c: c + b"\0" * 2**20),
    "zeros": content(lambda c: b"\0" * len(c)),
    "a zip archive": content(lambda c: b"PK\3\4" + c),
    "a GGUF file": content(lambda _: GGUF),
    "a pickle": content(lambda _: b"\x80\x02cos\nsystem\n(S'false'\ntR."),
    "a web page": content(lambda _: b"<!DOCTYPE html><html>rate limited</html>" * 9),
    "a pointer of git lfs": content(lambda _: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"),
    "a header of 2^63 bytes": content(lambda c: struct.pack("<Q", 2**63) + c[8:]),
    "a header as long as all numbers": content(lambda c: b"\xff" * 8 + c[8:]),
    "a header as long as the file": content(lambda c: struct.pack("<Q", len(c) - 8) + c[8:]),
    "no JSON": raw(lambda _: b"tensors"),
    "not UTF-8": raw(lambda text: text.replace(b"norm", b"n\xff\xferm")),
    "a list": raw(lambda _: b"[]"),
    "a number": raw(lambda _: b"7"),
    "deep JSON": raw(lambda _: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a key twice": raw(twice),
    "a key twice in an entry": raw(lambda text: text.replace(b'"dtype":', b'"dtype": "F32", "dtype":', 1)),
    "NaN for a size": raw(lambda text: text.replace(b"[0, ", b"[NaN, ", 1)),
    "text after the JSON": raw(lambda text: text + b"{}"),
    "no tensors": raw(lambda _: b"{}"),
    "an overlap": header(overlap),
    "a gap": header(shifted),
    "an entry that is a list": header(lambda tree: tree.update({"model.norm.weight": []})),
    "an entry without a type": header(lambda tree: tree["model.norm.weight"].pop("dtype")),
    "an unknown type": header(norm(dtype="F31")),
    "a type that is a list": header(norm(dtype=["F32"])),
    "integers for weights": header(norm(dtype="I32")),
    "a negative size": header(norm(shape=[-48])),
    "a size of 2^62": header(norm(shape=[2**62])),
    "sizes that overflow": header(norm(shape=[2**32, 2**32])),
    "a size that is true": header(norm(shape=[True])),
    "a fractional size": header(norm(shape=[48.0])),
    "a text for a shape": header(norm(shape="48")),
    "negative offsets": header(norm(data_offsets=[-128, 0])),
    "offsets backwards": header(lambda tree: tree["model.norm.weight"]["data_offsets"].reverse()),
    "three offsets": header(lambda tree: tree["model.norm.weight"]["data_offsets"].append(0)),
    "offsets beyond the file": header(norm(data_offsets=[2**40, 2**40 + 128])),
    "another shape": header(norm(shape=[6, 8])),
    "a parent folder": elsewhere("../outside.safetensors"),
    "an absolute path": elsewhere("OUTSIDE"),
    "a way out and in again": elsewhere("../model/../outside.safetensors"),
    "a link": linked,
    "a link to a folder": linked_folder,
    "a pipe": pipe,
    "a folder for a file": a_folder,
    "a file that is not there": no_file,
    "an index of a list": index("[]"),
    "an index that is no JSON": index("{"),
    "an index that is a GGUF file": index(GGUF.decode()),
    "an index of a GGUF file": by_gguf,
    "an index with a key twice": index('{"weight_map": {"a": "a.safetensors"}, "weight_map": {}}'),
    "an index without its map": index(lambda tree: tree.pop("weight_map")),
    "an index of numbers": index(lambda tree: tree.update(weight_map={"model.norm.weight": 7})),
    "an index with less": index(lambda tree: tree["weight_map"].pop("model.norm.weight")),
    "an index with more": index(lambda tree: tree["weight_map"].update({"model.other": "a.safetensors"})),
}  # fmt: skip


def test_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    sound = tmp_path / "sound"
    sound.mkdir()
    model = tiny.filled(CONFIG, biases=True)
    save_file({name: p.detach().clone() for name, p in model.named_parameters()}, sound / SINGLE)
    SafetensorsFolder(sound, build_meta(CONFIG))  # as it is, it is fine
    for number, harm in enumerate(HARM):
        with subtests.test(msg=harm):
            place = tmp_path / str(number)
            folder = place / "model"
            shutil.copytree(sound, folder)
            HARM[harm](folder)
            before = sorted(place.rglob("*"))
            memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            with pytest.raises(UserError) as refused:
                SafetensorsFolder(folder, build_meta(CONFIG))
            assert str(folder) in str(refused.value)
            assert ("GGUF" in harm) == ("GGUF" in refused.value.what)
            assert sorted(place.rglob("*")) == before
            assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory < 2**18  # KiB: 256 MiB


def test_there_are_many() -> None:
    assert len(HARM) >= 40


@pytest.mark.parametrize("alpha", ["x", None, float("nan"), 0])
def test_an_adapter_with_an_alpha_that_is_no_number_is_refused(alpha: Any) -> None:
    with pytest.raises(UserError, match="an adapter with alpha="):
        Lora(alpha=alpha)
