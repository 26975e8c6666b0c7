"""From the last hidden states to the logits: the model's own forward, without its base."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from fivefold.models.anatomy import Anatomy


@contextmanager
def head_only(model: nn.Module, anatomy: Anatomy) -> Iterator[Callable[[Tensor], Tensor]]:
    """The model's own forward from hidden states to logits: its base is a pass-through inside the block."""
    base = model.get_submodule(anatomy.base)
    model._modules[anatomy.base] = _PassThrough()
    try:
        yield lambda hidden: type(model).forward(model, inputs_embeds=hidden, use_cache=False).logits
    finally:
        model._modules[anatomy.base] = base


class _PassThrough(nn.Module):
    def __getattr__(self, name: str) -> Any:
        """Some models call a part of their base (`self.model.decoder(...)`): it passes through as well."""
        return self

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> BaseModelOutputWithPast:
        return _Output(last_hidden_state=inputs_embeds)


class _Output(BaseModelOutputWithPast):  # type: ignore[misc]
    def __getattr__(self, name: str) -> None:
        """What else a base gives back (router logits, cross attentions) is not there."""
        if name.startswith("__"):
            raise AttributeError(name)
        return None
