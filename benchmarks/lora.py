"""Peak memory of an update with adapters beside one of all weights, on a CPU.

    python benchmarks/lora.py [--rank=16] [--layers=12] [--embed=768] [--dtype=float32]

A GRPO job of layers of 768 (random weights, 4 rows of 128 tokens). For each of the two a process of its own learns from
two batches with the trainer's own functions. What is measured is the growth of its resident memory, from before
the first weight to the highest point of the second update; memory that is freed goes back to the system at once.
Both hold a reference: a copy of all weights, or the base.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from absl import app, flags
from random_trainer import alone, clear_peak, resident

from funrl import trees
from funrl.algos import grpo
from funrl.cost import dry_run
from funrl.cost.rows import full_rows
from funrl.cost.tracing.hardware import HARDWARE
from funrl.mesh.mesh import single
from funrl.models import with_fields
from funrl.models.lora import with_lora
from funrl.trainer import phases
from funrl.trainer.jobs.build import build, first_state, first_weights, frozen_weights
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.settings import settings_of
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.clock import Clock

PROMPT, NEW, ROWS = 64, 64, 4
RANK = flags.DEFINE_integer("rank", 16, "rank of the adapters", lower_bound=1)
LAYERS = flags.DEFINE_integer("layers", 12, "of the model", lower_bound=1)
EMBED = flags.DEFINE_integer("embed", 768, "model width; heads have 64", lower_bound=64)
DTYPE = flags.DEFINE_enum("dtype", "float32", ["float32", "bfloat16"], "what forward passes compute in")


def job_of(adapters: bool) -> Job:
    settings = settings_of(
        batch_prompts=ROWS // 2,
        samples_per_prompt=2,
        max_new_tokens=NEW,
        token_budget=512,
        minibatches=1,
        dtype=DTYPE.value,
        remat="full",
        lora_rank=RANK.value if adapters else None,
    )
    job = dry_run.plain_job(settings, grpo(kl_coef=0.04), HARDWARE["cpu"].memory)
    heads = EMBED.value // 64
    sizes = {"vocab": 8192, "embed": EMBED.value, "heads": heads, "kv_heads": heads, "head": 64, "mlp": 4 * EMBED.value}
    model = job.model.rebuild(with_fields(job.model.config, layers=LAYERS.value, max_positions=PROMPT + NEW, **sizes))
    adapted = model if job.lora is None else with_lora(model, job.lora)
    return dataclasses.replace(
        job, model=model, models={name: adapted if name == "policy" else model for name in job.models}
    )


def measure(adapters: bool) -> dict[str, float]:
    """Numbers that learn, and bytes at the highest point and at rest."""
    job = job_of(adapters)
    a = torch.randn(64, 64, requires_grad=True)  # what the libraries take for themselves comes first
    torch.nn.functional.silu(a @ a).sum().backward()
    parts = build(job, single(), lambda _: None)
    rows = [full_rows(job, parts, PROMPT, ROWS) for _ in range(2)]
    clear_peak()
    before = resident("VmRSS")
    generator = torch.Generator().manual_seed(0)
    base = job.master if job.lora is None else job.dtype
    begin = trees.map(lambda x: (torch.randn(x.shape, generator=generator) * 0.02).to(base), job.model.shapes)
    weights = first_weights(job, parts, begin)
    del begin
    state = first_state(job, parts, weights, ())
    no_source = Source(dict, lambda state, step: (rows.pop(), state, {}), lambda roles, step: {}, has_digests=False)
    trainer = phases.Trainer(job, parts, no_source, frozen_weights(parts, weights), Clock())
    del weights
    for _ in range(2):
        drawn, state, _ = phases.draw_batch(trainer, state)
        drawn, state, _ = phases.score_batch(trainer, state, drawn)
        clear_peak()
        rests = resident("VmRSS") - before
        state, _ = phases.learn_batch(trainer, state, drawn)
    return {"trained": trees.count(state.roles["policy"].params), "rest": rests, "peak": resident("VmHWM") - before}


def main(_: list[str]) -> None:
    found = {what: alone(functools.partial(measure, what == "adapters")) for what in ("all", "adapters")}
    print("| what learns | numbers | at rest, MB | peak of an update, MB | of all weights' |")
    print("|---|---|---|---|---|")
    for what, one in found.items():
        name = "all weights" if what == "all" else f"adapters of rank {RANK.value}"
        cells = f"{one['trained'] / 1e6:.1f} M", f"{one['rest'] / 1e6:.0f}", f"{one['peak'] / 1e6:.0f}"
        print(f"| {name} | {' | '.join(cells)} | {one['peak'] / found['all']['peak']:.2f} |")


if __name__ == "__main__":
    app.run(main)
