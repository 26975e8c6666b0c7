"""What is said around a run: commands that can be pasted, and nothing of an MFU that there is none of."""

import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from fivefold.config import RunConfig, load_config
from fivefold.core.best import Best
from fivefold.launch.folder import next_commands
from fivefold.training import header
from fivefold.training.part import OwnPart, RunProgress


class Rows:
    """A hundred of them."""

    def extent(self, rows: int, steps: str) -> str:
        return f"{rows / 100:.3g} epochs: {steps} over 100 rows"


def job(config: RunConfig, *, step: int, device: str = "cpu", peak: float | None = None) -> Any:
    return SimpleNamespace(
        config=config, step=step, total_steps=20, progress=RunProgress(last_eval=1.5, tokens_seen=1000),
        peak_tflops=peak, world=SimpleNamespace(device=device), why_stopped="", parts=[],
        data=SimpleNamespace(train=Rows(), converses=False),
    )  # fmt: skip


def commands(lines: list[tuple[str, str]]) -> list[list[str]]:
    labels = [label for label, _ in lines]
    return [shlex.split(text, comments=True) for _, text in lines[labels.index("next") :]]


def test_lines_to_paste_are_quoted_and_name_the_report(tmp_path: Path) -> None:
    run = tmp_path / "ünï 文" / "it's"
    config = load_config(None, [f"run.dir={run.parent}", f'run.name="{run.name}"', 'sample.prompts=["say \\"a b\\""]'])
    pasted = commands(header.closing_lines(job(config, step=20), ""))
    assert pasted == [
        ["fivefold", "report", str(run)],
        ["fivefold", "generate", str(run), "--prompt", 'say "a b"'],
        ["fivefold", "export", str(run), str(run / "hf")],
        ["fivefold", "train", str(run), "train.max_steps=40"],  # a finished run says how to make it longer
    ]


def test_a_stopped_run_names_the_command_that_goes_on() -> None:
    lines = header.closing_lines(job(load_config(None), step=7), "stopped by SIGINT after step 7")
    assert ("next", "fivefold train runs/demo   # goes on") in lines
    assert commands(lines)[1] == ["fivefold", "report", "runs/demo"]
    assert load_config(None, ["train.max_steps=14"]).train.max_steps == 14  # the key that makes it longer


def test_a_run_that_stopped_early_names_its_best_step(tmp_path: Path) -> None:
    """Commands for the best step stand there where its checkpoint does."""
    config = load_config(None, [f"run.dir={tmp_path}", "eval.stop.patience=2", 'sample.prompts=["der"]'])
    run = tmp_path / "demo"
    stopped = job(config, step=7)
    stopped.why_stopped = "stopped early"
    stopped.progress.best = Best(ranking=((3, 1.25), (5, 1.5)), improved=1.25, waited=2)
    lines = header.closing_lines(stopped, "stopped early")
    assert ("best", "step 3: eval/loss 1.2500; not kept (checkpoint.keep_best)") in lines
    assert not any("--best" in text or "--step" in text for _, text in lines)
    (run / "checkpoints" / "step-000003").mkdir(parents=True)
    lines = header.closing_lines(stopped, "stopped early")
    assert ("best", "step 3: eval/loss 1.2500") in lines
    assert commands(lines) == [
        ["fivefold", "report", str(run)],
        ["fivefold", "generate", str(run), "--step", "3", "--prompt", "der"],
        ["fivefold", "export", str(run), str(run / "hf"), "--best"],
        ["fivefold", "train", str(run), "eval.stop.patience=0"],
    ]
    stopped.parts = [MagicMock(spec=OwnPart)]  # one of the user's own has stopped it
    assert commands(header.closing_lines(stopped, "enough"))[-1] == ["fivefold", "train", str(run), "train.parts=[]"]


def test_a_prompt_of_several_lines_is_not_pasted() -> None:
    config = load_config(None, ['sample.prompts=["a\\nb", "c"]'])
    assert next_commands(config, step=1, total_steps=2)[2].endswith("--prompt c")


@pytest.mark.parametrize(
    ("device", "peak", "said"),
    [("cpu", None, []), ("cuda:0", None, ["not shown: the peak"]), ("cuda:0", 989.0, ["of 989 TFLOP/s; counted: 6 x"])],
)
def test_mfu_is_explained_where_there_is_one(device: str, peak: float | None, said: list[str]) -> None:
    lines = header._mfu_lines(job(load_config(None), step=0, device=device, peak=peak))
    assert [label for label, _ in lines] == ["mfu"] * len(said)
    assert all(start in text for start, (_, text) in zip(said, lines, strict=True))


@pytest.mark.parametrize(
    ("softcap", "window", "groups", "why", "said"),
    [
        (50.0, None, [], "", ", of soft-capped scores by FlexAttention"),
        (50.0, 64, [None], "no compiler", ", of soft-capped scores block by block (no compiler)"),
        (None, 64, [None], "", ", of windows between ranks by FlexAttention"),
        (None, 64, [], "", ""), (None, None, [None], "", ""),
    ],
)  # fmt: skip
def test_how_a_gpu_attends_where_flash_has_no_kernel(
    softcap: float | None, window: int | None, groups: list[None], why: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []

    def lacks(device: torch.device, dtype: torch.dtype, size: int, *, is_capped: bool) -> str:
        assert (device.type, dtype, size) == ("cuda", torch.bfloat16, 256)
        asked.append(is_capped)
        return why

    config = SimpleNamespace(attn_logit_softcapping=softcap, sliding_window=window)
    config.get_text_config = lambda: config
    plan = SimpleNamespace(
        facts=SimpleNamespace(attends={"layers.0": SimpleNamespace(size=256)}), layout=SimpleNamespace(precision="bf16")
    )
    monkeypatch.setattr(
        header, "state_of", lambda _: SimpleNamespace(plan=plan, live=lambda _: SimpleNamespace(row_groups=groups))
    )
    monkeypatch.setattr(header.gpu_attention, "lacks", lacks)
    run = job(load_config(None), step=0, device="cuda:0")
    run.model = SimpleNamespace(config=config)
    assert header._attention(run, "fa2") == f", attention by FlashAttention 2{said}"
    assert asked == ([softcap is not None] if said else [])
