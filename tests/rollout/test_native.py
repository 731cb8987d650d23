"""The native engine against transformers, the trainer's log-probabilities, itself split otherwise, and a count."""

import dataclasses
import os
import weakref
from pathlib import Path

import chex
import pytest
import torch

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import rules
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.models import Config, Inputs, ModelError, decoder_model, hf, place, with_value_head
from funrl.rollout import native
from funrl.rollout.completions import Sampling
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native import native_engine

DATA = Path(os.environ.get("FUNRL_DATA") or Path(__file__).parents[2].parent / "shared" / "data")
SMALL = {"vocab": 40, "embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 48, "max_positions": 128}
CONFIGS = {
    "llama": Config(**SMALL),
    "llama tied": Config(**SMALL | {"kv_heads": 4}, tied=True),
    "qwen2": Config(**SMALL, family="qwen2", attention_bias=True),
    "qwen3": Config(**SMALL | {"head": 16}, family="qwen3", qk_norm=True),
    "qwen3 window": Config(**SMALL, family="qwen3", qk_norm=True, windows=(None, 6)),
}
PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10, 11, 12, 13], [4, 4], [30, 20, 10], [39] * 6, [2, 3, 5, 7, 11, 13, 17]]


def weights(config: Config, dtype=torch.float32, seed: int = 0):
    """Random weights whose distributions are neither flat nor certain."""
    params = decoder_model(config).init(torch.Generator().manual_seed(seed), dtype)
    for name in {"embed", "unembed"} & set(params):
        params[name] = params[name] * 25
    return params


def engine_of(config: Config, dtype=torch.float32, **how):
    return loaded(native_engine(decoder_model(config), dtype=dtype, **how), weights(config, dtype))


def loaded(engine, params):
    engine.load(engine.weights.named(params))
    return engine


def rows_of(done):
    """Completions as lists, whatever the width of their padding."""
    return [row[:n] for row, n in zip(done.tokens.tolist(), done.lengths.tolist(), strict=True)]


@pytest.mark.parametrize("name", CONFIGS)
def test_greedy_continuations_are_those_of_transformers(name):
    config = CONFIGS[name]
    peer = loaded(hf_engine(decoder_model(config)), weights(config))
    how = Sampling(greedy=True, max_new_tokens=30, stop=(3, 17))
    ours, theirs = engine_of(config).generate(PROMPTS, how, 0), peer.generate(PROMPTS, how, 0)
    assert rows_of(ours) == rows_of(theirs)
    assert torch.equal(ours.finished, theirs.finished)
    torch.testing.assert_close(ours.logp, theirs.logp, atol=2e-5, rtol=0)
    torch.testing.assert_close(ours.model_logp, theirs.model_logp, atol=2e-5, rtol=0)


@pytest.mark.data
def test_a_pretrained_model_tells_the_story_that_transformers_tells():
    folder = DATA / "stories260k"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there; FUNRL_DATA names another place")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, params = hf.load(folder)
    tokenizer, peer = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompts = [tokenizer("Once upon a time").input_ids, tokenizer("Tom and Lily saw a big").input_ids]
    how = Sampling(greedy=True, max_new_tokens=60, stop=model.config.eos)
    ours = loaded(native_engine(model), params).generate(prompts, how, 0)
    for prompt, row in zip(prompts, rows_of(ours), strict=True):
        theirs = peer.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=60)[0, len(prompt) :].tolist()
        assert row == theirs
    assert "Lily" in tokenizer.decode(ours.tokens[0])


@pytest.mark.parametrize("how", [Sampling(), Sampling(temperature=0.7), Sampling(greedy=True)], ids=str)
@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 1e-5), (torch.float64, 1e-10)], ids=str)
@pytest.mark.parametrize("name", ["llama", "qwen3 window"])
def test_log_probs_are_those_of_the_trainer(name, dtype, close, how):
    config = CONFIGS[name]
    done = engine_of(config, dtype).generate(PROMPTS, how, 0)
    params, placed = weights(config, dtype), place(decoder_model(config), dtype=dtype)
    for i, prompt in enumerate(PROMPTS):
        completion = done.tokens[i, : done.lengths[i]].tolist()
        row = Batch(tokens=torch.tensor([[*prompt, *completion]]), mask=None)
        for temperature, ours in ((1.0, done.model_logp), (1.0 if how.greedy else how.temperature, done.logp)):
            theirs = placed.token_scores(params, row, temperature=temperature).logp
            assert theirs is not None
            torch.testing.assert_close(ours[i, : len(completion)], theirs[0, len(prompt) :], atol=close, rtol=0)


SPLITS = {
    "one by one": lambda: [1] * 7,
    "two ranks": lambda: [4, 3],
}


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("how", [{}, {"temperature": 0.8, "top_k": 12, "top_p": 0.9}], ids=str)
def test_samples_do_not_depend_on_the_split_of_prompts(split, how):
    sampling = Sampling(**how, max_new_tokens=20, stop=(3, 17, 28), samples=3)
    engine = engine_of(CONFIGS["qwen3"], torch.float64)
    whole = engine.generate(PROMPTS, sampling, seed=11, first_prompt=5)
    rows, logp, first = [], [], 0
    for count in SPLITS[split]():
        part = engine.generate(PROMPTS[first : first + count], sampling, seed=11, first_prompt=5 + first)
        rows += rows_of(part)
        logp += [x[:n] for x, n in zip(part.logp, part.lengths, strict=True)]
        first += count
    assert rows == rows_of(whole)
    assert len({tuple(r) for r in rows}) > len(PROMPTS)  # the samples of a prompt differ
    for i, x in enumerate(logp):
        torch.testing.assert_close(whole.logp[i, : len(x)], x, atol=1e-12, rtol=0)


def test_samples_do_not_depend_on_how_many_rows_run_together(monkeypatch):
    sampling = Sampling(max_new_tokens=20, stop=(3, 17), samples=3)
    config = CONFIGS["llama"]
    whole = engine_of(config, torch.float64).generate(PROMPTS, sampling, seed=1)
    few = engine_of(config, torch.float64, max_rows=4).generate(PROMPTS, sampling, seed=1)
    # 2 layers x 2 (keys, values) x 2 heads x 8 numbers x 8 bytes are 512 bytes a slot; the longest row has 29
    little = engine_of(config, torch.float64, cache_bytes=512 * 29 * 2).generate(PROMPTS, sampling, seed=1)
    monkeypatch.setattr(native, "PREFILL_TOKENS", 10)
    monkeypatch.setattr(native, "LOGITS", 5 * config.vocab)
    monkeypatch.setattr(native, "CACHE_BLOCK", 3)
    monkeypatch.setattr(native, "NOISE_STEPS", 7)
    monkeypatch.setattr(native, "LOOK_EVERY", {"cpu": 5})
    pieces = engine_of(config, torch.float64).generate(PROMPTS, sampling, seed=1)
    for other in (few, little, pieces):
        assert rows_of(other) == rows_of(whole)


@pytest.mark.parametrize("max_rows", [4, 512])
def test_every_row_is_told_once_when_its_chunk_is_done_without_its_stop_token(max_rows):
    sampling, told = Sampling(max_new_tokens=20, stop=(3, 17), samples=3), []
    engine = engine_of(CONFIGS["llama"], max_rows=max_rows)
    done = engine.generate(PROMPTS, sampling, 1, on_done=lambda numbers, tokens: told.append((numbers, tokens)))
    whole = [row[: len(row) - bool(end)] for row, end in zip(rows_of(done), done.finished, strict=True)]
    found = {number: ids for numbers, tokens in told for number, ids in zip(numbers, tokens, strict=True)}
    assert [found[number] for number in sorted(found)] == whole and any(done.finished)
    assert sum(len(numbers) for numbers, _ in told) == len(whole)
    assert len(told) == -(-len(whole) // max_rows)


def counting_layer(config: Config):
    """A layer that notes the shape [B, T] of what goes through the first one of each pass."""
    seen, calls = [], [0]

    def layer(*args):
        if calls[0] % config.layers == 0:
            seen.append(tuple(args[3].shape[:2]))
        calls[0] += 1
        return decoder_model(config).layer(*args)

    return layer, seen


def test_finished_rows_stop_costing():
    config = CONFIGS["llama"]
    layer, seen = counting_layer(config)
    engine = engine_of(config, layer=layer)
    done = engine.generate(PROMPTS * 8, Sampling(max_new_tokens=60, stop=(3, 17)), seed=0)
    needed = int((done.lengths - 1).sum())  # the last token of a row is drawn, and never passed to the model
    passed = sum(B for B, T in seen[1:])
    assert 1.5 * needed < len(done.lengths) * int(done.lengths.max())  # there is something to be saved
    assert needed <= passed <= 1.1 * needed
    assert len(seen) - 1 <= int(done.lengths.max())  # the loop ends with the last row


def test_prompts_are_prefilled_once_for_all_their_samples():
    config = CONFIGS["llama"]
    layer, seen = counting_layer(config)
    done = engine_of(config, layer=layer).generate(PROMPTS, Sampling(max_new_tokens=4, samples=5), seed=0)
    assert seen == [(7, 9), (35, 1), (35, 1), (35, 1)]
    assert done.tokens.shape == (35, 4)
    firsts = done.tokens.view(7, 5, 4)
    assert any(len({tuple(row) for row in prompt.tolist()}) == 5 for prompt in firsts)


def test_the_seed_fixes_the_samples():
    engine, how = engine_of(CONFIGS["llama"]), Sampling(max_new_tokens=10)
    first, again, other = (engine.generate(PROMPTS, how, seed).tokens for seed in (0, 0, 1))
    assert torch.equal(first, again)
    assert (first != other).float().mean() > 0.5


def test_samples_follow_the_model():
    config = CONFIGS["llama"]
    done = engine_of(config, torch.float64).generate([[1, 2]], Sampling(max_new_tokens=1, samples=4000), seed=0)
    hidden = decoder_model(config).apply(weights(config, torch.float64), Inputs(torch.tensor([[1, 2]]))).hidden
    expected = (hidden[0, -1] @ weights(config, torch.float64)["unembed"].T).softmax(-1) * 4000
    counts = torch.bincount(done.tokens[:, 0], minlength=config.vocab)
    common = expected > 5
    statistic = ((counts - expected)[common] ** 2 / expected[common]).sum() / common.sum()
    assert statistic < 2  # about 1 +- sqrt(2 / cells)


def test_its_three_computations_by_hand():
    """Two prompts of two samples each, greedily: what `generate` does, less stop tokens and chunks."""
    config, how = CONFIGS["qwen3 window"], Sampling(greedy=True, samples=2, max_new_tokens=9)
    model, prompts = native.loaded_model(decoder_model(config), weights(config)), [[7], [5, 6, 7, 8]]
    tokens = []
    with torch.no_grad():
        state = native.prefill(model, prompts, range(4), how)
        chex.assert_tree_shape_prefix(trees.leaves(state.cache), (4, 13))
        assert state.positions_R1.flatten().tolist() == [1, 1, 4, 4] and state.longest == 4
        for _ in range(9):
            tokens.append(native.draw_tokens(model, state.hidden_RD, None, how)[0])
            state = native.decode_step(model, state, tokens[-1])
    expected = engine_of(config).generate(prompts, how, 0).tokens
    assert torch.equal(torch.stack(tokens, 1), expected)
    assert state.longest == 13 and state.reach == 13


def test_a_stop_token_ends_its_completion_and_is_part_of_it():
    stop = (3, 17, 28)
    done = engine_of(CONFIGS["llama"]).generate(PROMPTS * 4, Sampling(max_new_tokens=25, stop=stop), seed=2)
    free = engine_of(CONFIGS["llama"]).generate(PROMPTS * 4, Sampling(max_new_tokens=25), seed=2)
    assert 0 < done.finished.sum() < len(done.finished)
    assert not free.finished.any() and (free.lengths == 25).all()
    for i, row in enumerate(rows_of(done)):
        assert row == free.tokens[i, : len(row)].tolist()
        assert (row[-1] in stop) == bool(done.finished[i])
        assert not set(stop) & set(row[:-1])
        assert done.finished[i] or len(row) == 25
        assert (done.logp[i, : len(row)] < 0).all() and (done.logp[i, len(row) :] == 0).all()
        assert (done.model_logp[i, len(row) :] == 0).all() and (done.tokens[i, len(row) :] == 0).all()


def test_log_probs_can_enter_a_loss():
    done = engine_of(CONFIGS["llama"]).generate(PROMPTS, Sampling(max_new_tokens=4), seed=0)
    x = torch.ones_like(done.logp, requires_grad=True)
    (x * done.logp).sum().backward()
    assert torch.equal(x.grad, done.logp)


def test_no_prompts_are_no_completions():
    done = engine_of(CONFIGS["llama"]).generate([], Sampling(max_new_tokens=4), seed=0)
    assert [len(x) for x in done] == [0] * 5


@pytest.mark.parametrize(
    ("prompts", "how", "message"),
    [
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1] * 100], {"max_new_tokens": 40}, "100 tokens.*max_new_tokens=40.*128 positions"),
        ([[1, 40]], {}, "prompt 0 has token 40; the vocabulary has 40"),
        ([[1, -1]], {}, "prompt 0 has token -1"),
        ([[1]], {"stop": (77,)}, "stop has token 77"),
    ],
)
@pytest.mark.parametrize("make", [native_engine, hf_engine])
def test_bad_input_is_refused(make, prompts, how, message):
    engine = loaded(make(decoder_model(CONFIGS["llama"])), weights(CONFIGS["llama"]))
    with pytest.raises(ValueError, match=message):
        engine.generate(prompts, Sampling(**how), 0)


def test_old_weights_are_gone_when_new_ones_are_asked_for():
    engine = native_engine(decoder_model(CONFIGS["llama"]))
    old = weights(CONFIGS["llama"])
    engine.load(trees.named(old))
    watched = weakref.ref(old["embed"])
    del old

    def new():
        assert watched() is None
        yield from trees.named(weights(CONFIGS["llama"]))

    engine.load(new())
    engine.generate(PROMPTS, Sampling(max_new_tokens=1), 0)


def test_weights_are_checked():
    config = CONFIGS["llama"]
    engine = native_engine(decoder_model(config))
    with pytest.raises(RuntimeError, match="call load first"):
        engine.generate(PROMPTS, Sampling(), 0)
    named = trees.named(weights(config))
    with pytest.raises(KeyError, match="layers/1/attn/q"):
        engine.load([x for x in named if x[0] != "layers/1/attn/q"])
    with pytest.raises(ModelError, match=r"norm has shape \[3\], rank 0 holds \[32\]"):
        engine.load([(n, x if n != "norm" else x[:3]) for n, x in named])
    engine.load([(n, x if n != "norm" else x * torch.nan) for n, x in named])
    with pytest.raises(FloatingPointError, match="not finite at token 0 of completion 0"):
        engine.generate(PROMPTS, Sampling(), 0)


def test_the_version_is_that_of_the_weights_it_has():
    engine = native_engine(decoder_model(CONFIGS["llama"]))
    assert engine.version is None
    engine.load(engine.weights.named(weights(CONFIGS["llama"])), 7)
    assert engine.version == 7
    with pytest.raises(KeyError):
        engine.load([], 8)
    assert engine.version is None


def test_a_value_head_cannot_generate():
    with pytest.raises(ModelError, match="no unembedding"):
        native_engine(with_value_head(decoder_model(CONFIGS["llama"])))


@pytest.mark.parametrize("samples", [1, 3])
def test_no_more_caches_than_their_bound_at_any_time(samples):
    """A chunk's cache is freed before the next one's is made; with several samples, prompts have one beside it."""
    config, most, alive = CONFIGS["llama"], [0], []
    model = decoder_model(config)
    one = 2 * 2 * 2 * 8 * 4  # layers, keys and values, heads, head size, bytes

    def init_cache(*args):
        cache = model.init_cache(*args)
        if trees.leaves(cache)[0].device.type != "meta":
            alive.extend((weakref.ref(x.untyped_storage()), x.nbytes) for x in trees.leaves(cache))
            most[0] = max(most[0], sum(nbytes for storage, nbytes in alive if storage() is not None))
        return cache

    bound = one * 29 * 4  # four rows of the longest prompt and completion
    engine = native_engine(dataclasses.replace(model, init_cache=init_cache), cache_bytes=bound)
    loaded(engine, weights(config)).generate(PROMPTS, Sampling(max_new_tokens=20, samples=samples), 0)
    assert len(alive) >= 2 * 2 * 2  # there were several
    assert bound / 2 < most[0] <= bound + (0 if samples == 1 else one * sum(map(len, PROMPTS)))


@pytest.mark.gloo
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_tensor_parallel_ranks_draw_what_one_device_draws(name):
    config = CONFIGS[name] if name == "llama" else Config(**SMALL | {"kv_heads": 1}, family="qwen3", qk_norm=True)
    sampling = Sampling(max_new_tokens=12, stop=(3, 17), samples=2)

    def program(mesh):
        engine = native_engine(decoder_model(config), mesh, torch.float64)
        loaded(engine, rules.shard(weights(config, torch.float64), engine.weights.layouts, mesh))
        done = engine.generate(PROMPTS, sampling, 0)
        return rows_of(done), done.logp.tolist()

    rows, logp = launch(program, parse("tp2"), "cpu")
    alone = engine_of(config, torch.float64).generate(PROMPTS, sampling, 0)
    assert rows == rows_of(alone)
    torch.testing.assert_close(torch.tensor(logp, dtype=torch.float64), alone.logp, atol=1e-10, rtol=0)
