"""Splash attention, interpreted on the CPU, against attention by blocks in torch."""

import pytest

pytest.importorskip("jax")
import torch
from jax.experimental.pallas import tpu as pltpu
from single_device import program_of

from funrl.compiled_kernels.blockwise_attention import blockwise_attention, kernel_attention

pytestmark = pytest.mark.xla

OFFSETS = torch.tensor([0, 37, 37, 90, 120, 120], dtype=torch.int32)  # of 131 tokens, with an empty segment


@pytest.mark.slow
@pytest.mark.parametrize("window,cap", [(None, None), (20, 0.7)], ids=["plain", "window and cap"])
def test_results_and_gradients_are_those_of_blocks(window, cap):
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, 131, 4, 64), (1, 131, 2, 64), (1, 131, 2, 64), (1, 131, 4, 64)]
    *inputs, d_out = (torch.randn(shape, generator=generator) for shape in shapes)

    def gradients(attend):
        def run(inputs, d_out, offsets):
            inputs = [x.detach().requires_grad_() for x in inputs]
            with torch.enable_grad():
                out = attend(*inputs, offsets, window, scale=0.1, cap=cap)
            return out.detach(), torch.autograd.grad(out, inputs, d_out)

        return run

    args = (tuple(inputs), d_out, OFFSETS)
    out, grads = gradients(blockwise_attention)(*args)
    with pltpu.force_tpu_interpret_mode():
        program = program_of(gradients(kernel_attention))
        results = program(*args)
    (compiled,) = program.compiled.values()
    assert len(compiled.program.graph.graph.nodes) < 60  # one is the kernel, and one its gradient
    for x, y in zip((results[0], *results[1]), (out, *grads), strict=True):
        assert (x - y).abs().max() < 1e-5 < y.abs().max()
