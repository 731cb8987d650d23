"""Models made of models, and their weights: heads, depths, copies from one role to another."""

import pickle

import pytest
import torch

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import rules
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.mesh.reshard import unshard
from funrl.models import Inputs, ModelError, decoder_config, decoder_model, place, with_value_head

CONFIG = decoder_config(
    vocab=24, embed=16, layers=3, heads=4, kv_heads=2, head=4, mlp=16, windows=(None, 3, 5), qk_norm=True
)
MODEL = decoder_model(CONFIG)
BATCH = Batch(tokens=torch.arange(12).view(2, 6), mask=None)


def _params(model, seed=0, dtype=torch.float32):
    return model.init(torch.Generator().manual_seed(seed), dtype)


@pytest.mark.parametrize("make", [decoder_model, lambda config: with_value_head(decoder_model(config))])
def test_a_model_of_fewer_layers_is_the_beginning_of_it(make):
    whole = make(CONFIG)
    part = whole.with_layers(2)
    assert part.config.attention.windows == (None, 3)
    kept = {name for name, _ in trees.named(whole.shapes) if "layers/2/" not in name}
    assert {name for name, _ in trees.named(part.shapes)} == kept
    params = _params(part)
    seen = []

    def layer(config, mesh, weights, x_BTD, context):
        seen.append((config.layers, context.attention_mask_BTS is not None))
        return part.layer(config, mesh, weights, x_BTD, context)

    part.apply(params, Inputs(BATCH.tokens), layer=layer)
    assert seen == [(2, False), (2, True)]


@pytest.mark.parametrize("model", [MODEL, with_value_head(MODEL)], ids=["decoder", "value head"])
def test_a_model_can_be_sent_to_another_process(model):
    again, params = pickle.loads(pickle.dumps(model)), _params(model)
    assert again.config == model.config
    hidden, expected = (item.apply(params, Inputs(BATCH.tokens)).hidden for item in (again, model))
    assert torch.equal(hidden, expected)


def test_a_critic_begins_as_a_policy_or_as_a_reward_model():
    policy, critic = place(MODEL), place(with_value_head(MODEL))
    params = _params(MODEL)
    made = critic.copy_from(policy, params)
    hidden = MODEL.apply(params, Inputs(BATCH.tokens)).hidden
    assert torch.equal(critic.model.apply(made, Inputs(BATCH.tokens)).hidden, hidden)
    assert torch.equal(made["value"], torch.zeros(1, 16)) and "unembed" not in made["decoder"]
    made["value"] += 1
    again = critic.copy_from(critic, made, torch.float64)
    for x, y in zip(trees.leaves(again), trees.leaves(made), strict=True):
        assert x.dtype == torch.float64 and torch.equal(x, y.double())
    same = policy.copy_from(policy, params)
    for x, y in zip(trees.leaves(same), trees.leaves(params), strict=True):
        assert torch.equal(x, y) and x.data_ptr() != y.data_ptr()


def test_a_copy_that_cannot_be_is_refused():
    policy, critic = place(MODEL), place(with_value_head(MODEL))
    with pytest.raises(ModelError, match="has no unembed"):
        policy.copy_from(critic, _params(critic.model))
    shallow = place(MODEL.with_layers(1))
    with pytest.raises(ModelError, match="has no layers/1/attn/k"):
        policy.copy_from(shallow, _params(shallow.model))
    wide = place(
        decoder_model(decoder_config(vocab=25, embed=16, layers=3, heads=4, kv_heads=2, head=4, mlp=16, qk_norm=True))
    )
    with pytest.raises(ModelError, match=r"embed of shape \[25, 16\], this one of \[24, 16\]"):
        policy.copy_from(wide, _params(wide.model))


def test_heads_are_not_taken_for_each_other():
    policy, critic = place(MODEL), place(with_value_head(MODEL))
    with pytest.raises(ModelError, match="no value head"):
        policy.values(_params(MODEL), BATCH)
    for score in (critic.token_scores, lambda params, batch: critic.topk(params, batch, 3)):
        with pytest.raises(ModelError, match="no probabilities"):
            score(_params(critic.model), BATCH)
    with pytest.raises(ModelError, match="has a value head already"):
        with_value_head(critic.model)


def test_topk_tokens_and_their_scores():
    placed, params = place(MODEL, dtype=torch.float64), _params(MODEL, dtype=torch.float64)
    mask = BATCH.tokens % 3 > 0
    ids, logp = placed.topk(params, BATCH._replace(mask=mask), 4, 0.7)
    logits = MODEL.apply(params, Inputs(BATCH.tokens)).hidden @ params["unembed"].T / 0.7
    expected = logits[:, :-1].log_softmax(-1).topk(4)
    inside = mask[:, 1:]
    assert torch.equal(ids[:, 1:][inside], expected.indices[inside])
    assert (logp[:, 1:][inside] - expected.values[inside]).abs().max() < 1e-12
    assert (logp[~mask] == 0).all() and (logp[:, 0] == 0).all()
    again = placed.token_scores(params, BATCH._replace(mask=mask), (), 0.7, ids).topk_logp
    assert (again - logp).abs().max() < 1e-12


@pytest.mark.slow
@pytest.mark.gloo
def test_a_critic_in_other_layouts_than_its_policy():
    params = _params(MODEL, dtype=torch.float64)

    def program(mesh):
        policy = place(MODEL, mesh, dtype=torch.float64)
        critic = place(with_value_head(MODEL), mesh, rules.fully_sharded(rules.STORED), dtype=torch.float64)
        made = critic.copy_from(policy, rules.shard(params, policy.stored, mesh))
        split = sum(
            x.shape != whole.shape for x, whole in zip(*map(trees.leaves, (made, critic.model.shapes)), strict=True)
        )
        made["value"] += 0.5
        return split, unshard(made, critic.stored, mesh), critic.values(made, BATCH)

    split, whole, values = launch(program, parse("dp2,tp2"), "cpu")
    alone = place(with_value_head(MODEL), dtype=torch.float64)
    expected = alone.copy_from(place(MODEL), params) | {"value": torch.full((1, 16), 0.5, dtype=torch.float64)}
    assert split > 20
    assert all(torch.equal(x, y) for x, y in zip(trees.leaves(whole), trees.leaves(expected), strict=True))
    assert (values - alone.values(expected, BATCH)).abs().max() < 1e-12 < values.abs().max()
