"""A micro batch: rows of pieces as the arrays of a model step.

Shapes: B rows (micro batch size), T tokens a row (seq_length rounded up to the layout's multiple).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IGNORE = -100  # label of a position without a target


@dataclass(frozen=True)
class Piece:
    """At most seq_length tokens of a document, `tokens` [n]; `targets` [n], [n - 1] if the last position has none.
    `trained`: a mask of the trained targets, as long as they; None: all. `answer`: 0 for a chosen and 1 for a rejected
    answer, which follows its chosen one in the row; `pair`: the number of the pair in the run. `desirable`: the rating
    of the first answer; None if answers are not rated and it is the chosen one. `columns`: numbers of its document."""

    tokens: NDArray[np.unsignedinteger]
    targets: NDArray[np.unsignedinteger]
    trained: NDArray[np.bool_] | None = None
    answer: int | None = None
    pair: int = -1
    desirable: bool | None = None
    columns: Mapping[str, float] = field(default_factory=dict)

    @property
    def labels(self) -> NDArray[np.int64]:
        """The targets, with -100 for those that are not trained."""
        targets = self.targets.astype(np.int64)
        return targets if self.trained is None else np.where(self.trained, targets, IGNORE)


@dataclass(frozen=True, eq=False)
class TeacherTargets:
    """The likeliest tokens of a teacher at each target: K int32 and their log-probabilities, [B, T, K] each, zeros at
    positions without a target. `temperature` and `alpha` as in `objective` of the run file."""

    tokens: NDArray[np.int32]
    log_probs: NDArray[np.floating]
    temperature: float
    alpha: float


@dataclass(frozen=True, eq=False)
class MicroBatch:
    """int64 [B, T] each; `labels` are already shifted: `labels[b, t]` is the target of position t, or -100.

    `position_ids` restart at 0 for each piece and for the padding. `cu_seqlens` int32 [n + 1] delimits the pieces over
    the flattened B * T tokens: 0 first, B * T last, every row start among them, the padding at a row's end a segment of
    its own. `tokens` counts real input tokens, `targets` labels other than -100; `row_tokens` [B]: the real tokens of
    each row. `weights`: fp64 [B, T], of each target; None: 1. For preference data: `pairs` int64 [P], the numbers of
    the pairs in its rows, and `answers` int64 [B, T]: 2 p at the targets of the chosen answer of the p-th of these
    pairs, 2 p + 1 at those of the rejected one, else -1. `desirable` bool [P]: the rating of the first answer of each
    pair, if answers are rated. `rows` int64 [B]: the numbers of the rows, -1 for padding; `places` int64 [B]:
    their places in the global batch. `teacher`: soft targets in addition to the labels. `columns`: numbers of the data
    at each target, fp64 [B, T], for a loss of the user's own.
    """

    input_ids: NDArray[np.int64]
    labels: NDArray[np.int64]
    position_ids: NDArray[np.int64]
    cu_seqlens: NDArray[np.int32]
    tokens: int
    targets: int
    row_tokens: NDArray[np.int64] | None = None
    weights: NDArray[np.float64] | None = None
    answers: NDArray[np.int64] | None = None
    pairs: NDArray[np.int64] | None = None
    desirable: NDArray[np.bool_] | None = None
    rows: NDArray[np.int64] | None = None
    places: NDArray[np.int64] | None = None
    teacher: TeacherTargets | None = None
    columns: Mapping[str, NDArray[np.float64]] = field(default_factory=dict)


def assemble(rows: Sequence[Iterable[Piece]], *, row_length: int, pad_id: int) -> MicroBatch:
    """The micro batch of `rows`, each padded at its end to `row_length` tokens. An empty row is all padding."""
    shape = (len(rows), row_length)
    input_ids = np.full(shape, pad_id, np.int64)
    labels = np.full(shape, IGNORE, np.int64)
    position_ids = np.empty(shape, np.int64)
    cu_seqlens, counting = [0], np.arange(row_length, dtype=np.int64)
    tokens = targets = 0
    row_tokens = np.zeros(len(rows), np.int64)
    columns: dict[str, NDArray[np.float64]] = {}
    answers, pairs, desirable = np.full(shape, -1, np.int64), list[int](), list[bool]()
    for b, row in enumerate(rows):
        t = 0
        for piece in row:
            end = t + len(piece.tokens)
            input_ids[b, t:end] = piece.tokens
            labels[b, t : t + len(piece.targets)] = piece.labels
            for name, number in piece.columns.items():
                columns.setdefault(name, np.zeros(shape))[b, t : t + len(piece.targets)] = number
            if piece.answer is not None:
                pairs += [piece.pair] * (piece.answer == 0)
                desirable += [bool(piece.desirable)] * (piece.answer == 0 and piece.desirable is not None)
                own = np.where(piece.labels == IGNORE, -1, 2 * len(pairs) - 2 + piece.answer)
                answers[b, t : t + len(piece.targets)] = own
            position_ids[b, t:end] = counting[: end - t]
            cu_seqlens.append(b * row_length + end)
            targets += len(piece.targets) if piece.trained is None else int(piece.trained.sum())
            t = end
        tokens += t
        row_tokens[b] = t
        if t < row_length:
            position_ids[b, t:] = counting[: row_length - t]
            cu_seqlens.append((b + 1) * row_length)
    return MicroBatch(
        input_ids, labels, position_ids, np.array(cu_seqlens, np.int32), tokens, targets, row_tokens,
        answers=answers if pairs else None, pairs=np.array(pairs, np.int64) if pairs else None,
        desirable=np.array(desirable) if desirable else None, columns=columns,
    )  # fmt: skip
