"""Hugging Face causal language models, unchanged: built, described, given attention, and given weights."""
