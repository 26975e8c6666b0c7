"""A training loop of one's own over a parallelized model: what `import fivefold as ff` offers beside the commands.

Every function is called by every rank of the world, with the rows of its data rank. What the trainer does runs here
too: the same step, the same passes, the same checkpoints. What would be wrong is refused with the line to write
(docs/howto/python.md).
"""

from fivefold.own_loop.model import ParallelModel, parallelize
from fivefold.own_loop.state import export, gather, load, save
from fivefold.own_loop.step import clip_grad_norm_, evaluate, generate, gradients, logits, train_step

__all__ = [
    "ParallelModel", "clip_grad_norm_", "evaluate", "export", "gather", "generate", "gradients", "load", "logits",
    "parallelize", "save", "train_step",
]  # fmt: skip
