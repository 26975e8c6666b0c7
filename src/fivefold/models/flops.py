"""Model FLOPs. No torch.

Counted: every matmul of the model, forward and backward (6 per weight and token; 4 for a frozen weight, which has no
gradient), and attention inside documents, causally halved. Not counted: recompute, padding,
element-wise work. (The convention of PaLM, arXiv:2204.02311.)
"""

from dataclasses import dataclass

from fivefold.models.facts import ModelFacts


@dataclass(frozen=True)
class Costs:
    """The training cost of a model: `parameters`; FLOPs `per_token` (matmuls) and `per_squared_length` (causal
    attention, per squared document length, all layers)."""

    parameters: int
    per_token: int
    per_squared_length: int

    @classmethod
    def of(cls, facts: ModelFacts) -> "Costs":
        """The costs of a whole model. The embedding lookup costs nothing; the head does, tied or not."""
        active = sum(cost.active for cost in facts.layer_costs) + sum(cost.weights for cost in facts.outside)
        attention = [shape for cost in facts.layer_costs for shape in cost.attention]
        beside = _beside_frozen(facts)
        return cls(
            parameters=facts.size,
            per_token=4 * active + 6 * beside if beside else 6 * active,
            per_squared_length=sum(3 * shape.query * (shape.key_size + shape.value_size) for shape in attention),
        )


def _beside_frozen(facts: ModelFacts) -> int:
    """Trained weights beside a frozen model that a token is multiplied with; of experts, the share of its top k."""
    if not facts.has_adapter:
        return 0
    experts = {block.name: block for block in facts.experts}
    found = 0
    for name, parameter in facts.parameters.items():
        of = experts.get(name.rsplit(".", 2)[0])
        share = parameter.size * of.top_k // of.experts if of else parameter.size
        found += share if parameter.is_trained else 0
    return found
