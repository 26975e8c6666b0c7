"""Run files and overrides that are mistyped: each is refused in a sentence, and nothing is written."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from fivefold.config import keys, load_config
from fivefold.core.errors import UserError
from fivefold.training import launch
from tests.commands import Crew

LAUGHS = "a: &a0 [x]\n" + "".join(f"b{n}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]\n" for n in range(8))  # 10**8 values

FILES = {
    "a time for a number": ("train: {max_steps: 1:30:00}", "train.max_steps: '1:30:00' is not a whole number"),
    "a list that holds itself": ("data: &a {train: [*a]}", "run.yaml is not YAML: it never ends"),
    "an unknown tag": ("run:\n  name: !foo bar", "run.yaml:2 is not YAML: could not determine"),
    "a tag of Python's": ("run: {name: !!python/object/apply:os.system [id]}", "run.yaml:1 run.name is ['id']"),
    "code in a tag": ("run: {name: !!python/name:os.system x}", "run.yaml:1 is not YAML: could not determine"),
    "a tag that lies": ("train: {max_steps: !!int x}", "run.yaml:1 is not YAML: 'x' is no int: invalid literal"),
    "a bool that is none": ("train: {compile: !!bool x}", "run.yaml:1 is not YAML: 'x' is no bool"),
    "an empty number": ("train:\n  seed: !!int ''", "run.yaml:2 is not YAML: '' is no int"),
    "a date that is none": ("train: {seed: !!timestamp x}", "run.yaml:1 is not YAML: 'x' is no timestamp"),
    "aliases of aliases": (LAUGHS, "run.yaml:1 is not YAML: its aliases stand for too many values"),
    "a list for a key": ("{[a, b]: 1}", "a key is a word"),
    "infinity": ("optimizer: {learning_rate: .inf}", "learning_rate is inf; it should be a finite number"),
    "200,000 prompts": ("sample:\n  prompts:\n" + "  - some words\n" * 200_000, "a run file of more than 1 MiB"),
    "nothing": ("", "run.yaml is empty"),
    "only a comment": ("# later\n", "run.yaml is empty"),
    "an empty list of decay rates": ("optimizer: {betas: []}", "run.yaml:1 optimizer.betas"),
    "a way out of the folder": ("run: {name: ../../../x}", "run.yaml:1 run.name: '../../../x' is a path"),
    "an absolute name": ("run: {name: /tmp/x}", "is a path"),
    "a Windows path": (r"run: {name: 'a\b'}", "is a path"),
    "the folder above": ("run: {name: ..}", "is a path"),
    "escapes of a terminal": ('run: {name: "a\\e[2Jb"}', "characters that cannot be shown"),
    "a line break": ('run: {name: "a\\nb"}', "characters that cannot be shown"),
    "a very long name": (f"run: {{name: {'x' * 241}}}", "241 bytes"),
    "a very long folder": (f"run: {{dir: {'x/' * 2000}}}", "4000 bytes"),
    "a very large degree": ("layout: {cp: 9223372036854775807}", "cp 9223372036854775807 is not a degree"),
    "a very large vocabulary": ("tokenizer: {name_or_path: 'train:99999999999999'}", "too large"),
}


def test_a_file_is_refused_in_a_sentence(
    subtests: pytest.Subtests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in FILES:
        with subtests.test(msg=kind):
            text, expected = FILES[kind]
            Path("run.yaml").write_text(text, encoding="utf-8")
            with pytest.raises(UserError) as refused:
                load_config(Path("run.yaml"))
            assert expected in str(refused.value)
            assert [path.name for path in tmp_path.iterdir()] == ["run.yaml"]


def test_an_alias_stands_for_what_it_names(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("data: {train: [&a {path: x.txt}, *a]}", encoding="utf-8")
    assert [source.path for source in load_config(tmp_path / "run.yaml").data.train] == ["x.txt", "x.txt"]


def test_no_number_is_counted_by_sixties_or_eights(subtests: pytest.Subtests) -> None:
    """YAML 1.1 reads 1:30:00 as 5400 and 0100 as 64."""
    for key in keys():
        if isinstance(key.default, int | float) and not isinstance(key.default, bool):
            with subtests.test(msg=key.name), pytest.raises(UserError):
                load_config(None, ["adapter.name=lora", f"{key.name.replace('[]', '')}=1:30:00"])
    read = load_config(None, ["train.max_steps=0100", "run.name=0100"])
    assert (read.train.max_steps, read.run.name) == (100, "0100")
    named = {text: load_config(None, [f"run.name={text}"]).run.name for text in ("0_100", "-0100", "+01_0", "00")}
    assert named == {text: text for text in named}


def test_a_date_is_a_name_like_any_other(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("run: {name: 2026-01-31}", encoding="utf-8")
    assert load_config(tmp_path / "run.yaml").run.name == "2026-01-31"


def test_a_file_that_says_that_it_says_nothing_has_every_default(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("{}", encoding="utf-8")
    assert load_config(tmp_path / "run.yaml").run.name == "demo"


# ---- overrides: any value for any key, as far as the start of the workers --------------------------------------------

VALUES = (
    *("", "[]", "{}", "''", "-1", "1e999", ".nan", "[null]", "[[]]", "{a: {b: 1}}", "2024-01-01", "{[1]: 2}"),
    *("x" * 5000, "../../x", "101%"),
)
EXTRA = (
    "layout",
    "data",
    "run",
    "",
    "..",
    "x",
    "data.train.9",
    "data.train.²",
    "a.b.c.d",
    "model.overrides.vocab_size",
)


class Started(Exception):
    """The workers would have been started."""


def start(*_: Any, **__: Any) -> None:
    raise Started


@pytest.mark.parametrize("value", VALUES, ids=lambda value: value[:12])
def test_an_override_is_taken_or_refused_in_a_sentence(
    value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    names = [key.name.replace("[]", ".0") for key in keys()]
    with (
        patch.object(launch, "_prepare"),
        patch.object(launch, "Workers", Crew),
        patch.object(launch, "start_workers", start),
    ):
        for number, name in enumerate((*names, *EXTRA)):
            with pytest.raises((UserError, Started)):
                launch.run(None, [f"run.name=r{number}", f"{name}={value}"])
