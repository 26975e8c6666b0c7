"""The page of a proof: whole in itself, true to the report, and calm about anything that a report may hold."""

import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from fivefold.report.findings import to_html
from fivefold.report.slices import EXPLAINED, SMALLEST, ranks_text, slice_map
from fivefold.verification import ranks
from fivefold.verification.report import VerifyReport, headline, heat, report_of
from fivefold.verification.results import WORDS, ComparisonRow, LayoutResult
from tests.report.html import Reader, asks_for_nothing

KS = ("1", "5", "10", "50", "100", "all")
INNER = {
    "self_attn.q_proj.weight": (32, 32), "self_attn.k_proj.weight": (16, 32), "self_attn.v_proj.weight": (16, 32),
    "self_attn.o_proj.weight": (32, 32), "mlp.gate_proj.weight": (53, 32), "mlp.up_proj.weight": (53, 32),
    "mlp.down_proj.weight": (32, 53), "input_layernorm.weight": (32,), "post_attention_layernorm.weight": (32,),
}  # fmt: skip
HOSTILE = "<script>alert('x')</script> \"&\" $\\frac{_"


def shapes(layers: int = 2) -> dict[str, tuple[int, ...]]:
    inner = {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in INNER.items()}
    return {"model.embed_tokens.weight": (101, 32), **inner, "model.norm.weight": (32,)}


def holds(world: int = 2, layers: int = 2) -> dict[str, object]:
    """Matrices cut by rows, vectors held by all."""
    found = {}
    for name, shape in shapes(layers).items():
        cuts = [shape[0] * rank // world for rank in range(world + 1)]
        rest = [[0, size] for size in shape[1:]]
        ranks = [[[[cuts[r], cuts[r + 1]], *rest]] if rest else [[[0, shape[0]]]] for r in range(world)]
        found[name] = {"shape": list(shape), "ranks": ranks}
    return found


def rows(error: float = 1e-16, allowed: float = 1e-10, layers: int = 2) -> list[ComparisonRow]:
    """What a right layout leaves."""
    modules = [name.removesuffix(".weight") for name in shapes(layers)]
    parameters = list(shapes(layers))
    found = [
        ComparisonRow("shards", 0.0, 0.0, True),
        *(ComparisonRow("weight", 0.0, 0.0, True, name) for name in parameters),
    ]
    found += [ComparisonRow("output", error, allowed, True, name) for name in modules]
    found += [ComparisonRow("gradient of output", error, allowed, True, name) for name in modules[::-1]]
    for kind in ("gradient, raw", "gradient, reduced"):
        found += [ComparisonRow(kind, error, allowed, True, name) for name in parameters[::-1]]
    for k in KS:
        found.append(ComparisonRow(f"logits, mean error of top {k}", error, allowed, True))
        found += [ComparisonRow(f"tokens, other top {k}", 0.0, allowed, True)] if k != "all" else []
    found.append(ComparisonRow("control: a planted fault", 0.2, allowed, True, "model.norm"))
    found += [ComparisonRow("gradient, clipped", error, allowed, True, name) for name in parameters[::-1]]
    for kind in ("update", "first moment", "second moment", "weight, last step"):
        found += [ComparisonRow(kind, error, allowed, True, name) for name in parameters]
    return found


LOSSES = [4.75, 4.72, 4.75, 4.69, 4.70]


def right(layout: str = "tp2", world: int = 2, layers: int = 2) -> LayoutResult:
    losses = [loss + 1e-16 for loss in LOSSES]
    return LayoutResult(layout, rows(layers=layers), losses=losses, holds=holds(world, layers), seconds=4.2)


def wrong(layout: str = "shard2", error: float = 0.31) -> LayoutResult:
    """Everything from one norm on is off on one rank."""
    found = right(layout)
    place = "model.layers.1.post_attention_layernorm"
    start = next(i for i, row in enumerate(found.rows) if row.what == "output" and row.where == place)
    for i, row in enumerate(found.rows[start:], start):
        if row.what in WORDS.values() and row.what != "weight":
            where = f"{row.where}: 0.5 times the reference's (tp rank 1)"
            found.rows[i] = ComparisonRow(row.what, error, row.tolerance, False, where)
        elif row.what.startswith("logits"):
            found.rows[i] = ComparisonRow(row.what, error, row.tolerance, False)
        elif row.what.startswith("tokens"):
            found.rows[i] = ComparisonRow(row.what, 0.4, row.tolerance, False)
    found.losses = [loss * 1.01**step for step, loss in enumerate(LOSSES)]
    return found


def report(*found: LayoutResult) -> VerifyReport:
    return report_of(found, "LlamaForCausalLM layers 2 of 32", {"fp64": LOSSES})


def page(report: VerifyReport) -> str:
    return to_html(report.findings())


def test_the_page_is_one_file_that_asks_for_nothing() -> None:
    asks_for_nothing(page(report(right(), wrong())))


def test_verdicts_and_the_first_difference() -> None:
    refused = LayoutResult("tp3", refused="tp=3 does not divide num_key_value_heads=8; try 1, 2, 4 or 8")
    text = page(report(right(), wrong(), refused))
    assert text.count("✓ PROVED") == text.count("✕ WRONG") == text.count("– NOT RUN") == 2
    assert "1 of 3 layouts computed something else than one process" in text
    assert "first differs at output of model.layers.1.post_attention_layernorm" in text
    assert "3.1e-01 off, 1.0e-10 allowed" in text
    assert "tp=3 does not divide" in text
    assert "LlamaForCausalLM layers 2 of 32" in text and "fp64" in text and "torch" in text


def test_wrong_layouts_are_open_and_their_rows_marked() -> None:
    text = page(report(right(), wrong()))
    opened = re.findall(r'<details id="(layout-\d)"( open)?>', text)
    assert opened == [("layout-0", ""), ("layout-1", " open")]
    marked = re.findall(r"<tr class=wrong><td>✕ ([^<]+)</td>", text)
    assert "output" in marked and "gradient, raw" in marked and "shards" not in marked
    assert "model.layers.1.post_attention_layernorm: 0.5 times the reference&#39;s (tp rank 1) (and " in text
    assert re.search(r'<td class="n wrong" title="[^"]*tp rank 1\); 1.0e-10 allowed">3.1e-01</td>', text)


def test_what_hostile_names_say_is_only_text() -> None:
    found = LayoutResult(
        HOSTILE, [ComparisonRow(HOSTILE, 1.0, 0.0, False, HOSTILE), *rows()], losses=LOSSES, holds=holds()
    )
    found.rows += [
        ComparisonRow("output", 1.0, 1e-10, False, HOSTILE),
        ComparisonRow("update", 0.0, 1e-10, True, HOSTILE),
    ]
    found.holds[HOSTILE] = {"shape": [4, 4], "ranks": [[[[0, 4], [0, 4]]], []]}
    text = page(report(found, LayoutResult("a", refused=HOSTILE)))
    Reader(text)
    assert "<script>alert" not in text
    assert text.count("&lt;script&gt;alert") > 5


def test_eight_layouts_are_less_than_half_a_megabyte() -> None:
    text = page(report(*(right(f"tp{n + 1}", world=8) for n in range(7)), wrong()))
    assert len(text.encode()) < 500_000


def test_a_model_of_many_layers_names_layers_instead_of_parameters() -> None:
    text = page(report(right(layers=12)))
    plot = text[text.index('aria-label="Gradients') :]
    assert ">layer 0</text>" in plot and ">11</text>" in plot
    assert "layers 1–11 alike" in text


def test_a_box_is_red_where_more_than_its_tolerance_is_off() -> None:
    found = {"a": ComparisonRow("output", 0.0, 1e-10, True), "b": ComparisonRow("output", 1e-13, 1e-10, True),
             "c": ComparisonRow("output", 1.0, 1e-10, False)}  # fmt: skip
    drawn = heat("Modules", {"tp2": {"output": found}})
    assert [(box.fill, box.opacity) for box in drawn.boxes] == [("band", 1.0), ("series-0", 0.5), ("wrong", 1.0)]
    assert drawn.boxes[2].title == "c: 1.0e+00 of 1.0e-10 allowed"
    assert [name for _, name in drawn.ticks] == ["a", "b", "c"] and drawn.names == [(8.0, "tp2: output")]


@pytest.mark.parametrize("error", [0.0, math.inf, math.nan])
def test_errors_of_any_size_are_drawn(error: float) -> None:
    found = wrong(error=error)
    found.losses = [math.nan, math.inf, 4.7]
    text = page(report(found))
    Reader(text)
    assert 'aria-label="training loss' in text and 'aria-label="Modules' in text
    assert 'nan"' not in text and 'inf"' not in text


@pytest.mark.parametrize(
    "found",
    [
        (),
        (LayoutResult("tp2", refused="it is for 2 ranks, and this world has 4"),),
        (LayoutResult("tp2"),),
        (
            LayoutResult(
                "tp2", [ComparisonRow("shards", 1.0, 0.0, False, "model.norm.weight")], refused="rank 1: RuntimeError: "
            ),
        ),
        (LayoutResult("single", [ComparisonRow("momentum", 1e-16, 1e-10, True, "model.norm.weight")], losses=[1.0]),),
        (LayoutResult("tp2", rows()[:3]),),
        (LayoutResult("tp2", [ComparisonRow("tokens, other top 1", 0.0, 1e-10, True)]),),
        (
            LayoutResult(
                "tp2",
                [ComparisonRow("logits, mean error of top 1", 0.0, 0.0, True)],
                holds={"w": {"shape": [], "ranks": []}},
            ),
        ),
    ],
)
def test_little_is_enough(found: tuple[LayoutResult, ...]) -> None:
    Reader(page(report_of(found, "", {})))


def test_verdict_and_headline() -> None:
    lost, refused = LayoutResult("tp2"), LayoutResult("tp2", rows(), refused="broke")
    assert [each.verdict for each in (right(), wrong(), lost, refused)] == ["PROVED", "WRONG", "NOT RUN", "NOT RUN"]
    assert headline([right()]) == "The layout matches one process"
    assert headline([right(), right()]) == "Both layouts match one process"
    assert headline([right(), lost]) == "1 of 2 layouts did not run"
    assert headline([]) == "Nothing was proved"


def test_names_of_rows() -> None:
    assert ComparisonRow("update", 1.0, 0.0, False, "a.b: 0.5 times the reference's (tp rank 1)").name == "a.b"
    assert ComparisonRow("output", 1.0, 0.0, False, "a.b input (ranks 0, 3)").name == "a.b input"


def test_ranks_in_words() -> None:
    assert [ranks_text(each, 8) for each in ([3], [0, 1], [0, 1, 2, 5], range(8))] == ["3", "0,1", "0–2,5", "all 8"]
    assert ranks_text([0], 1) == "0"


def test_slices_of_replicas_blocks_and_experts() -> None:
    held = {
        "model.layers.0.qkv.weight": {
            "shape": [8, 4],
            "ranks": [[[[0, 2], [0, 4]], [[4, 6], [0, 4]]], [[[2, 4], [0, 4]], [[6, 8], [0, 4]]]],
        },
        "model.layers.0.experts.up": {
            "shape": [4, 6, 8],
            "ranks": [[[[0, 2], [0, 6], [0, 8]]], [[[2, 4], [0, 6], [0, 8]]]],
        },
        "model.layers.0.norm.weight": {"shape": [4], "ranks": [[[[0, 4]]], [[[0, 4]]]]},
        "model.layers.1.norm.weight": {"shape": [4], "ranks": [[[[0, 4]]], []]},
    }
    drawn = slice_map(held)
    assert drawn is not None
    qkv, experts, norm = drawn.parts[0].drawings
    assert [box.fill for box in qkv.boxes] == ["rank-0", "rank-0", "rank-1", "rank-1"]
    assert qkv.boxes[1].title == "rank 0: [4:6, 0:4]"
    assert experts.boxes[1].height == experts.height / 2 and experts.shape == "4 × 6 × 8"
    assert [box.fill for box in norm.boxes] == ["ranks-0-1"] and norm.boxes[0].label == "all 2"
    assert [part.title for part in drawn.parts] == ["layer 0", "layer 1"]
    assert drawn.shares == (100 * (16 + 96 + 4 + 4) / 232, 100 * (16 + 96 + 4) / 232)


def test_parameters_of_a_layer_are_drawn_to_scale() -> None:
    shapes = {"h.0.wide": (100, 400), "h.0.tall": (300, 100), "h.0.thin": (2, 400)}
    held = {name: {"shape": list(shape), "ranks": [[[[0, size] for size in shape]]]} for name, shape in shapes.items()}
    drawn = slice_map(held)
    assert drawn is not None
    wide, tall, thin = drawn.parts[0].drawings
    assert wide.width / wide.height == 4 and tall.height / wide.width == 0.75 and tall.width == wide.height
    assert thin.width == wide.width and thin.height == SMALLEST
    assert f"would be thinner than {SMALLEST:.0f} pixels has {SMALLEST:.0f}" in EXPLAINED


def test_layers_on_other_ranks_are_alike_there() -> None:
    def layer(rank: int) -> dict[str, object]:
        return {"shape": [4, 4], "ranks": [[[[0, 4], [0, 4]]] if each == rank else [] for each in range(2)]}

    drawn = slice_map({f"h.{n}.w": layer(n // 2) for n in range(4)})
    assert drawn is not None and len(drawn.parts) == 1
    assert drawn.parts[0].alike == "layer 1 alike; layers 2,3 alike, on rank 1"


def test_parts_have_titles_that_tell_them_apart() -> None:
    whole = {"shape": [4, 4], "ranks": [[[[0, 4], [0, 4]]]]}

    def titles(*names: str) -> list[str]:
        drawn = slice_map(dict.fromkeys(names, whole))
        assert drawn is not None
        return [part.title for part in drawn.parts]

    assert titles("a.weight") == [""]
    assert titles("embed.weight", "h.0.w", "h.1.w", "norm.weight") == [
        "before the layers",
        "layer 0",
        "after the layers",
    ]
    assert titles("vision.0.w", "text.h.0.w") == ["vision.0", "text.h.0"]
    assert slice_map({"empty": {"shape": [0], "ranks": [[[[0, 0]]]]}}) is not None


def test_the_terminal_and_the_page_count_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    found = LayoutResult("tp2", rows(), losses=LOSSES, holds=holds(), seconds=4.2)
    whole = report(found)
    whole.show(Console(width=80))
    shown = capsys.readouterr().out
    assert shown.split()[:1] == ["PROVED"] and f"tp2    PROVED       {len(found.rows)} output" in shown
    assert f"{len(found.rows)}" in page(whole)
    assert "comparisons" not in ranks._line(found)  # printed before the last of them is made


def shown_at_80(report: VerifyReport, capsys: pytest.CaptureFixture[str]) -> list[str]:
    report.show(Console(width=80))
    lines = capsys.readouterr().out.strip("\n").splitlines()
    assert max(map(len, lines)) <= 80
    return lines


def test_a_terminal_has_the_verdict_first_and_few_lines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown_at_80(report(*(right(f"shard{n}.tp2.cp2.pp2+zbv+v2") for n in range(30)), wrong()), capsys)
    assert lines[0].startswith("NOT PROVED  1 of 31 layouts computed something else") and len(lines) <= 20
    text = "\n".join(lines)
    assert text.index("shard2 ") < text.index("shard0.tp2")  # the wrong one is not among those left out
    assert "first differs at output of model.layers.1.post_attention_layernorm" in text
    assert "and 25 more layouts: --rows" in text
    lines = shown_at_80(report(right(), right("shard2")), capsys)
    assert lines[0].startswith("PROVED  Both layouts match one process") and len(lines) <= 20
    refused = [LayoutResult(f"tp{n}", refused="tp does not divide num_key_value_heads " * 3) for n in range(3, 40)]
    assert len(shown_at_80(report(*refused), capsys)) <= 20


def test_all_rows_have_each_kind_of_each_layout(capsys: pytest.CaptureFixture[str]) -> None:
    found = report(*(right(f"shard{n}") for n in range(2, 12)), wrong("tp2"))
    lines = shown_at_80(replace(found, shows_all=True), capsys)
    assert lines[0].startswith("NOT PROVED")
    assert sum(line.startswith(" second moment ") for line in lines) == 10
    assert sum(line.startswith(" ✕ second moment ") for line in lines) == 1
    assert f"shard2  PROVED  {len(right().rows)} comparisons  4.2 s" in lines


def test_lines_of_progress_wrap_at_words(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    text = "  model        LlamaForCausalLM whole; 3 rows of 61 tokens a step, documents of unequal length; adamw"
    monkeypatch.setenv("COLUMNS", "80")
    ranks.print_line(text)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80 and [line.split() for line in lines] == [text.split()[:12], text.split()[12:]]
    assert lines[1].startswith(" " * 15)
