"""Logs of other trainers: what is read of each, and what is refused."""

import json
from pathlib import Path

import pytest

from fivefold.comparison.logs import LoggedStep, read
from fivefold.core.errors import UserError

MEGATRON = (
    " [2026-01-02 03:04:05] iteration       10/     100 | consumed samples:         1280 | elapsed time per iteration "
    "(ms): 2000.0 | learning rate: 3.0E-04 | global batch size:   128 | lm loss: 4.5E+00 | loss scale: 1.0 |\n"
    " validation loss at iteration 10 | lm loss value: 4.4E+00 | lm loss PPL: 8.1E+01 | \n"
    " validation loss at iteration 10 on test set | lm loss value: 9.9E+00 | lm loss PPL: 2.0E+04 | \n"
)
TITAN = (
    "[rank0]:[titan] 2026-01-02 03:04:05 - root - INFO - \x1b[31mstep: 10  \x1b[32mloss:  4.5000  \x1b[38;2;54m"
    "memory: 12.50GiB(15.63%)  \x1b[34mtps: 5,432  \x1b[36mtflops: 99.1  \x1b[35mmfu: 31.77%\x1b[39m\n"
    "[rank0]:[titan] 2026-01-02 03:04:06 - root - INFO - \x1b[33mvalidate step: 10  \x1b[32mloss:  4.4000  "
    "memory: 40.00GiB(50.00%)  \x1b[34mtps: 20,432\x1b[39m\n"
)
STATE = {
    "log_history": [
        {"step": 5, "loss": 5.0, "num_input_tokens_seen": 500},
        {"step": 10, "loss": 4.5, "num_input_tokens_seen": 1000},
        {"step": 10, "eval_loss": 4.4, "eval_runtime": 1.0},
    ]
}


def test_what_is_read(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases = [
        (
            "own.jsonl", '{"step": 3, "tokens": 300, "loss": 4.5, "tokens_per_second": 80}\nno row\n', " devices=4", 4,
            LoggedStep(3, 300, 4.5, None, 20),
        ),
        ("a.csv", "step,loss,tps\n1,5.0,7\n2,4.5,8\n", " tokens_per_step=1k", None, LoggedStep(2, 2048, 4.5, None, 8)),
        ("excel.csv", "\ufeffstep, loss, tps\n2, 4.5, 8\n", "", None, LoggedStep(2, None, 4.5, None, 8)),
        ("trainer_state.json", json.dumps(STATE), "", None, LoggedStep(10, 1000, 4.5, 4.4)),
        ("m.log", MEGATRON, " seq_length=4096 devices=8", 8, LoggedStep(10, 1280 * 4096, 4.5, 4.4, 128 * 4096 / 2 / 8)),
        ("m.log", MEGATRON, "", None, LoggedStep(10, None, 4.5, 4.4)),
        ("m.log", MEGATRON.replace("10 |", "10 on validation set |"), "", None, LoggedStep(10, None, 4.5, 4.4)),
        # Rows grew in number: samples are counted, not steps; and what is given stands above what is printed.
        (
            "m.log", MEGATRON.replace("1280", "900"), " seq_length=10 devices=8", 8,
            LoggedStep(10, 9000, 4.5, 4.4, 1280 / 2 / 8),
        ),
        (
            "m.log", MEGATRON, " seq_length=10 devices=8 tokens_per_step=640", 8,
            LoggedStep(10, 12800, 4.5, 4.4, 640 / 2 / 8),
        ),
        ("t.log", TITAN, " tokens_per_step=8192", None, LoggedStep(10, 81920, 4.5, 4.4, 5432, 12.5, 31.77)),
        (
            "wandb.jsonl",
            '{"_step": 2, "loss_metrics/global_avg_loss": 4.5, "n_tokens_seen": 64, "throughput(tps)": 9, '
            '"mfu(%)": NaN}',
            "", None, LoggedStep(2, 64, 4.5, None, 9),
        ),
        ("excel.csv", "\ufeffstep,loss\n2,4.5\n", "", None, LoggedStep(2, None, 4.5)),
        ("a.jsonl", f'{{"step": 2, "loss": 4.5, "tps": 1{"0" * 400}}}', "", None, LoggedStep(2, None, 4.5)),
        (
            "trainer_state.json", '{"log_history": [{"step": [1], "loss": 5}, {"step": 2, "loss": 4.5}]}',
            "", None, LoggedStep(2, None, 4.5),
        ),
        (
            "m.log", MEGATRON.replace("(ms): ", "(ms): 1.2."),
            " seq_length=8 devices=1", 1, LoggedStep(10, 10240, 4.5, 4.4),
        ),
        ("a log.csv", "step,loss\n2,4.5\n", " devices=4  tokens_per_step=8", 4, LoggedStep(2, 16.0, 4.5)),
    ]  # fmt: skip
    for number, (name, text, given, devices, last) in enumerate(cases):
        with subtests.test(msg=name + given, number=number):
            place = tmp_path / str(number)
            place.mkdir()
            (place / name).write_text(text)
            log = read(f"{place / name}{given}")
            assert log.steps[-1] == last
            assert log.devices == devices
            assert "loss from" in log.says


def test_what_is_given_stands_above_the_history_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").touch()
    (tmp_path / "history.jsonl").write_text('{"event": "start", "step": 0, "world": 2}\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "train/loss": 3.0}\n')
    assert (read(str(tmp_path)).devices, read(f"{tmp_path} devices=4").devices) == (2, 4)


def test_what_is_refused(subtests: pytest.Subtests, tmp_path: Path) -> None:
    cases = [
        (None, "", "there is no such log"),
        ("", "", "has no rows with a step"),
        ("step,time\n1,2\n", "", "has no rows with a step"),
        ('{"loss": 3}\n', "", "has no rows with a step"),
        ("a page of something else\n", "", "has no rows with a step"),
        ("step,loss\n1,2\n", " devices=0", "devices=0 is none of"),
        ("step,loss\n1,2\n", " gpus=8", "gpus=8 is none of"),
        ("step,loss\n1," + "2" * 200_000, "", "is not CSV: field larger"),
        (None, "x" * 5000, "cannot be read: .*too long"),
    ]
    for number, (text, given, what) in enumerate(cases):
        with subtests.test(msg=what, number=number):
            place = tmp_path / str(number)
            place.mkdir()
            if text is not None:
                (place / "a.log").write_text(text)
            with pytest.raises(UserError, match=what):
                read(f"{place / 'a.log'}{given}")
