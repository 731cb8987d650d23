"""Learning from rows of older policies: the recipe that a refusal recommends learns, and a collapse is announced."""

import json

import pytest

from funrl.cli.run import main
from funrl.track.records import guards

FLAGS = ["--place=train:dp1 generate:dp1", "--staleness=2", "--device=cpu", "--seed=1", "--eval_every=12"]


def metrics_of(recipe, folder, steps):
    assert main(recipe, [recipe, *FLAGS, f"--steps={steps}", f"--run_dir={folder}"]) == 0
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.gloo
@pytest.mark.slow
def test_the_recommended_recipe_learns_at_its_defaults(tmp_path):
    """dppo reached 0.84 from 0.46, at S = 0 too, and stays below 0.22 nats from its sampler over two steps."""
    rows = metrics_of("dppo", tmp_path / "run", 12)
    assert rows[-1]["eval/reward"] > 0.7
    assert not [item for item in guards.findings(rows) if item.cause == "rows_too_old"]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_collapse_is_announced_before_the_reward_falls(tmp_path):
    """rollout_is ended at 0.16: 0.29 nats from its sampler in step 2, 0.56 in step 3; its reward fell in step 4."""
    rows = metrics_of("rollout_is", tmp_path / "run", 4)
    (finding,) = [item for item in guards.findings(rows) if item.cause == "rows_too_old"]
    assert finding.step == 3 and "--algorithm=dppo" in finding.text
