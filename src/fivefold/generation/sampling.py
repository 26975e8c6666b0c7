"""Choice of the next token, by a request and by the model's generation config (generation_config.json): logits as
`transformers` processes them, then the likeliest token or one drawn.

Legend: T tokens so far, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from fivefold.core.errors import UserError, first_line
from fivefold.models import hf_internals


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """`temperature` 0 takes the likeliest token. Otherwise tokens are drawn from the `top_k` likeliest (0: all), and
    among these from the smallest set of likeliest ones whose probabilities add up to `top_p` (1: all)."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The settings as options of `generate` of `transformers`."""
        if self.temperature == 0:
            return {"do_sample": False}
        return {
            "do_sample": True, "temperature": float(self.temperature), "top_k": self.top_k, "top_p": float(self.top_p)
        }  # fmt: skip


class TokenChooser:
    """Chooses the tokens that follow one text, by a request and by the model's generation config."""

    def __init__(self, model: Any, ids: Sequence[int], sampling: Sampling, *, seed: int, max_new_tokens: int) -> None:
        """`ids`: the tokens of the text. `max_new_tokens`: the most tokens to follow."""
        self._ids, self._is_drawn = list(ids), sampling.temperature > 0
        self._generator = torch.Generator().manual_seed(seed)
        self._device = torch.device("cpu") if self._is_drawn else next(model.parameters()).device
        self._process = hf_internals.logits_processors(
            model, torch.tensor([self._ids], device=self._device), max_new_tokens, sampling.options
        )

    def choose(self, logits_V: Tensor) -> int:
        """The next token; drawn by inverting the cumulative distribution in fp64 with one uniform number."""
        dtype = torch.float64 if self._is_drawn else torch.promote_types(logits_V.dtype, torch.float32)
        scores_V = logits_V.to(self._device, dtype)
        if self._process:
            scores_V = self._process(torch.tensor([self._ids], device=self._device), scores_V[None])[0]
        if not self._is_drawn:
            return int(scores_V.argmax())
        cumulative_V = scores_V.softmax(-1).cumsum(-1)
        uniform = torch.rand((), generator=self._generator, dtype=torch.float64) * cumulative_V[-1]
        return int(torch.searchsorted(cumulative_V, uniform, right=True).clamp(max=scores_V.numel() - 1))

    def add(self, token: int) -> None:
        """Append the next token, on which all ranks agree."""
        self._ids.append(token)


# ---- the model's generation config -----------------------------------------------------------------------------------


# Applied by processors of `transformers`, or as an end of the text.
_USED = {
    "repetition_penalty", "encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size",
    "bad_words_ids", "sequence_bias", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id",
    "remove_invalid_values", "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens",
    "watermarking_config", "renormalize_logits", "stop_strings", "eos_token_id",
}  # fmt: skip
_USED_TO_DRAW = {"min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff"}
# These change no answer: the way it is computed and returned, and settings of beams only.
_WITHOUT_EFFECT = {
    "bos_token_id", "pad_token_id", "decoder_start_token_id", "use_cache", "cache_implementation", "cache_config",
    "max_cache_len", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "transformers_version", "compile_config", "disable_compile", "low_memory",
    "continuous_batching_config", "prefill_chunk_size", "early_stopping", "length_penalty", "is_assistant",
    "num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold", "assistant_lookbehind",
    "target_lookbehind", "assistant_early_exit", "assistant_ensemble_weight", "prompt_lookup_num_tokens",
    "max_matching_ngram_size", "speculation_type", "use_mtp",
}  # fmt: skip


def end_tokens(model: Any) -> tuple[int, ...]:
    """Tokens that end a text for a model: from its generation config, else from its config."""
    for settings in (getattr(model, "generation_config", None), model.config.get_text_config()):
        found = getattr(settings, "eos_token_id", None)
        if found is not None:
            return tuple(found) if isinstance(found, list | tuple) else (int(found),)
    return ()


def stop_texts(model: Any) -> tuple[str, ...]:
    """Texts that end an answer, from the model's generation config."""
    found = model.generation_config.stop_strings or ()
    return (found,) if isinstance(found, str) else tuple(found)


def check_values(model: Any, folder: Path) -> None:
    """Raise `UserError` for values in the generation config of `folder` that `transformers` rejects."""
    ids_1T = torch.zeros(1, 1, dtype=torch.int64)
    logits_1V = torch.zeros(1, model.config.get_text_config().vocab_size)
    options = Sampling(temperature=1.0).options
    try:
        for kind, values in ((int, end_tokens(model)), (str, stop_texts(model))):
            if wrong := [value for value in values if not isinstance(value, kind)]:
                raise TypeError(f"{wrong[0]!r} ends no text")
        hf_internals.logits_processors(model, ids_1T, 1, options)(ids_1T, logits_1V)
    except Exception as error:  # from any of the processors
        raise UserError(
            f"{folder / 'generation_config.json'} has a value that transformers does not take: {first_line(error)}",
            fix="copy the file from its origin again, or take the key out",
            more="fivefold docs howto/generate",
        ) from error


def not_used(settings: GenerationConfig, sampling: Sampling, max_new_tokens: int) -> Mapping[str, Any]:
    """Settings of a generation config that `fivefold generate` ignores: unsupported ones, such as beams, and those
    overridden by the options of the command."""
    options = {**sampling.options, "max_new_tokens": max_new_tokens}
    used = _USED | _WITHOUT_EFFECT | (_USED_TO_DRAW if sampling.temperature else set())
    said = hf_internals.generation_values(settings)
    return {key: value for key, value in said.items() if key not in used and value != options.get(key)}
