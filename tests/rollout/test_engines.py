"""What every engine promises; one that cannot do a thing refuses it."""

import dataclasses

import pytest
import torch
from small_engines import KINDS, NO_PACKING, NO_VLLM, PROMPTS, assert_same, completed, load, plain_logps, rows, weights

from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.models import decoder_model, with_fields
from funrl.rollout.engine import Callbacks, complete, onload_engine
from funrl.rollout.requests import Completion, Request, requests_of
from funrl.rollout.sampling_parameters import Sampling

STOPS = Sampling(max_new_tokens=20, stop=(3, 17, 28), samples=3)
FREE = Sampling(max_new_tokens=12)
HOWS = [
    Sampling(max_new_tokens=9),
    Sampling(max_new_tokens=8, temperature=0.6),
    Sampling(max_new_tokens=7, temperature=1.4, top_k=9, top_p=0.8),
    Sampling(max_new_tokens=10, min_p=0.05, top_p=0.9),
    Sampling(max_new_tokens=11, greedy=True, temperature=0.3, top_k=2),
]
PENALTIES = [
    Sampling(max_new_tokens=8, repetition_penalty=1.6, temperature=0.8, min_p=0.02),
    Sampling(max_new_tokens=8, repetition_penalty=1.3, greedy=True),
]


def finish_all(engine):
    """Completions of all unfinished requests, by number."""
    done = []
    while engine.unfinished():
        done += engine.step()
    return sorted(done, key=lambda completion: completion.number)


def begin(engine, requests, steps):
    """Submit and step a few times; what was finished by then. No steps for an engine that completes all in one."""
    engine.submit(requests)
    return [completion for _ in range(steps) for completion in engine.step()]


def shapes_and_reasons(kind, mesh):
    engine, reported = kind.engine(kind.config, mesh), []
    requests = requests_of(PROMPTS, STOPS, 5)
    done = complete(engine, requests, Callbacks(finished=reported.append))
    assert [completion.number for completion in done] == [request.number for request in requests] == list(range(21))
    assert len(reported) == 21 and {id(completion) for completion in reported} == {
        id(completion) for completion in done
    }
    for completion in done:
        count = len(completion.tokens)
        assert 1 <= count <= 20 and completion.tokens.dtype == completion.versions.dtype == torch.int64
        assert (
            completion.tokens.shape
            == completion.sampling_logp.shape
            == completion.raw_logp.shape
            == completion.versions.shape
            == (count,)
        )
        assert completion.sampling_logp.dtype == completion.raw_logp.dtype == kind.dtype
        assert all(
            x.device.type == "cpu"
            for x in (completion.tokens, completion.sampling_logp, completion.raw_logp, completion.versions)
        )
        assert completion.versions.tolist() == [7] * count and (completion.raw_logp < 0).all()
        assert not set(STOPS.stop) & set(completion.tokens[:-1].tolist())
        ended = int(completion.tokens[-1]) in STOPS.stop
        assert (
            completion.finish == ("stop" if ended else "length")
            and completion.finished == ended
            and (ended or count == 20)
        )
        assert completion.written == completion.tokens[: count - ended].tolist()
    assert {completion.finish for completion in done} == {"stop", "length"}
    assert len({tuple(row) for row in rows(done)}) > len(PROMPTS)  # samples of a prompt differ
    cost = engine.cost()
    assert cost.decoded == sum(len(completion.tokens) for completion in done) and cost.used_pages == 0 < cost.passes
    assert cost.used_pages <= cost.peak_pages <= cost.pages and all(number >= 0 for number in cost)
    assert engine.unfinished() == 0 and engine.step() == [] and engine.room() > 0


def a_seed_fixes_a_completion(kind, mesh):
    engine = kind.engine(kind.config, mesh)
    first, again, other = (completed(engine, PROMPTS, FREE, seed) for seed in (0, 0, 1))
    assert_same(first, again)
    assert sum(a != b for a, b in zip(rows(first), rows(other), strict=True)) > 4
    if not kind.whole:  # and it is the request's own, whatever its number, place and neighbours
        renumbered = [request._replace(number=90 - request.number) for request in requests_of(PROMPTS, FREE, 0)]
        assert rows(complete(engine, renumbered[2:4])) == rows(first[2:4])


def log_probs_are_what_they_are_called(kind, mesh):
    """All ways to sample at once."""
    engine, prompts = kind.engine(kind.config, mesh), PROMPTS[2:6]
    requests = [
        Request(9 * n + i, prompt, how, 31 * n + i) for n, how in enumerate(HOWS) for i, prompt in enumerate(prompts)
    ]
    equal_length = [p * (6 // len(p)) for p in PROMPTS[:2] + PROMPTS[4:6]]  # of one length, which the hf engine needs
    requests += [
        Request(100 + 9 * n + i, p, how, n) for n, how in enumerate(PENALTIES) for i, p in enumerate(equal_length)
    ]
    for request, done in zip(requests, complete(engine, requests), strict=True):
        how, tokens = request.sampling, done.tokens.tolist()
        assert done.finish == "length" and len(tokens) == how.max_new_tokens
        drawn_T, raw_T = plain_logps(kind.config, request.prompt, tokens, how)
        assert (done.raw_logp - raw_T).abs().max() < kind.close
        assert (done.sampling_logp - drawn_T).abs().max() < kind.close * (1 + 1 / how.temperature)
        if how.greedy:
            assert torch.equal(done.sampling_logp, done.raw_logp)


def weights_are_visible_at_once(kind, mesh):
    engine, greedy = kind.engine(kind.config, mesh, seed=0), dataclasses.replace(FREE, greedy=True)
    old = completed(engine, PROMPTS, greedy)
    load(engine, weights(kind.config, kind.dtype, seed=1), 8)
    assert engine.version == 8
    new = completed(engine, PROMPTS, greedy)
    fresh = completed(kind.engine(kind.config, mesh, seed=1, version=8), PROMPTS, greedy)
    assert_same(new, fresh)
    assert all(completion.versions.tolist() == [8] * 12 for completion in new)
    assert all(a != b for a, b in zip(rows(old), rows(new), strict=True))


def wrong_weights_are_none(kind, mesh):
    engine = kind.make(decoder_model(kind.config), mesh, kind.dtype)
    assert engine.version is None
    requests = requests_of(PROMPTS, FREE, 0)
    with pytest.raises(RuntimeError, match="call load first"):
        complete(engine, requests)
    assert engine.unfinished() == 0
    load(engine, weights(kind.config, kind.dtype))
    with pytest.raises(KeyError):
        engine.load([], 9)
    assert engine.version is None
    engine.submit(requests)
    with pytest.raises(RuntimeError, match="call load first"):
        engine.step()
    load(engine, weights(kind.config, kind.dtype))
    assert_same(finish_all(engine), completed(kind.engine(kind.config, mesh), PROMPTS, FREE), kind.same)


def weights_that_are_not_finite_are_an_error_and_leave_nothing(kind, mesh):
    for how in (FREE, dataclasses.replace(FREE, greedy=True)):
        engine, broken = kind.engine(kind.config, mesh), weights(kind.config, kind.dtype)
        expected = completed(engine, PROMPTS[:3], how)
        load(engine, broken | {"embed": broken["embed"] * torch.nan})
        with pytest.raises(FloatingPointError, match="logits are not finite"):
            completed(engine, PROMPTS[:3], how)
        assert engine.unfinished() == 0 and engine.step() == []
        load(engine, weights(kind.config, kind.dtype))
        assert_same(completed(engine, PROMPTS[:3], how), expected)


def nothing_is_no_work(kind, mesh):
    engine = kind.make(decoder_model(kind.config), mesh, kind.dtype)
    assert engine.step() == [] and complete(engine, []) == []  # although it has no weights yet
    load(engine, weights(kind.config, kind.dtype))
    assert complete(engine, []) == [] and requests_of([], FREE, 0) == []
    engine.submit([])
    engine.check([])
    assert engine.step() == [] and engine.cancel([]) == [] and engine.unfinished() == 0
    assert engine.cost().passes == 0


BEGUN = Completion(5, torch.tensor([2, 99]), torch.zeros(2), torch.zeros(2), torch.tensor([7, 7]), "paused")
WRONG = [
    ([1], {}, {"prompt": []}, "prompt 5 is empty"),
    ([1] * 100, {"max_new_tokens": 40}, {}, "100 tokens.*max_new_tokens=40.*128 positions"),
    ([1, 40], {}, {}, "prompt 5 has token 40; the vocabulary has 40"),
    ([1, -1], {}, {}, "prompt 5 has token -1"),
    ([1], {"stop": (77,)}, {}, "stop has token 77"),
    ([1], {}, {"most": 0}, "most=0, it must be at least 1"),
    ([1], {}, {"number": 3}, "request 3 is in use already"),
    ([1], {}, {"seed": 1 << 63}, "request 5 has seed 9223372036854775808, it must be a signed number of 64 bits"),
    ([1], {}, {"begun": BEGUN}, "what is begun of request 5 has token 99; the vocabulary has 40"),
]


def bad_requests_are_refused_and_nothing_is_taken(kind, mesh):
    engine = kind.engine(kind.config, mesh)
    good = requests_of(PROMPTS[:4], FREE, 0)
    for prompt, how, change, message in WRONG:
        bad = Request(5, prompt, with_fields(FREE, **how), 0)._replace(**change)
        for refuses in (engine.check, engine.submit):
            with pytest.raises(ValueError, match=message):
                refuses([*good, bad])
        assert engine.unfinished() == 0
    engine.submit(good)
    with pytest.raises(ValueError, match="request 2 is in use already"):
        engine.submit(good[2:3])
    assert engine.unfinished() == 4
    done = finish_all(engine)
    assert_same(done, complete(engine, good))  # the numbers are free again
    for count in ("samples", "max_new_tokens"):
        with pytest.raises(ValueError, match=f"{count} is 0"):
            with_fields(FREE, **{count: 0})


def cancelled_requests_end_at_once(kind, mesh):
    how = dataclasses.replace(FREE, greedy=kind.whole)  # samples of the hf engine depend on all requests
    engine, requests = kind.engine(kind.config, mesh), requests_of(PROMPTS, how, 0)
    whole, steps = complete(engine, requests), 0 if kind.whole else 5
    assert begin(engine, requests, steps) == []
    gone = engine.cancel([4, 1, 99])
    assert sorted(item.number for item in gone) == [1, 4] and engine.unfinished() == 5
    for completion in gone:
        count, complete_one = len(completion.tokens), whole[completion.number]
        assert completion.finish == "cancelled" and not completion.finished and (count > 0) == (steps > 0)
        assert len(completion.sampling_logp) == len(completion.raw_logp) == len(completion.versions) == count < 12
        assert completion.written == complete_one.tokens[:count].tolist()
    assert engine.cancel([4, 1, 99]) == []
    assert_same(finish_all(engine), [request for request in whole if request.number not in (1, 4)], kind.same)
    assert engine.cost().used_pages == 0


def an_error_in_the_caller_leaves_nothing_in_flight(kind, mesh):
    engine = kind.engine(kind.config, mesh)
    how = dataclasses.replace(STOPS, samples=1)
    whole = completed(engine, PROMPTS, how)

    def finished(first):
        raise OSError("the disk is full")

    with pytest.raises(OSError, match="the disk is full"):
        complete(engine, requests_of(PROMPTS, how, 0), Callbacks(finished=finished))
    assert engine.unfinished() == 0 and engine.step() == [] and engine.cost().used_pages == 0
    assert_same(completed(engine, PROMPTS, how), whole)


def a_pause_changes_nothing(kind, mesh):
    engine, requests = kind.engine(kind.config, mesh), requests_of(PROMPTS, FREE, 0)
    whole = complete(engine, requests)
    begin(engine, requests if kind.whole else requests[:3], 0 if kind.whole else 4)
    engine.pause()
    assert engine.paused and engine.step() == [] and engine.cost().cache_bytes == 0
    engine.submit([] if kind.whole else requests[3:])
    assert engine.unfinished() == 7 and engine.step() == []
    engine.resume()
    assert not engine.paused
    assert_same(finish_all(engine), whole, kind.same)
    with pytest.raises(ValueError, match="empty"), onload_engine(engine):
        complete(engine, [requests[0]._replace(prompt=[])])
    assert engine.paused
    with pytest.raises(RuntimeError, match="paused: call resume first"):
        complete(engine, requests)
    assert engine.unfinished() == 0
    with onload_engine(engine):
        assert_same(complete(engine, requests), whole, kind.same)


def new_weights_in_the_middle(kind, mesh, pauses):
    """Each token is of the version that it says, and so are its log-probabilities."""
    engine, requests = kind.engine(kind.config, mesh, seed=0), requests_of(PROMPTS, FREE, 0)
    begin(engine, requests[:5], 0 if kind.whole else 4)
    if pauses:
        engine.pause()
    load(engine, weights(kind.config, kind.dtype, seed=1), 8)
    engine.submit(requests[5:])
    engine.resume()
    for request, completion in zip(requests, finish_all(engine), strict=True):
        old = int((completion.versions == 7).sum())
        assert completion.versions.tolist() == [7] * old + [8] * (12 - old)
        assert (0 < old < 12) == (request.number < 5 and not kind.whole), old
        before, behind = (
            plain_logps(kind.config, request.prompt, completion.tokens.tolist(), FREE, seed)[1] for seed in (0, 1)
        )
        expected = torch.cat([before[:old], behind[old:]])
        assert (completion.raw_logp - expected).abs().max() < kind.close
        assert (completion.sampling_logp - expected).abs().max() < kind.close


def a_load_in_the_middle_is_seen(kind, mesh):
    new_weights_in_the_middle(kind, mesh, pauses=False)


def a_pause_and_a_load_in_the_middle(kind, mesh):
    new_weights_in_the_middle(kind, mesh, pauses=True)


def parts_are_the_whole(kind, mesh):
    """At most five tokens at a time, by two engines in turns."""
    engines = [kind.engine(kind.config, mesh, version=version) for version in (7, 9)]
    requests = [request._replace(most=5) for request in requests_of(PROMPTS, STOPS, 2)]
    if kind.whole:
        begun = complete(engines[0], [requests[0]._replace(most=None)])[0]
        for part in (requests[0], requests[0]._replace(most=None, begun=begun)):
            with pytest.raises(ValueError, match="whole requests only"):
                engines[0].submit([part])
        return
    whole = complete(engines[0], [request._replace(most=None) for request in requests])
    ended = {}
    for turn in range(4):
        for entry in complete(engines[turn % 2], requests):
            ended[entry.number] = entry
        assert all(len(element.tokens) == 5 * turn + 5 or element.finish != "paused" for element in ended.values())
        requests = [
            request._replace(begun=ended[request.number])
            for request in requests
            if ended[request.number].finish == "paused"
        ]
    assert not requests
    done = [ended[item.number] for item in whole]
    assert_same(done, whole, kind.same)
    for entry in done:
        assert entry.versions.tolist() == ([7] * 5 + [9] * 5 + [7] * 5 + [9] * 5)[: len(entry.tokens)]
    full = next(completion for completion in whole if completion.finish == "length")
    again = requests_of(PROMPTS, STOPS, 2)[full.number]._replace(begun=full)
    with pytest.raises(ValueError, match="has 20 tokens already, max_new_tokens=20"):
        engines[0].submit([again])


def a_stop_string_ends_a_completion(kind, mesh):
    engine, free = kind.engine(kind.config, mesh), dataclasses.replace(FREE, max_new_tokens=20, samples=3)
    whole = completed(engine, PROMPTS, free)
    texts = [kind_text(completion) for completion in whole]
    strings = (texts[2][5:7], texts[6][3], "not of these tokens")
    how = dataclasses.replace(free, stop_strings=strings)
    if kind.whole:
        with pytest.raises(ValueError, match="stop_strings is"):
            completed(engine, PROMPTS, how)
        return
    for element, text, free_one in zip(completed(engine, PROMPTS, how), texts, whole, strict=True):
        ends = [text.find(string) + len(string) for string in strings if string in text]
        count = min(ends, default=20)
        assert element.finish == ("string" if ends else "length") and element.finished == bool(ends)
        assert element.tokens.tolist() == free_one.tokens[:count].tolist() == element.written
    assert {"string", "length"} == {item.finish for item in completed(engine, PROMPTS, how)}


def kind_text(first):
    return "".join(chr(ord("0") + token) for token in first.tokens.tolist())


CONTRACT = [
    shapes_and_reasons,
    a_seed_fixes_a_completion,
    log_probs_are_what_they_are_called,
    weights_are_visible_at_once,
    wrong_weights_are_none,
    weights_that_are_not_finite_are_an_error_and_leave_nothing,
    nothing_is_no_work,
    bad_requests_are_refused_and_nothing_is_taken,
    cancelled_requests_end_at_once,
    an_error_in_the_caller_leaves_nothing_in_flight,
    a_pause_changes_nothing,
    a_load_in_the_middle_is_seen,
    a_pause_and_a_load_in_the_middle,
    parts_are_the_whole,
    a_stop_string_ends_a_completion,
]


def left_behind(promises, kind, mesh):
    """The numbers of requests that engines still have after promises."""
    engines = []

    def make(*args):
        engines.append(kind.make(*args))
        return engines[-1]

    for promise in promises:
        promise(kind._replace(make=make), mesh)
    return [engine.unfinished() for engine in engines]


ON_RANKS = [  # that ranks could keep in ways of their own
    log_probs_are_what_they_are_called,
    wrong_weights_are_none,
    cancelled_requests_end_at_once,
    weights_that_are_not_finite_are_an_error_and_leave_nothing,
    an_error_in_the_caller_leaves_nothing_in_flight,
    a_pause_and_a_load_in_the_middle,
    parts_are_the_whole,
]


def promises():
    """Kinds of engines with what each promises: one start of ranks shows all of theirs."""
    for name, kind in KINDS.items():
        if kind.mesh:
            yield pytest.param(name, ON_RANKS, marks=pytest.mark.gloo, id=name)
        else:
            yield from (pytest.param(name, [promise], id=f"{name}-{promise.__name__}") for promise in CONTRACT)


@pytest.mark.parametrize(("name", "promised"), list(promises()))
def test_every_engine_keeps_its_promises(name, promised):
    kind = KINDS[name]
    absent = {"packed": NO_PACKING, "vllm": NO_VLLM}.get(name.split()[0])
    if absent:
        pytest.skip(absent)
    if kind.mesh:
        left = launch(lambda mesh: left_behind(promised, kind, mesh), parse(kind.mesh), "cpu")
    else:
        left = left_behind(promised, kind, SINGLE)
    assert left and not any(left)
