"""Hugging Face causal language models, unchanged: building, describing, attention, and weights."""
