"""The subject of a proof: a model folder, documents, an optimizer. The reference and every layout read the same.

Inputs are chosen to hide no bug. Documents have unequal, mostly prime lengths, packed several to a row; one row is
nearly empty. Some documents continue after their row's end, so their last token has a target. In every second document
only some targets are trained, as in a conversation. Biases and norm weights are random. Clipping is active in one step
and inactive in the next. Weights decay. Load moves a router's bias, and the losses that balance experts are on. Zero
biases, uniform lengths, power-of-two sizes, or clipping never or always would each hide a whole class of bugs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from pydantic import TypeAdapter

from fivefold.config import ObjectiveSection, OptimizerSection
from fivefold.data.batch import MicroBatch, Piece, assemble
from fivefold.data.order import row_cost, shares
from fivefold.parallel.adapters.settings import Lora
from fivefold.parallel.layout import Layout

ROW = 61  # default tokens per row
LEARNING_RATE, WEIGHT_DECAY = 3e-3, 0.1  # the rate is large enough to move every weight by many ulps
CHUNKS = 3  # default loss chunks: a small proof would have one, but a run has many
BIAS_RATE = 1e-3  # step by which load moves a router's bias: DeepSeek-V3's own
AUX_LOSS, Z_LOSS = 0.02, 1e-3  # coefficients of router losses: Mixtral's, ST-MoE's (arXiv:2202.08906)
# Documents of each row, as parts of its length; 0: a document of 2 tokens, -1: of 1. One of a whole row continues.
_ROWS: tuple[tuple[float, ...], ...] = (
    (1.0,), (0.55, 0.3, 0.1), (0.48, 0.48), (0.22, 0.7), (0.1, -1, 0.85), (0,), (0.31, 0.6), (0.97,),
)  # fmt: skip

# Pairs of answers of each row: the prompt, the chosen and the rejected answer, as parts of the row's length.
_PAIRS: tuple[tuple[tuple[float, float, float], ...], ...] = (
    ((0.1, 0.3, 0.2), (0.05, 0.05, 0.1)), ((0.05, 0.5, 0.3),), ((0.08, 0.1, 0.25), (0.02, 0.3, 0.05)), (),
    ((0.2, 0.1, 0.4),), ((0.03, 0.1, 0.05), (0.03, 0.2, 0.1), (0.1, 0.03, 0.05)), ((0.3, 0.02, 0.1),),
    ((0.15, 0.4, 0.2),),
)  # fmt: skip

Documents = list[list[Piece]]  # for each row of a global batch


@dataclass(frozen=True, kw_only=True)
class ProofCase:
    """The subject of a proof. `folder`: a Hugging Face folder. A global batch is `rows` of `row_length` tokens; `steps`
    of them are trained. `cuts`: what the model lacks of the one asked about, for people.
    """

    folder: Path
    model_class: str
    vocabulary: int
    rows: int
    row_length: int
    steps: int
    seed: int
    optimizer: OptimizerSection
    reduce: str = "fp32"  # from the run file, like the number of loss chunks
    loss_chunks: int | None = CHUNKS
    thin: bool = False
    cuts: tuple[str, ...] = ()
    prompts: int = 3
    new_tokens: int = 8
    capacity_factor: float | None = None  # of experts, from the run file
    bias_rate: float = BIAS_RATE  # a step moves a router's bias, if it has one, by this
    aux_loss: float = AUX_LOSS  # the coefficients of router losses, for routers that return logits
    z_loss: float = Z_LOSS
    # 0: no clipping; None: alternately half of a step's norm, so that clipping is active, and twice, so that it is not
    max_grad_norm: float | None = None
    whole_rows: bool = False  # a row is one document: scales of matmuls span the tokens of a row
    # An objective on answers, or with a teacher, is proved in addition.
    objective: ObjectiveSection = field(default_factory=ObjectiveSection)
    adapter: Lora | None = None
    neftune_noise_alpha: float | None = None
    balance_rows: bool = False  # from the run file

    def describe(self) -> str:
        """Describe the case in one line, for people."""
        what = "whole" if not self.cuts else ", ".join(self.cuts)
        drops = "" if self.capacity_factor is None else f"; capacity factor {self.capacity_factor:g}"
        rows = "one document and one micro batch each" if self.whole_rows else "documents of unequal length"
        of_teacher = f"; the {self.followed} likeliest tokens of a teacher are followed"
        objective = {"sft": "", "distill": of_teacher, "python": f"; the loss {self.objective.path}"}.get(
            self.objective.name, f"; {self.objective.name} on pairs of answers"
        )
        adapter = "" if self.adapter is None else f"; LoRA of rank {self.adapter.rank} beside a frozen model"
        return (
            f"{self.model_class} {what}; {self.rows} rows of {self.row_length} tokens a step, {rows}; "
            f"{self.optimizer.title}{drops}{objective}{adapter}"
        )

    def documents(self, step: int) -> Documents:
        """The documents of each row of the global batch of `step`."""
        rng, parts = np.random.default_rng([self.seed, step]), ((1.0,),) if self.whole_rows else _ROWS
        return [
            [
                self._piece(rng, length, is_example=number % 2 == row % 2)
                for number, length in enumerate(lengths(parts[row % len(parts)], self.row_length))
            ]
            for row in range(self.rows)
        ]

    def _piece(self, rng: np.random.Generator, length: int, *, is_example: bool) -> Piece:
        """A document of `length` tokens; one that fills a row is the start of a longer document. An example with 10
        targets trains the third to the fifth, and the last. A column is 0 or 1, which are weights and classes."""
        drawn = rng.integers(0, self.vocabulary, length + (length == self.row_length), dtype=np.uint32)
        place = np.arange(len(drawn) - 1)
        answers = (place >= len(place) // 4) & (place < len(place) // 2) | (place == len(place) - 1)
        columns = {name: float((drawn[0] + at) % 2) for at, name in enumerate(self.objective.columns)}
        return Piece(drawn[:length], drawn[1:], answers if is_example else None, columns=columns)

    @property
    def followed(self) -> int:
        """The teacher's top-k: always fewer tokens than the vocabulary has."""
        return min(self.objective.top_k, self.vocabulary // 2)

    def pairs(self) -> Documents:
        """Pairs of answers in each row of a batch, for a preference objective. The second of every three rated ones is
        undesirable. In `whole_rows`, one pair of equally long answers fills a row: one batch of the reference."""
        rng, rows, number = np.random.default_rng([self.seed, 1_000_033]), list[list[Piece]](), 0
        for row in range(self.rows):
            pieces = list[Piece]()
            for parts in _PAIRS[row % len(_PAIRS)][: 1 if self.whole_rows else None]:
                prompt, *answers = (max(1, int(part * self.row_length)) for part in parts)
                answers = [self.row_length // 2 - prompt] * 2 if self.whole_rows else answers
                if tokens_of(pieces) + 2 * prompt + sum(answers) > self.row_length:
                    continue
                asked = rng.integers(0, self.vocabulary, prompt, dtype=np.uint32)
                for answer, length in enumerate(answers):
                    ids = np.append(asked, rng.integers(0, self.vocabulary, length, dtype=np.uint32))
                    trained = np.arange(len(ids) - 1) >= prompt - 1
                    desirable = number % 3 != 1 if self.objective.is_rated else None
                    pieces.append(Piece(ids, ids[1:], trained, answer=answer, pair=number, desirable=desirable))
                number += 1
            rows.append(pieces)
        return rows

    def compared_with(self) -> np.ndarray:
        """Random log-probabilities of these answers under another reference model, [pairs, 2]. It is close to the model
        of the case, or a sigmoid of the difference would be flat; the answers are somewhat less likely there."""
        counts = [int(piece.trained.sum()) for row in self.pairs() for piece in row if piece.trained is not None]
        guessed = -np.log(self.vocabulary) * np.array(counts, np.float64).reshape(-1, 2)
        found: np.ndarray = guessed - np.random.default_rng([self.seed, 1_000_037]).normal(2, 1, guessed.shape)
        return found

    def targets(self, step: int) -> int:
        documents = [document for row in self.documents(step) for document in row]
        return sum(
            len(document.targets) if document.trained is None else int(document.trained.sum()) for document in documents
        )

    def prompt_tokens(self) -> list[np.ndarray]:
        rng = np.random.default_rng([self.seed, 1_000_003])
        return [rng.integers(0, self.vocabulary, length) for length in (5, 11, 2, 17, 3)[: self.prompts]]

    def save(self, path: Path) -> None:
        path.write_bytes(TypeAdapter(ProofCase).dump_json(self))

    @staticmethod
    def load(path: Path) -> "ProofCase":
        return TypeAdapter(ProofCase).validate_json(path.read_bytes())


def lengths(parts: Sequence[float], row: int) -> list[int]:
    """Document lengths: for each part of `row` the largest prime up to it, so that all fit in the row."""
    fixed = {0.0: 2, -1.0: 1, 1.0: row}
    return [fixed[part] if part in fixed else _prime_below(int(part * row)) for part in parts]


def _prime_below(number: int) -> int:
    """The largest prime of at most `number`, at least 2."""
    while number > 2 and any(number % divisor == 0 for divisor in range(2, math.isqrt(number) + 1)):
        number -= 1
    return max(number, 2)


def rows_for(layouts: Sequence[Layout]) -> int:
    """Rows of a global batch that each of `layouts` can split into two micro batches or more."""
    per_pass = [layout.micro_batch_size * layout.data_ranks for layout in layouts]
    wanted = [layout.micro_batch_unit for layout in layouts]  # required by a pipeline
    least = max(len(_ROWS), *(max(2, fewest) * rows for rows, (fewest, _) in zip(per_pass, wanted, strict=True)))
    unit = math.lcm(*(rows * multiple for rows, (_, multiple) in zip(per_pass, wanted, strict=True)))
    return -(-least // unit) * unit


def row_length_for(layouts: Sequence[Layout], length: int) -> int:
    """The smallest row length from `length` on that no layout pads: scales of matmuls see padding."""
    while any(layout.padded(length) != length for layout in layouts):
        length = max(layout.padded(length) for layout in layouts)
    return length


def row_numbers(
    documents: Documents, layout: Layout, data_rank: int, row_length: int, *, balance: bool = False
) -> list[list[int]]:
    """The rows of the global batch in each micro batch of this data rank. `balance`: shared out by their cost."""
    costs = [row_cost((len(document.tokens) for document in row), row_length) for row in documents]
    shared = shares(
        len(documents), data_ranks=layout.data_ranks, micro_batch_size=layout.micro_batch_size,
        costs=np.array(costs, np.int64) if balance else None,
    )  # fmt: skip
    numbers: list[list[int]] = shared[:, data_rank].tolist()
    return numbers


def micro_batches(
    documents: Documents, layout: Layout, data_rank: int, row_length: int, *, balance: bool = False
) -> list[MicroBatch]:
    """This data rank's micro batches, packed and padded as in training."""
    length = layout.padded(row_length)
    return [
        replace(
            assemble([documents[row] for row in rows], row_length=length, pad_id=0), places=np.array(rows, np.int64)
        )
        for rows in row_numbers(documents, layout, data_rank, row_length, balance=balance)
    ]


def tokens_of(row: Sequence[Piece]) -> int:
    return sum(len(document.tokens) for document in row)
