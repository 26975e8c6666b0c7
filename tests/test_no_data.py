"""A run file that names no text: what trains refuses it, what needs none goes on, and the demo has its own."""

from pathlib import Path

import pytest

from fivefold import cli
from fivefold.config import RunConfig, load_config, parse_config
from fivefold.core.errors import UserError
from fivefold.data import prepare
from fivefold.planner import plan
from fivefold.planner.estimate import Workload
from fivefold.verification import resolve

SAYS = 'data.train is not set: no text to train on is named\nname your own: data: {train: "texts/*.jsonl"}'
MODEL = """
model: {name_or_path: llama-3.2-1b, overrides: {num_hidden_layers: 1, hidden_size: 64, intermediate_size: 64}}
tokenizer: {name_or_path: byte}
train: {device: cpu, max_steps: 1}
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text(MODEL)
    return tmp_path


@pytest.mark.parametrize(
    "command",
    [
        "train run.yaml", "train run.yaml --verify", "train run.yaml layout=auto", 
        "train run.yaml data.streaming=true",
       
        "train run.yaml data.train=[]", "train run.yaml data.train=null", "train model.name_or_path=llama-3.2-1b",
        "train run.yaml train.nodes=2", "data run.yaml", "data run.yaml --prepare", "compare run.yaml run.yaml",
        "launch run.yaml --to slurm --nodes 8", "rehearse run.yaml --cluster 8xH100",
    ],
)  # fmt: skip
def test_what_trains_refuses_a_run_file_without_text(
    here: Path, command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(command.split())
    said = capsys.readouterr()
    assert (ended.value.code, said.out) == (2, "") and said.err.startswith(SAYS), said.err
    assert [path.name for path in here.iterdir()] == ["run.yaml"]


def test_a_file_that_plan_writes_is_refused_until_it_names_a_text(here: Path) -> None:
    best = plan.planned("llama-3.2-1b", "1x8xH100", Workload(4096, 32), top=1).estimates[0]
    plan.write_run_file("planned.yaml", "llama-3.2-1b", best)
    with pytest.raises(UserError, match=r"data\.train is not set"):
        prepare(load_config(Path("planned.yaml")), cache=here / "cache")
    text = Path("planned.yaml").read_text()
    Path("planned.yaml").write_text(text.replace("  # train: texts/*.jsonl", "  train: texts/*.jsonl"))
    assert [source.path for source in load_config(Path("planned.yaml")).data.train] == ["texts/*.jsonl"]


def test_a_proof_needs_no_text(here: Path) -> None:
    assert set(resolve(Path("run.yaml"), (), ["tp2"], "fp64")) == {"tp2"}
    config = load_config(Path("run.yaml"))
    assert parse_config(config.to_yaml()) == config and config.data.train == ()


def test_the_demo_s_text_is_the_demo_s() -> None:
    assert [source.path for source in load_config(None).data.train] == ["python-stdlib"]
    assert [source.path for source in RunConfig().data.train] == ["python-stdlib"]
    assert load_config(None, ["model.name_or_path=qwen3-0.6b"]).data.train == ()
    assert [source.path for source in load_config(None, ["data.train=a.txt"]).data.train] == ["a.txt"]


def test_the_data_lines_name_every_source(here: Path) -> None:
    texts = [here / f"{name}.txt" for name in ("one", "two", "held")]
    for path in texts:
        path.write_text(f"{path.stem} of three texts that are long enough to be held out")
    keys = ["tokenizer.name_or_path=byte", "data.seq_length=16", f"data.train={texts[0]}"]
    (line,) = lines(here, *keys, "data.validation=0")
    assert line == f"source      {texts[0]}: 1 document, 55 tokens to train on"
    assert len(lines(here, *keys[:2], f"data.train=[{texts[0]},{texts[1]}]", "data.validation=0")) == 2
    both = lines(here, *keys, f"data.validation=[{texts[2]}]", what="validation")
    assert both[0].endswith(f", of {texts[2]}")
    assert str(texts[0]) in lines(here, *keys, "data.validation=0", "data.streaming=true", what="streamed")[0]


def lines(here: Path, *keys: str, what: str = "source") -> list[str]:
    data = prepare(load_config(Path("run.yaml"), keys), cache=here / "cache")
    return [line for line in data.counts.lines() if line.startswith(what)]
