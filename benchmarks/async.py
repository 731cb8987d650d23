"""Steps a minute of runs whose ranks train or generate, by staleness, beside one whose ranks do both; on two cores.

    OMP_NUM_THREADS=1 python benchmarks/async.py
    OMP_NUM_THREADS=1 python benchmarks/async.py --staleness=0,1 --seconds=1.0 --spread=1.5 --turns=5
    ray start --head --num-cpus=1 && OMP_NUM_THREADS=1 python benchmarks/async.py --ray

An environment answers each completion after a lognormal time, as a tool or a test would, and takes no processor
meanwhile. The model is that of the embedded task, with two processes in each run: both do both ("shared", on dp2), or
one trains and one generates: a rank ("split"), or with --ray an actor on a Ray cluster too. The runs take turns, and
each line has the median over the turns of the steps a minute after the first ones, and its ratio to the shared run's of
the same turn. Ages and waiting seconds are means over these steps, where a run has such metrics.
"""

from __future__ import annotations

import asyncio
import math
import random
import statistics
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from absl import app, flags

import funrl
from funrl.data.prompts import Example
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import Policy

STALENESS = flags.DEFINE_list("staleness", ["0", "1", "2", "4"], "of the split runs")
RAY = flags.DEFINE_bool("ray", False, "split runs on the Ray cluster of RAY_ADDRESS, or of this machine, too")
SECONDS = flags.DEFINE_float("seconds", 0.3, "median of an answer of the environment")
SPREAD = flags.DEFINE_float("spread", 1.0, "deviation of its logarithm")
STEPS = flags.DEFINE_integer("steps", 16, "of each run; the first quarter is not measured", lower_bound=4)
PROMPTS = flags.DEFINE_integer("prompts", 16, "of a step", lower_bound=1)
SAMPLES = flags.DEFINE_integer("samples", 8, "of each prompt", lower_bound=1)
TURNS = flags.DEFINE_integer("turns", 3, "times that each run takes its turn", lower_bound=1)
SEEN = ("age/mean", "age/max", "wait/trainer_s", "wait/generator_s")


class SlowAnswers:
    """An environment of one reply, whose answer takes a lognormal time that the seed decides.

    Attributes:
      median_s, spread: of the time.
    """

    def __init__(self, median_s: float, spread: float) -> None:
        self.median_s = median_s
        self.spread = spread

    def prompts(self, seed: int) -> list[dict[str, str]]:
        """Products of two numbers, as in the embedded task."""
        return [{"prompt": f"{i % 97}*{i % 89}="} for i in range(seed, seed + 1000)]

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        _, trajectory = await policy.sample(policy.start(example.tokens))
        await asyncio.sleep(random.Random(seed).lognormvariate(math.log(self.median_s), self.spread))
        return Episode([trajectory], {"policy": float(trajectory.leaf.tokens[0] % 2)})


class Measured(NamedTuple):
    """One run.

    Attributes:
      steps_per_minute: after the first steps.
      seen: means of metrics over these steps.
    """

    steps_per_minute: float
    seen: dict[str, float]


def measure(**placed: Any) -> Measured:
    """A run with these flags."""
    with tempfile.TemporaryDirectory() as folder:
        result = funrl.train(
            "rollout_is",
            env=SlowAnswers(SECONDS.value, SPREAD.value),
            run_dir=str(Path(folder) / "run"),
            steps=STEPS.value,
            batch_prompts=PROMPTS.value,
            samples_per_prompt=SAMPLES.value,
            warmstart_steps=0,
            minibatches=1,
            eval_every=STEPS.value,
            eval_prompts=1,
            device="cpu",
            **placed,
        )
    steps = result.metrics[STEPS.value // 4 : -1]  # the last one evaluates
    seen = {name: statistics.fmean(step[name] for step in steps) for name in SEEN if name in steps[0]}
    return Measured(60 / statistics.fmean(step["time_s/step"] for step in steps), seen)


def main(argv: list[str]) -> None:
    del argv
    runs: dict[str, dict[str, Any]] = {"shared, S=0": {"mesh": "dp2"}}
    pools = {"split": "dp1"} | ({"ray": "ray1"} if RAY.value else {})
    for name, pool in pools.items():
        for text in STALENESS.value:
            runs[f"{name}, S={int(text)}"] = {"place": f"train:dp1 generate:{pool}", "staleness": int(text)}
    measured: dict[str, list[Measured]] = {name: [] for name in runs}
    for _ in range(TURNS.value):
        for name, placed in runs.items():
            measured[name].append(measure(**placed))
    print(f"{'':12} {'steps/min':>10} {'ratio':>6} {'lowest':>7} {'highest':>8} " + " ".join(f"{x:>16}" for x in SEEN))
    for name, turns in measured.items():
        ratios = [
            own.steps_per_minute / shared.steps_per_minute
            for own, shared in zip(turns, measured["shared, S=0"], strict=True)
        ]
        median = statistics.median(turn.steps_per_minute for turn in turns)
        numbers = f"{median:10.1f} {statistics.median(ratios):6.2f} {min(ratios):7.2f} {max(ratios):8.2f}"
        print(f"{name:12} {numbers} " + " ".join(_mean(turns, x) for x in SEEN))


def _mean(turns: list[Measured], metric: str) -> str:
    values = [turn.seen[metric] for turn in turns if metric in turn.seen]
    return f"{statistics.fmean(values):16.2f}" if values else f"{'-':>16}"


if __name__ == "__main__":
    app.run(main)
