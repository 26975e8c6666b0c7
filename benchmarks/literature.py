"""What papers say of parallel layouts, asked of the planner: pictures and numbers of docs/evidence/literature.md.

    python -m benchmarks.literature --published DIR

Nothing is fitted here: the planner is asked as it is, of the trainer that the paper used.
"""

import argparse
import csv
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import matplotlib as mpl

mpl.use("svg")
import matplotlib.pyplot as plt
from benchmarks.engines import ENGINES, TrainerPrices, TrainerStep
from benchmarks.published import Shape, folder_of
from matplotlib.axes import Axes

from fivefold.core.errors import UserError
from fivefold.core.units import GIB
from fivefold.hardware.cluster import Cluster
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import PricedStep, Workload
from fivefold.planner.explain import longest_sequence
from fivefold.planner.plan import price_list

PICTURES = Path(__file__).parents[1] / "docs" / "evidence" / "literature"
SC21_TOKENS = 2048  # of a row in Narayanan et al., SC21 (arXiv 2104.04473)


def gpt(layers: int, hidden: int, heads: int) -> Shape:
    """A GPT of that paper."""
    return Shape(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, vocabulary=51_200, gated=False,
        tied=True,
    )  # fmt: skip


def sc21_tflops(shape: Shape, cluster: str, layout: Layout, rows: int) -> float:
    """TFLOP/s of a device as the paper counts them, recompute included, of a step under its trainer."""
    prices = TrainerPrices(shape.facts(), Cluster.parse(cluster), engine=ENGINES["megatron"])
    step = TrainerStep(prices, prices.engine.laid(layout), Workload(SC21_TOKENS, rows))
    hidden, layers = shape.hidden, shape.layers
    ends = 1 + SC21_TOKENS / (6 * hidden) + shape.vocabulary / (16 * layers * hidden)
    flops = 96 * rows * SC21_TOKENS * layers * hidden**2 * ends
    return flops / step.estimate().step_seconds / layout.world / 1e12


def tensor_against_pipeline(axes: Axes) -> None:
    """162B on 64 A100: of one device group split over tp and pp, eight-way tp is the fastest."""
    shape, degrees = gpt(32, 20_480, 128), ((2, 32), (4, 16), (8, 8), (16, 4), (32, 2))
    for number, rows in enumerate((32, 128)):
        layouts = [Layout(tp=tp, pp=pp, recompute="full") for tp, pp in degrees]
        found = [sc21_tflops(shape, "8x8xA100-80", each, rows) for each in layouts]
        axes.bar([place + 0.4 * number for place in range(5)], found, 0.38, label=f"{rows} rows a step")
        told(f"tensor against pipeline, {rows} rows", dict(zip(map(str, layouts), found, strict=True)), "TFLOP/s")
    axes.set_xticks([place + 0.2 for place in range(5)], [f"tp{tp}\npp{pp}" for tp, pp in degrees])
    axes.set(ylabel="TFLOP/s of a device", ylim=(0, 230))
    axes.legend(loc="upper left")


def interleaving(axes: Axes) -> None:
    """175B on 96 A100: the gain of two stages a rank is the larger, the fewer micro batches there are."""
    batches = (12, 24, 36, 48, 60)
    for label, virtual in (("1f1b", 1), ("interleaved, 2 stages a rank", 2)):
        schedule = "1f1b" if virtual == 1 else "interleaved"
        layout = Layout(tp=8, pp=12, recompute="full", pp_schedule=schedule, pp_virtual=virtual)
        found = [sc21_tflops(gpt(96, 12_288, 96), "12x8xA100-80", layout, rows) for rows in batches]
        axes.plot(batches, found, "o-", label=label)
        told(f"interleaving, {label}", dict(zip(map(str, batches), found, strict=True)), "TFLOP/s")
    axes.set_xticks(batches)
    axes.set(xlabel="rows a step", ylabel="TFLOP/s of a device", ylim=(0, None))
    axes.legend()


def scaling(axes: Axes, published: Path) -> None:
    """GPT of 76 to 1,008 billion parameters on 384 to 3,072 A100, beside what was measured."""
    found: dict[str, tuple[int, float, float]] = {}
    for row in csv.DictReader((published / "megatron.csv").open()):
        if "2104.04473" not in row["source"] or row["tp"] == "1":
            continue
        shape = gpt(*(int(row[name]) for name in ("layers", "hidden", "heads")))
        virtual, devices = int(row["vpp"] or 1), int(row["num_gpus"])
        layout = Layout(
            tp=int(row["tp"]), pp=int(row["pp"]), dp_replicate=int(row["dp_replicate"]), pp_virtual=virtual,
            micro_batch_size=int(row["micro_batch"]), recompute="full",
            pp_schedule="interleaved" if virtual > 1 else "1f1b",
        )  # fmt: skip
        ours = sc21_tflops(shape, f"{devices // 8}x8xA100-80", layout, int(row["global_batch"]))
        found[f"{row['params_b']}B on {devices:,}"] = devices, ours, float(row["tflops_per_gpu"])
    points = sorted(found.values())
    axes.plot([each[0] for each in points], [each[1] for each in points], "o", label="planner")
    axes.plot([each[0] for each in points], [each[2] for each in points], "x", label="published (SC21)")
    shape, replicas = gpt(96, 12_288, 96), (1, 2, 4, 8, 16, 32)
    layouts = [Layout(tp=8, pp=12, dp_replicate=each, recompute="full") for each in replicas]
    ours = [sc21_tflops(shape, f"{12 * each.dp_replicate}x8xA100-80", each, 96 * each.dp_replicate) for each in layouts]
    axes.plot([each.world for each in layouts], ours, "-", label="planner: 175B, 96 rows a replica")
    told("scaling of 175B", {f"{each.world:,}": value for each, value in zip(layouts, ours, strict=True)}, "TFLOP/s")
    for name, (_, ours_, theirs) in found.items():
        print(f"    {name}: {ours_:.0f} planned, {theirs:.0f} published, {ours_ / theirs - 1:+.0%}")
    axes.set(xlabel="devices", ylabel="TFLOP/s of a device", xscale="log", ylim=(0, 200))
    axes.set_xticks([100, 1000, 3000], ["100", "1,000", "3,000"])
    axes.legend()


def small_devices(axes: Axes) -> None:
    """The longest rows on 2 nodes of 4 devices with 32 GB: tp halves what activations take, and shards stay as thin."""
    cluster = Cluster.parse("2x4xA100-40")
    cluster = replace(cluster, chip=replace(cluster.chip, memory_gib=31.5))
    try:
        longest_sequence(price_list("llama-3.1-70b", cluster), Workload(1024, 8))
    except UserError as error:
        print(f"    llama-3.1-70b: {error.what}")
    texts = ("shard8+full", "shard4.tp2+full", "shard2.tp4+full")
    for number, model in enumerate(("llama-3.1-8b", "llama-3.2-3b")):
        prices = price_list(model, cluster)
        found = [longest_sequence(prices, Workload(8192, 8), Layout.parse(text)).workload.seq_length for text in texts]
        axes.bar([place + 0.4 * number for place in range(3)], [each / 1024 for each in found], 0.38, label=model)
        told(f"longest rows, {model}", dict(zip(texts, found, strict=True)), "tokens")
    axes.set_xticks([place + 0.2 for place in range(3)], texts)
    axes.set_ylabel("longest row, thousands of tokens")
    axes.legend()


def long_rows(axes: Axes) -> None:
    """Memory of llama-3.1-8b on 8 H100: without context parallelism, 128K do not fit."""
    prices, lengths = price_list("llama-3.1-8b", "8xH100"), (8192, 16_384, 32_768, 65_536, 131_072, 262_144)
    for cp in (1, 2, 4, 8):
        layout = Layout(dp_shard=8 // cp, cp=cp, recompute="full")
        found = [PricedStep(prices, layout, Workload(length, 8)).needs / GIB for length in lengths]
        axes.plot(lengths, found, "o-", label=f"cp{cp}" if cp > 1 else "no cp")
        told(f"long rows, cp{cp}", dict(zip(map(str, lengths), found, strict=True)), "GiB")
    axes.axhline(prices.cluster.chip.memory_gib, color="black", linestyle="--", linewidth=1)
    axes.text(8192, prices.cluster.chip.memory_gib + 2, "memory of an H100")
    axes.set(xlabel="tokens of a row", ylabel="GiB of the fullest device", xscale="log", ylim=(0, None))
    axes.set_xticks(lengths, [f"{length // 1024}K" for length in lengths])
    axes.minorticks_off()
    axes.legend()


def told(what: str, found: Mapping[str, float], unit: str) -> None:
    """The numbers of a picture, printed."""
    print(f"{what} ({unit}): " + ", ".join(f"{name} {value:,.4g}" for name, value in found.items()))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--published", help="folder of the CSV files")
    parser.add_argument("--png", help="a folder for the pictures as PNG too")
    asked = parser.parse_args(arguments)
    published = folder_of(asked.published)
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "fivefold", "font.size": 9})
    PICTURES.mkdir(exist_ok=True)
    for draw in (tensor_against_pipeline, interleaving, scaling, small_devices, long_rows):
        figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
        draw(axes, published) if draw is scaling else draw(axes)
        figure.savefig(PICTURES / f"{draw.__name__}.svg", metadata={"Date": None})
        if asked.png:
            figure.savefig(Path(asked.png) / f"{draw.__name__}.png", dpi=110)


if __name__ == "__main__":
    main()
