"""The most memory that a rank takes while its model is built and its weights are read: its shard, and one layer.

    python benchmarks/host_memory.py              writes benchmarks/results/host_memory.json and docs/evidence/memory.md
    python benchmarks/host_memory.py --only init  one of the cases

Two ranks on a CPU build a Llama of 330 million parameters (1.3 GB in fp32, one layer 68 MB) on the meta device and read
or draw their part of it: from one safetensors file in bf16, from one of several files, at random, from a checkpoint of
their own format. Memory is what a rank has from malloc at its peak less what it had before, as `heap.c` counts it; a C
compiler is needed. Pages of files that are mapped are the kernel's, which takes them back, and are shown beside it.
"""

import argparse
import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig

from common import RESULTS, SEED, machine
from fivefold import checkpoint
from fivefold.config import OptimizerSection
from fivefold.launch.processes import Workers
from fivefold.launch.workers import start_workers
from fivefold.launch.world import World
from fivefold.models.build import build_meta
from fivefold.models.sources import SafetensorsFolder, TensorSource, stored_tensors
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.parallel.state import state_of
from fivefold.training.optimizers import build_optimizer
from pages import put_between
from planner_truth import Heap, counted_heap

MIB = 2**20
PAGE = Path(__file__).parents[1] / "docs" / "evidence" / "memory.md"
BEGIN, END = "<!-- table: python benchmarks/host_memory.py -->", "<!-- end of host memory -->"
CONFIG: Mapping[str, Any] = {
    "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16,
    "num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 32000, "max_position_embeddings": 4096,
    "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": None, "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
SOURCES = ("one file", "several files", "init", "checkpoint")
LAYOUTS = ("shard2", "tp2", "pp2", "dp2")


@dataclass(frozen=True)
class Row:
    """MiB of the fullest rank. `shard`: what it holds in the end. `layer`: the largest layer, or matrix outside of
    them, whole, in fp32. `peak`: from malloc; `mapped`: the most of files in its memory. `over`: peak less shard, in
    layers."""

    source: str
    layout: str
    shard: float
    layer: float
    peak: float
    mapped: float
    over: float


def on_worker(request: Mapping[str, Any], world: World) -> None:
    """The body of a worker."""
    layout, folder = Layout.parse(request["layout"] + "+fp32"), Path(request["folder"])
    with mapped_files() as seen:
        heap = Heap()
        model = build_meta(AutoConfig.for_model(**CONFIG))
        source: TensorSource | None = None
        if request["source"].endswith("file") or request["source"].endswith("files"):
            source = SafetensorsFolder(folder / request["source"].replace(" ", "-"), model)
        elif request["source"] == "checkpoint":
            source = checkpoint.Checkpoint.open(folder / "checkpoint").source("weight")
        parallelize(model, layout, device="cpu", source=source, seed=SEED)
        peak = heap.peak
    placement = state_of(model).placement
    held = sum(placement.held_bytes(name, 4) for name in placement.shards if placement.holds(name))
    sizes = {
        name: each.numel() * 4 for name, each in stored_tensors(build_meta(AutoConfig.for_model(**CONFIG))).items()
    }
    layers = [sum(size for name, size in sizes.items() if name.startswith(f"{layer}.")) for layer in placement.layers]
    largest = max(*layers, *(size for name, size in sizes.items() if ".layers." not in name))
    found = {"shard": held, "layer": largest, "peak": peak, "mapped": max(seen)}
    Path(request["out"], f"{world.rank}.json").write_text(json.dumps(found))


def write_checkpoint(request: Mapping[str, Any], world: World) -> None:
    """The body of a worker that leaves a checkpoint of the model."""
    model = build_meta(AutoConfig.for_model(**CONFIG))
    parallelize(model, Layout.parse("shard2+fp32"), device="cpu", seed=SEED)
    optimizer = build_optimizer(model, OptimizerSection())
    checkpoint.save(model, optimizer, Path(request["folder"], "checkpoint"), checkpoint.Metadata(step=1, state={}))


@contextmanager
def mapped_files() -> Iterator[list[int]]:
    """Inside, the bytes of files in this process's memory are looked at every few milliseconds."""
    seen, stop = [0], threading.Event()

    def look() -> None:
        while not stop.wait(0.005):
            lines = Path("/proc/self/status").read_text().splitlines()
            seen.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssFile")))

    thread = threading.Thread(target=look)
    first = Path("/proc/self/status").read_text().splitlines()
    before = next(int(line.split()[1]) * 1024 for line in first if line.startswith("RssFile"))
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join()
        seen[:] = [max(0, each - before) for each in seen]


def write_files(folder: Path) -> None:
    """The model with random numbers in bf16, in one file and in five."""
    shapes = {name: each.shape for name, each in stored_tensors(build_meta(AutoConfig.for_model(**CONFIG))).items()}
    tensors = {name: torch.randn(shape, dtype=torch.bfloat16) * 0.02 for name, shape in shapes.items()}
    names = list(tensors)
    for kind, parts in (("one-file", [names]), ("several-files", [names[at::5] for at in range(5)])):
        (folder / kind).mkdir()
        (folder / kind / "config.json").write_text(json.dumps(CONFIG))
        index = {}
        for number, part in enumerate(parts):
            file = "model.safetensors" if len(parts) == 1 else f"model-{number + 1:05}-of-{len(parts):05}.safetensors"
            save_file({name: tensors[name] for name in part}, folder / kind / file)
            index |= dict.fromkeys(part, file)
        if len(parts) > 1:
            (folder / kind / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def measure(only: str) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as text, counted_heap(Path(text)):
        folder = Path(text)
        write_files(folder)
        with Workers("host_memory:write_checkpoint", count=2) as crew:
            start_workers(crew, {"device": "cpu", "folder": text}, logs=folder / "logs", patience=600)
        with Workers("host_memory:on_worker", count=2) as crew:
            for source in SOURCES:
                for layout in LAYOUTS:
                    if only and only not in source:
                        continue
                    request = {"device": "cpu", "folder": text, "out": text, "source": source, "layout": layout}
                    start_workers(crew, request, logs=folder / "logs", patience=600)
                    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
                    fullest = max(ranks, key=lambda rank: rank["peak"] - rank["shard"])
                    of = {name: value / MIB for name, value in fullest.items()}
                    yield Row(source, layout, **of, over=(of["peak"] - of["shard"]) / of["layer"])


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = ["| weights from | layout | a rank's shard, MiB | at the peak | more, in layers |", "| --- " * 5 + "|"]
    lines += [f"| {r.source} | `{r.layout}` | {r.shard:,.0f} | {r.peak:,.0f} | {r.over:.2f} |" for r in rows]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="part of a source's name")
    args = parser.parse_args()
    rows = []
    for row in measure(args.only):
        rows.append(row)
        numbers = f"shard {row.shard:6.0f}  layer {row.layer:4.0f}  peak {row.peak:6.0f}  mapped {row.mapped:6.0f} MiB"
        print(f"{row.source:14} {row.layout:7} {numbers}  {row.over:+.2f} layers", flush=True)
    if not args.only:
        result = {"machine": machine(), "rows": [asdict(row) for row in rows]}
        (RESULTS / "host_memory.json").write_text(json.dumps(result, indent=1) + "\n")
        put_between(BEGIN, END, table(rows), PAGE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
