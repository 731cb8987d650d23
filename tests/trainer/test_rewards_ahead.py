"""Models that reward completions of groups written ahead: on the trainer ranks, or on some of their own."""

import dataclasses
import functools
import os
import time
from datetime import timedelta

import pytest
from selection import quick
from small_runs import small_job
from test_asynchronous_replay import SETTINGS as REPLAYED
from test_asynchronous_replay import check_resumed, repeated, trained
from test_greedy_ahead import stale_remax
from test_own_texts import folders as folders  # a fixture
from test_placement_runs import check_ages, rank_of, run
from test_refilled_runs import equal, stale_dapo
from test_rewarding_pools import settings_of

from funrl.algos.filters.by_group import mean_between
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import WaitLimits, WorkerError, launch
from funrl.mesh.mesh import single
from funrl.mesh.pools.channel import Requests, answer_key, run_store
from funrl.rewards.call import RewardError
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints
from funrl.trainer.placement.logged import read_groups
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.sources import completion_scores

pytestmark = pytest.mark.gloo


def large_for_some(prompt, completion, **fields):
    return 100.0 * equal(prompt)


def without_large():
    """Drops the groups of two prompts out of five, whatever a judge says."""
    return dataclasses.replace(stale_dapo(), filter=mean_between(-50, 50))


STEPS = 3
AHEAD = {
    "on the trainer ranks and on others": (rollout_is, ["reward_model", "judge"], "train:1 generate:1 judge:1", {}),
    "of greedy completions": (stale_remax, ["judge"], "train:1 generate:1", {}),
    "with a filter": (without_large, ["judge"], "train:1 generate:1", {"max_refills": 6, "reward": large_for_some}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(AHEAD, ["on the trainer ranks and on others"]))
def test_they_are_repeated_with_the_same_bits(name, folders, tmp_path):
    compose, names, place, further = AHEAD[name]
    flags = REPLAYED | {"steps": STEPS} | settings_of(folders, *names)
    job = small_job(compose, place=place, staleness=2, save_rollouts=1, **flags, **further)
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and len(steps) == STEPS
    check_ages([metrics for _, metrics in steps], 3)
    assert max(metrics["age/max"] for _, metrics in steps) > 0
    assert all(metrics[f"reward/{model}/mean"] for model in names for _, metrics in steps)
    flags |= {"reward": further["reward"]} if "reward" in further else {}
    done = repeated(tmp_path, small_job(compose, **flags), single())
    assert [
        (step_again.step, str(part)) for step_again in done for part in step_again.differences if not part.agrees(0.0)
    ] == []
    assert len(done) == STEPS and {"scores", "tokens"} <= {part.name for part in done[-1].differences}
    log = read_groups(tmp_path)
    assert log is not None
    groups = [group for groups in log.by_step.values() for group in groups]
    replaced = [prompt.position for group in groups for prompt in group.dropped]
    assert bool(replaced) == (further.get("max_refills", 1) > 1)
    assert sorted([*(group.position for group in groups), *replaced]) == list(range(4 * STEPS + len(replaced)))
    for step, metrics in steps if replaced else ():
        count = sum(len(group.dropped) for group in log.by_step[step])
        assert metrics["filter_groups/sampled_prompts"] == 4 + count


@pytest.mark.slow
def test_a_resumed_run_takes_each_group_once(folders, tmp_path):
    flags = {"place": "train:1 generate:1 reward_model:1", "staleness": 2, "window": 3}
    flags |= REPLAYED | settings_of(folders, "reward_model")
    check_resumed(tmp_path, functools.partial(small_job, rollout_is, **flags))


@pytest.mark.slow
def test_samples_and_evaluations_have_their_scores(folders):
    flags = {"minibatches": 1, **settings_of(folders, "reward_model")}
    ahead = run(rollout_is, place="train:1 generate:1 reward_model:1", staleness=1, **flags)
    together = run(rollout_is, **flags)
    by_step = [
        {shown[0]: (shown, parts) for shown, parts in zip(item.observer.shown, item.observer.parts, strict=True)}
        for item in (ahead, together)
    ]
    for step in (0, 1):  # an evaluation and a batch of the first weights
        assert by_step[0][step] == by_step[1][step] and by_step[0][step][1][0].keys() >= {"reward_model"}
    assert ahead.observer.table[:6] == together.observer.table[:6]


def test_late_replacements_are_refused_where_they_cannot_be(folders):
    flags = {"place": "generate:1", "staleness": 1, **settings_of(folders, "judge")}
    with pytest.raises(SettingsError, match="and greedy completions: these are scored with the batch"):
        small_job(stale_remax, on_reward_error="skip", **flags)


def no_score(*_):
    raise RewardError("the reward model gave nan for a completion")


def no_model(*_):
    raise RuntimeError("the reward model is out of memory")


def lost_rank(*_):
    os._exit(1)


APART = "generate:1 reward_model:1"


@pytest.mark.parametrize("case", quick([(APART, 1), ("generate:1", 0)], [(APART, 1)]))
def test_a_model_that_gives_no_score_ends_the_run(case, folders, monkeypatch):
    place, staleness = case
    monkeypatch.setattr(completion_scores, "check_scores", no_score)
    flags = settings_of(folders, "reward_model")
    job = small_job(rollout_is, place=place, staleness=staleness, minibatches=1, **flags)
    ended = launch(functools.partial(rank_of, job), job.launched, "cpu")
    assert ended.outcome.error == "the reward model gave nan for a completion"


@pytest.mark.slow
@pytest.mark.parametrize("failure, message", [(no_model, "is out of memory"), (lost_rank, "rank 2")])
def test_so_does_one_whose_rank_fails(failure, message, folders, monkeypatch):
    monkeypatch.setattr(completion_scores, "check_scores", failure)
    flags = settings_of(folders, "reward_model")
    job = small_job(rollout_is, place=APART, staleness=1, minibatches=1, **flags)
    with pytest.raises(WorkerError, match=message):
        launch(functools.partial(rank_of, job), job.launched, "cpu")


LIMIT_S = 60.0
SCORING = "test/scoring"  # key of the store that is there while the model scores the third batch


def hangs(score_B, examples, what):
    """A check of scores that does not end in the third batch of four prompts; six are evaluated."""
    global _batches
    _batches += len(examples) == 4
    if _batches == 3:
        run_store().set(SCORING, "1")
        time.sleep(LIMIT_S)


_batches = 0


def dies_meanwhile(answer, requests, number, waits_for):
    """Wait for an answer; the second trainer rank ends its process where it waits for the third batch."""
    store = run_store()
    while requests.mesh.rank == 1 and not store.check([answer_key(requests.pool, number)]):
        if store.check([SCORING]):
            os._exit(1)
        time.sleep(0.005)
    return answer(requests, number, waits_for)


ENDS = {
    "a rank that trains dies": (True, "train:dp2", timedelta(minutes=10), "rank 1 ended with status 1"),
    "the model hangs": (False, "train:1", timedelta(seconds=8), "the reward_model's scores"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ENDS)
def test_a_run_that_ends_while_a_model_scores_leaves_its_state_and_its_log(name, folders, tmp_path, monkeypatch):
    dies, place, timeout, message = ENDS[name]
    monkeypatch.setattr(completion_scores, "check_scores", hangs)
    if dies:
        answer = Requests.answer
        monkeypatch.setattr(Requests, "answer", lambda *given: dies_meanwhile(answer, *given))
    flags = {"place": f"{place} generate:1 reward_model:1", "staleness": 1, "save_rollouts": 1, "eval_every": 9}
    job = small_job(rollout_is, minibatches=1, steps=4, **flags, **settings_of(folders, "reward_model"))
    with pytest.raises(WorkerError, match=message):
        launch(functools.partial(trained, tmp_path, job), job.launched, "cpu", waiting=WaitLimits(timeout))
    assert list(complete_checkpoints(tmp_path / "checkpoints")) == [2]
    assert list(read_groups(tmp_path).by_step) == [1, 2]
