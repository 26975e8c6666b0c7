"""Keys of the pipeline, its stages and schedule, and the steps and models that do not fit it. No torch."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from fivefold.core.errors import Violation
from fivefold.core.keys import LayoutPart, bare, key
from fivefold.core.model_limits import ModelLimits
from fivefold.core.schedule import SCHEDULES, Schedule, SchedulePlan

_BATCH = "micro batches are train.global_batch_size / (micro_batch_size x data ranks)"


@dataclass(frozen=True, kw_only=True)
class PipelineKeys(LayoutPart):
    """Ranks that have some layers each."""

    pp: int = key(
        1, "layout.pp", "pipeline stages; devices",
        peers="pp_size pp_degree pipeline_parallel pipeline_parallel_size pipeline_parallel_degree "
        "pipeline_model_parallel_size",
        priced="",
    )  # fmt: skip
    pp_schedule: str = key(
        "1f1b", "layout.pp_schedule", "order of the micro batches in the pipeline",
        choices=tuple(SCHEDULES), words=bare(*SCHEDULES), priced="",
    )  # fmt: skip
    pp_virtual: int = key(1, "layout.pp_virtual", "stages per pipeline rank", least=1, prefix="v", priced="")
    pp_split: str = key(
        "auto", "layout.pp_split", "layers per stage, as 8-8-8-6",
        prefix="split", pattern=r"[0-9]{1,9}(?:-[0-9]{1,9})*", shown="A-B", priced="",
    )  # fmt: skip

    @property
    def schedule(self) -> Schedule:
        """Record of the pipeline's schedule. Without a pipeline, passes run in the order of 1F1B."""
        return SCHEDULES[self.pp_schedule if self.pp > 1 else "1f1b"]

    def schedule_plan(self, micro_batches: int) -> SchedulePlan:
        """The schedule over its ranks, for a layout that is legal for `micro_batches` (`legality.violations`)."""
        return SchedulePlan(self.schedule.name, self.pp, self.stages_per_rank, micro_batches)

    @property
    def stages_per_rank(self) -> int:
        """Stages of a pipeline rank: 2 if the schedule is a V, else `pp_virtual`."""
        return self.schedule.stages_per_rank(self.pp_virtual)

    @property
    def stages(self) -> int:
        """Number of pipeline stages."""
        return self.pp * self.stages_per_rank

    @property
    def split(self) -> tuple[int, ...] | None:
        """Layers of each stage in `pp_split`, such as 4-3-5; None if it is auto."""
        return None if self.pp_split == "auto" else tuple(map(int, self.pp_split.split("-")))

    @property
    def micro_batch_unit(self) -> tuple[int, int]:
        """(fewest micro batches, a divisor of their number) that the schedule surely takes."""
        return self.schedule.fewest(self.pp), self.schedule.multiple(self.pp)

    @property
    def fewest_layers(self) -> int:
        """Fewest layers, and at least 2, of the small model on which the pipeline is proved."""
        return max(2, self.stages if self.pp == 1 or self.split is None else sum(self.split))

    def violations(self) -> Iterator[Violation]:
        """A schedule needs its number of stages per rank, and a split names every stage."""
        text, virtual = self.pp_split, self.pp_virtual
        if self.pp == 1:
            if virtual > 1:
                yield Violation("pp", f"pp_virtual {virtual} needs a pipeline", "set pp to 2 or more")
            return
        yield from self._stage_violations()
        if text != "auto" and not re.fullmatch(r"\d+(-\d+)*", text):
            yield Violation("pp_split", f"pp_split {text!r} is not understood", "write auto, or as 8-8-8-6")
        elif (split := self.split) and (len(split) != self.stages or min(split) < 1):
            what = f"pp_split {text} names {len(split)} stages, and there are {self.stages}, of a layer or more each"
            yield Violation("pp_split", what, f"write {self.stages} numbers of 1 or more, or auto")

    def _stage_violations(self) -> Iterator[Violation]:
        """`pp_virtual` is a number of stages that the schedule has."""
        virtual, name, (fewest, most) = self.pp_virtual, f"pp_schedule {self.pp_schedule}", self.schedule.stages
        if most == 1 and virtual > 1:
            what, fix = f"has one stage a rank, so pp_virtual is 1, not {virtual}", "use interleaved or zb, or leave"
            yield Violation("pp_virtual", f"{name} {what}", f"{fix} pp_virtual out", (1,))
        elif most is not None and virtual > most:
            what = f"{name} has two stages a rank, not {virtual}"
            yield Violation("pp_virtual", what, "leave pp_virtual out", (most,))
        elif self.stages_per_rank < fewest:
            what, fix = f"{name} has two stages a rank or more", f"set pp_virtual to {fewest} (+v{fewest})"
            yield Violation("pp_virtual", what, fix, (fewest,))

    def step_violations(self, micro_batches: int) -> Iterator[Violation]:
        """The schedule must take this number of micro batches."""
        name, pp, schedule = f"pp_schedule {self.pp_schedule}", self.pp, self.schedule
        fewest, has = schedule.fewest(pp), f"and a step has {micro_batches}"
        if pp > 1 and micro_batches < fewest:
            what = f"{name} needs {schedule.fewest_per_rank} x pp = {fewest} micro batches or more, {has}"
            fix = f"raise train.global_batch_size, or lower micro_batch_size, for {fewest} or more"
            yield Violation("micro_batch_size", what, fix, more=_BATCH)
        if pp > 1 and not schedule.takes(micro_batches, pp):
            what = f"{name} runs micro batches in rounds of pp = {pp}, {has}"
            fix = f"a multiple of {pp}, such as {micro_batches // pp * pp} or {-(-micro_batches // pp) * pp}"
            yield Violation("micro_batch_size", what, fix, more=_BATCH)

    def model_violations(self, limits: ModelLimits, world: int | None = None) -> Iterator[Violation]:
        """Every stage needs a layer, and a split adds up to all layers."""
        pp, of_rank, layers = self.pp, self.stages_per_rank, limits.layers
        if pp > 1 and (refusal := limits.refusals.get("pp")):
            yield Violation("pp", f"pp {pp} is refused: {refusal}", "use dp_shard and tp instead", (1,))
        if pp == 1 or layers is None:
            return
        if self.stages > layers:
            what = f"pp {pp} x {of_rank} stages a rank = {self.stages}, but the model has {layers} layers"
            yield Violation("pp", what, f"at most {layers} stages", tuple(range(1, layers // of_rank + 1)))
        elif not any(PipelineKeys.violations(self)) and self.split and sum(self.split) != layers:
            what = f"pp_split {self.pp_split} has {sum(self.split)} layers, but the model has {layers}"
            yield Violation("pp_split", what, f"numbers that add up to {layers}, or auto")
