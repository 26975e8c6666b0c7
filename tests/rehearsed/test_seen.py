"""What is made of what a rehearsal saw: collectives and which are exposed, the peak of memory, the sentences."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from pydantic import TypeAdapter
from rich.console import Console

from fivefold.core.files import put
from fivefold.hardware.cluster import Cluster
from fivefold.parallel.layout import Layout
from fivefold.rehearsal.launch import kinds
from fivefold.rehearsal.report import TIGHT, Rehearsal
from fivefold.rehearsal.request import (
    MemoryItem,
    OutOfMemory,
    Phase,
    Recompile,
    RehearsalRequest,
    Seen,
    SentOverAxis,
    Sync,
)
from fivefold.rehearsal.stand_in import Lack
from fivefold.rehearsal.stream_order import COLLECTIVE, KINDS, LAUNCH, RECORD, WAIT, Communicator, StreamRequest, issued
from fivefold.rehearsal.watch import RankWatch, Running, items, line_of, made_by, peak_of
from fivefold.report.findings import to_html
from fivefold.training.memory import asked_bytes

GIB, GROUPS = 2**30, {7: Communicator("tp", 4), 8: Communicator("cp", 1), 9: Communicator("ep", 2)}
COMPUTE, OTHER = 0, 5  # streams


def kernel(stream: int = COMPUTE) -> StreamRequest:
    return StreamRequest(LAUNCH, 0, stream, 0, 0, 0)


def record(event: int, stream: int) -> StreamRequest:
    return StreamRequest(RECORD, 0, stream, event, 0, 0)


def wait(event: int, stream: int) -> StreamRequest:
    return StreamRequest(WAIT, 0, stream, event, 0, 0)


def collective(kind: str, stream: int = OTHER, *, of: int = 7, size: int = 100, group: int = 0) -> StreamRequest:
    return StreamRequest(COLLECTIVE, KINDS.index(kind), stream, of, size, group)


# ---- collectives in stream order -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("beside", "exposed"), [(0, True), (3, False)])
def test_a_collective_is_hidden_by_a_kernel_beside_it(beside: int, exposed: bool) -> None:
    """The other stream begins behind the first kernel, and the compute stream waits for it before the last."""
    entries = [
        kernel(), record(1, COMPUTE), wait(1, OTHER), collective("all_gather"), record(2, OTHER),
        *[kernel()] * beside, wait(2, COMPUTE), kernel(),
    ]  # fmt: skip
    assert [(each.kind, each.bytes, each.exposed) for each in issued(entries, GROUPS)] == [("all_gather", 400, exposed)]


def test_kernels_of_another_stream_hide_nothing() -> None:
    entries = [
        kernel(), record(1, COMPUTE), wait(1, OTHER), collective("reduce_scatter"), kernel(OTHER), record(2, OTHER),
        wait(2, COMPUTE),
    ]  # fmt: skip
    assert [each.exposed for each in issued(entries, GROUPS)] == [True]


def test_a_collective_between_kernels_is_exposed_and_one_that_nobody_waits_for_is_not() -> None:
    entries = [kernel(), collective("all_reduce", COMPUTE), kernel(), collective("all_reduce")]
    assert [(each.bytes, each.exposed) for each in issued(entries, GROUPS)] == [(100, True), (100, False)]


def test_sends_to_all_and_from_all_are_an_exchange() -> None:
    """Of two ranks; to a neighbour alone they are what they are. Groups of one rank send nothing."""
    both = [collective(kind, of=9, group=3) for kind in ("send", "recv") * 2]
    ring = [collective(kind, of=7, group=4) for kind in ("send", "recv")]
    found = issued([*both, *ring, collective("all_gather", of=8)], GROUPS)
    assert [(each.axis, each.kind, each.bytes) for each in found] == [
        ("ep", "all_to_all", 200), ("tp", "send", 100), ("tp", "recv", 100),
    ]  # fmt: skip


def test_a_stream_stays_where_the_last_event_has_brought_it() -> None:
    """Another stream waits for the second kernel, then for the first: its collective begins behind both, and no kernel
    hides it."""
    entries = [
        kernel(), record(1, COMPUTE), kernel(), record(2, COMPUTE), wait(2, OTHER), wait(1, OTHER),
        collective("all_to_all"), record(3, OTHER), wait(3, COMPUTE),
    ]  # fmt: skip
    assert [(each.bytes, each.exposed) for each in issued(entries, GROUPS)] == [(400, True)]


def test_a_collective_is_waited_for_through_a_third_stream() -> None:
    entries = [
        kernel(), record(1, COMPUTE), wait(1, OTHER), collective("all_gather"), record(2, OTHER), wait(2, 6),
        record(3, 6), wait(3, COMPUTE),
    ]  # fmt: skip
    assert [each.exposed for each in issued(entries, GROUPS)] == [True]


def test_kernels_after_what_the_other_stream_has_waited_for_hide_its_collective() -> None:
    """Issued before it, and still beside it: the collective begins behind the first kernel."""
    entries = [
        kernel(), record(1, COMPUTE), wait(1, OTHER), kernel(), kernel(), collective("reduce_scatter"),
        record(2, OTHER), wait(2, COMPUTE),
    ]  # fmt: skip
    assert [(each.bytes, each.exposed) for each in issued(entries, GROUPS)] == [(400, False)]


def test_calls_given_as_one_are_told_apart_by_their_communicators() -> None:
    both = [collective(kind, of=of, group=3) for of in (7, 9) for kind in ("send", "recv") * 2]
    found = issued(both, {7: Communicator("tp", 2), 9: Communicator("ep", 2)})
    assert [(each.axis, each.kind, each.bytes) for each in found] == [
        ("tp", "all_to_all", 200),
        ("ep", "all_to_all", 200),
    ]


# ---- memory ----------------------------------------------------------------------------------------------------------


def event(time: int, action: str, address: int, size: int, *frames: tuple[str, int, str]) -> dict[str, Any]:
    named = [{"filename": file, "line": line, "name": name} for file, line, name in frames]
    return {"time_us": time, "action": action, "addr": address, "size": size, "frames": named}


HISTORY = [
    event(1, "alloc", 10, 100),
    event(2, "alloc", 20, 50),
    event(3, "free_requested", 20, 50),
    event(4, "free_completed", 20, 50),
    event(5, "alloc", 20, 70),
    event(6, "free_requested", 10, 100),
    event(7, "alloc", 30, 20),
]


@pytest.mark.parametrize(
    ("begin", "end", "bytes", "live"),
    [(0, 9, 170, [10, 20]), (0, 2, 150, [10, 20]), (6, 9, 90, [20, 30]), (7, 9, 90, [20, 30])],
)
def test_the_peak_between_two_times(begin: int, end: int, bytes: int, live: list[int]) -> None:
    peak = peak_of(HISTORY, begin, end)
    assert (peak.bytes, sorted(each.address for each in peak.live)) == (bytes, live)


def test_where_memory_ran_out_is_the_peak() -> None:
    history = [*HISTORY, event(8, "oom", 0, 500), event(9, "alloc", 40, 999)]
    assert peak_of(history, 0, 99).bytes == 90


def test_a_module_runs_from_the_time_on_at_which_it_begins() -> None:
    running = Running([2, 4], ["layers.0", ""])
    assert [running.at(time) for time in range(1, 5)] == ["", "layers.0", "layers.0", ""]


def test_tensors_alike_are_told_together() -> None:
    """By who made them, in which module; parameters by their names."""
    line = ("/site/transformers/models/llama/modeling_llama.py", 7, "forward")
    history = [event(at, "alloc", at, 8, ("/site/torch/nn/linear.py", 1, "forward"), line) for at in (1, 2, 3)]
    running = Running([0, 2, 3], ["layers.0", "layers.1", ""])
    found = items(peak_of(history, 0, 9).live, running, {3: "layers.5.weight"})
    assert found == (
        MemoryItem("modeling_llama.py:7 forward", "layers.*", 2, 16),
        MemoryItem("parameters", "layers.*.weight", 1, 8),
    )


@pytest.mark.parametrize(
    ("frame", "says"),
    [
        (
            ("/x/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "foreach_reduce"),
            "gradients (FSDP)",
        ),
        (("/x/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "foreach_all_gather"), "gathered"),
        (("/x/torch/optim/adamw.py", 1, "_init_group"), "optimizer state"),
        (("/tmp/torchinductor/ab.py", 1, "call"), "a compiled block"),
        (("/x/src/fivefold/models/packed.py", 9, "attend"), "fivefold/models/packed.py:9 attend"),
    ],
)
def test_who_made_an_allocation(frame: tuple[str, int, str], says: str) -> None:
    within = ("/x/torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py", 1, "allocate")
    assert made_by([("/x/torch/_ops.py", 1, "call"), within, frame]).startswith(says)
    assert made_by([]) == "backward, in torch"


# ---- what is told ----------------------------------------------------------------------------------------------------


def phase(name: str, reserved: int) -> Phase:
    rows = (MemoryItem("parameters", "layers.*", 4, GIB), MemoryItem("a compiled block", "layers.*", 2, GIB // 2))
    return Phase(
        name=name, allocated=reserved - 1, reserved=reserved, after=GIB, launches=9, syncs=2, compiles=1, seconds=0.5,
        items=rows,
    )  # fmt: skip


SEEN = Seen(
    rank=3,
    coordinates={"tp": 3},
    phases=(phase("build", 2 * GIB), phase("step 1", 30 * GIB), phase("step 2", 40 * GIB)),
    syncs=(Sync("step 2", "fivefold/training/step.py:56 train_step", 2),),
    sent=(SentOverAxis("tp", "all_gather", 8, 64, 8, 64, 8), SentOverAxis("ep", "all_to_all", 2, 10, 2, 12, 1)),
    recompiles=(Recompile("f", "0/0: grad mode", 1),),
    communicators=2,
)
CLUSTER = Cluster.parse("8xH100")


def rehearsal(seen: Seen = SEEN, *, lacks: tuple[Lack, ...] = ()) -> Rehearsal:
    return Rehearsal("llama", "tp8", CLUSTER, 2, (seen,), lacks)


def test_what_was_seen_travels_as_json() -> None:
    short = OutOfMemory("step 1", 5, "f", 7, 9, (MemoryItem("parameters", "x", 1, 4),))
    for each in (SEEN, replace(SEEN, out_of_memory=short)):
        assert TypeAdapter(Seen).validate_json(json.dumps(asdict(each))) == each


def test_a_rank_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    """The fullest phase against the device, whatever an all-to-all has of bytes."""
    told = rehearsal()
    assert told.ok and told.verdict.startswith("fits: 40 GiB reserved at most (rank 3, step 2), 51 % of 79.2 GiB")
    told.show(Console(width=80))
    screen = capsys.readouterr().out
    assert max(map(len, screen.splitlines())) <= 80
    for word in ("host syncs", "collectives", "compiled again", "largest", "no time was measured", "context of CUDA"):
        assert word in screen
    values = json.loads(told.to_json())
    assert values["ok"] and values["rows"][2]["reserved"] == "40.00" and values["ranks"][0]["rank"] == 3


def test_almost_all_of_the_memory_is_tight() -> None:
    assert rehearsal(replace(SEEN, phases=(phase("step 1", 78 * GIB),))).verdict.startswith("tight: 78 GiB")


def test_what_cuda_itself_has_counts_for_what_is_tight() -> None:
    """A run that reserves 95 % is tight by the context alone."""
    chip = CLUSTER.chip
    reserved = int(TIGHT * chip.memory_bytes)
    seen = replace(SEEN, phases=(phase("step 1", reserved),))
    assert rehearsal(seen).verdict.startswith("tight") and chip.context_gib > 0
    alone = replace(CLUSTER, chip=replace(chip, context_gib=0.0))
    assert replace(rehearsal(seen), cluster=alone).verdict.startswith("fits")


def test_host_syncs_are_those_of_the_last_step_the_evaluation_and_the_save() -> None:
    names = ("build", "step 1", "step 2", "evaluation", "save")
    told = rehearsal(replace(SEEN, syncs=tuple(Sync(name, "a line", 1) for name in names)))
    (table,) = (table for title, table in told.tables() if "host syncs" in title)
    assert [row.cells[1].text for row in table.rows if not isinstance(row, str)] == ["step 2", "evaluation", "save"]


@pytest.mark.parametrize(("kind", "is_ok"), [("all_gather", False), ("all_to_all", True)])
def test_bytes_are_those_that_are_declared_but_for_an_exchange(kind: str, is_ok: bool) -> None:
    assert replace(SEEN, sent=(SentOverAxis("tp", kind, 8, 65, 8, 64, 8),)).ok is is_ok


# ---- what is watched -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "asked"),
    [("Tried to allocate 2.50 GiB. GPU 0", 5 * GIB // 2), ("Tried to allocate 20.00 MiB", 20 * 2**20),
     ("Tried to allocate 512 bytes", 512), ("out of memory", 0)],
)  # fmt: skip
def test_what_an_error_says_was_asked_for(message: str, asked: int) -> None:
    assert asked_bytes(message) == asked


def test_of_a_phase_that_comes_again_the_last_time_counts() -> None:
    request = RehearsalRequest(config="", folder="", rank=0, world=1, local_size=1, steps=2, is_full=False)
    watch = RankWatch.of(request)
    for waits in (5, 2):
        for name in ("step 1", "evaluation"):
            with watch.phase(name):
                watch.syncs[name, "a line"] += waits
    assert [each.name for each in watch.phases] == ["step 1", "evaluation"]
    assert watch.syncs == {("step 1", "a line"): 2, ("evaluation", "a line"): 2}


def test_the_line_that_waits_is_that_of_the_library_before_others() -> None:
    """The innermost one of fivefold, but not of the rehearsal itself; else that of another package than torch."""

    def frame(*files: str) -> Any:
        found = None
        for line, file in enumerate(reversed(files), 1):
            code = SimpleNamespace(co_filename=file, co_name="f")
            found = SimpleNamespace(f_code=code, f_lineno=line, f_back=found)
        return found

    own, watch = "/x/fivefold/training/step.py", "/x/fivefold/rehearsal/watch.py"
    other, torch = "/x/transformers/llama.py", "/x/torch/nn.py"
    assert line_of(frame(watch, torch, other, own, "/x/fivefold/cli.py")) == "fivefold/training/step.py:2 f"
    assert line_of(frame(watch, torch, other, torch)) == "llama.py:2 f"
    assert line_of(frame(watch, torch)) == line_of(None) == "backward, in torch"


@pytest.mark.parametrize(
    ("seen", "says"),
    [
        (replace(SEEN, failed="it broke"), "rank 3 stopped: it broke"),
        (
            replace(SEEN, sent=(SentOverAxis("tp", "all_gather", 9, 64, 8, 64, 8),)),
            "otherwise than its plan declares: tp",
        ),
        (
            replace(SEEN, out_of_memory=OutOfMemory("step 1", 2 * GIB, "a line", 70 * GIB, 79 * GIB, ())),
            "out of memory: rank 3 in step 1: 2 GiB asked for at a line, 70 GiB allocated",
        ),
    ],
)
def test_what_failed_is_the_verdict(seen: Seen, says: str) -> None:
    assert not rehearsal(seen).ok and says in rehearsal(seen).verdict


def test_what_was_not_seen_is_said() -> None:
    blind = Phase(
        name="step 1", allocated=None, reserved=None, after=None, launches=None, syncs=None, compiles=0, seconds=1.0
    )
    told = rehearsal(replace(SEEN, phases=(blind,)), lacks=(Lack("no compiler", "install one"),))
    assert told.ok and "not seen" in told.verdict and "no compiler; install one" in told.notes[0]
    assert "not seen" in to_html(told.findings())


def test_the_page_has_the_verdict_and_every_table() -> None:
    html = to_html(rehearsal().findings())
    for text in ("fits: 40 GiB", "host syncs", "exposed", "No kernel ran"):
        assert text in html


def test_a_page_goes_into_a_pipe_and_does_not_replace_it(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        put(pipe, b"a page", instead="")
        assert os.read(reader, 99) == b"a page"
    finally:
        os.close(reader)
    assert pipe.is_fifo()


def test_a_page_is_written_where_a_link_points(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "page.html")
    put(tmp_path / "link", b"a page", instead="")
    assert (tmp_path / "page.html").read_text() == "a page" and (tmp_path / "link").is_symlink()


@pytest.mark.parametrize(
    ("layout", "ranks"), [("shard8", [0]), ("pp2.tp4", [0, 4]), ("pp4.shard2", [0, 4, 6]), ("single", [0])]
)
def test_a_rank_of_each_kind(layout: str, ranks: list[int]) -> None:
    """The first, a middle and the last rank of a pipeline, each the first of its stage."""
    assert kinds(Layout.parse(layout)) == ranks


@pytest.mark.parametrize(
    ("kind", "count", "bytes", "is_declared"),
    [
        ("all_gather", 3, 64, True),
        ("all_gather", 2, 64, False),
        ("all_gather", 4, 64, False),
        ("all_gather", 3, 63, False),
        ("all_gather", 3, 65, False),
        ("all_to_all", 3, 63, True),
        ("all_to_all", 2, 64, False),
    ],
)
def test_more_and_fewer_collectives_than_declared_are_told(
    kind: str, count: int, bytes: int, is_declared: bool
) -> None:
    seen = Seen(rank=1, sent=(SentOverAxis("tp", kind, count, bytes, 3, 64),))
    told = Rehearsal("llama", "tp2", Cluster.parse("8xH100"), 2, (Seen(rank=0), seen))
    assert (seen.ok, told.ok, not seen.undeclared) == (is_declared,) * 3
    assert ("rank 1 sends otherwise than its plan declares" in told.verdict) is not is_declared


def test_the_peak_is_of_the_phase_that_reserves_most() -> None:
    rest = {"after": 0, "launches": 1, "syncs": 0, "compiles": 0, "seconds": 0.1}
    ranks = (
        Seen(rank=0, phases=(Phase(name="load", allocated=9 * GIB, reserved=10 * GIB, **rest),)),
        Seen(rank=1, phases=(Phase(name="step 1", allocated=8 * GIB, reserved=11 * GIB, **rest),)),
    )
    told = Rehearsal("llama", "tp2", Cluster.parse("8xH100"), 2, ranks)
    assert told.peak is not None and told.peak[0].rank == 1 and "(rank 1, step 1)" in told.verdict
