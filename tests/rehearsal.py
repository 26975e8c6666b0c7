"""Any rank of any layout in one process: a process group that sends nothing, and two real training steps.

The group ("fake", of `torch.testing`) answers every collective at once and leaves what is received as it is. Shapes,
types, hooks, FSDP, schedules and compilation are the real ones; values are not, so nothing here is compared. What
depends on values is dealt evenly: how many rows other ranks send to this rank's experts, and whether a step is finite.
"""

import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from fivefold.parallel.adapters.settings import Lora, nf4_bytes
from fivefold.parallel.features import edits
from fivefold.parallel.fsdp.spec import FsdpPlan
from fivefold.parallel.graphs.runtime import Compiled
from fivefold.parallel.memory import step_bytes
from tests.pool import collect_what_is_new, forks

TIMEOUT = 600.0  # seconds of one rehearsal


@dataclass(frozen=True)
class Rehearsal:
    """`layout`: a text; `rank`: of its world, negative from the end. `family`, `overrides`: of the tiny model.
    `compiled`: blocks go through Dynamo, and run as they are then, without Inductor. `aot`: their backward is made
    beforehand as well, as Inductor's is. `adapter`: what is trained beside the frozen model."""

    layout: str
    rank: int = 0
    family: str = "llama"
    overrides: tuple[tuple[str, Any], ...] = ()
    compiled: bool = False
    steps: int = 2
    aot: bool = False
    adapter: Lora | None = None


@dataclass(frozen=True)
class Seen:
    """Of a rehearsal: `graphs` compiled, and `late_graphs` of them after the second step; `breaks` by their reasons,
    the blocks that were `given_up`, what was warned of, and how many weight gradients each W slot computed. `unlike`:
    the plan. `sent`: collectives over tp of the last step, and those of its plan, by kind; with `aot` alone."""

    graphs: int
    late_graphs: int
    breaks: dict[str, int]
    given_up: list[str]
    warned: list[str]
    put_off: set[int]
    unlike: list[str]
    sent: tuple[dict[str, int], dict[str, int]]


def rehearse(case: Rehearsal) -> Seen:
    """Run `case` in a process that is there for this. Raises what it raised."""
    return on_stage(_rehearse, case)


def on_stage(function: Callable[..., Any], *args: Any) -> Any:
    """Call a module-level function in the process of the rehearsals."""
    return _stage().submit(function, *args).result(TIMEOUT)


_executors: list[ProcessPoolExecutor] = []


def _stage() -> ProcessPoolExecutor:
    if not _executors:
        _executors.append(ProcessPoolExecutor(1, forks(), collect_what_is_new))
    return _executors[0]


@contextmanager
def fake_world(size: int, rank: int) -> Iterator[None]:
    """This process as `rank` of a world that sends nothing."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank % size, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def _rehearse(case: Rehearsal) -> Seen:
    import torch

    torch.set_num_threads(1)
    world = _parity_case(case, 1).parsed.world
    with fake_world(world, case.rank):
        return _steps(case)


def _steps(case: Rehearsal) -> Seen:
    import torch
    from torch._dynamo.utils import counters

    from fivefold.models.build import build_meta
    from fivefold.ops.linear import WeightGradStore
    from fivefold.parallel import apply
    from fivefold.parallel.mesh import record
    from fivefold.parallel.state import state_of
    from fivefold.training import step
    from fivefold.training.optimizers import build_optimizer
    from tests import parity

    torch._dynamo.reset()
    counters.clear()
    layout = _parity_case(case, 1).parsed
    least, unit = layout.micro_batch_unit
    micro = max(least, unit, 2 * layout.pp) if layout.pp > 1 else 2
    parity_case = _parity_case(case, micro * layout.data_ranks * layout.micro_batch_size)
    compiles, graphs, put_off = torch.compile, [], set()
    backend = "aot_eager" if case.aot else "eager"
    compute = WeightGradStore.compute
    with (
        warnings.catch_warnings(record=True) as warned,
        patch.object(torch, "compile", lambda forward, **_: compiles(forward, backend=backend)),
        patch.object(WeightGradStore, "compute", lambda self, slot: put_off.add(compute(self, slot))),
        _without_values(),
    ):
        model = build_meta(parity.hf_config(parity_case))
        model = apply.parallelize(model, layout, compile_blocks=case.compiled, adapter=case.adapter)
        optimizer = build_optimizer(model, parity_case.options)
        for number in range(case.steps):
            rows = parity.documents(parity_case, number)
            batch = parity.batch_of([*rows[number:], *rows[:number]], layout, state_of(model).placement.data_rank)
            watch = torch.profiler.profile() if case.aot else nullcontext()
            with nullcontext([]) if case.compiled else record(state_of(model).mesh) as sent, watch:
                result = step.train_step(
                    model, optimizer, batch, learning_rate=1e-3, max_grad_norm=1.0, read=lambda sums: [1.0] * len(sums)
                )
            assert not result.skipped
            graphs.append(counters["stats"]["unique_graphs"])
    compiled = state_of(model).live(Compiled)
    shape = step.step_shape(model, *batch[0].input_ids.shape, len(batch), batch=batch)
    unlike = _unlike_plan(model) + ([] if case.compiled else _unlike_calls(model, shape, sent))
    over_tp = _over_tp(watch, model, shape) if case.aot else ({}, {})
    return Seen(
        graphs[-1], graphs[-1] - graphs[:2][-1], dict(counters["graph_break"]),
        list(compiled.given_up) if compiled else [], [str(each.message) for each in warned], put_off,
        unlike, over_tp,
    )  # fmt: skip


def _unlike_plan(model: Any) -> list[str]:
    """Where a parallelized model is not what its plan says."""
    from torch.distributed.fsdp import FSDPModule

    from fivefold.parallel.dtensor import local
    from fivefold.parallel.state import state_of

    plan = state_of(model).plan
    here = {name: tuple(local(parameter).shape) for name, parameter in model.named_parameters()}
    said = {name: plan.placement.local_shape(name) for name in plan.placement.shards if plan.placement.holds(name)}
    four_bits = [name for name in said if plan.facts.parameters[name].packing]
    said |= {name: (said[name][0], nf4_bytes(said[name][1])) for name in four_bits}
    numbers = sum(local(p).numel() * p.element_size() for p in model.parameters())
    modules = dict(model.named_modules())
    shape = plan.step_shape(1, 64 * plan.layout.row_multiple, 2 * plan.layout.pp)
    ways = {
        "parameters": (set(here.items()), set(said.items())),
        "bytes": ({numbers}, {step_bytes(plan, shape).parameters}),
        "units": (
            {name for name, module in modules.items() if isinstance(module, FSDPModule)},
            {unit.name for unit in plan.feature(FsdpPlan).sharded},
        ),
        "forwards": (
            {name for name, module in modules.items() if "forward" in vars(module)},
            {each.path for each in edits(plan) if each.kind == "forward" and _is_here(modules, each.path)},
        ),
        "hooks": (
            {
                name for name, module in modules.items()
                if (module._forward_hooks or module._forward_pre_hooks) and not isinstance(module, FSDPModule)
            },
            {
                each.path for each in edits(plan)
                if each.kind in ("hook", "pre-hook") and _is_here(modules, each.path)
                and not isinstance(modules[each.path], FSDPModule)
            },
        ),
        "stubs": (
            {name for name, module in modules.items() if type(module).__name__ in ("StageStub", "_Zeros", "_Slot")},
            {each.path for each in edits(plan) if each.kind == "stub"},
        ),
    }  # fmt: skip
    return [f"{what}: {sorted(found ^ plan)}" for what, (found, plan) in ways.items() if found != plan]


def _is_here(modules: dict[str, Any], path: str) -> bool:
    """Whether a module is on this pipeline rank."""
    return path in modules and type(modules[path]).__name__ not in ("StageStub", "_Zeros", "_Slot")


def _unlike_calls(model: Any, shape: Any, sent: list[Any]) -> list[str]:
    """Collectives of a step that its plan does not say, or says and did not come. What an all-to-all has of bytes
    depends on other ranks."""
    from fivefold.parallel.collectives import by_group, total
    from fivefold.parallel.state import state_of
    from fivefold.training.step import declare

    def fixed(rows: Any) -> set[Any]:
        return {(row.axis, row.kind, row.count, row.bytes * (row.kind != "all_to_all")) for row in rows}

    ran, said = fixed(total(sent)), fixed(by_group(declare(model, shape), state_of(model).placement.grid))
    return [] if ran == said else [f"calls: {sorted(ran - said)} came, {sorted(said - ran)} did not"]


def _over_tp(watch: Any, model: Any, shape: Any) -> tuple[dict[str, int], dict[str, int]]:
    """How many all-gathers and reduce-scatters over tp ran in a step, and how many its plan has. A recorder is a mode
    of the dispatcher, under which Dynamo compiles nothing: these are counted by their names. FSDP's have another."""
    from fivefold.parallel.collectives import total
    from fivefold.training.step import declare

    names = {"all_gather": "all_gather_into_tensor", "reduce_scatter": "reduce_scatter_tensor"}
    events = [event.name for event in watch.events()]
    said = [each for each in total(declare(model, shape)) if each.axis == "tp"]
    return (
        {kind: events.count(f"_c10d_functional::{name}") for kind, name in names.items()},
        {kind: sum(each.count for each in said if each.kind == kind) for kind in names},
    )


def _parity_case(case: Rehearsal, rows: int) -> Any:
    from tests.parity import Case

    return Case(case.layout, family=case.family, rows=rows, overrides=case.overrides)


@contextmanager
def _without_values() -> Iterator[None]:
    """Inside, other ranks send as many rows to this rank's experts as it sends to theirs."""
    import torch

    from fivefold.parallel.experts import runtime as expert

    plain = expert.exchange_counts

    def even(counts_E: Any, held: Any, rank: int, group: Any) -> Any:
        received = plain(counts_E, held, rank, group)
        rows, places = int(counts_E.sum()), received.numel()
        share = torch.tensor([rows // places + (at < rows % places) for at in range(places)])
        return share.view_as(received).to(received)

    with patch.object(expert, "exchange_counts", even):
        yield
