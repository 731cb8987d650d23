"""The compiled layer in the whole program. Run as a program by its own test, in a process that may compile."""

import json
import os
import subprocess
import sys

import pytest
import torch
from small_runs import begin, gradients, relative, scored_batch, small_job

from funrl.mesh.mesh import single
from funrl.trainer.jobs.build import sync
from funrl.trainer.loop import learn_batch

STEPS = 4
WARMUP = 2  # steps after which nothing more is compiled


def some_steps(mode):
    """Batches, gradients and metrics of some steps, the first of which evaluates; graphs compiled after each."""
    job = small_job(compile=mode, dtype="float32", batch_prompts=6, token_budget=64, lr=1e-3, steps=STEPS)
    run, state = begin(job, single())
    done, graphs = [], []
    for step in range(1, STEPS + 1):
        if step in (1, STEPS):
            run.source.evaluate(state.roles, step)
        batch, state, metrics = scored_batch(run, state)
        grads = gradients(run, state, batch, token_budget=64 + 32 * step)  # micro-batches of other sizes
        state, learned = learn_batch(run, state, batch)
        state = sync(run.parts, state)
        done.append((batch.batch, grads, metrics | learned))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return done, graphs


def compare():
    plain, none = some_steps("off")
    compiled, graphs = some_steps("on")
    gaps = []
    for (batch, grads, metrics), (other, others, more) in zip(compiled, plain, strict=True):
        assert torch.equal(batch.tokens, other.tokens)
        gaps += [relative(grads[name].tree, others[name].tree) for name in others]
        gaps += [abs(metrics[k] - more[k]) / (1 + abs(more[k])) for k in more]
    return {"gap": max(gaps), "plain": none, "graphs": graphs}


@pytest.mark.slow
def test_compiled_and_plain_runs_have_equal_numbers_and_nothing_is_compiled_after_warm_up():
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=900, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["gap"] < 1e-5
    assert set(said["plain"]) == {0}
    assert 3 <= said["graphs"][0] <= 8  # prefill, decode, score, train, and some with one row
    assert said["graphs"][-1] == said["graphs"][WARMUP - 1]


if __name__ == "__main__":
    print(json.dumps(compare()))
