"""How much memory do importing and exporting a model take, beside the weights that a rank keeps?

    python benchmarks/reliability/memory.py            a Llama of 440 MB, two ranks; writes benchmarks/results/
    python benchmarks/reliability/memory.py --quick    a toy, written nowhere

A Hugging Face folder of random weights, in files of an eighth of the model, is loaded over `shard2` and saved as a
checkpoint, that is loaded over `tp2`, and one process exports it again in files of that size. Each part runs in fresh
processes; of each rank the peak of the resident memory is reported, less what it was before, in bytes of the model.
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from common import OPTIONS, RESULTS, SHAPES, machine, plain_model, run_ranks
from fivefold.checkpoint import Checkpoint, Metadata, Saver, export, step_folder
from fivefold.launch.world import alone, find_world, join
from fivefold.models.build import build_meta, load_model_config
from fivefold.models.sources import SafetensorsFolder
from fivefold.parallel.apply import parallelize
from fivefold.parallel.layout import Layout
from fivefold.training.memory import PeakMemory
from fivefold.training.optimizers import build_optimizer

FILES = 8
SCRIPT = Path(__file__)


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a toy model")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = plain_model(SHAPES["tiny" if args.quick else "110M"].hf_config())
        size = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(Path(folder, "hf"), max_shard_size=size // FILES)
        del model
        request = {"folder": folder, "file_bytes": size // FILES}
        found = {
            part: [rank["peak"] / size for rank in run_ranks(SCRIPT, request | {"part": part}, ranks=ranks)]
            for part, ranks in (("import over shard2", 2), ("load over tp2", 2), ("export", 1))
        }
    result = {"machine": machine(), "bytes": size, "largest_file": 1 / FILES, "peak_over_model": found}
    print(json.dumps(result, indent=1))
    if not args.quick:
        (RESULTS / "memory.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


def rank(request: dict[str, Any], out: Path) -> None:
    """One rank of one part."""
    folder = Path(request["folder"])
    with join(find_world("cpu") or alone("cpu")) as world:
        peak = PeakMemory(torch.device("cpu"))
        if request["part"] == "export":
            export(folder / "run", folder / "out", file_bytes=request["file_bytes"])
        else:
            is_import = request["part"].startswith("import")
            layout = Layout.parse(f"{'shard' if is_import else 'tp'}{world.size}+fp32")
            model = build_meta(load_model_config(folder / "hf"))
            checkpoint = folder / "run" / "checkpoints" / step_folder(1)
            source = SafetensorsFolder(folder / "hf", model) if is_import else Checkpoint.open(checkpoint).source()
            model = parallelize(model, layout, device=torch.device("cpu"), source=source)
        gib = peak.gib
        if request["part"].startswith("import"):
            saver = Saver(folder / "run" / "checkpoints", keep=1)
            saver.save(model, build_optimizer(model, OPTIONS), Metadata(step=1, state={}))
            saver.wait()
            saver.close()
    out.write_text(json.dumps({"peak": (gib or 0) * 2**30}))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        rank(json.loads(sys.argv[1]), Path(sys.argv[2]))
    else:
        sys.exit(main())
