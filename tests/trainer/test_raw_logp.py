"""Training of the model's own distribution while another is sampled from."""

import pytest
import torch
from selection import quick
from small_runs import GRPO, assert_same, begin, gradients, run_steps, scored_batch, small_job
from test_episode_runs import Branching, episode_job

from funrl.algos.recipes.ssd import ssd
from funrl.mesh.mesh import single
from funrl.trainer.gap import GAP_METRIC
from funrl.trainer.settings.declaration import SettingsError

SHARP = {"temperature": 0.5, "top_p": 0.9, "top_k": 8, "raw_logp": True}


def whole_softmax(run, state, batch, temperature=1.0):
    """Log-probabilities of the sampled tokens, in the order of rows, by a softmax over all logits."""
    role = run.parts.roles["policy"]
    logits_NV = role.placed.logits(state.roles["policy"].params, batch)
    tokens_N = batch.tokens[batch.mask].tolist()
    lines = zip(logits_NV.double() / temperature, tokens_N, strict=True)
    return torch.stack([logits_V[token] - logits_V.exp().sum().log() for logits_V, token in lines])


@pytest.mark.parametrize("settings", [SHARP, {"temperature": 1.7, "raw_logp": True}])
def test_rows_have_the_log_probabilities_of_the_whole_vocabulary_at_temperature_1(settings):
    run, state = begin(small_job(GRPO, minibatches=2, on_gap="stop", **settings), single())
    rows, _, metrics = scored_batch(run, state)
    batch = rows.batch
    assert metrics[GAP_METRIC] == 0
    own, tempered = (whole_softmax(run, state, batch, t) for t in (1.0, settings["temperature"]))
    assert torch.allclose(batch.rollout_logp[batch.mask], own, atol=1e-9, rtol=0)
    assert torch.allclose(batch.old_logp[batch.mask], own, atol=1e-9, rtol=0)
    assert not torch.allclose(own, tempered, atol=1e-3)


def test_turns_of_episodes_have_them_too():
    run, state = begin(episode_job(GRPO, Branching(), minibatches=2, on_gap="stop", **SHARP), single())
    rows, _, metrics = scored_batch(run, state)
    assert metrics[GAP_METRIC] == 0
    own = whole_softmax(run, state, rows.batch)
    assert torch.allclose(rows.batch.rollout_logp[rows.batch.mask], own, atol=1e-9, rtol=0)


def test_ssd_is_the_mean_negative_log_likelihood_of_the_samples():
    run, state = begin(small_job(ssd, reward=None, **SHARP), single())
    rows, _, _ = scored_batch(run, state)
    loss = gradients(run, state, rows)["policy"].loss
    assert float(loss) == pytest.approx(-whole_softmax(run, state, rows.batch).mean().item(), abs=1e-9)


@pytest.mark.parametrize("mesh", quick(["dp2", "tp2", "dp2,sp2", "dp2,tp2"], ["tp2"]))
def test_a_run_has_the_same_numbers_on_every_mesh(mesh):
    given = {"compose": ssd, **SHARP}
    assert_same(run_steps(2, **given), run_steps(2, mesh=mesh, **given), 1e-9)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"raw_logp": True}, "does nothing at temperature 1"),
        (SHARP | {"mask_replay": True}, "it trains the distribution that was sampled from"),
        ({"temperature": 0.5, "top_p": 0.9}, "or --raw_logp, which trains the model's own distribution"),
    ],
)
def test_what_does_nothing_or_cannot_be_is_refused(settings, text):
    with pytest.raises(SettingsError, match=text):
        small_job(GRPO, **settings)
