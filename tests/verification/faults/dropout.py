"""Bugs of what is dropped in training."""

from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

from fivefold.ops import dropout as draws
from fivefold.ops.dropout import Drop, dropped
from fivefold.parallel.dropout import runtime
from fivefold.parallel.dropout.runtime import Dropout
from fivefold.parallel.dropout.spec import DropOutput
from fivefold.parallel.state import ParallelState
from fivefold.torch_internals import is_in_backward
from tests.verification.faults.fault import Model, fault

GPT2 = Model("gpt2", changes=(("resid_pdrop", 0.1), ("embd_pdrop", 0.1), ("attn_pdrop", 0.1)))
FIRST, SECOND = [("output", r"^transformer\.drop\b")], [("output", r"h\.1\.")]
BACKWARD = [("gradient of output", r"")]


@fault(
    "what is dropped follows from the position in a rank's tokens",
    known="ranks of context parallelism with one seed",
    layout="cp2", expects=FIRST, model=GPT2,
)  # fmt: skip
def dropped_by_local_position() -> Any:
    plain = Dropout.begin_rows

    def begin(dropout: Dropout, shape: Sequence[int], *rows: Any, ends_step: bool) -> None:
        plain(dropout, shape, *rows, ends_step=ends_step)
        assert dropout._whole is not None
        dropout._entered = dropout._own = dropout._whole[:, : dropout.context.share(shape[1])]

    return patch.object(Dropout, "begin_rows", begin)


@fault(
    "all layers drop the same elements",
    known="a seed that is set again in every layer",
    layout="single", expects=SECOND, model=GPT2,
)  # fmt: skip
def same_draw_in_two_layers() -> Any:
    def first_layer(*parts: Any) -> int:
        return draws.key_of(*(part.replace(".h.1.", ".h.0.") if isinstance(part, str) else part for part in parts))

    return patch.object(runtime, "key_of", first_layer)


@fault(
    "the second forward of a recomputed layer drops others",
    known="checkpointing with preserve_rng_state=False",
    layout="single+full", expects=BACKWARD, model=GPT2,
)  # fmt: skip
def other_draws_in_recompute() -> Any:
    plain = draws.of_site
    return patch.object(runtime, "of_site", lambda tokens, key: plain(tokens, key + is_in_backward()))


@fault(
    "what is kept is not scaled",
    known="a mask without 1 / (1 - p)",
    layout="single", expects=FIRST, model=GPT2,
)  # fmt: skip
def dropout_unscaled() -> Any:
    return patch.object(draws, "dropped", lambda x, token, feature, p: dropped(x, token, feature, p) * (1 - p))


@fault(
    "evaluation drops as well",
    known="a missing model.eval()",
    layout="single", expects=[("logits.*|tokens.*", r"")], model=GPT2,
)  # fmt: skip
def dropped_in_evaluation() -> Any:
    plain = runtime.builders

    def builders(state: ParallelState) -> Any:
        def drop_output(module: Any, edit: DropOutput) -> None:
            drop = state.live(Dropout).site(edit.site, ((0, edit.site.features),))
            module.forward = lambda x: drop(x, module.p)

        return {**plain(state), DropOutput: drop_output}

    return patch.object(runtime, "builders", builders)


@fault(
    "backward passes the gradients of dropped elements on",
    known="a custom autograd function whose backward forgets the mask",
    layout="single", expects=BACKWARD, model=GPT2,
)  # fmt: skip
def not_dropped_in_backward() -> Any:
    return patch.object(Drop, "backward", staticmethod(lambda ctx, *grads: (grads[0], None, None, None)))


@fault(
    "the second micro batch of a step drops what the first one does",
    known="a seed that is set for every micro batch",
    layout="single+mb4", expects=FIRST, model=GPT2,
)  # fmt: skip
def same_draw_in_two_micro_batches() -> Any:
    plain = Dropout.begin_rows

    def begin(dropout: Dropout, shape: Sequence[int], _: Any, *cut: Any, ends_step: bool) -> None:
        plain(dropout, shape, range(shape[0]), *cut, ends_step=ends_step)

    return patch.object(Dropout, "begin_rows", begin)


@fault(
    "a branch drops features as if each rank's were the first",
    known="ranks of tensor parallelism with one seed",
    layout="tp2", expects=[("output", r"\.(o_proj|down_proj)")], model=Model(adapter=True, dropout=0.05),
)  # fmt: skip
def branch_dropped_by_local_feature() -> Any:
    plain = Dropout._hashes

    def hashes(dropout: Dropout, site: Any, features: Any) -> Any:
        return plain(dropout, site, ((0, sum(stop - start for start, stop in features)),))

    return patch.object(Dropout, "_hashes", hashes)


@fault(
    "the noise on embeddings is that of whole rows, not of documents",
    known="NEFTune over packed rows, which takes output.size(1)",
    layout="single", expects=[("output", r"embed_tokens")], model=Model(neftune=5.0),
)  # fmt: skip
def noise_of_packed_rows() -> Any:
    plain = runtime._document_lengths
    return patch.object(runtime, "_document_lengths", lambda _, rows, length: plain(None, rows, length))
