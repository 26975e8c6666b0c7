"""The process of a rank: the real trainer, watched. `python -m fivefold.rehearsal.stage REPORTS` forks one for every
folder named by a line of standard input: it reads the request there, and writes its results next to it. The exit code
of each goes to the descriptor REPORTS. `alone FOLDER`: run that one without a fork."""

import faulthandler
import gc
import json
import os
import signal
import sys
import traceback
from contextlib import ExitStack
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import NoReturn

import numpy as np

from fivefold import torch_internals
from fivefold.config import RunConfig, parse_config
from fivefold.core.cache import cache_root
from fivefold.core.errors import UserError
from fivefold.core.files import cannot_write, is_users
from fivefold.core.interrupts import Stopped
from fivefold.data.counts import DataCounts, SourceCounts
from fivefold.data.prepare import PreparedData, prepare
from fivefold.data.rows import RowPacking
from fivefold.data.store import StoreMeta, TokenStore
from fivefold.data.tokenizer import TokenizerInfo
from fivefold.launch.worker import die_with_parent
from fivefold.launch.world import LAUNCHER, World, join
from fivefold.models.build import load_model_config
from fivefold.rehearsal.changes import AnswersAll, changed, environment
from fivefold.rehearsal.request import RehearsalRequest, Seen
from fivefold.rehearsal.watch import RankWatch
from fivefold.training.run import build, take_steps
from fivefold.training.run_log import RunLog


def rehearse(request: RehearsalRequest) -> Seen:
    """Run `request` on its rank, from the build to the save after its last step."""
    watch, store = RankWatch.of(request), AnswersAll() if request.is_full else None  # torch keeps no reference to it
    try:
        with ExitStack() as stack:
            stack.enter_context(changed(is_full=request.is_full))
            if not request.is_full:
                import_module("torch.testing._internal.distributed.fake_pg")  # the group that sends nothing
            stack.enter_context(watch.watching())
            stack.enter_context(join(world_of(request), store=store))
            _train(request, watch)
    except Stopped:
        return watch.seen()
    except UserError as error:
        return watch.seen(failed=error.what)
    except Exception as error:
        if watch.is_out_of_memory(error):
            return watch.seen()
        if isinstance(error, OSError) and is_users(error):  # compilers write to both
            return watch.seen(failed=cannot_write(f"{cache_root()} or {request.folder}", error).what)
        traceback.print_exc()
        return watch.seen(failed=f"{type(error).__name__}: {error}")
    return watch.seen()


def world_of(request: RehearsalRequest) -> World:
    """The rank in its world, as `launch/world.py` would read it from the environment."""
    if not request.is_full:  # a single rank has this machine's memory
        return World(rank=request.rank, size=request.world, backend="fake", is_local=True)
    local = request.rank % request.local_size
    return World(
        rank=request.rank,
        local_rank=local,
        size=request.world,
        local_size=request.local_size,
        device=f"cuda:{local}",
        backend="nccl",
        is_local=True,
    )


def _train(request: RehearsalRequest, watch: RankWatch) -> None:
    """Train as `training.run.train` does, without its watchdog: there are no ranks to wait for."""
    config = parse_config(request.config)
    (config.run_dir / "logs").mkdir(parents=True, exist_ok=True)
    data = synthetic(config, Path(request.folder)) if request.synthetic else prepare(config)
    around = environment(is_full=request.is_full)
    with ExitStack() as stack:
        with watch.phase("build"):
            run = build(config, world_of(request), data, RunLog(config.run_dir), stack, around)
        watch.built(run.model)
        take_steps(run, around.read)


def play(folder: Path) -> NoReturn:
    """Rehearse, and end this process at once: threads of NCCL would wait for the other ranks."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # prints a traceback
    request = RehearsalRequest(**json.loads((folder / "request.json").read_text(encoding="utf-8")))
    seen = json.dumps(asdict(rehearse(request)))
    (folder / "seen.json").write_text(seen, encoding="utf-8")
    sys.stdout.flush()
    os._exit(0)


def main(reports: int) -> None:
    """Fork a process for each folder, one after the other."""
    die_with_parent(by=signal.SIGKILL)
    torch_internals.import_compiler()  # takes seconds: once here, instead of in every rank
    gc.freeze()  # keeps these pages shared: a rank's garbage collector does not write to them
    os.environ[LAUNCHER] = str(os.getpid())  # for the processes forked here
    for line in sys.stdin:
        sys.stdout.flush()
        process = os.fork()
        if process == 0:
            die_with_parent(by=signal.SIGKILL)
            os.close(reports)
            folder = line.removesuffix("\n")
            if torch_internals.has_lost_cuda():  # up to torch 2.12 that import starts CUDA, which no fork can use
                os.execv(sys.executable, [sys.executable, "-P", "-m", __spec__.name, "alone", folder])
            play(Path(folder))
        _, status = os.waitpid(process, 0)
        os.write(reports, f"{os.waitstatus_to_exitcode(status)}\n".encode())


DOCUMENTS, ROWS = 4, 16  # documents of a row; rows of the data, which repeat
SEED = 1234


def synthetic(config: RunConfig, folder: Path) -> PreparedData:
    """Build rows of four documents each, the same for training and validation, from the model's whole vocabulary.
    `folder`: where they are written."""
    vocabulary = int(load_model_config(config.model.name_or_path, config.model.overrides).get_text_config().vocab_size)
    length, tokenizer = config.data.seq_length, TokenizerInfo(folder, "synthetic", vocabulary, 0)
    size = max(length // DOCUMENTS, 2)
    tokens = np.random.default_rng(SEED).integers(0, vocabulary, ROWS * DOCUMENTS * size, dtype=np.uint32)
    tokens.tofile(folder / "tokens.bin")
    meta = StoreMeta(
        kind="synthetic", version=0, content="", tokenizer="", vocab_size=vocabulary, eos_token_id=0, bos=(),
        dtype="uint32", documents=ROWS * DOCUMENTS, tokens=len(tokens), blocks=0, answers_alone=(), files={},
    )  # fmt: skip
    starts = np.arange(0, len(tokens), size, dtype=np.int64)
    stores, sizes = (TokenStore(folder, meta),), np.full_like(starts, size)
    packing = RowPacking.of(config, pad_id=0)
    index, counts = packing.index(stores, (starts, sizes))
    rows = packing.rows(index, counts, stores)
    is_held_out = bool(config.data.validation)
    source = SourceCounts("synthetic", meta.documents, counts.tokens, 1.0, 1.0)
    return PreparedData(
        tokenizer=tokenizer,
        train=rows,
        validation=rows if is_held_out else None,
        counts=DataCounts(
            files=0, files_left_out=0, documents=meta.documents, tokens=meta.tokens, seq_length=length, train=counts,
            sources=(source,), validation=counts if is_held_out else None, validation_asked=is_held_out, repeated=0,
        ),
        fingerprint="synthetic",
    )  # fmt: skip


if __name__ == "__main__":
    if sys.argv[1] == "alone":
        play(Path(sys.argv[2]))
    main(int(sys.argv[1]))
