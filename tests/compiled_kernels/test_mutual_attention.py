"""Attention in which the tokens of groups see later ones of their group: packed, with gradients, and over pages."""

import pytest
import torch
from packed_rows import draw, offsets_of

from funrl.compiled_kernels.attention import attention_reference
from funrl.compiled_kernels.kernel_library import KernelError
from funrl.compiled_kernels.mutual_attention import mutual_mask, mutual_paged_attention
from funrl.compiled_kernels.packed import AttentionOptions
from funrl.compiled_kernels.paged_attention import paged_attention, paging_of
from funrl.compiled_kernels.varlen_attention import varlen_attention, varlen_attention_reference

GROUPS = torch.tensor([[1, 2, 3, 4], [9, 10, 11, 12], [13, 14, 15, 16]])
LENGTHS = [6, 2, 12]
NO_WINDOW = AttentionOptions()


def with_gradients(attend, q, k, v, d_out):
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    out = attend(*leaves)
    return [out, *torch.autograd.grad(out, leaves, d_out)]


@pytest.mark.parametrize("cap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_packed_rows_equal_the_reference(kv_heads, window, cap):
    q, k, v, d_out = draw(sum(LENGTHS) + 3, 4, kv_heads)
    offsets = offsets_of(LENGTHS)
    how = {"window": window, "scale": 0.4, "cap": cap}
    got, expected = (
        with_gradients(lambda q, k, v, fn=fn: fn(q, k, v, offsets, **how, mutual_RM=GROUPS), q, k, v, d_out)
        for fn in (varlen_attention, varlen_attention_reference)
    )
    assert all((a - b).abs().max() < 1e-12 for a, b in zip(got, expected, strict=True))
    changed = (got[0] - varlen_attention(q, k, v, offsets, **how)).abs().amax((0, 2, 3)) > 1e-3
    assert changed.nonzero().flatten().tolist() == GROUPS[:, :-1].flatten().tolist()  # the last sees no later one


def test_groups_go_under_the_compiler_whole():
    q, k, v, d_out = draw(20, 4, 2)
    run = torch.compile(varlen_attention, fullgraph=True, backend="aot_eager")
    got, expected = (
        with_gradients(lambda q, k, v, fn=fn: fn(q, k, v, offsets_of(LENGTHS), mutual_RM=GROUPS), q, k, v, d_out)
        for fn in (run, varlen_attention)
    )
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize("window", [None, 3, 6])
def test_pages_have_the_numbers_of_packed_rows(window):
    q, k, v, _ = (x.detach() for x in draw(20, 4, 2))
    expected = varlen_attention(q, k, v, offsets_of(LENGTHS), window=window, mutual_RM=GROUPS)[0]
    cache = tuple(torch.zeros(9, 4, 2, 8, dtype=q.dtype) for _ in range(2))
    table = torch.tensor([[3, 1, 0], [4, 0, 0], [7, 2, 5]])
    outs = []
    # The first pass ends before the groups of the last row, the second has all of them.
    for counts, ends, rows, places in (([6, 2, 1], [6, 2, 1], [0, 1, 2], [[1, 2, 3, 4]]), ([11], [12], [2], None)):
        rows = torch.cat(
            [
                torch.arange(sum(LENGTHS[:r]) + e - c, sum(LENGTHS[:r]) + e)
                for r, c, e in zip(rows, counts, ends, strict=True)
            ]
        )
        new = (q[0, rows], k[0, rows], v[0, rows])
        paging = paging_of(counts, ends, table if len(counts) > 1 else table[2:], 4)
        groups = torch.tensor(places or [[0, 1, 2, 3], [4, 5, 6, 7]])
        out = paged_attention(*new, cache, paging, window)
        outs.append((rows, mutual_paged_attention(new[0], out, cache, paging, groups, AttentionOptions(window or 0))))
    for rows, out in outs:
        assert (out - expected[rows]).abs().max() < 1e-12


@pytest.mark.slow
def test_pages_go_under_the_compiler_whole_for_any_number_of_groups():
    q, k, v, _ = (x.detach()[0] for x in draw(16, 4, 2))
    cache = tuple(torch.zeros(4, 4, 2, 8, dtype=q.dtype) for _ in range(2))
    paging = paging_of([16], [16], torch.tensor([[3, 1, 0, 2]]), 4)
    out = paged_attention(q, k, v, cache, paging)
    run = torch.compile(mutual_paged_attention, fullgraph=True, backend="aot_eager", dynamic=True)
    for groups in (GROUPS[:1], GROUPS[:2], torch.tensor([[0, 1], [2, 3], [7, 8]])):
        expected = mutual_paged_attention(q, out.clone(), cache, paging, groups, AttentionOptions(0))
        assert torch.equal(
            run(q, out.clone(), cache, paging, groups, AttentionOptions(0)), expected
        ) and not torch.equal(out, expected)


def test_the_mask_has_the_groups_and_other_forms_are_refused():
    q, k, v, _ = draw(20, 4, 2)
    mask = mutual_mask(GROUPS, 20)
    assert mask.sum() == 3 * 16 and mask[9, 12] and not mask[12, 13] and not mask[0, 0]
    seen = (torch.ones(20, 20, dtype=torch.bool).tril() | mask).unsqueeze(0)
    whole = varlen_attention(q, k, v, offsets_of([20]), mutual_RM=GROUPS)
    assert (whole - attention_reference(q, k, v, seen)).abs().max() < 1e-12
    for how in ({"blockwise": True}, {"sinks_H": torch.zeros(4, dtype=torch.float64)}):
        with pytest.raises(KernelError, match="attention to later tokens has no form for XLA, and none with sinks"):
            varlen_attention(q, k, v, offsets_of([20]), mutual_RM=GROUPS, **how)
