"""A loss of the user's own: a function from the logits of tokens to their losses, called chunk by chunk.

The function gets the logits of the whole vocabulary, which tensor parallel ranks gather for each chunk, and only tokens
that have a target. Every tensor parallel rank calls it on the same numbers, and takes the gradient of its own columns.
So a function must be deterministic, and the loss of a token must not depend on the other tokens of its chunk:
`TokenLoss.check` tries both on made-up logits before the first step.

Legend: N tokens of a chunk, T those of them with a target, V tokens of the whole vocabulary.
"""

import inspect
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import CodeType
from typing import Any

import torch
from torch import Tensor

from fivefold.core.errors import UserError
from fivefold.data.batch import IGNORE
from fivefold.parallel.tensor.mappings import gather_columns
from fivefold.parallel.tensor.runtime import TensorParallel

READ_MORE = "fivefold docs howto/losses"
_OF_TENSORS = (
    "the logits are a leaf of autograd, [tokens, whole vocabulary], in fp32 (fp64 in verify): change a copy, "
    "logits.clone(), and make tensors of your own alike, weight.to(logits)"
)
_TRIED, _CLOSE = 8, 1e-4  # tokens of a check; how far its parts may be apart in fp32, relative to the largest number


@dataclass(frozen=True)
class LossRow:
    """The tokens of a chunk beside their logits, in the same order, [T] each: the token that the model read last, its
    position in its document, and the columns of the data, `row["NAME"]`, in the type of the logits."""

    input_ids: Tensor
    position_ids: Tensor
    columns: Mapping[str, Tensor] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.columns:
            raise KeyError(f"the data has no column {name!r}; it has: {', '.join(self.columns) or 'none'}")
        return self.columns[name]

    def at(self, kept: Any) -> "LossRow":
        """Select tokens by an index or a mask."""
        return self.cut(lambda tokens: tokens[kept])

    def cut(self, cut: Callable[[Tensor], Tensor]) -> "LossRow":
        """Cut to the tokens that `cut` leaves of [B, T]."""
        columns = {name: cut(column) for name, column in self.columns.items()}
        return LossRow(cut(self.input_ids), cut(self.position_ids), columns)

    def split(self, sizes: Sequence[int]) -> Iterator["LossRow"]:
        """Yield the tokens of each chunk, [N], of tensors of any shape."""
        tensors = (self.input_ids, self.position_ids, *self.columns.values())
        flat = [torch.split(tokens.reshape(-1), list(sizes)) for tokens in tensors]
        for ids, positions, *columns in zip(*flat, strict=True):
            yield LossRow(ids, positions, dict(zip(self.columns, columns, strict=True)))


# Logits [T, V] in fp32 (fp64), labels int64 [T] -> losses [T].
LossFunction = Callable[[Tensor, Tensor, LossRow], Tensor]


@dataclass(eq=False)
class TokenLoss:
    """The loss of a user's `function`, with errors that name its file and line.

    `not_finite`: counts of this rank since the step began, int64 [2]: losses that are not finite although their logits
    are, and all losses. `digest`: a hash of the file that a run file names.
    """

    function: LossFunction
    digest: str = ""
    not_finite: Tensor | None = None

    @property
    def where(self) -> str:
        """The file and the line of the function, and its name."""
        code, name = _code(self.function), _name(self.function)
        return f"{code.co_filename}:{code.co_firstlineno} {name}" if code else name

    # ---- in a step ---------------------------------------------------------------------------------------------------

    def of_chunk(
        self,
        labels_N: Tensor,
        row: LossRow,
        logits: Tensor,
        factor_N: Tensor | None,
        *,
        fold: TensorParallel,
        overwrite: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Compute the losses of the targets of a chunk [T], and the gradient, see `ChunkLosses`."""
        kept_N = labels_N != IGNORE
        logits_TV = self._logits(logits, kept_N, fold)
        if factor_N is None:
            return self.of_tokens(logits_TV, labels_N[kept_N], row.at(kept_N)), logits
        with torch.enable_grad():
            losses_T = self.of_tokens(logits_TV.requires_grad_(), labels_N[kept_N], row.at(kept_N))
            (gradient_TV,) = torch.autograd.grad((losses_T.double() * factor_N[kept_N]).sum(), logits_TV)
        own_TV = gradient_TV[:, slice(*fold.vocabulary[fold.rank])].to(logits.dtype)
        grad = logits.zero_() if overwrite else torch.zeros_like(logits)
        grad[0, kept_N] = own_TV
        return losses_T.detach(), grad

    @staticmethod
    def _logits(logits: Tensor, kept_N: Tensor, fold: TensorParallel) -> Tensor:
        """Gather the logits of the whole vocabulary, of the tokens with a target, in fp32 (fp64)."""
        logits_NV = logits[0].detach()
        if fold.group is not None:
            logits_NV = gather_columns(logits_NV, fold.group, fold.vocabulary)
        precise = torch.float64 if logits.dtype == torch.float64 else torch.float32
        return logits_NV[kept_N].to(precise)

    def of_tokens(self, logits_TV: Tensor, labels_T: Tensor, row: LossRow) -> Tensor:
        """Call the function and check its result. Raises `UserError`. Without tokens it is not called."""
        if not len(labels_T):
            return logits_TV.sum(-1)
        columns = {name: column.to(logits_TV.dtype) for name, column in row.columns.items()}
        losses_T = self.call(logits_TV, labels_T, replace(row, columns=columns))
        tokens = len(labels_T)
        if not isinstance(losses_T, Tensor) or losses_T.shape != (tokens,) or not losses_T.is_floating_point():
            raise self._refusal(
                f"it gave {_kind(losses_T)} for {tokens} tokens",
                "return one loss for each token, floating point [T]: reduction='none' in functions of torch",
            )
        if torch.is_grad_enabled() and not losses_T.requires_grad:
            raise self._refusal(
                "its losses have no gradient: they do not depend on the logits in a way that autograd sees",
                "compute with the logits themselves, without detach, argmax, item or no_grad",
            )
        self._count(logits_TV, losses_T)
        return losses_T

    def call(self, logits_TV: Tensor, labels_T: Tensor, row: LossRow) -> Any:
        """Call the function. Raises `UserError` with the line of an error."""
        try:
            return self.function(logits_TV, labels_T, row)
        except Exception as error:  # any error of the user's code
            of_tensors = _OF_TENSORS if isinstance(error, RuntimeError) else None
            raise UserError(f"{self._line_of(error)}: {_text(error)}", fix=of_tensors, more=READ_MORE) from error

    def _count(self, logits_TV: Tensor, losses_T: Tensor) -> None:
        """Count losses that are not finite, without waiting for the device."""
        wrong = ~losses_T.detach().isfinite() & logits_TV.detach().isfinite().all(-1)
        counts = torch.stack([wrong.sum(), torch.full_like(wrong.sum(), len(losses_T))])
        self.not_finite = counts if self.not_finite is None else self.not_finite + counts

    def why(self) -> str:
        """Describe the losses of this rank that were not finite since the last call; "" if all were."""
        counts, self.not_finite = self.not_finite, None
        wrong, computed = (0, 0) if counts is None else counts.tolist()
        return f"{self.where}: {wrong} of {computed} losses are not finite, and their logits are" if wrong else ""

    # ---- before the first step ---------------------------------------------------------------------------------------

    def check(self, labels_T: Tensor, row: LossRow, vocabulary: int) -> None:
        """Try the function on made-up logits of at most 8 tokens. Raises `UserError` if it fails, gives losses that are
        not one for each token or have no gradient, gives others when it is called again, or if the loss of a token
        depends on the others."""
        labels_T, row = labels_T[:_TRIED], row.at(slice(0, _TRIED))
        if not len(labels_T):
            return
        drawn = torch.Generator().manual_seed(len(labels_T))
        logits_TV = torch.randn(len(labels_T), vocabulary, generator=drawn).to(labels_T.device)
        whole = self._tried(logits_TV, labels_T, row)
        if not _are_close(whole, self._tried(logits_TV, labels_T, row)):
            raise self._refusal(
                "it gives other losses for the same tokens when it is called again",
                "draw no random numbers and keep no state: ranks compute the same tokens, and must agree",
            )
        cuts = [part for part in (slice(0, 1), slice(1, 4), slice(4, None)) if len(labels_T[part])]
        parts = [self._tried(logits_TV[part], labels_T[part], row.at(part)) for part in cuts]
        if not _are_close(whole, tuple(torch.cat(both) for both in zip(*parts, strict=True))):
            raise self._refusal(
                "the loss of a token depends on the other tokens of its chunk, and so on the layout",
                "compute each token's loss from its own logits, label and columns: no mean, no sum over tokens",
            )
        self.not_finite = None

    def _tried(self, logits_TV: Tensor, labels_T: Tensor, row: LossRow) -> tuple[Tensor, Tensor]:
        """Losses of some tokens, and the gradient of their sum."""
        with torch.enable_grad():
            leaf = logits_TV.clone().requires_grad_()
            losses_T = self.of_tokens(leaf, labels_T.clone(), row.at(slice(None)))
            return losses_T.detach(), torch.autograd.grad(losses_T.sum(), leaf)[0]

    # ---- errors ------------------------------------------------------------------------------------------------------

    def _refusal(self, what: str, fix: str) -> UserError:
        return UserError(f"{self.where}: {what}", fix=fix, more=READ_MORE)

    def _line_of(self, error: Exception) -> str:
        """The last line of an error's traceback that is in the file of the function."""
        code = _code(self.function)
        frames = traceback.extract_tb(error.__traceback__)
        inside = [frame for frame in frames if code and frame.filename == code.co_filename]
        return f"{inside[-1].filename}:{inside[-1].lineno} in {inside[-1].name}" if inside else self.where


def _are_close(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """True if all pairs are equal up to rounding in fp32; numbers that are not finite are equal."""
    return all(
        torch.allclose(a, b, rtol=_CLOSE, atol=_CLOSE * float(a.nan_to_num(0, 0, 0).abs().max()), equal_nan=True)
        for a, b in zip(one, other, strict=True)
    )


def _code(function: Any) -> CodeType | None:
    """The code of a function, of a method, of what a partial or an object calls; None for one that is not Python's."""
    while isinstance(function, partial):
        function = function.func
    function = inspect.unwrap(function)
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        function = getattr(function, "forward", None) or type(function).__call__
    return getattr(function, "__code__", None)


def _name(function: Any) -> str:
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__qualname__", type(function).__name__))


def _text(error: Exception) -> str:
    first = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {first[:300]}"


def _kind(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
