"""An engine that steps beside coroutines: requests come while others run, and an error is that of who has made it."""

import asyncio
import time

import pytest
import torch
from small_engines import CONFIGS, PROMPTS, assert_same, engine_of, load, weights

from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.models import decoder_model
from funrl.processes.workers import WorkerError
from funrl.rollout import resident
from funrl.rollout.engine import complete
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import LogitsError, Request, requests_of
from funrl.rollout.resident import run_beside
from funrl.rollout.sampling_parameters import Sampling

CONFIG = CONFIGS["llama"]
HOW = Sampling(max_new_tokens=20, stop=(3, 17))


def test_requests_arrive_while_others_run_and_are_completed_as_alone():
    requests = requests_of(PROMPTS * 3, HOW, 4)

    async def later(engine, request, wait_s):
        await asyncio.sleep(wait_s)
        done = await engine.ask(request)
        return done._replace(number=request.number)

    async def program(engine):
        return await asyncio.gather(*(later(engine, request, 0.003 * (n % 5)) for n, request in enumerate(requests)))

    engine = engine_of(CONFIG, max_rows=6)
    assert_same(run_beside(engine, SINGLE, program), complete(engine_of(CONFIG), requests), 1e-5)
    assert engine.unfinished() == 0 and engine.cost().used_pages == 0


def test_it_runs_where_a_loop_runs_already():
    async def notebook():
        return run_beside(engine_of(CONFIG), SINGLE, lambda engine: engine.ask(Request(0, [1, 2], HOW, 3)))

    done = asyncio.run(notebook())
    assert done is not None and done.finish in ("stop", "length")


def test_an_error_is_that_of_who_asks_and_a_cancelled_caller_leaves_nothing():
    async def program(engine):
        long = Sampling(max_new_tokens=100)
        fine = asyncio.ensure_future(engine.ask(Request(0, [1, 2], long, 0)))
        gone = asyncio.ensure_future(engine.ask(Request(0, [1, 2], long, 1)))
        never = asyncio.ensure_future(engine.ask(Request(0, [1, 2], long, 2)))
        await asyncio.sleep(0)
        never.cancel()  # it has not been submitted yet
        with pytest.raises(ValueError, match="has token 77"):
            await engine.ask(Request(0, [77], HOW, 0))
        await asyncio.sleep(0.005)
        gone.cancel()
        left = asyncio.ensure_future(engine.ask(Request(0, [1, 3], long, 1)))
        return len((await fine).tokens), left

    engine = engine_of(CONFIG)
    length, _ = run_beside(engine, SINGLE, program)
    assert length == 100 and engine.unfinished() == 0
    complete(engine, requests_of(PROMPTS, HOW, 4))  # the next one takes it over

    async def fails(engine):
        await engine.ask(Request(0, [1, 2], HOW, 0))
        raise LookupError("of the program")

    with pytest.raises(LookupError, match="of the program"):
        run_beside(engine, SINGLE, fails)
    assert engine.unfinished() == 0


def test_an_error_of_the_engine_ends_the_program():
    engine = engine_of(CONFIG)
    broken = {name: x * float("nan") for name, x in weights(CONFIG).items() if name == "embed"}
    load(engine, weights(CONFIG) | broken)
    cleaned = []

    async def program(engine):
        try:
            await engine.ask(Request(0, [1, 2], HOW, 0))
        finally:
            await asyncio.sleep(0.01)
            cleaned.append(True)

    with pytest.raises(FloatingPointError, match="not finite"):
        run_beside(engine, SINGLE, program)
    assert cleaned == [True] and engine.unfinished() == 0


@pytest.mark.parametrize("kind", ["native", "unpacked", "speculating", pytest.param("hf", marks=pytest.mark.slow)])
def test_an_engine_that_lasts_gives_an_error_to_the_request_of_it_alone(kind):
    """A prompt with a token whose embedding is no number, among others that no other begins with."""
    bad = 5
    how = Sampling(max_new_tokens=12, stop=(bad,), greedy=True)
    fine = weights(CONFIG)
    broken = fine["embed"].clone()
    broken[bad] = torch.nan

    def engine_with(embed):
        if kind == "hf":
            engine = hf_engine(decoder_model(CONFIG))
        else:
            options = NativeOptions(max_rows=4, speculate=3 * (kind == "speculating"), packed=kind != "unpacked")
            engine = native_engine(decoder_model(CONFIG), options=options)
        return load(engine, fine | {"embed": embed})

    prompts = [[1, 2, 3], [1, bad, 3], [4, 1], [7, 2, 9, bad], [1, 2, 3, 6]]
    again = [[1, 2, 3, 6], *([n, n + 1] for n in range(6, 18))]  # in pages that others have left

    async def program(engine):
        asked = (engine.ask(Request(0, prompt, how, seed)) for seed, prompt in enumerate(prompts))
        first = await asyncio.gather(*asked, return_exceptions=True)
        later = (engine.ask(Request(0, prompt, how, 0)) for prompt in again)
        return first, await asyncio.gather(*later)

    done, later = run_beside(engine_with(broken), SINGLE, program, lasting=True)
    assert [isinstance(x, LogitsError) for x in done] == [bad in prompt for prompt in prompts]
    for prompt, completion in zip([*prompts, *again], [*done, *later], strict=True):
        expected = run_beside(
            engine_with(fine["embed"]), SINGLE, lambda engine, p=prompt: engine.ask(Request(0, p, how, 0))
        )
        if not isinstance(completion, LogitsError):
            assert completion.tokens.tolist() == expected.tokens.tolist()
            torch.testing.assert_close(completion.raw_logp, expected.raw_logp, rtol=0, atol=1e-5)
    with pytest.raises(FloatingPointError, match="logits are not finite"):
        run_beside(engine_with(broken), SINGLE, lambda engine: engine.ask(Request(0, prompts[1], how, 0)))


def test_an_engine_that_only_waits_beats_and_computes_nothing(monkeypatch):
    beats = []
    monkeypatch.setattr(resident, "BEAT_S", 0.05)
    monkeypatch.setattr(resident, "beat", lambda: beats.append(time.monotonic()))

    async def program(engine):
        while len(beats) < 5:
            await asyncio.sleep(0.01)

    engine = engine_of(CONFIG)
    run_beside(engine, SINGLE, program)
    assert engine.cost().passes == 0
    assert beats[4] - beats[0] > 3 * 0.05


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("fails", "steps"), [(False, 1), pytest.param(False, 8, marks=pytest.mark.slow), (True, 1)])
def test_tensor_ranks_follow_the_first(fails, steps, monkeypatch):
    monkeypatch.setitem(resident.ORDERS_EVERY, "cpu", steps)
    requests = requests_of(PROMPTS, HOW, 4)

    async def program(engine):
        if fails:
            await asyncio.sleep(0.1)
            raise LookupError("of the program")
        gone = asyncio.ensure_future(engine.ask(Request(0, [1, 2], HOW, 0)))
        engine.keep("it", 1000)
        done = []
        for request in requests[:3]:
            await asyncio.sleep(0.01)  # nothing runs meanwhile
            done.append(await engine.ask(request._replace(computed=1)))  # it continues another one
        gone.cancel()
        others = [engine.ask(request) for request in requests[3:]]
        return [item._replace(number=n) for n, item in enumerate(done + await asyncio.gather(*others))]

    def rank(mesh):
        engine = native_engine(decoder_model(CONFIG), mesh, torch.float64, options=NativeOptions(max_rows=4))
        load(engine, weights(CONFIG, torch.float64))
        done = run_beside(engine, mesh, program)
        assert (done is None) == (mesh.rank > 0) and engine.unfinished() == 0 and engine.cost().pages >= 62
        return done

    if fails:
        with pytest.raises(WorkerError, match="of the program"):
            launch(rank, parse("tp2"), "cpu")
        return
    assert_same(launch(rank, parse("tp2"), "cpu"), complete(engine_of(CONFIG, torch.float64), requests), 1e-10)
