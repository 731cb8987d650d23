"""Attention to latent vectors in pages against its plain reference, and its counts of work."""

import pytest
import torch
from test_paged_attention import PASSES, draw, table_of

from funrl.compiled_kernels.latent_paged_attention import (
    absorbs,
    latent_paged_attention,
    latent_paged_attention_reference,
    latent_paged_bytes,
    latent_paged_flops,
    static_latent_paged_attention,
)
from funrl.compiled_kernels.paged_attention import paging_of

HEADS, NOPE, ROPE = 3, 4, 2
WAYS = {"latent": (8, 5), "both": (40, 7)}  # rank and size of a value: with the latter prompts make keys and values


def scene(sequences, rank, value, dtype=torch.float64):
    counts, ends = zip(*sequences, strict=True)
    table, pages = table_of(ends, 4)
    q, up = draw(sum(counts), HEADS, NOPE + ROPE, seed=1, dtype=dtype), draw(HEADS, NOPE + value, rank, dtype=dtype)
    latent, cache = (draw(*shape, rank + ROPE, seed=2, dtype=dtype) for shape in ((sum(counts),), (pages, 4)))
    return q, latent, up, cache, paging_of(counts, ends, table, 4)


@pytest.mark.parametrize("sequences", PASSES.values(), ids=PASSES)
@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_reference(way, sequences):
    rank, value = WAYS[way]
    q, latent, up, cache, paging = scene(sequences, rank, value)
    kept, tensor = cache.clone(), latent_paged_attention(q, latent, up, cache, paging, value, 0.3)
    expected = latent_paged_attention_reference(q, latent, up, kept, paging, value, 0.3)
    assert tensor.shape == (len(q), HEADS, value) and (tensor - expected).abs().max() < 1e-12
    assert torch.equal(cache, kept)


@pytest.mark.parametrize("sequences", [[(1, 8), (1, 7), (1, 1)], [(3, 3), (3, 9)]], ids=["decoding", "rows"])
@pytest.mark.parametrize("way", WAYS)
def test_the_static_form_is_the_reference(way, sequences):
    rank, value = WAYS[way]
    q, latent, up, cache, paging = scene(sequences, rank, value)
    kept, result = cache.clone(), static_latent_paged_attention(q, latent, up, cache, paging, 0.3)
    expected = latent_paged_attention_reference(q, latent, up, kept, paging, value, 0.3)
    assert (result - expected).abs().max() < 1e-12 and torch.equal(cache, kept)


def test_prompts_and_new_tokens_go_the_cheaper_way():
    _, _, up, _, _ = scene([(1, 1)], *WAYS["both"])
    assert absorbs(1, up, 42, 7) and absorbs(6, up, 42, 7) and not absorbs(7, up, 42, 7)
    big = torch.empty(128, 256, 512, device="meta")  # DeepSeek-V3
    assert absorbs(1, big, 576, 128) and absorbs(64, big, 576, 128) and not absorbs(512, big, 576, 128)


def test_its_work_is_that_of_its_products():
    q, latent, up, cache, paging = scene([(1, 8), (1, 7), (12, 12)], *WAYS["both"])
    pages = [2, 2, 3]
    decode = 2 * HEADS * (2 * 2 * 8 * 42 + 2 * 40 * (NOPE + 7))
    prefill = HEADS * 12 * (2 * 2 * 12 * 7 + 2 * 40 * (NOPE + 7))
    assert latent_paged_flops(up, cache, paging.groups_G5, 7) == decode + prefill
    nbytes = 8 * (2 * (q.numel() + latent.numel()) + up.numel() + sum(pages) * 4 * 42)
    assert latent_paged_bytes(q, latent, up, cache, paging.groups_G5) == nbytes
