"""Classes of `transformers` that are proved: the tests hold the partition that is derived for them against the library.

A class that is not listed is partitioned in the same way, and tried by a parity run before it is trusted. A class
belongs here once `tests/families.py` has a small config of it.
"""

PROVED = frozenset(
    {
        "CohereForCausalLM",
        "Cohere2ForCausalLM",
        "DeepseekV3ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Glm4ForCausalLM",
        "GPT2LMHeadModel",
        "GPTNeoXForCausalLM",
        "GptOssForCausalLM",
        "GraniteForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "MixtralForCausalLM",
        "NemotronForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoeForCausalLM",
        "Phi3ForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
        "Qwen3MoeForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
    }
)
