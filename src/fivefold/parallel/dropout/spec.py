"""Dropout that does not depend on the layout: edits of modules, and sites that are refused. No torch."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from fivefold.core.errors import Violation
from fivefold.models.anatomy import is_within
from fivefold.models.facts import DropoutSite, ModelFacts
from fivefold.parallel.adapters.facts import A
from fivefold.parallel.plan import Edit, ParallelPlan
from fivefold.parallel.ranks import Blocks
from fivefold.parallel.step import LayerNumbers, LayerStep

_MORE = "fivefold docs explain/dropout"
_BY = "by seed, step, row, position and feature"


@dataclass(frozen=True)
class DropOutput(Edit):
    kind = "forward"
    site: DropoutSite


@dataclass(frozen=True)
class DropCalls(Edit):
    """Let the calls of `F.dropout` and `Tensor.uniform_` in a forward draw by global numbers, each at its own of the
    `sites`: those of the forward itself, and of an `nn.Dropout` that it calls several times."""

    kind = "forward"
    sites: tuple[DropoutSite, ...]


@dataclass(frozen=True)
class AddNoise(Edit):
    """Add noise to the output of an embedding, as NEFTune does (arXiv:2310.05914)."""

    kind = "hook"
    site: DropoutSite


@dataclass(frozen=True)
class DropInput(Edit):
    """Drop the input of a linear's branch, of which this rank has `features`."""

    kind = "branch"
    site: DropoutSite
    features: Blocks


@dataclass(frozen=True)
class DropProbabilities(Edit):
    """Drop probabilities of attention, of which this rank has `heads`."""

    kind = "attribute"
    site: DropoutSite
    heads: Blocks


def edits(plan: ParallelPlan) -> Iterator[Edit]:
    """All sites of this rank. Branches follow the adapter's edits, and come before linears take them up."""
    calls: dict[str, list[DropoutSite]] = {}
    for site in _sites(plan):
        why = f"drops {site.p:.3g} {_BY}"
        if site.kind == "module" and not site.caller:
            yield DropOutput(site.module, "dropout", why, site)
        elif site.kind == "branch":
            features = plan.placement.shards[f"{site.module}.{A}.weight"].held[plan.placement.coords.tp][1]
            yield DropInput(site.module, "dropout", f"its branch {why}", site, features)
        elif site.kind == "attention":
            yield DropProbabilities(site.module, "dropout", f"attention {why}", site, _heads(plan, site))
        elif site.kind != "embedding":
            calls.setdefault(site.caller or site.module, []).append(site)
    for module, sites in calls.items():
        drawn = [f"{'noise of' if site.kind == 'noise' else 'drops'} {site.p:.3g}" for site in sites]
        yield DropCalls(module, "dropout", f"{', '.join(drawn)} {_BY}", tuple(sites))


def edits_of_embedding(plan: ParallelPlan) -> Iterator[Edit]:
    for site in _sites(plan):
        if site.kind == "embedding":
            yield AddNoise(site.module, "dropout", f"noise of {site.p:.3g} / sqrt(L D) {_BY}", site)


def with_neftune(facts: ModelFacts, alpha: float | None) -> ModelFacts:
    """The facts of a model whose embeddings get noise in training. None: unchanged facts."""
    if not alpha:
        return facts
    features = facts.parameters[facts.anatomy.embedding_weight].shape[-1]
    site = DropoutSite(facts.anatomy.embedding, "embedding", float(alpha), features)
    return replace(facts, dropouts=(*facts.dropouts, site))


def _sites(plan: ParallelPlan) -> Iterator[DropoutSite]:
    """Sites in the layers of this rank, and those outside of all layers."""
    elsewhere = [layer for layer in plan.anatomy.layers if layer not in plan.placement.layers]
    return (site for site in plan.facts.dropouts if not is_within(site.module, elsewhere))


def _heads(plan: ParallelPlan, site: DropoutSite) -> Blocks:
    heads, rank = site.features // plan.layout.tp, plan.placement.coords.tp
    return ((rank * heads, (rank + 1) * heads),)


def violations(plan: ParallelPlan) -> Iterator[Violation]:
    """Yield sites that cannot be dropped by global numbers."""
    for site in plan.facts.dropouts:
        is_whole = site.kind in ("branch", "attention", "embedding") or site.features == plan.facts.hidden_size
        if plan.layout.tp > 1 and not is_whole:
            what = f"{site.module} drops {site.features} features, which tp {plan.layout.tp} splits"
            yield Violation("tp", what, "use tp 1, or set that dropout to 0 in model.overrides", more=_MORE)
        if (site.kind in ("call", "noise") or site.caller) and plan.compiled:
            call = "Tensor.uniform_" if site.kind == "noise" else "F.dropout"
            how = "is called several times" if site.caller else f"calls {call}"
            what = f"{site.module} {how}, which a compiled layer would draw by itself"
            yield Violation("compile", what, "use train.compile: false, or set that dropout to 0", more=_MORE)


# ---- bytes ---------------------------------------------------------------------------------------------------------


def layer_numbers(step: LayerStep, numbers: LayerNumbers) -> LayerNumbers:
    """Add the inputs that adapters save for themselves. Without dropout the columns of a block share one, and the
    input of an attention's row is its saved output. Other sites save nothing: backward draws again."""
    plan = step.plan
    branches = {site.module: site.features for site in plan.facts.dropouts if site.kind == "branch"}
    saved = 0.0
    for block in plan.facts.partition.tp_blocks if branches else ():
        if not is_within(block.row, [step.name]):
            continue
        dropped = [branches[column] for column in block.columns if column in branches]
        saved += sum(dropped[1:])
        if block.heads:
            saved += branches.get(block.row, 0) / plan.layout.tp
    return replace(numbers, saved=numbers.saved + saved)
