"""Reward functions `(prompt, completion, **fields) -> float`: loading the user's, and verifiers."""
