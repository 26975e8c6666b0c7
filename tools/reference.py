"""Write the pages of docs/reference/ from the code.

    python tools/reference.py            write them
    python tools/reference.py --check    exit with 1 where a page is not what the code says

Each page is a function in `PAGES`. A description that is missing on a page is missing in the code: a key of the run
file (`config/schema.py`), a field of the layout (`parallel/*/keys.py`), an option of a command (`cli/`), a docstring, a
metric and a file of a run (`core/run_folder.py`). Nothing here imports torch.
"""

import argparse
import ast
import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any, get_args

import typer

import fivefold
from fivefold.cli import app
from fivefold.config import keys
from fivefold.config.key import Key, json_schema_of
from fivefold.config.peers import DIFFERENT, SAME
from fivefold.config.schema import RunConfig
from fivefold.core.errors import UserError
from fivefold.core.keys import LayoutKey
from fivefold.core.model_limits import UNKNOWN, ModelLimits
from fivefold.core.run_folder import METRICS, RUN_FILES
from fivefold.models.config_facts import facts_of_config
from fivefold.parallel import layout as layout_module
from fivefold.parallel import lower as lower_module
from fivefold.parallel.adapters import spec as adapters
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.context.keys import ContextKeys
from fivefold.parallel.experts.keys import ExpertKeys
from fivefold.parallel.fp8 import spec as fp8
from fivefold.parallel.fp8.keys import Fp8Keys
from fivefold.parallel.fsdp import spec as fsdp
from fivefold.parallel.layout import DEGREES, KEYS, OF_PARTS, PARTS, Layout
from fivefold.parallel.legality import violations
from fivefold.parallel.nodes.keys import NodeKeys
from fivefold.parallel.outer import spec as outer
from fivefold.parallel.outer.keys import OuterKeys
from fivefold.parallel.pipeline.keys import PipelineKeys
from fivefold.parallel.tensor.keys import TensorKeys

FOLDER = Path(__file__).parents[1] / "docs" / "reference"
MANY = 2**31  # no bound that a reader needs
WIDTH = 88  # of a signature on one line
MADE = "<!-- written by tools/reference.py: change the code, then run it -->"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description="Write the pages of docs/reference/ from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 where a page is out of date")
    if parser.parse_args(arguments).check:
        wrong = stale()
        for name in wrong:
            print(f"docs/reference/{name} is not what the code says: python tools/reference.py")
        return 1 if wrong else 0
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    return 0


def pages() -> dict[str, str]:
    """Every page by its name."""
    return {name: f"{MADE}\n\n{make().strip()}\n" for name, make in PAGES.items()}


def stale() -> list[str]:
    """Names of the pages that are missing, or are not what the code says."""
    return [name for name, text in pages().items() if not _is(FOLDER / name, text)]


def _is(file: Path, text: str) -> bool:
    return file.is_file() and file.read_text(encoding="utf-8") == text


# ---- Markdown --------------------------------------------------------------------------------------------------------


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; `|` in a cell is escaped."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in lines
    )


def code(text: Any) -> str:
    """`text` as code; empty stays empty."""
    return f"`{text}`" if str(text) else ""


def plain(value: Any) -> str:
    """A value as YAML has it on one line."""
    if isinstance(value, str):
        return value if value else '""'
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(plain, value)) + "]"
    if hasattr(value, "model_dump"):
        return plain(value.path)
    return json.dumps(value)


# ---- keys of the run file --------------------------------------------------------------------------------------------


def keys_page() -> str:
    """Keys of the run file: type, default, meaning."""
    schema = json_schema_of(RunConfig)
    parts = [
        "# Keys of the run file",
        "Every key has a default, and an unknown key is an error. `fivefold train --keys` prints this list, and "
        "`fivefold train --schema` prints it as a JSON schema for editors. `key=value` on the command line wins over "
        "the file, and the file wins over the defaults. Numbers may be written as `8k`, `500M`, `1%` or `1e-4`.",
    ]
    for section, of_section in groupby(keys(), key=lambda key: key.section):
        rows = [(code(key.name), _type(schema, key), _default(schema, key), key.help) for key in of_section]
        parts += [f"## {section}", table(("key", "type", "default", "meaning"), rows)]
    return "\n\n".join(parts)


def _default(schema: Mapping[str, Any], key: Key) -> str:
    if key.default is None and key.last in _section(schema, key).get("required", ()):
        return "required"
    return "not set" if key.default is None else code(plain(key.default))


def _section(schema: Mapping[str, Any], key: Key) -> Mapping[str, Any]:
    """The schema of the object that has the key: that of a section, of a section in it, or of the items of a list."""
    reference = schema["properties"][key.section]
    names = re.findall(r"#/\$defs/(\w+)", json.dumps(reference))
    section = schema["$defs"][names[0]]
    if key.name.count(".") > 1:
        inner = section["properties"][key.name.split(".")[1].removesuffix("[]")]
        section = schema["$defs"][re.findall(r"#/\$defs/(\w+)", json.dumps(inner))[0]]
    found: Mapping[str, Any] = section
    return found


def _type(schema: Mapping[str, Any], key: Key) -> str:
    """The type of a key in words, or its choices."""
    if key.choices:
        choices = dict.fromkeys(map(plain, key.choices))
        return ", ".join(each if each.startswith("a ") else code(each) for each in choices)
    found = dict.fromkeys(_kinds(_section(schema, key)["properties"][key.last]))
    return " or ".join(each for each in found if each != "null" or len(found) == 1)


def _kinds(node: Mapping[str, Any]) -> Iterator[str]:
    for each in node.get("anyOf", [node]):
        kind = each.get("type")
        if "anyOf" in each and each is not node:
            yield from _kinds(each)
        elif "$ref" in each:
            yield "source"
        elif "enum" in each:
            yield from map(code, each["enum"])
        elif "const" in each:
            yield code(each["const"])
        elif kind == "string" and "pattern" in each:
            continue  # another way to write the number
        elif isinstance(kind, list) or kind == "string":
            yield "text"
        elif kind == "boolean":
            yield "`true`, `false`"
        elif kind == "array" and "prefixItems" in each:
            yield f"list of {len(each['prefixItems'])} numbers"
        elif kind == "array":
            of = " or ".join(dict.fromkeys(_kinds(each["items"]))) if "items" in each else ""
            yield f"list of {of}" if of else "list"
        elif kind in ("integer", "number"):
            yield f"{kind}{_bounds(each)}"
        elif kind == "object":
            yield "mapping"
        elif kind == "null":
            yield "null"


def _bounds(node: Mapping[str, Any]) -> str:
    least, above = node.get("minimum"), node.get("exclusiveMinimum")
    most, below = node.get("maximum"), node.get("exclusiveMaximum")
    low = f"≥ {least}" if least is not None else f"> {above}" if above is not None else ""
    if least is not None and least == most:
        return f" {least}"
    high = f"≤ {most:,}" if most is not None and most < MANY else f"< {below}" if below is not None else ""
    said = ", ".join(filter(None, [low, high]))
    return f" {said}" if said else ""


def peers_page() -> str:
    """Names that other trainers have for the keys."""

    def named(names: str) -> str:
        return ", ".join(map(code, names.split()))

    return "\n\n".join([
        "# Keys of other trainers",
        "A run file with one of these names is refused with the key to write here. The names are those of "
        "transformers, TRL, axolotl, LLaMA-Factory, DeepSpeed, Megatron-LM, torchtitan and litgpt. `fivefold convert` "
        "reads whole configs ([how](../howto/convert.md)).",
        "## The same meaning",
        table(("key here", "names elsewhere"), [(code(key), named(names)) for key, names in SAME.items()]),
        "## Another meaning",
        table(("names elsewhere", "what to do here"), [(named(names), answer) for names, answer in DIFFERENT.items()]),
    ])  # fmt: skip


# ---- commands --------------------------------------------------------------------------------------------------------


def commands_page() -> str:
    """Verbs and their options."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    parts = [
        "# Commands",
        "`fivefold` alone lists the verbs, `fivefold --version` says what is installed. Exit codes: 0 fine, 1 the "
        "thing asked about failed, 2 the request is wrong. Errors are three lines: what is wrong and where, the likely "
        "fix, where to read more.",
        table(
            ("verb", "purpose"), [(f"[`{name}`](#fivefold-{name})", _first(verb.help)) for name, verb in verbs.items()]
        ),
    ]
    for name, verb in verbs.items():
        about, _, examples = inspect.cleandoc(verb.help or "").partition("\n\nExample")
        parts += [f"## `fivefold {name}`", _paragraphs(about)]
        if examples:
            lines = re.split(r"\s{4,}|\n", re.sub(r"^s?:|Examples?:", "", examples))
            shown = "\n".join(filter(None, map(str.strip, lines)))
            parts.append(f"<!-- not run: an example of the help -->\n```bash\n{shown}\n```")
        rows = [_option(each) for each in verb.params if each.name != "help"]
        parts.append(table(("argument or option", "value", "default", "meaning"), rows))
    return "\n\n".join(parts)


def _first(text: str | None) -> str:
    return inspect.cleandoc(text or "").partition("\n")[0]


def _paragraphs(text: str) -> str:
    """Lines joined to paragraphs."""
    return "\n\n".join(" ".join(each.split()) for each in text.split("\n\n"))


def _option(parameter: Any) -> tuple[str, str, str, str]:
    is_option = parameter.param_type_name == "option"
    is_flag = bool(getattr(parameter, "is_flag", False))
    name = ", ".join(map(code, parameter.opts)) if is_option else code(parameter.metavar or parameter.name.upper())
    kind = "" if is_flag or not is_option else _value(parameter)
    shown = parameter.show_default
    if parameter.required:
        default = "required"
    elif isinstance(shown, str):
        default = shown
    else:
        default = "" if is_flag or not shown or parameter.default in (None, (), "") else code(plain(parameter.default))
    more = " (may be repeated)" if getattr(parameter, "multiple", False) else ""
    return name, kind, default, f"{parameter.help or ''}{more}"


def _value(option: Any) -> str:
    """What stands behind an option: its metavar, or its type in words."""
    if option.metavar:
        return code(option.metavar)
    kinds = {int: "integer", float: "number", str: "text", Path: "path"}
    annotation = option.type_descriptor.annotation
    of = [each for each in (annotation, *get_args(annotation)) if each in kinds]
    return kinds[of[0]] + _bounds({"minimum": option.min, "maximum": option.max}) if of else "text"


# ---- the Python API --------------------------------------------------------------------------------------------------

GROUPS = {
    "Commands as functions": (
        "train",
        "verify",
        "compare",
        "rehearse",
        "plan",
        "estimate",
        "generate",
        "evaluate",
        "export",
    ),
    "A loop of your own": (
        "parallelize",
        "train_step",
        "gradients",
        "clip_grad_norm_",
        "logits",
        "gather",
        "scatter",
        "save",
        "load",
    ),
    "Types": (
        "Run",
        "ParallelModel",
        "StepResult",
        "LossRow",
        "Layout",
        "Lora",
        "Workload",
        "Estimate",
        "RunConfig",
        "load_config",
    ),
    "Parts of a run": ("Part", "LiveRun"),
    "Errors": ("UserError", "RunFailed"),
}


def python_page() -> str:
    """Public names: signature and docstring."""
    left = set(fivefold.__all__) - {name for names in GROUPS.values() for name in names}
    assert not left, f"tools/reference.py: GROUPS has no place for {sorted(left)}"
    parts = [
        "# Python API",
        "`import fivefold as ff` loads nothing before it is used, torch least of all. A loop of your own is shown in "
        "[its how-to](../howto/python.md).",
    ]
    for group, names in GROUPS.items():
        parts.append(f"## {group}")
        for name in names:
            parts += _described(name)
    return "\n\n".join(parts)


def _described(name: str) -> Iterator[str]:
    module, found, lines = _definition(fivefold._HOMES[name], name)
    if isinstance(found, ast.ClassDef):
        if name == "Layout":
            found.body = _with_parts(found)
        yield f"### `class ff.{name}`"
        yield from _class(name, found, lines)
    else:
        yield f"### `ff.{name}`"
        yield _signature(name, found)
        yield _docstring(found, f"{module}.{name}")


def _with_parts(layout: ast.ClassDef) -> list[ast.stmt]:
    """The body of `Layout` with those of its parts: its docstring, fields in the order of the run file, methods. What
    parts offer to `Layout` alone is left out."""
    whole = [*layout.body, *(each for part in PARTS for each in _definition(part.__module__, part.__name__)[1].body)]
    fields = {ast.unparse(each.target): each for each in whole if isinstance(each, ast.AnnAssign)}
    methods = [each for each in whole if isinstance(each, ast.FunctionDef) and each.name not in OF_PARTS]
    return [layout.body[0], *(fields[name] for name in KEYS), *methods]


def _class(name: str, found: ast.ClassDef, lines: Sequence[str]) -> Iterator[str]:
    """Docstring, fields and public members; those of a model that only fivefold uses are left out."""
    yield _docstring(found, name)
    fields = [
        (code(each.target.id), code(ast.unparse(each.annotation)), *_said_of(name, each, lines))
        for each in found.body
        if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name) and not each.target.id.startswith("_")
    ]
    if fields and name not in ("RunConfig", "ParallelModel"):
        used = [at for at in range(4) if any(row[at] for row in fields)]
        head = ("field", "type", "default", "meaning")
        yield table([head[at] for at in used], [[row[at] for at in used] for row in fields])
    rows = []
    for each in found.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            decorators = {ast.unparse(item).partition("(")[0] for item in each.decorator_list}
            if decorators & {"field_validator", "model_validator"} or any(".setter" in item for item in decorators):
                continue
            is_value = bool(decorators & {"property", "cached_property"})
            what = each.name if is_value else f"{each.name}({', '.join(_arguments(each))})"
            rows.append((code(what), " ".join(_docstring(each, f"{name}.{each.name}").split())))
    if rows:
        yield table(("member", "meaning"), rows)


def _said_of(name: str, field: ast.AnnAssign, lines: Sequence[str]) -> tuple[str, str]:
    """The default of a field, and its meaning: its help where it is one of a layout, else the comment on its line."""
    assert isinstance(field.target, ast.Name)
    if name == "Layout":
        return code(plain(_default_of(field.target.id))), KEYS[field.target.id].help
    is_value = field.value is not None and not isinstance(field.value, ast.Call)
    comment = lines[field.lineno - 1].partition("  # ")[2]
    return code(ast.unparse(field.value)) if is_value and field.value else "", comment


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef | ast.FunctionDef, list[str]]:
    """Where a public name is defined, its syntax tree and the lines of its file; names that a package hands on are
    followed."""
    spec = find_spec(module)
    assert spec is not None and spec.origin is not None
    text = Path(spec.origin).read_text(encoding="utf-8")
    tree = ast.parse(text)
    for each in reversed(tree.body):
        if isinstance(each, ast.ClassDef | ast.FunctionDef) and each.name == name:
            return module, each, text.splitlines()
    for found in ast.walk(tree):
        if (
            isinstance(found, ast.ImportFrom)
            and found.module
            and name in {each.asname or each.name for each in found.names}
        ):
            return _definition(found.module, name)
    raise LookupError(f"{module} does not define {name}")


def _arguments(found: ast.FunctionDef) -> list[str]:
    """Arguments as the code writes them, but for quotes around types that are looked up later."""
    each = found.args
    places = [*each.posonlyargs, *each.args]
    defaults: list[ast.expr | None] = [*[None] * (len(places) - len(each.defaults)), *each.defaults]
    said = [_argument(one, default) for one, default in zip(places, defaults, strict=True)]
    said += [f"*{_argument(each.vararg)}"] if each.vararg else ["*"] * bool(each.kwonlyargs)
    said += [_argument(one, default) for one, default in zip(each.kwonlyargs, each.kw_defaults, strict=True)]
    said += [f"**{_argument(each.kwarg)}"] if each.kwarg else []
    return said[1:] if places and places[0].arg in ("self", "cls") else said


def _argument(argument: ast.arg, default: ast.expr | None = None) -> str:
    kind = f": {_unquoted(argument.annotation)}" if argument.annotation else ""
    return f"{argument.arg}{kind}" + (f" = {ast.unparse(default)}" if default else "")


def _unquoted(annotation: ast.expr) -> str:
    return str(annotation.value) if isinstance(annotation, ast.Constant) else ast.unparse(annotation)


def _signature(name: str, found: ast.FunctionDef) -> str:
    returns = f" -> {_unquoted(found.returns)}" if found.returns else ""
    arguments = _arguments(found)
    text = f"{name}({', '.join(arguments)}){returns}"
    if len(text) > WIDTH:
        text = f"{name}(\n" + "".join(f"    {each},\n" for each in arguments) + f"){returns}"
    return f"```text\n{text}\n```"


def _docstring(found: ast.ClassDef | ast.FunctionDef, name: str) -> str:
    """Every public name has one."""
    text = ast.get_docstring(found)
    assert text, f"{name} has no docstring"
    return re.sub(r"::$", ":", text, flags=re.MULTILINE)


# ---- metrics, files, words -------------------------------------------------------------------------------------------


def metrics_page() -> str:
    """Metrics of `metrics.jsonl`."""
    parts = [
        "# Metrics",
        "`metrics.jsonl` has one JSON object for each logged step. Trackers and `fivefold report` take the same names. "
        "A number that is not finite is null. A name that a run does not have is not in its rows.",
    ]
    for group, names in groupby(METRICS, key=lambda name: name.rpartition("/")[0]):
        rows = [(code(name), *METRICS[name].split("; ", 1)) for name in names]
        parts += [f"## {group or 'Without a group'}", table(("name", "unit", "meaning"), rows)]
    return "\n\n".join(parts)


def run_folder_page() -> str:
    """Files of a run folder."""
    rows = [(code(name), what) for name, what in RUN_FILES.items()]
    return "\n\n".join([
        "# Files of a run",
        "A run writes to `runs/NAME`: `run.dir` and `run.name` set both parts. No file is changed in place: a reader "
        "never sees half of one. `metrics.jsonl`, `samples.jsonl` and `history.jsonl` grow by whole lines.",
        table(("file", "content"), rows),
    ])  # fmt: skip


def layout_text_page() -> str:
    """The text form of a layout."""
    degrees = [(code(f"{short}N"), code(KEYS[name].place), KEYS[name].help) for short, name in DEGREES.items()]
    options = sorted((name for name in KEYS if name not in DEGREES.values()), key=lambda name: KEYS[name].is_last)
    rows = [row for name in options for row in _words(name, KEYS[name])]
    example = "dp2.shard4.tp2+zero1+mb2+full"
    fields = {name: getattr(Layout.parse(example), name) for name in KEYS}
    said = ", ".join(f"`{name}: {plain(value)}`" for name, value in fields.items() if value != _default_of(name))
    return "\n\n".join([
        "# Text of a layout",
        "A layout is a text: degrees joined by `.`, then options that begin with `+`. Degrees of 1 and options at "
        "their default are left out; `single` means that all degrees are 1. The same text is the value of `layout` on "
        "the command line, in the run file, in reports and in file names.",
        f"`{example}` means {said}: {Layout.parse(example).world} processes.",
        "World size = `pp x dp x shard x cp x tp`. `ep` takes ranks from `shard`, `cp` and `tp`, and never multiplies "
        "the world. `train.global_batch_size = micro_batch_size x accumulation x data ranks`, and the data ranks are "
        "`dp x shard`.",
        "## Degrees",
        table(("text", "key", "meaning"), degrees),
        "## Options",
        table(("text", "key", "value", "meaning"), rows),
    ])  # fmt: skip


def _default_of(name: str) -> Any:
    return getattr(Layout(), name)


def _words(name: str, key: LayoutKey) -> Iterator[tuple[str, str, str, str]]:
    place = code(key.place)
    canonical = dict.fromkeys(key.words.values())
    for value in canonical:
        words = [word for word, each in key.words.items() if each == value]
        yield " or ".join(code(f"+{word}") for word in words), place, code(plain(value)), key.help
    if key.prefix is not None:
        yield code(f"+{key.prefix}{key.shown}"), place, code(key.shown.replace("NGiB", "N GiB")), key.help


# ---- legality --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A layout that a rule refuses. `model`: a built-in shape, or limits. `world`: devices; `batch`: rows of a step."""

    layout: str | Layout
    model: str | ModelLimits = UNKNOWN
    world: int | None = None
    batch: int | None = None
    adapter: Lora | None = None

    def refused(self) -> list[UserError]:
        """Every reason."""
        layout = self.layout if isinstance(self.layout, Layout) else Layout.parse(self.layout)
        if isinstance(self.model, ModelLimits):
            return [each.error for each in violations(layout, self.model, world=self.world, batch=self.batch)]
        facts = adapted(facts_of_config(self.model), self.adapter)
        try:
            lower_module.lower(facts, layout, 0)
        except UserError as error:
            return [error]
        return []

    @property
    def beside(self) -> str:
        """The model, the cluster and the batch, in words."""
        named = self.model if isinstance(self.model, str) else _limits(self.model)
        adapter = f"adapter {self.adapter_text}" if self.adapter else ""
        world = f"{self.world} devices" if self.world else ""
        batch = f"{self.batch} rows a step" if self.batch is not None else ""
        return ", ".join(filter(None, [named, adapter, world, batch]))

    @property
    def adapter_text(self) -> str:
        """The keys of the adapter that matter."""
        lora = self.adapter or Lora()
        more = "with target_parameters" if lora.target_parameters else ""
        return " ".join(filter(None, [f"rank {lora.rank}", "" if lora.quantize == "none" else lora.quantize, more]))


def _limits(limits: ModelLimits) -> str:
    said = {
        "query heads": limits.query, "key/value heads": limits.kv, "layers": limits.layers, "experts": limits.experts,
        "features of an expert": limits.expert_features,
    }  # fmt: skip
    found = [f"{value} {what}" for what, value in said.items() if value is not None]
    found += [f"heads made at once by `{limits.fused}`"] if limits.fused else []
    return ", ".join([*found, *(f"{axis} refused by the model" for axis in limits.refusals)])


HEADS = ModelLimits(query=32, kv=8)
REFUSALS = {
    "tp": "layers.0.mixer.weight has no role", "pp": "its layers pass more than hidden states",
    "sequence_parallel": "a router reads whole rows", "expert_tp": "its experts are one matrix",
}  # fmt: skip

# (a heading, the rule as a generator function, layouts that it refuses). A case reaches every place that yields a
# `Violation`, which `untouched` checks.
RULES: tuple[tuple[str, Callable[..., Any], tuple[Case, ...]], ...] = (
    ("World size", Layout.against_world, (
        Case("shard3.tp2.cp2", world=16), Case("tp3", world=8), Case("shard-1.tp3", world=8),
        Case("ep4", world=8),
    )),
    ("Ranks of experts", ExpertKeys.rank_violations, (
        Case("shard4.ep3", world=4), Case("shard2.tp2.ep4+etp", world=4),
    )),
    ("Secondary copies and levels", NodeKeys.violations, (
        Case("shard16+hpz1"), Case("shard16+zero2+hpz8"), Case("shard16+hier1"), Case("shard16+hpz8+hier4"),
    )),
    ("Ranks of a node", NodeKeys.rank_violations, (
        Case("shard16+hpz6", world=16), Case("shard8+hpz8", world=8), Case("shard16.ep8+hpz4", world=16),
        Case("shard8.tp2.ep8+hpz2", world=16),
        Case("shard16+hier6", world=16), Case("shard2+hier2", world=2), Case("tp2+qwz", world=2),
        Case("shard4.ep4+qwz", world=4),
    )),
    ("Secondary copies, gathers in eight bits, and a model", fsdp.violations, (
        Case("shard16+hpz8+offload_parameters", "llama-3.2-1b"), Case("shard16+hpz8+fp8", "llama-3.2-1b"),
        Case("shard16+qwz", "llama-3.2-1b", adapter=Lora()), Case("shard2.tp16+qwz", "llama-2-7b"),
        Case("shard2.cp2+qgz", "llama-3.2-1b"),
    )),
    ("Batch", Layout.against_batch, (Case("shard4+mb2", batch=12),)),
    ("Context parallelism", ContextKeys.violations, (Case("cp4+2x3"),)),
    ("Heads over context parallelism", ContextKeys.model_violations, (
        Case("cp8+ulysses", ModelLimits(query=4, kv=4)),
    )),
    ("Heads over tensor parallelism", TensorKeys.model_violations, (
        Case("tp3", HEADS), Case("tp16", ModelLimits(query=32, kv=8, fused="attention.query_key_value")),
        Case("tp2", ModelLimits(refusals={"tp": REFUSALS["tp"]})),
        Case("tp2", ModelLimits(refusals={"sequence_parallel": REFUSALS["sequence_parallel"]})),
    )),
    ("Pipeline", PipelineKeys.violations, (
        Case("single+v2"), Case(Layout(pp=2, pp_split="8 and 8")), Case("pp3+split4-4"),
    )),
    ("Stages of a schedule", PipelineKeys._stage_violations, (
        Case("pp2+v2"), Case("pp2+zbv+v3"), Case("pp2+interleaved"),
    )),
    ("Micro batches of a schedule", PipelineKeys.step_violations, (
        Case("pp4+dualpipev", batch=4), Case("pp4+interleaved+v2", batch=9),
    )),
    ("Layers over a pipeline", PipelineKeys.model_violations, (
        Case("pp8+interleaved+v2", ModelLimits(layers=12)), Case("pp2+split4-4", ModelLimits(layers=12)),
        Case("pp2", ModelLimits(refusals={"pp": REFUSALS["pp"]})),
    )),
    ("Experts", ExpertKeys.model_violations, (
        Case("shard2.ep2", ModelLimits(experts=0)), Case("shard16.ep16", ModelLimits(experts=8)),
        Case("tp2+etp", ModelLimits(experts=0)),
        Case("tp2+etp", ModelLimits(experts=8, refusals={"expert_tp": REFUSALS["expert_tp"]})),
        Case("tp16+etp", ModelLimits(experts=8, expert_features=8)),
    )),
    ("Outer steps", OuterKeys.violations, (Case("shard2+outer50"), Case("dp2+outer50+offload_optimizer"))),
    ("Outer steps and a model", outer.violations, (Case("dp2+outer50", "mixtral-8x7b"),)),
    ("fp8", Fp8Keys.violations, (Case("shard2+hp1"),)),
    ("fp8 and a model", fp8.violations, (
        Case("shard2+fp8+hp8", "llama-3.2-1b"), Case("tp2+etp+fp8", "mixtral-8x7b"),
        Case("tp16+fp8_rowwise", "llama-3.2-1b"), Case("tp32+fp8_blockwise", "llama-2-7b"),
    )),
    ("Optimizer state in 8 bits", lower_module._of_states, (Case("tp32+8bit_states", "llama-2-7b"),)),
    ("Adapters", adapters._of_recompute_and_matmuls, (
        Case("tp2+selective", "llama-3.2-1b", adapter=Lora(rank=8)),
        Case("shard2+fp8", "mixtral-8x7b", adapter=Lora(rank=8, target_parameters=("down_proj",))),
    )),
    ("Weights in four bits", adapters._of_nf4, (
        Case("shard2+fp8", "llama-3.2-1b", adapter=Lora(rank=8, quantize="nf4")),
        Case("tp28", "qwen2.5-7b", adapter=Lora(rank=8, quantize="nf4")),
    )),
)  # fmt: skip


def legality_page() -> str:
    """Rules by which a layout is refused, each with layouts that break it."""
    parts = [
        "# Refused layouts",
        "A layout that cannot run is refused before a process starts, with its arithmetic and the nearest values that "
        "fit. Each rule stands here with layouts that break it, and with what is then printed.",
    ]
    for title, rule, cases in RULES:
        parts.append(f"## {title}")
        parts.append(_without_parameters(" ".join(inspect.cleandoc(rule.__doc__ or "").split())))
        rows = []
        for case in cases:
            refused = case.refused()
            assert refused, f"{case.layout} is not refused"
            first = refused[0]
            rows.append((code(case.layout), case.beside, first.what, first.fix or ""))
        parts.append(table(("layout", "with", "what is wrong", "what fits"), rows))
    return "\n\n".join(filter(None, parts))


def _without_parameters(text: str) -> str:
    """A docstring without its sentences about parameters: `world`: devices."""
    return re.sub(r" ?`\w+`(, `\w+`)*: [^.]*\.", "", text).strip()


def untouched() -> list[str]:
    """Places that yield a `Violation` and that no case of `RULES` reaches."""
    features = (layout_module, lower_module, adapters, fp8, fsdp, outer)
    modules = (*features, *(sys.modules[part.__module__] for part in PARTS))
    files = {str(module.__file__): module.__name__ for module in modules}
    reached: set[tuple[str, int]] = set()

    def look(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            reached.add((frame.f_code.co_filename, frame.f_lineno))
        return look

    before = sys.gettrace()
    sys.settrace(look)
    try:
        for _, _, cases in RULES:
            for case in cases:
                case.refused()
    finally:
        sys.settrace(before)
    return [
        f"{name}:{line}"
        for file, name in files.items()
        for line, last in _yields(Path(file))
        if not any((file, each) in reached for each in range(line, last + 1))
    ]


def _yields(file: Path) -> Iterator[tuple[int, int]]:
    """First and last line of each `yield Violation(...)`."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Yield) and isinstance(node.value, ast.Call):
            called = node.value.func
            if isinstance(called, ast.Name) and called.id == "Violation":
                yield node.lineno, node.end_lineno or node.lineno


PAGES: dict[str, Callable[[], str]] = {
    "keys.md": keys_page,
    "peers.md": peers_page,
    "commands.md": commands_page,
    "python.md": python_page,
    "metrics.md": metrics_page,
    "run_folder.md": run_folder_page,
    "layout_text.md": layout_text_page,
    "legality.md": legality_page,
}

if __name__ == "__main__":
    sys.exit(main())
