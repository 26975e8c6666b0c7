"""Custom training loops over a parallelized model: the Python API of `import fivefold as ff` next to the commands.

Every rank of the world calls every function, with the rows of its data rank. The trainer's own code runs here too: the
same step, the same passes, the same checkpoints. Wrong uses are refused with the line to write instead
(docs/howto/python.md).
"""

from fivefold.own_loop.functions import (
    clip_grad_norm_,
    evaluate,
    export,
    gather,
    generate,
    gradients,
    load,
    logits,
    save,
    scatter,
    train_step,
)
from fivefold.own_loop.model import ParallelModel, parallelize

__all__ = [
    "ParallelModel", "clip_grad_norm_", "evaluate", "export", "gather", "generate", "gradients", "load", "logits",
    "parallelize", "save", "scatter", "train_step",
]  # fmt: skip
