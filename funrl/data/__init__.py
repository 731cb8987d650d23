"""Data: records, prompts, texts, tokenizers, the order of training, and packing."""
