"""Kernels of a fixed order under Triton's interpreter, as a program: bits alone and among others, and the gap of a run.

It prints as JSON, for each case, null or the traceback of its failure.
"""

import itertools
import json
import sys
import traceback
from pathlib import Path
from unittest import mock

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

sys.path.insert(0, str(Path(__file__).parents[1] / "trainer"))

from interpreted_decode import slot_numbers
from small_runs import GRPO, Quiet, begin, scored_batch, small_job

from funrl.compiled_kernels import fused_decode
from funrl.compiled_kernels.decode_slots import SlotState
from funrl.compiled_kernels.exact.dispatch import align_gpu_kernels, computes_exactly, is_aligned
from funrl.compiled_kernels.exact.gate import gated
from funrl.compiled_kernels.exact.scores import token_log_probabilities
from funrl.compiled_kernels.gpu_kernels import aligned_kernels as kernels
from funrl.compiled_kernels.linear_logprob import linear_logprob
from funrl.compiled_kernels.norm import rms_norm, rms_norm_reference
from funrl.compiled_kernels.paged_attention import paged_attention, paging_of
from funrl.compiled_kernels.rotary import frequencies, rotary, rotate
from funrl.compiled_kernels.varlen_attention import varlen_attention, varlen_attention_reference
from funrl.mesh.mesh import single
from funrl.models import decoder_config, decoder_model
from funrl.rollout.native import backends
from funrl.rollout.native.aligned_trial import aligned_trial_problem
from funrl.rollout.native.device import decode_state
from funrl.rollout.native.device.row_sampler import sample_next_tokens
from funrl.rollout.sampling import sample_tokens
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.gap import GAP_METRIC
from funrl.trainer.jobs import engines

DTYPES = (torch.float32, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 0.02}
SHAPES = ((1, 5), (7, 16), (40, 64), (96, 65), (130, 2100), (300, 1030), (64, 4160))  # outputs and terms of a weight
HEADS = ((4, 2, 16), (3, 1, 24), (8, 2, 10), (2, 2, 136))  # query heads, key heads, size
OPTIONS = ({}, {"window": 40}, {"cap": 3.0, "scale": 0.3}, {"window": 70, "cap": 5.0})
LENGTHS = (150, 1, 37, 200, 64)
PART = 128  # keys of a part, so that sequences have several


def draw(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def widened(x):
    """The interpreter multiplies the bits of bfloat16 numbers; a GPU multiplies the numbers."""
    if x.dtype.scalar != tl.bfloat16:
        return x
    return interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def rounded(data, source, target, mode, convert=interpreter._convert_float):
    """The interpreter cuts off what bfloat16 has no place for; a GPU rounds to the nearest, as torch does."""
    if (source, target) != (tl.float32, tl.bfloat16):
        return convert(data, source, target, mode)
    wide = torch.from_numpy(np.ascontiguousarray(data).view(np.float32))
    return wide.bfloat16().view(torch.int16).numpy().view(np.uint16)


def assert_close(got, expected, dtype):
    error = (got.double() - expected.double()).abs() / (1 + expected.double().abs())
    assert error.max() < TOLERANCE[dtype], (error.max(), dtype, got.shape)


def products_have_the_bits_of_a_row_alone():
    for dtype, (outputs, terms) in itertools.product(DTYPES, SHAPES):
        weight = draw(outputs, terms, seed=1, dtype=dtype) / terms**0.5
        x = draw(200, terms, dtype=dtype)
        bias = draw(outputs, seed=2, dtype=dtype)
        for wide in (False, True):
            added = None if wide else bias
            whole = kernels.launch_product(x, weight, added, wide)
            expected = x.double() @ weight.double().T + (0 if wide else bias.double())
            assert_close(whole, expected, torch.float32 if wide else dtype)
            for low, high in ((0, 1), (7, 8), (199, 200), (3, 67), (0, 65), (100, 200)):
                assert torch.equal(kernels.launch_product(x[low:high], weight, added, wide), whole[low:high])


def any_tiles_give_the_same_bits():
    x, weight = draw(150, 2100), draw(96, 2100, seed=1)
    results = []
    choose = kernels.product_tiles
    for rows, outputs, warps, split in (
        (64, 32, 4, False),
        (64, 128, 4, True),
        (128, 128, 8, False),
        (128, 64, 8, True),
    ):
        kernels.product_tiles = lambda *_, form=(rows, outputs, warps, split): kernels.ProductTiles(*form)
        results.append(kernels.launch_product(x, weight, None, True))
    kernels.product_tiles = choose
    assert kernels.parts_of_terms(2100) == 2
    assert all(torch.equal(y, results[0]) for y in results)


def paged(k, v, offsets, page, seed):
    """Keys and values of packed sequences in pages of other sequences' order, and their table."""
    generator = torch.Generator().manual_seed(seed)
    counts = [-(-n // page) for n in LENGTHS]
    pages = sum(counts) + 3
    order = iter(torch.randperm(pages, generator=generator).tolist())
    table = torch.zeros(len(LENGTHS), max(counts) + 1, dtype=torch.int64)
    cache = tuple(torch.full((pages, page, *x.shape[1:]), 7.0).to(x.dtype) for x in (k, v))
    for s, count in enumerate(counts):
        for j in range(count):
            number = table[s, j] = next(order)
            rows = slice(int(offsets[s]) + j * page, min(int(offsets[s]) + (j + 1) * page, int(offsets[s + 1])))
            for x, source in zip(cache, (k, v), strict=True):
                x[number, : rows.stop - rows.start] = source[rows]
    return cache, table


def attention_has_the_bits_of_a_sequence_alone():
    """Packed among others and padded, alone, token by token over pages, and in chunks of a prompt."""
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    for i, (dtype, (H, K, N)) in enumerate(itertools.product(DTYPES, HEADS)):
        options = OPTIONS[(i + i // len(HEADS)) % len(OPTIONS)]
        q, k, v = (draw(int(offsets[-1]) + 5, n, N, seed=s, dtype=dtype) for s, n in enumerate((H, K, K)))
        out = varlen_attention(q[None], k[None], v[None], offsets, **options)[0]
        wide = (x[None].double() for x in (q, k, v))
        expected = varlen_attention_reference(*wide, offsets, **options)[0]
        assert_close(out, expected, dtype)
        assert not out[offsets[-1] :].any()
        for s in range(len(LENGTHS))[i % 2 :: 2]:
            own = slice(int(offsets[s]), int(offsets[s + 1]))
            single_offsets = torch.tensor([0, LENGTHS[s]], dtype=torch.int32)
            alone = varlen_attention(q[None, own], k[None, own], v[None, own], single_offsets, **options)[0]
            assert torch.equal(alone, out[own])
        page = (16, 48, 256)[i % 3]
        cache, table = paged(k, v, offsets, page, i)
        for back in (0, 70):
            decode = [1] * len(LENGTHS), [max(1, n - back) for n in LENGTHS]
            chunks = [min(n, c) for n, c in zip(LENGTHS, (50, 1, 20, 70, 64), strict=True)]
            chunks = chunks, [max(c, n - back) for n, c in zip(LENGTHS, chunks, strict=True)]
            for counts, ends in (decode, chunks):
                paging = paging_of(counts, ends, table, page)
                where = torch.cat(
                    [torch.arange(e - c, e) + int(o) for c, e, o in zip(counts, ends, offsets[:-1], strict=True)]
                )
                got = paged_attention(q[where], k[where], v[where], cache, paging, **options)
                assert torch.equal(got, out[where]), (dtype, H, K, N, options, page, counts)


def rows_at_a_time_change_no_bit():
    kernels.PARTS_BYTES, before = 1 << 12, kernels.PARTS_BYTES
    offsets = torch.tensor([0, *LENGTHS], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    q, k, v = (draw(int(offsets[-1]), n, 16, seed=s) for s, n in enumerate((4, 2, 2)))
    cache, table = paged(k, v, offsets, 32, 0)
    paging = paging_of([1] * len(LENGTHS), LENGTHS, table, 32)
    last = offsets[1:].long() - 1
    got = paged_attention(q[last], k[last], v[last], cache, paging)
    kernels.PARTS_BYTES = before
    assert torch.equal(got, varlen_attention(q[None], k[None], v[None], offsets)[0, last])


def gradients_equal_those_of_float64():
    """Of products, norm, rotation, gate and attention."""
    offsets = torch.tensor([0, 20, 33], dtype=torch.int32)
    turns = rotary(torch.arange(33), frequencies(8, 1e4), torch.float32)

    def loss(x, w, norm, up):
        x = rms_norm(x, norm, 1e-6)
        heads = (x @ w.T if x.dtype == torch.float64 else kernels_linear(x, w)).unflatten(-1, (4, 8))
        heads = rotate(heads, type(turns)(*(None if y is None else y.to(x.dtype) for y in turns)))
        q, k, v = heads.split([2, 1, 1], -2)
        attend = varlen_attention if x.dtype != torch.float64 else varlen_attention_reference
        out = attend(q[None], k[None], v[None], offsets)[0].flatten(1)
        return (gated(out, up, "silu") * gated(out, up, "gelu") * gated(up, out, "gelu_erf")).sum()

    numbers = draw(33, 12), draw(32, 12, seed=1), draw(12, seed=2), draw(33, 16, seed=3)
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in numbers]
        grads.append(torch.autograd.grad(loss(*leaves), leaves))
    for got, expected in zip(*grads, strict=True):
        assert (got - expected).abs().max() < 1e-3 * expected.abs().max()


def kernels_linear(x, w):
    from funrl.compiled_kernels.linear import linear

    assert is_aligned(x) and computes_exactly(x, w)
    return linear(x, w)


def rows_have_the_bits_of_a_row_alone():
    """Norms, rotations, gates and scores."""
    for dtype, width in itertools.product(DTYPES, (5, 128, 300, 1500)):
        x, up = draw(40, width, seed=1, dtype=dtype), draw(40, width, seed=2, dtype=dtype)
        weight = draw(width, seed=3, dtype=dtype)
        for offset in (0.0, 1.0):
            whole = rms_norm(x, weight, 1e-6, offset)
            assert_close(whole, rms_norm_reference(x, weight, 1e-6, offset), dtype)
            assert torch.equal(rms_norm(x[9:10], weight, 1e-6, offset), whole[9:10])
        for kind in ("silu", "gelu", "gelu_erf"):
            assert torch.equal(gated(x[9:12], up[9:12], kind), gated(x, up, kind)[9:12])
    for size in (8, 16):
        turns = rotary(torch.arange(30), frequencies(8, 1e4), torch.float32)
        heads = draw(30, 3, size)
        part = type(turns)(turns.cos[7:9], turns.sin[7:9])
        assert torch.equal(rotate(heads[7:9], part), rotate(heads, turns)[7:9])


def scores_have_the_bits_of_sampled_tokens():
    for dtype, vocab, temperature in itertools.product(DTYPES, (37, 5000), (1.0, 0.7)):
        hidden, unembed = draw(70, 24, dtype=dtype), draw(vocab, 24, seed=1, dtype=dtype)
        targets = torch.randint(0, vocab, (70,), generator=torch.Generator().manual_seed(0))
        scores = linear_logprob(hidden, unembed, targets, temperature=temperature, chunk=32, want=("logp", "entropy"))
        logits = hidden.double() @ unembed.double().T / temperature
        expected = logits.log_softmax(-1)
        assert (scores.logp - expected.gather(1, targets[:, None])[:, 0]).abs().max() < 1e-4
        assert (scores.entropy + (expected.exp() * expected).sum(-1)).abs().max() < 1e-4
        alone = linear_logprob(hidden[5:6], unembed, targets[5:6], temperature=temperature)
        assert torch.equal(alone.logp, scores.logp[5:6])
        own = kernels.launch_product(hidden[5:8], unembed, None, True)
        assert torch.equal(token_log_probabilities(own, targets[5:8, None], temperature)[:, 0], scores.logp[5:8])
    for sampling in (Sampling(), Sampling(temperature=0.6), Sampling(greedy=True)):
        numbers = slot_numbers(9, 3)
        state = SlotState(torch.full((9,), 7), numbers, torch.zeros(1))
        logits = 3 * draw(9, 1000, seed=4)
        token, logp, raw = sample_next_tokens(state, torch.arange(9), logits, ((0, sampling),), lambda x: x, 4)
        noise = torch.full((9,), 0.5, dtype=torch.float64)
        assert sample_tokens(logits, noise, sampling)[1].shape == logp.shape
        assert torch.equal(raw, token_log_probabilities(logits, token[:, None])[:, 0])
        tempered = (
            raw if sampling.greedy else token_log_probabilities(logits, token[:, None], sampling.temperature)[:, 0]
        )
        assert torch.equal(logp, tempered)


SIZES = {"embed": 16, "layers": 2, "heads": 2, "kv_heads": 1, "head": 8, "mlp": 32}
RUNS = (
    {"dtype": "float32", "top_p": 0.8, "token_budget": 48, "score_token_budget": 48},
    {"dtype": "bfloat16", "temperature": 0.7, "decode_rows": 3, "token_budget": 24, "score_token_budget": 40},
)


def engine_and_trainer_have_the_same_bits():
    """The engine's log-probabilities of its own samples and the trainer's, of a model with two layers."""
    backends.packed_problem = lambda *_: "kernels of a GPU are wanted"
    for run in RUNS:
        job = small_job(GRPO, SIZES, on_gap="stop", max_new_tokens=4, batch_prompts=2, minibatches=2, **run)
        trainer, state = begin(job, single(), Quiet())
        rows, state, metrics = scored_batch(trainer, state)
        assert rows.batch.mask.sum() > 6
        assert metrics[GAP_METRIC] == metrics["rollout/logprob_gap_mean"] == 0, (run, metrics[GAP_METRIC])


def an_update_has_the_bits_too():
    """GRPO scores by the update's own forward pass, with a gradient."""
    from funrl.trainer.phases import update_batch

    backends.packed_problem = lambda *_: "kernels of a GPU are wanted"
    job = small_job(GRPO, SIZES, dtype="bfloat16", minibatches=1, max_new_tokens=3, batch_prompts=2, token_budget=48)
    trainer, state = begin(job, single(), Quiet())
    rows, state, _ = scored_batch(trainer, state)
    _, learned, _ = update_batch(trainer, state, rows)
    assert learned[GAP_METRIC] == 0 and 0 < learned["actor/grad_norm"] < 100


def fused_decoding_has_the_bits_too():
    """Passes that only decode, by the kernels that a GPU captures: stacked weights, parts of products, the sampler."""
    calls = []
    hidden = fused_decode.FusedDecoder.hidden
    fused_decode.FusedDecoder.hidden = lambda *args, **named: (calls.append(1), hidden(*args, **named))[1]
    fused_decode.runs_kernels = lambda x: True
    decode_state.samples_by_kernels = lambda hidden_BD, groups: len(groups) == 1
    backends.packed_problem = lambda *_: "kernels of a GPU are wanted"
    backends.TorchBackend._fused_sizes = property(lambda self: self.model.abilities.compiled_step)
    options = engines.NativeOptions
    engines.NativeOptions = lambda *args, **named: options(*args, **named | {"static": True})
    kernels._LEAST_PART = 48  # terms, so that products of 130 have two parts
    sizes = SIZES | {"mlp": 130, "qk_norm": "head", "attention_bias": True}
    run = {"dtype": "bfloat16", "token_budget": 48, "score_token_budget": 48, "temperature": 0.8}
    job = small_job(GRPO, sizes, on_gap="stop", max_new_tokens=4, batch_prompts=2, minibatches=2, **run)
    trainer, state = begin(job, single(), Quiet())
    rows, state, metrics = scored_batch(trainer, state)
    assert rows.batch.mask.sum() > 6 and len(calls) > 1
    assert metrics[GAP_METRIC] == 0, metrics[GAP_METRIC]


def a_trial_finds_no_problem():
    """Of layers with a window and without one, with heads that share keys, and sums in two parts."""
    backends.packed_problem = lambda *_: "kernels of a GPU are wanted"
    own = {"vocab": 300, "embed": 24, "layers": 3, "max_positions": 4096}
    plain = own | {"heads": 2, "kv_heads": 2, "head": 10, "mlp": 40}
    windowed = own | {"heads": 8, "kv_heads": 4, "head": 8, "mlp": 2100, "windows": (60, None, 60), "qk_norm": True}
    for dtype, sizes in ((torch.float32, plain), (torch.bfloat16, windowed)):
        problem = aligned_trial_problem(decoder_model(decoder_config(**sizes)), dtype, torch.device("cpu"))
        assert problem is None, (dtype, problem)


def wrong_kernels_fail_the_trial():
    model = decoder_model(decoder_config(vocab=50, embed=16, layers=1, heads=2, kv_heads=1, head=8, mlp=24))
    product, norm, attention = kernels.launch_product, kernels.launch_norm, kernels.launch_attention

    def by_rows(x, weight, bias, wide):
        return product(x, weight, bias, wide) * (1 if len(x) > 1 else 1.01)

    def by_pages(inputs, offsets, paged, *rest):
        out, lse = attention(inputs, offsets, paged, *rest)
        return out if paged is None else out * (1 + 1e-6), lse

    def missing(*args):
        raise RuntimeError("no such instruction\nat line 7")

    wrong = {
        "the engine's numbers depend on the other rows of a pass": ("launch_product", by_rows),
        "engine and trainer differ by": ("launch_attention", by_pages),
        "log-probabilities differ by": ("launch_norm", lambda x, *rest: 1.2 * norm(x, *rest)),
        "gradients differ by": ("launch_norm_backward", lambda grad, x, weight, *_: (2 * grad, weight)),
        "RuntimeError: no such instruction": ("launch_gated", missing),
    }
    for problem, (name, function) in wrong.items():
        with mock.patch.object(kernels, name, function):
            got = aligned_trial_problem(model, torch.float32, torch.device("cpu"))
        assert got is not None and got.startswith(problem) and "line 7" not in got, (problem, got)


CASES = (
    products_have_the_bits_of_a_row_alone,
    any_tiles_give_the_same_bits,
    attention_has_the_bits_of_a_sequence_alone,
    rows_at_a_time_change_no_bit,
    gradients_equal_those_of_float64,
    rows_have_the_bits_of_a_row_alone,
    scores_have_the_bits_of_sampled_tokens,
    engine_and_trainer_have_the_same_bits,
    an_update_has_the_bits_too,
    fused_decoding_has_the_bits_too,
    a_trial_finds_no_problem,
    wrong_kernels_fail_the_trial,
)


def main():
    """Run the cases that arguments name, or all."""
    multiply = interpreter.InterpreterBuilder.create_dot
    interpreter.InterpreterBuilder.create_dot = lambda self, a, b, *rest: multiply(self, widened(a), widened(b), *rest)
    interpreter._convert_float = rounded
    align_gpu_kernels(True, "cpu")
    kernels.KEYS_PART = PART
    results = {}
    wanted = sys.argv[1:]
    for case in CASES:
        if wanted and case.__name__ not in wanted:
            continue
        results[case.__name__] = None
        try:
            case()
        except Exception:
            results[case.__name__] = traceback.format_exc()
    print(json.dumps(results))


if __name__ == "__main__":
    main()
