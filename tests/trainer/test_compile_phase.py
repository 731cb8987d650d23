"""The compile phase: after it no step compiles anything, it changes nothing, and an equal run finds its code.

Run as a program by its own tests, in a process that may compile.
"""

import functools
import hashlib
import importlib
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from compiled_kernels_cache import share_kernels
from selection import quick
from small_runs import GRPO, MEASURED, PPO, Quiet, begin, scored_batch, small_job

from funrl import trees
from funrl.algos.recipes.dpo import dpo
from funrl.compiled_kernels.kernel_library import cache_folder
from funrl.cost.tracing.hardware import HARDWARE
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh.mesh import single
from funrl.models import compile_layer
from funrl.trainer import loop, phases
from funrl.trainer.compile_phase import compile_ahead, compile_scoring, compile_updates
from funrl.trainer.jobs import build

COMPILED = {"compile": "on", "dtype": "float32", "batch_prompts": 6, "token_budget": 64}


def graphs():
    """Number of graphs that dynamo has compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def enter(run, state, stage):
    return run, state


def digest_of(tree):
    """The bits of all tensors of a tree."""
    tensors = [x for x in trees.leaves(tree) if isinstance(x, torch.Tensor)]
    return hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in tensors)).hexdigest()


def everything(run, state):
    """What the phase may not change: the state, random generators, and the engine."""
    engine = run.parts.generator.engine
    generators = torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()
    weights = dict(engine.held_weights())
    cost = engine.cost()
    return digest_of(state), generators, digest_of(weights), engine.version, cost.pages, cost.used_pages


@pytest.fixture
def by_eager_mode(monkeypatch):
    """Layers are traced as always, and computed by eager mode."""
    torch._dynamo.reset()
    backend = functools.partial(compile_layer, backend="aot_eager")
    monkeypatch.setattr(build, "compile_layer", backend)


@pytest.mark.slow
def test_no_step_compiles_and_the_phase_changes_nothing(by_eager_mode):
    show = Quiet()
    run, state = begin(small_job(PPO, steps=2, **COMPILED), single(), show)
    before = everything(run, state)
    first = graphs()
    run, state, metrics = compile_ahead(run, state, enter)
    assert everything(run, state) == before
    assert metrics == {"compile/variants": graphs() - first} and graphs() - first >= 4
    assert list(run.clock.take()) == ["compile"]
    assert [note for note in show.notes if "variants of a layer in" in note] == show.notes[-1:]
    compiled = graphs()
    for step in (1, 2):
        run.source.evaluate(state.roles, step)
        rows, state, _ = scored_batch(run, state)
        state, _, _ = phases.update_batch(run, state, rows)
    assert graphs() == compiled


def test_an_eager_run_has_no_phase():
    run, state = begin(small_job(GRPO), single())
    assert run.parts.compilations is None and run.compile_cache is None
    assert compile_ahead(run, state, enter) == (run, state, {}) and run.clock.take() == {}


def test_the_first_late_compilation_is_reported():
    notes = []
    compilations = build.Compilations(notes.append)
    compilations.add("compiled one of 2 layers to score 1x8x4 in 0.1 s")
    assert notes == ["compiled one of 2 layers to score 1x8x4 in 0.1 s"]
    with compilations.ahead():
        compilations.add("compiled one of 2 layers to train 1x8x4 in 0.1 s")
    assert len(notes) == 2 and notes[1].startswith("compiled 2 variants of a layer in 0.")
    for size in (8, 9):
        compilations.add(f"compiled one of 2 layers to decode 1x{size}x4 in 0.1 s")
    assert len(notes) == 3 and compilations.variants == 4
    assert notes[2].startswith("compiled one of 2 layers to decode 1x8x4 in 0.1 s, after the compile phase")


@pytest.mark.slow
@pytest.mark.parametrize("compose", quick([PPO, dpo], [PPO]))
def test_the_phase_takes_no_more_memory_than_a_step(compose):
    """Of eager runs, whose operators can be counted: it is asked for the same passes."""
    more = {"task": "arithmetic", "reward": None} if compose is dpo else {}
    run, state = begin(small_job(compose, token_budget=64, **more), single())
    tracer = Tracer(HARDWARE["cpu"], real=True)
    weights = state.roles, run.frozen
    with tracer:
        with tracer.phase("score ahead"):
            compile_scoring(run.job, run.parts, *weights)
        with tracer.phase("update ahead"):
            compile_updates(run.job, run.parts, *weights)
        rows, state, _ = phases.draw_batch(run, state)
        with tracer.phase("score"):
            rows, state, _ = phases.score_batch(run, state, rows)
        with tracer.phase("update"):
            phases.learn_batch(run, state, rows)
    peaks = {name: costs.total for name, costs in tracer.phases.items()}
    assert 0 < peaks["score ahead"] <= max(peaks["score"], peaks["update"])
    assert 0 < peaks["update ahead"] <= peaks["update"]


# --- with inductor, in processes of their own


class Counting(Quiet):
    """An observer that keeps the number of graphs after each step."""

    def __init__(self, folder=None):
        super().__init__(folder)
        self.graphs, self.phases = [], []

    def step(self, step, metrics, seconds):
        super().step(step, metrics, seconds)
        self.graphs.append(graphs())
        self.phases.append(seconds)

    def finish(self, placed, params, error):
        super().finish(placed, params, error)
        self.digest = digest_of(params)


def program(how):
    """Facts of a run of a process."""
    observer = Counting(how.get("folder"))
    outcome = loop.train_loop(job_of(how), single(), observer)
    counters = torch._dynamo.utils.counters["inductor"]
    return {
        "error": outcome.error,
        "notes": [note for note in observer.notes if "compiled" in note],
        "graphs": observer.graphs,
        "variants": [metrics.get("compile/variants") for _, metrics in observer.steps],
        "seconds": [phases.get("compile") for phases in observer.phases],
        "gap": gap_to_eager(how, observer.steps) if how.get("compare") else None,
        "hits": counters["fxgraph_cache_hit"],
        "misses": counters["fxgraph_cache_miss"],
        "digest": observer.digest,
        "files": {file.name: file.stat().st_mtime_ns for file in (cache_folder() / "compiled").iterdir()},
    }


def gap_to_eager(how, steps):
    """How far numbers of steps are from those of an eager run."""
    eager = Quiet()
    loop.train_loop(job_of(how | {"settings": {"compile": "off"}}), single(), eager)
    measured = ("memory/", "time_s/", "perf/", "compile/")
    return max(
        abs(metrics[name] - x) / (1 + abs(x))
        for (_, metrics), (_, plain) in zip(steps, eager.steps, strict=True)
        for name, x in plain.items()
        if not name.startswith(measured) and not name.endswith(MEASURED)
    )


def job_of(how):
    settings = COMPILED | {"steps": 2, "minibatches": 1} | how.get("settings", {})
    return small_job(functools.partial(GRPO, kl_coef=0.0), **settings)


def ran(cache, how):
    """Facts of a run and of its continuation from the first checkpoint; neither finds what torch has compiled before.

    Args:
      cache: XDG_CACHE_HOME.
    """
    share_kernels(cache)
    own = {"XDG_CACHE_HOME": str(cache), "TORCHINDUCTOR_CACHE_DIR": str(cache / "torch")}
    env = os.environ | {"OMP_NUM_THREADS": "1"} | own
    env["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # where this file finds its modules
    command = [sys.executable, __file__, json.dumps(how)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, env=env, check=False)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    assert [fact["error"] for fact in facts] == [None, None]
    return facts


@pytest.mark.slow
def test_a_run_compiles_before_the_first_step_and_a_resumed_run_compiles_nothing_anew(tmp_path):
    kept = {"save_every": "1", "run_dir": str(tmp_path / "run"), "remat": "selective"}
    folder = str(tmp_path / "run" / "checkpoints")
    cold, resumed = ran(tmp_path, {"folder": folder, "settings": kept})
    assert cold["misses"] >= 4 and len(set(cold["graphs"])) == 1
    assert cold["gap"] < 1e-5
    assert cold["variants"] == [cold["graphs"][0], None] and cold["seconds"][1] is None
    assert resumed["misses"] == 0 and resumed["hits"] >= 4 and resumed["variants"] == [resumed["graphs"][0]]
    assert resumed["digest"] == cold["digest"]
    assert cold["files"] == resumed["files"] and len(cold["files"]) == 1


if __name__ == "__main__":
    how = json.loads(sys.argv[1])
    importlib.import_module("torch._inductor.compile_fx")  # what compiles: once here, and not in each process
    facts = []
    for more in ({"compare": True}, {"settings": how["settings"] | {"resume": True}}):
        with multiprocessing.get_context("fork").Pool(1) as processes:
            facts.append(processes.apply(program, [how | more]))
        shutil.rmtree(Path(how["folder"], "step-2"))
        shutil.rmtree(os.environ["TORCHINDUCTOR_CACHE_DIR"])
    print("\n" + json.dumps(facts))
