"""An update that is not finite is left out, and explained by the number that caused it."""

import contextlib
import dataclasses
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small_runs import Quiet, small_job

from funrl import trees
from funrl.algos import add, policy_gradient, reduce, token_mean
from funrl.algos.recipes.rloo import rloo
from funrl.batch import Batch
from funrl.data.prompts import prompt_batch
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, Mesh, parse
from funrl.models.expert_rows import FIRST_BOUND, ExpertRows
from funrl.trainer.loop import train_loop
from funrl.trainer.steps import skipped, step
from funrl.trainer.steps.roles import RoleState
from funrl.trainer.steps.skipped import cause_in
from funrl.trainer.steps.step_rows import rows_of

SETTINGS = {"dtype": "float32", "compose": rloo, "batch_prompts": 4, "eval_every": 9, "steps": 3, "queue": "fixed"}


def run(folder, huge, **settings):
    """A run whose reward is huge on some prompts."""
    job = small_job(reward=lambda prompt, text, **_: len(text) * (1e30 if prompt in huge else 1), **SETTINGS | settings)

    def program(mesh):
        observer = Quiet(str(folder / "checkpoints"))
        outcome = train_loop(job, mesh, observer)
        whole = all(bool(x.isfinite().all()) for x in trees.leaves(observer.params))
        return outcome, observer.steps, observer.notes, whole

    return launch(program, job.sizes, "cpu")


@pytest.mark.slow
@pytest.mark.gloo
def test_a_huge_reward_leaves_its_update_out_and_is_named_with_its_row(tmp_path):
    prompt = prompt_batch(small_job().task.prompts, 4, 0, 4)[3].text  # of step 2
    outcome, steps, notes, whole = run(tmp_path, {prompt}, mesh="dp2", minibatches=1)
    assert outcome.error is None and whole
    assert [metrics["update/skipped"] for _, metrics in steps] == [0, 1, 0]
    assert ["actor/pg_loss" in metrics for _, metrics in steps] == [True, False, True]
    (note,) = [note for note in notes if "left out" in note]
    assert note.startswith("step 2, policy: the gradient's norm is ") and "--lr" not in note
    assert "score of row " in note and "e+30: the reward function gave it" in note


@pytest.mark.slow
def test_too_many_in_a_row_stop_the_run_with_its_state_saved(tmp_path):
    prompts = {example.text for example in small_job().task.prompts}
    outcome, steps, notes, whole = run(tmp_path, prompts, minibatches=2, max_skipped=3)
    assert (
        outcome.error.startswith("step 2, policy: ") and "3 in a row were left out (--max_skipped=3)" in outcome.error
    )
    assert "the reward function gave it" in outcome.error and whole
    assert [metrics["update/skipped"] for _, metrics in steps] == [2, 2]
    assert (tmp_path / "checkpoints" / "step-2").exists()
    assert len([note for note in notes if "left out" in note]) == 4


@pytest.fixture
def expert_rows(monkeypatch):
    """The bound of rows on ranks of experts that are all simulated by this one."""
    monkeypatch.setattr("funrl.models.expert_rows.pmax", lambda x, *_: x)
    return ExpertRows(Mesh(parse("ep8")))


def role_with(expert_rows) -> Any:
    placed = SimpleNamespace(expert_rows=expert_rows, mesh=SINGLE)
    return SimpleNamespace(placed=placed, stored={}, metric="loss", prefix="actor")


@pytest.mark.parametrize(("loss", "passes", "bound"), [(1.0, 2, 40), (float("nan"), 1, FIRST_BOUND)])
def test_only_an_update_of_finite_numbers_is_computed_again_with_more_rows(
    expert_rows, monkeypatch, loss, passes, bound
):
    bounds = []

    def gradient(*_):
        bounds.append(expert_rows.bound)
        expert_rows.add(torch.tensor([8.0]))  # all tokens on one rank
        return step.Gradient({}, {}, torch.tensor(loss), [torch.tensor(loss)])

    monkeypatch.setattr(step, "gradient", gradient)
    monkeypatch.setattr(step, "global_norm", lambda *_: torch.tensor(1.0))
    totals = step.LossTotals((), torch.tensor(0))
    with contextlib.suppress(step.NotFiniteError):
        step.train_step(role_with(expert_rows), RoleState({}, ()), (), totals)
        assert loss == 1.0
    assert len(bounds) == passes
    with expert_rows.bounded():
        assert expert_rows.bound == bound


def test_an_odd_term_is_looked_for_with_bounded_rows(expert_rows, monkeypatch):
    rows = rows_with().batch
    bounds = []

    def present_scores(*_):
        bounds.append(expert_rows.bound)
        return SimpleNamespace(x=torch.full((3, 4), float("nan")), rows=rows)

    monkeypatch.setattr(skipped, "present_scores", present_scores)
    text = skipped.odd_term(role_with(expert_rows), {}, [rows, rows])
    assert text is not None and "before any term of its loss" in text
    assert bounds == [FIRST_BOUND] * 2 and expert_rows.bound is None


def rows_with(**fields):
    size = {"tokens": torch.ones(3, 4, dtype=torch.int32), "mask": torch.ones(3, 4, dtype=torch.bool)}
    return rows_of(Batch(**size, length=torch.full((3,), 4), **fields))


@pytest.mark.parametrize(
    ("fields", "suspects", "says"),
    [
        ({"score": [1, 2.0, 1e30], "advantage": float("nan")}, [], "score of row 2, on rank 0, is 1e+30: the "),
        ({"score": [1.0, 2.0, 3.0], "advantage": float("inf")}, [], "advantage of row 0, on rank 0, is inf"),
        ({"ref_logp": float("nan")}, [], "ref_logp of row 0, on rank 0, is nan: the reference"),
        ({"score": [1.0, 2.0, 3.0]}, [1], "the loss on rows 1 of rank 0 is not finite; no number that w"),
        ({}, [], "a lower --lr or --max_grad_norm"),
    ],
)
def test_the_cause_is_the_first_number_that_is_odd(fields, suspects, says):
    made = {name: torch.tensor(x) if isinstance(x, list) else torch.full((3, 4), x) for name, x in fields.items()}
    cause = cause_in(rows_with(**made), np.arange(3), suspects, 0)
    assert says in cause.text


def root_at_one(logp, batch):
    return ((logp - batch.old_logp).exp() - 1).clamp_min(0).sqrt(), {}


def overflows(logp, batch):
    return ((logp - batch.old_logp).float().abs() + 100).exp(), {}


def run_with_term(folder, *terms, **settings):
    algorithm = rloo()
    loss = reduce(add(policy_gradient(), *terms), token_mean())
    job = small_job(lambda: dataclasses.replace(algorithm, losses={"policy": loss}), **SETTINGS_OF_TERMS | settings)

    def program(mesh):
        observer = Quiet(str(folder / "checkpoints"))
        return train_loop(job, mesh, observer), observer.notes

    return launch(program, job.sizes, "cpu")


SETTINGS_OF_TERMS = {key: x for key, x in SETTINGS.items() if key != "compose"} | {"max_skipped": 1, "minibatches": 1}


@pytest.mark.slow
@pytest.mark.gloo
def test_a_term_whose_derivative_is_not_finite_is_named_and_not_the_learning_rate(tmp_path):
    outcome, _ = run_with_term(tmp_path, root_at_one, mesh="dp2")
    assert outcome.error.startswith("step 1, policy: the gradient's norm is nan and the loss ")
    assert "term root_at_one, number 2 of 2 that are added (" in outcome.error and "test_skipped.py:" in outcome.error
    assert "its derivative, where its loss is finite, is not finite on " in outcome.error
    assert "a root, a logarithm or a division at 0" in outcome.error and "may prevent it" not in outcome.error


def test_a_term_whose_loss_is_not_finite_is_named(tmp_path):
    outcome, _ = run_with_term(tmp_path, overflows)
    assert "term overflows, number 2 of 2 that are added" in outcome.error
    assert re.search(r"its loss is not finite on ([2-9]|\d\d+) tokens;", outcome.error)
