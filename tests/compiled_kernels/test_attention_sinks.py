"""Attention with sinks, keys of value 0 whose logits are weights: packed, padded and over pages, with gradients."""

import pytest
import torch
from packed_rows import draw, offsets_of

from funrl.compiled_kernels.attention import attention, attention_reference
from funrl.compiled_kernels.kernel_library import KernelError
from funrl.compiled_kernels.paged_attention import paged_attention, paged_attention_reference, paging_of
from funrl.compiled_kernels.varlen_attention import varlen_attention, varlen_attention_reference

SINKS = torch.tensor([0.3, -1.2, 4.0, -40.0, 0.0, 2.0], dtype=torch.float64)


def with_gradients(attend, *inputs):
    leaves = [x.clone().requires_grad_() for x in inputs[:-1]]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, inputs[-1])]


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [6, 2])
@pytest.mark.parametrize("lengths,padding", [([7, 1, 0, 12], 0), ([4, 9], 6)])
def test_packed_rows_equal_the_reference(lengths, padding, kv_heads, window):
    q, k, v, d_out = draw(sum(lengths) + padding, 6, kv_heads)
    offsets = offsets_of(lengths)
    how = {"window": window, "scale": 0.4}
    got, expected = (
        with_gradients(lambda q, k, v, s, fn=fn: fn(q, k, v, offsets, **how, sinks_H=s), q, k, v, SINKS, d_out)
        for fn in (varlen_attention, varlen_attention_reference)
    )
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))
    assert (got[0] - varlen_attention(q, k, v, offsets, **how)).abs().max() > 0.1 and got[-1].abs().min() >= 0


def test_whole_rows_equal_the_reference():
    q, k, v, d_out = draw(11, 6, 2)
    mask = torch.ones(1, 11, 11, dtype=torch.bool).tril().triu(-4)
    for how in ({"causal": True}, {"mask_BTS": mask}):
        got, expected = (
            with_gradients(lambda q, k, v, s, fn=fn, how=how: fn(q, k, v, **how, sinks_H=s), q, k, v, SINKS, d_out)
            for fn in (attention, attention_reference)
        )
        assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("window", [None, 3])
def test_passes_over_pages_equal_the_reference(window):
    counts, ends, page = [5, 1, 3], [9, 6, 3], 4
    q, k, v = (x[0] for x in draw(sum(counts), 6, 2)[:3])
    cache = tuple(torch.randn(9, page, 2, q.shape[-1], dtype=q.dtype) for _ in range(2))
    paging = paging_of(counts, ends, torch.arange(9).view(3, 3), page)
    got, expected = (
        fn(q, k, v, tuple(x.clone() for x in cache), paging, window, 0.4, sinks_H=SINKS)
        for fn in (paged_attention, paged_attention_reference)
    )
    assert (got - expected).abs().max() < 1e-12


def test_there_is_no_form_for_xla():
    q, k, v, _ = draw(5, 6, 2)
    with pytest.raises(KernelError, match="attention sinks have no form for XLA"):
        varlen_attention(q, k, v, offsets_of([5]), blockwise=True, sinks_H=SINKS)
