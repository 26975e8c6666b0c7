"""The run file: defaults, precedence, places of errors, and what comes back out."""

import subprocess
import sys
from pathlib import Path

import pytest

from fivefold.config import DEMO, RunConfig, check_supported, keys, load_config, parse_config
from fivefold.config.peers import REMOVED
from fivefold.core.errors import UserError
from fivefold.core.schedule import SCHEDULES
from fivefold.core.shapes import shape_folder, shape_names
from fivefold.core.units import human, parse_count, parse_fraction, parse_length
from fivefold.parallel.layout import Layout


def written(folder: Path, text: str) -> Path:
    file = folder / "run.yaml"
    file.write_text(text, encoding="utf-8")
    return file


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def loaded(folder: Path, text: str, *overrides: str) -> RunConfig:
    written(folder, text or "{}")
    return load_config(Path("run.yaml"), overrides)


# Every key of the run file.
CONTRACT = """
model.name_or_path model.init model.overrides tokenizer.name_or_path
data.train data.train[].path data.train[].format data.train[].text_key data.train[].weight
data.validation data.seq_length data.packing
train.max_steps train.max_tokens train.global_batch_size train.micro_batch_size train.seed train.compile train.device
optimizer.name optimizer.learning_rate optimizer.betas optimizer.eps optimizer.weight_decay optimizer.max_grad_norm
scheduler.name scheduler.warmup_steps scheduler.min_lr_ratio
layout.dp_replicate layout.dp_shard layout.tp layout.cp layout.pp layout.ep layout.zero layout.sequence_parallel
layout.expert_tp layout.pp_schedule layout.pp_virtual layout.pp_split layout.cp_method
precision.compute precision.reduce precision.fp8
memory.recompute memory.offload_activations memory.offload_optimizer memory.loss_chunks memory.trial
checkpoint.every checkpoint.keep checkpoint.async checkpoint.resume checkpoint.export_hf
eval.every eval.max_tokens sample.every sample.prompts log.every log.to run.name run.dir
"""


def test_every_key_of_the_contract_is_there_and_described() -> None:
    known = {key.name: key for key in keys()}
    assert set(CONTRACT.split()) <= set(known)
    assert all(key.help for key in known.values())


def test_keys_say_what_may_be_chosen() -> None:
    choices = {key.name: key.choices for key in keys()}
    assert choices["scheduler.name"] == ("cosine", "linear", "wsd", "constant")
    assert choices["layout.pp_schedule"] == tuple(SCHEDULES)
    assert choices["precision.compute"] == ("bf16", "fp32", "fp64")
    assert choices["memory.recompute"] == ("none", "selective", "full", "a size such as 12GiB")
    assert choices["train.compile"] == ("auto", True, False)
    assert choices["memory.loss_chunks"] == ("auto", "a number")
    assert choices["log.to"][:2] == ("jsonl", "tensorboard")
    assert choices["data.train[].columns"] == ()
    assert choices["train.seed"] == choices["data.packing"] == ()


def test_defaults(here: Path) -> None:
    config = loaded(here, "")
    assert (config.train.max_steps, config.train.max_tokens) == (1000, None)
    assert config.data.seq_length == 1024  # of the demo shape's positions; 8192 elsewhere
    assert (config.model.init, config.tokenizer.name_or_path) == ("random", "train:2048")
    check_supported(config)
    assert config.data.validation == 0.01
    assert config.eval.max_tokens == 1_000_000
    assert config.checkpoint.asynchronous
    assert config.layout.dp_shard == -1
    assert config.run_dir == Path("runs/demo")


def test_the_design_s_own_example_is_read(here: Path) -> None:
    config = loaded(
        here,
        """
model: {name_or_path: llama-3.1-8b, init: pretrained, overrides: {}}
tokenizer: {name_or_path: auto}
data:
  train: [{path: notes.jsonl, format: auto, text_key: text, weight: 1.0}]
  validation: 1%
  seq_length: 8192
  packing: true
train: {max_steps: 1000, global_batch_size: 64, micro_batch_size: 1, seed: 1234, compile: auto, device: auto}
optimizer: {name: adamw, learning_rate: 2.0e-5, betas: [0.9, 0.95], eps: 1.0e-8, weight_decay: 0.1, max_grad_norm: 1.0}
scheduler: {name: cosine, warmup_steps: 100, min_lr_ratio: 0.1}
layout: {dp_replicate: 1, dp_shard: -1, tp: 1, cp: 1, pp: 1, ep: 1, zero: 3, sequence_parallel: true, expert_tp: false,
         pp_schedule: 1f1b, pp_virtual: 1, pp_split: auto, cp_method: auto}
precision: {compute: bf16, reduce: fp32, fp8: none}
memory: {recompute: none, offload_activations: false, offload_optimizer: false, loss_chunks: auto}
checkpoint: {every: 250, keep: 3, async: true, resume: auto, export_hf: false}
eval: {every: 250, max_tokens: 1M}
sample: {every: 250, prompts: []}
log: {every: 1, to: [jsonl]}
run: {name: demo, dir: runs}
""",
    )
    # All of it is what an empty file means, but for the model, its data, its name and a warm-up that fits the run.
    model, data = config.model.name_or_path, config.data.train
    assert (model, data[0].path, config.run.name) == ("llama-3.1-8b", "notes.jsonl", "demo")
    empty = loaded(here, "")
    assert (config.scheduler.warmup_steps, empty.scheduler.warmup_steps) == (100, "auto")
    own = {section: getattr(empty, section) for section in ("model", "data", "run", "scheduler")}
    assert config.model_copy(update=own) == empty


def test_what_people_write_is_resolved(subtests: pytest.Subtests, here: Path) -> None:
    cases = [
        ("data.seq_length=8k", lambda c: c.data.seq_length, 8192),
        ("train.max_tokens=500M", lambda c: c.train.max_tokens, 500_000_000),
        ("data.validation=2%", lambda c: c.data.validation, 0.02),
        ("data.validation=0", lambda c: c.data.validation, 0.0),
        ("data.validation=held.txt", lambda c: c.data.validation[0].path, "held.txt"),
        ("data.validation=[a.txt]", lambda c: c.data.validation[0].path, "a.txt"),
        ("optimizer.learning_rate=1e-4", lambda c: c.optimizer.learning_rate, 1e-4),
        ("optimizer.betas=[0.8, 0.9]", lambda c: c.optimizer.betas, (0.8, 0.9)),
        ("tokenizer.name_or_path=train:4k", lambda c: c.tokenizer.name_or_path, "train:4096"),
        ("tokenizer.name_or_path=train:4096", lambda c: c.tokenizer.name_or_path, "train:4096"),
        ("data.train=./notes.jsonl", lambda c: [s.path for s in c.data.train], ["./notes.jsonl"]),
        ("data.train=[a.txt,b.jsonl]", lambda c: [s.path for s in c.data.train], ["a.txt", "b.jsonl"]),
        ("data.train=[{path: a, text_key: body}, b]", lambda c: c.data.train[0].text_key, "body"),
        ("data.train={path: a, weight: 2}", lambda c: c.data.train[0].weight, 2.0),
        ("data={train: a, validation: 0}", lambda c: [s.path for s in c.data.train], ["a"]),
        ("data.train.0.path=a.txt", lambda c: c.data.train[0].path, "a.txt"),
        ("train.compile=true", lambda c: c.train.compile, True),
        ("train.compile=auto", lambda c: c.train.compile, "auto"),
        ("memory.loss_chunks=4", lambda c: c.memory.loss_chunks, 4),
        ("model.overrides.num_hidden_layers=2", lambda c: c.model.overrides, {"num_hidden_layers": 2}),
        ("checkpoint.async=false", lambda c: c.checkpoint.asynchronous, False),
        ("layout=shard2.tp2", lambda c: str(c.layout), "shard2.tp2"),
        ("layout=tp2+zero1+mb2+full", lambda c: (c.memory.recompute, c.train.micro_batch_size), ("full", 2)),
        ("layout.tp=2", lambda c: (c.layout.tp, c.layout.dp_shard), (2, -1)),
        ("sample.prompts=['def ']", lambda c: c.sample.prompts, ("def ",)),
        ("run.name=007", lambda c: c.run.name, "007"),
        ("sample.prompts=def x", lambda c: c.sample.prompts, ("def x",)),
        ("log.to=wandb", lambda c: c.log.to, ("wandb",)),
        ("optimizer={eps: 1e-6}", lambda c: c.optimizer.eps, 1e-6),
    ]
    for override, read, expected in cases:
        with subtests.test(msg=override):
            assert read(loaded(here, "", override)) == expected  # type: ignore[operator]


def test_one_value_where_a_list_is_expected_is_taken_or_what_to_write_is_said(
    subtests: pytest.Subtests, here: Path
) -> None:
    for key in (key for key in keys() if isinstance(key.default, tuple)):
        with subtests.test(msg=key.name):
            section, name = key.name.split(".")
            try:
                sections = "adapter: {name: lora}\nobjective: {name: python, path: losses.py:loss}"
                config = loaded(here, sections, f"{key.name}={key.choices[0] if key.choices else 'word'}")
                assert len(getattr(getattr(config, section), name)) == 1
            except UserError as error:
                assert "it should be a list: [a, b]" in error.what and key.help in str(error.fix)


def test_a_built_in_shape_is_completed_where_nothing_is_set(subtests: pytest.Subtests, here: Path) -> None:
    cases = [
        ("model: {name_or_path: qwen3-8b}", "random", "train:2048", 8192),
        ("model: {overrides: {max_position_embeddings: 64}}", "random", "train:2048", 64),
        ("model: {init: pretrained}\ntokenizer: {name_or_path: byte}", "pretrained", "byte", 1024),
        ("data: {seq_length: 9000}", "random", "train:2048", 9000),
        ("model: {name_or_path: ./folder}", "pretrained", "auto", 8192),
        ("model: {name_or_path: org/name}", "pretrained", "auto", 8192),
    ]
    for text, init, tokenizer, seq_length in cases:
        with subtests.test(msg=text):
            config = loaded(here, text)
            found = config.model.init, config.tokenizer.name_or_path, config.data.seq_length
            assert found == (init, tokenizer, seq_length)
            assert parse_config(config.to_yaml()) == config
            assert f"init: {init}" in config.to_yaml()


def test_a_prompt_travels_to_the_last_character(subtests: pytest.Subtests) -> None:
    for prompt in ["a\x85b", "\x85", "a\u2028b\u2029", " \r\n x ", "\x00\x1b[0m", "é ▁", "'\x85\\N"]:
        with subtests.test(msg=repr(prompt)):
            config = load_config(None)
            config = config.model_copy(update={"sample": config.sample.model_copy(update={"prompts": (prompt,)})})
            assert parse_config(config.to_yaml()).sample.prompts == (prompt,)


def test_precedence_is_defaults_file_command_line(here: Path) -> None:
    text = "train: {seed: 7, global_batch_size: 8}\noptimizer: {learning_rate: 1e-3, eps: 1e-6}"
    config = loaded(here, text, "train.seed=8", "train.seed=9", "optimizer.eps=1e-7")
    assert (config.train.seed, config.train.global_batch_size, config.train.micro_batch_size) == (9, 8, 1)
    assert (config.optimizer.learning_rate, config.optimizer.eps) == (1e-3, 1e-7)


@pytest.mark.parametrize(
    ("written", "override", "expected"),
    [
        ("a.jsonl", "data.train.format=txt", [("a.jsonl", "txt")]),
        ("{path: a.jsonl}", "data.train.format=txt", [("a.jsonl", "txt")]),
        ("[a.jsonl, b.jsonl]", "data.train[1].format=txt", [("a.jsonl", "auto"), ("b.jsonl", "txt")]),
    ],
)
def test_a_key_of_a_source_can_be_overridden(written: str, override: str, expected: list[str], here: Path) -> None:
    config = loaded(here, f"data: {{train: {written}}}", override)
    assert [(source.path, source.format) for source in config.data.train] == expected


def test_a_key_of_one_source_of_several_has_to_say_which(here: Path) -> None:
    with pytest.raises(UserError) as caught:
        loaded(here, "data: {train: [a, b]}", "data.train.format=txt")
    assert "data.train has 2 sources" in caught.value.what
    assert "data.train.0.format=" in str(caught.value.fix)


def test_a_run_folder_stands_for_its_run_file(here: Path) -> None:
    folder = here / "runs" / "007"
    folder.mkdir(parents=True)
    (folder / "run.yaml").write_text("run: {name: old, dir: elsewhere}\ntrain: {seed: 5}")
    config = load_config(Path("runs/007"))
    assert (config.run_dir, config.train.seed) == (Path("runs/007"), 5)
    assert load_config(Path("runs/007"), ["run.name=other"]).run_dir == Path("runs/other")
    for other in (Path("runs"), here):
        with pytest.raises(UserError, match="a folder without a run") as caught:
            load_config(other)
    (here / "runs" / "empty").mkdir()
    with pytest.raises(UserError) as caught:
        load_config(Path("runs/empty"))
    assert caught.value.fix == "runs in runs: 007"


def test_a_length_on_the_command_line_replaces_the_other_kind_in_the_file(here: Path) -> None:
    config = loaded(here, "train: {max_tokens: 500M}", "train.max_steps=3")
    assert (config.train.max_steps, config.train.max_tokens) == (3, None)


def test_a_layout_text_on_the_command_line_replaces_the_section(here: Path) -> None:
    config = loaded(here, "layout: {dp_replicate: 2, zero: 1}\ntrain: {micro_batch_size: 4}", "layout=tp2")
    assert str(config.layout) == "tp2+mb4"  # the micro batch is not the section's


def test_what_a_layout_text_says_elsewhere_goes_with_it(here: Path) -> None:
    """As in a run file of `fivefold plan --write`. What the user has written there stays."""
    text = "layout: pp2+mb8+full"
    assert str(loaded(here, text, "layout=shard2").layout) == "shard2"
    assert str(loaded(here, text, "layout=shard2+mb4", "layout=shard2").layout) == "shard2"
    assert str(loaded(here, text, "layout.pp=4").layout) == "pp4+mb8+full"
    assert loaded(here, text, "layout=auto").given == {}
    assert str(loaded(here, text, "train.micro_batch_size=2", "layout=shard2").layout) == "shard2+mb2"
    assert str(loaded(here, text, "train={}", "layout=shard2").layout) == "shard2"
    same = f"{text}\ntrain: {{micro_batch_size: 8}}"
    assert str(loaded(here, same, "layout=shard2").layout) == "shard2+mb8"


def test_a_layout_text_in_the_file_takes_overrides(here: Path) -> None:
    assert str(loaded(here, "layout: shard2.tp2+zero1", "layout.tp=4").layout) == "shard2.tp4+zero1"


ERRORS = [
    ("optimizer:\n  learning_rte: 3", "run.yaml:2 optimizer.learning_rte is not a key", "optimizer.learning_rate"),
    ("\n\noptimizr: {}", "run.yaml:3 optimizr is not a key", "did you mean optimizer?"),
    ("train:\n  seq_length: 3", "run.yaml:2 train.seq_length is not a key", "did you mean data.seq_length?"),
    ("data:\n  train:\n    - a.txt\n    - {pth: b}", "run.yaml:4 data.train.1.pth is not a key", "data.train[].path"),
    ("data:\n  train: [{format: txt}]", "run.yaml:2 data.train.0.path is missing", "python-stdlib"),
    ("optimizer:\n  betas: [1.5, 0.9]", "run.yaml:2 optimizer.betas.0 is 1.5; it should be less than 1", "moments"),
    ("optimizer:\n  betas: [0.9, -1]", "run.yaml:2 optimizer.betas.1 is -1; it should be greater", "moments"),
    ("optimizer:\n  learning_rate: fast", "run.yaml:2 optimizer.learning_rate is 'fast'", "per optimizer step"),
    ("optimizer:\n  betas: 0.9", "run.yaml:2 optimizer.betas is 0.9; it should be a list: [a, b]", "two moments"),
    (
        "optimizer: {betas: [0, 0, 0]}",
        "run.yaml:1 optimizer.betas is [0, 0, 0]; it should have at most 2 items",
        "moments",
    ),
    ("model: {overrides: 3}", "run.yaml:1 model.overrides is 3; it should be a section of keys", "config.json"),
    ("data: {train: 3}", "run.yaml:1 data.train is 3; it should be a section", None),
    (
        "log:\n  to: wandb2",
        "run.yaml:2 log.to is 'wandb2'; it should be 'jsonl', 'tensorboard'",
        "such as [jsonl, wandb]",
    ),
    ("log: {to: {wandb: true}}", "run.yaml:1 log.to is a section; it should be a list: [a, b]", "where metrics go"),
    ("scheduler:\n  name: square", "run.yaml:2 scheduler.name is 'square'; it should be 'cosine'", "warm-up"),
    ("optimizer: 3", "run.yaml:1 optimizer is 3; it should be a section", None),
    ("train:\n\n  max_steps: true", "run.yaml:3 train.max_steps: True is not a whole number", "optimizer steps"),
    ("data: {validation: 200%}", "run.yaml:1 data.validation: 200% is not a fraction", "held-out"),
    ("data: {seq_length: 8q}", "run.yaml:1 data.seq_length: '8q' is not a whole number", "8k = 8192"),
    ("tokenizer: {name_or_path: 'train:100'}", "run.yaml:1 tokenizer.name_or_path: train:100 is too small", "BPE"),
    ("train: {max_steps: 3, max_tokens: 5M}", "run.yaml:1 train: max_steps and max_tokens are both set", None),
    ("train: {max_steps: 0}", "run.yaml:1 train.max_steps is 0", None),
    ("train:\n  seed: 1\n  seed: 2", "run.yaml:3 train.seed is set twice", "run.yaml:2"),
    ("layout: {auto: true, tp: 0}", "run.yaml:1 layout: tp 0 is not a degree", "tp is 1 to"),
    ("layout:\n  tp: 1\n  zero: 7", "run.yaml:3 layout: zero 7 is not known", "1, 2, 3"),
    ("layout: tp2.foo3", "run.yaml:1 layout 'tp2.foo3': 'foo3' is not a degree", "tpN"),
    ("train: {micro_batch_size: 2}\nlayout: tp2+mb3", "train.micro_batch_size is 3, but run.yaml:1 says 2", "keep one"),
    ("a: [", "run.yaml:1 is not YAML", "bracket"),
    ("train:\n\tseed: 1", "run.yaml:2 is not YAML", "spaces"),
    ("- 1", "run.yaml:1 is not a run file", "sections"),
]


def test_a_layout_that_the_planner_chooses_is_open(here: Path) -> None:
    config = loaded(here, "layout: auto\nmemory: {recompute: full}", "layout.tp=2")
    assert config.is_automatic and config.given == {"tp": 2, "recompute": "full"}
    check_supported(config)
    with pytest.raises(UserError, match="layout: auto is chosen when training starts"):
        config.layout  # noqa: B018
    layout = Layout.parse("shard2.tp2+zero1+mb4+fp32")
    settled = config.with_layout(layout)
    assert settled.layout == layout and parse_config(settled.to_yaml()) == settled
    assert loaded(here, "layout: auto", "layout=tp2").layout == Layout.parse("tp2")
    assert loaded(here, "layout: tp2", "layout=auto").given == {}


def test_errors_name_the_line_the_key_and_the_fix(subtests: pytest.Subtests, here: Path) -> None:
    for text, what, fix in ERRORS:
        with subtests.test(msg=what):
            with pytest.raises(UserError) as caught:
                loaded(here, text)
            assert what in caught.value.what
            assert caught.value.exit_code == 2
            if fix:
                assert fix in (caught.value.fix or "")


def test_errors_of_the_command_line_say_so(subtests: pytest.Subtests) -> None:
    cases = [
        ("optimizer.learning_rte=3", "command line optimizer.learning_rte is not a key"),
        ("learning_rate=3", "command line learning_rate is not a key"),
        ("foo", "command line: 'foo' is not key=value"),
        ("train.seed.x=3", "command line train.seed is a section"),
        ("data.train.1.path=3", "data.train has 1 source"),
        ("data.train.foo=3", "command line data.train.0.foo is not a key"),
        ("data.validation.text_key=body", "data.validation is a str, not a section"),
        ("layout=zz", "command line layout 'zz'"),
        ("layout.tp=0", "command line layout: tp 0 is not a degree"),
        ("sample.prompts=[", "the value of sample.prompts is not YAML"),
    ]
    for override, what in cases:
        with subtests.test(msg=override):
            with pytest.raises(UserError, match="command line") as caught:
                load_config(None, [override])
            assert what in caught.value.what


def test_a_missing_file_is_said(here: Path) -> None:
    with pytest.raises(UserError, match=r"nowhere.yaml: there is no such file"):
        load_config(Path("nowhere.yaml"))
    written(here, "")
    with pytest.raises(UserError) as caught:
        load_config(Path("nowhere.yaml"))
    assert (caught.value.fix, bool(caught.value.more)) == ("run files here: run.yaml", True)


def test_removed_keys(subtests: pytest.Subtests, here: Path) -> None:
    """Files of earlier runs have them: at their defaults they mean nothing, and in a checkpoint at no value."""
    plain = loaded(here, "")
    for name, (default, answer) in REMOVED.items():
        with subtests.test(msg=name):
            assert loaded(here, f"memory: {{{name}: {default}}}") == plain
            assert parse_config(f"memory: {{{name}: 8}}") == parse_config("{}")
            with pytest.raises(UserError, match=rf"run\.yaml:1 memory\.{name} is not a key") as caught:
                loaded(here, f"memory: {{{name}: 8}}")
            assert caught.value.fix == answer


def test_the_resolved_file_reads_back_equal(here: Path) -> None:
    config = load_config(None, ["train.max_tokens=5M", "layout=shard2.tp2+mb4", "data.train=[a.txt,{path: b}]"])
    assert loaded(here, config.to_yaml()) == config
    assert parse_config(config.to_yaml()) == config


def test_the_demo_is_a_short_commented_file_that_says_what_it_trains() -> None:
    text = DEMO.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 45
    config = load_config(None)
    assert (config.run.name, config.model.init, config.layout.dp_shard) == ("demo", "random", -1)
    assert int(config.tokenizer.name_or_path.removeprefix("train:")) <= 4096
    check_supported(config)
    # What its last sample was judged by (README): half the parameters and Muon, at the tokens it had before.
    assert (config.optimizer.name, config.model.overrides["hidden_size"]) == ("muon", 128)
    assert (config.train.max_steps or 0) * config.train.global_batch_size * config.data.seq_length <= 820_000
    for devices in (1, 2, 4, 8):
        assert config.layout.resolve(devices).accumulation(config.train.global_batch_size) >= 1


@pytest.mark.parametrize(
    "override",
    [
        "layout=cp4+2x3",
        "layout=tp2.ep2",
        "layout=tp2+etp",
        "model.init=pretrained",
    ],
)
def test_what_is_not_built_yet_is_refused_by_name(override: str) -> None:
    config = load_config(None, [override])
    with pytest.raises(UserError) as caught:
        check_supported(config)
    assert caught.value.fix


@pytest.mark.parametrize("override", ["memory.recompute=full", "log.to=[jsonl, tensorboard]", "layout=dp2.shard2.tp2"])
def test_what_is_built_is_not_refused(override: str) -> None:
    check_supported(load_config(None, [override]))


def test_experts_are_split_where_there_are_some() -> None:
    with pytest.raises(UserError, match=r"expert_tp: .* has no experts to split over tp") as caught:
        check_supported(load_config(None, ["layout=tp2+etp"]))
    assert caught.value.fix == "set layout.expert_tp: false"
    check_supported(load_config(None, ["layout=tp2+etp", "model.name_or_path=someone/mixtral"]))
    check_supported(load_config(None, ["layout=shard2+etp"]))  # nothing to split over


def test_shapes_are_config_files_by_name() -> None:
    assert {"demo", "llama-3.1-8b", "llama-3.2-1b", "qwen3-0.6b", "qwen3-8b"} <= set(shape_names())
    folder = shape_folder("demo")
    assert folder is not None and (folder / "config.json").is_file()
    assert shape_folder("gpt-9") is None


@pytest.mark.full
def test_config_needs_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from fivefold.config import load_config, check_supported; check_supported(load_config(None)); "
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_units() -> None:
    assert (parse_length("8k"), parse_length("1M"), parse_length(512)) == (8192, 2**20, 512)
    assert (parse_count("1.5M"), parse_count("2B"), parse_count("1_000")) == (1_500_000, 2_000_000_000, 1000)
    assert (parse_fraction("1%"), parse_fraction(0.25)) == (0.01, 0.25)
    assert [human(n) for n in (7, 999, 9321, 4_737_792, 8.03e9)] == ["7", "999", "9.32k", "4.74M", "8.03B"]
    for wrong in ("", "k", "-3", "1.5", True, None):
        with pytest.raises(ValueError):
            parse_count(wrong)


@pytest.mark.parametrize("written", ["model.name_or_path=llama-3.2-1b", "model={name_or_path: llama-3.2-1b}"])
def test_without_a_file_another_model_has_nothing_of_the_demo(written: str, tmp_path: Path) -> None:
    """Neither its widths, its tokenizer, its optimizer nor its precision."""
    (tmp_path / "run.yaml").write_text("model: {name_or_path: llama-3.2-1b}\n")
    others = ["layout=tp2", "train.max_steps=7"]
    found = load_config(None, [others[0], written, others[1]])
    assert found == load_config(tmp_path / "run.yaml", others)
    assert (found.model.overrides, found.optimizer.name, found.train.max_steps) == ({}, "adamw", 7)
    demo = load_config(None, ["model.name_or_path=demo", *others])
    assert demo == load_config(None, others) and demo.optimizer.name == "muon"
    with pytest.raises(UserError, match=r"command line optimizer\.name"):
        load_config(None, [written, "optimizer.name=admw"])
