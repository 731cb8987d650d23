"""Models that reward completions on ranks of their own: the numbers of a run whose ranks do all of it."""

import pytest
from selection import quick
from small_runs import MEASURED, PPO, small_job
from test_own_texts import folders as folders  # a fixture
from test_own_texts import with_judge
from test_placement_runs import OWN, assert_same_runs, run

from funrl.algos import grpo
from funrl.trainer.settings.declaration import SettingsError


def settings_of(folders, *names):
    """Flags of some of these models."""
    flags = {
        "reward_model": {"reward_model": f"{folders}/reward@0.5"},
        "own_tokenizer": {"reward_model": f"{folders}/other@-2"},
        "process_reward_model": {"process_reward_model": f"{folders}/steps@0.5"},
        "judge": with_judge(folders, judge=f"{folders}/judge@0.25"),
    }
    return {name: value for flag in names for name, value in flags[flag].items()}


def assert_same_numbers(placed, together):
    """Samples, tables and metrics, apart from times, of two runs."""
    assert placed.outcome.error is None and placed.observer.shown and placed.observer.table
    for (step, prompts, texts, scores), other in zip(placed.observer.shown, together.observer.shown, strict=True):
        assert (step, prompts, texts) == other[:3]
        assert scores == pytest.approx(other[3], rel=1e-9, abs=1e-9)
    for (_, a), (_, b) in zip(placed.observer.steps, together.observer.steps, strict=True):
        names = [n for n in b if not n.startswith(OWN) and not n.endswith(MEASURED) and not n.startswith("time_s/")]
        assert {n: a[n] for n in names} == pytest.approx({n: b[n] for n in names}, rel=1e-9, abs=1e-9)


RUNS = {
    "reward model": (grpo, ["reward_model"], "train:1 generate:1 reward_model:1", {}),
    "other tokens": (grpo, ["own_tokenizer"], "train:1 generate:1 reward_model:tp2", {}),
    "judge and reward model": (grpo, ["reward_model", "judge"], "train:1 generate:1 reward_model:1 judge:tp2", {}),
}


TOGETHER = {
    "reward model": (grpo, ["reward_model"], {"place": "generate:1"}, {}),
    "steps": (PPO, ["process_reward_model"], {"place": "generate:1"}, {}),
}


@pytest.mark.gloo
@pytest.mark.parametrize("name", quick(TOGETHER, []))
def test_on_the_ranks_that_train_they_give_the_same_bits(name, folders):
    compose, names, apart, together = TOGETHER[name]
    flags = settings_of(folders, *names) | {"steps": 1}
    assert_same_runs(run(compose, **apart, **flags), run(compose, **together, **flags))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("name", quick(RUNS, ["reward model"]))
def test_on_ranks_of_their_own_they_give_the_same_numbers(name, folders):
    compose, names, place, together = RUNS[name]
    flags = settings_of(folders, *names) | {"steps": 1}
    placed = run(compose, place=place, **flags)
    assert_same_numbers(placed, run(compose, **together, **flags))
    assert any(
        metrics[f"reward/{names[0].replace('own_tokenizer', 'reward_model')}/mean"]
        for _, metrics in placed.observer.steps
    )


def test_what_they_cannot_do_is_refused(folders):
    refused = [
        ({"place": "generate:1 reward_model:tp9"}, "which does not divide over tp9"),
        ({"place": "generate:1 reward_model:1 judge:1"}, "judge cannot have ranks of its own: the roles"),
    ]
    for flags, problem in refused:
        with pytest.raises((SettingsError, ValueError), match=problem):
            small_job(grpo, **settings_of(folders, "reward_model"), **flags)
