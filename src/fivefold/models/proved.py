"""Classes of `transformers` whose derived partition the tests compare with the unmodified model.

A class that is not listed is partitioned in the same way. Before tensor parallelism of it starts, `parallel/probe.py`
compares a small copy with the unmodified model. A class belongs here once `tests/families.py` has a small config of it.
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
