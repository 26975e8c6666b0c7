"""Bugs of the proof itself: what it leaves out, while the reference is sound.

Nothing is wrong with the program under them. They stand for every comparison that is lost without a word.
"""

from typing import Any
from unittest.mock import patch

from fivefold.verification import observer
from fivefold.verification.observer import Observer
from tests.verification.faults.fault import fault


@fault(
    "what the linears that end attention and MLP are given is not looked at",
    known="a hook that is no longer registered",
    layout="tp2",
    expects=[("coverage", r"^input: 0 of 4 compared in full")],
)
def inputs_not_compared() -> Any:
    plain = observer.watch
    return patch.object(observer, "watch", lambda model, outputs, inputs, note: plain(model, outputs, [], note))


@fault(
    "the gradients that reach modules are not looked at",
    known="a hook that is no longer registered",
    layout="tp2",
    expects=[("coverage", r"^gradient of output: 0 of \d+ compared in full")],
)
def gradients_of_outputs_not_compared() -> Any:
    return patch.object(Observer, "_compare_gradient", lambda *_: None)


@fault(
    "modules are looked at in the first micro batch alone",
    known="what is seen once is not looked at again",
    layout="shard2",
    expects=[("coverage", r"^output: 0 of \d+ compared in full")],
)
def first_micro_batch_compared_alone() -> Any:
    plain = Observer._compare

    def compare(self: Observer, key: str, values: Any, micro_batch: int) -> bool:
        return micro_batch > 0 or plain(self, key, values, micro_batch)

    return patch.object(Observer, "_compare", compare)
