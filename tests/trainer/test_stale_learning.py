"""Learning from rows of older policies: the recipe that a refusal recommends learns, and a collapse is announced.

The trainer waits in every step, so that the generator is as far ahead as it may be, on any machine.
"""

import json
from textwrap import dedent

import pytest

from funrl.cli.run import main
from funrl.track.records import guards

FLAGS = ["--place=train:dp1 generate:dp1", "--staleness=2", "--device=cpu", "--seed=1", "--eval_every=12"]
WAITING_TRAINER = """
    import dataclasses
    import time
    from funrl.algos.recipes.{recipe} import {recipe} as prompt

    def waiting():
        algorithm = prompt()

        def update(*args):
            time.sleep(2)
            return algorithm.advantage.update(*args)

        return dataclasses.replace(algorithm, advantage=algorithm.advantage._replace(update=update))
"""


def metrics_of(recipe, folder, steps):
    """Metrics of a run whose rows are two policies old from its third step on."""
    file = folder / "waiting.py"
    file.write_text(dedent(WAITING_TRAINER.format(recipe=recipe)))
    run = folder / "run"
    flags = [*FLAGS, f"--algorithm={file}:waiting", f"--steps={steps}", f"--run_dir={run}"]
    assert main("grpo", ["grpo", *flags]) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["age/mean"] for row in rows] == [0, 1, *[2] * (steps - 2)]
    return rows


@pytest.mark.gloo
@pytest.mark.slow
def test_the_recommended_recipe_learns_at_its_defaults(tmp_path):
    """dppo reached 0.79 from 0.46, and stays below 0.28 nats from its sampler over two steps."""
    rows = metrics_of("dppo", tmp_path, 12)
    assert rows[-1]["eval/reward"] > 0.7
    assert not [item for item in guards.findings(rows) if item.cause == "rows_too_old"]


@pytest.mark.gloo
@pytest.mark.slow
def test_a_collapse_is_announced_before_the_reward_falls(tmp_path):
    """rollout_is is 0.29 nats from its sampler in step 2, 0.97 in step 3; its reward falls in step 5."""
    rows = metrics_of("rollout_is", tmp_path, 4)
    (finding,) = [item for item in guards.findings(rows) if item.cause == "rows_too_old"]
    assert finding.step == 3 and "--algorithm=dppo" in finding.text
