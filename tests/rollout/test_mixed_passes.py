"""Passes of static shape that compute prompts beside decoding: the bits of eager passes, on a CPU."""

import dataclasses
import random
from collections.abc import Iterator

import pytest
import torch
from device_waits import no_waits
from selection import quick
from small_engines import CONFIGS, NO_PACKING, PROMPTS, SMALL, assert_same, completed, engine_of, weights
from test_engine_families import CONFIGS as FAMILIES
from test_engine_families import EXPERTS
from test_static_decode import KINDS, PAGES, decoder_on

from funrl import trees
from funrl.models import decoder_config
from funrl.rollout.engine import complete
from funrl.rollout.native import engine as native
from funrl.rollout.native import static_decode
from funrl.rollout.native.backends import TorchBackend
from funrl.rollout.native.device.decode_state import DecodeForm, MixedInputs, mixed_pass
from funrl.rollout.native.static_decode import StaticDecode
from funrl.rollout.requests import Request, requests_of
from funrl.rollout.sampling_parameters import Sampling

pytestmark = pytest.mark.skipif(NO_PACKING is not None, reason=str(NO_PACKING))
STOPS = Sampling(max_new_tokens=24, stop=(3, 17))
SAMPLINGS = (
    STOPS,
    dataclasses.replace(STOPS, temperature=0.7, stop_strings=("0", "AB")),
    Sampling(max_new_tokens=9, greedy=True),
    Sampling(max_new_tokens=30, top_k=9, top_p=0.8, stop=(5,)),
)


def drawn_requests(samplings=(STOPS,), samples=(1, 1, 4), lengths=(1, 2, 5, 15, 16, 17, 40), count=24):
    """Prompts of random lengths, some of which begin as an earlier one."""
    chance = random.Random(7)
    prompts: list[list[int]] = []
    requests: list[Request] = []
    while len(requests) < count:
        begun = chance.choice(prompts)[: chance.randrange(40)] if prompts and chance.random() < 0.4 else []
        prompts.append(begun + [chance.randrange(40) for _ in range(chance.choice(lengths))])
        sampling = dataclasses.replace(chance.choice(samplings), samples=chance.choice(samples))
        new = requests_of([prompts[-1]], sampling, len(requests))
        requests += [request._replace(number=len(requests) + request.number) for request in new]
    return requests[:count]


def at_once(engine, requests):
    return complete(engine, requests)


def bit_by_bit(engine, requests):
    """Two requests before every third pass."""
    done, waiting = [], list(requests)
    while waiting or engine.unfinished():
        engine.submit(waiting[:2])
        waiting = waiting[2:]
        for _ in range(3):
            done += engine.step()
    return done


def in_parts(engine, requests):
    """Five tokens at most, and the others after all requests are parked."""
    done = complete(engine, [request._replace(most=5) for request in requests])
    parked = {x.number: x for x in done if x.finish == "paused"}
    again = [x._replace(begun=parked[x.number]) for x in requests if x.number in parked]
    return [x for x in done if x.number not in parked] + complete(engine, again)


def interrupted(engine, requests):
    """A pause and a load of the same weights while requests run: their texts are computed again, in chunks."""
    engine.submit(requests)
    done = []
    for turn in range(1000):
        done += engine.step()
        if turn in (4, 9):
            engine.pause()
            engine.resume()
        if not engine.unfinished():
            return done
    raise AssertionError("requests do not end")


CASES = {
    "forks of prompts": {"samples": (4,)},
    "prompts that arrive midway": {"run": bit_by_bit},
    "prompts in chunks": {"pass_tokens": 11},
    "several sampling groups": {"samplings": SAMPLINGS},
    "five sampling groups": {"samplings": (*SAMPLINGS, Sampling(max_new_tokens=9, min_p=0.1)), "mixes": False},
    "parked and resumed": {"run": in_parts, "samplings": SAMPLINGS},
    "a pause midway": {"run": interrupted, "pass_tokens": 32},
    "little cache": {"pages": 9, "samples": (1,)},
    "large prompts": {"tokens": (8, 16, 32), "lengths": (2, 40)},
}


def spied(monkeypatch) -> list[tuple[int, int, int, bool]]:
    """For each plan with prompts: its tokens, sequences, page copies, and whether it had a static shape."""
    plans, run_plan = [], StaticDecode.run_plan

    def spy(self, plan, spare):
        sampled = run_plan(self, plan, spare)
        plans.append((len(plan.work.tokens_N), len(plan.slots), len(plan.copies), sampled is not None))
        return sampled

    monkeypatch.setattr(StaticDecode, "run_plan", spy)
    return plans


def by_both(config, dtype, requests, run=at_once, pages=0, **how) -> Iterator[list]:
    """Completions by eager passes and by passes of static shape."""
    for static in (False, True):
        options = {"packed": False, "max_rows": 5, "static": static, **how}
        size = engine_of(config, dtype, **options)._backend.page_bytes
        engine = engine_of(config, dtype, cache_bytes=pages * size, **options)
        yield sorted(run(engine, requests), key=lambda completion: completion.number)
        assert engine.cost().used_pages == 0 and (engine.cost().preempted > 0) == (pages > 0)


@pytest.mark.parametrize("dtype", quick((torch.float32, torch.bfloat16, torch.float64), [torch.float32]), ids=str)
@pytest.mark.parametrize("case", CASES)
def test_a_pass_with_prompts_has_the_bits_of_an_eager_one(case, dtype, monkeypatch):
    how = dict(CASES[case])
    names = ("samplings", "samples", "lengths")
    requests = drawn_requests(**{name: how.pop(name) for name in names if name in how})
    mixes = how.pop("mixes", True)
    budget = how.pop("pass_tokens", 1024)
    monkeypatch.setattr(native, "pass_tokens", lambda device: budget)
    largest = how.pop("tokens", static_decode.MIXED_TOKENS)
    monkeypatch.setattr(static_decode, "MIXED_TOKENS", largest)
    plans = spied(monkeypatch)
    eager, static = by_both(CONFIGS["qwen3 window"], dtype, requests, **how)
    assert_same(static, eager, 0.0)
    mixed = [plan for plan in plans if plan[3] and 1 < plan[1] < plan[0]]
    assert len(mixed) > 4 or not mixes
    assert all(plan[3] == (plan[0] <= largest[-1]) for plan in plans if mixes and plan[1] > 1)
    if case == "forks of prompts":
        assert any(copies for *_, copies, static in plans if static)
    if case == "large prompts":
        assert not all(static for *_, static in plans)


EVERY = {"llama": CONFIGS["llama"], "gemma2": FAMILIES["gemma2"]} | EXPERTS


@pytest.mark.parametrize("run", [at_once, bit_by_bit])
def test_a_host_four_passes_ahead_changes_no_bit(run, monkeypatch):
    """It sees ends by stop tokens and strings later, so that some passes more are run, and nothing of them is kept."""
    requests = drawn_requests(SAMPLINGS)
    engines = []
    for ahead in (1, 4):
        monkeypatch.setattr(native, "PASSES_AHEAD", ahead)
        engine = engine_of(CONFIGS["llama"], packed=False, static=True)
        polls = []
        poll = engine._sequences.poll
        monkeypatch.setattr(
            engine._sequences, "poll", lambda *keep, poll=poll, polls=polls: (polls.append(keep), poll(*keep))
        )
        engines.append((sorted(run(engine, requests), key=lambda x: x.number), engine.cost(), polls))
    (done, cost, _), (ahead, later, polls) = engines
    assert_same(ahead, done, 0.0)
    assert later.decoded == cost.decoded and later.used_pages == 0
    assert cost.passes <= later.passes <= cost.passes + 3 * (run is at_once) + 9 * (run is bit_by_bit)
    assert {(1,), (4,)} <= set(polls), "it is closer where a row may end or need a page"


@pytest.mark.parametrize("family", quick(EVERY, ["gemma2", "deepseek_v3", "gpt_oss"]))
def test_families_have_the_bits_of_eager_passes(family, monkeypatch):
    plans = spied(monkeypatch)
    eager, static = by_both(EVERY[family], torch.float32, drawn_requests(count=12), bit_by_bit)
    assert_same(static, eager, 0.0)
    assert sum(static for *_, static in plans) > 4


def inputs_on(device, tokens, rows):
    """Inputs of a pass on a device."""
    sizes = (tokens,) * 4 + (rows + 1, rows + 2, rows + 1, rows, rows)
    return MixedInputs(*(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes))


@pytest.mark.parametrize("family", quick({"qwen3": CONFIGS["qwen3"]} | EXPERTS, ["qwen3", "qwen3_moe"]))
def test_a_pass_with_prompts_lets_the_host_wait_for_nothing(family):
    """On a device whose tensors have no numbers that one could ask for. Every size makes the same calls."""
    config = ({"qwen3": CONFIGS["qwen3"]} | EXPERTS)[family]
    calls = []
    with torch.inference_mode():
        backend, state = decoder_on("meta", config, torch.bfloat16)
        for tokens, rows in ((256, 2), (512, 16)):
            inputs = inputs_on("meta", tokens, rows)
            with no_waits() as seen:
                result = mixed_pass(backend, state, inputs, DecodeForm(rows, PAGES, KINDS, tokens=tokens))
            assert all(x.shape == (rows,) and x.is_meta for x in result)
            calls.append(seen.names)
    assert len(calls[0]) > 50 and calls[0] == calls[1]


def test_padding_writes_to_the_spare_page_alone():
    """Pages that nobody has stay as they are."""
    config = decoder_config(**SMALL | {"layers": 1})
    engine = engine_of(config, packed=False, static=True, max_rows=4, cache_bytes=10**6)
    assert isinstance(engine._backend, TorchBackend)
    engine.submit(requests_of([[1, 2, 3], [4] * 20], Sampling(max_new_tokens=4), 0))
    engine.step()
    used = {page for sequence in engine._sequences.all() for page in sequence.pages}
    keys = trees.leaves(engine._backend._cache)[0]
    written = {page for page in range(len(keys)) if keys[page].any()}
    assert written == used | {len(keys) - 1}
    counts = sorted(int((keys[page] != 0).any(-1).any(-1).sum()) for page in used)
    assert counts == [3, 4, 16]


def test_padding_reads_a_page_of_the_cache_after_it_has_shrunk(monkeypatch):
    """A pass with prompts writes the spare page's number; a later, smaller cache has another one."""
    config = CONFIGS["llama"]
    engine, plain = (engine_of(config, torch.float64, packed=False, static=static) for static in (True, False))
    completed(engine, [list(range(1, 30))] * 9, Sampling(max_new_tokens=60))
    pages = engine._sizes.pages
    engine.load(engine.weights.named(weights(config, torch.float64)), 8)
    monkeypatch.setattr(static_decode, "MIXED_TOKENS", (1,))  # prompts in passes of their own shapes
    sampling = Sampling(max_new_tokens=5)
    assert_same(completed(engine, PROMPTS[:5], sampling), completed(plain, PROMPTS[:5], sampling), 1e-12)
    assert engine._sizes.pages < pages
