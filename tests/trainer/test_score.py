"""Passes without a gradient have a token budget of their own, which changes their sizes and no number."""

import pytest
import torch
from small_runs import PPO, SIZES, assert_same, begin, one_step, run_steps, small_job

from funrl.algos.recipes.dpo import dpo
from funrl.algos.recipes.grpo import grpo
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.jobs import build
from funrl.trainer.settings.settings import scoring_budget, settings_of


@pytest.fixture
def passes(monkeypatch):
    """Tokens of every forward pass of packed rows, by whether it has a gradient."""
    results = {True: set(), False: set()}

    def watched(model, *_, **__):
        def layer(config, mesh, params, x_BTD, context):
            if context.kv_cache is None:
                results[torch.is_grad_enabled()].add(x_BTD.shape[1])
            return model.layer(config, mesh, params, x_BTD, context)

        return layer

    monkeypatch.setattr(build, "compile_layer", watched)
    return results


def reward_model(folder):
    model = with_value_head(decoder_model(with_fields(arithmetic.model_config(), **SIZES)))
    hf.save(folder, model, model.init(torch.Generator().manual_seed(3)), arithmetic.tokenizer())
    return {"reward_model": str(folder)}


def texts_or_rewards(recipe):
    return {"compose": recipe} | ({"reward": None} if recipe is dpo else {})


@pytest.mark.slow
@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(PPO, id="ppo"),
        pytest.param(grpo, id="a reward model", marks=pytest.mark.slow),
        pytest.param(dpo, id="pairs", marks=pytest.mark.slow),
    ],
)
def test_what_learns_nothing_is_packed_by_a_budget_of_its_own(recipe, passes, tmp_path):
    given = texts_or_rewards(recipe) | (reward_model(tmp_path) if recipe is grpo else {})
    for budget in (None, 40):
        job = small_job(**given, batch_prompts=16, eval_prompts=32, token_budget=48, score_token_budget=budget)
        run, state = begin(job, single())
        passes[False].clear()
        run.source.evaluate(state.roles, 0)
        evaluated = set(passes[False])
        passes[False].clear()
        one_step(run, state)
        largest = scoring_budget(job.settings)
        for sizes in (passes[False], evaluated) if recipe is not PPO else (passes[False],):
            assert 0.6 * largest < max(sizes) <= largest
        assert 24 < max(passes[True]) <= 48


def test_the_budget_is_four_of_the_updates_where_no_flag_says():
    assert scoring_budget(settings_of(token_budget=100)) == 400
    assert scoring_budget(settings_of(token_budget=100, score_token_budget=7)) == 7


@pytest.mark.parametrize("recipe", [PPO, dpo], ids=["ppo", "dpo"])
def test_it_changes_no_number(recipe):
    first, other = (run_steps(1, **texts_or_rewards(recipe), token_budget=64, score_token_budget=n) for n in (None, 8))
    assert_same(other, first, 1e-12)
