"""Fifty kills of generators, nodes and trainers of a run on Ray, which ends as one that loses nothing.

    .venv-ray/bin/python tests/ray_chaos.py --seed=1 --staleness=0

With --staleness=0 the weights at the end are those of a run without generators. With more each prompt is trained on
once, and engine and trainer agree on the tokens of the newest weights.
"""

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from ray_cluster import open_cluster

sys.path.insert(0, str(Path(__file__).parent / "trainer"))

from small_runs import small_job
from test_ray_generators import killed_run, trained

from funrl import trees
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.trainer.placement.logged import read_groups

KILLS, NODES, TRAINERS = 50, 3, 2


def drawn_events(seed):
    """Something that is lost after each step, by the step; a node starts in the step before it is lost."""
    draws = random.Random(seed)
    events = dict.fromkeys(range(1, KILLS + NODES + 1), "actor")
    for number, place in enumerate(draws.sample(range(2, KILLS // 2), NODES + TRAINERS)):
        events[2 * place] = "trainer" if number < TRAINERS else "node"
        if number >= TRAINERS:
            events[2 * place - 1] = "new node"
    return events


def main():
    """Run it once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--staleness", type=int, default=0)
    given = parser.parse_args()
    events = drawn_events(given.seed)
    settings = {"compose": rollout_is, "minibatches": 1, "eval_every": 10, "steps": len(events) + 2}
    with open_cluster() as cluster, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        begin = time.monotonic()
        _, _, own = trained(small_job(**settings), folder / "plain", cluster)
        late = {"staleness": given.staleness, "save_rollouts": 1} if given.staleness else {}
        _, observer, weights = killed_run(cluster, folder / "run", events, given.seed, **settings, **late)
        if given.staleness:
            log = read_groups(folder / "run")
            positions = [group.position for groups in log.by_step.values() for group in groups]
            assert sorted(positions) == list(range(4 * settings["steps"]))
            assert all(metrics["rollout/logprob_gap_max"] < 1e-12 for _, metrics in observer.steps)
        else:
            assert all(torch.equal(a, b) for a, b in zip(trees.leaves(weights), trees.leaves(own), strict=True))
        lost = [event for event in events.values() if event != "new node"]
        counts = ", ".join(f"{lost.count(event)} {event}s" for event in dict.fromkeys(lost))
        seconds = time.monotonic() - begin
        print(
            f"seed {given.seed}, staleness {given.staleness}: {len(events) + 2} steps, {seconds:.0f} s, lost {counts}"
        )


if __name__ == "__main__":
    main()
