"""`fivefold plan`, `ff.plan` and `ff.estimate`: what they show, and what they are asked wrongly."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

import fivefold as ff
from fivefold import cli
from fivefold.config import load_config
from fivefold.core.shapes import shape_folder
from fivefold.core.units import GIB
from fivefold.parallel.layout import Layout
from fivefold.planner import plan, report
from fivefold.planner.estimate import Item, Workload
from fivefold.planner.plan import run_file
from fivefold.planner.rank_memory import MATMULS, OUTSIDE
from fivefold.planner.report import PlanReport
from fivefold.report.findings import On, to_html
from tests.report.html import asks_for_nothing

WORKLOAD = {"seq_length": 2048, "global_batch_size": 16}
SHORT = ("--seq-length", "300", "--global-batch-size", "1")
SMALL = ("llama-3.2-1b", "--cluster", "2xH100", "--seq-length", "2k", "--global-batch-size", "16")


ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(["plan", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code


def test_the_ranking_and_the_items_of_the_first(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--top", "3") == 0
    shown = capsys.readouterr().out
    assert "2x2,048" not in shown and "16 rows of 2,048 tokens" in shown
    assert all(
        word in shown for word in ("can run", "matmuls", "saved activations", "assumed:", "next: fivefold train")
    )
    assert max(map(len, shown.splitlines())) <= 80


def test_a_faster_layout_than_the_first_is_named_and_so_is_what_was_not_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run("llama-3.1-8b", "--cluster", "8xH800", "--seq-length", "4k", "--global-batch-size", "32") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert re.search(r"best - \S+ is the simplest within 2% of the fastest: \S+ takes \d\.\d% less", shown)
    assert "assumed: H800 with" in shown and "efficiencies of H800 are those of H100, fivefold calibrate" in shown


def test_json_has_every_item(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    for row in found["rows"]:
        items = found["items"][row["layout"]]
        seconds = sum(item["amount"] for item in items if item["part"] == "time")
        assert seconds == pytest.approx(row["step_seconds"])
        memory = sum(i["amount"] for i in items if i["part"] == "memory" and i["item"] not in OUTSIDE)
        assert memory / 2**30 == pytest.approx(row["memory_gib"], abs=1e-3)


def test_the_run_file_of_the_best_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    assert run(*SMALL, "--write", str(file)) == 0
    config = load_config(file)
    assert config.data.seq_length == 2048 and config.train.global_batch_size == 16
    assert config.run.name == "mine"  # two plans do not share a run folder
    shown = capsys.readouterr().out
    assert f"fivefoldtrain{file}" in "".join(shown.split())  # a long path goes over several lines
    assert "add your data and a tokenizer; then fivefold train" in " ".join(shown.split())
    assert config.model.init == "random"
    assert run(*SMALL, "--write", str(file)) == 2  # an existing file is kept


def test_a_wrong_request_is_told(subtests: pytest.Subtests, capsys: pytest.CaptureFixture[str]) -> None:
    cases = [
        (("llama-3.2-1b", "--cluster", "2xH100", "--layout", "tp3"), "tp 3"),
        (("llama-3.2-1b", "--cluster", "4xH100", "--layout", "tp3"), "3 does not divide 4, tp 2 or 4 does"),
        (("qwen2.5-7b", "--cluster", "8xH100", "--layout", "tp8"), "try tp 1, 2, 4\n"),  # of 28 heads, 28 would fit too
        (("qwen2.5-72b", "--cluster", "8xH100"), "did you mean qwen2.5-7b"),
        (("llama-3.1-8b", "--cluster", "8xH100", "--layout", "ep2"), "LlamaForCausalLM has no experts"),
        (("mixtral-8x7b", "--cluster", "3xH100", "--layout", "ep2"), "adds none: shard3\n"),
        (("llama-3.2-1b", "--cluster", "4xH100", "--layout", "shrd4"), "did you mean shard4?"),
        (("llama-3.2-1b", "--cluster", "2xH1000"), "H100"),
        (("llama-3.2-1b", "--cluster", "2xH100", "--layout", "tp2.pp2"), "= 4, but 1x2xH100 has 2 devices; 4 does not"),
        (("llama-3.2-1b", "--cluster", "2xH100", "--layout", "tp4", "--max-seq-length"), "1x2xH100 has 2 devices"),
        (
            ("llama-3.2-1b", "--cluster", "8x8xH100", *SHORT),
            "rows of its own with global_batch_size 64",
        ),
        ((*SMALL, "--json", ""), "--json names no file\nname a file: --json FILE"),
        ((*SMALL, "--html", "/dev/null/page.html"), "cannot write /dev/null/page.html: Not a directory"),
        ((*SMALL, "--write", "/"), "cannot write /: Is a directory"),
        ((*SMALL, "--html", "-"), "--html - names no file"),
        ((*SMALL, "--write", "one.yaml", "--json", "./one.yaml"), "is written by --write and by --json"),
        (("run.yaml", "--cluster", "2xH100"), "run.yaml is a run file, and plan takes a model"),
        (("llama-3.2-1b", "--cluster", "2xH100", "--seq-length", "0"), "no step"),
        (("llama-3.2-1b", "--cluster", "2xH100", "--global-batch-size", "9" * 20), "too large to be planned"),
        (("llama-3.2-1b", "--cluster", "2xH100", "--seq-length", "9" * 15), "too large to be planned"),
        (("llama-3.2-1b", "--cluster", "2xH100", "--seq-length", "-5"), "--seq-length -5"),
        (("llama-3.2-1b", "--cluster", "2xH100", "--seq-length", "abc"), "--seq-length abc"),
        (("no-such-model", "--cluster", "2xH100"), "no-such-model"),
        (("llama-3.1-8b", "--cluster", "1xA10G"), "no layout fits on 1x1xA10G"),
    ]
    for arguments, says in cases:
        with subtests.test(msg=" ".join(arguments)):
            assert run(*arguments) == 2
            told = capsys.readouterr().err
            assert says in told and "--nproc" not in told and "workers" not in told and "--keys" not in told


def test_a_layout_that_is_not_searched_is_estimated_all_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.2-1b", "--cluster", "8x8xH100", *SHORT, "--layout", "cp4.pp16") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "1 row of 300 tokens" in shown and "of those that are searched" in shown and "a step of cp4.pp16: " in shown


def test_long_layouts_are_broken_before_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    long = "shard2.tp2.pp2+zero1+interleaved+v2+mb2+full"
    asked = ("--seq-length", "4k", "--global-batch-size", "16", "--top", "1", "--layout", long)
    assert run("llama-3.2-1b", "--cluster", "8xH100", *asked) == 0
    shown = capsys.readouterr().out.splitlines()
    line = next(number for number, each in enumerate(shown) if each.startswith("shard2.tp2.pp2+zero1") and "±" in each)
    assert shown[line + 1].split()[0] == "+interleaved+v2+mb2+full" and max(map(len, shown)) <= 80
    assert any("a device" in each for each in shown[:line])


def test_a_layout_stays_whole_beside_a_long_verdict() -> None:
    from rich.console import Console

    price = ff.estimate("llama-3.2-1b", "8xH100", ff.Workload(4096, 16), "shard4.pp2+interleaved+v4")
    row = dataclasses.replace(report.ranked(price, price), verdict="does not fit", behind="+44.9%: element-wise")
    with (console := Console(width=80)).capture() as shown:
        PlanReport(title="", rows=(row,), ok=True).show(console)
    assert "shard4.pp2+interleaved+v4 " in shown.get()


def test_items_stand_in_columns_and_rates_of_a_cpu_are_not_nought() -> None:
    price = ff.estimate("demo", "2xcpu", ff.Workload(128, 8), "shard2")
    lines = [report._line(Item("memory", name, 2**30, ""), 2**31) for name in ("loss", MATMULS)]
    assert len({line.index("GiB") for line in lines}) == 1
    assert not re.search(r"(?<![\d.])0 (TFLOP|GB)/s", report.assumptions(price))


def test_a_layout_that_does_not_fit_is_shown_and_fails(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--layout", "dp8", "--top", "2")
    assert run("llama-3.1-8b", "--cluster", "8xH100", "--seq-length", "8k", "--global-batch-size", "8", *asked) == 1
    shown = capsys.readouterr().out
    assert "dp8 does not fit: " in shown and "would make it fit, the fastest first:" in shown


def test_the_best_layout_by_its_name_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--json", "-") == 0
    best, *_ = json.loads(capsys.readouterr().out)["rows"]
    assert run(*SMALL, "--layout", best["layout"], "--json", "-") == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert [row["behind"] for row in rows].count("best") == 1 and rows[0] == best


def test_the_longest_rows_that_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*SMALL, "--max-seq-length", "--layout", "cp2+full") == 0
    shown = capsys.readouterr().out
    length = int(re.search(r"rows that fit have ([\d,]+) tokens", shown)[1].replace(",", ""))  # type: ignore[index]
    fits = [
        ff.estimate("llama-3.2-1b", "2xH100", ff.Workload(each, 1), "cp2+full").verdict
        for each in (length, length + 1024)
    ]
    assert fits == ["fits", "tight"]


def test_the_fewest_devices_and_what_tokens_cost(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("--seq-length", "4k", "--global-batch-size", "16", "--fewest-devices", "--price", "2.5", "--top", "2")
    assert run("llama-3.1-8b", "--cluster", "4x8xA100-40", *asked, "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["title"].startswith("llama-3.1-8b on 1x4xA100-40") and set(found["items"]) == set(
        found["cost_per_million_tokens"]
    )
    for row in found["rows"]:
        cost, low, high = found["cost_per_million_tokens"][row["layout"]]
        assert low < cost < high and cost == pytest.approx(2.5 / 3600 * 1e6 / row["tokens_per_second_per_device"])
    assert run("llama-3.1-8b", "--cluster", "4x8xA100-40", *asked) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the fewest of 4x8xA100-40 that train it are 4 devices" in shown and "at 2.5 a device-hour, " in shown
    assert run("llama-3.1-8b", "--cluster", "4x8xA100-40", *asked, "--layout", "tp8") == 2


def test_a_price_is_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    """Infinity would be no JSON."""
    for price in ("inf", "nan", "-1"):
        assert run(*SMALL, "--price", price, "--json", "-") == 2
        assert "--price" in capsys.readouterr().err


def test_longer_rows_than_the_model_has_positions_for_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("llama-3.2-1b", "--cluster", "8xH100", "--max-seq-length", "--layout", "cp8+full") == 0
    shown = " ".join(capsys.readouterr().out.split())
    length = int(re.search(r"rows that fit have ([\d,]+) tokens", shown)[1].replace(",", ""))  # type: ignore[index]
    assert "the model has positions for 131,072 (max_position_embeddings)" in shown and "tight" not in shown
    assert f"model.overrides.max_position_embeddings={length}" in shown and "e+0" not in shown


def test_the_run_file_of_longer_rows_has_positions_for_them() -> None:
    long = ff.estimate("llama-3.2-1b", "8xH100", ff.Workload(262144, 8), "cp8+full")
    assert "overrides: {max_position_embeddings: 262144}" in run_file("llama-3.2-1b", long, "long")


def test_the_functions_of_python() -> None:
    best = ff.plan(model="llama-3.2-1b", cluster="2xH100", workload=WORKLOAD)
    assert best and all(isinstance(each, ff.Estimate) and each.fits for each in best)
    fields = {"dp_replicate": 1, "dp_shard": 2, "tp": 1, "pp": 1, "recompute": "full", "precision": "bf16"}
    values = json.loads(Path(str(shape_folder("llama-3.2-1b")), "config.json").read_text(encoding="utf-8"))
    same = [
        ff.estimate(model="llama-3.2-1b", cluster="2xH100", workload=WORKLOAD, layout="shard2+full"),
        ff.estimate(model=values, cluster="2xH100", workload=WORKLOAD, layout=fields),
        ff.estimate(model="llama-3.2-1b", cluster="2xH100", workload=ff.Workload(2048, 16), layout=Layout(**fields)),
    ]
    assert len({each.step_seconds for each in same}) == len({each.memory_gib for each in same}) == 1
    assert same[0].tokens_per_second_per_device == pytest.approx(16 * 2048 / same[0].step_seconds / 2)
    assert 0 < same[0].mfu < 1


def test_python_is_told_what_is_wrong() -> None:
    with pytest.raises(ff.UserError, match=r"engine 'megatron' is not known\n.*benchmarks/planner_accuracy\.py"):
        ff.estimate(model="llama-3.2-1b", cluster="2xH100", workload=WORKLOAD, layout="shard2", engine="megatron")
    with pytest.raises(ff.UserError, match="batch"):
        ff.estimate(model="llama-3.2-1b", cluster="2xH100", workload={**WORKLOAD, "batch": 3}, layout="shard2")
    with pytest.raises(ff.UserError, match="'dp' is no field"):
        ff.estimate(model="llama-3.2-1b", cluster="2xH100", workload=WORKLOAD, layout={"dp": 2})


def test_python_is_told_of_another_type(subtests: pytest.Subtests) -> None:
    cases = [
        ({"model": Layout()}, r"model is no Layout\n.*config\.to_dict\(\)"),
        ({"cluster": 8}, "cluster is no int"),
        ({"workload": None}, "workload is no NoneType"),
        ({"workload": {**WORKLOAD, "seq_length": "2k"}}, "seq_length is no str\nwrite a whole number"),
        ({"workload": {**WORKLOAD, "seq_length": 2048.5}}, "seq_length is no float"),
        ({"top": 0}, "top 0 asks for no layout"),
        ({"top": 2.5}, "top is no float"),
        ({"layout": None}, "layout is no NoneType"),
        ({"layout": {"tp": "2"}}, "tp is no str"),
    ]
    for changed, says in cases:
        with subtests.test(msg=str(changed)):
            asked = {"model": "llama-3.2-1b", "cluster": "2xH100", "workload": WORKLOAD, **changed}
            with pytest.raises(ff.UserError, match=says):
                ff.estimate(**asked) if "layout" in changed else ff.plan(**asked)


def test_the_page_has_a_row_for_each_question() -> None:
    """And nothing that a merge has left."""
    pages = {
        file.relative_to(ROOT / "docs").as_posix(): file.read_text(encoding="utf-8")
        for file in (ROOT / "docs").rglob("*.md")
    }
    assert [name for name, text in pages.items() if re.search(r"^(<{7}|={7}|>{7})", text, re.MULTILINE)] == []
    options = ["layout", "max-seq-length", "fewest-devices", "write", "html", "json"]
    cells = re.findall(r"^\| (`--.*?) \|", pages["howto/plan.md"], re.MULTILINE)
    assert [name for name in options if " ".join(cells).count(f"`--{name}") != 1] == []


def test_the_page_shows_what_the_command_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = (ROOT / "docs" / "howto" / "plan.md").read_text(encoding="utf-8")
    command, shown = re.search(r"^\$ fivefold plan (.*)\n((?:.*\n)*?)\.\.\.$", page, re.MULTILINE).groups()  # type: ignore[union-attr]
    monkeypatch.setenv("COLUMNS", "80")
    assert run(*command.split()) == 1  # a layout that does not fit
    printed = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert printed[: shown.count("\n")] == shown.splitlines()


def test_the_page_has_axes_one_colour_per_item_and_its_assumptions_in_a_table() -> None:
    found = plan.planned("llama-3.1-8b", "1x8xH100", Workload(4096, 32), top=4)
    time, memory = (
        report._stacks(found.estimates, part, unit, factor, None)
        for part, unit, factor in (("time", "s", 1.0), ("memory", "GiB", 1 / GIB))
    )
    for figure, unit in ((time, "s"), (memory, "GiB")):
        assert len(figure.ticks) > 2 and all(label.endswith(f" {unit}") for _, label in figure.ticks)
    fills = [{fill for fill, _ in figure.words if fill != report.REST} for figure in (time, memory)]
    assert not fills[0] & fills[1]
    tables = [part for section in found.findings().shown_on(On.PAGE) for part in section.parts if part.shape == "table"]
    rows = [[cell.text for cell in row.cells] for table in tables for row in table.rows]
    assert any(row[0] == "matmuls" and "TFLOP/s" in row[1] for row in rows)


def test_a_run_file_of_a_shape_says_that_its_weights_are_random(tmp_path: Path) -> None:
    file = str(tmp_path / "run.yaml")
    best = plan.planned("llama-3.1-8b", "1x8xH100", Workload(4096, 32), top=1).estimates[0]
    plan.write_run_file(file, "llama-3.1-8b", best)
    assert "the weights are random: for real ones, init: pretrained" in Path(file).read_text()
    said = plan.without_weights("llama-3.1-8b", file)
    assert "RANDOM" in said and "model.init=pretrained model.name_or_path=" in said
    assert plan.without_weights("someone/model", file) == ""


def test_the_page_draws_time_and_memory(tmp_path: Path) -> None:
    asked = ["--seq-length", "1k", "--global-batch-size", "8", "--top", "2", "--html", str(tmp_path / "plan.html")]
    with pytest.raises(SystemExit):
        cli.main(["plan", "qwen3-0.6b", "--cluster", "2xH100", *asked])
    text = (tmp_path / "plan.html").read_text(encoding="utf-8")
    asks_for_nothing(text)
    drawn = (
        "Time of a step",
        "The busiest pipeline rank: a bar",
        "Memory of the fullest device",
        "the red line is where",
    )
    assert all(said in text for said in drawn) and "NaN" not in text and "nan" not in text.split("<body")[1]


def test_the_page_says_that_a_few_micro_batches_of_a_step_are_drawn(tmp_path: Path) -> None:
    """Their bubble is 3 of 15 slots, and that of the step 3 of 67."""
    found = plan.planned("qwen3-0.6b", "4xH100", Workload(1024, 64), layout="pp4+mb1")
    text = to_html(found.findings())
    assert all(f"({row.step_seconds_interval[0]:.3g} to " in text for row in found.rows)
    assert "with 12 of the 64 micro batches of a step" in text and "% of the time" not in text
