"""How completions are drawn: from the flags, and for evaluation from the model's generation_config.json."""

import json
from typing import Any

import pytest
from small_runs import GRPO, SMALL, Quiet, begin, small_job

from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields
from funrl.rollout.sampling_parameters import Sampling
from funrl.tasks import arithmetic
from funrl.trainer.jobs.prepare import inherited, prepare
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_of

QWEN = {"do_sample": True, "temperature": 0.7, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.05}
FLAGS: dict[str, Any] = {"top_k": 5, "top_p": 0.5, "min_p": 0.1, "repetition_penalty": 1.2}


def job_of(says: dict[str, Any] | None = None, **settings: Any):
    """A job that begins with a model whose generation_config.json says this."""
    config = with_fields(arithmetic.model_config(), generation=json.dumps(says) if says is not None else "")
    return prepare(settings_of(**SMALL | settings), GRPO, Given(model=decoder_model(config)))


def numbers(how: Sampling) -> dict[str, Any]:
    """What differs from plain sampling, but for what a completion may have and how many there are."""
    plain, same = Sampling(), ("max_new_tokens", "stop", "samples")
    return {k: v for k, v in vars(how).items() if v != getattr(plain, k) and k not in same}


def test_flags_of_sampling_reach_the_engine():
    job = job_of(**FLAGS)
    assert numbers(job.sampling) == FLAGS and numbers(job.eval_sampling) == {"greedy": True}
    given = {f"eval_{name}": value for name, value in FLAGS.items()}
    job = job_of(eval_temperature=0.9, **given)
    assert numbers(job.eval_sampling) == FLAGS | {"temperature": 0.9} and numbers(job.sampling) == {}
    assert numbers(job_of(eval_repetition_penalty=1.3).eval_sampling) == {"greedy": True, "repetition_penalty": 1.3}


@pytest.mark.parametrize(
    ("says", "settings", "expected", "taken"),
    [
        (None, {}, {"greedy": True}, {}),
        ({}, {}, {"greedy": True}, {}),
        (QWEN, {}, {k: v for k, v in QWEN.items() if k != "do_sample"}, {"temperature", "top_k", "top_p"}),
        (QWEN, {"eval_top_p": 1.0, "eval_top_k": 0}, {"temperature": 0.7}, {"temperature"}),
        (QWEN, {"eval_temperature": 0.0}, {"greedy": True, "top_k": 20, "top_p": 0.8}, set()),
        (QWEN, {"eval_temperature": 2.0}, {"temperature": 2.0, "top_k": 20, "top_p": 0.8}, {"top_k", "top_p"}),
        (QWEN | {"do_sample": False}, {}, {"greedy": True, "top_k": 20, "top_p": 0.8}, set()),
        ({"do_sample": True}, {}, {}, {"temperature"}),
    ],
)
def test_evaluation_samples_as_the_model_says_where_no_flag_does(says, settings, expected, taken):
    job = job_of(says, **settings)
    if says and "repetition_penalty" in says:
        expected, taken = expected | {"repetition_penalty": 1.05}, taken | {"repetition_penalty"}
    assert numbers(job.eval_sampling) == expected and numbers(job.sampling) == {}
    assert inherited(job) == {name: says.get(name, 1.0) for name in taken}


def test_a_run_says_what_evaluation_takes_over():
    says = {"do_sample": True, "temperature": 0.7, "top_k": 3}
    for given, expected in (
        (None, []),
        (says, ["evaluation: temperature 0.7, top_k 3, as the model's generation_config.json says"]),
    ):
        show = Quiet()
        begin(job_of(given), single(), show)
        assert [note.split("; ")[0] for note in show.notes if note.startswith("evaluation")] == expected


def test_evaluation_is_drawn_from_that_distribution():
    scores = []
    for how in ({}, {"eval_temperature": 2.0}, {"eval_temperature": 2.0, "eval_top_k": 1}):
        show = Quiet()
        run, state = begin(small_job(**how), single(), show)
        run.source.evaluate(state.roles, 0)
        scores.append([texts for _, _, texts, _ in show.shown])
    assert scores[0] == scores[2] != scores[1]


@pytest.mark.parametrize(
    ("says", "settings", "message"),
    [
        (
            None,
            {"eval_top_k": 5},
            "--eval_top_k=5 does nothing without evaluation by samples",
        ),
        (QWEN, {"eval_temperature": 0.0, "eval_min_p": 0.1}, "--eval_min_p=0.1 does nothing"),
        ({"top_p": 1.2}, {}, "generation_config.json of the model: top_p is 1.2, it must be above 0 and at most 1"),
    ],
)
def test_what_cannot_work_is_refused(says, settings, message):
    with pytest.raises(SettingsError, match=message):
        job_of(says, **settings)
