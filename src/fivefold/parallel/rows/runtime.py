"""Rows of packed documents: edits of a model by `models/forwards.py`."""

from functools import partial
from typing import Any

from fivefold.models.forwards import check_rows, count_behind_padding, hand_on_cu_seqlens
from fivefold.parallel.rows.spec import CountBehindPadding, HandOnBounds, RefuseLongRows
from fivefold.parallel.state import Builders, ParallelState


def builders(state: ParallelState) -> Builders:
    def refuse_long_rows(base: Any, edit: RefuseLongRows) -> None:
        check = partial(check_rows, edit.counted.name, edit.counted.most, state.plan.layout.cp)
        base.register_forward_pre_hook(check, with_kwargs=True)

    return {
        RefuseLongRows: refuse_long_rows,
        HandOnBounds: lambda _, edit: hand_on_cu_seqlens(state.model, [(edit.path, name) for name in edit.attention]),
        CountBehindPadding: lambda base, edit: count_behind_padding(base, edit.padding),
    }
