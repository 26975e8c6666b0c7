"""What the forkserver of `tests/pool.py` imports once, so that no worker has to: the program, the engines of the tests,
and the `transformers` class of every family."""

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

import tests.training.bodies
import tests.verification.mutation  # noqa: F401
from tests.parity import FAMILIES

for _values in FAMILIES.values():
    MODEL_FOR_CAUSAL_LM_MAPPING[type(AutoConfig.for_model(_values["model_type"]))]
