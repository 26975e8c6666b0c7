"""The parts of a Hugging Face model by name: its embedding, its head, and its decoder blocks.

Nothing here knows a layout. Torch is imported only to inspect a model, not to hold the result.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fivefold.core.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, kw_only=True)
class Anatomy:
    """The parts of a model, as names from the root of the model."""

    model_class: str
    base: str
    embedding: str
    layers: tuple[str, ...]
    head: str
    tied: bool

    @property
    def embedding_weight(self) -> str:
        """The parameter of the embedding, [vocabulary, hidden size]. It is the head's as well if `tied`."""
        return f"{self.embedding}.weight"

    @staticmethod
    def of(model: "PreTrainedModel") -> "Anatomy":
        """Describe `model`, which may be on the meta device. Raises `UserError` where a part cannot be found."""
        from fivefold.models import hf_internals

        names = {id(module): name for name, module in model.named_modules()}
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
        if embedding is None or head is None:
            raise UserError(
                f"{type(model).__name__} has no token embedding or no output head; only causal LMs are trained"
            )
        return Anatomy(
            model_class=type(model).__name__,
            base=hf_internals.base_prefix(model),
            embedding=names[id(embedding)],
            layers=_layers(model, names),
            head=names[id(head)],
            tied=head.weight is embedding.weight,
        )


def is_within(name: str, modules: Iterable[str]) -> bool:
    return name.startswith(tuple(f"{module}." for module in modules))


def _layers(model: "PreTrainedModel", names: Mapping[int, str]) -> tuple[str, ...]:
    """The decoder blocks: the list in the base model of the classes that the model calls its blocks, or else the list
    with one entry per hidden layer. Among several (an image tower has layers too), the one that tokens reach."""
    from torch import nn

    from fivefold.models import hf_internals

    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    blocks = hf_internals.block_classes(model)
    lists = [m for m in model.base_model.modules() if isinstance(m, nn.ModuleList) and len(m)]
    of_blocks = [m for m in lists if all(type(layer).__name__ in blocks for layer in m)]
    of_count = [m for m in of_blocks or lists if len(m) == count]
    stated = of_count or of_blocks
    if len(stated) > 1:
        reached = _reached(model, [names[id(module)] for module in stated])
        stated = [module for module in stated if names[id(module)] in reached] or stated
    if len(stated) == 1:
        return tuple(names[id(layer)] for layer in stated[0])
    name = type(model).__name__
    found = ", ".join(names[id(module)] for module in stated)
    raise UserError(
        f"{name} has {len(stated)} stacks of layers ({found})" if stated else f"{name} has no list of its layers",
        fix="use a model whose layers stand in one ModuleList; of one for images and text, the model of the text alone",
    )


def _reached(model: "PreTrainedModel", stacks: Sequence[str]) -> set[str]:
    """The lists of layers that a forward of token ids reaches, as far as it runs without values. A list counts if the
    forward enters it, or the part of the model that holds this list alone."""
    import torch

    from fivefold.models import hf_internals

    copy = hf_internals.copy_on_meta(model, "eager")
    entered: set[str] = set()
    for stack in stacks:
        for name in (_holder(stack, stacks), f"{stack}.0"):
            copy.get_submodule(name).register_forward_pre_hook(lambda *_, stack=stack: entered.add(stack))
    ids = torch.zeros(1, 5, dtype=torch.long, device="meta")
    with torch.no_grad(), suppress(Exception):
        copy(input_ids=ids, use_cache=False)
    return entered


def _holder(stack: str, stacks: Sequence[str]) -> str:
    """The largest part of a model that contains `stack` and no other of `stacks`."""
    held = stack
    while (outer := held.rpartition(".")[0]) and [stack for stack in stacks if is_within(stack, [outer])] == [stack]:
        held = outer
    return held
