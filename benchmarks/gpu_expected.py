"""What `gpu_train.py` compares a measured step with: the planner's estimate of the same step, item by item."""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.launch.world import World
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.discover import facts_of
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Estimate, Workload, estimate_layout
from fivefold.planner.of_run import cluster_of
from fivefold.planner.price import AXES, PriceList
from fivefold.rehearsal.report import ExpectedStep, ms, or_why
from fivefold.rehearsal.request import Phase, Seen

TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip


def meta_model(args: argparse.Namespace) -> Any:
    """The model of `--model` and `--tiny`, without memory."""
    return build_meta(load_model_config(args.model, TINY if args.tiny else {}))


def layout_of(args: argparse.Namespace, world: int) -> Layout:
    """Of `--layout` and `--rows`; FSDP over every process where none is said."""
    return Layout.parse(f"{args.layout or f'shard{world}'}+mb{args.rows}").resolve(world)


def planned(args: argparse.Namespace, cluster: Cluster) -> Estimate:
    """The planner's estimate of the step that is measured. Raises `UserError` where it has none."""
    if not args.compile:
        raise UserError("the planner prices compiled blocks", fix="leave --no-compile out")
    layout = layout_of(args, cluster.world)
    facts = facts_of(meta_model(args))
    batch = args.rows * args.accumulation * layout.data_ranks
    return estimate_layout(PriceList(facts, cluster), layout, Workload(args.seq_length, batch))


def planned_on(device: str, world: World, args: argparse.Namespace) -> tuple[Estimate | None, str]:
    """The same for GPUs of this name; or None, and why there is none."""
    about = {"device": device, "devices_per_node": world.local_size}
    return or_why(lambda: planned(args, cluster_of(world.size, world.device, about)))


def of_estimate(found: Estimate) -> dict[str, Any]:
    """What the result has of an estimate."""
    return {
        "is_estimate": True, "step_seconds": found.step_seconds, "step_seconds_interval": found.step_interval,
        "mfu_pct": 100 * found.mfu, "peak_gib": found.memory_gib, "reserved_gib": found.reserved / GIB,
        "seconds": found.seconds,
    }  # fmt: skip


def compared(estimated: Mapping[str, float], profile: Mapping[str, float]) -> Iterator[tuple[str, float, float]]:
    """(item, estimated, profiled), in milliseconds of a step. `estimated`: seconds by the planner's items; `profile`:
    milliseconds by those of a trace (`overlap.Step`)."""
    axes = {name.removeprefix("exposed "): spent for name, spent in profile.items() if name.startswith("exposed ")}
    for item in ("matmuls", "attention", "element-wise", "optimizer"):
        yield item, 1e3 * estimated.get(item, 0.0), profile.get(item, 0.0)
    for item in ("tp", "cp", "ep"):
        spent = sum(each for axis, each in axes.items() if AXES.get(axis) == item)
        if estimated.get(item) or spent:
            yield f"exposed, {item}", 1e3 * estimated.get(item, 0.0), spent
    data = estimated.get("data", 0.0) + estimated.get("edges of the step", 0.0)
    yield "exposed, data", 1e3 * data, sum(each for axis, each in axes.items() if axis not in AXES and axis != "pp")
    idle = sum(estimated.get(item, 0.0) for item in ("host", "host link", "bubble"))
    yield "idle, pipeline", 1e3 * idle, profile.get("idle", 0.0) + axes.get("pp", 0.0)


def show_expected(expected: Estimate | None, counted: Phase | None, args: argparse.Namespace, cluster: Cluster) -> None:
    """What to compare a measurement with: counted where it was, else estimated."""
    layout = layout_of(args, cluster.world)
    print(f"dry run of {args.model}, {args.seq_length} tokens a row, {layout} on {cluster.text}: nothing is measured")
    result: dict[str, Any] = {"is_dry_run": True, "layout": str(layout), "cluster": cluster.text}
    if counted:
        print(
            f"a step on rank 0: {counted.launches:,} launches, {counted.syncs} host syncs, peak "
            f"{(counted.allocated or 0) / GIB:.2f} GiB ({(counted.reserved or 0) / GIB:.2f} reserved)"
        )
        result |= {"launches": counted.launches, "syncs": counted.syncs}
        result |= {"peak_gib": (counted.allocated or 0) / GIB, "reserved_gib": (counted.reserved or 0) / GIB}
    if expected:
        step = ExpectedStep(expected, Seen(rank=0), counted)
        for item, seconds in sorted(expected.seconds.items(), key=lambda pair: -pair[1]):
            print(f"  {item:<18} {ms(seconds):>7} ms")
        print(*step.verdict, sep="\n")
        result["estimate"] = of_estimate(expected) | step.to_json()
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
        print(f"written: {args.json}")


def beside(result: dict[str, Any]) -> Iterator[str]:
    """Where the time of the profiled step went, beside the planner's estimate of it."""
    profile, expected = result["profile"], result["estimate"]
    if profile is None and result["device"] != "cpu":
        yield "the profiler saw no kernel: where the time goes is not known (CUPTI, and the right to use it)"
    if expected is None:
        yield f"no estimate to compare with: {result['no_estimate']}"
    else:
        low, high = (1e3 * each for each in expected["step_seconds_interval"])
        yield (
            f"estimated: MFU {expected['mfu_pct']:.1f}%, step {1e3 * expected['step_seconds']:.0f} ms ({low:.0f} to "
            f"{high:.0f} in 80 % of cases), peak {expected['peak_gib']:.2f} GiB"
        )
    if profile is None:
        return
    estimated = expected["seconds"] if expected else {}
    yield f"{'of one profiled step, ms':<26}{'estimated' if expected else '':>10}{'measured':>10}"
    for item, planned, spent in compared(estimated, profile["milliseconds"]):
        yield f"  {item:<24}{f'{planned:.1f}' if expected else '-':>10}{spent:>10.1f}"
    yield f"{profile['launches']:,} launches, {profile['syncs']} host syncs; --dry-run counts those to compare with"
    for each in profile["collectives"]:
        part = 100 * each["covered"] / (each["milliseconds"] or 1.0)
        spent = f"{each['milliseconds']:.2f} ms a step"
        yield f"{each['kind']} over {each['axis']}: {spent}, {part:.0f}% of it beside compute"
