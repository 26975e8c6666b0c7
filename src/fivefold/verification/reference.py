"""The reference: the unmodified `transformers` model in one process, with each document as its own sequence.

It uses the model's attention and loss head, and torch's cross entropy, clipping and optimizers. With bf16, weights are
kept in fp32 and each document's gradient is added in fp32, as is usual in mixed precision.
"""

import copy
import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fractions import Fraction
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor

from fivefold.config import OptimizerSection
from fivefold.core.folder_config import noise
from fivefold.core.optimizers import kept_in
from fivefold.data.batch import Piece
from fivefold.models import hf_internals
from fivefold.models.experts import router_buffers
from fivefold.parallel.adapters.by_hand import Drawn, put_adapter
from fivefold.parallel.adapters.facts import adapted
from fivefold.parallel.balance.runtime import movable_biases
from fivefold.parallel.dtypes import COMPUTE_DTYPES, master_dtype
from fivefold.parallel.fp8.by_hand import put_matmuls
from fivefold.parallel.layout import Layout
from fivefold.parallel.loss.own import LossRow
from fivefold.parallel.nodes.by_hand import Reductions, Senders, senders, sent
from fivefold.parallel.plan import ParallelPlan
from fivefold.training.inputs import loss_at
from fivefold.training.optimizers import Weights, rule_for
from fivefold.verification import by_hand
from fivefold.verification.by_hand import Draws, exactly
from fivefold.verification.observer import by_row, watch
from fivefold.verification.proof_case import LEARNING_RATE, Documents, ProofCase, row_numbers, tokens_of

_IN_BLOCK = re.compile(r"\.\d+\.")  # the index in a list of layers
CLIP = 0.5  # of a step's gradient norm, so that clipping is active; its inverse in every second step, so that it is not


class ReferenceRun:
    """The model of a proof case in one process, and everything it computes."""

    def __init__(
        self, case: ProofCase, precision: str, device: str, *, noise: bool = False,
        model: torch.nn.Module | None = None, routers: Sequence[str] = (), plan: ParallelPlan | None = None,
        state_dtype: str = "fp32", layout: Layout | None = None,
    ) -> None:  # fmt: skip
        """`noise`: perturb the embedding by one ulp of `precision`. `model`: the unmodified model, which is copied;
        None: load it from the folder of the case. `routers`: those with counted and balanced load. `plan`: of one
        rank, which says how matmuls are multiplied. `state_dtype`: the type of the optimizer state. `layout`: whose
        ranks may round what they send of gradients."""
        self.state_dtype = state_dtype
        self.case, self.precision, self.device = case, precision, device
        self.compute_dtype = COMPUTE_DTYPES[precision]
        self.master = self._load(model, torch.float32).to(device, master_dtype(precision))
        self.master.config.use_cache = False
        self.model = self.master
        self.codes_gathers = plan is not None and plan.layout.gathers == "int8"
        if precision == "bf16":
            self.model = self._load(model, self.compute_dtype).to(device)
            routers_in_fp32(self.model)
        elif self.codes_gathers:  # with the master's buffers, such as the scale of an embedding
            self.model = copy.deepcopy(self.master)
        self.loss = loss_at(case.objective.path) if case.objective.is_own else None
        self.layout, self.facts = layout, adapted(plan.facts, case.adapter) if plan is not None else None
        self.reductions = Reductions(self.master, {})  # of the current batch
        self.scales = put_matmuls(self.model, plan) if plan else []
        factor = case.capacity_factor
        self.drops = None if factor is None else Drops(self.model, factor)
        self.draws = Draws(self.model, case.seed, case.neftune_noise_alpha) if self._has_dropout() else None
        self.loads = Loads(self.model, routers)
        self.balance = BalanceLosses(self.model, routers, load=case.aux_loss, z=case.z_loss)
        if noise:
            embedding = self.model.get_input_embeddings()
            embedding.register_forward_hook(lambda _, args, out: one_ulp(out))
        self.tensors: dict[str, Tensor] = {}
        self.dtypes: dict[str, str] = {}
        self.token_dims: dict[str, int] = {}
        self.limits: list[float] = []  # max gradient norms, step by step

    def _load(self, model: torch.nn.Module | None, dtype: torch.dtype) -> Any:
        if model is None:
            found = hf_internals.load_unmodified(self.case.folder, dtype)
        else:
            found = copy.deepcopy(model).to(dtype)
        if self.case.adapter is not None:
            drawn = Drawn(self.case.folder, self.case.adapter, self.case.seed)
            put_adapter(found, self.case.adapter, drawn.values, self.compute_dtype)
        if dict(noise(found.config.get_text_config().to_dict())):
            hf_internals.select_attention(found, "eager")  # which calls F.dropout
        return found.eval()

    def _has_dropout(self) -> bool:
        """True if training may drop anything, or draw noise."""
        of_adapter = self.case.adapter is not None and self.case.adapter.dropout > 0
        of_model = bool(dict(noise(self.master.config.get_text_config().to_dict())))
        return of_adapter or of_model or self.case.neftune_noise_alpha is not None

    @property
    def _evaluates_apart(self) -> bool:
        """True if training drops what evaluation keeps."""
        return self.drops is not None or self.draws is not None

    def run(self, inputs: list[str]) -> "ReferenceRun":
        """Compute everything, in order. `inputs`: modules whose input is kept as well."""
        self._keep("weight", trained(self.master))
        if self.case.objective.name == "distill":
            self._distillation()
        elif self.case.objective.has_answers:
            self._preference()
        for linear in self.scales:
            linear.now.clear()  # the objective's passes are no step
        optimizers = torch_optimizers(self.master, self.case.optimizer, LEARNING_RATE)
        losses, norms = [], []
        for step in range(self.case.steps):
            with exactly(self.precision):
                loss = self._gradients(step, inputs if step == 0 else None)
            norm = _total_norm([p.grad for p in self.master.parameters() if p.grad is not None])
            self.limits.append(self._limit(step, float(norm)))
            self._update(optimizers, norm, step)
            losses.append(loss)
            norms.append(float(norm))
        self._keep("last", trained(self.master))
        self.tensors["losses"] = torch.tensor(losses, dtype=torch.float64)
        self.tensors["norms"] = torch.tensor(norms, dtype=torch.float64)
        return self

    def _preference(self) -> None:
        """Compute the objective on pairs of answers with the first weights, and its gradient."""
        self._sync()
        self.balance.is_on = False  # without router losses
        with exactly(self.precision):
            sums, counts = by_hand.answer_log_probs(
                self.case, lambda ids: self.model(input_ids=ids.to(self.device)).logits, master_dtype(self.precision)
            )  # fmt: skip
            loss, metrics = by_hand.preference_loss(self.case, sums, counts)
            self._preference_gradients(loss, sums)
        self.balance.is_on = True
        numbers = {"log-probabilities": sums, "loss": loss.reshape(1), "metrics": metrics}
        self._keep("preference", {name: number.double() for name, number in numbers.items()})
        self._keep("objective", {name: p.grad for name, p in self.master.named_parameters()})
        self.master.zero_grad(set_to_none=True)

    def _preference_gradients(self, loss: Tensor, sums: Tensor) -> None:
        """Add up the gradients of the pairs row by row, as reductions may round those of some rows."""
        rows = self.case.pairs()
        self._begin_reductions(rows)
        (of_sums,) = torch.autograd.grad(loss, sums, retain_graph=True)
        for row, pieces in enumerate(rows):
            pairs = sorted({piece.pair for piece in pieces})
            if pairs:
                (sums[pairs] * of_sums[pairs]).sum().backward(retain_graph=True)  # type: ignore[no-untyped-call]
                self._collect(row)
        self.reductions.end()

    def _distillation(self) -> None:
        """Compute the top-k queries with the model as its own teacher; the loss against another, and its gradient."""
        self._sync()
        self.balance.is_on = False
        count, summed = self.case.targets(0), 0.0
        self._begin_reductions(self.case.documents(0))
        asked = torch.zeros(self.case.rows, self.case.row_length, self.case.followed, dtype=torch.float64)
        for row, start, ids, targets in self._sequences(self.case.documents(0)):
            with exactly(self.precision):
                logits = self.model(input_ids=ids[None]).logits[0].to(master_dtype(self.precision))
                loss = by_hand.distillation_loss(self.case, logits[: len(targets)], targets, row, start)
                (loss / count).backward()  # type: ignore[no-untyped-call]
            self._collect(row)
            summed += loss.item()
            asked[row, start : start + len(ids)] = by_hand.top_log_probs(self.case, logits.detach()).cpu()
        self.reductions.end()
        self.balance.is_on = True
        self._keep("teacher", {"asked": asked, "loss": torch.tensor([summed / count], dtype=torch.float64)})
        self._keep("objective", {name: p.grad for name, p in self.master.named_parameters()})
        self.master.zero_grad(set_to_none=True)

    def _limit(self, step: int, norm: float) -> float:
        """The norm to which a step's gradient is clipped."""
        most = self.case.max_grad_norm
        if most is None:
            return norm * (CLIP if step % 2 == 0 else 1 / CLIP)
        return most or math.inf

    def before(self) -> "ReferenceRun":
        """Compute the continuations of the prompts, which need the first weights."""
        self._sync()
        with exactly(self.precision), torch.no_grad():
            each = [self._continue(torch.from_numpy(ids).to(self.device)) for ids in self.case.prompt_tokens()]
        empty = torch.zeros(0, self.case.new_tokens)
        for key, values in zip(("greedy", "margins"), zip(*each, strict=True) if each else ((), ()), strict=True):
            self.tensors[key] = torch.stack(values) if values else empty
        return self

    def _continue(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Continue greedily. Returns the tokens, and the margin of each logit over the next best."""
        prompt, margins = len(ids), []
        for _ in range(self.case.new_tokens):
            logits = self.model(input_ids=ids[None]).logits[0, -1]
            best = logits.double().topk(2).values
            margins.append(best[0] - best[1])
            ids = torch.cat([ids, logits.argmax().reshape(1)])
        return ids[prompt:].cpu(), torch.stack(margins).cpu()

    def _keep(self, kind: str, named: Mapping[str, Tensor | None]) -> None:
        for name, tensor in named.items():
            if tensor is not None:
                self.tensors[f"{kind}/{name}"] = tensor.detach().cpu().clone()

    def _sync(self) -> None:
        """Copy the current master weights into the model that computes."""
        if self.model is not self.master:
            with torch.no_grad():
                for mine, kept in zip(self.model.parameters(), self.master.parameters(), strict=True):
                    cast = sent if self.codes_gathers else Tensor.to
                    mine.copy_(cast(kept, self.compute_dtype))
                for name in router_buffers(self.master):
                    self.model.get_buffer(name).copy_(self.master.get_buffer(name))

    def _gradients(self, step: int, inputs: list[str] | None) -> float:
        """Compute loss and gradients of a global batch by document. `inputs`: also record all modules; None: do not."""
        self._sync()
        count, summed = self.case.targets(step), 0.0
        self.loads.begin()
        batch = self.case.documents(step)
        self._count_picks(batch, step)
        self._begin_reductions(batch)
        seen = None if inputs is None else DocumentRecorder(self, inputs)
        for row, start, ids, targets in self._training_sequences(batch, step):
            if seen:
                seen.begin(row, start, len(ids))
            logits = self.model(input_ids=ids[None]).logits[0]
            if seen:
                seen.put("logits", row, start, logits)
            loss = self._summed(logits, targets, ids, columns_at(batch[row], start))
            summed += loss.item()
            (loss / count + self.balance.of_document()).backward()  # type: ignore[no-untyped-call]
            self._collect(row)
        self.reductions.end()
        if seen:
            seen.finish()
            self._keep("gradient", {name: p.grad for name, p in self.master.named_parameters()})
            self._keep("raw", self.reductions.unrounded)
        if seen and self._evaluates_apart:  # logits are those of evaluation, which drops nothing
            with torch.no_grad():
                for row, start, ids, _ in self._sequences(batch):
                    logits = self.model(input_ids=ids[None]).logits[0]
                    self.tensors["logits"][row, start : start + len(ids)] = logits.cpu()
        if seen:
            self.tensors["evaluated"] = self._evaluated()
        return summed / count

    def _summed(self, logits: Tensor, targets: Tensor, ids: Tensor, columns: Mapping[str, float]) -> Tensor:
        """The loss of a document, summed over its targets: cross entropy, or the function of the user's own, which gets
        the document's `columns`."""
        rows = logits[: len(targets)].to(master_dtype(self.precision))
        if self.loss is None:
            return F.cross_entropy(rows, targets, reduction="sum")
        is_trained = targets != -100
        if not is_trained.any():
            return rows.sum() * 0
        numbers = {name: torch.full_like(rows[:, 0], number).detach() for name, number in columns.items()}
        row = LossRow(ids[: len(targets)], torch.arange(len(targets), device=ids.device), numbers)
        losses: Tensor = self.loss.call(rows[is_trained], targets[is_trained], row.at(is_trained))
        return losses.sum()

    def _count_picks(self, batch: Documents, step: int) -> None:
        """Count each row's picks per expert: router losses need whole rows before their documents are computed."""
        self.balance.begin([tokens_of(documents) for documents in batch])
        if self.balance.routers:
            with torch.no_grad():
                for _, _, ids, _ in self._training_sequences(batch, step):
                    self.model(input_ids=ids[None])

    def _training_sequences(self, batch: Documents, step: int) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield `_sequences`, and set the row for the router losses and the capacity before its first document, and
        the document for dropout."""
        with self.draws.training(step) if self.draws else nullcontext():
            for row, start, ids, targets in self._sequences(batch):
                self.balance.row = row
                if self.drops and start == 0:
                    self.drops.row(tokens_of(batch[row]))
                if self.draws:
                    self.draws.begin(row, start)
                yield row, start, ids, targets
        if self.drops:
            self.drops.row(None)

    def _evaluated(self) -> Tensor:
        """The loss of the first batch from its logits, for which no capacity drops anything."""
        summed = torch.zeros((), dtype=torch.float64)
        for row, start, ids, targets in self._sequences(self.case.documents(0)):
            logits = self.tensors["logits"][row, start : start + len(ids)]
            columns = columns_at(self.case.documents(0)[row], start)
            summed += self._summed(logits, targets.cpu(), ids.cpu(), columns)
        return summed / self.case.targets(0)

    def _sequences(self, batch: Documents) -> Iterator[tuple[int, int, Tensor, Tensor]]:
        """Yield each document's row, start in the row, tokens and targets, with -100 for untrained targets."""
        for row, documents in enumerate(batch):
            start = 0
            for document in documents:
                ids, targets = (
                    torch.from_numpy(array.astype("int64")) for array in (document.tokens, document.targets)
                )
                if document.trained is not None:
                    targets[torch.from_numpy(~document.trained)] = -100  # ignored by `cross_entropy`
                yield row, start, ids.to(self.device), targets.to(self.device)
                start += len(ids)

    def _begin_reductions(self, documents: Documents) -> None:
        """Begin the gradients of a batch."""
        by_parameter: Senders = {}
        if self.layout is not None and self.facts is not None:
            shared = [
                row_numbers(documents, self.layout, rank, self.case.row_length, balance=self.case.balance_rows)
                for rank in range(self.layout.data_ranks)
            ]
            by_parameter = senders(self.facts, self.layout, shared)
        self.reductions = Reductions(self.master, by_parameter)

    def _collect(self, row: int) -> None:
        """Add the gradients of the model that computes, of a document of `row`, to those of its master weights."""
        pairs = zip(self.model.parameters(), self.master.parameters(), strict=True)
        for mine, kept in pairs if self.model is not self.master else ():
            if mine.grad is not None:
                gradient = mine.grad.to(self.compute_dtype).to(kept.dtype)  # a router's gradient is fp32
                kept.grad = gradient if kept.grad is None else kept.grad + gradient
                mine.grad = None
        self.reductions.take(row)

    def _update(self, optimizers: list[torch.optim.Optimizer], norm: Tensor, step: int) -> None:
        parameters, is_first = dict(self.master.named_parameters()), step == 0
        torch.nn.utils.clip_grads_with_norm_(self.master.parameters(), self.limits[step], norm)
        before = {name: p.detach().clone() for name, p in trained(self.master).items()} if is_first else {}
        if step < 2:
            self._keep(("clipped", "second")[step], {name: p.grad for name, p in parameters.items()})
        # torch's Muon iterates in bf16; ours in the compute dtype
        keep_type = patch.object(Tensor, "bfloat16", Tensor.clone)
        with keep_type if self.precision != "bf16" else nullcontext():
            for optimizer in optimizers:
                optimizer.step()
        self._keep_state(optimizers, step + 1)
        for linear in self.scales:
            linear.end_step()
        self.loads.move(self.master, self.case.bias_rate)
        if is_first:
            if self.balance.routers:
                self.tensors["balance"] = self.balance.values
            self._keep("update", {name: p.detach() - before[name] for name, p in trained(self.master).items()})
            self._keep("load", self.loads.counts)
            for optimizer in optimizers:
                for name, parameter in parameters.items():
                    for kind, value in per_element(optimizer, parameter).items():
                        self._keep(kind, {name: value})
        self.master.zero_grad()

    def _keep_state(self, optimizers: list[torch.optim.Optimizer], steps: int) -> None:
        """Round the optimizers' state after `steps` steps to the types in which it is kept."""
        dims = dims_of(self.master)
        for name, parameter in self.master.named_parameters():
            dtype = kept_in(self.state_dtype, parameter.shape, dims[name])
            for optimizer in optimizers:
                for kind, value in per_element(optimizer, parameter).items():
                    value.copy_(by_hand.kept_state(value, name, kind, steps, dtype))


def per_element(optimizer: torch.optim.Optimizer, parameter: Tensor) -> dict[str, Tensor]:
    """The optimizer's state of a parameter that has its shape."""
    state = optimizer.state.get(parameter, {}).items()
    return {
        kind: value
        for kind, value in state
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim
    }


def columns_at(documents: Sequence[Piece], start: int) -> Mapping[str, float]:
    """Columns of the document of a row that begins at `start`."""
    starts = itertools.accumulate((len(document.tokens) for document in documents), initial=0)
    return documents[[*starts].index(start)].columns


def _total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """The total norm in fp64: torch's own, summed in fp32 on a CPU, was 6e-4 too small for 15 million values."""
    norms = [torch.linalg.vector_norm(gradient, dtype=torch.float64) for gradient in gradients]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return total


def trained(model: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors that steps change, by name: parameters and router buffers."""
    return {**dict(model.named_parameters()), **{name: model.get_buffer(name) for name in router_buffers(model)}}


def torch_optimizers(
    model: torch.nn.Module, options: OptimizerSection, learning_rate: float
) -> list[torch.optim.Optimizer]:
    """The reference optimizers for `options` over a whole model in one process."""
    parameters: Mapping[str, Tensor] = dict(model.named_parameters())
    dims = dims_of(model)
    in_blocks = [p for n, p in parameters.items() if p.ndim == dims[n] == 2 and _IN_BLOCK.search(n)]
    own = {id(p) for p in in_blocks}
    matrices = [p for name, p in parameters.items() if dims[name] > 1 and id(p) not in own]
    vectors = [p for name, p in parameters.items() if dims[name] <= 1]
    return rule_for(options).reference(Weights(in_blocks, matrices, vectors), options, learning_rate)


def dims_of(model: torch.nn.Module) -> dict[str, int]:
    """The number of dimensions of every parameter; for stacked experts that of a single one."""
    experts = tuple(f"{name}." for name, module in model.named_modules() if hf_internals.is_experts(module))
    return {name: p.ndim - name.startswith(experts) for name, p in model.named_parameters()}


class DocumentRecorder:
    """Records module outputs by document, each at its place in the packed rows."""

    def __init__(self, reference: ReferenceRun, inputs: list[str]) -> None:
        self._reference = reference
        self._grids: dict[str, Tensor] = {}
        self._token_dims: dict[str, set[int]] = {}
        self._row = self._start = self._length = 0  # of the current document
        self._seen: set[str] = set()
        self._repeated: set[str] = set()  # modules that run more than once in a pass (Gemma 3's rotary tables)
        head = reference.model.get_output_embeddings()  # its outputs are recorded as `logits`
        names = [name for name, module in reference.model.named_modules() if name and module is not head]
        self._handles = watch(reference.model, names, inputs, self._note)

    def begin(self, row: int, start: int, length: int) -> None:
        """Begin the forward pass of the document of `length` tokens at `start` of `row`."""
        self._row, self._start, self._length, self._seen = row, start, length, set()

    def finish(self) -> None:
        """Remove the hooks, and give the reference the records of modules that run once per pass, on tokens."""
        for handle in self._handles:
            handle.remove()
        dims = {name: dims for name, dims in self._token_dims.items() if dims and name not in self._repeated}
        self._reference.token_dims = {name: _token_dim(order) for name, order in dims.items()}
        self._reference.tensors |= {
            key: grid for key, grid in self._grids.items() if key == "logits" or key.partition("/")[2] in dims
        }

    def put(self, key: str, row: int, start: int, values: Tensor) -> None:
        """Store `values` [n, F] of a document, unless F differs from the first document's."""
        case, (length, features) = self._reference.case, values.shape
        if key not in self._grids:
            self._grids[key] = torch.zeros(case.rows, case.row_length, features, dtype=values.dtype)
        if self._grids[key].shape[2] == features:
            self._grids[key][row, start : start + length] = values.detach().cpu()

    def _note(self, name: str, values: Tensor) -> None:
        if name in self._seen:
            self._repeated.add(name)
        if not values.is_floating_point() or name in self._seen:
            return
        self._seen.add(name)
        length = self._length
        dims = {dim for dim in (1, 2) if values.ndim > dim and values.shape[0] == 1 and values.shape[dim] == length}
        if values.ndim > 1 and values.shape[0] == length:
            dims.add(0)
        self._token_dims[name] = self._token_dims.get(name, {0, 1, 2}) & dims
        self._reference.dtypes[name] = str(values.dtype)
        if not self._token_dims[name]:
            return
        dim, put = _token_dim(self._token_dims[name]), partial(self.put, row=self._row, start=self._start)
        put(f"output/{name}", values=by_row(values, dim, 1)[0])
        if values.requires_grad:
            values.register_hook(  # type: ignore[no-untyped-call]
                lambda gradient: put(f"backward/{name}", values=by_row(gradient, dim, 1)[0])
            )


def _token_dim(dims: set[int]) -> int:
    """The token dimension among the candidates; 0, rows and tokens in one, only if there is no other."""
    return min(dims - {0}, default=0)


def routers(model: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """The routers, each with its number of experts: siblings of a module of experts with one row of weights each."""
    found = []
    for name, module in model.named_modules():
        if hf_internals.is_experts(module):
            experts = len(next(module.parameters()))
            beside = [child for child in model.get_submodule(name.rpartition(".")[0]).children() if child is not module]
            found += [(module, experts) for module in beside if _has_row_for_each(module, experts)]
    return found


def _has_row_for_each(module: torch.nn.Module, experts: int) -> bool:
    return any(weight.ndim == 2 and len(weight) == experts for weight in module.parameters())


class Drops:
    """Applies a capacity pick by pick, in the order of the text. In an active row the routers of `model` zero the
    weight of a pick whose expert already has `factor` times its even share of the row (rounded up)."""

    def __init__(self, model: torch.nn.Module, factor: float) -> None:
        self._factor = Fraction(str(factor))
        self._tokens: int | None = None
        self._taken: dict[int, list[int]] = {}
        for number, (router, experts) in enumerate(routers(model)):
            router.register_forward_hook(partial(self._after, number, experts))

    def row(self, tokens: int | None) -> None:
        """Begin a row of `tokens` tokens; None: drop nothing from now on."""
        self._tokens, self._taken = tokens, {}

    def _after(self, number: int, experts: int, _module: Any, _args: Any, out: Any) -> Any:
        if self._tokens is None or not isinstance(out, tuple):
            return None
        logits, weights, index = out
        most = math.ceil(self._factor * index.shape[-1] * self._tokens / experts)
        taken = self._taken.setdefault(number, [0] * experts)
        kept = torch.zeros_like(weights)
        for token, picks in enumerate(index.tolist()):
            for pick, expert in enumerate(picks):
                if taken[expert] < most:
                    taken[expert] += 1
                    kept[token, pick] = 1
        return logits, weights * kept, index


class Loads:
    """Counts the tokens that each of `routers` (names) sends to each expert in training, and moves their biases: up by
    a fixed step for an expert below the mean, down for one above it (arXiv:2408.15664)."""

    def __init__(self, model: torch.nn.Module, routers: Sequence[str]) -> None:
        self.counts: dict[str, Tensor] = {}  # in the current step: router -> [experts], fp64
        self._routers = routers
        for name in routers:
            model.get_submodule(name).register_forward_hook(partial(self._after, name))

    def begin(self) -> None:
        """Begin a step."""
        self.counts = {}

    def move(self, model: torch.nn.Module, rate: float) -> None:
        """Move the bias of every router of `model`, if they have one."""
        for name, router in zip(movable_biases(self._routers, router_buffers(model)), self._routers, strict=False):
            counts = self.counts[router]
            bias = model.get_buffer(name)
            bias += rate * torch.sign(counts.mean() - counts).to(bias)

    def _after(self, name: str, _module: Any, _args: Any, out: Any) -> None:
        if torch.is_grad_enabled():
            index = next(tensor for tensor in out if not tensor.is_floating_point())
            counts = torch.bincount(index.flatten(), minlength=out[0].shape[-1]).double()
            self.counts[name] = self.counts[name] + counts if name in self.counts else counts


class BalanceLosses:
    """The losses of `routers` (names), here for one row and one router; their sum over a global batch of R rows and L
    routers is divided by R L. A row has T tokens and n_e picks of expert e; p_te is the probability of e:

        load    E * sum_e n_e / T * sum_t p_te / T    (arXiv:2101.03961)
        z       sum_t logsumexp(logits_t)^2 / T       (arXiv:2202.08906)

    n_e has no gradient. A document adds its own tokens t, so n_e of the row is counted first, by passes without
    gradients.
    """

    def __init__(self, model: torch.nn.Module, routers: Sequence[str], *, load: float, z: float) -> None:
        self.row = 0  # of the current document
        self.is_on = True
        self.routers = routers if load or z else ()
        self.values = torch.zeros(2, dtype=torch.float64)  # of the current step, without the coefficients: load, z
        self._load, self._z = load, z
        self._lengths: Sequence[int] = ()
        self._picks: dict[tuple[str, int], Tensor] = {}  # router, row -> n_e
        self._terms: list[Tensor] = []  # of the current document: [load, z] of each router
        for name in self.routers:
            model.get_submodule(name).register_forward_hook(partial(self._after, name))

    def begin(self, lengths: Sequence[int]) -> None:
        """Begin a step whose rows have `lengths` tokens."""
        self._lengths, self._picks, self._terms = lengths, {}, []
        self.values = torch.zeros(2, dtype=torch.float64)

    def of_document(self) -> Tensor | float:
        """The contribution of the document just computed to the loss."""
        if not self._terms:
            return 0.0
        terms = torch.stack(self._terms).sum(0) / (len(self._lengths) * len(self.routers))
        self._terms = []
        self.values += terms.detach().cpu()
        return (terms * terms.new_tensor([self._load, self._z])).sum()

    def _after(self, name: str, module: torch.nn.Module, _args: Any, out: Any) -> None:
        if not self.is_on:
            return
        logits, index = out[0], next(tensor for tensor in out if not tensor.is_floating_point())
        logits_TE = logits.reshape(-1, logits.shape[-1])
        experts = logits_TE.shape[1]
        if not torch.is_grad_enabled():
            picks = torch.bincount(index.flatten(), minlength=experts).double()
            self._picks[name, self.row] = self._picks.get((name, self.row), 0) + picks
            return
        scores_TE = logits_TE.sigmoid() if hasattr(module, "e_score_correction_bias") else logits_TE.softmax(-1)
        p_TE = scores_TE / scores_TE.sum(-1, keepdim=True)
        tokens = self._lengths[self.row]
        load = experts * (self._picks[name, self.row] / tokens * p_TE.double().sum(0) / tokens).sum()
        z = logits_TE.logsumexp(-1).square().double().sum() / tokens
        self._terms.append(torch.stack([load, z]))


def routers_in_fp32(model: torch.nn.Module) -> None:
    """Make the routers of a 16-bit model compute in fp32, from 16-bit weights and hidden states. Otherwise tokens near
    a tie would go elsewhere."""
    for router, _ in routers(model):
        router.float().register_forward_pre_hook(lambda _, args: tuple(arg.float() for arg in args))


def one_ulp(values: Tensor) -> Tensor:
    """Make each of `values` one unit in the last place larger or smaller, at random."""
    signs = torch.randint(0, 2, values.shape, generator=torch.Generator().manual_seed(0)).to(values.device) * 2 - 1
    return values * (1 + signs.to(values.dtype) * torch.finfo(values.dtype).eps)


@contextmanager
def reassociated() -> Iterator[None]:
    """Make every linear sum its products in two halves inside the block: the same numbers in another order."""
    plain = F.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        half = weight.shape[1] // 2
        if half == 0:
            return plain(x, weight, bias)
        out = plain(x[..., half:], weight[:, half:]) + plain(x[..., :half], weight[:, :half])
        return out if bias is None else out + bias

    with patch.object(F, "linear", linear):
        yield
