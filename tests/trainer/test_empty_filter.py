"""A step whose filter keeps nothing: skipped, an end of the run, or trained on as it is."""

import dataclasses
import zlib

import pytest
from small_runs import Quiet, gap, small_job
from test_replay import replayed, unlike

from funrl.algos.filters.by_group import unequal_scores
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.online_dpo import online_dpo
from funrl.algos.recipes.rloo import rloo
from funrl.data.prompts import prompt_batch
from funrl.mesh.launch import launch
from funrl.trainer.jobs.compatibility import check_algorithm
from funrl.trainer.loop import train_loop
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

SETTINGS = {"dtype": "float32", "max_refills": 1, "eval_every": 9, "queue": "fixed", "save_rollouts": 1}
EMPTY = {example.text for example in prompt_batch(small_job().task.prompts, 4, 0, 4)}  # of step 2


def reward(prompt, completion, **fields):
    """The same for all completions of the prompts of step 2, different for those of others."""
    return 0.0 if prompt in EMPTY else zlib.crc32((prompt + completion).encode()) / 2**32


def run(folder, make=None, steps=3, **settings):
    make = make or (lambda: dataclasses.replace(grpo(), filter=unequal_scores()))
    job = small_job(make, reward=reward, steps=steps, **SETTINGS | settings)

    def program(mesh):
        observer = Quiet(None if folder is None else str(folder / "checkpoints"))
        outcome = train_loop(job, mesh, observer)
        return outcome, observer.steps, observer.notes, observer.params

    return job, launch(program, job.sizes, "cpu")


def values(metrics, name):
    return [line.get(name) for _, line in metrics]


@pytest.mark.slow
def test_a_skipped_step_changes_no_weight_and_is_said(tmp_path):
    job, (outcome, steps, notes, _) = run(tmp_path)
    assert outcome.error is None and [step for step, _ in steps] == [1, 2, 3] and outcome.last
    assert values(steps, "filter_groups/skipped") == [0, 1, 0]
    assert [x is None for x in values(steps, "actor/pg_loss")] == [False, True, False]
    assert all(x is not None for x in values(steps, "reward/mean")) and steps[1][1]["reward/mean"] == 0
    (note,) = [note for note in notes if "filter" in note and "dropped all" in note]
    assert note == "step 2: the filter dropped all of 4 prompts; the step has no update (--empty_filter=skip)"
    assert unlike(replayed(tmp_path, job, 3)) == [], "a skipped step is replayed as one"
    _, (_, _, _, after_two) = run(None, steps=2, save_rollouts=0)
    _, (_, _, _, after_one) = run(None, steps=1, save_rollouts=0)
    assert gap(after_two, after_one) == 0


@pytest.mark.slow
@pytest.mark.gloo
def test_two_ranks_skip_the_same_step(tmp_path):
    (_, (_, first, _, _)), (_, (_, two, _, _)) = (
        run(tmp_path / mesh, mesh=mesh, dtype="float64") for mesh in ("dp1", "dp2")
    )
    for a, b in zip(first, two, strict=True):
        names = [name for name in a[1] if name.startswith(("filter_groups/", "actor/", "reward/"))]
        assert [a[1][name] for name in names] == pytest.approx([b[1][name] for name in names], rel=1e-9, abs=1e-12)
    assert values(two, "filter_groups/skipped") == [0, 1, 0]


def test_a_run_may_stop_there_with_its_state_saved(tmp_path):
    _, (outcome, steps, _, _) = run(tmp_path, empty_filter="stop")
    assert outcome.error == "step 2: the filter dropped all of 4 prompts (--empty_filter=stop)"
    assert len(steps) == 1 and (tmp_path / "checkpoints" / "step-1").exists()
    assert outcome.first and outcome.last == {}  # its second evaluation would be after step 3


def test_or_use_the_rows_as_they_are():
    _, (outcome, steps, notes, _) = run(None, empty_filter="use", save_rollouts=0)
    assert outcome.error is None and values(steps, "filter_groups/skipped") == [0, 0, 0]
    assert steps[1][1]["actor/pg_loss"] is not None
    assert any("the last of them are used unfiltered (--empty_filter=use)" in note for note in notes)


@pytest.mark.parametrize("settings", [{"new_tokens_per_step": 2}, {"make": online_dpo}], ids=["partial", "pairs"])
def test_sources_of_other_rows_skip_too(settings):
    make = settings.get("make")
    others = {key: x for key, x in settings.items() if key != "make"}
    nothing = lambda batch: batch.score < -1  # noqa: E731
    made = lambda: dataclasses.replace((make or rloo)(), filter=nothing)  # noqa: E731
    _, (outcome, steps, notes, _) = run(None, made, 2, save_rollouts=0, **others)
    assert outcome.error is None and values(steps, "filter_groups/skipped") == [1, 1]
    assert values(steps, "actor/pg_loss") == [None, None] and len([n for n in notes if "no update" in n]) == 2


def test_the_flag_is_refused_where_there_is_no_filter():
    with pytest.raises(SettingsError, match="--empty_filter=stop does nothing without a filter"):
        check_algorithm(grpo(), settings_of(empty_filter="stop"))
    check_algorithm(grpo(), settings_of(empty_filter="stop", on_reward_error="skip"))
