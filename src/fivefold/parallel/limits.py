"""Limits that a traced model sets to a layout: the facts that `legality` asks for. No torch."""

from fivefold.core.model_limits import ModelLimits
from fivefold.models.facts import ModelFacts
from fivefold.parallel.context import spec as context
from fivefold.parallel.experts import spec as experts
from fivefold.parallel.pipeline import spec as pipeline
from fivefold.parallel.tensor import spec as tensor

# Each adds the limits of its feature.
LIMITED = (tensor.limited, context.limited, pipeline.limited, experts.limited)


def limits_of(facts: ModelFacts) -> ModelLimits:
    """The limits of a model."""
    limits = ModelLimits(name=facts.model_class)
    for limited in LIMITED:
        limits = limited(limits, facts)
    return limits
