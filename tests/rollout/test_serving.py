"""What the native engine computes, keeps and gives back: prompts once, pages within bounds, nothing left behind."""

import collections
import dataclasses
import gc
import random
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from small_engines import CONFIGS, NO_PACKING, PROMPTS, assert_same, completed, engine_of, load, rows, weights

from funrl import trees
from funrl.mesh.launch import local_ranks
from funrl.mesh.mesh import SINGLE, Mesh, parse
from funrl.models import decoder_model
from funrl.rollout.engine import Callbacks, complete
from funrl.rollout.native import cache_sizes
from funrl.rollout.native import engine as engine_module
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request, requests_of
from funrl.rollout.sampling_parameters import Sampling

CONFIG = CONFIGS["llama"]
PAGE = 16  # tokens
BOTH = pytest.mark.parametrize("packed", [*[True] * (NO_PACKING is None), False], ids=lambda p: ["torch", "packed"][p])


def counted(engine):
    """The engine, and the new tokens of each of its passes: of each sequence."""
    passes, forward = [], engine._backend.forward

    def counting(work):
        passes.append(list(work.counts))
        return forward(work)

    engine._backend.forward = counting
    return engine, passes


def roomy(**how):
    """An engine whose cache has grown already: when it grows it begins anew."""
    engine = engine_of(CONFIG, **how)
    completed(engine, PROMPTS[:3], Sampling(max_new_tokens=100, stop=tuple(range(40))))
    return engine


def prefix(count, seed=0):
    return np.random.default_rng(seed).integers(0, 40, count).tolist()


@BOTH
def test_prompts_are_prefilled_once_for_all_their_samples(packed):
    engine, passes = counted(engine_of(CONFIG, packed=packed))
    done = completed(engine, PROMPTS, Sampling(max_new_tokens=4, samples=5))
    assert passes == [[len(p) for p in PROMPTS], *[[1] * 35] * 3]
    total = sum(map(len, PROMPTS))
    assert engine.cost().prefilled == total and engine.cost().cached == 4 * total
    assert engine.cost().passes == 4 and engine.cost().decoded == 35 * 4
    assert any(len({tuple(row) for row in rows(done[i : i + 5])}) == 5 for i in range(0, 35, 5))


@BOTH
def test_a_common_beginning_is_computed_once(packed):
    """Of prompts that begin with the same 40 tokens, the later ones compute what stands behind two whole pages."""
    engine, passes = counted(engine_of(CONFIG, packed=packed))
    prompts = [[*prefix(40), *tail] for tail in ([1, 2, 3], [4], [5, 6, 7, 8])]
    requests = requests_of(prompts, Sampling(max_new_tokens=3), 0)
    done = complete(engine, requests)
    assert passes == [[43, 9, 12], [1, 1, 1], [1, 1, 1]]
    assert engine.cost().cached == 2 * 2 * PAGE and engine.cost().prefilled == 43 + 9 + 12
    alone = [complete(engine_of(CONFIG, packed=packed), [request])[0] for request in requests]
    assert_same(done, alone, 0.0 if packed else 1e-5)


@BOTH
def test_a_prefix_that_is_still_there_is_found_and_not_after_a_load(packed):
    """A conversation continues what was generated: all whole pages of prompt and completion are there."""
    engine, how = roomy(packed=packed), Sampling(max_new_tokens=30)
    prompt = prefix(20)
    (completion,) = completed(engine, [prompt], how)
    longer = [*prompt, *completion.tokens.tolist(), 1, 2, 3]
    before = engine.cost()
    (result,) = completed(engine, [longer], how)
    # 50 tokens; the last was drawn and never passed to the model: 49 keys and values, three whole pages
    assert engine.cost().cached - before.cached == 3 * PAGE
    assert engine.cost().prefilled - before.prefilled == len(longer) - 3 * PAGE
    fresh = completed(engine_of(CONFIG, packed=packed), [longer], how)
    assert_same([result], fresh, 0.0 if packed else 1e-5)
    load(engine, weights(CONFIG, seed=1), 8)
    before = engine.cost()
    done = completed(engine, [longer], how)
    assert engine.cost().cached == before.cached
    assert engine.cost().prefilled - before.prefilled == len(longer)
    assert_same(done, completed(engine_of(CONFIG, seed=1, packed=packed), [longer], how), 0.0)


@BOTH
def test_finished_rows_stop_costing(packed):
    engine, passes = counted(engine_of(CONFIG, packed=packed))
    done = completed(engine, PROMPTS * 8, Sampling(max_new_tokens=60, stop=(3, 17)))
    needed = sum(
        len(completion.tokens) - 1 for completion in done
    )  # the last token of a row is drawn, and never passed to the model
    longest = max(len(item.tokens) for item in done)
    assert 1.5 * needed < len(done) * longest  # there is something to be saved
    assert sum(map(sum, passes)) == needed + sum(map(len, PROMPTS)) * 8 - engine.cost().cached
    assert len(passes) == longest


def test_a_finished_rows_place_is_taken_at_once():
    engine, passes = counted(engine_of(CONFIG, max_rows=4))
    requests = [Request(i, [i], Sampling(max_new_tokens=1 + i % 7), i) for i in range(40)]
    complete(engine, requests)
    tokens = sum(1 + i % 7 for i in range(40))
    assert all(len(counts) <= 4 for counts in passes) and engine.room() == 4
    assert len(passes) < 1.2 * tokens / 4  # nearly always four rows


def test_samples_of_a_prompt_that_find_no_place_begin_before_later_prompts():
    ended = []
    requests = requests_of([[1, 2], [3]], Sampling(max_new_tokens=5, samples=5), 0)
    complete(engine_of(CONFIG, max_rows=2), requests, Callbacks(finished=lambda done: ended.append(done.number)))
    assert [set(ended[i : i + 2]) for i in range(0, 10, 2)] == [{i, i + 1} for i in range(0, 10, 2)]


def test_room_is_what_would_begin_at_once():
    engine = engine_of(CONFIG, max_rows=4)
    assert engine.room() == 4
    engine.submit(requests_of(PROMPTS[:3], Sampling(max_new_tokens=9), 0))
    assert engine.room() == 0  # while some wait
    engine.step()
    assert engine.room() == 1
    engine.submit(requests_of(PROMPTS[3:], Sampling(max_new_tokens=9), 0, 3))
    assert engine.room() == 0


def test_long_prompts_do_not_hold_decoding_up(monkeypatch):
    monkeypatch.setattr(engine_module, "pass_tokens", lambda device: 10)
    engine, passes = counted(roomy())
    short, long = requests_of([[1, 2]], Sampling(max_new_tokens=20), 0)[0], prefix(35)
    engine.submit([short])
    engine.step()
    engine.submit([Request(1, long, Sampling(max_new_tokens=2), 5)])
    for _ in range(5):
        engine.step()
    assert passes == [[2], [1, 9], [1, 9], [1, 9], [1, 8], [1, 1]]  # a token of the short one in each


@pytest.mark.slow
@BOTH
def test_many_requests_through_eight_places_with_too_small_a_cache(packed):
    """All are answered, with the completions of an engine that has room for all."""
    chance, requests = random.Random(0), []
    for number in range(80):
        prompt = prefix(chance.choice([1, 3, 20, 40]), chance.randrange(30))
        most = min(70, int(chance.paretovariate(0.8) * 6))
        requests.append(Request(number, prompt, Sampling(max_new_tokens=most, stop=(3, 5)), number))
    whole = engine_of(CONFIG, packed=packed)
    size, pages = whole._backend.page_bytes, 9
    engine = engine_of(CONFIG, packed=packed, max_rows=8, cache_bytes=pages * size + size - 1)
    held = []
    engine.submit(requests)
    done = []
    while engine.unfinished():
        done += engine.step()
        cost = engine.cost()
        held.append((cost.used_pages, cost.cache_bytes, sum(x.nbytes for x in trees.leaves(engine._backend._cache))))
    cost = engine.cost()
    assert cost.preempted > 0 and cost.used_pages == 0 and cost.pages == pages
    assert max(used for used, *_ in held) <= cost.peak_pages == pages
    assert all(stated == pages * size >= real for _, stated, real in held)
    assert {completion.finish for completion in done} == {"stop", "length"}
    expected = complete(whole, requests)
    assert_same(sorted(done, key=lambda completion: completion.number), expected, 0.0 if packed else 1e-5)


def contents(root: Any) -> dict[str, int]:
    """Sizes of all containers, arrays and tensors that an object of this project holds, by their path."""
    results, seen = {}, set()

    def visit(path, x):
        if id(x) in seen:
            return
        seen.add(id(x))
        if isinstance(x, torch.Tensor | np.ndarray):
            results[path] = x.nbytes
            return
        if isinstance(x, dict | list | tuple | set | collections.deque):
            results[path] = len(x)
            values = x.items() if isinstance(x, dict) else enumerate(x)
            for key, value in values:
                visit(f"{path}[{key}]", value)
        elif type(x).__module__.startswith("funrl.rollout"):
            slots = getattr(type(x), "__slots__", ())
            for name in [*vars(x)] if hasattr(x, "__dict__") else slots:
                visit(f"{path}.{name}", getattr(x, name))

    visit("engine", root)
    return results


@pytest.mark.slow
def test_nothing_is_left_behind_over_twenty_rounds():
    """Rounds with ends of all kinds: cancelled, paused, preempted, with new weights, and with sampling of its own."""
    packed = NO_PACKING is None
    size = engine_of(CONFIG, packed=packed)._backend.page_bytes
    engine, sizes, objects = engine_of(CONFIG, packed=packed, max_rows=6, cache_bytes=11 * size), [], []
    for turn in range(20):
        how = Sampling(max_new_tokens=40, stop=(3, 17), samples=2, temperature=1 + turn / 20)
        engine.submit(requests_of(PROMPTS, how, turn, 7 * turn))
        for _ in range(9):
            engine.step()
        assert engine.cost().used_pages > 0
        engine.cancel(range(14 * turn, 14 * turn + 4))
        if turn % 3 == 0:
            engine.pause()
            engine.resume()
        if turn % 4 == 0:
            load(engine, weights(CONFIG), turn)
        while engine.unfinished():
            engine.step()
        cost, pool = engine.cost(), engine._scheduler.pool
        assert cost.used_pages == 0 and pool.available == pool.pages and cost.peak_pages <= 11
        load(engine, weights(CONFIG), turn)
        if turn in (4, 19):
            gc.collect()
            sizes.append(contents(engine))
            objects.append(len(gc.get_objects()))
    assert engine.cost().preempted > 0
    assert len(sizes[0]) > 20 and sizes[1] == sizes[0], set(sizes[0].items()) ^ set(sizes[1].items())
    assert objects[1] - objects[0] < 200  # one of a round's 14 requests would be 45 times its objects


@BOTH
def test_what_can_never_fit_is_an_error_at_once(packed):
    size = engine_of(CONFIG, packed=packed)._backend.page_bytes
    engine = engine_of(CONFIG, packed=packed, cache_bytes=3 * size)
    most = Sampling(max_new_tokens=45)
    assert len(completed(engine, [[1, 2, 3]], most)[0].tokens) == 45  # 48 tokens are three pages
    for refuses in (engine.check, engine.submit):
        with pytest.raises(ValueError, match=r"prompt 1 may have 49 tokens, 4 pages .* has 3: .*--kv_cache_gb"):
            refuses(requests_of([[1, 2, 3], [1, 2, 3, 4]], most, 0))
    assert engine.unfinished() == 0


def test_where_no_size_is_given_the_cache_is_a_share_of_what_is_free(monkeypatch):
    engine = engine_of(CONFIG)
    size = engine._backend.page_bytes
    monkeypatch.setattr(cache_sizes, "free_bytes", lambda mesh: int(2 * 5.5 * size))
    with pytest.raises(ValueError, match=r"the cache of .* has 5"):
        engine.submit(requests_of([[1] * 50], Sampling(max_new_tokens=40), 0))
    completed(engine, PROMPTS, Sampling(max_new_tokens=60))
    assert engine.cost().pages == 5 and engine.cost().cache_bytes == 5 * size
    engine.pause()  # then it is looked up again
    monkeypatch.setattr(cache_sizes, "free_bytes", lambda mesh: 2 * 9 * size)
    engine.resume()
    completed(engine, PROMPTS, Sampling(max_new_tokens=60))
    assert engine.cost().pages == 9


def test_on_a_gpu_what_the_allocator_holds_unused_is_free(monkeypatch):
    """70 GB of an 80 GB device are the allocator's and 20 of these in use: 60 are free, and not 10."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert cache_sizes.free_bytes(Mesh(parse("dp1"), device=torch.device("cuda"))) == 60


def test_ranks_of_a_machine_share_what_is_free():
    free_bytes, four = cache_sizes.free_bytes(SINGLE), cache_sizes.free_bytes(Mesh(parse("dp4")))
    assert (
        local_ranks(4) == 4 and 1 << 27 < free_bytes < 1 << 50 and 3 < free_bytes / four < 5
    )  # others allocate meanwhile


def test_the_cache_is_no_larger_than_requests_need():
    engine = engine_of(CONFIG)
    completed(engine, PROMPTS[:3], Sampling(max_new_tokens=4))
    assert engine.cost().pages == 3
    completed(engine, PROMPTS, Sampling(max_new_tokens=40))
    assert engine.cost().pages == sum(-(-(len(p) + 40) // PAGE) for p in PROMPTS)
    few = engine_of(CONFIG, max_rows=2)
    completed(few, PROMPTS, Sampling(max_new_tokens=40))
    assert few.cost().pages == 4 + 3  # the two that need most


def test_there_are_never_two_caches():
    """The old one is freed before a larger one is made; and before new weights come."""
    model, alive, most = decoder_model(CONFIG), [], [0]

    def init_cache(*args):
        cache = model.init_cache(*args)
        if trees.leaves(cache)[0].device.type != "meta":
            alive.extend((weakref.ref(x.untyped_storage()), x.nbytes) for x in trees.leaves(cache))
            most[0] = max(most[0], sum(nbytes for storage, nbytes in alive if storage() is not None))
        return cache

    engine = load(
        native_engine(dataclasses.replace(model, init_cache=init_cache), options=NativeOptions(packed=False)),
        weights(CONFIG),
    )
    for count in (2, 20, 60):
        completed(engine, PROMPTS, Sampling(max_new_tokens=count))
        assert most[0] == engine.cost().cache_bytes

    def new():
        assert all(storage() is None for storage, _ in alive)
        yield from trees.named(weights(CONFIG))

    engine.load(new())
    completed(engine, PROMPTS, Sampling(max_new_tokens=2))
    assert len(alive) == 4 * 2 * CONFIG.layers


@BOTH
def test_waiting_conversations_lose_their_pages_before_running_ones_and_are_counted(packed):
    """With room the turns of five conversations compute what is new; without, the longest waiting ones begin anew."""
    size = engine_of(CONFIG, packed=packed)._backend.page_bytes
    how = Sampling(max_new_tokens=20)
    prompts = [prefix(20, seed) for seed in range(5)]
    turns = {}
    for pages in (35, 12):
        engine = engine_of(CONFIG, packed=packed, cache_bytes=pages * size, max_rows=2)
        engine.reserve(5 * 7 * PAGE)  # beyond the bound of one of the caches
        texts, turns[pages] = prompts, []
        for turn in range(3):
            known = [len(text) - 3 if turn else 0 for text in texts]
            requests = [
                Request(n, text, how, n, computed=count)
                for n, (text, count) in enumerate(zip(texts, known, strict=True))
            ]
            before = engine.cost()
            done = complete(engine, requests)
            cost = engine.cost()
            turns[pages] += done
            assert cost.preempted == 0 and cost.prefilled - before.prefilled + cost.cached - before.cached == sum(
                len(text) for text in texts
            )
            new = sum(len(text) - count for text, count in zip(texts, known, strict=True))
            assert cost.prefilled - before.prefilled == new + cost.recomputed - before.recomputed
            texts = [[*text, *completion.tokens.tolist(), 1, 2] for text, completion in zip(texts, done, strict=True)]
        # up to 5 pages of each conversation are kept
        assert cost.recomputed == (0 if pages == 35 else 5 * 39 + 5 * 61), (pages, cost)
    assert_same(turns[35], turns[12], 0.0 if packed else 1e-5)
