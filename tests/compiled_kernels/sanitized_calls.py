"""Calls of every C++ function over odd sizes, in threads and forks: a program that `test_sanitizers.py` runs.

The memory of a tensor is exactly as long as the tensor, so AddressSanitizer sees each access beyond it.
"""

import concurrent.futures
import os
import sys

import torch
from paged_sequences import Sequences, cast, config_of, weights

from funrl.compiled_kernels import decode_step, kernel_library, linear, packed
from funrl.compiled_kernels.arguments import real_of
from funrl.compiled_kernels.decode_step import packed_decoder
from funrl.compiled_kernels.exact import expert_operators, norm_operators, operators, scores
from funrl.compiled_kernels.exact.adapters import TokenAdapters
from funrl.compiled_kernels.packed import AttentionOptions, PagedKeys, page_attention, parts_of, sequence_attention
from funrl.models.decoder.compiled_step import step_sizes

SANITIZERS = (
    "-O1 -g1 -fno-omit-frame-pointer -fno-sanitize-recover=all -fsanitize=address,undefined"
    " -fno-sanitize=null,object-size,vptr"  # which take as long to compile as the rest
)
DTYPES = (torch.float32, torch.bfloat16, torch.float64)
SIZES = ((1, 1, 1), (3, 33, 7), (5, 65, 78), (67, 130, 96), (70, 40, 600), (515, 66, 40))  # rows, outputs, terms
DECODERS = ("odd sizes", "groups of 7", "groups of 10", "llama with biases", "qwen3")
THREADS = 3


def sanitize() -> None:
    """Let this process compile and load kernels that check what they do."""
    kernel_library.FLAGS = kernel_library.FLAGS.replace("-O3", SANITIZERS)


def draw(*shape, dtype, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def products(dtype):
    for M, N, K in SIZES:
        x, w, bias = (draw(*shape, dtype=dtype) for shape in ((M, K), (N, K), (N,)))
        yield operators.exact_linear(x, w, None, 1, True)
        yield operators.exact_linear(x, w, bias, parts_of(K), False)
        factors = [draw(3, K, dtype=dtype), draw(N, 3, dtype=dtype)]
        yield from operators.exact_low_rank(x, w, bias, factors, 0.5, parts_of(K))
        ends = torch.tensor([M // 2, M // 2, M - M // 4], dtype=torch.int32)
        groups = draw(3, N, K, dtype=dtype)
        yield expert_operators.exact_grouped_linear(x, groups, ends, parts_of(K), False)
        yield expert_operators.exact_grouped_linear(x, groups, ends, 1, True)
        heads = draw(M, 3, K, dtype=dtype)
        yield expert_operators.exact_head_products(heads, groups, N // 3, N, False)
        yield expert_operators.exact_head_products(
            heads[..., : K - K // 3], groups.mT.contiguous(), 0, K - K // 3, True
        )
        if dtype == torch.float32:
            total = draw(N, K, dtype=dtype)
            for add in (True, False):
                linear._transposed_product(draw(M, N, dtype=dtype), x, total, add)
                yield total.clone()


def rows(dtype):
    for M, _, D in SIZES:
        x, grad = draw(M, D, dtype=dtype), draw(M, D, dtype=dtype, seed=1)
        weight = draw(D, dtype=dtype, seed=2)
        for offset in (0.0, 1.0):
            yield operators.exact_norm(x, weight, 1e-6, offset)
            yield from operators.exact_norm_backward(grad, x, weight, 1e-6, offset)
            totals = norm_operators.exact_square_sums(x, parts_of(D))
            yield norm_operators.exact_scale_rows(x, totals, weight, D, 1e-6, offset)
        for activation in range(3):
            yield operators.exact_gate(x, grad, activation)
            yield from operators.exact_gate_backward(weight.expand_as(x), x, grad, activation)
        yield expert_operators.exact_sigmoid(x)
        wide = x.to(real_of(dtype))
        yield expert_operators.exact_softmax(wide)
        yield expert_operators.exact_largest(wide, (D + 1) // 2)
    for heads, size, turned in ((1, 2, 2), (3, 7, 6), (5, 34, 34), (40, 96, 32)):
        x = draw(2, 9, heads, size, dtype=dtype)
        turns = [draw(9, 1, turned, dtype=dtype, seed=seed) for seed in (1, 2)]
        yield operators.exact_rotate(x, *turns, 1)
        yield operators.exact_rotate(x, *turns, -1)


def logits(dtype):
    real = real_of(dtype)
    for T, V in ((1, 1), (3, 17), (2, 257), (9, 2056), (40, 700)):
        x = draw(T, V, dtype=real)
        ids = torch.stack((torch.zeros(T), torch.full((T,), V - 1), torch.arange(T) % V), 1).long()
        top = scores.largest_logits(x)
        yield top
        for more in (False, True):
            above, sums = scores.logit_moments(x, top, ids, 0.7, parts_of(V), more)
            yield from (above, sums)
            yield scores.log_probabilities(above, sums[:, 0], 0.7, real)


def attention(dtype):
    offsets = torch.tensor([0, 1, 1, 18, 51])
    table = torch.tensor([[4, 1, 9], [0, 9, 9], [7, 5, 2], [3, 6, 8]])
    ends = torch.tensor([1, 3, 40, 33])
    for heads, kv_heads, size, window, cap in ((3, 3, 7, 5, 0.0), (9, 1, 22, 0, 3.0), (14, 2, 16, 20, 0.0)):
        options = AttentionOptions(window, 0.0, cap)
        q = draw(53, heads, size, dtype=dtype)
        k, v = (draw(53, kv_heads, size, dtype=dtype, seed=seed) for seed in (1, 2))
        yield from sequence_attention(q, k, v, offsets, options)
        for page in (16, 17, 5):
            wide = table if page > 5 else torch.arange(40).remainder(10).view(4, 10)
            keys, values = (draw(10, page, kv_heads, size, dtype=dtype, seed=seed) for seed in (3, 4))
            yield from page_attention(q, PagedKeys(keys, values, wide, ends), offsets, options)


def steps(dtype):
    for name in DECODERS:
        config = config_of(name)
        params = cast(weights(config), dtype)
        decoder = packed_decoder(step_sizes(config), params, dtype)
        decoder.load(params)
        yield from (x.clone() for _, x in decoder.weights())
        sequences = Sequences(decoder, [1, 17, 40, 5], shuffle=3)
        yield from sequences.all(
            [[(0, 0, 1), (1, 0, 16), (2, 0, 33)], [(1, 16, 17), (2, 33, 34), (3, 0, 5)], [(2, 34, 40)]]
        )
        sizes = decoder.sizes
        factors = {"q": (sizes.heads * sizes.head, sizes.embed), "down": (sizes.embed, sizes.mlp)}
        layer = {name: (draw(3, K, dtype=dtype), draw(N, 3, dtype=dtype)) for name, (N, K) in factors.items()}
        adapter = decoder.adapter([layer] * sizes.layers, 0.5)
        yield from (x for layer in adapter.factors() for pair in layer.values() for x in pair)
        N = 19
        tables = torch.tensor([[1, 2], [0, 3]], dtype=torch.int32)
        call = (torch.arange(N), torch.arange(N), torch.zeros(N, dtype=torch.int64), tables, torch.tensor([N - 1, 0]))
        numbers = torch.arange(N).remainder(3) - 1
        cache = decoder.init_cache(4)
        out = decoder.forward(cache, *call, adapters=TokenAdapters([adapter, adapter], numbers))
        decoder.copy_pages(cache, [1, 2], [0, 3])
        yield out
        source = torch.tensor([1, 0, 1])
        noise = torch.tensor([0.0001, 0.5, 0.9999], dtype=torch.float64)
        yield from decoder.sample(out, source, noise, 0.7)
        yield from decoder.sample(out, source, None, noise + 1)


KINDS = (products, rows, logits, attention, steps)


def results(kind, dtype, threads):
    torch.get_num_threads = lambda: threads  # of the functions alone: a child of a fork cannot use torch's own
    return [x.clone() for x in kind(dtype)]


def equal(first, second):
    return len(first) == len(second) and all(
        torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True)
    )


def in_a_child(compute):
    """Exit status of a child that computes something."""
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1]
    status = 1
    try:
        status = 0 if compute() else 2
    finally:
        os._exit(status)


def refused():
    """The calls with wrong arguments, none of which may touch memory."""
    import test_wrong_arguments

    calls = [(call, ()) for call, _ in test_wrong_arguments.REFUSED.values()]
    decoder = test_wrong_arguments.decoder_of("llama")
    calls += [(call, (decoder,)) for call, _ in test_wrong_arguments.REFUSED_BY_A_STEP.values()]
    for call, arguments in calls:
        try:
            call(*arguments)
        except (ValueError, kernel_library.KernelError):
            continue
        raise AssertionError("a wrong argument is accepted")
    return len(calls)


def main():
    sanitize()
    packed.zeroed = decode_step.zeroed = lambda count, dtype: torch.zeros(count, dtype=dtype)  # not whole pages
    cases = [(kind, dtype) for kind in KINDS for dtype in DTYPES]
    alone = {case: results(*case, 1) for case in cases}
    for case in cases:
        assert equal(results(*case, THREADS), alone[case]), case
    for kind in (products, steps):  # with threads that are left behind, then with some of its own
        assert (
            in_a_child(lambda kind=kind: equal(results(kind, torch.float32, THREADS), alone[kind, torch.float32])) == 0
        )
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:  # several callers at once
        computed = pool.map(
            lambda case: equal(results(*case, THREADS), alone[case]), [c for c in cases if c[0] is not steps]
        )
        assert all(computed)
    count = sum(map(len, alone.values()))
    print(f"{count} results, {refused()} refusals")


def plant():
    """A norm whose result is shorter than its rows."""
    sanitize()
    row, weight, out = torch.ones(33), torch.ones(33), torch.ones(32)
    pointers = (x.data_ptr() for x in (row, weight, out))
    kernel_library.library().funrl_norm(32, *pointers, 1, 33, 1e-6, 0.0, 1)


if __name__ == "__main__":
    if not sys.argv[1:]:
        main()
    elif sys.argv[1] == "compile":
        sanitize()
        print(kernel_library._compiled())
    else:
        plant()
