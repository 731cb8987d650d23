"""Runs that learn from each source of prompts by another algorithm."""

import functools
import json
from pathlib import Path

import pytest
import torch
from selection import quick
from small_runs import assert_same, begin, gradients, one_step, run_steps, scored_batch, small_job

from funrl.algos import by_source
from funrl.algos.recipes.dapo import dapo
from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.ppo import ppo
from funrl.algos.recipes.reinforce_plus_plus import reinforce_plus_plus
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.asynchrony.behaviour import StaleLossError, check_behaviour
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import HARDWARE
from funrl.flags.arguments import find_recipe, full_source, recipe_name, recipes_by_source
from funrl.loading import LoadError
from funrl.mesh.mesh import single
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.step_rows import take

FUNCTIONS = Path(__file__).with_name("functions_of_flags.py")
mixed = functools.partial(by_source, {"easy": grpo(), "hard": ppo(kl_coef=0.0)})


@pytest.fixture
def prompts(tmp_path):
    file = tmp_path / "prompts.jsonl"
    records = [{"prompt": f"{n}+{n % 7}=", "data_source": "hard" if n % 3 else "easy"} for n in range(12)]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"prompts": str(file), "eval_prompts": 2, "samples_per_prompt": 4, "reward": f"{FUNCTIONS}:digits"}


def test_each_row_has_the_advantage_of_its_source(prompts):
    run, state = begin(small_job(mixed, batch_prompts=6, **prompts), single())
    rows, _, _ = scored_batch(run, state)
    batch = rows.batch
    objective = batch.objective
    assert {*objective.tolist()} == {0, 1}
    for group in batch.group.unique():
        here = batch.group == group
        assert len(objective[here].unique()) == 1
        score = batch.score[here]
        if objective[here][0] == 0:
            expected = (score - score.mean()) / (score.std() + 1e-6)
            for row, value in zip(batch.advantage[here], expected, strict=True):
                assert torch.allclose(row[row != 0], value.expand(int((row != 0).sum())), atol=1e-12)


def test_the_gradient_is_the_sum_of_those_of_each_source_alone(prompts):
    run, state = begin(small_job(mixed, batch_prompts=6, **prompts), single())
    rows, _, _ = scored_batch(run, state)
    whole = gradients(run, state, rows)
    parts = [gradients(run, state, take(rows, (rows.batch.objective == n).nonzero()[:, 0].numpy())) for n in (0, 1)]
    assert torch.allclose(whole["policy"].loss, sum(part["policy"].loss for part in parts), atol=1e-12)
    assert torch.allclose(whole["critic"].loss, parts[1]["critic"].loss, atol=1e-12)
    assert parts[0]["critic"].loss == 0
    names = {name.partition("/")[0] for name in whole["policy"].metrics}
    assert {"easy", "hard"} <= names


@pytest.mark.parametrize("mesh", quick(["dp2", "tp2", "dp2,tp2"], ["dp2"]))
def test_a_run_has_the_same_numbers_on_every_mesh(mesh, prompts):
    given = {"compose": mixed, "batch_prompts": 6, **prompts}
    assert_same(run_steps(2, **given), run_steps(2, mesh=mesh, **given), 1e-9)


def test_a_filter_refills_for_its_own_source(prompts):
    both = functools.partial(by_source, {"easy": dapo(), "hard": distillation()})
    given = prompts | {"reward": f"{FUNCTIONS}:always"}
    job = small_job(both, batch_prompts=4, teacher_context="sibling", **given)
    run, state = begin(job, single())
    rows, _, _ = scored_batch(run, state)
    assert {*rows.batch.objective.tolist()} == {1}


def test_sources_without_an_algorithm_and_algorithms_without_prompts_are_refused(prompts):
    with pytest.raises(SettingsError, match=r"no algorithm for the source 'hard'.*easy, hard"):
        small_job(functools.partial(by_source, {"easy": grpo()}), **prompts)
    with pytest.raises(SettingsError, match="no prompts of the source 'chat'"):
        small_job(functools.partial(by_source, {"easy": grpo(), "hard": grpo(), "chat": grpo()}), **prompts)


def test_a_command_line_names_a_recipe_for_each_source():
    text = "grpo@easy,tests/trainer/test_objectives_in_runs.py:mixed@hard"
    assert recipes_by_source(text) == {"easy": "grpo", "hard": "tests/trainer/test_objectives_in_runs.py:mixed"}
    assert recipes_by_source("grpo") == {} == recipes_by_source("file.py:f")
    assert recipes_by_source("/data/a@b/algo.py:f") == {}
    assert full_source("grpo@a,dapo@b") == "funrl.algos.recipes.grpo:grpo@a,funrl.algos.recipes.dapo:dapo@b"
    assert recipe_name(full_source("grpo@a,dapo@b")) == "grpo@a,dapo@b"
    assert find_recipe("grpo@a,dapo@b")().objectives == ("a", "b")
    for wrong in ("grpo@a,dapo", "grpo@a,dapo@a", "@a"):
        with pytest.raises(LoadError, match="RECIPE@SOURCE"):
            recipes_by_source(wrong)


def test_the_dry_run_traces_every_objective(prompts):
    phases = dry_run.estimate(small_job(mixed, batch_prompts=6, **prompts), 8, HARDWARE["cpu"]).phases
    assert {"update_critic", "update_policy", "advantage"} <= set(phases)


def test_held_out_prompts_may_be_of_other_sources(prompts, tmp_path):
    file = tmp_path / "other.jsonl"
    file.write_text(json.dumps({"prompt": "1+1=", "data_source": "exam"}) + "\n")
    run, state = begin(
        small_job(mixed, batch_prompts=4, eval_data=str(file), **prompts | {"eval_prompts": 1}), single()
    )
    assert "eval/reward" in run.source.evaluate(state.roles, 0)


def test_a_step_without_prompts_of_a_source_learns_from_the_others(prompts):
    both = functools.partial(by_source, {"easy": grpo(), "hard": reinforce_plus_plus()})
    run, state = begin(small_job(both, batch_prompts=1, **prompts), single())
    seen = set()
    for _ in range(4):
        rows, state, _ = scored_batch(run, state)
        seen |= {*rows.batch.objective.tolist()}
        assert rows.batch.advantage.shape == rows.batch.mask.shape
        state, _ = one_step(run, state)
    assert seen == {0, 1}


def test_no_objective_corrects_for_another():
    stale = by_source({"easy": rollout_is(), "hard": grpo()})
    check_behaviour(by_source({"easy": rollout_is(), "hard": rollout_is()}), 2)
    with pytest.raises(StaleLossError, match="does not depend on rollout_logp"):
        check_behaviour(stale, 2)
