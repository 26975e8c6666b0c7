"""Which models train under which layouts, and how far from the unmodified model: the tables of docs/models.md.

    python benchmarks/models.py                write benchmarks/results/models.json and docs/models.md
    python benchmarks/models.py --only gpt2    a family, or some, on the screen alone

Every family of `fivefold/models/families`, in a small size that hides nothing, and twenty classes of `transformers`
that no file of fivefold names. Each is trained for two steps under several layouts, on CPU ranks, in fp64, and held
against one process of plain PyTorch and `transformers`: every gradient and loss (`tests/parity.py`).
"""

import argparse
import json
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))

from tests.parity import Case, gradient_error, hf_config, on_rank, outcome, reference
from tests.pool import RankError, run_ranks

from common import RESULTS, machine
from fivefold.errors import UserError
from fivefold.models.anatomy import Anatomy
from fivefold.models.build import build_meta
from fivefold.models.families import families
from fivefold.models.partition import Partition, derive
from fivefold.models.trace import trace

DOCS = Path(__file__).parents[1] / "docs" / "models.md"
BEGIN, END = "<!-- tables: python benchmarks/models.py -->", "<!-- end of tables -->"
LAYOUTS = ("single", "shard2", "tp2", "tp4", "shard2.tp2")
NO_DROPOUT = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 13, "kv_lora_rank": 12, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4,
    "v_head_dim": 7, "head_dim": 4,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "moe_intermediate_size": 17,
    "n_shared_experts": 1, "first_k_dense_replace": 1,
}  # fmt: skip
# Classes that no file of fivefold names, and what their configs need beside the common sizes.
BLIND: dict[str, dict[str, Any]] = {
    "apertus": {}, "arcee": {}, "bitnet": {}, "bloom": {}, "deepseek_v2": {**LATENT, **EXPERTS}, "ernie4_5": {},
    "exaone4": {}, "gemma": {}, "glm": {"attention_bias": True},
    "glm4_moe_lite": {**LATENT, **EXPERTS, "mlp_layer_types": ["dense", "sparse", "sparse"]},
    "gpt_bigcode": {"n_inner": 53, "n_embd": 32, "n_head": 4, "n_layer": 3, "n_positions": 64, **NO_DROPOUT},
    "helium": {}, "hunyuan_v1_dense": {}, "jais2": {},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]}, "minicpm3": LATENT, "olmo": {},
    "opt": {"ffn_dim": 53, "word_embed_proj_dim": 32, "dropout": 0.0, "activation_function": "gelu"},
    "persimmon": {}, "phi": {}, "seed_oss": {"attention_dropout": 0.0, "residual_dropout": 0.0}, "stablelm": {},
    "youtu": LATENT,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One model: the largest error of a gradient or loss, by layout, or why there is none."""

    name: str
    model_class: str
    errors: dict[str, float]
    refusals: dict[str, str]
    roles: str
    notes: str


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", help="families or model types")
    args = parser.parse_args()
    known = [row(Case("single", family.name), family.notes, args.only) for family in families()]
    blind = [
        row(Case("single", "none", overrides=(("model_type", name), *extra.items())), "", args.only)
        for name, extra in BLIND.items()
    ]
    tables = {"families": list(filter(None, known)), "blind": list(filter(None, blind))}
    if args.only:
        return 0
    result = {"machine": machine(), **{key: [vars(each) for each in rows] for key, rows in tables.items()}}
    (RESULTS / "models.json").write_text(json.dumps(result, indent=1) + "\n")
    text = DOCS.read_text(encoding="utf-8")
    before, after = text[: text.index(BEGIN) + len(BEGIN)], text[text.index(END) :]
    families_table, blind_table = (table(rows) for rows in tables.values())
    DOCS.write_text(f"{before}\n\n{families_table}\n\n{ALL} {BLIND_TEXT}\n\n{blind_table}\n\n{after}", encoding="utf-8")
    worst = max(max(each.errors.values(), default=0.0) for rows in tables.values() for each in rows)
    print(f"largest error of all: {worst:.1e}")
    return 0 if worst <= 1e-10 else 1


ALL = "All: " + ", ".join(f"`{layout}`" for layout in LAYOUTS) + "."
BLIND_TEXT = "Classes of `transformers` that no file of fivefold names, tried blind:"


def row(base: Case, notes: str, only: Sequence[str] | None) -> Row | None:
    """Train one model under every layout."""
    name = dict(base.overrides).get("model_type", base.family)
    if only and name not in only:
        return None
    errors: dict[str, float] = {}
    refusals: dict[str, str] = {}
    try:
        partition, model_class = described(base)
        expected = reference(Case("single", base.family, kv_heads=4, rows=8, steps=2, overrides=base.overrides))
    except (UserError, ValueError) as error:
        return shown(Row(name, "", {}, {"all": _first_line(error)}, "", notes))
    for layout in LAYOUTS:
        spread = Case(layout).parsed
        text = f"{layout}+mb{8 // spread.data_ranks}+fp64"
        if spread.tp > 1 and partition.sequence_parallel_refusal and not partition.refusal:
            text += "+nosp"
            refusals["sequence parallel"] = partition.sequence_parallel_refusal
        case = Case(text, base.family, kv_heads=4, rows=8, steps=2, loss_chunks=3, overrides=base.overrides)
        try:
            ranks = run_ranks(spread.world, on_rank, case)
        except RankError as error:
            refusals[layout] = _refusal(str(error))
            continue
        found = outcome(case, ranks, {key: gradient.shape for key, gradient in expected.gradients.items()})
        losses = [abs(a - b) / abs(b) for a, b in zip(found.losses, expected.losses, strict=True)]
        errors[layout] = max(gradient_error(found, expected)[0], *losses)
    return shown(Row(name, model_class, errors, refusals, roles(partition), notes))


def described(case: Case) -> tuple[Partition, str]:
    """The partition of the case's model, and its class."""
    model = build_meta(hf_config(case))
    anatomy = Anatomy.of(model)
    try:
        return derive(model, anatomy, trace(model, anatomy)), anatomy.model_class
    except Exception as error:
        raise UserError(str(error)) from error


def roles(partition: Partition) -> str:
    """How the roles were found, in words."""
    if partition.refusal:
        return ""
    planned = sum("(plan:" in role.reason for role in partition.roles.values())
    split = [role for role in partition.roles.values() if role.deal]
    words = "traced, as its plan says" if planned else "traced; it has no plan"
    fused = any({"query", "kv"} <= {part.owner for part in role.deal or ()} for role in split)
    chunked = any(sum(part.owner == "even" for part in role.deal or ()) > 1 for role in split)
    extra = (
        ["fused attention"] * fused + ["fused gate and up"] * chunked + ["a norm across heads"] * bool(partition.across)
    )
    return "; ".join([words, *extra])


def shown(each: Row) -> Row:
    """The row, after it has been printed."""
    worst = f"{max(each.errors.values()):.1e}" if each.errors else "-"
    print(f"{each.name:18} {worst:8} {' '.join(each.errors)}  {each.refusals or ''}", flush=True)
    return each


def table(rows: Iterable[Row]) -> str:
    """Markdown."""
    lines = ["| model | layouts | largest error | roles | notes |", "| --- | --- | --- | --- | --- |"]
    for each in rows:
        worst = f"{max(each.errors.values()):.0e}" if each.errors else ""
        reasons: dict[str, list[str]] = {}
        for key, reason in each.refusals.items():
            reasons.setdefault(re.sub(r"^tp=\d+", "tp", reason), []).append(_as_text(key))
        why = [f"{', '.join(keys)} refused: {reason}" for reason, keys in reasons.items()]
        layouts = ", ".join(f"`{layout}`" for layout in each.errors) if each.errors else "none"
        layouts = "all" if len(each.errors) == len(LAYOUTS) else layouts
        named = f"{each.name} (`{each.model_class}`)" if each.model_class else each.name
        lines.append(
            f"| {named} | {layouts} | {worst} | {each.roles} | {'; '.join(filter(None, [each.notes, *why]))} |"
        )
    return "\n".join(lines)


def _as_text(key: str) -> str:
    return key if key in ("all", "sequence parallel") else f"`{key}`"


def _refusal(text: str) -> str:
    """The first `UserError` in the ranks' tracebacks, or the last line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    said = next((line for line in lines if line.startswith("fivefold.errors.")), lines[-1])
    return said.partition(": ")[2] or said


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200]


if __name__ == "__main__":
    sys.exit(main())
