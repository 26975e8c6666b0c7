"""The command line: fast, one voice for errors, and each verb one call."""

import errno
import importlib.util
import json
import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fivefold import cli, generation
from fivefold.cli.train import split_arguments
from fivefold.config import load_config
from fivefold.core.errors import RunFailed, UserError
from fivefold.generation import GenerateRequest
from fivefold.launch.failure import WorkerDied
from fivefold.parallel.adapters.merge_check import MergeCheck
from fivefold.training import launch
from fivefold.verification import before_training
from tests.tiers import put_off

VERBS = (
    "train", "launch", "data", "plan", "rehearse", "verify", "compare", "generate", "evaluate", "export", "convert",
    "report", "calibrate", "doctor", "docs",
)  # fmt: skip


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code


def fails_with(error: BaseException) -> Any:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


# What costs a command its first second: `benchmarks/start_time.py` has the times.
HEAVY = "{'torch', 'transformers', 'numpy', 'pandas', 'pyarrow', 'tokenizers', 'safetensors', 'matplotlib', 'datasets'}"


@pytest.mark.full
@pytest.mark.parametrize(
    "arguments",
    [*map(put_off, ([], ["--help"], ["--version"], ["train", "--schema"])), ["train", "--keys"], ["verify", "--help"]],
)
def test_help_imports_nothing_heavy(arguments: list[str]) -> None:
    code = (
        f"import sys; from fivefold.cli import main\ntry: main({arguments})\nexcept SystemExit: pass\n"
        f"assert not {HEAVY} & set(sys.modules)"
    )
    python(code)


@pytest.mark.full
@pytest.mark.parametrize(
    ("module", "imported", "said"),
    [("fivefold", "typer", "stopped\n"), ("fivefold.launch.worker", "fivefold.launch.failure", "")],
)
def test_ctrl_c_while_modules_are_imported_ends_without_a_traceback(module: str, imported: str, said: str) -> None:
    code = f"""
import os, runpy, signal, sys

class CtrlC:
    def find_spec(self, name, *_):
        if name == "{imported}":
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
runpy.run_module("{module}", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", said)


IN_A_CALLBACK = """
class Gone: pass
gone = Gone()
reference = weakref.ref(gone, interrupt)
del gone
"""
IN_SET_NAME = """
class Field:
    __set_name__ = interrupt

class Owner:
    field = Field()
"""


@pytest.mark.full
@pytest.mark.parametrize("place", [IN_A_CALLBACK, IN_SET_NAME], ids=["callback", "set_name"])
def test_ctrl_c_is_not_lost_where_python_drops_it(place: str) -> None:
    """While the modules of a verb are imported: in the callback of a weak reference, and where a class is made."""
    code = f"""
import os, runpy, signal, sys, weakref

from tests.tiers import put_off

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)
    for _ in range(2):  # here Python looks for signals
        pass

class CtrlC:
    def find_spec(self, name, *_):
        if name == "fivefold.config.key":
            exec({place!r}, globals())

signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, CtrlC())
runpy.run_module("fivefold", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code, "train", "--schema"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")


@pytest.mark.full
def test_import_imports_nothing_that_is_not_asked_for() -> None:
    own = "[each for each in sys.modules if each.startswith('fivefold')]"
    python(f"import fivefold, sys; assert {own} == ['fivefold'] and not {HEAVY} & set(sys.modules)")
    python(f"import fivefold, sys; fivefold.Layout.parse('tp2'); assert not {HEAVY} & set(sys.modules)")


def test_every_public_name_is_there_and_none_else() -> None:
    import fivefold

    assert all(hasattr(fivefold, name) for name in fivefold.__all__)
    assert set(fivefold.__all__) == set(fivefold._HOMES)
    with pytest.raises(AttributeError, match="nothing"):
        fivefold.nothing  # noqa: B018


def test_the_name_alone_lists_the_verbs_one_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    assert run() == 0
    lines = capsys.readouterr().out.splitlines()
    listed = [line.split()[1] for line in lines if line.startswith("  fivefold ")]
    assert listed == list(VERBS)
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(verb, "--help") == 0
    assert "--debug" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what", "fix"),
    [
        (["trian"], "No such command 'trian'", "fivefold --help"),
        (["train", "--nproc", "x"], "--nproc", "fivefold train --help"),
        (["generate", "runs/demo"], "--prompt", "fivefold generate --help"),
        (["train", "train.max_stps=3"], "command line train.max_stps is not a key", "did you mean train.max_steps?"),
        (["train", "no.yaml"], "no.yaml: there is no such file", "demo"),
        (["train", "train.seed=1", "run.yaml"], "run.yaml is neither the run file", "RUN.yaml key=value"),
        (["train", "layout=shard3", "--nproc", "2"], "dp_shard 3 = 3, but 2 workers started", "dp_shard 2 fits"),
        (["train", "layout=tp3", "--nproc", "2"], "3 does not divide 2", ""),
        (["train", "train.global_batch_size=7", "--nproc", "2"], "is not a multiple of", "train.global_batch_size"),
        (["data", "--prepare", "--shard", ""], "--shard : no shard i/n", "0/8"),  # a variable that is not set
        (["train", "layout=tp3"], "tp=3 does not fit num_attention_heads=4, num_key_value_heads=2", "try tp 1, 2, 4"),
        (
            ["train", "data.seq_length=2k"],
            "data.seq_length 2048 is more than the model's max_position_embeddings",
            "1024",
        ),
        (["train", "model.name_or_path=dmeo"], "dmeo is neither a folder nor a hub id", "demo"),
    ],
)
def test_a_wrong_request_is_three_lines_and_exit_2(
    arguments: list[str], what: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(*arguments) == 2
    said = capsys.readouterr()
    assert what in said.err and fix in said.err
    assert said.out == ""
    assert len(said.err.strip().splitlines()) == 3 or arguments[1:] in ([], ["--nproc", "x"], ["runs/demo"])
    assert "Traceback" not in said.err
    assert not list(tmp_path.iterdir())  # nothing was started


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (UserError("wrong", fix="do this", more="read that"), 2, "wrong\ndo this\nread that\n"),
        (RunFailed("it diverged"), 1, "it diverged\n"),
        (KeyboardInterrupt(), 130, "stopped\n"),
        (SystemExit(143), 143, ""),
    ],
)
def test_exit_codes(error: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(launch, "run", fails_with(error))
    assert run("train") == code
    assert capsys.readouterr().err.lstrip() == said


def test_a_bug_is_one_line_and_a_traceback_only_under_debug(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    monkeypatch.setattr(launch, "run", fails_with(ZeroDivisionError("division\nby zero")))
    assert run("train") == 1
    assert capsys.readouterr().err.splitlines()[0] == "ZeroDivisionError: division"
    assert run("train", "--debug") == 1
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_worker_s_traceback_is_shown_under_debug(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    crashed = WorkerDied("rank 1 stopped: RuntimeError: boom")
    crashed.traceback = "Traceback of the worker"
    monkeypatch.setattr(launch, "run", fails_with(crashed))
    assert run("train") == 1
    assert "Traceback of the worker" not in capsys.readouterr().err
    assert run("train", "--debug") == 1
    assert "Traceback of the worker" in capsys.readouterr().err


def test_train_calls_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda *given, **named: calls.append((given, named)))
    assert run("train", "my.yaml", "train.seed=3", "layout=tp2", "--nproc", "2") == 0
    assert run("train", "data.train=./notes.jsonl", "--verify") == 0
    assert calls[0] == ((Path("my.yaml"), ["train.seed=3", "layout=tp2"]), {"nproc": 2, "prove": None})
    assert calls[1] == ((None, ["data.train=./notes.jsonl"]), {"nproc": None, "prove": before_training})


def test_overrides_from_python_arrive_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    import fivefold

    calls: list[Any] = []
    monkeypatch.setattr(launch, "run", lambda path, overrides, **_: calls.append(overrides) or path)
    fivefold.train("my.yaml", {"sample.prompts": ["\U0001f600 \u00e9"]})
    assert load_config(None, calls[0]).sample.prompts == ("\U0001f600 \u00e9",)


def test_generate_and_export_call_their_functions(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(generation, "start", lambda *given, **named: calls.append((given, named)))
    done = SimpleNamespace(dtype="torch.bfloat16", parameters=1_234_567, bytes=2_469_134, is_adapter=False, lacks={})
    done.check, done.push = MergeCheck(2e-7, 1.5e-2), None
    module = import_module("fivefold.checkpoint.export")  # the package has a function of this name
    monkeypatch.setattr(module, "export", lambda *given, **named: calls.append((given, named)) or done)
    assert run("generate", "runs/demo", "--prompt", "def ", "--layout", "tp2", "--top-k", "5") == 0
    assert run("export", "runs/demo", "my out", "--step", "20", "--dtype", "bf16", "--force") == 0
    request = GenerateRequest(model="runs/demo", prompt="def ", layout="tp2", top_k=5)
    assert calls[0] == ((request,), {"device": "auto"})
    options = {"step": 20, "best": False, "dtype": "bf16", "force": True, "merge": False, "push": None}
    assert calls[1][1].pop("room") > 0
    assert calls[1] == (("runs/demo", Path("my out")), options)
    said = capsys.readouterr().out
    assert said.startswith("my out is a Hugging Face folder: 1.23M parameters in bfloat16, 2.47MB\n")
    assert "2.0e-07 apart in fp32, 1.5e-02 with weights in bfloat16\n" in said
    assert "\nvllm serve 'my out'\n" in said
    assert "\nlm_eval --model hf --model_args 'pretrained=my out' --tasks hellaswag\n" in said


def test_generate_has_one_set_of_defaults() -> None:
    import inspect
    from typing import get_overloads

    import fivefold
    from fivefold import own_loop
    from fivefold.cli.model import generate

    for name in ("temperature", "top_k", "top_p", "seed", "max_new_tokens"):
        functions = (generate, own_loop.generate, GenerateRequest, *get_overloads(fivefold.generate))
        found = {inspect.signature(each).parameters[name].default for each in functions}
        assert len(found - {None}) == 1, name  # None: by what is asked, see `test_answers_have_more_room_than_texts`


def test_answers_have_more_room_than_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    from fivefold.generation import MAX_NEW_TOKENS, MAX_NEW_TOKENS_CHAT

    asked: list[GenerateRequest] = []
    monkeypatch.setattr(generation, "start", lambda request, device: asked.append(request))
    for given in (["--prompt", "a"], ["--chat"], ["--chat", "--max-new-tokens", "3"]):
        with pytest.raises(SystemExit):
            cli.main(["generate", "m", *given])
    assert [each.max_new_tokens for each in asked] == [MAX_NEW_TOKENS, MAX_NEW_TOKENS_CHAT, 3]


def test_arguments_are_a_file_first_and_then_keys() -> None:
    assert split_arguments(["run.yaml", "a.b=1"]) == (Path("run.yaml"), ["a.b=1"])
    assert split_arguments(["a.b=1"]) == (None, ["a.b=1"])
    assert split_arguments([]) == (None, [])


def test_a_file_that_is_there_is_the_run_file_whatever_its_name(tmp_path: Path) -> None:
    file = tmp_path / "lr=3.yaml"
    assert split_arguments([str(file)]) == (None, [str(file)])
    file.touch()
    assert split_arguments([str(file), "a=1"]) == (file, ["a=1"])


def test_keys_are_listed_with_default_and_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("train", "--keys") == 0
    listed = capsys.readouterr().out
    assert re.search(r"^data\.seq_length  \[8192\]\n +tokens per row", listed, re.MULTILINE)
    assert "Undefined" not in listed
    assert re.search(r"^scheduler\.name  \[cosine\]  cosine \| linear \| wsd \| constant$", listed, re.MULTILINE)
    assert max(map(len, listed.splitlines())) <= 80
    assert re.search(r"^memory\.recompute  \[none\]  none \| selective \| full", listed, re.MULTILINE)


def test_the_version_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    import fivefold

    assert run("--version") == 0
    said = capsys.readouterr().out
    assert re.fullmatch(r"fivefold \d\S* \(torch \d\S+, transformers \d\S+, Python 3\.\d+\.\d+\)\n", said)
    assert said.split()[1] == fivefold.__version__


def test_docs_lists_pages_and_prints_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("docs") == 0
    listed = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert listed["howto/data"] == "Prepare data" and listed["explain/slow_links"] == "ZeRO++ and slow networks"
    page = (Path(__file__).parents[2] / "docs/howto/data.md").read_text()
    for name in ("howto/data", "docs/howto/data.md", "howto/data#name-the-sources"):
        assert run("docs", name) == 0
        assert capsys.readouterr().out == f"{page}\n"
    assert run("docs", "data") == 2
    assert capsys.readouterr().err == "there is no page data\nfivefold docs explain/data or fivefold docs howto/data\n"


def test_doctor_prints_json_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run("doctor", "--json", "-") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is True
    assert {"python", "torch", "transformers", "cpu", "cache"} <= {row["what"] for row in report["rows"]}
    assert run("doctor", "--json", str(tmp_path / "report.json")) == 0
    assert json.loads((tmp_path / "report.json").read_text()).keys() == report.keys()
    assert "fivefold train" in capsys.readouterr().out


def test_doctor_fails_when_something_needed_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    from fivefold.doctor import machine

    def torchless() -> Any:
        yield machine.Finding("torch", "missing", "not installed", "pip install 'torch>=2.11'")

    monkeypatch.setattr(machine, "LOOKS", (torchless,))
    assert run("doctor") == 1
    assert "pip install 'torch>=2.11'" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("why", "state", "said"),
    [
        ("", "ok", "by FlexAttention, which was tried"),
        ("there is no compiler", "help", "block by block: there is no"),
    ],
)
def test_doctor_says_how_a_gpu_caps_scores(why: str, state: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from fivefold.doctor import machine
    from fivefold.ops import gpu_attention

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(gpu_attention, "lacks", lambda *_, **__: why)
    (found,) = machine._gpu_kernels()
    assert found.state == state and said in found.found


@pytest.mark.parametrize("error", [ImportError("libtorch_cpu.so: no such file"), OSError("libcudart.so.13: no file")])
def test_a_torch_that_does_not_load_is_missing(error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """Its version, which needs no import, says nothing of that."""

    class Broken:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "torch":
                raise error

    monkeypatch.delitem(sys.modules, "torch", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert run("doctor", "--json", "-") == 1
    report = json.loads(capsys.readouterr().out)
    found = [(row["state"], row["found"]) for row in report["rows"] if row["what"] == "torch" and row["state"] != "ok"]
    assert found == [("missing", f"does not load: {error}")]


@pytest.mark.parametrize(
    ("version", "bound", "meets"),
    [("2.13.0+cpu", ">=2.11", True), ("2.9.1", ">=2.11", False), ("6.0.0", "<6", False), ("5.23.0", "<6", True)],
)
def test_versions_are_compared_as_numbers(version: str, bound: str, meets: bool) -> None:
    from fivefold.doctor.machine import _meets

    assert _meets(version, bound) is meets


def test_a_removed_current_folder_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    here.rmdir()
    monkeypatch.setattr(launch, "run", fails_with(FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))))
    assert run("train") == 2
    assert "the folder that this command was started in has been removed" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.parametrize(("flag", "code"), [("-O", 0), ("-OO", 2)])
def test_python_without_docstrings_is_refused(flag: str, code: int) -> None:
    """Workers ended with an error of `transformers` about a docstring, and were started again."""
    done = subprocess.run([sys.executable, flag, "-m", "fivefold", "--version"], capture_output=True, text=True)
    assert done.returncode == code and ("PYTHONOPTIMIZE" in done.stderr) == (code == 2)
