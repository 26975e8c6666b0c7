"""The cells of `make rehearsal`, a family under a layout each, and the table that they are held against.

`python -m tests.rehearsed.cells` measures every cell and writes into the table what has become less; names of cells:
these alone. `--new`: only cells that the table does not have. `--raise`: numbers may become more, too.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from fivefold.core.errors import UserError
from fivefold.hardware.cluster import Cluster
from fivefold.launch.processes import private_folder
from fivefold.parallel.layout import Layout
from fivefold.rehearsal import stand_in
from fivefold.rehearsal.launch import changes, resolved, stage
from fivefold.rehearsal.request import RehearsalRequest, Seen

TABLE = Path(__file__).with_name("table.json")
CLUSTER = Cluster.parse("8xH100")
STEPS = 2
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
LAYOUTS = (
    "single", "shard8", "dp2.shard4+zero1", "shard8+zero2", "shard8+full", "tp8", "tp4.shard2+full", "shard4.tp2+nosp",
    "shard2.tp2.cp2", "cp8+ring", "cp4.shard2+ulysses", "cp4.shard2+allgather", "pp4.shard2", "pp2.shard2.tp2+zb",
    "pp2.shard4+interleaved+v2", "pp2.shard4+zbv", "pp2.shard4+dualpipev",
    # of models with experts; to the others they are refused, with the reason that the table has
    "shard8.ep8", "shard4.tp2.ep4", "shard4.tp2.ep4+etp", "pp2.shard4.ep2", "shard2.cp4.ep4+full", "tp8.ep8+nosp",
    "dp2.shard4.ep2+zero1",
)  # fmt: skip
LESS = ("launches", "syncs", "syncs_of_save", "compiles")  # numbers that may only become less; the others are of bytes


@dataclass(frozen=True)
class Cell:
    """A family under a layout, on the last of its ranks, whose pipeline stage has the loss."""

    family: str
    layout: str

    @property
    def name(self) -> str:
        return f"{self.family} {self.layout}"


CELLS = [Cell(family, layout) for layout, family in product(LAYOUTS, FAMILIES)]
Row = Mapping[str, Any]  # of the table: numbers, or why a layout is refused


@contextmanager
def rows() -> Iterator[Callable[[Cell], Row]]:
    """Inside, what gives the row of a cell. The processes of all cells are forked from one."""
    environment = stand_in.environment(CLUSTER.chip, CLUSTER.devices_per_node)
    with private_folder("rehearsal") as folder, stage(environment, folder) as play:
        yield partial(_row, folder, play)


def _row(folder: Path, play: Callable[[RehearsalRequest], Seen], cell: Cell) -> Row:
    try:
        asked = request(cell, folder, f"{time.monotonic_ns()}")
    except UserError as refusal:
        return {"refused": refusal.what.replace(str(folder / cell.family), cell.family)}
    return numbers(play(asked))


def request(cell: Cell, folder: Path, name: str) -> RehearsalRequest:
    """Rows of 2,048 tokens, blocks compiled, random documents."""
    layout = Layout.parse(cell.layout)
    model, run = folder / cell.family, folder / f"{name}.yaml"
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(FAMILIES[cell.family]))
    sections = {
        "model": {"name_or_path": str(model), "init": "random"},
        "tokenizer": {"name_or_path": "byte"},
        "data": {"seq_length": 2048},
        "train": {"global_batch_size": 4 * layout.data_ranks},
    }
    run.write_text(json.dumps(sections))
    place = Cluster.parse(f"{layout.world}x{CLUSTER.chip.name}")
    overrides = [f"layout={cell.layout}", *changes(folder / name, STEPS, is_full=True)]
    config, _ = resolved(run, overrides, place)
    return RehearsalRequest(
        config=config.to_yaml(), folder=str(folder / name), rank=layout.world - 1, world=layout.world,
        local_size=layout.world, steps=STEPS, synthetic=True,
    )  # fmt: skip


def numbers(found: Seen) -> dict[str, int]:
    """What the table has of a cell: bytes at the peak, and what a later step, a save and Dynamo ask of the host."""
    assert found.ok, found.failed or found.out_of_memory or found.undeclared
    phases = {each.name: each for each in found.phases}
    later, save = phases[f"step {STEPS}"], phases["save"]
    return {
        "allocated": max(each.allocated or 0 for each in found.phases),
        "reserved": max(each.reserved or 0 for each in found.phases),
        "launches": later.launches or 0,
        "syncs": later.syncs or 0,
        "syncs_of_save": save.syncs or 0,
        "compiles": sum(each.compiles for each in found.phases),
    }


def more(measured: Row, expected: Row) -> list[str]:
    """In words, what is more than the table has; a layout may not be refused, or be allowed, that was not."""
    if "refused" in measured or "refused" in expected:
        return [] if measured == expected else [f"{measured.get('refused')}, not {expected.get('refused')}"]
    return [f"{measured[key]} {key}, not {expected[key]}" for key in LESS if measured[key] > expected[key]]


# ---- the table -------------------------------------------------------------------------------------------------------


def table() -> dict[str, dict[str, Any]]:
    """The committed one."""
    values: dict[str, dict[str, Any]] = json.loads(TABLE.read_text(encoding="utf-8"))
    return values


def write(measured: Mapping[str, Row]) -> None:
    """The table with these cells in it, and without those that there are no more."""
    values = {**table(), **measured}
    lines = ",\n".join(
        f"  {json.dumps(each.name)}: {json.dumps(values[each.name])}" for each in CELLS if each.name in values
    )
    TABLE.write_text("{\n" + lines + "\n}\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.rehearsed.cells", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--new", action="store_true")
    parser.add_argument("--raise", action="store_true", dest="may_raise")
    asked = parser.parse_args()
    known, refused = table(), False
    wanted = [cell for cell in CELLS if cell.name in (asked.names or [cell.name])]
    with rows() as row_of:
        for cell in wanted:
            if asked.new and cell.name in known:
                continue
            try:
                row = row_of(cell)
            except Exception as error:
                print(f"{cell.name}: {error}", flush=True)
                refused = True
                continue
            raised = more(row, known.get(cell.name, row))
            print(f"{cell.name}: {row} {'; '.join(raised)}", flush=True)
            if raised and not asked.may_raise:
                refused = True
            else:
                write({cell.name: row})
    if refused:
        raise SystemExit("the table keeps what it had of these cells: --raise writes larger numbers, too")


if __name__ == "__main__":
    main()
