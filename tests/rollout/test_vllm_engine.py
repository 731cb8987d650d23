"""The engine over vLLM beyond what every engine promises: families, the certificate, weights in and out, refusals."""

import gc
import weakref

import pytest
import torch
from small_engines import CONFIGS, KINDS, NO_VLLM, PROMPTS, WIDE, assert_same, completed, load, weights
from torch import tensor

from funrl import trees
from funrl.mesh.mesh import AXES, SINGLE
from funrl.mesh.rules import COMPUTE, STORED
from funrl.models import Inputs, decoder_model, place, with_fields
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.layers import RopeScaling
from funrl.models.errors import ModelError
from funrl.models.huggingface.names import names_of
from funrl.rollout.certificate import SyncError, certify
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling import stream_noise
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.vllm.contract import VLLMOptions
from funrl.rollout.vllm.core import check_vllm, start_vllm
from funrl.rollout.vllm.engine import WholeWeights
from funrl.rollout.vllm.weights import held_layouts, unfused

needs_vllm = pytest.mark.skipif(NO_VLLM is not None, reason=str(NO_VLLM))
FAMILIES = {
    "qwen3": WIDE,
    "llama tied": with_fields(CONFIGS["llama tied"], head=32),
    "qwen2": with_fields(CONFIGS["qwen2"], head=32, embed=128),
}
WRONG = [
    ({"head": 8}, torch.float32, "heads have size 8; vLLM's attention on a CPU takes 32, 64,"),
    ({"family": "qwen2", "qk_norm": False, "attention_bias": True}, torch.float32, "heads=4 of size 32 .* embed=32"),
    ({"windows": (None, 6)}, torch.float32, r"different attention windows, \(None, 6\)"),
    ({}, torch.float64, "vLLM has no float64"),
    ({"mlp_bias": True}, torch.float32, "the model has mlp_bias=True, with which vLLM's qwen3 has not been tried"),
    ({"rope_scaling": RopeScaling("dynamic", 2.0)}, torch.float32, "has rope_scaling=.*'dynamic'.* not been tried"),
    ({"family": "gpt2"}, torch.float32, "model_type is 'gpt2'; .* llama, mistral, qwen2, qwen3, gemma, .* so far"),
    (
        {"output_bias": True, "attention_bias": True},
        torch.float32,
        "has output_bias=True, .* vLLM's qwen3 has not been",
    ),
    ({"family": "qwen3_5_text", "mixers": (GatedDeltaNet(2, 4, 8, 8), None)}, torch.float32, "is 'qwen3_5_text'; .*"),
]


@pytest.mark.parametrize(("change", "dtype", "message"), WRONG)
def test_a_model_that_vllm_does_not_take_is_refused_by_name(change, dtype, message):
    with pytest.raises(ModelError, match=message):
        check_vllm(decoder_model(with_fields(WIDE, **change)), "cpu", dtype)


def test_a_cache_below_the_longest_sequence_is_refused():
    with pytest.raises(ModelError, match=r"a cache of 1e-06 GB is too small: .* 128 tokens, 0.00026 GB"):
        check_vllm(decoder_model(WIDE), "cpu", torch.float32, cache_bytes=1000)


SPLIT_COLUMNS = ("o_proj.weight", "down_proj.weight")
WHOLES = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "fused_qkv_a_proj": ("q_a_proj", "kv_a_proj_with_mqa"),
}


def fused(config, params):
    """The weights, or a rank's shards, as vLLM's modules have them, the vocabulary padded."""
    model = decoder_model(config)
    names = names_of(model)
    held = {}
    for name, x in trees.named(params):
        there, (rows, *columns) = names[name]
        held[there] = x.reshape((rows, -1) if there.endswith(SPLIT_COLUMNS) else (-1, *columns))
    for name in list(held):
        for whole, (first, *others) in WHOLES.items():
            siblings = [name.replace(f".{first}.", f".{part}.") for part in (first, *others)]
            if f".{first}." in name and all(sibling in held for sibling in siblings):
                held[name.replace(first, whole)] = torch.cat([held.pop(sibling) for sibling in siblings])
    padding = torch.zeros(max(0, 64 - config.vocab), config.embed)
    return {name: torch.cat([x, padding]) if len(x) == config.vocab else x for name, x in held.items()}


def shards_of(config, params, rank):
    """One of two tensor ranks' shards of weights, by name."""
    layouts = held_layouts(decoder_model(config), dict.fromkeys(AXES, 1) | {"tensor": 2})
    boxes = [layout.box(rank) for layout in trees.leaves(layouts)]
    shards = zip(trees.named(params), boxes, strict=True)
    return {name: x[tuple(slice(*interval) for interval in box)] for (name, x), box in shards}


@pytest.mark.parametrize("name", FAMILIES)
def test_fused_weights_are_taken_apart_again(name):
    config = FAMILIES[name]
    model, params = decoder_model(config), weights(config)
    held = fused(config, params)
    again = dict(unfused(model, held.get))
    names = names_of(model)
    assert len(again) == len(names)
    for leaf, x in trees.named(params):
        there, shape = names[leaf]
        assert torch.equal(again[there], x.reshape(shape))
    packed = "model.layers.0.mlp.gate_up_proj.weight"
    away = [there for there, x in unfused(model, (held | {packed: torch.empty(0)}).get) if x is None]
    assert away == [f"model.layers.0.mlp.{part}_proj.weight" for part in ("gate", "up")]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("vocab", "rank", "rows"), [(40, 0, 32), (40, 1, 8), (30, 0, 30), (30, 1, 0)])
def test_fused_shards_of_a_tensor_rank_are_taken_apart_again(name, vocab, rank, rows):
    """vLLM fills a vocabulary up to 64, of which each rank has 32; what it fills it with is not looked at."""
    config = with_fields(FAMILIES[name], vocab=vocab)
    model = decoder_model(config)
    names = names_of(model)
    shards = shards_of(config, weights(config), rank)
    held = fused(config, shards)
    for there in {"model.embed_tokens.weight", "lm_head.weight"} & set(held):
        held[there] = torch.cat([held[there], torch.full((32 - rows, config.embed), torch.nan)])
    again = dict(unfused(model, held.get, 2, rank))
    assert len(again) == len(names) and len(shards["embed"]) == rows
    for leaf, x in shards.items():
        assert torch.equal(again[names[leaf][0]].reshape(x.shape), x), leaf


def test_keys_of_fewer_heads_than_ranks_are_not_read_back():
    """Each of four ranks has one of the two heads of keys and values."""
    model = decoder_model(WIDE)
    held = fused(WIDE, weights(WIDE))
    qkv = "model.layers.0.self_attn.qkv_proj.weight"
    read = dict(
        unfused(model, {qkv: held[qkv][: 3 * 32], "model.norm.weight": held["model.norm.weight"]}.get, tensor=4)
    )
    assert [name for name, x in read.items() if x is not None] == ["model.norm.weight"]


def test_weights_that_are_not_all_there_once_are_an_error_and_zeros():
    shapes, x = {"a": (2,), "b": (3,)}, torch.ones(2)

    def broken():
        yield "a", x
        raise OSError("the disk is full")

    for source, kind, message in (
        ([("a", x)], KeyError, "weights are missing: b"),
        ([("a", x), ("a", x)], KeyError, "a is not a weight of this model, or given twice"),
        ([("c", x)], KeyError, "c is not a weight"),
        ([("a", x), ("b", x)], ValueError, r"b has shape \[2\] instead of \[3\]"),
        (broken(), OSError, "the disk is full"),
    ):
        whole = WholeWeights(shapes, source)
        given = dict(whole)
        assert {name: tuple(item.shape) for name, item in given.items()} == shapes and not given["b"].any()
        with pytest.raises(kind, match=message):
            raise whole.error
    whole = WholeWeights(shapes, [("b", torch.ones(3)), ("a", x)])
    assert list(dict(whole)) == ["b", "a"] and whole.error is None


def agreed(left, other, request, probabilities, close):
    """Both completions up to their first different token, which the noise must hardly decide.

    Two engines round differently, so that a draw whose noise lies within `close` of a boundary between two tokens may
    take either.

    Args:
      probabilities: token ids -> probabilities [V] in float64 of the token after them.
    """
    ids, ids2 = left.tokens.tolist(), other.tokens.tolist()
    t = next((t for t, pair in enumerate(zip(ids, ids2, strict=False)) if pair[0] != pair[1]), None)
    if t is None:
        return left, other
    noise = float(stream_noise(tensor(request.seed), tensor(t)))
    first, last = sorted((ids[t], ids2[t]))
    boundaries_B = probabilities([*request.prompt, *ids[:t]]).cumsum(0)[first:last]
    assert (boundaries_B - noise).abs().max() <= close, f"token {t} of request {request.number}"
    same = {name: slice(t) for name in ("tokens", "sampling_logp", "raw_logp", "versions")}
    return tuple(
        done._replace(finish="cancelled", **{name: getattr(done, name)[part] for name, part in same.items()})
        for done in (left, other)
    )


def assert_draws_as_native(config, weights_of=weights):
    """vLLM completes prompts as the native engine does, also with the second of two sets of weights.

    Args:
      weights_of: (config, dtype, seed) -> weights.
    """
    how = Sampling(max_new_tokens=20, samples=2, temperature=0.9)
    model = decoder_model(config)
    engine, peer = KINDS["vllm"].make(model, SINGLE, torch.float32), native_engine(model)
    for seed in (0, 1):
        load(engine, weights_of(config, torch.float32, seed))
        load(peer, weights_of(config, torch.float32, seed))
        wide = weights_of(config, torch.float64, seed)

        def probabilities(ids, wide=wide):
            hidden_E = model.apply(wide, Inputs(tensor([ids]))).hidden[0, -1]
            return (model.unembed(wide) @ hidden_E / how.temperature).softmax(0)

        pairs = [
            agreed(completion, other, request, probabilities, 2e-5)
            for completion, other, request in zip(
                completed(engine, PROMPTS, how, seed),
                completed(peer, PROMPTS, how, seed),
                requests_of(PROMPTS, how, seed),
                strict=True,
            )
        ]
        assert_same([pair for pair, _ in pairs], [other for _, other in pairs], 2e-5)
        assert sum(len(item.tokens) for item, _ in pairs) > 18 * len(pairs)


@needs_vllm
@pytest.mark.parametrize("name", FAMILIES)
def test_it_draws_what_the_native_engine_draws(name):
    assert_draws_as_native(FAMILIES[name])


def test_a_draw_at_a_boundary_may_take_either_token_and_no_other_may():
    config, how = WIDE, Sampling(max_new_tokens=4)
    (request,) = requests_of([[1, 2]], how, seed=0)
    (completion,) = completed(load(native_engine(decoder_model(config)), weights(config)), [[1, 2]], how)
    noise = float(stream_noise(tensor(request.seed), tensor(2)))
    token = int(completion.tokens[2])
    other = completion._replace(
        tokens=completion.tokens.index_fill(0, tensor([2]), token + 1 if token < 9 else token - 1)
    )
    below = min(token, int(other.tokens[2]))
    for beside, item in ((0.0, True), (1e-3, False)):
        prob_V = torch.zeros(config.vocab, dtype=torch.float64)
        prob_V[below], prob_V[below + 1] = noise + beside, 1 - noise - beside
        if item:
            ones, others = agreed(completion, other, request, lambda ids, prob_V=prob_V: prob_V, 2e-5)
            assert ones.tokens.tolist() == others.tokens.tolist() == completion.tokens[:2].tolist()
        else:
            with pytest.raises(AssertionError, match="token 2 of request 0"):
                agreed(completion, other, request, lambda ids, prob_V=prob_V: prob_V, 2e-5)


@needs_vllm
def test_bfloat16_stays_near_the_same_weights_in_float32():
    how = Sampling(max_new_tokens=12, greedy=True)
    engine = KINDS["vllm"].make(decoder_model(WIDE), SINGLE, torch.bfloat16)
    rounded = trees.map(lambda x: x.bfloat16().float(), weights(WIDE))
    done = completed(load(engine, rounded), PROMPTS, how)
    peer = load(native_engine(decoder_model(WIDE)), rounded)
    for completion, other in zip(done, completed(peer, PROMPTS, how), strict=True):
        assert completion.raw_logp.dtype == torch.float32 and (completion.raw_logp - other.raw_logp)[0].abs() < 0.3


@needs_vllm
def test_the_certificate_sees_all_weights_of_vllm_also_those_that_it_packs():
    model, params = decoder_model(WIDE), weights(WIDE)
    placed = place(model, SINGLE, STORED, COMPUTE, torch.float32, model.layer)
    engine = KINDS["vllm"].engine(WIDE)
    metrics = certify(placed, params, engine, 7, probes=True)
    assert metrics["sync/verified"] == 1.0 and metrics["sync/probe_gap"] < 1e-4
    for name in ("norm", "layers/0/mlp/up", "layers/1/attn/q", "unembed"):
        spoiled = trees.from_named(params, [(n, x * 1.1 if n == name else x) for n, x in trees.named(params)])
        load(engine, spoiled)
        with pytest.raises(SyncError, match=f"{name} differs"):
            certify(placed, params, engine, 7)


@needs_vllm
def test_the_end_of_an_engine_leaves_another_and_the_group_of_the_run():
    engine = KINDS["vllm"].engine(WIDE)
    requests = requests_of(PROMPTS, Sampling(max_new_tokens=6), 0)
    before = complete(engine, requests)
    other = start_vllm(decoder_model(with_fields(WIDE, layers=3)), SINGLE, torch.float32, VLLMOptions(8, 1 << 24))
    ended = weakref.ref(other)
    del other
    gc.collect()
    assert ended() is None and torch.distributed.is_initialized()
    assert_same(complete(engine, requests), before, 1e-5)
