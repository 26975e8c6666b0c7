"""Facts about each objective on answers: what it compares, and what an answer counts by. No torch.

`training/objectives.py` holds the losses, `verification/by_hand.py` their formulas by hand.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ObjectiveFacts:
    """One objective. `needs_reference`: it compares with the log-probabilities of a reference model. `uses_means`: an
    answer counts by the mean over its tokens, not by the sum. `is_rated`: single answers are rated, and compared with
    how much likelier answers to other prompts became."""

    needs_reference: bool
    uses_means: bool
    is_rated: bool = False


OBJECTIVES: dict[str, ObjectiveFacts] = {
    "dpo": ObjectiveFacts(needs_reference=True, uses_means=False),
    "ipo": ObjectiveFacts(needs_reference=True, uses_means=True),
    "orpo": ObjectiveFacts(needs_reference=False, uses_means=True),
    "simpo": ObjectiveFacts(needs_reference=False, uses_means=True),
    "kto": ObjectiveFacts(needs_reference=True, uses_means=False, is_rated=True),
}
OF_TEXTS = ("sft", "distill", "python")  # objectives without answers
