"""Evaluation of a trained model: perplexity of a text, and tasks of lm-eval. Torch is imported only on use."""

from dataclasses import dataclass

from fivefold.core.errors import UserError

BATCH_SIZE = 8
SEQ_LENGTH = 2048  # for a model without a run, if it has as many positions


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest:
    """A request to evaluate a model. `model`, `layout`, `step`: as in `GenerateRequest`.

    `text`: anything that `data.train[].path` may name; None, without tasks: the validation rows of the run. `format`,
    `text_key`: as in a run file. `seq_length`: tokens of a row; None: the run's. `max_tokens`: input tokens at most;
    None: all of a text, `eval.max_tokens` of a run.

    `tasks`: names that lm-eval knows, or folders of tasks. `num_fewshot`, `limit`: as in lm-eval. `chat`: prompts
    through the chat template. `batch_size`: requests computed together. Raises `UserError` for a number out of its
    range.
    """

    model: str
    text: str | None = None
    format: str = "auto"
    text_key: str = "text"
    layout: str = "single"
    step: int | None = None
    seq_length: int | None = None
    max_tokens: int | None = None
    tasks: tuple[str, ...] = ()
    num_fewshot: int | None = None
    limit: int | None = None
    chat: bool = False
    batch_size: int = BATCH_SIZE

    def __post_init__(self) -> None:
        object.__setattr__(self, "tasks", tuple(self.tasks))  # a list if it comes from JSON
        for name, least in (("seq_length", 2), ("max_tokens", 1), ("limit", 1), ("batch_size", 1), ("num_fewshot", 0)):
            given = getattr(self, name)
            if given is not None and given < least:
                raise UserError(f"{name} {given} is less than {least}", fix=f"write {least} or more")
