"""Cases of the kernels of `delta_rule` under Triton's interpreter, as a program: TRITON_INTERPRET is read at imports.

It prints as JSON, for each case, null or the traceback of its failure.
"""

import functools
import itertools
import json
import sys
import traceback

import torch
import torch.nn.functional as F
from torch.library import opcheck

from funrl.compiled_kernels.delta_rule import gated_delta, operators
from funrl.compiled_kernels.delta_rule.gated_delta import CHUNK_TOKENS as C
from funrl.compiled_kernels.gpu_kernels import trials

assert "triton" not in sys.modules, "triton is imported where a kernel runs, and not before"

NAMES = ("out", "end", "q", "k", "v", "log_decay", "beta", "first")
# Rows, key heads, value heads, sizes of keys and values; lengths of the sequences of a row; whether a state is before.
SIZES = ((1, 1, 1, 16, 16), (1, 2, 4, 16, 32), (2, 1, 2, 12, 40), (1, 1, 3, 33, 7), (1, 1, 2, 64, 64))
LENGTHS = ([1], [C - 1], [C + 1], [1, 2, 1, 7, 3, 1], [5, C, 1, C - 6, 3])
SHAPES = [(sizes, lengths, bool(i % 2)) for i, (sizes, lengths) in enumerate(itertools.product(SIZES, LENGTHS))]
SHAPES += [
    ((1, 1, 2, 128, 128), [70, 61], True),
    ((1, 1, 1, 64, 128), [2 * C], False),
    ((3, 2, 2, 16, 16), [C, C], True),
    ((1, 1, 1, 16, 256), [40], True),
    ((1, 1, 1, 256, 16), [30, 40], True),
]


def scene(sizes, lengths, state, dtype=torch.float32, decay=1.0, alike=0.0):
    """Leaves of the inputs with a first state, runs, and gradients of both results."""
    B, K, H, N, M = sizes
    T = sum(lengths)
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(B, *shape, generator=generator)

    units = [F.normalize(normal(T, K, N) * (1 - alike) + alike, dim=-1).to(dtype) for _ in range(2)]
    gates = -decay * F.softplus(normal(T, H)), normal(T, H).sigmoid().to(dtype)
    inputs = *units, normal(T, H, M).to(dtype), *gates, state * normal(H, N, M)
    runs = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).expand(B, T)
    return [x.requires_grad_() for x in inputs], runs, (normal(T, H, M).to(dtype), normal(H, N, M))


def by_kernels(leaves, runs):
    return operators.chunked_delta_rule(tuple(leaves[:5]), runs, leaves[5])


def reference(leaves, runs):
    """The formula token by token, and the state after the last one."""
    q, k, v, log_decay, beta, state = leaves
    q, k = (x.repeat_interleave(v.shape[2] // k.shape[2], 2) for x in (q, k))
    outs = []
    for t in range(v.shape[1]):
        kept = runs[:, t] == runs[:, max(t - 1, 0)]
        state = state * (log_decay[:, t].exp() * kept[:, None])[..., None, None]
        read = torch.einsum("bhnm,bhn->bhm", state, k[:, t])
        change = (v[:, t] - read) * beta[:, t, :, None]
        state = state + torch.einsum("bhn,bhm->bhnm", k[:, t], change)
        outs.append(torch.einsum("bhnm,bhn->bhm", state, q[:, t]))
    return torch.stack(outs, 1), state


def compare(leaves, runs, weights, tolerance):
    """Results and every gradient by the kernels beside the reference in float64."""
    results = by_kernels(leaves, runs)
    got = *results, *torch.autograd.grad(results, leaves, weights)
    wide = [x.detach().double().requires_grad_() for x in leaves]
    expected = reference(wide, runs)
    expected = *expected, *torch.autograd.grad(expected, wide, [x.double() for x in weights])
    assert [x.dtype for x in got[2:]] == [x.dtype for x in leaves]
    for name, a, b in zip(NAMES, got, expected, strict=True):
        error = ((a.double() - b).abs().max() / (1 + b.abs().max())).item()
        assert error < tolerance, f"{name} differs by {error}"


def shapes_equal_float64():
    assert len(SHAPES) == 30
    for shape in SHAPES:
        try:
            compare(*scene(*shape), tolerance=2e-6 if len(shape[1]) == 1 else 5e-5)
        except Exception as error:
            raise AssertionError(f"shape {shape}") from error


def numbers_of_16_bits_equal_float64():
    """In float16, since the interpreter multiplies no bfloat16."""
    for shape in (SHAPES[6], SHAPES[9], SHAPES[14], SHAPES[-5]):
        compare(*scene(*shape, dtype=torch.float16), tolerance=3e-3)


def keys_that_are_alike_lose_no_digits():
    """Powers of the overlap would reach 1e17 here; the inverse is of size 1."""
    compare(*scene((1, 1, 1, 16, 16), [C + 20], True, decay=1e-3, alike=0.97), tolerance=2e-5)


def strong_decays_leave_three_digits():
    """Tokens forget all but e^-300, or all, beside others that forget nothing."""
    leaves, runs, weights = scene((1, 1, 2, 16, 16), [2 * C], True)
    decay = torch.full_like(leaves[3], -1e-3)
    decay[:, :19] = -300.0
    decay[:, 19] = -torch.inf
    leaves[3] = decay.requires_grad_()
    compare(leaves, runs, weights, tolerance=1e-3)  # differences of sums of up to 6,000 in float32


def every_caller_computes_by_them():
    """Rows with and without borders, prompts with a state, and parts of rows of `sp`; gradients of all but prompts."""
    leaves, runs, (weight, _) = scene((2, 1, 2, 16, 24), [50, 40], True, dtype=torch.float16)
    *heads, first = leaves
    wide = [x.detach().double().requires_grad_() for x in heads]
    rules = (lambda h: gated_delta.gated_delta_rule(*h, runs), lambda h: gated_delta.gated_delta_rule(*h))
    with torch.no_grad():
        continued = gated_delta.continue_delta_rule(*(x.detach() for x in (*heads, first)))
        whole = torch.zeros_like(runs)
        for a, b in zip(continued, reference([*wide, first.double()], whole), strict=True):
            assert (a.double() - b).abs().max() < 5e-3
    for rule in (*rules, lambda h: gated_delta.part_of_delta_rule(*h, runs)[0][..., :24]):
        out = rule(heads)
        grads = torch.autograd.grad(out, heads, weight.to(out.dtype))
        expected = rule(wide)
        for a, b in zip((out, *grads), (expected, *torch.autograd.grad(expected, wide, weight.double())), strict=True):
            assert (a.double() - b).abs().max() < 5e-3 * (1 + b.abs().max())


def any_number_of_tokens_is_one_graph():
    compiled = torch.compile(gated_delta.gated_delta_rule, fullgraph=True, backend="aot_eager")
    for tokens in (150, 70, 131):
        (*heads, _), runs, (weight, _) = scene((1, 1, 2, 16, 16), [tokens - 60, 60], False, dtype=torch.float16)
        for x in (*heads, runs):
            torch._dynamo.maybe_mark_dynamic(x, 1)
        results = []
        for rule in (compiled, gated_delta.gated_delta_rule):
            out = rule(*heads, runs)
            results.append((out, *torch.autograd.grad(out, heads, weight)))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def operators_keep_their_promises():
    """What they write, and the shapes that a tracer is told, for any number of tokens."""
    leaves, _, weights = scene((1, 1, 2, 16, 16), [70], True, dtype=torch.float16)
    given = tuple(x.detach() for x in leaves)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    opcheck(operators._forward.definition, given, test_utils=tests)
    opcheck(operators._backward.definition, (*weights, *given), test_utils=tests)


def wrong_kernels_are_found():
    """A trial takes the sizes of heads that are used; it sees a gradient that is a tenth too large."""
    from funrl.compiled_kernels.delta_rule import kernels

    def gated_delta_rule_error(device):
        return gated_delta.kernel_error(device, 16, 32, torch.float16)

    trials._PROBED = "cpu"
    tolerance = gated_delta._TOLERANCE
    results = []

    def right(launch, *given):
        results.append(launch(*given))
        return results[-1]

    for name in ("launch_rule", "launch_rule_gradients"):
        setattr(kernels, name, functools.partial(right, getattr(kernels, name)))
    assert trials.trial_problem(gated_delta_rule_error, tolerance) is None
    rule, gradients = results
    kernels.launch_rule = lambda *_: rule
    for wrong in range(6):
        scaled = [1.1 * x if i == wrong else x for i, x in enumerate(gradients)]
        kernels.launch_rule_gradients = lambda *_, scaled=scaled: scaled
        assert "differ by 0.1 from" in trials.trial_problem(gated_delta_rule_error, tolerance)


CASES = (
    shapes_equal_float64,
    numbers_of_16_bits_equal_float64,
    keys_that_are_alike_lose_no_digits,
    strong_decays_leave_three_digits,
    every_caller_computes_by_them,
    any_number_of_tokens_is_one_graph,
    operators_keep_their_promises,
    wrong_kernels_are_found,
)


def main():
    gated_delta._by_kernels = lambda v, *sizes: v.dtype == torch.float16
    results = {}
    for case in CASES:
        results[case.__name__] = None
        try:
            case()
        except Exception:
            results[case.__name__] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
