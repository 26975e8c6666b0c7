"""Moments of a step at which the memory of a rank may peak. No torch."""

from typing import Any

# All forwards are done, and the last loss is computed with its gradients. The last layer's backward runs; then the one
# before it, while the last one's gradients are reduced; finally the first layer's, when all gradients are there. Until
# the first backward of a step has ended, there are no gradients: three moments come once more without them.
FIRST = {
    "the first loss": "the loss",
    "the first backward begins": "a backward begins",
    "a layer later in it": "a layer later",
}
UPDATE = "the update"
MOMENTS = (*FIRST.values(), "a backward ends", UPDATE, *FIRST)
Bytes = Any  # a number, or an array of them: the planner sums many layouts at once
