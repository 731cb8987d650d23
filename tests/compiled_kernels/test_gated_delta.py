"""The gated delta rule by chunks and its convolution, against loops over tokens and over numbers."""

import math

import pytest
import torch
import torch.nn.functional as F

from funrl.compiled_kernels.delta_rule import gated_delta as kernel
from funrl.cost.tracing.tracer import operator_facts

KEY_HEADS, HEADS, N, M, WIDTH = 2, 4, 3, 5, 4
C = kernel.CHUNK_TOKENS
# Lengths of the sequences of each row.
ROWS = {
    "one token": [[1]],
    "a token less than a chunk": [[C - 1]],
    "a chunk": [[C]],
    "a token more than a chunk": [[C + 1]],
    "several chunks": [[2 * C + 7], [2 * C + 7]],
    "many sequences in a chunk": [[1, 2, 1, 7, 3, 1, 1, 9, 12]],
    "sequences across chunks": [[5, C, 1, C - 6, 2 * C, 3]],
    "one sequence a token": [[1] * (C + 2)],
    "rows that differ": [[C - 1, 2, C + 4], [3, 2 * C - 1, 3]],
}


def _inputs(rows, dtype=torch.float64, scale=1.0):
    """Queries, keys, values, decays and betas; and the numbers of the sequences."""
    generator = torch.Generator().manual_seed(0)
    B, T = len(rows), sum(rows[0])

    def normal(*shape):
        return scale * torch.randn(B, T, *shape, generator=generator, dtype=torch.float64)

    q, k = (F.normalize(normal(KEY_HEADS, N), dim=-1) for _ in range(2))
    inputs = q, k, normal(HEADS, M), -F.softplus(normal(HEADS)), normal(HEADS).sigmoid()
    segments = torch.stack([torch.repeat_interleave(torch.arange(len(row)) + 1, torch.tensor(row)) for row in rows])
    return [x.to(dtype).requires_grad_() for x in inputs], segments


def _with_grads(function, inputs, *rest):
    out = function(*inputs, *rest)
    weight = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=out.dtype)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), inputs)


@pytest.mark.parametrize("name", ROWS)
def test_chunks_equal_the_loop_over_tokens(name):
    inputs, segments = _inputs(ROWS[name])
    got = _with_grads(kernel.gated_delta_rule, inputs, segments)
    expected = _with_grads(kernel.gated_delta_rule_reference, inputs, segments)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-10


def test_a_loop_over_numbers():
    """The reference itself, and that a row without numbers of sequences is one sequence."""
    inputs, _ = _inputs([[6]])
    got = kernel.gated_delta_rule(*inputs).detach()
    assert (got - kernel.gated_delta_rule_reference(*inputs)).abs().max() < 1e-12
    q, k, v, log_decay, beta = (x.detach()[0].tolist() for x in inputs)
    for head in range(HEADS):
        state = [[0.0] * M for _ in range(N)]
        key_head = head // (HEADS // KEY_HEADS)
        for t in range(6):
            key, query = k[t][key_head], q[t][key_head]
            state = [[math.exp(log_decay[t][head]) * x for x in row] for row in state]
            read = [sum(key[n] * state[n][m] for n in range(N)) for m in range(M)]
            change = [beta[t][head] * (v[t][head][m] - read[m]) for m in range(M)]
            state = [[state[n][m] + key[n] * change[m] for m in range(M)] for n in range(N)]
            for m in range(M):
                expected = sum(query[n] * state[n][m] for n in range(N))
                assert abs(float(got[0, t, head, m]) - expected) < 1e-12


def test_a_sequence_is_the_same_wherever_it_stands():
    inputs, segments = _inputs([[5, C + 9, 40]])
    got = _with_grads(kernel.gated_delta_rule, inputs, segments)
    for begin, end in ((0, 5), (5, C + 14), (C + 14, C + 54)):
        alone = [x.detach()[:, begin:end].requires_grad_() for x in inputs]
        out = kernel.gated_delta_rule(*alone)
        assert (out - got[0][:, begin:end]).abs().max() < 1e-12


@pytest.mark.slow
def test_gradients_by_finite_differences(monkeypatch):
    monkeypatch.setattr(kernel, "CHUNK_TOKENS", 4)
    inputs, segments = _inputs([[3, 6]])
    small = [x.detach()[:, :, : max(1, x.shape[2] // 2)].requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(lambda *x: kernel.gated_delta_rule(*x, segments), small)


def test_strong_decays_leave_no_rounding_behind():
    """Tokens that forget all but e^-300 stand before others that forget nothing, in one chunk of float32."""
    inputs, segments = _inputs([[2 * C]])
    decay = torch.zeros_like(inputs[3])
    decay[:, :20] = -300.0
    inputs[3] = decay - 1e-3
    expected = kernel.gated_delta_rule_reference(*inputs, segments)
    got = kernel.gated_delta_rule(*(x.float() for x in inputs), segments)
    assert got.dtype == torch.float32
    assert (got - expected).abs().max() < 2e-6


def test_16_bits_are_computed_wide():
    inputs, segments = _inputs([[30, C]], torch.bfloat16)
    got = kernel.gated_delta_rule(*inputs, segments)
    wide = kernel.gated_delta_rule(*(x.float() for x in inputs), segments)
    assert got.dtype == torch.bfloat16
    assert torch.equal(got, wide.bfloat16())


@pytest.mark.slow
def test_compiled_in_one_graph():
    inputs, segments = _inputs(ROWS["sequences across chunks"])
    compiled = torch.compile(kernel.gated_delta_rule, fullgraph=True, backend="aot_eager")
    got = _with_grads(compiled, inputs, segments)
    for a, b in zip(got, _with_grads(kernel.gated_delta_rule, inputs, segments), strict=True):
        assert (a - b).abs().max() < 1e-12


@pytest.mark.slow
def test_operators_of_states_keep_their_promises():
    """For any number of chunks, as rows of a compiled graph have."""
    updates, readers, keys, whole = (torch.ones(1, 3, HEADS, *shape) for shape in ((C, M), (C, N), (C, N), ()))
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(kernel._chunk_states.definition, (updates, readers, keys, whole, None), test_utils=tests)
    given = updates, torch.ones(1, 3, HEADS, N, M), readers, keys, whole
    torch.library.opcheck(kernel._chunk_states_backward.definition, given, test_utils=tests)


def test_a_pass_has_the_strides_that_a_compiled_graph_expects():
    tokens = 5  # of one sequence, in 16 bits
    D = 2 * N + HEADS * M
    channels = torch.randn(tokens, D, dtype=torch.bfloat16)
    gates = torch.rand(tokens, HEADS)
    cells = torch.zeros(1, HEADS, N, M), torch.zeros(1, WIDTH - 1, D), torch.zeros(1, dtype=torch.int64)
    places = torch.arange(tokens), torch.tensor([[0, 0, 1, tokens, tokens]])
    given = (channels, -gates, gates, torch.randn(D, WIDTH), *cells, *places, 1, N)
    torch.library.opcheck(torch.ops.funrl.delta_net_pass.default, given, test_utils="test_faketensor")
    assert torch.ops.funrl.delta_net_pass(*given).is_contiguous()


@pytest.mark.parametrize("name", ["one token", "several chunks", "many sequences in a chunk", "rows that differ"])
def test_convolution_equals_the_loop_over_tokens(name):
    _, segments = _inputs(ROWS[name])
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(*segments.shape, 3, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, WIDTH, generator=generator, dtype=torch.float64).requires_grad_()
    got = _with_grads(kernel.causal_convolution, (x, weight), segments)
    expected = _with_grads(kernel.causal_convolution_reference, (x, weight), segments)
    for a, b in zip(got, expected, strict=True):
        assert (a - b).abs().max() < 1e-12


def test_convolution_of_whole_rows_is_that_of_torch():
    x = torch.randn(2, 9, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    weight = torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    padded = F.pad(x.mT, (WIDTH - 1, 0))
    expected = F.conv1d(padded, weight.unsqueeze(1), groups=3).mT
    assert (kernel.causal_convolution(x, weight) - expected).abs().max() < 1e-12


def test_a_dry_run_counts_its_products():
    """Of the loop over chunks two products of [C, N] and [N, M] a head and chunk, of the system C^2 a right side."""
    shapes = ((1, 3, HEADS, C, M), (1, 3, HEADS, C, N), (1, 3, HEADS, C, N), (1, 3, HEADS))
    updates, readers, keys, whole = (torch.ones(shape) for shape in shapes)
    states = torch.ones(1, 3, HEADS, N, M)
    ops = torch.ops.funrl
    loop = operator_facts(ops.chunk_states.default).flops
    assert loop(updates, readers, keys, whole, out_val=None) == 3 * HEADS * 2 * (2 * C * N * M)
    backward = operator_facts(ops.chunk_states_backward.default).flops
    assert backward(updates, states, readers, keys, whole, out_val=None) == 3 * HEADS * 2 * (2 * C * N * M)
    system = operator_facts(torch.ops.aten.linalg_solve_triangular.default).flops
    assert system(torch.ones(2, C, C), torch.ones(2, C, 7), upper=False, out_val=None) == 2 * C * C * 7
