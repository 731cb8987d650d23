"""The native engine's numbers: transformers, the trainer, itself beside other requests, and a count."""

import dataclasses
import functools
import os
import random
import weakref
from pathlib import Path

import pytest
import torch
from small_engines import (
    CONFIGS,
    NO_PACKING,
    PROMPTS,
    SMALL,
    assert_same,
    completed,
    decode,
    engine_of,
    load,
    rows,
    weights,
)

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, Mesh, parse
from funrl.models import Inputs, ModelError, decoder_config, decoder_model, place, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.rollout.engine import complete
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native import engine as native
from funrl.rollout.native.backends import PackedBackend, TorchBackend, packed_problem
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

DATA = Path(os.environ.get("FUNRL_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
PACKED = pytest.param(True, marks=pytest.mark.skipif(NO_PACKING is not None, reason=str(NO_PACKING)), id="packed")
BOTH = pytest.mark.parametrize("packed", [PACKED, pytest.param(False, id="torch")])


@BOTH
@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_continuations_are_those_of_transformers(name, packed):
    config = CONFIGS[name]
    peer = load(hf_engine(decoder_model(config)), weights(config))
    how = Sampling(greedy=True, max_new_tokens=30, stop=(3, 17))
    ours, theirs = (completed(engine, PROMPTS, how) for engine in (engine_of(config, packed=packed), peer))
    assert_same(ours, theirs, 2e-5)


@pytest.mark.slow
@BOTH
@pytest.mark.data
def test_a_pretrained_model_tells_the_story_that_transformers_tells(packed):
    folder = DATA / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; FUNRL_DATA names another place")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, params = hf.load(folder)
    tokenizer, peer = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompts = [tokenizer("Once upon a time").input_ids, tokenizer("Tom and Lily saw a big").input_ids]
    how = Sampling(greedy=True, max_new_tokens=60, stop=model.config.special_tokens.eos)
    ours = rows(completed(load(native_engine(model, options=NativeOptions(packed=packed)), params), prompts, how))
    for prompt, row in zip(prompts, ours, strict=True):
        theirs = peer.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)[0, len(prompt) :].tolist()
        assert row == theirs
    assert "Lily" in tokenizer.decode(ours[0])


ENGINES = [
    pytest.param(torch.float32, True, 1e-5, marks=PACKED.marks, id="packed"),
    pytest.param(torch.float32, False, 1e-5, id="float32"),
    pytest.param(torch.float64, False, 1e-10, id="float64"),
]


@pytest.mark.parametrize("how", [Sampling(temperature=0.7), Sampling(greedy=True)], ids=str)
@pytest.mark.parametrize(("dtype", "packed", "close"), ENGINES)
def test_log_probs_are_those_of_the_trainer(dtype, packed, close, how):
    config, gaps = CONFIGS["qwen3 window"], []
    done = completed(engine_of(config, dtype, packed=packed), PROMPTS, how)
    params, placed = weights(config, dtype), place(decoder_model(config), dtype=dtype)
    for prompt, completion in zip(PROMPTS, done, strict=True):
        batch = Batch(tokens=torch.tensor([[*prompt, *completion.tokens]]), mask=None)
        drawn = 1.0 if how.greedy else how.temperature
        for temperature, ours in ((1.0, completion.raw_logp), (drawn, completion.sampling_logp)):
            theirs = placed.token_scores(params, batch, temperature=temperature).logp
            assert theirs is not None
            gaps.append((ours - theirs[0, len(prompt) :]).abs())
    assert torch.cat(gaps).max() < close and torch.cat(gaps).mean() < close / 10


@BOTH
def test_bfloat16_is_near(packed):
    config = CONFIGS["qwen3 window"]
    how = Sampling(greedy=True, max_new_tokens=12)
    done = completed(engine_of(config, torch.bfloat16, packed=packed), PROMPTS, how)
    placed, gaps = place(decoder_model(config)), []
    for prompt, completion in zip(PROMPTS, done, strict=True):
        assert completion.raw_logp.dtype == torch.float32
        batch = Batch(tokens=torch.tensor([[*prompt, *completion.tokens]]), mask=None)
        theirs = placed.token_scores(weights(config), batch).logp
        gaps.append((completion.raw_logp - theirs[0, len(prompt) :]).abs())
    assert torch.cat(gaps).mean() < 0.05 and torch.cat(gaps).max() < 0.3


def mixed_requests(count=24, seed=0):
    """Requests of all lengths and ways to sample, some of one prompt, some with a beginning in common."""
    chance, requests = random.Random(seed), []
    common = [chance.randrange(40) for _ in range(36)]
    while len(requests) < count:
        prompt = chance.choice([common[: chance.randrange(1, 37)], [*common[:20], chance.randrange(40)], [5, 6, 7]])
        how = Sampling(
            max_new_tokens=chance.randrange(1, 60),
            stop=chance.choice([(), (3, 17)]),
            samples=chance.choice([1, 1, 4]),
            stop_strings=chance.choice([(), ("0", "AB")]),
            temperature=chance.choice([1.0, 1.0, 0.7]),
            top_p=chance.choice([1.0, 0.9]),
            greedy=chance.random() < 0.2,
            repetition_penalty=chance.choice([1.0, 1.0, 1.0, 1.2]),
        )
        requests += [
            request._replace(number=len(requests) + request.number)
            for request in requests_of([prompt], how, len(requests))
        ]
    return requests[:count]


WAYS = {
    "few rows": {"max_rows": 3},
    "little cache, few rows": {"pages": 7, "max_rows": 2},
    "pieces, little cache": {"pass_tokens": 7, "pages": 10},
    "looks and preemptions": {"look_every": 3, "pages": 9, "max_rows": 6, "pass_tokens": 11},
    "last come, first served": {"reverse": True},
    "submitted bit by bit": {"trickle": True},
}
DTYPES = {
    "packed": (torch.float32, {}, 0.0),
    "torch": (torch.float64, {"packed": False}, 1e-12),
    "static": (torch.float64, {"packed": False, "static": True}, 1e-12),
}
WAYS_OF = {
    "packed": WAYS,
    "torch": ("looks and preemptions",),
    "static": ("pieces, little cache",),
}
QUICK = (
    ("packed", "looks and preemptions"),
    ("static", "pieces, little cache"),
)


def answers(dtype, kind, requests, pages=0, reverse=False, trickle=False, max_rows=512):
    """Completions by number, and the engine."""
    config = CONFIGS["qwen3 window"]
    size = engine_of(config, dtype, **kind)._backend.page_bytes
    engine = engine_of(config, dtype, **kind, cache_bytes=pages * size, max_rows=max_rows)
    if reverse:
        done = complete(engine, requests[::-1])
    elif trickle:
        done, waiting = [], list(requests)
        while waiting or engine.unfinished():
            engine.submit(waiting[:2])
            waiting = waiting[2:]
            done += engine.step()
    else:
        done = complete(engine, requests)
    return sorted(done, key=lambda completion: completion.number), engine


@functools.cache
def answers_together(dtype, packed):
    """Completions of an engine that has room for all requests at once."""
    return answers(dtype, {} if packed else {"packed": False}, mixed_requests())[0]


def ways():
    """Backends and ways; all but a few are slow."""
    for name, of_backend in WAYS_OF.items():
        for way in of_backend:
            marks = [*(PACKED.marks if name == "packed" else ()), *([] if (name, way) in QUICK else [pytest.mark.slow])]
            yield pytest.param(name, way, marks=marks)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "way"), list(ways()))
def test_a_completion_depends_on_nothing_else_that_is_in_flight(name, way, monkeypatch):
    """In float32 by the compiled step not a bit; by torch not more than the order of a sum in float64."""
    dtype, kind, close = DTYPES[name]
    how, requests = dict(WAYS[way]), mixed_requests()
    expected = answers_together(dtype, kind.get("packed", True))
    if tokens := how.pop("pass_tokens", None):
        monkeypatch.setattr(native, "pass_tokens", lambda device: tokens)
    if passes := how.pop("look_every", None):
        monkeypatch.setattr(native, "POLL_EVERY", {"cpu": passes})
    got, engine = answers(dtype, kind, requests, **how)
    assert_same(got, expected, close)
    cost, (pages, most) = engine.cost(), (how.get("pages", 10**9), how.get("max_rows", 512))
    assert cost.peak_pages <= cost.pages <= pages and cost.used_pages == 0 and cost.rows == most
    assert (cost.preempted > 0) == ("pages" in how and most > 2) or most == 2
    assert len({completion.finish for completion in got}) == 3


def test_without_looking_the_host_waits_for_nothing(monkeypatch):
    """The completions are the same, but passes go on a little behind the end of a row, and find nothing of it kept."""
    monkeypatch.setattr(native, "POLL_EVERY", {"cpu": 1000})
    how = Sampling(max_new_tokens=30, stop=(3, 17))
    engine, plain = engine_of(CONFIGS["llama"]), engine_of(CONFIGS["llama"])
    polls, poll = [], engine._sequences.poll
    monkeypatch.setattr(engine._sequences, "poll", lambda: (polls.append(1), poll()))
    assert_same(completed(engine, PROMPTS, how), completed(plain, PROMPTS, how), 0.0)
    assert len(polls) < 5 and engine.cost().decoded == plain.cost().decoded


def test_what_ended_behind_the_last_look_is_not_lost(monkeypatch):
    """Cancelled or paused, all that was drawn is there; and an error is no reason to keep a request."""
    monkeypatch.setattr(native, "POLL_EVERY", {"cpu": 1000})
    how, config = Sampling(max_new_tokens=30, stop=(3, 17, 28)), CONFIGS["llama"]
    expected = completed(engine_of(config), PROMPTS, how)
    assert any(len(completion.tokens) < 10 for completion in expected)
    for pause in (False, True):
        engine = engine_of(config)
        engine.submit(requests_of(PROMPTS, how, 0))
        for _ in range(12):
            assert engine.step() == []
        if pause:
            engine.pause()
            assert engine.unfinished() == 7
        done = {request.number: request for request in engine.cancel(range(7))}
        for item in expected:
            early = len(item.tokens) <= 12
            assert done[item.number].tokens.tolist() == item.tokens[:12].tolist()
            assert done[item.number].finish == (item.finish if early else "cancelled")
        assert engine.unfinished() == 0 and engine.step() == []
    broken = weights(config)
    engine = load(engine_of(config), broken | {"embed": broken["embed"] * torch.nan})
    engine.submit(requests_of(PROMPTS, how, 0))
    assert engine.step() == []
    with pytest.raises(FloatingPointError):
        engine.cancel(range(7))
    assert engine.unfinished() == 0 and engine.cost().used_pages == 0


def test_stop_strings_need_a_tokenizer():
    engine = load(native_engine(decoder_model(CONFIGS["llama"])), weights(CONFIGS["llama"]))
    with pytest.raises(ValueError, match="stop_strings need a tokenizer"):
        completed(engine, PROMPTS, Sampling(stop_strings=("ab",)))


@pytest.mark.slow
def test_samples_follow_the_model():
    config = CONFIGS["llama"]
    hidden = decoder_model(config).apply(weights(config, torch.float64), Inputs(torch.tensor([[1, 2]]))).hidden
    logits = hidden[0, -1] @ weights(config, torch.float64)["unembed"].T
    for dtype, packed in ((torch.float32, NO_PACKING is None), (torch.float64, False)):
        how = Sampling(max_new_tokens=1, samples=2000, temperature=1.7)
        done = completed(engine_of(config, dtype, packed=packed), [[1, 2]], how)
        expected = (logits / 1.7).softmax(-1) * 2000
        counts = torch.bincount(torch.cat([completion.tokens for completion in done]), minlength=config.vocab)
        common = expected > 5
        statistic = ((counts - expected)[common] ** 2 / expected[common]).sum() / common.sum()
        assert common.sum() > 8 and statistic < 2  # about 1 +- sqrt(2 / cells)


def test_log_probs_can_enter_a_loss():
    (first,) = completed(engine_of(CONFIGS["llama"]), PROMPTS[:1], Sampling(max_new_tokens=4))
    x = torch.ones(4, requires_grad=True)
    (x * first.raw_logp).sum().backward()
    assert torch.equal(x.grad, first.raw_logp)


@BOTH
def test_old_weights_are_gone_when_new_ones_are_asked_for(packed):
    engine = native_engine(decoder_model(CONFIGS["llama"]), options=NativeOptions(packed=packed))
    old = weights(CONFIGS["llama"])
    engine.load(trees.named(old))
    watched = weakref.ref(old["embed"])
    del old

    def new():
        assert watched() is None
        yield from trees.named(weights(CONFIGS["llama"]))

    engine.load(new())
    completed(engine, PROMPTS, Sampling(max_new_tokens=1))


@BOTH
def test_weights_are_checked(packed):
    config = CONFIGS["llama"]
    engine, named = (
        native_engine(decoder_model(config), options=NativeOptions(packed=packed)),
        trees.named(weights(config)),
    )
    with pytest.raises(KeyError, match="layers/1/attn/q"):
        engine.load([x for x in named if x[0] != "layers/1/attn/q"])
    with pytest.raises(KeyError, match="norm2"):
        engine.load([*named, ("norm2", torch.ones(32))])
    with pytest.raises(ModelError, match=r"norm has shape \[3\], rank 0 holds \[32\]"):
        engine.load([(n, x if n != "norm" else x[:3]) for n, x in named])
    engine.load([(n, x if n != "norm" else x * torch.nan) for n, x in named])
    with pytest.raises(FloatingPointError, match="not finite at token 0 of completion 0"):
        completed(engine, PROMPTS, Sampling())


def test_a_value_head_cannot_generate():
    with pytest.raises(ModelError, match="no unembedding"):
        native_engine(with_value_head(decoder_model(CONFIGS["llama"])))


def test_the_reason_why_a_model_is_not_computed_by_the_compiled_step_is_told(caplog):
    model, notes = decoder_model(CONFIGS["llama"]), []
    other = model.abilities._replace(compiled_step="not for this model")
    assert NO_PACKING is None or packed_problem(model, SINGLE, torch.float32) == NO_PACKING
    with caplog.at_level("INFO", "funrl.rollout.native"):
        made = {
            "not for this model": native_engine(dataclasses.replace(model, abilities=other), note=notes.append),
            "not torch.float16": native_engine(model, dtype=torch.float16, note=notes.append),
            "the layer is replaced": native_engine(model, layer=lambda *args: model.layer(*args), note=notes.append),
            "not asked for": native_engine(model, options=NativeOptions(packed=False), note=notes.append),
            "one tensor rank": native_engine(model, Mesh(parse("tp2")), note=notes.append),
        }
    assert all(type(engine._backend) is TorchBackend for engine in made.values())
    if NO_PACKING is None:
        assert all(reason in message for reason, message in zip(made, caplog.messages, strict=True)), caplog.messages
        assert type(native_engine(model, layer=model.layer, note=notes.append)._backend) is PackedBackend
        assert notes == []  # it is as it is meant to be
    else:
        assert NO_PACKING in notes[0]


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(("name", "static"), [("llama", False), ("qwen3", True)])
def test_tensor_parallel_ranks_draw_what_one_device_draws(name, static):
    config = (
        CONFIGS[name] if name == "llama" else decoder_config(**SMALL | {"kv_heads": 1}, family="qwen3", qk_norm=True)
    )
    requests = requests_of(PROMPTS, Sampling(max_new_tokens=12, stop=(3, 17), samples=2), 0)

    def program(mesh):
        engine = native_engine(
            decoder_model(config), mesh, torch.float64, options=NativeOptions(max_rows=5, decode=decode, static=static)
        )
        return complete(load(engine, weights(config, torch.float64)), requests)

    assert_same(launch(program, parse("tp2"), "cpu"), complete(engine_of(config, torch.float64), requests), 1e-10)
