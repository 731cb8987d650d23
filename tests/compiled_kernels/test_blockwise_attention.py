"""Attention by blocks of static shapes against the plain reference, and what a tracer sees of it."""

import functools

import pytest
import torch
from packed_rows import draw, offsets_of
from torch.fx.experimental.proxy_tensor import make_fx

from funrl.compiled_kernels.blockwise_attention import blockwise_attention
from funrl.compiled_kernels.varlen_attention import segment_offsets, varlen_attention, varlen_attention_reference
from funrl.models import Inputs, decoder_config, decoder_model
from funrl.models.decoder.decoder import decoder_layer

STRUCTURES = {  # tokens of each segment, and padding behind them
    "one": ([23], 0),
    "one token each": ([1, 1, 1], 0),
    "over many blocks": ([7, 1, 12, 3], 0),
    "on the borders": ([4, 4, 8], 0),
    "empty segments": ([0, 5, 0, 0, 8, 0], 0),
    "padding": ([4, 9, 0], 6),
    "nothing but padding": ([0, 0], 5),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("window", [None, 1, 3, 6, 100])
@pytest.mark.parametrize("scale,cap", [(None, None), (0.3, 0.8)])
def test_any_structure_equals_the_reference(structure, window, scale, cap):
    lengths, padding = STRUCTURES[structure]
    q, k, v, d_out = draw(sum(lengths) + padding)
    offsets, real = offsets_of(lengths), sum(lengths)
    expected = varlen_attention_reference(q, k, v, offsets, window, scale=scale, cap=cap)
    wanted = torch.autograd.grad(expected, (q, k, v), d_out) if real else None
    for block, longest in ((4, None), (4, max(lengths)), (512, None)):
        out = blockwise_attention(q, k, v, offsets, window, longest, scale, cap, block)
        assert out.shape == q.shape and (out - expected).abs().max() < 1e-12
        grads = torch.autograd.grad(out, (q, k, v), d_out)
        for x in (out, *grads):
            assert torch.equal(x[:, real:], torch.zeros_like(x[:, real:]))
        if wanted is not None:
            assert all((a - b).abs().max() < 1e-12 for a, b in zip(grads, wanted, strict=True))


def test_16_bits_are_summed_in_32():
    inputs, offsets = draw(40, dtype=torch.bfloat16), offsets_of([25, 10])
    q, k, v, d_out = inputs
    wide = [x.detach().float().requires_grad_() for x in inputs[:3]]
    out, expected = blockwise_attention(q, k, v, offsets, block=8), varlen_attention_reference(*wide, offsets)
    assert out.dtype == torch.bfloat16 and (out - expected).abs().max() < 1e-2
    grad = torch.autograd.grad(out, (q, k, v), d_out)
    wanted = torch.autograd.grad(expected, wide, d_out.float())
    for got, want in zip(grad, wanted, strict=True):
        assert got.dtype == torch.bfloat16 and (got - want).abs().max() < 2e-2 * (1 + want.abs().max())


def test_it_is_asked_for_by_name():
    q, k, v, _ = draw(23)
    offsets = offsets_of([7, 1, 12])
    seen = make_fx(lambda *x: varlen_attention(*x, offsets, blockwise=True))(q, k, v)
    assert not any("funrl" in str(node.target) for node in seen.graph.nodes)
    plain = varlen_attention(q, k, v, offsets)
    assert (varlen_attention(q, k, v, offsets, blockwise=True) - plain).abs().max() < 1e-12


CONFIG = decoder_config(vocab=16, embed=8, layers=1, heads=2, kv_heads=1, head=4, mlp=16, family="qwen3", qk_norm=True)
MODEL = decoder_model(CONFIG)


def layer_in_blocks(config, mesh, params, x_BTD, context):
    return decoder_layer(config, mesh, params, x_BTD, context._replace(blockwise=True))


def packed_pass(params, tokens, segments, positions):
    """The sum of squares of the hidden states of a packed row, and its gradients."""
    offsets = segment_offsets(segments, 4)
    inputs = Inputs(tokens, positions, segments, offsets)
    leaves = {name: x.detach().requires_grad_() for name, x in params["layers"][0]["attn"].items()}
    tree = {**params, "layers": ({**params["layers"][0], "attn": leaves},)}
    hidden = MODEL.apply(tree, inputs, layer=layer_in_blocks).hidden
    return hidden, *torch.autograd.grad(hidden.square().sum(), list(leaves.values()))


def traced(T):
    """The graph of forward and backward pass of a packed row of T tokens, with fake tensors."""
    params = MODEL.init(torch.Generator().manual_seed(0))
    row = (torch.zeros(1, T, dtype=torch.int64), torch.ones(1, T, dtype=torch.int64), torch.arange(T)[None])
    return make_fx(packed_pass, tracing_mode="fake")(params, *row)


@pytest.mark.slow
def test_a_packed_layer_has_static_shapes_and_memory_linear_in_the_row():
    """With fake tensors what depends on numbers is an error; a matrix of 1,024^2 would be four times that of 512."""
    most = {}
    for T in (512, 1024):
        graph = traced(T).graph
        values = [x for node in graph.nodes if isinstance(x := node.meta.get("val"), torch.Tensor)]
        assert all(isinstance(size, int) for x in values for size in x.shape)
        assert not any("funrl" in str(node.target) or "local_scalar" in str(node.target) for node in graph.nodes)
        most[T] = max(x.numel() for x in values)
    assert most[512] == 512 * 512 * CONFIG.attention.heads
    assert most[1024] == 2 * most[512]


@pytest.mark.slow
def test_with_a_window_the_steps_do_not_grow_with_the_row():
    def products(T):
        q, k, v, _ = draw(T, dtype=torch.float32)
        offsets = torch.tensor([0, T], dtype=torch.int32)
        attend = functools.partial(blockwise_attention, window=20, block=16)
        graph = make_fx(attend, tracing_mode="fake")(q, k, v, offsets).graph
        return sum("bmm" in str(node.target) for node in graph.nodes)

    assert products(64) == products(640) == 2 * 3  # the own block and two before it, for the first token of a block


@pytest.mark.slow
def test_export_gives_operators_of_torchs_core():
    class Attention(torch.nn.Module):
        def forward(self, q, k, v, offsets):
            return blockwise_attention(q, k, v, offsets, 20, block=16)

    q, k, v, _ = (x.detach() for x in draw(64))
    offsets = offsets_of([30, 20])
    program = torch.export.export(Attention(), (q, k, v, offsets)).run_decompositions()
    calls = {node.target for node in program.graph.nodes if node.op == "call_function"}
    others = {str(op) for op in calls if torch.Tag.core not in op.tags}
    assert len(calls) > 10 and others <= {"aten._assert_tensor_metadata.default"}  # which computes nothing
    assert torch.equal(program.module()(q, k, v, offsets), blockwise_attention(q, k, v, offsets, 20, block=16))
