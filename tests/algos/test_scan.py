import pytest
import torch
from torch import Tensor

from funrl.algos.scan import reverse_linear_scan


def loop_over_time(x_BT: Tensor, decay_BT: Tensor) -> Tensor:
    """`reverse_linear_scan` as a loop, one position at a time."""
    y_BT = torch.empty_like(x_BT)
    after = torch.zeros_like(x_BT[..., 0])
    for t in reversed(range(x_BT.shape[-1])):
        after = x_BT[..., t] + decay_BT[..., t] * after
        y_BT[..., t] = after
    return y_BT


def inputs(rows, length, dtype=torch.float64):
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(rows, length, generator=generator, dtype=dtype)
    return x, torch.rand(rows, length, generator=generator, dtype=dtype)


@pytest.mark.parametrize("length", [1, 2, 3, 5, 8, 31, 64, 100, 257])
def test_equals_the_loop(length):
    x, decay = inputs(3, length)
    torch.testing.assert_close(reverse_linear_scan(x, decay), loop_over_time(x, decay), rtol=1e-13, atol=1e-13)


def test_float32_stays_close_to_float64_over_long_rows():
    x, decay = inputs(2, 4096)
    decay = torch.ones_like(decay)
    exact = loop_over_time(x, decay)
    ours = reverse_linear_scan(x.float(), decay.float()).double()
    loop = loop_over_time(x.float(), decay.float()).double()
    assert (ours - exact).abs().max() <= (loop - exact).abs().max()


def test_zero_or_one_decays_carry_values_exactly():
    x, _ = inputs(4, 33)
    counts = torch.rand(4, 33, generator=torch.Generator().manual_seed(0)) < 0.4
    carried = reverse_linear_scan(torch.where(counts, x, torch.zeros_like(x)), (~counts).to(x.dtype))
    for row in range(4):
        held = 0.0
        for t in reversed(range(33)):
            held = x[row, t].item() if counts[row, t] else held
            assert carried[row, t].item() == held


def test_the_last_decay_has_no_influence():
    x, decay = inputs(2, 7)
    other = decay.clone()
    other[:, -1] = 1e6
    assert torch.equal(reverse_linear_scan(x, decay), reverse_linear_scan(x, other))


def test_leading_dimensions_and_empty_rows():
    x, decay = inputs(6, 9)
    folded = reverse_linear_scan(x.reshape(2, 3, 9), decay.reshape(2, 3, 9))
    assert torch.equal(folded.reshape(6, 9), reverse_linear_scan(x, decay))
    assert reverse_linear_scan(torch.zeros(0, 5), torch.zeros(0, 5)).shape == (0, 5)
    assert reverse_linear_scan(torch.zeros(2, 0), torch.zeros(2, 0)).shape == (2, 0)


@pytest.mark.slow
def test_compiles_whole_with_the_gradients_of_the_loop():
    x, decay = (z.requires_grad_() for z in inputs(2, 11))
    weights = torch.linspace(-1, 1, 22, dtype=torch.float64).reshape(2, 11)
    fast = torch.compile(reverse_linear_scan, fullgraph=True, backend="aot_eager")
    grads = torch.autograd.grad((fast(x, decay) * weights).sum(), (x, decay))
    columns, after = [], torch.zeros(2, dtype=torch.float64)
    for t in reversed(range(11)):
        after = x[:, t] + decay[:, t] * after
        columns.append(after)
    expected = torch.autograd.grad((torch.stack(columns[::-1], 1) * weights).sum(), (x, decay))
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
