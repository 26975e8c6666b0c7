"""What the forkserver of `tests/pool.py` imports once, so that no worker has to: the program, the engines of the tests,
and the `transformers` class of every family."""

import gc

gc.disable()  # a worker turns it on again: imports leave nothing to collect

import os  # noqa: E402

from transformers import AutoConfig  # noqa: E402
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING  # noqa: E402

import tests.training.bodies  # noqa: E402
import tests.verification.mutation  # noqa: E402, F401
from fivefold.parallel import shared_memory  # noqa: E402
from tests.parity import FAMILIES  # noqa: E402
from tests.pool import unsynchronised  # noqa: E402

os.fsync = unsynchronised
shared_memory._SPIN_NS = 2_000  # cores are shared with the ranks of the other process of tests

for _values in FAMILIES.values():
    MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(_values["model_type"]))]
