"""Runs that write ahead, of an algorithm whose filter drops groups: other prompts take their places."""

import functools
import zlib

import pytest
from selection import quick
from small_runs import remove_later_checkpoints, small_job
from test_asynchronous_replay import repeated, trained
from test_placement_runs import rank_of

from funrl.algos import corrected, importance_weights
from funrl.algos.recipes.dapo import dapo
from funrl.data.order import places_in_order
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.placement.logged import read_groups

pytestmark = pytest.mark.gloo
STEPS, PLACES = 4, 4
SETTINGS = {"minibatches": 1, "steps": STEPS, "max_new_tokens": 12, "eval_every": 9, "save_rollouts": 1}
ONE = {"place": "train:dp1 generate:dp1", "staleness": 2}
TWO = {"place": "train:dp1 generate:dp2", "staleness": 1, "window": 3}


def stale_dapo():
    return corrected(dapo(), importance_weights("token", high=2.0))


def equal(prompt):
    """True of two prompts out of five, whose completions all have the same reward."""
    return zlib.crc32(prompt.encode()) % 5 < 2


def reward(prompt, completion, **fields):
    return 0.0 if equal(prompt) else zlib.crc32((prompt + completion).encode()) / 2**32


def refilled_job(**settings):
    return small_job(stale_dapo, reward=reward, **SETTINGS | settings)


def positions_of(job, log, bound):
    """Positions of the prompts of a run, after checks of its groups: those dropped, and those trained on."""
    dropped, kept = [], []
    for step, groups in log.by_step.items():
        assert len(groups) == PLACES
        ages = [step - version for group in groups for sample in group.switches for _, version in sample]
        assert min(ages) >= 0 and max(ages) <= bound
        kept += [group.position for group in groups]
        dropped += [prompt.position for group in groups for prompt in group.dropped]
    prompts = job.task.prompts
    for positions, filtered in ((dropped, True), (kept, False)):
        texts = [prompts[int(places_in_order(prompts, 1, 0, position)[0])].text for position in positions]
        assert texts and all(equal(text) == filtered for text in texts)
    return dropped, kept


def check_metrics(steps, log):
    """Each step learns from as many groups as a batch has places, and counts the replaced ones."""
    for step, metrics in steps:
        replaced = sum(len(group.dropped) for group in log.by_step[step])
        assert metrics["filter_groups/dropped_prompts"] == replaced
        assert metrics["filter_groups/sampled_prompts"] == PLACES + replaced
        assert metrics["filter_groups/kept_share"] == PLACES / (PLACES + replaced)
        assert metrics["filter_groups/skipped"] == metrics["filter_groups/dropped_rows"] == 0


RUNS = {"strict": ONE, "window, two replicas": TWO}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(RUNS, ["strict"]))
def test_a_refilled_run_is_repeated_with_the_same_bits(name, tmp_path):
    job = refilled_job(**RUNS[name])
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and [step for step, _ in steps] == list(range(1, STEPS + 1))
    log = read_groups(tmp_path)
    check_metrics(steps, log)
    dropped, kept = positions_of(job, log, bound=2)
    assert len(kept) == len(set(kept)) == STEPS * PLACES and len({*kept, *dropped}) == len(kept) + len(dropped)
    assert sorted(kept + dropped) == list(range(len(kept + dropped)))
    done = repeated(tmp_path, refilled_job(save_rollouts=0), single())
    assert [item.step for item in done] == list(range(1, STEPS + 1))
    assert [
        (step_again.step, str(part)) for step_again in done for part in step_again.differences if not part.agrees(0.0)
    ] == []
    compared = {part.name for part in done[-1].differences}
    assert {"tokens", "rollout_logp", "group", "filter_groups/dropped_prompts", "age/mean"} <= compared


@pytest.mark.slow
def test_a_resumed_run_neither_loses_nor_repeats_a_prompt(tmp_path):
    settings = TWO | {"save_every": "1", "keep_checkpoints": 3, "steps": 3}
    job = refilled_job(**settings)
    launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    remove_later_checkpoints(tmp_path / "checkpoints", 1)
    again = refilled_job(**settings, resume=True, run_dir=str(tmp_path))
    error, steps = launch(functools.partial(trained, tmp_path, again), again.launched, "cpu")
    assert error is None and [step for step, _ in steps] == [2, 3]
    log = read_groups(tmp_path)
    dropped, kept = positions_of(job, log, bound=2)
    assert len(kept) == 3 * PLACES and len({*kept, *dropped}) == len(kept) + len(dropped)
    before = [
        position
        for group in log.by_step[1]
        for position in (group.position, *(prompt.position for prompt in group.dropped))
    ]
    passed_over = set(range(max(before))).difference(before)
    assert passed_over <= {*kept, *dropped}, "a prompt was passed over and not begun again"


def flat(prompt, completion, **fields):
    return 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_batches_have_at_most_as_many_prompts_as_in_a_run_by_turns(name):
    """Four groups that follow one another share their replacements; where later groups overtake, those of a batch need
    not follow one another, and the sum over all batches is the same."""
    settings = SETTINGS | {"max_refills": 3, "steps": 2, "save_rollouts": 0, "max_new_tokens": 4}
    runs = []
    for place in (RUNS[name], {}):
        job = small_job(stale_dapo, reward=flat, **settings | place)
        runs.append(launch(functools.partial(rank_of, job), job.launched, "cpu"))
    apart, together = ([metrics for _, metrics in run.observer.steps] for run in runs)
    sampled = [[metrics["filter_groups/sampled_prompts"] for metrics in steps] for steps in (apart, together)]
    assert sampled[1] == [12] * 2 and sum(sampled[0]) == 12 * 2
    assert sampled[0] == sampled[1] or "window" in RUNS[name]
    for steps in (apart, together):
        assert [metrics["filter_groups/dropped_prompts"] for metrics in steps] == sampled[steps is together]
        assert all(metrics["filter_groups/skipped"] == 1 for metrics in steps)
    notes = "\n".join(runs[0].observer.notes)
    assert all(f"dropped all of {count:.0f}" in notes for count in sampled[0])


def fails_at_times(prompt, completion, **fields):
    if equal(prompt):
        raise ValueError(f"no score for {prompt}")
    return reward(prompt, completion)


@pytest.mark.slow
def test_prompts_without_rewards_are_replaced_too():
    settings = SETTINGS | ONE | {"on_reward_error": "skip", "save_rollouts": 0}
    job = small_job(stale_dapo, reward=fails_at_times, **settings)
    ended = launch(functools.partial(rank_of, job), job.launched, "cpu")
    assert ended.outcome.error is None
    dropped = [metrics["filter_groups/dropped_prompts"] for _, metrics in ended.observer.steps]
    assert [metrics["reward/failed"] for _, metrics in ended.observer.steps] == [2 * count for count in dropped]
    assert sum(dropped) > 0
