"""Rows with pictures that go from generator ranks to trainer ranks, and to ranks that score."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest
from picture_runs import DEEP_TOWER, TEMPLATE, TOWER, picture_job, save_seeing_model
from selection import quick
from small_runs import GRPO, SMALL
from test_asynchronous_replay import repeated, trained
from test_picture_episodes import CountsSquares
from test_placement_runs import assert_same_runs, rank_of

from funrl.algos.recipes.rollout_is import rollout_is
from funrl.data.pictures import picture_url
from funrl.environments.adapters import message_environment
from funrl.environments.logged import LoggedEnvironment
from funrl.mesh.launch import launch
from funrl.mesh.mesh import single
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.placement.logged import read_groups
from funrl.trainer.settings.scorers import Given
from funrl.trainer.settings.settings import settings_of

pytestmark = pytest.mark.gloo
TOWERS = {"windows": TOWER, "deep": DEEP_TOWER}


@functools.cache
def run(tower="windows", compose=GRPO, **settings):
    job = picture_job(compose, tower=TOWERS[tower], **{"freeze": "none", "steps": 2} | settings)
    return launch(functools.partial(rank_of, job), job.launched, "cpu")


LAYOUTS = {
    "dp1": ({}, {"place": "generate:1"}),
    "fsdp + tp": (
        {"mesh": "dp2", "fsdp": True, "generate_mesh": "tp2", "tower": "deep", "steps": 1},
        {"place": "train:dp2@0,3 generate:tp2@1-2", "fsdp": True, "tower": "deep", "steps": 1},
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(LAYOUTS, ["dp1"]))
def test_apart_the_bits_are_those_of_ranks_that_do_both(name):
    together, apart = LAYOUTS[name]
    placed = run(**apart)
    assert_same_runs(placed, run(**together))
    alone = {name: value for name, value in apart.items() if name in ("tower", "steps")}
    assert_same_runs(placed, run(**alone), 1e-9)
    assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for _, metrics in placed.observer.steps)
    assert all(metrics["sync/verified"] == 1 for _, metrics in placed.observer.steps)


@pytest.mark.slow
def test_a_reference_on_ranks_of_its_own_sees_the_pictures():
    compose = functools.partial(GRPO, kl_coef=0.1)
    placed = run(compose=compose, place="train:1 generate:1 reference:1")
    assert_same_runs(placed, run(compose=compose), 1e-9)
    assert placed.observer.steps[-1][1]["actor/kl_loss"] != 0


AHEAD = SMALL | {
    "dtype": "float32",  # in which the bits of a row of a product do not depend on other rows
    "minibatches": 1,
    "steps": 3,
    "max_new_tokens": 12,
    "eval_every": 2,
    "save_every": "2",
    "save_rollouts": 1,
    "freeze": "none",
}
STALE = {"place": "train:dp1 generate:dp1", "staleness": 2}


def check_stale(steps):
    """No token is older than it may be, and the gap is of rounding."""
    ages = [metrics["age/max"] for metrics in steps]
    assert ages[0] == 0 and max(ages) <= STALE["staleness"]
    assert all(metrics["rollout/logprob_gap_max"] < 1e-5 for metrics in steps)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Flags of a directory of a tiny Qwen2.5-VL, of prompts with 0 to 2 pictures, and of a reward."""
    folder = tmp_path_factory.mktemp("placed")
    save_seeing_model(folder / "model")
    draw = np.random.default_rng(0)
    sizes = [[(8, 16)], [], [(24, 8), (8, 8)]]
    pictures = [[picture_url(draw.integers(0, 256, (*x, 3), dtype=np.uint8)) for x in of_row] for of_row in sizes * 8]
    records = [{"prompt": "a cab ?", "images": x} for x in pictures]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "reward.py").write_text(
        "def score(prompt, completion, images):\n    return len(completion) % 3 + len(images)\n"
    )
    reward = f"{folder / 'reward.py'}:score"
    return {"model": str(folder / "model"), "prompts": str(folder / "prompts.jsonl"), "reward": reward}


@pytest.fixture(scope="module")
def texts(files):
    """Flags of the same model with a chat template, and of prompts without pictures."""
    folder = Path(files["model"]).parent
    (folder / "model" / "chat_template.jinja").write_text(TEMPLATE)
    records = [{"prompt": "abcdefgh"[i % 8]} for i in range(24)]
    (folder / "texts.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return {"model": files["model"], "prompts": str(folder / "texts.jsonl")}


@pytest.mark.slow
def test_a_run_written_ahead_is_repeated_with_the_same_bits(files, tmp_path):
    files = files | {"reward_workers": 0}
    job = prepare(settings_of(**AHEAD | files | STALE), rollout_is)
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None
    check_stale([metrics for _, metrics in steps])
    done = repeated(tmp_path, prepare(settings_of(**AHEAD | files), rollout_is), single())
    assert [item.step for item in done] == [1, 2, 3] and read_groups(tmp_path) is not None
    assert [
        (step_again.step, str(part)) for step_again in done for part in step_again.differences if not part.agrees(0.0)
    ] == []
    compared = {part.name for part in done[-1].differences}
    assert {"patches", "grids", "version", "rollout_logp", "weights of policy by their digests"} <= compared


@pytest.mark.slow
def test_episodes_written_ahead_are_repeated_with_the_same_bits(texts, tmp_path):
    flags = AHEAD | texts | {"max_new_tokens": 8}
    job = prepare(settings_of(**flags | STALE), rollout_is, Given(environment=message_environment(CountsSquares)))
    error, steps = launch(functools.partial(trained, tmp_path, job), job.launched, "cpu")
    assert error is None and all(metrics["episodes/failed"] == 0 for _, metrics in steps)
    check_stale([metrics for _, metrics in steps])
    logged = Given(environment=LoggedEnvironment(("policy",)))
    done = repeated(tmp_path, prepare(settings_of(**flags), rollout_is, logged), single())
    assert [item.step for item in done] == [1, 2, 3]
    assert [
        (step_again.step, str(part)) for step_again in done for part in step_again.differences if not part.agrees(0.0)
    ] == []
    assert {"patches", "turns of the episodes"} <= {part.name for part in done[-1].differences}
