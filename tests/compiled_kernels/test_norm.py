"""The norm against its formula: where it rounds, which models' parity rests on, and its gradient."""

import pytest
import torch

from funrl.compiled_kernels.norm import rms_norm, rms_norm_reference


def problem(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (3 * torch.randn(64, 48, generator=generator)).to(dtype)
    return x, torch.randn(48, generator=generator).to(dtype)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_bfloat16_is_rounded_where_the_formula_rounds(offset):
    x, weight = problem(torch.bfloat16)
    assert torch.equal(rms_norm(x, weight, 1e-5, offset), rms_norm_reference(x, weight, 1e-5, offset))


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_values_and_gradients(offset):
    x, weight = (part.requires_grad_() for part in problem(torch.float64))
    values = [norm(x, weight, 1e-2, offset) for norm in (rms_norm, rms_norm_reference)]
    gradients = [torch.autograd.grad(value.square().sum(), (x, weight)) for value in values]
    assert all(torch.allclose(*pair, atol=1e-12) for pair in (values, *zip(*gradients, strict=True)))
