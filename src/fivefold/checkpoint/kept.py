"""The last whole step of a run as a checkpoint in the memory of nodes: written by each rank alone, completed together.

Replicas (`dp_replicate`) hold the same, so a rank writes what its counterpart in the first replica would save: the same
file, byte for byte, whichever replica it is in. The parts of all ranks of one replica are a checkpoint, from whichever
nodes they come. Nodes exchange the files that they lack, and each makes the manifest. The bytes of each part are those
of all of its replicas, which is checked by checksum before a step is chosen (`core/kept_steps.py`).
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fivefold.checkpoint import shard
from fivefold.checkpoint.cut import OPTIMIZER, WEIGHT, file_of
from fivefold.checkpoint.load import scalar_types
from fivefold.checkpoint.manifest import MANIFEST, CorruptCheckpoint, read_description
from fivefold.checkpoint.records import RankRecord
from fivefold.checkpoint.save import Metadata, Snapshot, collect, manifest_of, scalars_of, types_of_all, write_part
from fivefold.core.kept_steps import KeptStep, part_file
from fivefold.core.run_folder import step_folder
from fivefold.core.units import human_bytes
from fivefold.parallel import plain
from fivefold.parallel.placement import Placement
from fivefold.parallel.state import state_of
from fivefold.torch_internals import magnitudes

AT_ONCE = 2**26  # bytes of a file that are sent at once
Parameters = Sequence[tuple[str, nn.Parameter]]


def is_replicated(model: nn.Module) -> bool:
    """True if other ranks hold the same as this one."""
    layout = state_of(model).plan.layout
    return layout.dp_replicate > layout.copies_apart


def keep(
    model: nn.Module, optimizer: torch.optim.Optimizer, parameters: Parameters, about: Metadata, folder: Path, *,
    room: int, unfinished: Mapping[str, Any], after: "torch.cuda.Event | None" = None,
) -> None:  # fmt: skip
    """Write this rank's shards to `folder` without collectives; skip if another rank of the node has written them.

    `parameters`: those of the model, in whose places others may stand. `room`: bytes that may be written. `after`: on
    a GPU, what to wait for; a collective that never ends may be under way. `unfinished`: what is left to do of the
    step, plain data. Raises `OSError`, also for too little room, and `ValueError` for numbers that are not finite.
    """
    at = in_first_replica(state_of(model).placement)
    step = folder / step_folder(about.step)
    step.mkdir(mode=0o700, exist_ok=True)
    with _beside(after):
        slices = list(collect(model, optimizer, at=at, parameters=parameters))
        size = sum(one.values.nbytes * (1 + one.values.is_cuda) for one in slices)
        if size > room:
            raise OSError(errno.ENOSPC, f"{human_bytes(size)} are needed, and {human_bytes(room)} are free")
        if found := next((one for one in slices if not _is_finite(one.values)), None):
            raise ValueError(f"{found.kind} of {found.name} is not finite")
        try:
            os.close(os.open(step / f"claim-{at.rank:05d}", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
        except FileExistsError:
            return
        slices = [replace(one, values=one.values.cpu()) for one in slices]
        scalars = scalars_of(model, optimizer, at=at, parameters=parameters)
        state = state_of(model)
        all_state = {**about.state, **state.state()}
    part = write_part(step, Snapshot(about, str(state.plan.layout), (), slices, scalars, {}), at.rank)
    told = {
        "count": at.world // at.layout.dp_replicate, "part": part.tree(), "step": about.step, "state": all_state,
        "types": scalar_types(optimizer), "agreement": about.agreement, "layout": str(state.plan.layout),
        "unfinished": unfinished,
    }  # fmt: skip
    beside = step / f".{part_file(at.rank)}"
    beside.write_text(json.dumps(told), encoding="utf-8")
    beside.replace(step / part_file(at.rank))


def _is_finite(values: Tensor) -> bool:
    """True for numbers that a save on time would have, which are checked before."""
    is_number = values.is_floating_point() and values.numel()
    return not is_number or bool(magnitudes([values.detach()])[0].isfinite())


def in_first_replica(placement: Placement) -> Placement:
    """The placement of the rank of the first replica that holds the same."""
    layout = placement.layout
    ranks = layout.dp_shard * layout.cp * layout.tp
    return replace(placement, rank=placement.rank - placement.coords.dp_replicate * ranks)


def _beside(after: "torch.cuda.Event | None") -> Any:
    """Inside, work on the GPU of `after`, in whatever thread, waits for it alone."""
    if after is None:
        return nullcontext()
    stream = torch.cuda.Stream(after.device)  # type: ignore[no-untyped-call]
    stream.wait_event(after)
    return torch.cuda.stream(stream)


# ---- in the next round -----------------------------------------------------------------------------------------------


def complete(
    folder: Path, kept: KeptStep, names: Iterable[str], *, node: int, room: int | None, group: dist.ProcessGroup
) -> str:
    """Make `folder` the whole checkpoint of a step on every node; every rank calls this. Returns why it cannot be, the
    same on all ranks; "" if it is.

    `room`: bytes that may be written, on the one rank that acts for its `node`; None on the others. `names`: the
    model's, in its order.
    """
    leads = room is not None
    here = {file.name: file.stat().st_size for file in folder.glob("*") if leads}
    ranks = plain.everywhere({"node": node, "files": here, "room": room} if leads else None, group)
    leaders = {told["node"]: rank for rank, told in enumerate(ranks) if told}
    files: dict[str, int] = {}  # -> the rank that sends it
    for part, holder in kept.holders.items():
        there = ranks[leaders[holder]]["files"] if holder in leaders else {}
        if part_file(part) not in there:
            return f"a part of step {kept.step} is gone"
        own = (part_file(part), file_of(WEIGHT, part), file_of(OPTIMIZER, part))
        files |= {file: leaders[holder] for file in own if file in there}
    sizes = {file: ranks[rank]["files"][file] for file, rank in files.items()}
    lacking = {rank: [file for file in files if file not in ranks[rank]["files"]] for rank in leaders.values()}
    for rank, lacks in lacking.items():
        if (needed := sum(sizes[file] for file in lacks)) > ranks[rank]["room"]:
            return f"a node has no room for {human_bytes(needed)} of step {kept.step} in memory"
    error = _exchange(folder, files, sizes, lacking) if any(lacking.values()) else ""
    if error := next(filter(None, plain.everywhere(error, group)), ""):
        return error
    told = plain.of_first(_described(folder, kept, names) if dist.get_rank() == 0 else None, group)
    error = told["error"]
    if leads and not error:
        error = _checked(folder, told["text"], lacking[dist.get_rank()])
    return next(filter(None, plain.everywhere(error, group)), "")


def _exchange(
    folder: Path, files: Mapping[str, int], sizes: Mapping[str, int], lacking: Mapping[int, list[str]]
) -> str:
    """Send each file that a node lacks to all nodes. Returns what went wrong here."""
    nodes = dist.new_group(sorted(lacking), backend="gloo", group_desc="nodes")
    rank, errors = dist.get_rank(), list[str]()
    if rank not in lacking:
        return ""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    wanted = {file for lacks in lacking.values() for file in lacks}
    for file in sorted(wanted, key=lambda file: (file.endswith(".json"), file)):  # what describes a part comes last
        _pass_on(folder / file, sizes[file], files[file], nodes, is_wanted=file in lacking[rank], errors=errors)
    dist.destroy_process_group(nodes)
    return next(iter(errors), "")


def _pass_on(
    path: Path, size: int, source: int, nodes: dist.ProcessGroup, *, is_wanted: bool, errors: list[str]
) -> None:
    """Send a file, or receive it if it is wanted, to its end whatever goes wrong here: the others wait for that."""
    is_sent, beside = source == dist.get_rank(), path.with_name(f".{path.name}")
    opened: Any = None
    with _noting(errors), ExitStack() as stack:  # of what is closed at the end, too
        with _noting(errors):
            if is_sent or is_wanted:
                opened = stack.enter_context(path.open("rb") if is_sent else beside.open("wb"))
        for start in range(0, size, AT_ONCE):
            piece = torch.empty(min(AT_ONCE, size - start), dtype=torch.uint8)
            with _noting(errors):
                if is_sent and opened:
                    opened.readinto(piece.numpy().data)
            dist.broadcast(piece, src=source, group=nodes)
            with _noting(errors):
                if not is_sent and opened:
                    opened.write(piece.numpy().data)
    if opened and not (is_sent or errors):
        beside.replace(path)


@contextmanager
def _noting(errors: list[str]) -> Iterator[None]:
    """Note errors of the system in this context."""
    try:
        yield
    except OSError as error:
        errors.append(f"a kept step cannot be read or written: {error.strerror}")


def _described(folder: Path, kept: KeptStep, names: Iterable[str]) -> dict[str, str]:
    """The text of the manifest of all parts, or what is wrong with them."""
    try:
        told = [json.loads((folder / part_file(part)).read_text(encoding="utf-8")) for part in kept.holders]
        state = {**told[0]["state"], **types_of_all(part["types"] for part in told)}
        about = Metadata(step=told[0]["step"], state=state, agreement=told[0]["agreement"])
        snapshot = Snapshot(about, told[0]["layout"], tuple(names), (), {}, {})
        manifest = manifest_of(snapshot, [RankRecord.from_tree(part["part"]) for part in told], {})
        manifest.check()
        return {"text": manifest.to_json(), "error": ""}
    except (OSError, ValueError, KeyError, TypeError) as error:
        return {"text": "", "error": f"step {kept.step} in memory: {error}"}


def _checked(folder: Path, text: str, received: Iterable[str]) -> str:
    """Write the manifest, and compare the files received with it. Returns what is wrong."""
    try:
        (folder / MANIFEST).write_text(text, encoding="utf-8")
        manifest = read_description(folder)
        for file in manifest.files.keys() & {*received}:
            held = manifest.held(file)
            for key, wrong in shard.check(folder / file, manifest.files[file].checksum, held, held):
                return f"{file}: {key}{': ' * bool(key)}{wrong}"
    except (OSError, CorruptCheckpoint) as error:
        return f"a kept step cannot be used: {error}"
    return ""


def unfinished_of(folder: Path, kept: KeptStep) -> Any:
    """The rest of the step that is left to do, as the rank that wrote its first part says."""
    return json.loads((folder / part_file(min(kept.holders))).read_text(encoding="utf-8"))["unfinished"]
