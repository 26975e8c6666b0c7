"""Rows of packed documents: edits of a model by `models/forwards.py`."""

from functools import partial

from fivefold.models.forwards import check_rows, count_behind_padding, hand_on_cu_seqlens
from fivefold.parallel.rows.spec import CountBehindPadding, HandOnBounds, RefuseLongRows
from fivefold.parallel.state import Builders, ParallelState


def builders(state: ParallelState) -> Builders:
    model, cp = state.model, state.plan.layout.cp

    def refuse_long_rows(edit: RefuseLongRows) -> None:
        check = partial(check_rows, edit.counted.name, edit.counted.most, cp)
        model.get_submodule(edit.path).register_forward_pre_hook(check, with_kwargs=True)

    return {
        RefuseLongRows: refuse_long_rows,
        HandOnBounds: lambda edit: hand_on_cu_seqlens(model, [(edit.path, name) for name in edit.attention]),
        CountBehindPadding: lambda edit: count_behind_padding(model.get_submodule(edit.path), edit.padding),
    }
