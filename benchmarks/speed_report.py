"""The result of training_speed.py as tables: on the terminal, and as Markdown in docs/evidence/benchmarks.md."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pages import put_between

DOCS = Path(__file__).parents[1] / "docs" / "evidence" / "benchmarks.md"
BEGIN, END = "<!-- training-speed: begin -->", "<!-- training-speed: end -->"
COLUMNS = (
    "contender", "tokens/s", "× plain", "(range)", "CPU time ÷ plain", "peak GiB per process", "÷ plain",
    "all processes", "÷ plain", "GFLOP/s", "of matmul peak",
)  # fmt: skip

Json = dict[str, Any]


def show(result: Json, console: Console) -> None:
    """Every table and every note on the terminal."""
    for facts in result["cells"]:
        table = Table(title=title(facts), title_justify="left", box=None, header_style="dim")
        for column in COLUMNS:
            table.add_column(column, justify="left" if column == "contender" else "right")
        for row in rows_of(result, facts):
            table.add_row(*cells(row))
        console.print(table)
    for note in notes(result):
        console.print(f"- {note}", highlight=False)


def markdown(result: Json) -> str:
    """The same for the documentation."""
    parts = []
    for facts in result["cells"]:
        lines = [list(COLUMNS), ["---", *["---:"] * (len(COLUMNS) - 1)], *(cells(r) for r in rows_of(result, facts))]
        parts += [f"### {facts['size']}, {facts['precision']}", title(facts) + ".", "\n".join(map(_line, lines))]
    parts.append("\n".join(f"- {note}" for note in notes(result)))
    return "\n\n".join(parts)


def write_docs(result: Json, docs: Path = DOCS) -> str:
    """Replace what stands between the two markers of `docs`; says what was done."""
    put_between(BEGIN, END, markdown(result), docs)
    return f"{docs} holds the run of {result['machine']['date']}"


def newest(folder: Path) -> Json:
    """The latest result by the date it carries. Exits with a sentence when there is none."""
    results = [json.loads(file.read_text()) for file in folder.glob("training_speed-*.json")]
    if not results:
        raise SystemExit(f"{folder} holds no training_speed-*.json: run python benchmarks/training_speed.py first")
    return max(results, key=lambda result: str(result["machine"]["date"]))


def rows_of(result: Json, facts: Json) -> list[Json]:
    """The rows of one cell."""
    return [row for row in result["rows"] if all(row[key] == facts[key] for key in ("size", "precision"))]


def title(facts: Json) -> str:
    """What a table is about, with what matmuls alone reach."""
    limit = facts["isa_gflops"]
    return (
        f"{facts['parameters'] / 1e6:.1f}M parameters, {facts['precision']}, {facts['rows']} rows × {facts['length']} "
        f"tokens a step. Matmuls alone: {facts['square_gflops']:,.0f} GFLOP/s (large, square), "
        f"{facts['layers_gflops']:,.0f} (this model's linears)" + (f", {limit:,.0f} (nominal limit)" if limit else "")
    )


def cells(row: Json) -> list[str]:
    """A row as text, one for each of `COLUMNS`."""
    name = row["contender"] + (f", {row['ranks']} processes" if row["ranks"] > 1 else "")
    if row["error"]:
        return [f"{name}: {row['error']}", *[""] * (len(COLUMNS) - 1)]
    low, high = row["speed_ratio_range"]
    return [
        name, f"{row['tokens_per_second']:,.0f}", f"{row['speed_ratio']:.2f}", f"{low:.2f}–{high:.2f}",
        _two(row["cpu_ratio"]), _two(row["peak_gib"]), _two(row["memory_ratio"]), _two(row["peak_gib_sum"]),
        _two(row["memory_sum_ratio"]), f"{row['gflops']:,.0f}", f"{row['matmul_pct']:.0f}%",
    ]  # fmt: skip


def notes(result: Json) -> Iterator[str]:
    """What the reader of the tables must know."""
    m, rows = result["machine"], [row for row in result["rows"] if not row["error"]]
    yield f"Machine: {m['cpu']}, {m['cores']} cores, {m['memory_gib']} GiB; torch {m['torch']}, transformers " + (
        f"{m['transformers']}, accelerate {m['accelerate']}, Python {m['python']}; commit {m['commit']}, {m['date']}."
    )
    yield (
        f"Repeats: {result['repeats']}; medians, and ratios repeat by repeat. Documents: {result['documents']}. "
        f"The run took {result['minutes']:.0f} minutes."
    )
    if all(row["precision"] != "bf16" for row in rows):
        yield "bf16 is not in this run: by default it is left out on a CPU without bf16 instructions."
    for precision in dict.fromkeys(row["precision"] for row in rows):
        theirs = [row for row in rows if row["precision"] == precision]
        for which in ("fivefold", "Trainer"):
            found = [row["loss_difference"] for row in theirs if row["contender"].startswith(which)]
            if found := [each for each in found if each is not None]:
                yield f"{precision} losses, {which}: at most {max(found):.1e} from the plain loop's (relative)."
    for name, wrapper in dict.fromkeys((r["contender"], r["wrapper"]) for r in rows if r["wrapper"] and r["ranks"] > 1):
        yield f"{name}: accelerate {m['accelerate']} wrapped the model in {wrapper}."


def _two(number: float | None) -> str:
    return "–" if number is None else f"{number:.2f}"


def _line(texts: list[str]) -> str:
    return f"| {' | '.join(text.replace('|', '/') for text in texts)} |"
