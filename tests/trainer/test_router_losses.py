"""Losses of routers against transformers' and against one micro-batch; metrics of the load."""

import dataclasses
import functools

import pytest
import torch
from small_runs import GRPO, SIZES, begin, gap, gradients, scored_batch, small_job
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from funrl import trees
from funrl.mesh.mesh import SINGLE, single
from funrl.models import Inputs, decoder_model, with_fields
from funrl.models.decoder.routing import Experts
from funrl.models.model import RouterLoad
from funrl.tasks import arithmetic
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.router_losses import ROUTER_COUNTS, Choices, RouterLosses, load_metrics, router_numerators

EXPERTS = SIZES | {"experts": Experts(count=4, per_token=2, mlp=8)}


def job(**more):
    how = {"task": "arithmetic_moe", "router_aux_coef": 0.5, "router_z_coef": 0.1, "token_budget": 48} | more
    return small_job(functools.partial(GRPO, entropy_coef=0.01), EXPERTS, **how)


def test_a_layers_loss_is_that_of_transformers():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 4, generator=generator, requires_grad=True)
    probs = logits.softmax(-1)
    ids = probs.topk(2).indices
    counts = torch.bincount(ids.flatten(), minlength=4)
    load = RouterLoad(
        counts[None], probs.sum(0)[None], logits.logsumexp(-1).square().sum()[None], ids[None], torch.zeros(1)
    )
    numerators, metrics = router_numerators(RouterLosses(3.0, 2.0), load, Choices(None, torch.tensor(7.0)), SINGLE)
    balance, z = numerators[0] / 49, numerators[1] / 7
    theirs = load_balancing_loss_func((logits,), 4, 2)
    assert balance.item() == pytest.approx(3 * theirs.item(), rel=1e-6)
    assert metrics["router/balance_loss"].value.item() == pytest.approx(theirs.item(), rel=1e-6)
    assert z.item() == pytest.approx(2 * logits.logsumexp(-1).square().mean().item(), rel=1e-6)
    ours, wanted = (torch.autograd.grad(x, logits, retain_graph=True)[0] for x in (balance, 3 * theirs))
    assert (ours - wanted).abs().max() < 1e-6


def test_several_micro_batches_have_the_gradient_of_one():
    run, state = begin(job(), single())
    rows, state, _ = scored_batch(run, state)
    few, many = (gradients(run, state, rows, budget)["policy"] for budget in (1000, 24))
    assert gap(few.tree, many.tree) < 1e-12 and abs(few.loss - many.loss) < 1e-12
    assert few.metrics == pytest.approx(many.metrics, abs=1e-12)
    assert 2 <= few.metrics["router/balance_loss"] < 4 and few.metrics["router/z_loss"] > 0
    plain, _ = begin(job(router_aux_coef=0.0, router_z_coef=0.0), single())
    without = gradients(plain, state, rows, 1000)["policy"]
    assert gap(few.tree, without.tree) > 1e-3 and "router/balance_loss" not in without.metrics
    assert without.metrics["router/load_max"] == few.metrics["router/load_max"] >= 1


def test_metrics_of_the_load():
    counts = torch.tensor([[2.0, 2, 2, 2], [8, 0, 0, 0]], dtype=torch.float64)
    metrics = load_metrics({ROUTER_COUNTS: counts, "other": torch.ones(())})
    assert {name: x.item() for name, x in metrics.items()} == {
        "other": 1,
        "router/load_max": 4.0,
        "router/entropy": pytest.approx(0.5),
        "router/unused": 0.375,
    }


def test_flags_of_routers_need_experts():
    with pytest.raises(SettingsError, match=r"--router_z_coef=0.1 does nothing without a model with experts"):
        small_job(GRPO, None, router_z_coef=0.1)
    with pytest.raises(ValueError, match="--engine=hf: the policy has experts"):
        small_job(GRPO, None, task="arithmetic_moe", engine="hf", dtype="float32")


def test_a_models_parts_have_experts_where_it_says():
    config = dataclasses.replace(arithmetic.model_config(model="arithmetic_moe"), layers=3)
    config = with_fields(config, experts=dataclasses.replace(config.mlp.experts, dense=(1,)))
    model = decoder_model(config)
    out = model.apply(model.init(torch.Generator().manual_seed(0)), Inputs(torch.arange(12).view(2, 6)))
    assert out.aux["counts_E"].sum(-1).tolist() == [24, 24] and out.aux["ids_TK"].shape == (2, 12, 2)
    assert model.abilities.routers.layers == (0, 2) and model.with_layers(1).abilities.routers.layers == (0,)
    parameters = trees.count(model.shapes)
    assert model.abilities.cost.used_parameters(parameters) == parameters - 2 * 6 * 3 * 64 * 64
