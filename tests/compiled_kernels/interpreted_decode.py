"""Cases of the kernels of fused decoding under Triton's interpreter, which interpreted_cases.py runs."""

import itertools
import math

import torch

from funrl.compiled_kernels import fused_decode as fused
from funrl.compiled_kernels.decode_slots import ENDED, GROUP, LENGTH, LIMIT, PROMPT, SEED, STOP, SlotState
from funrl.compiled_kernels.decode_step import StepSizes
from funrl.compiled_kernels.exact import registration
from funrl.compiled_kernels.float8 import FLOAT8, round_rows
from funrl.compiled_kernels.gpu_kernels import decode_kernels
from funrl.compiled_kernels.rotary import frequencies
from funrl.rollout.native.device.row_sampler import row_sampler_error, sample_next_tokens
from funrl.rollout.sampling import sample_tokens, stream_noise
from funrl.rollout.sampling_parameters import Sampling

ROWS = (1, 2, 3, 5, 8)
WIDTHS = (1, 7, 32, 40, 129, 300)  # some divide no block
PARTS = (0, 1, 3)  # of a product; 0: it is whole
HEADS = ((1, 1, 2), (2, 1, 8), (7, 1, 24), (4, 4, 16), (6, 2, 96), (3, 3, 10))  # query heads, key heads, size
VOCABS = (5, 256, 257, 1000, 4097, 5003)
SAMPLINGS = (Sampling(), Sampling(temperature=0.6), Sampling(temperature=1.7), Sampling(greedy=True))


def draw(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def wide(xs):
    return [x.double() if isinstance(x, torch.Tensor) and x.is_floating_point() else x for x in xs]


def compare(operation, reference, args, written=(), tolerance=2e-5):
    """An operator in float32 beside its reference in float64, and the arguments that both write to."""
    expected_args = wide(args)
    expected = reference(*expected_args)
    got = operation(*args)
    pairs = list(zip(got, expected, strict=True)) if isinstance(got, tuple) else [(got, expected)]
    for a, b in pairs + [(args[i], expected_args[i]) for i in written]:
        assert a.shape == b.shape
        error = (a.double() - b.double()).abs().max().item()
        assert error < tolerance, (
            f"{operation.definition._name} differs by {error}: {[getattr(x, 'shape', x) for x in args]}"
        )


def product(parts, *shape, seed=0):
    return draw(*(parts, *shape) if parts else shape, seed=seed)


def norms_equal_float64():
    for i, (rows, width) in enumerate(itertools.product(ROWS, WIDTHS)):
        bias = draw(width, seed=1) if i % 2 else None
        args = draw(rows, width, seed=2), product(PARTS[i % 3], rows, width), bias, draw(width, seed=3), 1e-6
        compare(fused._add_norm, fused.add_norm_reference, args, (0,))


def gates_equal_float64():
    decode_kernels._GATE_BLOCK, before = 32, decode_kernels._GATE_BLOCK
    try:
        for i, (rows, width) in enumerate(itertools.product(ROWS, WIDTHS)):
            x = product(PARTS[i % 3], rows, 2 * width)
            got = fused._gated_halves(x, torch.float32)
            assert (got - fused.gated_halves_reference(x.double(), torch.float64)).abs().max() < 1e-5
    finally:
        decode_kernels._GATE_BLOCK = before


def rounded_rows_are_those_of_torch():
    for i, (rows, width) in enumerate(itertools.product(ROWS, WIDTHS)):
        x = draw(rows, width, seed=i) * draw(rows, 1, seed=i + 1).exp()
        x[rows // 2] *= i % 2
        (got, scale), (expected, scales) = decode_kernels.launch_round_rows(x, FLOAT8), round_rows(x, FLOAT8)
        assert torch.equal(scale, scales), (rows, width)
        got, expected = got.float(), expected.float()
        # The interpreter loses the carry of what it rounds up to a power of two, and rounds subnormal numbers down.
        taken = (expected.abs().log2().frac() != 0) & (expected.abs() >= 2**-6)
        assert torch.equal(got[taken], expected[taken]) and (got - expected).abs().max() <= 128, (rows, width)


def heads_equal_float64():
    for i, (rows, (heads, keys, size)) in enumerate(itertools.product(ROWS, HEADS)):
        width = (heads + 2 * keys) * size
        bias = draw(width, seed=1) if i % 3 == 0 else None
        norms = (draw(size, seed=2), draw(size, seed=3)) if i % 2 else (None, None)
        angles = draw(rows, size // 2, seed=4)
        cos, sin = (torch.cat(pair, 1) for pair in ((angles.cos(), angles.cos()), (-angles.sin(), angles.sin())))
        places = torch.randperm(48, generator=torch.Generator().manual_seed(i))[:rows]
        cache = [draw(3, 16, keys, size, seed=s) for s in (5, 6)]
        args = product(PARTS[i % 3], rows, width), bias, *norms, cos, sin, places, *cache, 1e-6
        compare(fused._rotated_heads, fused.rotated_heads_reference, args, (7, 8))


def split_products_equal_float64():
    for rows, inner, outputs in itertools.product((1, 3, 8), (40, 256, 600, 1030, 2048), (1, 70)):
        weight = draw(outputs, inner, seed=1).T / inner**0.5
        x = draw(rows, inner)
        parts = fused._split_product(x, weight)
        assert parts.shape == (fused.parts_for(weight), rows, outputs)
        assert (parts.double().sum(0) - x.double() @ weight.double()).abs().max() < 1e-5
        assert torch.equal(fused._split_product(x[-1:], weight)[:, 0], parts[:, -1]), "a row depends on its neighbours"


def slot_numbers(slots, seed=0):
    """Numbers of slots in the middle of their completions; the last one is spare."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.zeros(STOP + 3, slots, dtype=torch.int64)
    numbers[PROMPT] = torch.randint(1, 9, (slots,), generator=generator)
    numbers[LENGTH] = numbers[PROMPT] + torch.randint(0, 80, (slots,), generator=generator)
    numbers[LIMIT] = numbers[LENGTH] + torch.randint(1, 3, (slots,), generator=generator)
    numbers[SEED] = torch.randint(-(1 << 63), (1 << 63) - 1, (slots,), generator=generator)
    numbers[ENDED, -1] = 1
    numbers[LENGTH, -1] = 1
    numbers[STOP:] = torch.randint(-1, 40, (3, slots), generator=generator)
    return numbers


def first_tokens_equal_float64():
    for i, (rows, width) in enumerate(itertools.product(ROWS, WIDTHS)):
        size = HEADS[i % len(HEADS)][2]
        slots, pages = rows + 2, 3 + i % 4
        table = torch.randperm(slots * 8, generator=torch.Generator().manual_seed(i)).view(slots, 8).int()
        state = torch.arange(slots), slot_numbers(slots, i), table
        chosen = torch.cat([torch.arange(rows - 1), torch.tensor([slots - 1])]).flip(0)
        rope = frequencies(size, 1e4), 1.0 + i % 2
        args = chosen, *state, draw(slots, width), *rope, draw(width, seed=1), 1e-6, 32, pages, 7
        compare(fused._begin_rows, fused.begin_rows_reference, args, tolerance=1e-4)
        after = fused._begin_rows(*args)
        expected = fused.begin_rows_reference(*args)
        assert all(torch.equal(a, b) for a, b in zip(after[4:], expected[4:], strict=True)), "places and pages"


def samples(logits, numbers, rows, groups, rows_at_once=1 << 20):
    state = SlotState(torch.full((numbers.shape[1],), 7), numbers.clone(), torch.zeros(1))
    return sample_next_tokens(state, rows, logits, groups, lambda x: x, rows_at_once), state


def expected_samples(logits, numbers, rows, sampling):
    """By `sample_tokens`, and the state after it."""
    noise = stream_noise(numbers[SEED, rows], numbers[LENGTH, rows] - numbers[PROMPT, rows])
    token, *logps = sample_tokens(logits, noise, sampling, static=True)
    after = numbers.clone()
    running = numbers[ENDED, rows] == 0
    length = numbers[LENGTH, rows] + running
    ends = (numbers[STOP:, rows] == token).any(0) | (length >= numbers[LIMIT, rows])
    after[LENGTH, rows] = length
    after[ENDED, rows] = torch.where(running, ends.long(), 1)
    return token, logps, after


def tokens_are_those_of_sample_tokens():
    """Tokens and states to the bit; log-probabilities to the rounding of a probability in float32."""
    count = 0
    for i, (vocab, sampling, scale) in enumerate(itertools.product(VOCABS, SAMPLINGS, (0.5, 4.0))):
        slots = 9
        numbers = slot_numbers(slots, i)
        rows = torch.randperm(slots, generator=torch.Generator().manual_seed(i))
        logits = scale * draw(slots, vocab, seed=i)
        (token, *logps), state = samples(logits, numbers, rows, ((0, sampling),), 7 if i % 2 else 1 << 20)
        expected, expected_logps, after = expected_samples(logits, numbers, rows, sampling)
        assert torch.equal(token, expected), (vocab, sampling)
        assert torch.equal(state.numbers_CS, after)
        running = numbers[ENDED, rows] == 0
        assert torch.equal(state.tokens_S[rows], torch.where(running, token, 7))
        for a, b in zip(logps, expected_logps, strict=True):
            assert torch.allclose(a, b, rtol=2e-6, atol=2e-6), (a - b).abs().max()
        count += slots
    assert count == 9 * 48


def exact_probabilities_have_the_same_bits():
    """Where the exponentials and their sum are exact, so are sums of blocks, and the log-probabilities."""
    for seed in range(6):
        logits = torch.full((16, 4099), -math.inf)
        likely = torch.rand(16, 4099, generator=torch.Generator().manual_seed(seed)).argsort(1)[:, : 1 << seed]
        logits.scatter_(1, likely, 3.0)
        numbers = slot_numbers(17, seed)
        rows = torch.arange(16)
        (token, *logps), _ = samples(logits, numbers, rows, ((0, Sampling()),))
        expected, expected_logps, _ = expected_samples(logits, numbers, rows, Sampling())
        assert torch.equal(token, expected)
        assert all(torch.equal(a, b) for a, b in zip(logps, expected_logps, strict=True))


def groups_sample_their_own_rows():
    numbers = slot_numbers(9)
    numbers[GROUP] = torch.arange(9) % 3
    rows = torch.arange(8)
    logits = draw(8, 700)
    groups = tuple(enumerate(SAMPLINGS[1:]))
    results, state = samples(logits, numbers, rows, groups)
    for number, sampling in groups:
        mine = rows[rows % 3 == number]
        token, _, after = expected_samples(logits[mine], numbers, mine, sampling)
        assert torch.equal(results[0][mine], token)
        assert torch.equal(state.numbers_CS[:, mine], after[:, mine])


def logits_that_are_not_finite_give_nan():
    logits = draw(4, 600)
    logits[0, 300] = math.nan
    logits[1, 5] = math.inf
    logits[2] = -math.inf
    for sampling in SAMPLINGS:
        (token, *logps), _ = samples(logits, slot_numbers(5), torch.arange(4), ((0, sampling),))
        assert ((token >= 0) & (token < 600)).all()
        assert all(x[:3].isnan().all() and x[3].isfinite() for x in logps)


def trials_find_no_problem():
    """As on a GPU: by torch's own calls of operators, which refuse results that share memory.

    Not in bfloat16, whose products and zeros the interpreter computes wrongly.
    """
    is_plain, registration.is_plain = registration.is_plain, lambda *_, **__: False
    try:
        for dtype in (torch.float32, torch.float16):
            error = fused.fused_decode_error("cpu", dtype)
            assert 0 < error < 1e-4, f"{dtype}: {error}"
            gate = decode_kernels.launch_gate
            decode_kernels.launch_gate = lambda *args, gate=gate: 1.1 * gate(*args)
            try:
                assert fused.fused_decode_error("cpu", dtype) > 1e-4
            finally:
                decode_kernels.launch_gate = gate
        assert row_sampler_error("cpu") < 1e-4
    finally:
        registration.is_plain = is_plain


def whole_passes_equal_the_references():
    """Hidden states of three passes of a decoder by kernels, attention included, beside the references in float64."""
    sizes = StepSizes(50, 24, 4, 2, 8, 20, 1e-6, 1e4, None, (None, 20))
    attn = {"q": (4, 8, 24), "k": (2, 8, 24), "v": (2, 8, 24), "o": (24, 4, 8), "q_norm": (8,), "k_norm": (8,)}
    mlp = {"gate": (20, 24), "up": (20, 24), "down": (24, 20)}

    def weights(part, seed):
        return {name: draw(*shape, seed=seed + i) / shape[-1] ** 0.5 for i, (name, shape) in enumerate(part.items())}

    layers = [
        {
            "attn": weights(attn, 10 * i),
            "mlp": weights(mlp, 10 * i + 7),
            "attn_norm": draw(24, seed=i),
            "mlp_norm": draw(24),
        }
        for i in range(2)
    ]
    params = {"embed": draw(50, 24), "norm": draw(24, seed=1), "layers": layers}
    to_double = lambda tree: {k: to_double(v) if isinstance(v, dict) else v.double() for k, v in tree.items()}  # noqa: E731
    double = to_double(params | {"layers": {}}) | {"layers": [to_double(layer) for layer in layers]}
    for rows in (3, 9):
        slots = rows + 1
        numbers = slot_numbers(slots)
        numbers[LENGTH, :rows] = torch.arange(1, rows + 1) * 7
        table = torch.arange(4 * slots, dtype=torch.int32).view(slots, 4)
        caches = [(draw(4 * slots + 1, 16, 2, 8, seed=i), draw(4 * slots + 1, 16, 2, 8, seed=i + 5)) for i in range(2)]
        wide_caches = [tuple(x.double() for x in pair) for pair in caches]
        chosen = torch.arange(slots)
        for step in range(2):
            state = SlotState(torch.arange(slots) + step, numbers, table)
            form = fused.PassForm(16, 4, 4 * slots)
            hidden = fused.FusedDecoder(sizes, params).hidden(chosen, state, caches, form)
            fused.runs_kernels = lambda x: False
            expected = fused.FusedDecoder(sizes, double).hidden(chosen, state, wide_caches, form)
            fused.runs_kernels = lambda x: True
            assert (hidden - expected).abs().max() < 1e-4
            numbers[LENGTH, :rows] += 1


def launches_are_as_declared():
    """Kernels of one call of each operator; attention is that of the other cases."""
    counts = []
    launch = decode_kernels.launch_kernel
    decode_kernels.launch_kernel = lambda *args, **named: (counts.append(args[0].fn.__name__), launch(*args, **named))
    try:
        fused.fused_decode_error("cpu")
    finally:
        decode_kernels.launch_kernel = launch
    assert sorted(counts) == ["_add_norm", "_begin", "_gate", "_heads", "_split_product"]


CASES = (
    norms_equal_float64,
    gates_equal_float64,
    rounded_rows_are_those_of_torch,
    heads_equal_float64,
    split_products_equal_float64,
    first_tokens_equal_float64,
    tokens_are_those_of_sample_tokens,
    exact_probabilities_have_the_same_bits,
    groups_sample_their_own_rows,
    logits_that_are_not_finite_give_nan,
    trials_find_no_problem,
    whole_passes_equal_the_references,
    launches_are_as_declared,
)


def set_up():
    """Compute with kernels on the CPU."""
    from funrl.compiled_kernels.paged_attention import by_triton

    fused.runs_kernels = lambda x: True
    fused.kernel_for = lambda *_, **__: by_triton
