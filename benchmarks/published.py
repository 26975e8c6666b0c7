"""Published measurements of other trainers, read from CSV files, in the planner's words.

    python -m benchmarks.published --published DIR

The files have one set of columns (`source, model, layers, hidden, ... tokens_per_s_per_gpu, peak_mem_gb, notes`). They
stay where they are: `--published`, or the folder that FIVEFOLD_PUBLISHED names. A row that does not say what the
planner must know is left out, with the reason; none is filled in by hand.
"""

import argparse
import csv
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field, replace
from functools import cache
from pathlib import Path

from benchmarks.engines import ENGINES

from fivefold.core.cache import key_of
from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.models.facts import ModelFacts
from fivefold.models.facts_store import about_code, kept
from fivefold.parallel.layout import Layout
from fivefold.planner.estimate import Workload

CLUSTERS = Path(__file__).parent / "clusters"

# Words of a row's source, model and notes -> the trainer; the first that is found.
TRAINERS = (
    (r"torchtitan|pytorch\.org|FSDP2|SimpleFSDP|GraphTrainer", "torchtitan"),
    (r"Megatron-FSDP", "megatron-fsdp"),
    (r"FSDP|ZeRO-3|llm-foundry", "fsdp1"),
    (r"nanotron", "nanotron"),
    (r"BLOOM|bigscience|vTrain", "megatron-deepspeed"),
    (r"NeMo-Framework-Launcher|2104\.04473|2205\.05198", "megatron-2022"),
    (r"Megatron|NeMo|SimuMax|MegaScale|Nemotron", "megatron"),
)  # fmt: skip
# Of trainers whose runs are not compiled: the version of the trainer that a row with such a `compile` is priced as.
EAGER = {"torchtitan": "torchtitan-eager"}
# Billions of parameters from which a trainer's own configs recompute whole layers (torchtitan: 8B selective, 70B full).
FULL_FROM = {"torchtitan": 10}
# Words of the device's name -> the chip; the first that is found.
CHIPS = (
    (r"A100-PCIe", "A100-PCIe"), (r"A100-40", "A100-40"), (r"A100", "A100-80"), (r"H100-PCIe", "H100-PCIe"),
    (r"H100", "H100"), (r"H800", "H800"), (r"H200", "H200"), (r"GH200", "GH200"), (r"GB200", "GB200"),
    (r"GB300", "GB300"), (r"B200", "B200"), (r"B300", "B300"), (r"V100-32", "V100-32"), (r"MI250X", "MI250X"),
    (r"A10G", "A10G"),
)  # fmt: skip
# Words of the network -> a file of `clusters/`; else the chip's own node.
NETWORKS = (
    (r"EFA \(HF", "hf-efa"), (r"Omni-Path", "jean-zay"), (r"800 Gbps per node", "vtrain"), (r"TCPX", "a3"),
    (r"200 ?Gb/s|200 Gbps HDR|1600 Gbps", "selene"),
)  # fmt: skip
MIXED = ("nanotron",)  # trainers whose rows do not say whether the sequence was split over tp, and were run both ways
SPLITS = {"yes": True, "1": True, "no": False, "0": False}  # the sequence over tp
PRECISIONS = {"bf16": "bf16", "fp16": "bf16", "amp_bf16": "bf16"}
# Words of a model with experts -> its class of transformers, and what no column says: the values of its config.json.
MIXTURES = (
    (r"(?i)qwen3-30b-a3b", "Qwen3MoeConfig", {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128,
    }),
    (r"(?i)qwen3-235b-a22b", "Qwen3MoeConfig", {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 1536, "head_dim": 128,
    }),
    (r"(?i)gpt-oss-120b", "GptOssConfig", {
        "num_local_experts": 128, "num_experts_per_tok": 4, "head_dim": 64, "intermediate_size": 2880,
    }),
    (r"(?i)deepseek-?v2", "DeepseekV3Config", {
        "n_routed_experts": 160, "num_experts_per_tok": 6, "moe_intermediate_size": 1536, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 8, "topk_group": 3,
    }),
    (r"(?i)deepseek-?v3", "DeepseekV3Config", {
        "n_routed_experts": 256, "num_experts_per_tok": 8, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "first_k_dense_replace": 3, "n_group": 8, "topk_group": 4,
    }),
)  # fmt: skip
RECOMPUTE = {
    "none": "none",
    "no": "none",
    "full": "full",
    "selective:core_attn": "none",
    "selective op": "selective",
    "selective": "selective",
    "default SAC": "selective",
}
FP8 = (r"fp8.*row|block|mx", "rowwise"), (r"fp8", "tensorwise")  # words of a precision -> how its matmuls are scaled
SCHEDULES = ("", "none", "1f1b", "interleaved_1f1b")  # the virtual stages say whether it is interleaved


# Words of a row -> the pipeline rank that its trainer logs memory of; else the fullest. nanotron logs that of rank 0:
# with one micro batch and two stages, its numbers are those of the stage without the logits. Megatron logs the last.
LOGGED = ((r"nanotron", 0), (r"golden|functional test", -1))


# Words of a row -> what its memory counts besides tensors: nvidia-smi sees all, torchtitan logs what is reserved.
READINGS = (
    (r"device-level|nvidia-smi|bigscience", ("allocator", "runtime")),
    (r"torchtitan|max_memory_reserved", ("allocator",)),
)


class NotSaid(Exception):
    """A row does not say something."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A decoder, as the columns say it. `gated`: its MLP has three matrices. `head_size`: numbers of a head, 0 for the
    hidden ones by the heads. `mixture`: number in `MIXTURES` of a model with experts, or None."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    gated: bool
    tied: bool
    head_size: int = field(default=0, repr=False)  # so that rows keep their hash, and with it their half
    mixture: int | None = field(default=None, repr=False)

    @property
    def parameters(self) -> float:
        """Billions, without norms, biases and experts."""
        attention = 2 * self.hidden * (self.head_size or self.hidden / self.heads) * (self.heads + self.kv_heads)
        matrices = self.layers * (attention + (3 if self.gated else 2) * self.hidden * self.ffn)
        return (matrices + self.vocabulary * self.hidden * (1 if self.tied else 2)) / 1e9

    def facts(self) -> ModelFacts:
        """Of a model of transformers of this shape, kept between starts."""
        return kept(key_of("published", *about_code(), repr(astuple(self))), self._found)

    def _found(self) -> ModelFacts:
        import transformers
        from transformers import GPTNeoXConfig, LlamaConfig

        from fivefold.models.build import build_meta
        from fivefold.models.discover import facts_of_deep

        common = {
            "hidden_size": self.hidden, "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "intermediate_size": self.ffn, "vocab_size": self.vocabulary, "tie_word_embeddings": self.tied,
        }  # fmt: skip
        if self.mixture is not None:
            _, name, more = MIXTURES[self.mixture]
            if dense := more.get("first_k_dense_replace"):  # a model cut to 4 layers keeps one of them
                more = {**more, "first_k_dense_replace": min(dense, max(1, self.layers // 4))}
            config = getattr(transformers, name)(**{**common, "num_key_value_heads": self.kv_heads, **more})
            return facts_of_deep(build_meta(config))
        if self.gated:
            sizes = {"head_dim": self.head_size} if self.head_size else {}
            return facts_of_deep(build_meta(LlamaConfig(**common, num_key_value_heads=self.kv_heads, **sizes)))
        return facts_of_deep(build_meta(GPTNeoXConfig(**common, use_parallel_residual=False)))


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One row. `tokens_per_second`: of a device; `memory_gb`: as the source says it; None where it does not. `failed`:
    it ran out of memory, or failed otherwise. `regime`: a tag of the source's readers. `sweep`: rows that differ in
    their layout alone. `of_rank`: the pipeline rank whose memory it is, 0 or -1; None for the fullest. `unsure`:
    whether the sequence was split over tp is not said. `beside`: items of an estimate that its memory counts besides
    tensors."""

    source: str
    shape: Shape
    cluster: Cluster
    layout: Layout
    workload: Workload
    engine: str
    tokens_per_second: float | None
    memory_gb: float | None
    failed: bool
    regime: str
    notes: str
    of_rank: int | None
    unsure: bool
    beside: tuple[str, ...]
    key: str

    @property
    def is_reported(self) -> bool:
        """Whether the row is of the half that constants are not fitted to."""
        return int(self.key[:8], 16) % 2 == 1

    @property
    def sweep(self) -> tuple[object, ...]:
        return (self.source, self.shape, self.cluster.text, self.workload)


def read(folder: Path) -> tuple[list[Measured], Counter[str]]:
    """The rows of all files, equal ones once; and why others were left out -> how many."""
    found, left = dict[str, Measured](), Counter[str]()
    for file in sorted(folder.glob("*.csv")):
        with file.open(encoding="utf-8", newline="") as lines:
            for row in csv.DictReader(lines):
                try:
                    measured = _measured(row, file.stem)
                except NotSaid as error:
                    left[f"{error}"] += 1
                    continue
                if measured.key in found:
                    left["said twice"] += 1
                found.setdefault(measured.key, measured)
    return list(found.values()), left


def _measured(row: Mapping[str, str], file: str) -> Measured:
    notes, words = row["notes"], " ".join((row["source"], row["model"], row["notes"], file))
    engine = _first(TRAINERS, words, "trainer")
    engine = EAGER.get(engine, engine) if row.get("compile") == "no" else engine
    shape = _shape(row)
    layout = _layout(row, engine, shape)
    batch = _whole(row, "global_batch")
    if batch % (layout.micro_batch_size * layout.data_ranks):
        raise NotSaid("its batch is no multiple of its micro batches")
    failed = "STATUS=FAILED" in notes
    speed, memory = _number(row["tokens_per_s_per_gpu"]), _number(row["peak_mem_gb"])
    if not failed and speed is None and memory is None:
        raise NotSaid("neither tokens/s nor memory")
    cluster, workload = _cluster(row), Workload(_whole(row, "seq_len"), batch)
    regime = match[1] if (match := re.search(r"regime=(\w)", notes)) else ""
    # A row stays in its half whatever version of a trainer it is priced as.
    trainer = "fsdp1" if engine == "megatron-fsdp" else engine.partition("-")[0]
    unsaid = layout.tp > 1 and not row["sp"]
    unsure = unsaid and (engine in MIXED or ENGINES[engine].sequence_parallel is None)
    # What is known of a trainer's defaults grows. A row stays in its half: they count for those of torchtitan alone.
    at_first = trainer == "torchtitan"
    recompute = layout.recompute if row["recompute"] or at_first else "none"
    said = replace(layout, sequence_parallel=SPLITS.get(row["sp"], at_first), recompute=recompute)
    what = repr((shape, said, workload, row["gpu"], row["num_gpus"], trainer, speed, memory, failed))
    return Measured(
        source=_source(f"{row['source']} {file}") + _kind(shape, layout),
        shape=shape, cluster=cluster, layout=layout, workload=workload,
        engine=engine, tokens_per_second=speed, memory_gb=memory, failed=failed, regime=regime, notes=notes,
        of_rank=next((rank for pattern, rank in LOGGED if re.search(pattern, words)), None),
        beside=next((items for pattern, items in READINGS if re.search(pattern, words)), ()),
        unsure=unsure,
        key=hashlib.sha256(what.encode()).hexdigest(),
    )  # fmt: skip


def _shape(row: Mapping[str, str]) -> Shape:
    """Of a decoder. Where the parameters of a dense one are said, its matrices are those that come nearest to them."""
    mixture = next((number for number, each in enumerate(MIXTURES) if re.search(each[0], row["model"])), None)
    words = r"MoE|A\d+B|DeepSeek|deepseek|OSS|Moonlight|Nemotron[_-]3|experts"
    if mixture is None and re.search(words, row["model"] + row["notes"]):
        raise NotSaid("a model with experts")
    heads, hidden = _whole(row, "heads"), _whole(row, "hidden")
    kv, ffn = int(row["kv_heads"] or heads), int(row["ffn"] or 4 * hidden)
    vocabulary = int((row["vocab"] or _vocabulary(row["model"])).replace("k", "000"))
    vocabulary = -(-vocabulary // 128) * 128
    basis = Shape(
        layers=_whole(row, "layers"), hidden=hidden, heads=heads, kv_heads=kv, ffn=ffn, vocabulary=vocabulary,
        gated=ffn != 4 * hidden or kv != heads, tied=ffn == 4 * hidden and mixture is None, mixture=mixture,
    )  # fmt: skip
    said = _number(row["params_b"])
    if said is None or mixture is not None or "truncated" in row["model"]:
        return basis
    choices = [replace(basis, gated=gated, tied=tied) for gated in (True, False) for tied in (True, False)]
    choices = [each for each in choices if each.gated or kv == heads]
    choices += [replace(each, head_size=128) for each in choices if each.gated and 128 * heads != hidden]
    return min(
        choices, key=lambda each: (abs(each.parameters / said - 1) > 0.03, each != basis, abs(each.parameters - said))
    )


def _vocabulary(model: str) -> str:
    """Of models known by name."""
    known = (
        (r"(?i)gpt-oss", "201088"), (r"(?i)deepseek-?v3", "129280"), (r"(?i)qwen3", "151936"),
        (r"(?i)llama-?3", "128256"), (r"(?i)llama-?2", "32000"), (r"GPT", "51200"),
    )  # fmt: skip
    for words, size in known:
        if re.search(words, model):
            return size
    raise NotSaid("vocabulary")


def _layout(row: Mapping[str, str], engine: str, shape: Shape) -> Layout:
    world, tp, pp, cp = (_whole(row, name, least=name != "num_gpus") for name in ("num_gpus", "tp", "pp", "cp"))
    if world % (tp * pp * cp):
        raise NotSaid("its degrees do not make its devices")
    data = world // (tp * pp * cp)
    shard, copies = (int(row[name]) if row[name].isdigit() else 0 for name in ("dp_shard", "dp_replicate"))
    if not shard or not copies:
        whole = ENGINES[engine].shards == "parameters"
        shard = shard or (data // (copies or 1) if whole else 1)
        copies = data // shard
    if shard * copies != data:
        raise NotSaid("its degrees do not make its devices")
    is_large = shape.parameters >= FULL_FROM.get(engine.partition("-")[0], math.inf)
    unsaid = "full" if is_large else ENGINES[engine].recompute
    if (recompute := {**RECOMPUTE, "": unsaid}.get(row["recompute"])) is None:
        raise NotSaid(f"recompute {row['recompute']}")
    if row["schedule"].lower().replace(" ", "_") not in SCHEDULES:
        raise NotSaid(f"schedule {row['schedule']}")
    virtual, splits = int(row["vpp"] or 1), SPLITS.get(row["sp"], bool(ENGINES[engine].sequence_parallel))
    fp8 = next((scaling for words, scaling in FP8 if re.search(words, row["precision"].lower())), "none")
    precision = "bf16" if fp8 != "none" else PRECISIONS.get(re.split(r"[ /]", row["precision"])[0])
    if precision is None:
        raise NotSaid(f"precision {row['precision'] or 'unknown'}")
    try:
        return Layout(
            dp_replicate=copies, dp_shard=shard, tp=tp, pp=pp, cp=cp, sequence_parallel=splits,
            pp_schedule="interleaved" if virtual > 1 and pp > 1 else "1f1b", pp_virtual=virtual if pp > 1 else 1,
            micro_batch_size=_whole(row, "micro_batch"), recompute=recompute, precision=precision, fp8=fp8,
            ep=_whole(row, "ep", least=True),
        )  # fmt: skip
    except UserError as error:
        raise NotSaid(error.what) from None


def _cluster(row: Mapping[str, str]) -> Cluster:
    chip = _first(CHIPS, row["gpu"], "chip")
    devices = int(row["gpus_per_node"] or 8)
    world = _whole(row, "num_gpus")
    nodes, devices = max(1, world // devices), min(devices, world)
    network = next((name for words, name in NETWORKS if re.search(words, row["interconnect"])), "")
    return cluster_of(nodes, devices, chip, network)


@cache
def cluster_of(nodes: int, devices: int, chip: str, network: str) -> Cluster:
    """Nodes of a chip with a network of `clusters/`."""
    file = CLUSTERS / f"{network}.toml"
    try:
        text = f"{nodes}x{devices}x{chip}"
        if not file.exists():
            return Cluster.parse(text)
        known = Cluster.parse(str(file))
        return replace(Cluster.parse(text), node=known.node)
    except UserError as error:
        raise NotSaid(error.what) from None


def _source(text: str) -> str:
    """Of few words: a project or a paper."""
    for words, name in (
        (r"torchtitan", "torchtitan"),
        (r"Ultra-Scale|nanotron", "ultrascale"),
        (r"ground_truth_single", "vtrain, one node"),
        (r"vTrain", "vtrain, nodes"),
        (r"bigscience", "bigscience"),
        (r"SimuMax", "simumax"),
        (r"llm-foundry", "mosaicml"),
        (r"Bridge|NeMo", "megatron-bridge"),
        (r"Megatron|2104|2205|MegaScale|Nemotron|Llama 3", "megatron papers"),
    ):
        if re.search(words, text):
            return name
    return "others"


def _kind(shape: Shape, layout: Layout) -> str:
    """What makes a source of its own of rows."""
    return (", experts" if shape.mixture is not None else "") + (", fp8" if layout.fp8 != "none" else "")


def _first(table: Sequence[tuple[str, str]], text: str, what: str) -> str:
    found = next((name for words, name in table if re.search(words, text)), None)
    if found is None:
        raise NotSaid(f"{what} is not known")
    return found


def _whole(row: Mapping[str, str], name: str, *, least: bool = False) -> int:
    text = row[name]
    if not text and least:
        return 1
    if not text.isdigit():
        raise NotSaid(f"{name} is not said")
    return int(text)


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def folder_of(said: str | None) -> Path:
    """The folder of the files."""
    return Path(
        said or os.environ.get("FIVEFOLD_PUBLISHED") or Path(__file__).parents[1].parent / "shared" / "published"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--published", help="folder of the CSV files")
    rows, left = read(folder_of(parser.parse_args().published))
    for source, count in Counter((row.source, row.engine) for row in rows).most_common():
        print(count, *source)
    print("left out:")
    for reason, count in left.most_common():
        print(f"{count:6} {reason}")


if __name__ == "__main__":
    main()
