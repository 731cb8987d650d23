"""Fields per row come to an update as numbers per token; what does not come there is refused before the run."""

import dataclasses
import math

import pytest
from small_runs import assert_same_gradients, begin, gradients, run_steps, scored_batch, small_job

from funrl import trees
from funrl.algos import Algorithm, chain, group_center, policy_gradient, reduce, to_tokens, token_mean
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.online_dpo import online_dpo
from funrl.fields import FIELDS
from funrl.mesh.mesh import single
from funrl.trainer import phases
from funrl.trainer.jobs.compatibility import check_algorithm
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import Settings, settings_of

BUDGET = 24  # tokens of a micro-batch: rows share some of them


def by_score():
    """The policy gradient with the score itself, which a term reads."""
    term = lambda logp, batch: (-logp * batch.score, {"score": batch.score, "group": batch.group.to(logp.dtype)})  # noqa: E731
    return Algorithm(chain(group_center(), to_tokens()), {"policy": reduce(term, token_mean())})


def by_advantage():
    """The same, where the chain brings the score to the tokens."""
    return Algorithm(to_tokens(), {"policy": reduce(policy_gradient(), token_mean())})


def test_a_term_may_read_the_score_of_its_row():
    results = []
    for make in (by_score, by_advantage):
        run, state = begin(small_job(make, token_budget=BUDGET), single())
        rows, state, _ = scored_batch(run, state)
        results.append(gradients(run, state, rows)["policy"])
        counts = rows.batch.mask.sum(1)
        if make is by_score:
            for name in ("score", "group"):
                mean = (rows.batch.get(name) * counts).sum() / counts.sum()
                assert results[0].metrics[name] == pytest.approx(mean.item()), "the mean over tokens of their rows'"
        _, metrics = phases.learn_batch(run, state, rows)
        assert math.isfinite(metrics["actor/pg_loss"])
    assert len(set(rows.batch.score.tolist())) > 2
    assert_same_gradients({"policy": results[0]}, {"policy": results[1]}, 1e-12)
    assert max(x.abs().max() for x in trees.leaves(results[0].tree)) > 1e-3


@pytest.mark.slow
@pytest.mark.gloo
def test_the_score_in_a_term_is_the_same_on_two_ranks():
    row, two = (
        run_steps(1, with_gradients=True, compose=by_score, token_budget=BUDGET, mesh=mesh) for mesh in ("dp1", "dp2")
    )
    assert_same_gradients(two["grads"][0], row["grads"][0], 1e-10)


def reading(field, compose=grpo):
    """An algorithm with a term that reads one more field."""

    def term(logp, batch):
        x = getattr(batch, field).to(logp.dtype)
        return -logp * batch.advantage + 0 * (x if x.dim() == 2 else x.sum(-1)), {}

    made = compose()
    return dataclasses.replace(made, losses={**made.losses, "policy": reduce(term, token_mean())})


def accepted(algorithm):
    try:
        check_algorithm(algorithm, Settings())
    except SettingsError:
        return False
    return True


@pytest.mark.slow
def test_every_field_that_passes_the_check_comes_to_the_update():
    fields = [name for name in FIELDS if FIELDS[name].kind.of_rows]
    passing = [name for name in fields if accepted(reading(name))]
    refused = set(fields) - set(passing)
    assert {"score", "scores", "truncated", "group", "length", "greedy_score", "segments"} <= set(passing)
    assert {"failed", "margin", "label", "mismatched", "version", "stale", "routes", "token_reward", "value"} <= refused

    def term(logp, batch):
        for name in passing:
            x = getattr(batch, name)
            assert x.shape[:2] == logp.shape, name
        return -logp * batch.advantage, {}

    run, state = begin(
        small_job(lambda: dataclasses.replace(grpo(), losses={"policy": reduce(term, token_mean())})), single()
    )
    rows, state, _ = scored_batch(run, state)
    phases.learn_batch(run, state, rows)


def test_what_does_not_come_to_the_update_says_so():
    pair = online_dpo()
    score = lambda x, batch: ((x * batch.score).sum(), {})  # noqa: E731
    loss = pair.losses["policy"]._replace(numerators=lambda x, batch: ((score(x, batch)[0],), {}))
    with pytest.raises(SettingsError, match=r"batch.score is missing.*; the filter can read it, an update cannot"):
        check_algorithm(dataclasses.replace(pair, losses={"policy": loss}), Settings())
    by_greedy = dataclasses.replace(grpo(), filter=lambda batch: batch.greedy_score < batch.score)
    with pytest.raises(SettingsError, match=r"the filter .* cannot run on what the source gives: batch.greedy_score"):
        check_algorithm(by_greedy, Settings())
    by_failed = dataclasses.replace(grpo(), filter=lambda batch: ~batch.failed)
    check_algorithm(by_failed, settings_of(on_reward_error="skip"))
    with pytest.raises(SettingsError, match=r"batch.failed is missing"):
        check_algorithm(reading("failed"), settings_of(on_reward_error="skip"))
    assert "failed" in FIELDS.by("source")
