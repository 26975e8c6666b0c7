"""The reference of what the unmodified model lacks, each computed by other code than the one that trains.

- fp64 everywhere: operations that models compute in fp32 on purpose would put a floor of 1e-7 under every proof.
- Objectives besides cross entropy, with autograd through the whole formula, for `training/preference.py` and
  `parallel/loss/runtime.py`, which uses only a teacher's top-k tokens. Preferences are as in their papers, and in TRL.
- Dropout for `parallel/dropout/`, element by element in Python's and numpy's integers. `F.dropout` and
  `Tensor.uniform_` are served while the model trains. The site of a call follows from the running module: an
  `nn.Dropout`, a linear whose adapter's input is dropped, an attention whose probabilities [1, H, T, T] are dropped, or
  a module that calls these functions itself. A hook adds NEFTune's noise to the embeddings.
- Optimizer state in bf16 or 8 bits: every number is rounded by a search in a table, with random numbers of numpy. It
  shares only the block length and the choice of a parameter's type with `training/optimizers/states.py`.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache, partial
from typing import Any
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fivefold.core.optimizers import StateDtype, block_length
from fivefold.data.batch import IGNORE, MicroBatch, TeacherTargets
from fivefold.models.hf_internals import linear_dims
from fivefold.ops.dropout import CallsServed
from fivefold.verification.proof_case import ProofCase


@contextmanager
def exact() -> Iterator[None]:
    """Compute in fp64 inside the block what models compute in fp32 on purpose (norms, softmax)."""

    def instead(plain: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            return plain(*args, **{k: torch.float64 if v is torch.float32 else v for k, v in kwargs.items()})

        return call

    with (
        patch.object(torch.Tensor, "to", instead(torch.Tensor.to)),
        patch.object(torch.Tensor, "type", instead(torch.Tensor.type)),
        patch.object(torch.Tensor, "float", torch.Tensor.double),
        patch.object(nn.functional, "softmax", instead(nn.functional.softmax)),
        patch.object(torch, "sum", instead(torch.sum)),
    ):
        yield


def exactly(precision: str) -> AbstractContextManager[None]:
    """`exact` if `precision` is fp64; else a no-op."""
    return exact() if precision == "fp64" else nullcontext()


# ---- objectives on pairs of answers ----------------------------------------------------------------------------------


def answer_log_probs(
    case: ProofCase, logits_of: Callable[[Tensor], Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Summed log-probabilities of the answers and their numbers of tokens, [P, 2] each. `logits_of`: [B, T] ->
    [B, T, V] for sequences; each answer is one. Both answers of a whole row are computed together, because
    scales of matmuls span a row."""
    sums, counts = [], []
    batches = (
        [[*row] for row in case.pairs() if row] if case.whole_rows else [[it] for row in case.pairs() for it in row]
    )
    for batch in batches:
        ids_BT = torch.stack([torch.from_numpy(piece.tokens.astype("int64")) for piece in batch])
        found_BTV = logits_of(ids_BT)[:, :-1].to(dtype).log_softmax(-1)
        for piece, ids, found in zip(batch, ids_BT, found_BTV, strict=True):
            assert piece.trained is not None
            of_targets = found.gather(-1, ids[1:, None].to(found.device))[:, 0]
            sums.append(of_targets[torch.from_numpy(piece.trained).to(found.device)].sum())
            counts.append(int(piece.trained.sum()))
    return torch.stack(sums).view(-1, 2), torch.tensor(counts, dtype=dtype, device=sums[0].device).view(-1, 2)


def preference_loss(case: ProofCase, sums: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """The mean loss over pairs, and the means of the metrics: rewards of the chosen and the rejected answers, the
    margin, the accuracy, and their log-probabilities, in the order of `objectives.METRICS`. Raises `ValueError` for an
    objective without a formula."""
    name = case.objective.name
    if name in RATED:
        return RATED[name](case, sums)
    if name not in PAIRS:
        raise ValueError(f"{name} has no formula by hand: write it in PAIRS or RATED of verification/by_hand.py")
    each, rewards, shown = PAIRS[name](case, sums, sums / counts, counts)
    margin = rewards[:, 0] - rewards[:, 1]
    told = [rewards[:, 0], rewards[:, 1], margin, (margin > 0).to(margin), shown[:, 0], shown[:, 1]]
    return each.mean(), torch.stack([number.detach().mean() for number in told])


# Arguments of a formula: the case; log-probabilities of answers, their means over tokens, numbers of tokens, [P, 2]
# each. Results: the loss of each pair [P]; the rewards, and the log-probabilities of metrics, [P, 2].
Formula = Callable[[ProofCase, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def _before(case: ProofCase, sums: Tensor) -> Tensor:
    return torch.from_numpy(case.compared_with()).to(sums)


def _dpo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gains = sums - _before(case, sums)
    return -F.logsigmoid(case.objective.beta * (gains[:, 0] - gains[:, 1])), case.objective.beta * gains, sums


def _ipo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    before = _before(case, sums)
    gains = means - before / counts
    return (gains[:, 0] - gains[:, 1] - 1 / (2 * case.objective.beta)) ** 2, case.objective.beta * (sums - before), sums


def _simpo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    each = -F.logsigmoid(case.objective.beta * (means[:, 0] - means[:, 1] - case.objective.gamma / case.objective.beta))
    return each, case.objective.beta * means, means


def _orpo(case: ProofCase, sums: Tensor, means: Tensor, counts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    ratio = torch.log1p(-means[:, 0].exp()) - torch.log1p(-means[:, 1].exp())
    each = -means[:, 0] - case.objective.beta * F.logsigmoid(means[:, 0] - means[:, 1] - ratio)
    return each, case.objective.beta * means, means


PAIRS: dict[str, Formula] = {"dpo": _dpo, "ipo": _ipo, "simpo": _simpo, "orpo": _orpo}


def _kto(case: ProofCase, sums: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of KTO, and its metrics in the order of `objectives.RATED_METRICS`."""
    gains = sums - _before(case, sums)
    baseline = gains[:, 1].detach().mean().clamp(min=0)
    ratings = [piece.desirable for row in case.pairs() for piece in row if piece.answer == 0]
    good = [number for number, rating in enumerate(ratings) if rating]
    bad = [number for number, rating in enumerate(ratings) if not rating]
    liked = case.objective.desirable_weight * (1 - torch.sigmoid(case.objective.beta * (gains[good, 0] - baseline)))
    disliked = case.objective.undesirable_weight * (1 - torch.sigmoid(case.objective.beta * (baseline - gains[bad, 0])))
    means = [
        rows.detach()[numbers, 0].mean() for rows in (case.objective.beta * gains, sums) for numbers in (good, bad)
    ]
    return torch.cat([liked, disliked]).mean(), torch.stack([*means, means[0] - means[1], baseline])


RATED: dict[str, Callable[[ProofCase, Tensor], tuple[Tensor, Tensor]]] = {"kto": _kto}


# ---- distillation: both softmaxes over the whole vocabulary ----------------------------------------------------------


def teacher_row(case: ProofCase, row: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """The random output of a teacher other than the model of the case at the positions of a row: tokens and
    log-probabilities [T, K], the likeliest first."""
    rng = np.random.default_rng([case.seed, 1_000_039, row])
    shape = (case.row_length, case.vocabulary)
    logits = torch.from_numpy(rng.normal(0, 2, shape))
    top = logits.log_softmax(-1).topk(case.followed)
    return top.indices.numpy(), top.values.numpy()


def teacher_targets(case: ProofCase, batch: MicroBatch, rows: list[int]) -> TeacherTargets:
    """That teacher's output at the targets of a micro batch with these rows."""
    shape = (*batch.labels.shape, case.followed)
    tokens, log_probs = np.zeros(shape, np.int32), np.zeros(shape)
    for b, row in enumerate(rows):
        at = np.flatnonzero(batch.labels[b] != IGNORE)
        tokens[b, at], log_probs[b, at] = (array[at] for array in teacher_row(case, row))
    return TeacherTargets(tokens, log_probs, case.objective.temperature, case.objective.alpha)


def distillation_loss(case: ProofCase, logits: Tensor, targets: Tensor, row: int, start: int) -> Tensor:
    """The loss summed over the targets [n] of a document that begins at `start` of its row. `logits`: [n, V]."""
    at = slice(start, start + len(targets))
    tokens, log_probs = (torch.from_numpy(array[at]).to(logits.device) for array in teacher_row(case, row))
    wanted = torch.zeros_like(logits).scatter(
        -1, tokens, (log_probs / case.objective.temperature).softmax(-1).to(logits)
    )
    own = (logits / case.objective.temperature).log_softmax(-1)
    apart = F.kl_div(own, wanted, reduction="none").sum(-1)[targets != IGNORE].sum()
    text = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORE)
    return case.objective.alpha * case.objective.temperature**2 * apart + (1 - case.objective.alpha) * text


def top_log_probs(case: ProofCase, logits: Tensor) -> Tensor:
    """Log-probabilities of a model's own top-k tokens, [..., V] -> [..., K]."""
    return logits.log_softmax(-1).topk(case.followed).values


# ---- dropout ---------------------------------------------------------------------------------------------------------


U32 = np.uint32


class Draws:
    """Masks of `model` in training. `row` and `start` are those of the current document, `step` that of the batch."""

    def __init__(self, model: Any, seed: int, neftune: float | None = None) -> None:
        self.row = self.start = self.step = 0
        self._model, self._seed = model, seed
        self._running: list[tuple[str, nn.Module]] = []
        self._calls: dict[str, int] = {}
        for name, module in model.named_modules():
            module.register_forward_pre_hook(lambda module, _, name=name: self._running.append((name, module)))
            module.register_forward_hook(lambda *_: self._running.pop() and None)
            if neftune and module is model.get_input_embeddings():
                module.register_forward_hook(partial(self._add_noise, f"{name}/embedding0", neftune))

    @contextmanager
    def training(self, step: int) -> Iterator[None]:
        """Let the model drop in this context, in the batch of `step`."""
        self.step = step
        self._model.train()
        try:
            with CallsServed(self._dropout, self._uniform):
                yield
        finally:
            self._model.eval()

    def begin(self, row: int, start: int) -> None:
        self.row, self.start, self._calls = row, start, {}

    def _dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        if not training or p == 0:
            return x
        if x.ndim == 4 and x.shape[-1] == x.shape[-2]:
            name = next(name for name, module in reversed(self._running) if not isinstance(module, nn.Dropout))
            bits = self._of_attention(f"{name}/attention0", *x.shape[1:3])
        else:
            bits = self._of_features(self.site(*self._running[-1]), x.numel() // x.shape[-1], x.shape[-1])
        kept = torch.from_numpy(bits >> U32(1) >= round(p * 2**31)).view(x.shape).to(x.device)
        return torch.where(kept, x / (1 - p), torch.zeros_like(x))

    def _add_noise(self, site: str, alpha: float, module: nn.Module, _: Any, x: Tensor) -> Tensor:
        """NEFTune (arXiv:2310.05914), of one document."""
        if not module.training:
            return x
        bits = self._of_features(site, x.numel() // x.shape[-1], x.shape[-1])
        noise = (bits / 2.0**31 - 1) * alpha / np.sqrt(x.numel())
        return x + torch.from_numpy(noise).view(x.shape).to(x)

    def _uniform(self, x: Tensor, low: float = 0.0, high: float = 1.0) -> Tensor:
        """Fill a tensor: of hidden states by numbers, another one by PyTorch."""
        if x.shape[-1] != self._model.config.get_text_config().hidden_size:
            return x.uniform_(low, high)
        site = self._numbered(self._running[-1][0], "noise")
        bits = self._of_features(site, x.numel() // x.shape[-1], x.shape[-1])
        drawn = low + (high - low) * (bits / 2.0**32)
        return x.copy_(torch.from_numpy(drawn).view(x.shape))

    def site(self, name: str, module: nn.Module) -> str:
        """Name of the site of this call in a running module."""
        kind = "module" if isinstance(module, nn.Dropout) else "call" if linear_dims(module) is None else "branch"
        return self._numbered(name, kind)

    def _numbered(self, name: str, kind: str) -> str:
        number = self._calls.get(f"{name}/{kind}", 0)
        self._calls[f"{name}/{kind}"] = number + 1
        return f"{name}/{kind}{number}"

    def _of_features(self, site: str, tokens: int, features: int) -> np.ndarray:
        of_token = _odd(self._tokens(tokens) ^ _key(self._seed, site))
        of_feature = _odd(np.arange(features, dtype=U32) * U32(0x9E3779B9) ^ _key(self._seed, site, "features"))
        return _unsigned(of_token[:, None] * of_feature)

    def _of_attention(self, site: str, heads: int, tokens: int) -> np.ndarray:
        hashes, key = self._tokens(tokens), _key(self._seed, site)
        of_head = _odd(np.arange(heads, dtype=U32) * U32(0x9E3779B9) ^ _key(self._seed, site, "features"))
        of_query, of_key = _odd(hashes ^ key), _odd(_mixed(hashes ^ ~key)[None] ^ of_head[:, None])
        return _unsigned(of_query[None, :, None] * of_key[:, None, :])

    def _tokens(self, tokens: int) -> np.ndarray:
        of_row = _mixed(np.array([self.row], U32) * U32(0x9E3779B9) ^ _key(self._seed, self.step))
        return _mixed(of_row + np.arange(self.start, self.start + tokens, dtype=U32) * U32(0x9E3779B9))


def _key(*parts: Any) -> np.uint32:
    return U32(int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=4).digest(), "big"))


def _mixed(bits: np.ndarray) -> np.ndarray:
    bits = (bits ^ (bits >> U32(16))) * U32(0x21F0AAAD)
    bits = (bits ^ (bits >> U32(15))) * U32(0xD35A2D97)
    found: np.ndarray = bits ^ (bits >> U32(15))
    return found


def _odd(bits: np.ndarray) -> np.ndarray:
    return _mixed(bits) | U32(1)


def _unsigned(bits: np.ndarray) -> np.ndarray:
    turned: np.ndarray = bits ^ U32(2**31)
    return turned


# ---- optimizer state -------------------------------------------------------------------------------------------------


_WORDS = np.arange(0x7F80, dtype=np.uint32) << np.uint32(16)  # all bf16 below infinity, as the upper half of fp32


def kept_state(values: Tensor, name: str, kind: str, step: int, dtype: StateDtype) -> Tensor:
    """Round a kind of state of the whole parameter `name` after `step` steps; the result has the type of `values`."""
    if dtype == "fp32":
        return values
    rows = values.detach().cpu().reshape(-1, values.shape[-1])
    at_random = uniform(name, step, *rows.shape) if kind == "exp_avg_sq" else None
    if dtype == "bf16":
        chance = None if at_random is None else 1 - at_random  # to match `states.py`, where large numbers round up
        left = _rounded(rows.to(torch.float32).double(), numbers_of_bf16(), chance)
    else:
        left = _in_blocks(rows, at_random)
    return left.to(values.dtype).view_as(values).to(values.device)


def _in_blocks(rows: Tensor, at_random: Tensor | None) -> Tensor:
    table = tree(signed=at_random is None).to(rows.dtype)
    found = torch.zeros_like(rows)
    length = block_length(rows.shape[-1])
    for first in range(0, rows.shape[-1], length):
        block = slice(first, first + length)
        largest = rows[:, block].abs().max(1, keepdim=True).values
        parts = rows[:, block] / largest.masked_fill(largest == 0, 1)
        left = _rounded(parts, table, None if at_random is None else at_random[:, block])
        if at_random is not None:
            left = torch.where((parts > 0) & (left == 0), table[1], left)
        found[:, block] = left * largest
    return found


def _rounded(values: Tensor, table: Tensor, at_random: Tensor | None) -> Tensor:
    """Round to the nearest number of the sorted `table`; with `at_random`, to one of the two neighbours by chance."""
    size = values if float(table[0]) < 0 else values.abs()
    above = torch.searchsorted(table, size.contiguous()).clamp(1, len(table) - 1)
    low, high = table[above - 1], table[above]
    if at_random is None:
        is_even = above % 2 == 0
        is_up = ((high - size) < (size - low)) | (((high - size) == (size - low)) & is_even)
    else:
        is_up = (size == high) | ((size - low) / (high - low) > at_random)
    return torch.where(is_up, high, low) * (1 if size is values else values.sign())


@lru_cache
def numbers_of_bf16() -> Tensor:
    """All finite numbers of bf16 from zero up, fp64."""
    return torch.from_numpy(_WORDS.view(np.float32).astype(np.float64))


@lru_cache
def tree(*, signed: bool) -> Tensor:
    """The dynamic tree of 8 bits, fp64: the midpoints of evenly spaced numbers in each of seven decades, 0 and 1."""
    found = [torch.tensor([0.0, 1.0], dtype=torch.float64)]
    for decade in range(7):
        edges = torch.linspace(0.1, 1, 2 ** (decade + (not signed)) + 1, dtype=torch.float64)
        middles = (edges[1:] + edges[:-1]) / 2 * 10.0 ** (decade - 6)
        found += [middles, -middles] if signed else [middles]
    return torch.cat(found).sort().values


def uniform(name: str, step: int, rows: int, width: int) -> Tensor:
    """Random numbers in (0, 1) for a whole parameter, fp64 [rows, width]: (n + 0.5) / 65,536 for integers n."""
    golden = np.uint32(0x9E3779B9)
    key = np.uint32(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little"))
    with np.errstate(over="ignore"):
        of_step = _hash(np.array([step], dtype=np.uint32) * golden ^ key)
        of_rows = _hash(np.arange(rows, dtype=np.uint32) ^ of_step)
        each = _hash(of_rows[:, None] ^ (np.arange(width, dtype=np.uint32) * golden))
    return torch.from_numpy(((each & np.uint32(0xFFFF)) + 0.5) / 65536.0)


def _hash(x: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    mixed: npt.NDArray[np.uint32] = x ^ (x >> np.uint32(16))
    return mixed
