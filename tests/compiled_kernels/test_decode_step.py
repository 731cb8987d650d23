"""A decoder's pass over pages in one C++ call: its numbers against float64, and its bits against itself."""

import itertools
import math
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from decode_reference import decode_reference
from paged_sequences import (
    CONFIGS,
    NO_KERNEL,
    Sequences,
    at_once,
    cast,
    chunks,
    config_of,
    equal,
    one_by_one,
    together,
    weights,
)

from funrl import trees
from funrl.compiled_kernels import decode_step, kernel_library
from funrl.compiled_kernels.decode_step import (
    PAGE,
    PagedKeyValues,
    kernel_problem,
    packed_decoder,
    page_bytes,
)
from funrl.models.decoder.compiled_step import step_sizes
from funrl.models.decoder.decoder import decoder_model
from funrl.models.model import Inputs
from funrl.processes.workers import can_fork
from funrl.rollout.sampling import invert

pytestmark = pytest.mark.skipif(NO_KERNEL is not None, reason=str(NO_KERNEL))


def exact_logp(config, params, tokens):
    """Log-probabilities of the whole vocabulary behind each token by the model itself in float64."""
    model, wide = decoder_model(config), cast(params, torch.float64)
    hidden = model.apply(wide, Inputs(tokens[None])).hidden[0]
    return (hidden @ model.unembed(wide).T).log_softmax(-1)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32_is_as_near_to_float64_as_the_trainer(name):
    config = config_of(name)
    rows = Sequences(packed_decoder(step_sizes(config), weights(config), torch.float32, 1), [40, 3, 22])
    for tokens, logits in zip(rows.tokens, rows.all(chunks(rows.lengths)), strict=True):
        gap = (logits.double().log_softmax(-1) - exact_logp(config, weights(config), tokens)).abs()
        assert gap.max() < 1e-5 and gap.mean() < 1e-6


@pytest.mark.parametrize("name", CONFIGS)
def test_float64_is_the_model(name):
    config = config_of(name)
    params = cast(weights(config), torch.float64)
    rows = Sequences(packed_decoder(step_sizes(config), params, torch.float64, 1), [40, 3, 22])
    for tokens, logits in zip(rows.tokens, rows.all(chunks(rows.lengths)), strict=True):
        assert (logits.log_softmax(-1) - exact_logp(config, params, tokens)).abs().max() < 1e-12


@pytest.mark.parametrize("name", CONFIGS)
def test_bfloat16_is_as_near_to_float64_as_torch_s_bfloat16(name):
    config = config_of(name)
    params = cast(weights(config), torch.bfloat16)
    rows = Sequences(packed_decoder(step_sizes(config), params, torch.bfloat16, 1), [40, 3, 22])
    model, ours, theirs = decoder_model(config), [], []
    for tokens, logits in zip(rows.tokens, rows.all(chunks(rows.lengths)), strict=True):
        exact = exact_logp(config, params, tokens)
        hidden = model.apply(params, Inputs(tokens[None])).hidden[0]
        peer = torch.nn.functional.linear(hidden.float(), model.unembed(params).float())
        ours.append((logits.double().log_softmax(-1) - exact).abs())
        theirs.append((peer.double().log_softmax(-1) - exact).abs())
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    print(f"{name}: ours {ours.mean():.2e} mean {ours.max():.2e} max, torch {theirs.mean():.2e} {theirs.max():.2e}")
    assert ours.mean() < 1.2 * theirs.mean() and ours.max() < 2 * theirs.max()


@pytest.mark.parametrize("name", CONFIGS)
def test_the_reference_is_the_model(name):
    config = config_of(name)
    params = cast(weights(config), torch.float64)
    shape = (config.layers, 9, PAGE, config.attention.kv_heads, config.attention.head)
    cache = PagedKeyValues(torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64))
    tokens = torch.randint(config.vocab, (40,), generator=torch.Generator().manual_seed(3))
    table = torch.tensor([[8, 2, 5]], dtype=torch.int32)
    results = []
    for first, end in ((0, 33), (33, 34), (34, 40)):
        positions = torch.arange(first, end)
        call = (tokens[first:end], positions, torch.zeros_like(positions), table, torch.arange(end - first))
        results.append(decode_reference(step_sizes(config), params, cache, *call))
    gap = (torch.cat(results).log_softmax(-1) - exact_logp(config, params, tokens)).abs().max()
    assert gap < 1e-12


DTYPES = [torch.float32, torch.bfloat16, torch.float64]
IN_TURN = list(zip(CONFIGS, itertools.cycle(DTYPES), strict=False))  # each model in one dtype


@pytest.mark.parametrize("call", IN_TURN, ids=str)
def test_bits_depend_on_nothing_else_in_a_call(call):
    """Prefill, decode, chunks, batches, pages and threads: one and the same number."""
    name, dtype = call
    config = config_of(name)
    decoders = [packed_decoder(step_sizes(config), weights(config), dtype, threads) for threads in (1, 2, 3)]
    lengths = [35, 70, 4, 19, 33, 17, 18, 50]
    rows = Sequences(decoders[0], lengths)
    expected, pages = rows.all(at_once(lengths)), [rows.pages(s) for s in range(len(lengths))]
    assert all(torch.isfinite(x).all() for x in expected)
    for decoder, calls, shuffle in (
        (decoders[0], one_by_one, None),
        (decoders[0], chunks, 5),
        (decoders[1], at_once, 6),
        (decoders[2], together, 7),
    ):
        rows = Sequences(decoder, lengths, shuffle)
        for s, (got, want) in enumerate(zip(rows.all(calls(lengths)), expected, strict=True)):
            assert torch.equal(got, want)
            assert all(torch.equal(x, y) for x, y in zip(rows.pages(s), pages[s], strict=True))


def test_more_rows_than_a_block():
    config = config_of("qwen3")
    decoder = packed_decoder(step_sizes(config), weights(config), torch.float32, 2)
    rows = Sequences(decoder, [90, 1, 150])
    alone = Sequences(decoder, [90, 1, 150], 3)
    expected = alone.all([[(s, 0, length)] for s, length in enumerate(alone.lengths)])
    assert equal(rows.all(at_once(rows.lengths)), expected)


def test_no_logits_and_no_tokens():
    config = config_of("llama")
    rows = Sequences(packed_decoder(step_sizes(config), weights(config), torch.float32, 1), [20])
    none = torch.zeros(0, dtype=torch.int64)
    positions = torch.arange(19)
    call = (rows.tokens[0][:19], positions, torch.zeros_like(positions), rows.tables, none)
    assert rows.decoder.forward(rows.cache, *call).shape == (0, config.vocab)
    assert rows.decoder.forward(rows.cache, none, none, none, rows.tables, none).shape == (0, config.vocab)
    fresh = Sequences(rows.decoder, [20])
    assert torch.equal(rows.compute([(0, 19, 20)]), fresh.compute([(0, 0, 20)])[19:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_sequence_reads_pages_that_another_one_writes_in_the_same_call(dtype):
    """Two samples of one prompt: the second takes full pages from the first, in the call that writes them."""
    config = config_of("qwen2")
    decoder = packed_decoder(step_sizes(config), weights(config), dtype, 2)
    prompt = torch.randint(config.vocab, (37,), generator=torch.Generator().manual_seed(5))
    alone = Sequences(decoder, [37])
    alone.tokens = [prompt]
    expected = alone.compute([(0, 0, 37)])
    both = Sequences(decoder, [37, 37])
    both.tokens = [prompt, prompt]
    both.tables[1, :2] = both.tables[0, :2]
    for parts in ([(0, 0, 37), (1, 32, 37)], [(1, 32, 37), (0, 0, 37)]):
        both.cache = decoder.init_cache(11)
        logits = both.compute(parts)
        first, second = logits.split([end - begin for _, begin, end in parts])
        whole, rest = (first, second) if len(first) == 37 else (second, first)
        assert torch.equal(whole, expected) and torch.equal(rest, expected[32:])


def test_copied_pages_continue_a_sequence():
    config = config_of("llama")
    decoder = packed_decoder(step_sizes(config), weights(config), torch.float32, 1)
    rows = Sequences(decoder, [40, 40])
    rows.tokens[1] = rows.tokens[0]
    expected = rows.compute([(0, 0, 40)])
    source, target = rows.tables[0].tolist(), rows.tables[1].tolist()
    decoder.copy_pages(rows.cache, source, target)
    assert torch.equal(rows.compute([(1, 39, 40)]), expected[39:])
    decoder.copy_pages(rows.cache, source[:2], source[1::-1])  # all are read before any is written
    swapped = Sequences(decoder, [40])
    swapped.cache, swapped.tables = rows.cache, rows.tables[:1, [1, 0, 2]]
    assert torch.equal(swapped.compute([(0, 39, 40)]), expected[39:])
    decoder.copy_pages(rows.cache, [], [])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["one head each", "qwen3", "groups of 10"])
def test_what_a_token_must_not_see_is_never_touched(name, dtype):
    """NaN in the slots behind a token, before its window, and in those of another sequence."""
    config = config_of(name)
    decoder = packed_decoder(step_sizes(config), weights(config), dtype, 1)
    clean = Sequences(decoder, [41, 30])
    expected = clean.all(chunks(clean.lengths))
    rows = Sequences(decoder, [41, 30])
    for x in rows.cache:
        x.fill_(math.nan)
    assert equal(rows.all(chunks(rows.lengths)), expected)


def test_a_token_that_is_not_finite_spoils_no_earlier_one():
    config = config_of("llama")
    params = trees.map_named(lambda _, x: x.clone(), weights(config))
    params["embed"][7] = math.inf
    decoder = packed_decoder(step_sizes(config), params, torch.float32, 1)
    rows = Sequences(decoder, [30])
    rows.tokens[0][rows.tokens[0] == 7] = 8
    expected = rows.compute([(0, 0, 30)])
    rows.tokens[0][20] = 7
    logits = rows.compute([(0, 0, 30)])
    assert torch.equal(logits[:20], expected[:20]) and logits[20:].isnan().all()


def test_a_long_sequence():
    """More keys than any buffer of fixed size would hold, and positions behind the first table of rotations."""
    config, length = config_of("groups of 7"), 2100
    decoder = packed_decoder(step_sizes(config), weights(config), torch.float32, 2)
    rows = Sequences(decoder, [length])
    rows.compute([(0, 0, 700)])
    rows.compute([(0, 700, length - 1)])
    logits = rows.compute([(0, length - 1, length)])
    exact = exact_logp(config, weights(config), rows.tokens[0])[-1:]
    # Angles of float32 at 2,100 positions are 1e-4 from the exact ones, in the trainer too.
    assert (logits.double().log_softmax(-1) - exact).abs().max() < 1e-4


def test_other_weights_take_the_place_of_the_first_ones():
    config = config_of("qwen3")
    other = trees.map_named(lambda _, x: x + 0.01, weights(config))
    decoder = packed_decoder(step_sizes(config), weights(config), torch.float32, 1)
    Sequences(decoder, [2000]).compute([(0, 1990, 2000)])  # the table of rotations is longer than at first
    decoder.load(other)
    fresh = packed_decoder(step_sizes(config), other, torch.float32, 1)
    a, b = (Sequences(d, [20]).compute([(0, 0, 20)]) for d in (decoder, fresh))
    assert torch.equal(a, b)


def test_the_weights_are_copies():
    config = config_of("llama with scaled rope")  # tied: the embedding is used twice
    params = trees.map_named(lambda _, x: x.clone().requires_grad_(), weights(config))
    decoder = packed_decoder(step_sizes(config), params, torch.float32, 1)
    expected = Sequences(decoder, [20]).compute([(0, 0, 20)])
    with torch.no_grad():
        trees.map_named(lambda _, x: x.zero_(), params)
    assert torch.equal(Sequences(decoder, [20]).compute([(0, 0, 20)]), expected)


def test_memory_of_a_page():
    for name in CONFIGS:
        config = config_of(name)
        for dtype in (torch.float32, torch.bfloat16):
            cache = packed_decoder(step_sizes(config), weights(config), dtype, 1).init_cache(3)
            assert sum(x.nbytes for x in cache) == 3 * page_bytes(step_sizes(config), dtype)
            assert all((x == 0).all() for x in cache)


def test_memory_of_a_cache_is_taken_as_it_is_written():
    config = config_of("llama")
    decoder = packed_decoder(step_sizes(config), weights(config), torch.float32, 1)
    with open("/proc/self/statm") as file:
        before = int(file.read().split()[1])
    cache = decoder.init_cache((1 << 30) // page_bytes(step_sizes(config), torch.float32))
    with open("/proc/self/statm") as file:
        assert (int(file.read().split()[1]) - before) * os.sysconf("SC_PAGE_SIZE") < 64 << 20
    assert cache.keys.nbytes > 500 << 20


@pytest.mark.parametrize(
    "change,message",
    [
        ({"tokens": [0, 130]}, "not in the vocabulary"),
        ({"tokens": [-1, 0]}, "not in the vocabulary"),
        ({"positions": [0, 32]}, "has no page"),
        ({"positions": [-1, 0]}, "has no page"),
        ({"sequence": [0, 1]}, "not a row of the tables"),
        ({"tables": [[3, 5]], "positions": [15, 16]}, "has no page"),
        ({"tables": [[-1, 0]], "positions": [15, 16]}, "has no page"),
        ({"draw": [2]}, "is not in the call"),
        ({"positions": [0]}, r"positions_N is torch.int64 \[1\]"),
        ({"tokens": [0.0, 1.0]}, "torch.float32"),
        ({"draw": [1.0]}, "torch.float32"),
    ],
)
def test_bad_input_is_named(change, message):
    config = config_of("llama")
    decoder = packed_decoder(step_sizes(config), weights(config), torch.float32, 1)
    given = {"tokens": [1, 2], "positions": [0, 1], "sequence": [0, 0], "tables": [[0, 1]], "draw": [1]} | change
    tables = torch.tensor(given.pop("tables"), dtype=torch.int32)
    tokens, positions, sequence, draw = (torch.tensor(x) for x in given.values())
    with pytest.raises(ValueError, match=message):
        decoder.forward(decoder.init_cache(5), tokens, positions, sequence, tables, draw)


def test_what_has_no_kernel_says_so():
    config = config_of("llama")
    assert "not torch.float16" in kernel_problem(step_sizes(config), torch.float16)
    assert kernel_problem(step_sizes(config), torch.bfloat16) is None
    with pytest.raises(kernel_library.KernelError, match=r"not torch\.float16"):
        packed_decoder(step_sizes(config), weights(config), torch.float16)


def child_computes(decoder, lengths, expected):
    """True if a forked child computes the same with the same number of threads, within a minute."""
    pid = os.fork()
    if pid == 0:
        try:
            os._exit(0 if equal(Sequences(decoder, lengths).all(at_once(lengths)), expected) else 3)
        finally:
            os._exit(4)
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return False


def test_a_fork_of_a_process_that_used_the_threads_has_its_own():
    config = config_of("qwen2")
    decoder = packed_decoder(step_sizes(config), weights(config), torch.float32, 2)
    lengths = [40, 9]
    expected = Sequences(decoder, lengths).all(at_once(lengths))
    for _ in range(3):
        assert child_computes(decoder, lengths, expected)
        assert equal(Sequences(decoder, lengths).all(at_once(lengths)), expected)
    assert can_fork()


def test_two_python_threads_compute_at_once():
    from concurrent.futures import ThreadPoolExecutor

    config = config_of("qwen2")
    lengths = [60, 9]
    decoders = [packed_decoder(step_sizes(config), weights(config), torch.float32, 2) for _ in range(3)]
    expected = Sequences(decoders[0], lengths).all(together(lengths))
    with ThreadPoolExecutor(3) as pool:
        result = list(pool.map(lambda d: Sequences(d, lengths).all(together(lengths)), decoders))
    assert all(equal(item, expected) for item in result)


@pytest.fixture
def lesser(monkeypatch, request):
    """The kernels as they are compiled for a processor that lacks something which this one has."""
    lacking = {"avx2": "avx512f", "avx512": "amx_bf16"}[request.param]
    if lacking not in Path("/proc/cpuinfo").read_text().split():
        pytest.skip("this processor is such a one")
    monkeypatch.setenv("FUNRL_ISA", request.param)
    kernel_library.library.cache_clear()
    yield request.param
    kernel_library.library.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("lesser", ["avx2", "avx512"], indirect=True)
def test_on_lesser_processors(lesser):
    assert decode_step.panel_width() == {"avx2": 32, "avx512": 64}[lesser]
    config = config_of("llama")
    for name in ("qwen2", "qwen3", "groups of 7", "odd sizes"):  # what differs by the width of registers
        test_float32_is_as_near_to_float64_as_the_trainer(name)
        test_bfloat16_is_as_near_to_float64_as_torch_s_bfloat16(name)
        for dtype in (torch.float32, torch.bfloat16):
            test_bits_depend_on_nothing_else_in_a_call((name, dtype))
    logits, source = torch.randn(2, 2050, generator=torch.Generator().manual_seed(0)) * 3, torch.arange(2).repeat(500)
    noise = torch.rand(1000, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    token, _, raw_logp = packed_decoder(step_sizes(config), weights(config), torch.float32, 2).sample(
        logits, source, noise, 1.0
    )
    logp = logits.double().log_softmax(-1)[source]
    assert torch.equal(token, invert(logp.exp(), noise)[0].squeeze(1))
    assert (raw_logp - logp.gather(1, token[:, None]).squeeze(1)).abs().max() < 2e-6
