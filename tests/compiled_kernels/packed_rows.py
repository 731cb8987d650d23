"""Inputs of attention over a packed row: queries, keys and values of any number of tokens, and where segments begin."""

import torch


def draw(T, heads=4, kv_heads=2, N=8, dtype=torch.float64):
    """Queries, keys, values and a gradient of the output, [1, T, heads, N] each."""
    generator = torch.Generator().manual_seed(T)
    return [
        torch.randn(1, T, h, N, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for h in (heads, kv_heads, kv_heads, heads)
    ]


def offsets_of(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).int()
