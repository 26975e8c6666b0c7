"""`fivefold train` on one rank, read downwards: data, model, resume, the loop, the end.

The same code runs on one CPU and on many GPUs; nothing here depends on the kinds of parallelism in use.
"""

import gc
import math
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from fivefold import checkpoint
from fivefold.config import RunConfig, check_best, check_supported, parse_config
from fivefold.core import history
from fivefold.core.best import Best
from fivefold.core.errors import RunFailed
from fivefold.core.interrupts import Stopped
from fivefold.core.kept_steps import MemoryOfNode
from fivefold.core.text import listed
from fivefold.core.violation import refuse
from fivefold.data.batch import MicroBatch
from fivefold.data.prepare import PreparedData, prepare
from fivefold.data.rows import PackedRows
from fivefold.launch.events import Events, events_of
from fivefold.launch.failure import Suspected
from fivefold.launch.rounds import logs_of
from fivefold.launch.world import World
from fivefold.models import kernels
from fivefold.models.discover import facts_of
from fivefold.models.flops import Costs
from fivefold.parallel import legality
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.apply import parallelize
from fivefold.parallel.balance.runtime import configure
from fivefold.parallel.state import state_of
from fivefold.training import checks, header, metrics, preflight, record, reference, schedule, trial
from fivefold.training.checkpoints import CheckpointManager, Resumed
from fivefold.training.distillation import teacher_of
from fivefold.training.environment import Environment
from fivefold.training.inputs import check_loss
from fivefold.training.job import Job
from fivefold.training.keeping import HeldStep, LastStep
from fivefold.training.model import balance_options, build_model, compile_pays
from fivefold.training.named_loss import own_loss
from fivefold.training.optimizers import build_optimizer, rule_for
from fivefold.training.out_of_memory import advised
from fivefold.training.peak_memory import PeakMemory
from fivefold.training.preference import mean_over_pairs
from fivefold.training.run_log import RunLog
from fivefold.training.samples import Samples
from fivefold.training.step import StepResult, mean_loss, train_step
from fivefold.training.watchdog import watching

COUNTED = ("tokens_seen", "skipped", "in_a_row")  # attributes of `Trainer` saved in checkpoints
MAX_SKIPPED = 3  # steps in a row without a finite loss and gradient before the run is stopped


def on_worker(request: Mapping[str, Any], world: World) -> None:
    """The body of a training worker, whether fivefold started the process or something else did."""
    memory = MemoryOfNode.of_request(request.get("memory"), round=world.round, acts=world.local_rank == 0)
    train(parse_config(request["config"]), world, events=events_of(request, is_first=world.is_first), memory=memory)


def train(config: RunConfig, world: World, *, events: Events | None = None, memory: MemoryOfNode | None = None) -> None:
    """Train as `config` says on this rank of `world`, which has been joined. `events` receives what happens. `memory`:
    where the last step is kept if other nodes go.

    Raises `UserError` for a request that cannot be met, `RunFailed` if the run diverges, and `Stopped` if a signal
    ended it early, after a save.
    """
    check_supported(config)
    logs, timeout = logs_of(config.run_dir, world.round), config.train.collective_timeout
    with ExitStack() as stack:
        stack.enter_context(watching(logs, world.rank, timeout, folder=world.folder))
        log, data = (
            RunLog(config.run_dir, events, round=world.round),
            prepare(config),
        )  # prepared before the group: a cache hit
        if world.local_rank == 0:
            stack.enter_context(data.train.filling())
        with advised(config, world, data):
            job = Trainer.build(config, world, data, log, stack, of_node=memory)
        # These objects live as long as the training. Python's collector would scan all 400,000 of them again and again:
        # 0.2 s on one rank, for which the others wait.
        gc.freeze()
        stack.callback(gc.unfreeze)
        flag = job.keeper.memory.here / f"ready-{world.rank}"
        with job.stop.listening(), advised(config, world, data, job), job.last.kept_if_others_go(world.folder, flag):
            job.keeper.forget()
            job.run()


class Trainer(Job):
    """One training run on one rank: builds its objects, and runs the loop."""

    # ---- before the first step --------------------------------------------------------------------------------------

    @classmethod
    def build(
        cls, config: RunConfig, world: World, data: PreparedData, log: RunLog, stack: ExitStack,
        environment: Environment | None = None, of_node: MemoryOfNode | None = None,
    ) -> "Trainer":  # fmt: skip
        """Build everything that the first step needs; `stack` closes it. `environment`: None is that of a real run.
        `of_node`: the memory of this node, see `train`."""
        environment = environment or Environment()
        preflight.check_ranks_agree(config, data, world)
        check_best(config, has_validation=data.validation is not None)
        memory = PeakMemory(torch.device(world.device))
        layout = config.layout.resolve(world.size)
        refuse(legality.violations(layout, batch=config.train.global_batch_size))
        model = build_model(config, data)
        lora = config.adapter.lora
        facts = adapted(facts_of(model), lora)
        costs = Costs.of(facts)
        total_steps = schedule.total_steps(config, data)
        compiled = compile_pays(config, costs, data, world, total_steps)
        source, compared = environment.load_source(config, model, facts), reference.Reference.of(config, model)
        if source is not None and source.unread and world.is_first:
            what = f"{len(source.unread):,} tensors of {config.model.name_or_path} ({listed(source.unread, 2)})"
            print(f"note: {what} are not of its model class: they are not trained, and not exported", flush=True)
        samples = Samples(config, model, data)
        scarce = preflight.check_memory(facts, config, layout, world)
        if scarce and world.is_first:
            print(f"note: {scarce}", flush=True)
        attention = kernels.choose(config.train.attention, torch.device(world.device))
        teacher = teacher_of(config, data, world, total_steps)
        loss = own_loss(config)
        parallelize(
            model, layout, device=world.device, source=source, seed=config.train.seed,
            reduce=config.precision.reduce, loss_chunks=config.memory.chunks, compile_blocks=compiled,
            step=(layout.padded(config.data.seq_length), layout.accumulation(config.train.global_batch_size)),
            offload_to=config.memory.offload_to, adapter=lora, neftune_noise_alpha=config.train.neftune_noise_alpha,
        )  # fmt: skip
        preflight.reserve_host_memory(model, config)
        state = state_of(model)
        configure(model, state.balance, balance_options(config, model.config), state.placement.buffers)
        goals = reference.goals(config, data, model, compared)
        optimizer = build_optimizer(model, config.optimizer)
        state.outer.begin(model, **config.outer.model_dump(exclude={"every"}))
        stack.callback(log.folder.release)
        checkpoint.on_first_rank(log.folder.take)
        keeper = CheckpointManager(config, model, optimizer, data, log, write=environment.write, memory=of_node)
        job = cls(
            config, world, data, model, optimizer, keeper, log, memory, costs, total_steps, samples, goals, teacher,
            loss, attention, environment,
        )  # fmt: skip
        stack.callback(keeper.close)
        resumed = environment.resume(keeper, config)
        job.step = job.start = resumed.step
        job.config = config = schedule.settled(config, total_steps, before=resumed.warmup_steps)
        for name in COUNTED if resumed.where else ():
            setattr(job, name, resumed.state[name])
        data.train.go_on(resumed.state)
        job.best, told = Best.resumed(resumed.state, config.eval.metric, config.eval.direction)
        tight = checkpoint.on_first_rank(
            lambda: environment.check_disk(model, config, step=job.step, total_steps=total_steps)
        )
        record.write(model, config, device=world.device, parameters=costs.parameters, room=log.folder.room)
        if job.loss and job.step < total_steps:
            check_loss(job.loss, model, job.batch(job.step))
        tried = job._try_memory(data) if trial.pays(config, world) and job.step < total_steps else ""
        checkpoint.on_first_rank(
            lambda: job._open_log(stack, compiled=compiled, resumed=resumed, best=told, tight=tight, tried=tried)
        )
        stack.push(lambda _, error, __: job.log.close(job.step, error))
        stack.callback(job.prefetch.shutdown, wait=True)
        job.unfinished = resumed.unfinished
        if job.keeper.can_keep:
            job.last = LastStep(job._keep, device=world.device)
            if resumed.unfinished:
                job.last.holds(job._held(resumed.unfinished["row"], owes=resumed.unfinished["owes"]))
        return job

    def _try_memory(self, data: PreparedData) -> str:
        """Run the trial before the first step and return its memory line for the header."""
        with advised(self.config, self.world, data, self):
            trial.run(self)
        peaks = self.memory.over_ranks()
        self.memory = PeakMemory(torch.device(self.world.device)) if self.world.device != "cpu" else self.memory
        return header.memory_line(self, peaks) if self.world.is_first else ""

    def _open_log(
        self, stack: ExitStack, *, compiled: bool, resumed: Resumed, best: str, tight: str, tried: str
    ) -> None:
        """Open the display and the files, on rank 0."""
        about = self._about_this_start(resumed)
        lines = header.lines(self, compiled=compiled, resumed=resumed)
        if resumed.where:
            lines += header.changed(history.load(self.config.run_dir), about, step=self.step)
        teacher = "" if self.teacher is None else self.teacher.told
        more = (
            ("compared", self.goals.told), ("teacher", teacher), ("best", best), ("memory", tried), ("DISK", tight),
        )  # fmt: skip
        lines += [(label, text) for label, text in more if text]
        self.log.open(
            stack, self.config, lines, about, step=self.step, total_steps=self.total_steps,
            total_tokens=schedule.total_tokens(self.config, self.data, self.total_steps),
            is_unfinished=resumed.unfinished is not None,
        )  # fmt: skip

    def _about_this_start(self, resumed: Resumed) -> dict[str, Any]:
        """The history's record of a start: machine, versions, layout, schedule and data."""
        return {
            **history.surroundings(),
            "device": record.device_name(self.world.device),
            "layout": str(state_of(self.model).plan.layout),
            "world": self.world.size,
            "devices_per_node": self.world.local_size,
            "nodes": self.world.nodes,
            "resumed": resumed.where,
            "damages": list(resumed.damages),
            "schedule": self.schedule,
            "code": {key: digest for key, digest in self._digests() if digest},
            "data": asdict(self.data.counts) | {"vocabulary": self.data.tokenizer.vocab_size},
        }

    def _digests(self) -> Iterator[tuple[str, str]]:
        """The hashes of the files of the user's own, as they were run; "" where there is none."""
        yield "objective.path", self.loss.digest if self.loss else ""
        yield "optimizer.path", rule_for(self.config.optimizer).digest

    # ---- the loop ----------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run steps until the end, then the last evaluation, checkpoint and sample; show what to type next."""
        if self.unfinished:
            self._finish_step(self.unfinished)
        if self._is_over:
            self.keeper.finish()
            all_done = f"this run is finished: {self.step} of {self.total_steps} steps are done"
            self._close(self._why_stopped or all_done)
            return
        if self.config.train.check_every > 0:
            checks.fail_on(checks.replicas(self.model, self.optimizer), step=self.step, passed=None, came_in=True)
        for batch, waited in self._batches():
            started = time.perf_counter() - waited
            rate = self._learning_rate(self.step)
            options = self.config.optimizer
            state_of(self.model).dropout.step = self.step
            with (
                self.environment.timing(
                    self.model, self.config, step=self.step + 1, of_start=self.step + 1 - self.start
                ),
                checks.observing(self.model, self.optimizer) if self._is_checked() else nullcontext() as update,
            ):
                result = train_step(
                    self.model, self.optimizer, batch, learning_rate=rate, max_grad_norm=options.max_grad_norm,
                    stop=self._is_to_stop, spec=self.goals.train, loss=self.loss, read=self.environment.read,
                    before_update=self.last.changes,
                )  # fmt: skip
            self.step += 1
            if self._is_met:
                state_of(self.model).outer.step()
            seconds = time.perf_counter() - started
            self.tokens_seen += result.tokens
            self._count_skipped(result)
            self._report_uncompiled()
            row = metrics.row(self, result, rate, seconds=seconds, waited=waited)
            self.last.stands(self._held(row, owes=self._due(self.config.eval.every)))
            is_best = self._is_evaluated_best(row)
            self.last.holds(self._held(row))
            self.keeper.report(self.step)
            self._write(row)
            self.log.events.tell("step", row)
            if "eval/loss" in row:
                self.log.events.tell("eval", {key: row[key] for key in row if key == "step" or key.startswith("eval/")})
            self._stop_if_diverged(result.why)
            if update:
                self._check(update, batch, result)
            if self._due(self.config.sample.every):
                self.log.sampled(list(self.samples.draw(self.step)))
            leaves = update is not None and self._name_stragglers() and self._may_leave_out
            if self._due(self.config.checkpoint.every) or self._is_over or is_best or result.stop or leaves:
                if not update:
                    self._check_state()
                self.keeper.save(self.config, self.step, self._counted, self.best)
            if self._is_over:
                break
            if leaves:
                self._stop_for_stragglers()
            if result.stop:
                self._stop_on_request()
        if self._why_stopped:
            self.log.happened("stopped early", self.step, self._why_stopped)
        self.keeper.finish()
        self._close(self._why_stopped)

    def _held(self, row: Mapping[str, Any], *, owes: bool = False) -> HeldStep:
        """The step just done. `owes`: it has yet to be evaluated."""
        return HeldStep(self.step, self._counted, self.best, dict(row), owes)

    def _keep(self, held: HeldStep, after: "torch.cuda.Event | None") -> None:
        """Keep a step in the memory of this node."""
        self.keeper.keep(self.config, held, ranks=self.world.local_size, after=after)

    def _finish_step(self, unfinished: Mapping[str, Any]) -> None:
        """Do what is left of a step that went on from memory: its evaluation, its row and its save."""
        row = dict(unfinished["row"])
        is_due = self._due(self.config.eval.every)
        is_best = self._is_evaluated_best(row) if unfinished["owes"] else is_due and self._is_kept_best
        self.last.holds(self._held(row))
        self._write(row)
        if self._due(self.config.checkpoint.every) or self._is_over or is_best:
            self._check_state()
            self.keeper.save(self.config, self.step, self._counted, self.best)

    @property
    def _is_met(self) -> bool:
        """True if an outer step follows the step just done, as after the last one."""
        outer = state_of(self.model).outer
        return outer.is_due(self.step) or (outer.is_on and self.step == self.total_steps)

    @property
    def _is_over(self) -> bool:
        """True after the last step, and after the step at which the run stops early."""
        return self.step >= self.total_steps or bool(self._why_stopped)

    @property
    def _why_stopped(self) -> str | None:
        """The reason of an early stop; None if there is none, or if all steps are done."""
        stop = self.config.eval.stop
        is_early = self.step < self.total_steps and self.best.is_over(stop.patience)
        return self.best.why_over(self.step, stop.min_delta) if is_early else None

    @property
    def _counted(self) -> dict[str, Any]:
        """The state that a checkpoint keeps beside the tensors."""
        place = self.step * self.config.train.global_batch_size
        return {name: getattr(self, name) for name in COUNTED} | dict(self.data.train.position(place))

    def _is_evaluated_best(self, row: dict[str, Any]) -> bool:
        """Evaluate if that is due, and add what is found to `row`. True if the step is kept as one of the best."""
        if self._due(self.config.eval.every) and self.data.validation:
            self.last_eval, more = self._evaluate(self.data.validation)
            row |= metrics.of_evaluation(self.last_eval, more)
        is_best = self._due(self.config.eval.every) and self._compare(row)
        if "eval/loss" in row and self.last_eval is not None:
            self.log.display.evaluated(self.step, self.last_eval, self.best)
        return is_best

    def _compare(self, row: dict[str, Any]) -> bool:
        """Compare this validation with those before, and add the best one to `row`. True if its step is to be kept.
        The metric, and so the answer, is the same on all ranks."""
        self.best = self.best.after(self.step, row.get(self.best.metric), min_delta=self.config.eval.stop.min_delta)
        if self.best.step is not None:
            row |= {"eval/best": self.best.value, "eval/best_step": self.best.step}
        return self._is_kept_best

    @property
    def _is_kept_best(self) -> bool:
        return self.step in self.best.steps[: self.config.checkpoint.keep_best]

    @property
    def _is_to_stop(self) -> bool:
        """True if this rank asks all ranks to stop after the step."""
        return self.stop.by is not None or self.keeper.failed is not None or self.log.events.stop_asked

    def _stop_on_request(self) -> None:
        """Wait for this step's save, then raise `Stopped` on every rank, or the error of a failed save."""
        self.keeper.finish()
        if self.keeper.failed:
            raise self.keeper.failed
        by = self.stop.by or signal.SIGTERM  # another rank's
        self._tell(f"stopped by {by.name} after step {self.step} of {self.total_steps}, which is saved")
        dist.barrier()  # a rank that exits early would make the launcher end the others
        raise Stopped(by)

    def _batches(self) -> Iterator[tuple[list[MicroBatch], float]]:
        """Yield this rank's micro batches from the current step on, with the seconds spent waiting for them."""
        ahead: Future[list[MicroBatch]] = self.prefetch.submit(self.batch, self.step)
        for step in range(self.step, self.total_steps):
            asked = time.perf_counter()
            batch = ahead.result()
            waited = time.perf_counter() - asked
            if step + 1 < self.total_steps:
                ahead = self.prefetch.submit(self.batch, step + 1)
            yield batch, waited

    def _evaluate(self, rows: PackedRows) -> tuple[float, Mapping[str, float]]:
        """Mean cross entropy, nats per target token, over the first `eval.max_tokens` of `rows`, or mean of the user's
        own loss. For a preference objective the mean loss over the pairs there, and its metrics. Equal on all ranks."""
        if self.goals.validation:
            return mean_over_pairs(self.model, self.evaluation(rows), self.goals.validation)
        return mean_loss(self.model, self.evaluation(rows), self.loss), {}

    def _learning_rate(self, step: int) -> float:
        return schedule.learning_rate(step, **self.schedule)

    @property
    def schedule(self) -> dict[str, Any]:
        """The options of `schedule.learning_rate`."""
        scheduler = self.config.scheduler
        return {
            "name": scheduler.name,
            "peak": self.config.optimizer.learning_rate,
            "warmup_steps": int(scheduler.warmup_steps),
            "total_steps": self.total_steps,
            "min_lr_ratio": scheduler.min_lr_ratio,
        }

    def _due(self, every: int) -> bool:
        """True every `every` steps and at the last one; 0 means never."""
        return every > 0 and (self.step % every == 0 or self.step == self.total_steps)

    def _count_skipped(self, result: StepResult) -> None:
        """Count and report a skipped step."""
        self.in_a_row = self.in_a_row + 1 if result.skipped else 0
        if not result.skipped:
            return
        self.skipped += 1
        what = "loss" if not math.isfinite(result.loss) else "gradient"
        why = f" ({result.why})" if result.why else ""
        self.log.display.note(f"step {self.step}: the {what} is not finite{why}; the update was skipped")
        self.log.happened("skipped", self.step, f"the {what} was not finite{why}; the update was skipped")

    def _report_uncompiled(self) -> None:
        """Report once each block of this rank that Dynamo failed to compile."""
        compiled = state_of(self.model).compiled
        for line in compiled.news() if compiled else ():
            self.log.display.note(f"step {self.step}: {line}")

    def _stop_if_diverged(self, why: str) -> None:
        """Raise `RunFailed` after `MAX_SKIPPED` skipped steps in a row; `why`: what the user's own loss did."""
        if self.in_a_row >= MAX_SKIPPED:  # more, if nodes changed before this was asked
            raise RunFailed(
                f"{self.in_a_row} steps in a row without a finite loss and gradient, the last at step {self.step}"
                f"{why and f': {why}'}",
                fix="lower optimizer.learning_rate or lengthen scheduler.warmup_steps; "
                f"the rows of step {self.step} are the first to look at",
                more=f"metrics: {self.config.run_dir / 'metrics.jsonl'}",
            )

    # ---- what must hold at any step ----------------------------------------------------------------------------------

    def _is_checked(self) -> bool:
        """True if the next step is checked: a start's first, every `check_every`, those saved on time, the last."""
        every, saved, step = self.config.train.check_every, self.config.checkpoint.every, self.step + 1
        is_saved = saved > 0 and step % saved == 0
        return every > 0 and (self.checked is None or step % every == 0 or is_saved or step == self.total_steps)

    def _check(self, update: checks.Update, batch: list[MicroBatch], result: StepResult) -> None:
        """Run the standing checks of the step just done. Raises `RunFailed`, on every rank, for any finding."""
        model, optimizer, size = self.model, self.optimizer, self.config.train.global_batch_size
        findings = checks.replicas(model, optimizer, have_met=self._is_met) + checks.finite(model, optimizer)
        findings += checks.ledger(
            model, batch, self.data.train, step=self.step - 1, global_batch_size=size,
            balance=self.config.data.balance_rows,
        )  # fmt: skip
        if not result.skipped:
            options, rate = self.config.optimizer, self._learning_rate(self.step - 1)
            updates = None if options.is_own else self.step - self.skipped  # what it counts is its own affair
            findings += checks.moved(model, optimizer, update, rule=rule_for(options))
            findings += checks.rates(model, optimizer, rate, updates=updates)
        checks.fail_on(findings, step=self.step, passed=self.checked)
        self.checked = self.step

    def _check_state(self) -> None:
        """Check what is about to be saved, between the standing checks: what is saved has passed them."""
        if self.config.train.check_every > 0:
            found = checks.replicas(self.model, self.optimizer, have_met=self._is_met)
            checks.fail_on(found + checks.finite(self.model, self.optimizer), step=self.step, passed=self.checked)

    def _name_stragglers(self) -> bool:
        """Tell which ranks compute slowly. True if there are some."""
        for told in self.pace.check(torch.device(self.world.device)):
            self.log.display.note(f"step {self.step}: {told}")
            self.log.happened("straggler", self.step, told)
        return bool(self.pace.stragglers)

    @property
    def _may_leave_out(self) -> bool:
        """True if nodes may be left out, and fewer of them suffice."""
        least, _ = self.config.train.node_range or (self.world.nodes, 0)
        return self.config.train.leave_out and self.world.nodes > least

    def _stop_for_stragglers(self) -> None:
        """Wait for this step's save, then raise `Suspected` on every rank."""
        self.keeper.finish()
        slow = self.pace.stragglers
        raise Suspected(
            f"rank {listed(slow, 8)} computes more than {checks.SLOW:g} times as slowly as the usual one",
            fix="look at the temperature and the clocks of its device, and at what else uses it",
            ranks=slow,
        )

    # ---- what is written ---------------------------------------------------------------------------------------------

    def _write(self, row: dict[str, Any]) -> None:
        if not self._due(self.config.log.every) and not any(name.startswith("eval/") for name in row):
            return
        row |= self.memory.over_ranks()
        self.log.row(row)

    def _close(self, why: str | None = None) -> None:
        if self.config.checkpoint.export_hf and self.world.is_first:
            shutil.rmtree(self.config.run_dir / "hf", ignore_errors=True)  # an earlier step's
            best = self.config.checkpoint.export_hf == "best"
            checkpoint.export(self.config.run_dir, self.config.run_dir / "hf", best=best)
        self._tell(why)

    def _tell(self, why: str | None) -> None:
        """Show where everything is, and what to type next."""
        if self.world.is_first:  # `closing_lines` looks for files
            self.log.display.closing(header.closing_lines(self, why))
