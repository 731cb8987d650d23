"""Rows and weights of runs that write them in unusual ways, in float64 on the CPU, against tests/golden/rows.json.

Refills, replicas of several ranks, environments that answer late, ranks without prompts, and completions over several
steps: the file is of one process where a mesh cannot matter, and every mesh gives its numbers.

    python tests/trainer/test_golden_rows.py   # writes the numbers anew
"""

import asyncio
import functools
import json
import zlib
from pathlib import Path

import pytest
from selection import quick
from small_runs import GRPO, small_job, steps_program
from test_episode_runs import episode_job
from test_golden import norms

from funrl.algos.recipes.dapo import dapo
from funrl.mesh.launch import launch
from funrl.rollout.episodes import Episode

pytestmark = pytest.mark.versions

FILE = Path(__file__).parent.parent / "golden" / "rows.json"
STEPS = 2
TOLERANCE = 1e-9


class LateAnswers:
    """Two turns, between which each episode waits another fraction of a second."""

    async def run(self, policy, example, seed):
        first, trajectory = await policy.sample(policy.start(example.tokens), max_tokens=3)
        await asyncio.sleep(seed % 7 * 0.01)
        second, trajectory = await policy.sample(policy.extend(trajectory, [5, 6]), max_tokens=3)
        return Episode([trajectory], {"policy": float(sum([*first.tokens, *second.tokens]) % 7)})


def rare_differences(prompt, completion, **fields):
    """A reward that is equal for all completions of three prompts out of four."""
    return 0.0 if zlib.crc32(prompt.encode()) % 4 else zlib.crc32((prompt + completion).encode()) / 2**32


def refilled(mesh):
    return small_job(dapo, reward=rare_differences, max_new_tokens=8, minibatches=1, max_refills=8, mesh=mesh)


def wide(mesh):
    return small_job(GRPO, batch_prompts=8, mesh=mesh)


def late(mesh):
    return episode_job(GRPO, LateAnswers(), mesh=mesh)


def few_prompts(mesh):
    return small_job(GRPO, batch_prompts=2, samples_per_prompt=4, mesh=mesh)


def in_parts(mesh):
    return small_job(GRPO, max_new_tokens=12, new_tokens_per_step=3, batch_prompts=3, minibatches=1, mesh=mesh)


RUNS = {
    "refills": (refilled, ("dp1", "dp2")),
    "replicas of two ranks": (wide, ("dp1", "dp4,tp2")),
    "late answers": (late, ("dp1", "dp2,tp2")),
    "a rank without prompts": (few_prompts, ("dp1", "dp4")),
    "parts": (in_parts, ("dp1", "dp2", "tp2")),
}
CASES = [(name, mesh) for name, (_, meshes) in RUNS.items() for mesh in meshes]


@functools.cache
def steps_of(name, mesh):
    """What a run samples and learns in each step, and the norms of its weights after the last one."""
    make, _ = RUNS[name]
    job = make(mesh)
    done = launch(steps_program(job, STEPS, with_gradients=False), job.sizes, "cpu")
    steps = []
    for metrics, batch in zip(done["metrics"], done["batches"], strict=True):
        names = [key for key in ("filter_groups/sampled_prompts", "partial/unfinished_prompts") if key in metrics]
        steps.append(
            {
                "tokens": batch.tokens[batch.mask].tolist(),
                "lengths": batch.length.tolist(),
                "scores": batch.score.tolist(),
                "loss": metrics["actor/pg_loss"],
                "grad_norm": metrics["actor/grad_norm"],
            }
            | {key: metrics[key] for key in names}
        )
    return {"steps": steps, "end": norms(done["weights"]["policy"])}


@pytest.mark.gloo
@pytest.mark.parametrize("case", quick(CASES, [(name, "dp1") for name in RUNS]), ids=" on ".join)
def test_rows_and_weights_are_the_golden_ones(case):
    name, mesh = case
    golden = json.loads(FILE.read_text())[name]
    run = steps_of(name, mesh)
    for step, expected in zip(run["steps"], golden["steps"], strict=True):
        assert step["tokens"] == expected["tokens"]
        for key, value in expected.items():
            assert step[key] == pytest.approx(value, rel=TOLERANCE, abs=TOLERANCE), key
    assert run["end"] == pytest.approx(golden["end"], rel=TOLERANCE)


def test_the_golden_runs_are_what_they_are_named_after():
    golden = json.loads(FILE.read_text())
    prompts = [step["filter_groups/sampled_prompts"] for step in golden["refills"]["steps"]]
    assert max(prompts) > 8  # the first four, and two rounds of others at least
    assert golden["parts"]["steps"][0]["partial/unfinished_prompts"] > 0
    for name, run in golden.items():
        assert run["steps"][0]["tokens"] != run["steps"][1]["tokens"], name
        assert any(step["grad_norm"] > 0 for step in run["steps"]), name


if __name__ == "__main__":
    golden = {name: steps_of(name, "dp1") for name in RUNS}
    FILE.write_text(json.dumps(golden) + "\n")
