"""The settings of a model's generation config, such as generation_config.json, that apply in addition to a request."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig

from fivefold.core.errors import UserError, first_line
from fivefold.generation.sampling import Sampling
from fivefold.models import hf_internals

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
            more="docs/howto/generate.md",
        ) from error


def not_used(settings: GenerationConfig, sampling: Sampling, max_new_tokens: int) -> Mapping[str, Any]:
    """Settings of a generation config that `fivefold generate` ignores: unsupported ones, such as beams, and those
    overridden by the options of the command."""
    options = {**sampling.options, "max_new_tokens": max_new_tokens}
    used = _USED | _WITHOUT_EFFECT | (_USED_TO_DRAW if sampling.temperature else set())
    said = hf_internals.generation_values(settings)
    return {key: value for key, value in said.items() if key not in used and value != options.get(key)}
