"""fivefold: train any Hugging Face causal language model, unchanged, in five dimensions of parallelism."""
