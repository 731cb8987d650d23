"""Prompts, tokenizers, the embedded task, and which rows go together."""
