"""Gradients of reward functions and of groups add up to the gradient of the update, on every mesh."""

import dataclasses
import functools
import math

import pytest
import torch
from selection import quick
from small_runs import GRPO, PPO, Quiet, begin, gap, gradients, scored_batch, small_job
from test_episode_runs import RECIPES, Branching, episode_job

from funrl import trees
from funrl.algos.recipes.gdpo import gdpo
from funrl.algos.recipes.online_dpo import online_dpo
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer import loop, phases
from funrl.trainer.settings.settings import SettingsError

MESHES = {"dp4": {}, "tp2": {}, "dp2,tp2": {}, "dp2": {"fsdp": True}, "dp2,sp2": {}}
WITH_ENTROPY = functools.partial(GRPO, entropy_coef=0.1)


def low_digits(prompt, completion, **fields):
    return sum(map(completion.count, "12345")) / 4


def brevity(prompt, completion, **fields):
    return -len(completion) / 2 - completion.count("7")


def explained_job(make=GRPO, weights=(1.0, 0.5), **settings):
    job = small_job(make, **{"explain_every": 1, "minibatches": 1} | settings)
    return dataclasses.replace(job, task=job.task._replace(rewards=(low_digits, brevity), weights=weights))


def with_part(run, number):
    """The run whose policy has the loss of a reward function."""
    role = list(run.explainer.parts.values())[number]
    return run._replace(parts=dataclasses.replace(run.parts, roles={"policy": role}))


def explained(job, mesh):
    show = Quiet()
    run, state = begin(job, mesh, show)
    rows, state, _ = scored_batch(run, state)
    rows, metrics = phases.explain_batch(run, state, rows)
    return rows, metrics, show


@pytest.mark.parametrize("make", [GRPO, WITH_ENTROPY, PPO, gdpo])
def test_gradients_of_rewards_and_of_what_remains_add_up_to_that_of_the_update(make):
    run, state = begin(explained_job(make), single())
    rows, state, _ = scored_batch(run, state)
    whole = gradients(run, state, rows)["policy"].tree
    parts = [gradients(with_part(run, number), state, rows)["policy"].tree for number in (0, 1)]
    together = trees.map(torch.add, *parts)
    remains = gap(together, whole)
    assert (remains < 1e-9) == (make is not WITH_ENTROPY), remains
    seen, metrics = phases.explain_batch(run, state, rows)
    assert "reward_parts" not in seen.batch.names()
    norm = norm_of(whole)
    for name, part in {
        "low_digits": parts[0],
        "brevity": parts[1],
        "rest": trees.map(torch.sub, whole, together),
    }.items():
        dot = sum((x * y).sum().item() for x, y in zip(trees.leaves(part), trees.leaves(whole), strict=True))
        assert metrics[f"reward_gradient/{name}/norm"] == pytest.approx(norm_of(part), abs=1e-12)
        assert metrics[f"reward_gradient/{name}/share"] == pytest.approx(dot / norm**2, abs=1e-9)
        if norm_of(part) > 1e-9:
            cosine = dot / norm / norm_of(part)
            assert metrics[f"reward_gradient/{name}/cosine"] == pytest.approx(cosine, abs=1e-9)
    assert sum(metrics[f"reward_gradient/{name}/share"] for name in ("low_digits", "brevity", "rest")) == pytest.approx(
        1
    )
    _, learned = phases.learn_batch(run, state, rows)
    assert learned["actor/grad_norm"] == pytest.approx(norm, abs=1e-12)


def norm_of(tree):
    return math.sqrt(sum(x.square().sum().item() for x in trees.leaves(tree)))


def test_gradients_of_groups_add_up_to_that_of_the_update():
    rows, _, show = explained(explained_job(batch_prompts=7), single())
    ((step, groups),) = show.explained
    assert step == 1 and len(groups) == 5
    assert [group.norm for group in groups] == sorted((group.norm for group in groups), reverse=True)
    assert all(len(group.rewards) == 2 and group.prompt for group in groups)
    run, state = begin(explained_job(batch_prompts=5), single(), show)
    rows, state, _ = scored_batch(run, state)
    phases.explain_batch(run, state, rows)
    assert sum(group.share for group in show.explained[-1][1]) == pytest.approx(1)
    assert any("3 gradients of all rows, and one of each of 5 groups" in note for note in show.notes)


@pytest.mark.parametrize("mesh", quick(list(MESHES), ("dp2,tp2",)))
def test_the_same_numbers_on_every_mesh(mesh):
    def measured(name, settings):
        job = explained_job(functools.partial(PPO, entropy_coef=0.1), mesh=name, **settings)
        return launch(lambda ranks: explained(job, ranks)[1:], job.sizes, "cpu")

    metrics, show = measured("dp1", {})
    other, shown = measured(mesh, MESHES[mesh])
    assert metrics.keys() == other.keys() and len(metrics) == 9
    assert other == pytest.approx(metrics, abs=1e-9)
    for group, same in zip(show.explained[0][1], shown.explained[0][1], strict=True):
        assert group[:2] == same[:2] and same.rewards == pytest.approx(group.rewards)
        assert same[3:] == pytest.approx(group[3:], abs=1e-9)


@pytest.mark.parametrize("name", ["grpo", "ppo", "turns", "gigpo"])
def test_the_reward_of_an_environment_is_explained(name):
    """Episodes have several rows and agents, of which the role learns from all."""
    run, state = begin(episode_job(RECIPES[name], Branching(), explain_every=1), single(), show := Quiet())
    rows, state, _ = scored_batch(run, state)
    rows, metrics = phases.explain_batch(run, state, rows)
    units = rows.batch.group.unique_consecutive().tolist(), rows.batch.episode_first
    sizes = sorted(int((units[1] & (rows.batch.group == number)).sum()) for number in units[0])
    assert sorted(len(group.rewards) for group in show.explained[0][1]) == sizes and sum(sizes) < len(rows.owner)
    assert metrics["reward_gradient/1/norm"] > 0.01 and "reward_parts" not in rows.batch.names()
    assert metrics["reward_gradient/1/share"] + metrics["reward_gradient/rest/share"] == pytest.approx(1)
    assert metrics["reward_gradient/rest/norm"] < 1e-9  # the critic's values are 0 at first
    assert metrics["reward_gradient/rest/cosine"] == 0  # and not that of roundings


def test_a_step_without_rows_of_the_policy_is_not_explained():
    run, state = begin(episode_job(RECIPES["grpo"], Branching(), explain_every=1), single(), Quiet())
    rows, state, _ = scored_batch(run, state)
    absent = run._replace(explainer=run.explainer._replace(agents=[7]))
    assert phases.explain_batch(absent, state, rows)[1] == {}


def test_without_rewards_groups_are_explained():
    job = small_job(functools.partial(GRPO, entropy_coef=0.1), explain_every=1)
    job = dataclasses.replace(job, task=job.task._replace(rewards=(), weights=()))
    _, metrics, show = explained(job, single())
    assert metrics["reward_gradient/rest/share"] == pytest.approx(1) and len(metrics) == 3
    assert sum(group.share for group in show.explained[0][1]) == pytest.approx(1)
    assert [group.rewards for group in show.explained[0][1]] == [[]] * 4


def test_a_run_explains_every_so_many_steps_and_learns_the_same():
    ends = []
    for every in (None, 2):
        show = Quiet()
        loop.train_loop(explained_job(explain_every=every, minibatches=2, steps=4), single(), show)
        ends.append(show)
    steps = [step for step, metrics in ends[1].steps if "reward_gradient/brevity/norm" in metrics]
    assert steps == [2, 4] == [step for step, _ in ends[1].explained] and not ends[0].explained
    assert all(map(torch.equal, *(trees.leaves(show.params) for show in ends)))


def test_what_cannot_be_explained_is_refused():
    with pytest.raises(
        SettingsError, match="--explain_every=1 does nothing without an algorithm that turns rewards into advantages"
    ):
        small_job(online_dpo, explain_every=1)
    with pytest.raises(ValueError, match="explain_every=0"):
        small_job(GRPO, explain_every=0)
    with pytest.raises(SettingsError, match=r"--explain_every=1: .* leave --backend=xla out"):
        small_job(GRPO, explain_every=1, backend="xla")
