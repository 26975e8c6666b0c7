"""The proof of one layout. Read downwards: the model is parallelized, watched for a step, trained, saved and loaded.

Everything runs through the functions that train; this file only observes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fivefold.checkpoint import Checkpoint, Metadata, restore, save
from fivefold.core.errors import UserError
from fivefold.data.batch import MicroBatch
from fivefold.generation.decode import decode, ready
from fivefold.models.build import meta_of_folder
from fivefold.models.sources import TensorSource, open_weights
from fivefold.parallel import passes
from fivefold.parallel.adapters.by_hand import Drawn
from fivefold.parallel.adapters.sources import Layered
from fivefold.parallel.apply import parallelize
from fivefold.parallel.balance.runtime import Balance, BalanceOptions, configure, movable_biases
from fivefold.parallel.collectives import Collective, by_group, differing, total
from fivefold.parallel.dropout.runtime import Dropout
from fivefold.parallel.dtensor import local
from fivefold.parallel.dtypes import COMPUTE_DTYPES, master_dtype
from fivefold.parallel.layout import Layout
from fivefold.parallel.loss.tasks import TopLogProbs
from fivefold.parallel.mesh import record
from fivefold.parallel.plain import everywhere
from fivefold.parallel.state import state_of
from fivefold.training import checks, preference
from fivefold.training import step as training
from fivefold.training.inputs import check_loss, evaluating, loss_at, to_device
from fivefold.training.objectives import metrics_of
from fivefold.training.optimizers import build_optimizer, rule_for
from fivefold.training.optimizers.states import restored_state
from fivefold.training.step import local_gradients
from fivefold.verification.by_hand import exactly, teacher_targets
from fivefold.verification.observer import Comparison, Observer
from fivefold.verification.proof_case import LEARNING_RATE, Documents, ProofCase, micro_batches, row_numbers, tokens_of
from fivefold.verification.reference_tensors import ReferenceTensors, logit_distances
from fivefold.verification.results import CONTROL, ComparisonRow, Distance, LayoutResult, relative_number

PLANTED = 20.0  # the planted fault adds this many times the tolerance, plus 0.25, to a norm


class Proof:
    """A layout under proof on this rank. All ranks make one, call the same methods and get the same rows."""

    def __init__(self, case: ProofCase, layout: Layout, reference: ReferenceTensors, device: str) -> None:
        """Parallelize the model of `case` by `layout`. Raises `UserError` if the layout does not fit it."""
        self.case, self.reference = case, reference
        self.layout = layout.resolve(dist.get_world_size())
        if layout.outer_every:
            raise UserError(
                f"outer.every {layout.outer_every}: replicas that train apart compute what no one process does",
                fix="prove the layout without outer steps",
                more="fivefold docs explain/outer",
            )
        model = meta_of_folder(case.folder)
        source: TensorSource = open_weights(case.folder, model)
        if case.adapter is not None:
            source = Layered(Drawn(case.folder, case.adapter, case.seed), source)
        self.model = parallelize(
            model, self.layout, device=device, source=source, adapter=case.adapter, reduce=case.reduce,
            loss_chunks=case.loss_chunks, seed=case.seed, neftune_noise_alpha=case.neftune_noise_alpha,
            step=(self.layout.padded(case.row_length), self.layout.accumulation(case.rows)),
        )  # fmt: skip
        self.state = state_of(self.model)
        self.routers: list[str] = reference.about["routers"]
        has_biases = bool(movable_biases(self.routers, self.state.placement.buffers))
        options = BalanceOptions(
            load=case.aux_loss * bool(self.routers), z=case.z_loss * bool(self.routers),
            bias_rate=case.bias_rate * has_biases, capacity_factor=case.capacity_factor,
        )  # fmt: skip
        configure(self.model, self.state.live(Balance), options, self.state.placement.buffers)
        self.optimizer = build_optimizer(self.model, case.optimizer)
        self.loss = loss_at(case.objective.path) if case.objective.is_own else None
        if self.loss:
            check_loss(self.loss, self.model, self._batch(0))
        self.found = LayoutResult(str(layout), precision=layout.numerics)
        self.compare = Comparison(self.found, reference, self.state)
        self._not_shown: set[str] = set()  # modules whose values on this rank could not be located

    @property
    def stages(self) -> tuple[Callable[[], None], ...]:
        """All comparisons, in the order in which a step computes."""
        return (
            self.shards, self.weights, self.first_pass, self.logits, self.continuations, self.evaluation,
            self.objective, self.control, self.first_step, self.trajectory, self.replicas, self.coverage,
        )  # fmt: skip

    def run(self) -> LayoutResult:
        for stage in self.stages:
            stage()
        return self.found

    def forget(self) -> None:
        """Zero every weight, so that only loaded values remain after the next load."""
        with torch.no_grad():
            for tensor in self._trained().values():
                local(tensor).zero_()

    # ---- comparisons -------------------------------------------------------------------------------------------------

    def shards(self) -> None:
        """Check that each rank's shard has the shape and the type that the layout says."""
        wrong = {}
        for name, parameter in self.model.named_parameters():
            expected, found = self.state.placement.local_shape(name), tuple(local(parameter).shape)
            type_ = master_dtype(self.layout.precision)
            if self.state.placement.rests_in(name, type_.itemsize) != type_.itemsize:
                type_ = COMPUTE_DTYPES[self.layout.precision]
            if packing := self.state.plan.facts.parameters[name].packing:
                expected, type_ = (expected[0], packing.row_bytes(expected[1])), torch.uint8
            if found != expected or parameter.dtype != type_:
                wrong[name] = f"{name} is {parameter.dtype} {list(found)}, not {type_} {list(expected)}"
        self.compare.count("shards", wrong)

    def weights(self) -> None:
        """Compare every parameter and router buffer with the reference, bit for bit."""
        self.compare.pieces("weight", self._trained())

    def first_pass(self) -> None:
        """Compare all modules forward and backward, then raw and reduced gradients. A rerun must be bit-identical."""
        with Observer(self.model, self.reference, self.case.documents(0), self._row_numbers()) as observer:
            loss = self._gradients()
        observer.shared_gradients()
        self._not_shown = observer.not_shown
        seen, there = observer.micro_batches
        wrong = f"{seen} of {there} on rank {dist.get_rank()}"
        self.compare.count("micro batches", {} if seen == there else {wrong: wrong})
        self.compare.in_order("output", observer.distances)
        self.compare.count("types", observer.types)
        self.compare.numbers({"loss": relative_number(float(loss), float(self.reference.whole("losses")[0]))})
        self.compare.in_order("backward", observer.distances)
        observer.raw_gradients()
        self.compare.in_order("raw", observer.distances, names=self._backwards())
        first = {name: gradient.clone() for name, gradient in local_gradients(self.model)}
        self.compare.pieces("gradient", {name: p.grad for name, p in self.model.named_parameters()}, self._backwards())
        self._drop_gradients()
        again = self._gradients()
        second = dict(local_gradients(self.model))  # parameters without a gradient are missing both times
        differing = {n: n for n in first.keys() ^ second.keys()}
        differing |= {n: n for n in first.keys() & second.keys() if not torch.equal(first[n], second[n])}
        differing |= {} if float(again) == float(loss) else {"loss": "the loss"}
        self.compare.count("rerun", differing)
        self._drop_gradients()

    def logits(self) -> None:
        """Compare the logits of every real token."""
        found, expected = [], []
        layout, documents = self.layout, self.case.documents(0)
        for batch, numbers in zip(self._batch(0), self._row_numbers(), strict=True):
            inputs = to_device(batch, self._device)
            with exactly(layout.precision), evaluating(self.model):
                logits = passes.logits(
                    self.model, inputs.input_ids, inputs.position_ids, cu_seqlens=inputs.cu_seqlens, use_cache=False
                )
            for b, row in enumerate(numbers):
                stop = tokens_of(documents[row])
                found.append(logits[b, :stop].cpu())
                expected.append(self.reference.read("logits", (slice(row, row + 1), slice(0, stop)))[0])
        self.compare.numbers(logit_distances(torch.cat(found), torch.cat(expected)))

    def continuations(self) -> None:
        """Compare the greedy continuation of every prompt, token by token through the KV cache."""
        expected, different, padding = self.reference.whole("greedy"), 0.0, self.state.plan.facts.padding
        pairs = zip(self.case.prompt_tokens(), expected.tolist(), strict=True) if expected.numel() else ()
        # A model that counts from its padding token counts that one too if it is in a cache, as `transformers` has it.
        texts = [(prompt, tokens) for prompt, tokens in pairs if padding not in (*prompt.tolist(), *tokens)]
        if not texts:  # or a per-tensor scale differs if tokens come one by one
            self.found.not_told.append("tokens, continuations")
            return
        with ready(self.model), exactly(self.layout.precision):
            for prompt, tokens in texts:
                ids = torch.from_numpy(prompt)[None]
                found = list(decode(self.model, ids, max_new_tokens=len(tokens)))
                different += sum(a != b for a, b in zip(found, tokens, strict=True))
        self.compare.numbers({"tokens, continuations": different / sum(len(tokens) for _, tokens in texts)})

    def evaluation(self) -> None:
        """Compare the loss of the first batch, as evaluation computes it."""
        with exactly(self.layout.precision):
            loss = training.mean_loss(self.model, self._batch(0), self.loss)
        expected = float(self.reference.whole("evaluated"))
        self.compare.numbers({"loss, evaluated": relative_number(loss, expected)})

    def objective(self) -> None:
        """Compare the values and the gradient of the run file's objective, unless it is sft or python."""
        if self.case.objective.name in ("sft", "python"):  # python: all that is compared has its loss
            return
        balance, before = self.state.live(Balance), self.state.state()
        options, balance.options = balance.options, BalanceOptions()  # no router losses
        with exactly(self.layout.precision), self.state.deterministic():
            (self._distillation if self.case.objective.name == "distill" else self._preference)()
        balance.options = options
        self.state.load(before)  # the first step begins without what these passes left
        gradients = {name: p.grad for name, p in self.model.named_parameters()}
        self.compare.pieces("objective", gradients, self._backwards())
        self._drop_gradients()

    def _distillation(self) -> None:
        """Compare the top-k queries with the model as its own teacher, then the loss against another teacher."""
        asked, followed = Distance(), []
        for batch, rows in zip(self._batch(0), self._row_numbers(), strict=True):
            task = TopLogProbs(self.case.followed, self.case.vocabulary)
            inputs = to_device(batch, self._device, task=task)
            tokens, log_probs = passes.top_log_probs(self.model, inputs)
            for b, row in enumerate(rows):
                own = slice(0, tokens_of(self.case.documents(0)[row]))
                expected = self.reference.read("teacher/asked", (slice(row, row + 1), own))[0]
                logits = self.reference.read("logits", (slice(row, row + 1), own))[0]
                named = logits.double().log_softmax(-1).gather(-1, tokens[b, own].cpu())
                asked.add(log_probs[b, own].cpu(), expected)
                asked.add(named, expected)
            followed.append(replace(batch, teacher=teacher_targets(self.case, batch, [*rows])))
        loss = training.accumulate(self.model, followed).reshape(1).cpu()
        distances = {"teacher/asked": asked, "teacher/loss": Distance().add(loss, self.reference.whole("teacher/loss"))}
        self.compare.in_order("teacher", distances)

    def _preference(self) -> None:
        """Compare log-probabilities, loss and metrics on pairs of answers."""
        batch = self._micro_batches(self.case.pairs())
        objective, table = self.case.objective, self.case.compared_with()
        spec = preference.ObjectiveSpec(objective, table if objective.compares else None)
        sums = torch.from_numpy(preference.table(self.model, batch, len(table)))
        metrics = preference.mean_over_pairs(self.model, batch, spec)[1]
        loss = training.accumulate(self.model, batch, spec=spec)
        found = {
            "log-probabilities": sums, "loss": loss.reshape(1).cpu(),
            "metrics": torch.tensor([metrics[name] for name in metrics_of(objective)], dtype=torch.float64),
        }  # fmt: skip
        distances = {
            f"preference/{name}": Distance().add(number, self.reference.whole(f"preference/{name}"))
            for name, number in found.items()
        }
        self.compare.in_order("preference", distances)

    def first_step(self) -> None:
        """Compare one optimizer step: gradients after clipping, the update, the optimizer state, the collectives."""
        before = {name: local(p).clone() for name, p in self._trained().items()}
        with record(self.state.mesh) as ran:
            result, clipped = self._step_with_gradients(0)
        self._counts(result)
        counts = zip(self.routers, result.balance.tokens_per_expert, strict=True)
        loads = {router: torch.tensor(count, dtype=torch.float64) for router, count in counts}
        whole = {f"load/{router}": self.reference.whole(f"load/{router}") for router in loads}
        self.compare.in_order(
            "load", {key: Distance().add(loads[key[5:]], expected) for key, expected in whole.items()}
        )
        if self.routers:
            found = zip((result.balance.load, result.balance.z), self.reference.whole("balance").tolist(), strict=True)
            self.compare.numbers({"losses of routers": max(relative_number(*pair) for pair in found)})
        expected = float(self.reference.whole("norms")[0])
        self.compare.numbers({"gradient norm": relative_number(result.grad_norm, expected)})
        self.compare.pieces("clipped", clipped, self._backwards())
        updates = {name: local(p) - before[name] for name, p in self._trained().items()}
        self.compare.pieces("update", updates)
        states = {name: restored_state(self.optimizer, p) for name, p in self.model.named_parameters()}
        for kind in rule_for(self.case.optimizer).facts.state:
            self.compare.pieces(
                kind, {name: state[kind] for name, state in states.items() if kind in state}, must=False
            )
        left = {name: name for name, p in self.model.named_parameters() if p.grad is not None}
        self.compare.count("gradients left after the step", left)
        self._collectives(ran)
        self.found.losses = [result.loss]

    def trajectory(self) -> None:
        """Compare the optimizer's gradients in the second step, in which nothing may be clipped; the losses and norms
        of all steps; and the weights after the last."""
        norms = [float(self.reference.whole("norms")[0])]
        for step in range(1, self.case.steps):
            result, gradients = self._step_with_gradients(step)
            if step == 1:
                self.compare.pieces("second", gradients, self._backwards())
            self.found.losses.append(result.loss)
            norms.append(result.grad_norm)
        for what, found in (("losses", self.found.losses), ("norms", norms)):
            expected = self.reference.whole(what).tolist()
            rows = []
            for step, (a, b) in enumerate(zip(found, expected, strict=True)):
                error, allowed = relative_number(a, b), self.compare.allowed(f"{what}/{step}")
                rows.append(
                    ComparisonRow(f"{what} of {len(found)} steps", error, allowed, error <= allowed, f"step {step + 1}")
                )
            self.found.add(next((row for row in rows if not row.ok), max(rows, key=lambda row: row.error)))
        self.compare.pieces("last", self._trained())

    def replicas(self) -> None:
        """Check that replicated weights and optimizer state are the same on all their ranks after all steps."""
        found = checks.replicas(self.model, self.optimizer)  # the same on every rank
        self.compare.count("replicas", {finding.where: str(finding) for finding in found})

    def coverage(self) -> None:
        """Check that everything recorded by the reference was compared."""
        self.compare.coverage(self._not_shown)

    def control(self) -> None:
        """Plant a fault in a norm on the first rank that holds it, check that it is found there, and remove it."""
        name = self._norm()
        module = name.rpartition(".")[0]
        added = 0.25 + PLANTED * self.compare.allowed(f"output/{module}")
        first_holder = next(rank for rank in range(self.layout.world) if self.state.placement.regions(name, rank))
        planted = [local(dict(self.model.named_parameters())[name]).detach()] if dist.get_rank() == first_holder else []
        before = [part.clone() for part in planted]
        for part in planted:
            part.add_(added)
        with Observer(self.model, self.reference, self.case.documents(0), self._row_numbers()) as observer:
            self._outputs()
        for part, values in zip(planted, before, strict=True):
            part.copy_(values)
        first = next((row for row in self.compare.judged("output", observer.distances) if not row.ok), None)
        if first is None:
            row = ComparisonRow(CONTROL, 0.0, 0.0, False, f"{module}: the next pass does not compute with it")
        else:
            is_there = first.name == module
            where = module if is_there else f"planted in {module}, found in {first.name}"
            row = ComparisonRow(CONTROL, first.error, first.tolerance, is_there, where)
        self.found.add(row)

    def save(self, folder: Path) -> None:
        """Save a checkpoint into `folder`, with a file of the expected values of all its tensors."""
        state = self._state()
        told = everywhere({key: value.tolist() for key, value in state.items() if value.ndim == 0})
        numbers = {key: torch.tensor(value) for rank in told for key, value in rank.items()}
        keys = dict.fromkeys(key for rank in everywhere([*state]) for key in rank if key not in numbers)
        whole = self._gathered(state, [*keys])
        save(self.model, self.optimizer, folder / "step-000001", Metadata(step=1, state={}))
        if dist.get_rank() == 0:
            from safetensors.torch import save_file

            save_file(whole | numbers, folder / "expected.safetensors")
            (folder / "done").touch()

    def reload(self, folders: Mapping[str, Path]) -> None:
        """Load the checkpoints of `folders`, and compare all parameters and optimizer state with theirs bit for bit."""
        from safetensors import safe_open

        wrong: list[str] = []
        for layout, folder in folders.items():
            restore(self.model, self.optimizer, Checkpoint.open(folder / "step-000001"))
            with safe_open(folder / "expected.safetensors", framework="pt") as expected:
                wrong += [f"{key} saved under {layout}" for key in self._differing(expected)]
        wrong = sorted({name for rank in everywhere(wrong) for name in rank})
        what = f"saved under {len(folders)} layout{'s' * (len(folders) > 1)}, loaded"
        self.compare.count(what, {name: name for name in wrong})

    def _differing(self, expected: Any) -> list[str]:
        """Keys of the parameters and optimizer state that are missing, or differ from the expected values."""
        state = self._state()
        there = {key for key in expected.keys() if self.state.placement.holds(key.partition("/")[2])}  # noqa: SIM118
        wrong: set[str] = there ^ state.keys()
        for key in state.keys() - wrong:
            tensor = state[key]
            for region, place in self.state.placement.regions(key.partition("/")[2]) if tensor.ndim else [((), ())]:
                kept = expected.get_slice(key)[region] if region else expected.get_tensor(key)
                if not torch.equal(local(tensor)[place].cpu(), kept):
                    wrong.add(key)
        return sorted(wrong)

    # ---- below the comparisons ---------------------------------------------------------------------------------------

    def _batch(self, step: int) -> list[MicroBatch]:
        return self._micro_batches(self.case.documents(step))

    def _micro_batches(self, documents: Documents) -> list[MicroBatch]:
        return micro_batches(documents, *self._share, balance=self.case.balance_rows)

    def _row_numbers(self) -> list[list[int]]:
        """The numbers of the rows in this rank's micro batches of the first step."""
        return row_numbers(self.case.documents(0), *self._share, balance=self.case.balance_rows)

    @property
    def _share(self) -> tuple[Layout, int, int]:
        return self.layout, self.state.placement.data_rank, self.case.row_length

    def _gradients(self) -> Tensor:
        """Run one pass over the first batch, with gradients reduced. Returns the loss over all ranks."""
        batch = self._batch(0)
        scale = torch.tensor(1.0 / self.case.targets(0), dtype=torch.float64, device=self._device)
        with exactly(self.layout.precision):
            loss = passes.gradients(self.model, training.inputs_of_step(self.model, batch, scale, loss=self.loss))
        if not self.state.placement.owns_loss:
            loss.zero_()
        dist.all_reduce(loss)
        return loss

    def _outputs(self) -> None:
        """Run the modules on the first batch; backward too, if a capacity or dropout drops in training alone."""
        if self.case.capacity_factor is None and not self.state.live(Dropout).has_sites:
            with exactly(self.layout.precision):
                training.mean_loss(self.model, self._batch(0), self.loss)
        else:
            self._gradients()
            self._drop_gradients()

    def _step(self, step: int) -> training.StepResult:
        batch = self._batch(step)
        with exactly(self.layout.precision):
            return training.train_step(
                self.model, self.optimizer, batch, learning_rate=LEARNING_RATE,
                max_grad_norm=self.reference.about["limits"][step], loss=self.loss,
            )  # fmt: skip

    def _step_with_gradients(self, step: int) -> tuple[training.StepResult, dict[str, Tensor]]:
        """Run a step. Returns its result, and the gradients as its optimizer gets them."""
        given: dict[str, Tensor] = {}

        def keep(*_: Any) -> None:
            given.update({name: p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None})

        handle = self.optimizer.register_step_pre_hook(keep)
        result = self._step(step)
        handle.remove()
        return result, given

    def _trained(self) -> dict[str, Tensor]:
        """The tensors that steps change on this rank, by name: parameters and router buffers."""
        buffers = {name: buffer for name, buffer in self.model.named_buffers() if name in self.state.placement.buffers}
        return {**dict(self.model.named_parameters()), **buffers}

    def _drop_gradients(self) -> None:
        """Drop gradients that were only compared; in a step the optimizer does this."""
        for parameter in self.model.parameters():
            parameter.grad = None

    def _counts(self, result: training.StepResult) -> None:
        """Check a step's counts of targets, tokens and squared lengths against its documents."""
        documents = self.case.documents(0)
        squares = sum(len(document.tokens) ** 2 for row in documents for document in row if len(document.targets))
        counts = {
            "targets": (result.targets, self.case.targets(0)),
            "tokens": (result.tokens, sum(map(tokens_of, documents))),
            "squared lengths": (result.squared_lengths, squares),
        }
        wrong = {what: f"{found} {what}, not {there}" for what, (found, there) in counts.items() if found != there}
        self.compare.count("counts of a step", wrong)

    def _collectives(self, ran: Any) -> None:
        """Check that the collectives of a step are those that the layout declares."""
        batch = self._batch(0)
        rows, tokens = batch[0].input_ids.shape
        shape = training.step_shape(
            self.model, rows, tokens, len(batch), self.case.loss_chunks, whole_logits=self.loss is not None,
            batch=batch,
        )  # fmt: skip
        declared = by_group(
            training.declare(self.model, shape, optimizer=rule_for(self.case.optimizer).facts),
            self.state.placement.grid,
        )
        both = everywhere([[asdict(call) for call in some] for some in (total(ran), declared)])
        issued, said = ([[Collective(**call) for call in rank[at]] for rank in both] for at in (0, 1))
        wrong = [name.split("/") for name in differing(issued, said)]
        self.compare.count("collectives", {kind + axis: f"{kind} over {axis}" for axis, kind in wrong})

    def _state(self) -> dict[str, Tensor]:
        """This rank's part of every tensor and its optimizer state, and the count of steps per parameter."""
        found: dict[str, Tensor] = {}
        for name, parameter in self._trained().items():
            if name not in self.state.placement.stored_shapes:
                continue
            state = {"weight": parameter.detach(), **restored_state(self.optimizer, parameter)}
            found |= {f"{kind}/{name}": value for kind, value in state.items() if isinstance(value, Tensor)}
        return found

    def _gathered(self, state: Mapping[str, Tensor], keys: Sequence[str]) -> dict[str, Tensor]:
        """Assemble the whole tensors of `keys` from each rank's part in `state`, if it has one."""
        shapes = [self.state.placement.stored_shapes[key.partition("/")[2]] for key in keys]
        sizes = [prod(shape) for shape in shapes]
        flat = torch.zeros(sum(sizes), dtype=master_dtype(self.layout.precision), device=self._device)
        parts = zip(keys, torch.split(flat, sizes), shapes, strict=True)
        whole = {key: part.view(shape) for key, part, shape in parts}
        for key in state.keys() & whole.keys():
            name = key.partition("/")[2]
            if self.state.placement.is_owner(name):
                for region, place in self.state.placement.regions(name):
                    whole[key][region] = local(state[key])[place]
        dist.all_reduce(flat)  # in one collective: for small ones latency dominates
        return {key: tensor.cpu() for key, tensor in whole.items()}

    def _norm(self) -> str:
        """The last parameter of a norm whose output is compared: the place of the planted fault. (The head computes in
        chunks, and a tower that no token reaches does not run.)"""
        seen, base = set(self.reference.names("output")), f"{self.state.plan.anatomy.base}."
        vectors = [
            name for name, spec in self.state.placement.shards.items()
            if len(spec.shape) == 1 and not spec.splits and name.startswith(base) and name.rpartition(".")[0] in seen
        ]  # fmt: skip
        outside = [name for name in vectors if name.endswith("weight")]
        return (outside or vectors)[-1]

    def _backwards(self) -> list[str]:
        """Parameters in the order of backward: the first wrong one is the nearest to the fault."""
        return list(self.state.placement.shards)[::-1]

    @property
    def _device(self) -> torch.device:
        device: torch.device = next(self.model.parameters()).device
        return device
