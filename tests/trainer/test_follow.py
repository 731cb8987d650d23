"""Frozen models that follow the policy, beside a loop over weights."""

import functools
import shutil

import pytest
import torch
from selection import quick
from small_runs import assert_same, begin, one_step, remove_later_checkpoints, run_steps, small_job

from funrl import trees
from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.dpo import dpo
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.ppo import ppo
from funrl.cli import main as cli
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.mesh import single
from funrl.trainer.settings.declaration import SettingsError

with_kl = functools.partial(grpo, kl_coef=0.1)


@pytest.mark.parametrize(("every", "share"), [(1, 1.0), (2, 1.0), (1, 0.25), (3, 0.5)])
def test_a_reference_follows_the_policy(every, share):
    job = small_job(with_kl, follow=f"reference:{every}:{share}")
    run, state = begin(job, single())
    assert "reference" not in run.frozen
    expected = [x.clone() for x in trees.leaves(state.following["reference"])]
    for step in range(1, 5):
        state, _ = one_step(run, state)
        policy = trees.leaves(state.roles["policy"].params)
        if step % every == 0:
            expected = [x + share * (y - x) for x, y in zip(expected, policy, strict=True)]
        for x, y in zip(trees.leaves(state.following["reference"]), expected, strict=True):
            assert torch.allclose(x, y, atol=1e-14, rtol=0)
        equal = all(map(torch.equal, trees.leaves(state.following["reference"]), policy))
        assert equal == (share == 1 and step % every == 0)


def same_reward(prompt, completion, **fields):
    return 1.0


def test_a_teacher_that_is_the_policy_of_now_differs_by_its_prompt_alone():
    """Without another prompt the teacher's log-probabilities are the policy's, in every step."""
    job = small_job(distillation, teacher_context="sibling", follow="teacher:1", reward=same_reward)
    run, state = begin(job, single())
    for _ in range(2):
        state, metrics = one_step(run, state)
        assert metrics["actor/grad_norm"] == 0


@pytest.mark.parametrize("mesh", quick(["dp2", "tp2", "dp2,tp2"], ["dp2"]))
def test_it_has_the_same_numbers_on_every_mesh(mesh):
    """With other layouts of the policy than of the reference, too: `--fsdp_models=policy`."""
    given = {"compose": with_kl, "follow": "reference:1:0.3"}
    sharded = {"fsdp": True, "fsdp_models": "policy"} if "dp" in mesh else {}
    assert_same(run_steps(3, **given), run_steps(3, mesh=mesh, **given, **sharded), 1e-9)


WORDS = "grpo --kl_coef=0.04 --follow=reference:1:0.5 --steps=3 --batch_prompts=2 --samples_per_prompt=4 --save_every=1"


def status(words):
    with pytest.raises(SystemExit) as ended:
        cli.main(["funrl", *words])
    return ended.value.code


def test_a_run_that_was_interrupted_ends_with_the_same_bits(tmp_path, capsys):
    words = [*WORDS.split(), "--eval_prompts=4"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert status([*words, f"--run_dir={whole}"]) == 0
    shutil.copytree(whole, parts)
    remove_later_checkpoints(parts / "checkpoints", 2)
    assert status([*words, f"--run_dir={parts}", "--resume"]) == 0
    files = [(folder / "model" / "model.safetensors").read_bytes() for folder in (whole, parts)]
    assert files[0] == files[1]
    capsys.readouterr()
    assert status([*(word for word in words if "follow" not in word), f"--run_dir={parts}", "--resume"])
    assert "models that --follow names: reference, this one has" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("recipe", "follow", "text"),
    [
        (with_kl, "teacher:1", "this run has no teacher; reference can follow it"),
        (ppo, "critic:1", "the critic learns by a loss of its own"),
        (with_kl, "reference:0", "must be ROLE:STEPS"),
        (with_kl, "reference:1:1.5", "must be ROLE:STEPS"),
        (with_kl, "reference:1,reference:2", "must be ROLE:STEPS"),
    ],
)
def test_what_cannot_follow_is_refused(recipe, follow, text):
    with pytest.raises(SettingsError, match=text):
        small_job(recipe, follow=follow)


def test_a_reference_of_preferences_moves_too():
    run, state = begin(small_job(dpo, follow="reference:2", reward=None), single())
    first = trees.clone(state.following["reference"])
    for step in range(1, 3):
        state, _ = one_step(run, state)
        same = all(map(torch.equal, trees.leaves(first), trees.leaves(state.following["reference"])))
        assert same == (step == 1)


def test_the_dry_run_counts_a_model_that_follows_as_master_weights():
    """In bfloat16 a model that stays has 2 bytes a weight, one that follows 4."""
    peaks = {}
    for follow in (None, "reference:1"):
        job = small_job(with_kl, dtype="bfloat16", follow=follow)
        peaks[follow] = dry_run.estimate(job, 8, HARDWARE["cpu"]).phases["update_policy"].peak["weights"]
    count = sum(x.numel() for x in trees.leaves(job.model.init(torch.Generator())))
    assert peaks["reference:1"] - peaks[None] == 2 * count
