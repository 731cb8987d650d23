"""The engine's choices of experts in the trainer: recorded with pages, moved with rows, replayed."""

import dataclasses
import functools

import pytest
import torch
from small_runs import GRPO, SIZES, assert_same, begin, run_steps, scored_batch, small_job

from funrl.compiled_kernels import linear, norm, rotary, varlen_attention
from funrl.mesh.mesh import single
from funrl.models.decoder.routing import Experts
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.micro import own_micro_batches

EXPERTS = SIZES | {"experts": Experts(count=4, per_token=2, mlp=8, dense=(0,))}
MANY = SIZES | {"layers": 4, "embed": 32, "experts": Experts(count=32, per_token=4, mlp=16)}
MOE = {"compose": GRPO, "task": "arithmetic_moe"}


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp1", "dp2,ep2"])
def test_replayed_choices_are_those_that_the_trainer_makes_of_the_same_numbers(mesh):
    generate = None if mesh == "dp1" else "ep2,tp2"
    steps = run_steps(1, sizes=EXPERTS, mesh=mesh, generate_mesh=generate, router_replay=True, minibatches=1, **MOE)
    routes = [batch.routes for batch in steps["batches"]]
    steps["batches"] = [batch._replace(routes=None) for batch in steps["batches"]]
    assert_same(steps, without(), 1e-9)
    for batch, of_tokens in zip(steps["batches"], routes, strict=True):
        at = torch.arange(batch.tokens.shape[1])
        known, last = at < batch.length[:, None] - 1, at == batch.length[:, None] - 1
        assert of_tokens.shape[2] == 2 and of_tokens[known].min() >= 0 and of_tokens.max() < 4
        assert (of_tokens[last] == -1).all()  # nothing was drawn behind it
        assert (of_tokens[known][:, 0] != of_tokens[known][:, 1]).all()


@functools.cache
def without():
    return run_steps(1, sizes=EXPERTS, minibatches=1, **MOE)  # a second update would see other choices of the router


def gaps(monkeypatch, speculate=0):
    """Mean gap of the log-probabilities in bfloat16, with the choices replayed and without.

    The trainer computes with torch's kernels, as if the engine were another one: with the engine's there is none.
    """
    job = small_job(
        **MOE,
        sizes=MANY,
        dtype="bfloat16",
        batch_prompts=16,
        max_new_tokens=12,
        router_replay=True,
        speculate=speculate,
    )
    run, state = begin(job, single())
    rows, _, _ = scored_batch(run, state)
    role, results = run.parts.roles["policy"], []
    for module in (linear, norm, rotary, varlen_attention):
        monkeypatch.setattr(module, "computes_exactly", lambda *_: False)
    for replay in (True, False):
        placed, total = dataclasses.replace(role.placed, replay=replay), []
        for piece in own_micro_batches(rows, 1000):
            with torch.no_grad():
                logp = placed.token_scores(state.roles["policy"].params, piece.batch).logp
            total.append((logp - piece.batch.rollout_logp)[piece.batch.mask].abs())
        results.append(torch.cat(total).mean().item())
    return results


@pytest.mark.parametrize("speculate", [0, 2])
def test_replay_narrows_the_gap(speculate, monkeypatch):
    replayed, own = gaps(monkeypatch, speculate)
    assert replayed < 0.8 * own and own > 1e-4


@pytest.mark.parametrize(
    "how,message",
    [
        ({"compose": GRPO}, "--router_replay does nothing without a model with experts"),
        ({**MOE, "new_tokens_per_step": 3}, "--router_replay with --new_tokens_per_step=3: earlier choices"),
    ],
)
def test_replay_is_refused_where_it_cannot_be(how, message):
    with pytest.raises(SettingsError, match=message):
        small_job(sizes=None, router_replay=True, **how)
