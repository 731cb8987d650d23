"""The dry run's memory against the resident memory of real runs on CPU.

    python benchmarks/dry_run_memory.py [--shapes=5M,20M,60M,5M/dp2,tp2]

For each shape a process scores and learns from one batch with the trainer's own functions; the growth of its resident
memory, from before the first weight to the highest point, stands beside the estimate of the dry run. Memory that is
freed goes back to the system at once, so that what is measured is what is used.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import sys

import torch
from random_trainer import alone, clear_peak, device_rows, random_trainer, resident

from funrl.algos import ppo
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh import launch
from funrl.mesh.mesh import Mesh
from funrl.models import with_fields, with_value_head
from funrl.trainer import phases
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.steps.clock import Clock

PROMPT, NEW = 64, 64
SHAPES = {  # sizes, completions of a step, tokens of a micro-batch
    "1M": ({"vocab": 1024, "embed": 128, "layers": 4, "heads": 2, "kv_heads": 2, "head": 64, "mlp": 512}, 16, 1024),
    "5M": ({"vocab": 4096, "embed": 256, "layers": 4, "heads": 4, "kv_heads": 4, "head": 64, "mlp": 1024}, 64, 4096),
    "20M": ({"vocab": 2048, "embed": 512, "layers": 6, "heads": 8, "kv_heads": 8, "head": 64, "mlp": 1536}, 32, 2048),
    "60M": ({"vocab": 2048, "embed": 768, "layers": 8, "heads": 12, "kv_heads": 4, "head": 64, "mlp": 2304}, 16, 1024),
}


def main() -> None:
    shapes = ["5M", "20M", "60M", "5M/dp2,tp2"]
    if len(sys.argv) > 1:
        shapes = re.findall(r"\d+M(?:/\w+(?:,[a-z]+\d+)*)?", sys.argv[1].removeprefix("--shapes="))
    print("| model | mesh | estimate, MB | of it activations and logits, MB | resident growth, MB | error |")
    print("|---|---|---|---|---|---|")
    for shape in shapes:
        real = alone(functools.partial(measure, shape))
        job = job_of(shape)
        found = dry_run.estimate(job, PROMPT, HARDWARE["cpu"])
        trained = [costs for name, costs in found.phases.items() if name != "generate"]
        worst = max(trained, key=lambda costs: costs.total)
        passing = worst.peak.get("activations", 0) + worst.peak.get("logits", 0)
        mesh = job.settings.devices.mesh
        cells = (f"{found.parameters / 1e6:.1f} M", mesh, f"{worst.total / 1e6:.0f}", f"{passing / 1e6:.0f}")
        print(f"| {' | '.join(cells)} | {real / 1e6:.0f} | {100 * (worst.total / real - 1):+.1f} % |", flush=True)


def job_of(shape: str) -> Job:
    """A PPO job of random weights."""
    name, _, mesh = shape.partition("/")
    sizes, rows, budget = SHAPES[name]
    mesh = mesh or "dp1"
    settings = settings_of(
        mesh=mesh,
        generate_mesh=mesh,
        batch_prompts=rows // 2,
        samples_per_prompt=2,
        max_new_tokens=NEW,
        token_budget=budget,
        minibatches=1,
    )
    job = dry_run.plain_job(settings, ppo(), HARDWARE["cpu"].memory)
    model = job.model.rebuild(with_fields(job.model.config, max_positions=PROMPT + NEW, **sizes))
    valued = with_value_head(model)
    models = {name: valued if one.unembed is None else model for name, one in job.models.items()}
    return dataclasses.replace(job, model=model, models=models)


def measure(shape: str) -> int:
    """Growth of this process, or of rank 0's, in bytes."""
    job = job_of(shape)

    def program(mesh: Mesh) -> int:
        a = torch.randn(64, 64, requires_grad=True)  # what the libraries take for themselves comes first
        torch.nn.functional.silu(a @ a).sum().backward()
        parts = build(job, mesh, lambda _: None)
        ranks = mesh.size(mesh.row_axes)
        rows = device_rows(job, parts, PROMPT, SHAPES[shape.partition("/")[0]][1] // ranks)
        clear_peak()
        before = resident("VmHWM")
        trainer, state = random_trainer(job, parts, rows, Clock())
        del rows
        drawn, state, _ = phases.draw_batch(trainer, state)
        drawn, state, _ = phases.score_batch(trainer, state, drawn)
        phases.learn_batch(trainer, state, drawn)
        return resident("VmHWM") - before

    return launch.launch(program, job.sizes, "cpu")


if __name__ == "__main__":
    main()
