"""The cells of `make rehearsal`, a family under a layout each, and the table that they are held against.

`python -m tests.rehearsed.cells` measures every cell and writes the table anew; a name or more: these alone.
"""

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fivefold.core.layout import Layout
from fivefold.rehearsal.launch import rehearse
from fivefold.rehearsal.request import Seen

TABLE = Path(__file__).with_name("table.json")
CHIP = "H100"
_SIZES = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 4, "num_attention_heads": 16,
    "num_key_value_heads": 8, "vocab_size": 32000, "max_position_embeddings": 8192, "bos_token_id": 1,
    "eos_token_id": 2, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
}  # fmt: skip
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **_SIZES},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", **_SIZES, "head_dim": 64},
    "gemma2": {
        "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", **_SIZES, "head_dim": 64,
        "query_pre_attn_scalar": 64, "sliding_window": 1024,
    },
    "mixtral": {
        "architectures": ["MixtralForCausalLM"], "model_type": "mixtral", **_SIZES, "num_local_experts": 8,
        "num_experts_per_tok": 2, "sliding_window": None,
    },
    "deepseek_v3": {
        "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **_SIZES, "num_key_value_heads": 16,
        "n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "moe_intermediate_size": 512,
        "n_shared_experts": 1, "first_k_dense_replace": 1, "q_lora_rank": 384, "kv_lora_rank": 128,
        "qk_nope_head_dim": 64, "qk_rope_head_dim": 32, "v_head_dim": 64,
    },
}  # fmt: skip
LAYOUTS = {
    "llama": (
        "shard8", "tp8", "shard2.tp2.cp2", "cp8+ring", "pp4.shard2", "pp2.shard2.tp2+zb", "dp2.shard4+zero1",
        "single", "cp4.shard2+ulysses", "pp2.shard4+interleaved+v2", "pp2.shard4+zbv",
        "pp2.shard4+dualpipev", "shard4.tp2+nosp", "shard8+zero2", "cp4.shard2+allgather",
    ),
    "qwen3": ("shard8", "tp4.shard2", "pp2.shard4"),
    "gemma2": ("shard8", "shard4.tp2"),
    "mixtral": (
        "shard8", "shard8.ep8", "shard4.tp2.ep4", "shard4.tp2.ep4+etp", "pp2.shard4.ep2", "shard2.cp4.ep4+full",
        "tp8.ep8+nosp", "dp2.shard4.ep2+zero1",
    ),
    "deepseek_v3": ("shard8.ep8", "pp2.shard4.ep4"),
}  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """A family under a layout, on the last of its ranks, whose pipeline stage has the loss."""

    family: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.family} {self.layout}"


CELLS = [Cell(family, layout) for family, layouts in LAYOUTS.items() for layout in layouts]


def seen(cell: Cell) -> Seen:
    """What a rehearsal of `cell` sees: rows of 2,048 tokens, blocks compiled."""
    layout = Layout.parse(cell.layout)
    with TemporaryDirectory() as folder:
        model, run = Path(folder, "model"), Path(folder, "run.yaml")
        model.mkdir()
        (model / "config.json").write_text(json.dumps(FAMILIES[cell.family]))
        sections = {
            "model": {"name_or_path": str(model), "init": "random"},
            "tokenizer": {"name_or_path": "byte"},
            "data": {"seq_length": 2048},
            "train": {"global_batch_size": 4 * layout.data_ranks},
        }
        run.write_text(json.dumps(sections))
        cluster = f"{layout.world}x{CHIP}"
        overrides = [f"layout={cell.layout}"]
        found = rehearse(run, overrides, cluster=cluster, rank=layout.world - 1, synthetic=True)
        return found.seen[0]


def numbers(found: Seen) -> dict[str, int]:
    """What the table has of a cell: bytes at the peak, and what a later step asks of the device and of Dynamo."""
    later = next(each for each in found.phases if each.name == "step 2")
    return {
        "allocated": max(each.allocated or 0 for each in found.phases),
        "reserved": max(each.reserved or 0 for each in found.phases),
        "launches": later.launches or 0,
        "syncs": later.syncs or 0,
        "compiles": sum(each.compiles for each in found.phases),
    }


def table() -> dict[str, dict[str, int]]:
    """The committed one."""
    values: dict[str, dict[str, int]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return values


def write(measured: Mapping[str, Mapping[str, int]]) -> None:
    """The table with these cells in it."""
    values = {**(table() if TABLE.exists() else {}), **measured}
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(values[name])}" for name in sorted(values))
    TABLE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def main() -> None:
    wanted = sys.argv[1:]
    for cell in CELLS:
        if not wanted or cell.name in wanted:
            found = seen(cell)
            print(cell.name, found.failed or numbers(found), flush=True)
            if found.ok:
                write({cell.name: numbers(found)})


if __name__ == "__main__":
    main()
