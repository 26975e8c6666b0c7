"""Recompute budgets: how each pipeline rank spends one, and the parts that a step then adds up. No torch.

Prices are per kind of layer. Under a budget, layers of one kind may have different recompute modes. So each kind is
priced under every mode, and each pair counts as a kind. The plan itself decides the mode of a layer
(`parallel/recompute/policy.py`), from the bytes and the work of each mode (`parallel/recompute/budget.py`).
"""

from dataclasses import dataclass, replace

import numpy as np

from fivefold.parallel.layout import Layout
from fivefold.parallel.recompute.budget import mode_choices
from fivefold.parallel.recompute.policy import MODES, Recompute, fit_recompute_budget
from fivefold.planner.parts import Numbers, Prices, Shards, Stages
from fivefold.planner.price import PriceList


@dataclass(frozen=True, eq=False)
class Parts:
    """Parts that a step adds up. `prices`, `shards` and the columns of `stages` have one entry for each kind of layer;
    under a budget, for all kinds under `none`, then `selective`, then `full`. `spent`: how each pipeline rank spends a
    budget."""

    prices: Prices
    shards: Shards
    stages: Stages
    spent: tuple[Recompute, ...] = ()


def under_budget(price_list: PriceList, layout: Layout, tokens: int, stages: Stages, in_flight: Numbers) -> Parts:
    """Build the parts of a layout with a budget. `tokens`: of a row, padded. `in_flight`: for each stage, the most
    micro batches between forward and backward. Raises `UserError` if full recompute keeps more than the budget."""
    of_modes = [price_list.of(replace(layout, recompute=mode), tokens) for mode in MODES]
    first, counts = of_modes[0], in_flight.astype(int).tolist()
    costs = zip(first.plan.anatomy.layers, price_list.short.layer_costs, strict=True)
    choices = [mode_choices(first.plan, layer, cost, first.shape) for layer, cost in costs]
    splits, of_stage = price_list.splits(layout), stages.own.tolist()
    names = price_list.facts.anatomy.layers
    found = tuple(
        fit_recompute_budget(
            layout.recompute,
            {
                names[layer]: {
                    mode: choice.in_flight(counts[stage]) for mode, choice in choices[price_list.kinds[layer]].items()
                }
                for stage in own
                for layer in range(*splits[stage])
            },
        )
        for own in of_stage
    )
    by_layer = {layer: mode for budget in found for layer, mode in budget.by_layer.items()}
    layers = np.zeros((len(splits), len(MODES) * len(choices) + 2))
    layers[:, -2:] = stages.layers[:, -2:]
    for stage, (start, end) in enumerate(splits):
        for layer in range(start, end):
            layers[stage, MODES.index(by_layer[names[layer]]) * len(choices) + price_list.kinds[layer]] += 1
    shards = price_list.shards(layout)
    edges = first if set(by_layer.values()) == {"none"} else of_modes[-1]  # what a pipeline holds between stages
    return Parts(
        replace(edges, layers=tuple(layer for prices in of_modes for layer in prices.layers)),
        replace(shards, layers=shards.layers * len(MODES)),
        replace(stages, layers=layers),
        found,
    )
