"""A training step by phase, and its memory beside the dry run's."""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time

import torch
from gpu_parts.models import PIECES, UPDATES, Training, fitting, peak_bytes
from gpu_parts.rows import Bench, Row, Rows, timed_row
from random_trainer import clear_peak, device_rows, random_trainer, resident

from funrl.cost.tracing.estimate import Estimate
from funrl.mesh.mesh import Mesh
from funrl.optim.base import within
from funrl.trainer import phases
from funrl.trainer.jobs.build import build
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.parts import Parts
from funrl.trainer.steps.roles import State

TURNS = 3  # timed steps
TIMED_S = 20.0  # in which no further step is begun


def training_rows(bench: Bench, model: str, tokens: int, row: int) -> Rows:
    """Phases of a step in micro-batches of `tokens`, made of rows of `row` tokens."""
    name = f"{model}, {tokens:,} tokens"
    training, estimate, what = fitting(bench, model, tokens, row)
    if training is None:
        yield Row(name, None, "ms", note=f"left out: {what}")
        return
    seconds, held = measured_step(bench, training)
    plain = training.estimate(bench, remat="none").phases  # what is computed again is not useful
    passes = UPDATES * PIECES
    score = plain["score_policy"].flops
    learned = plain["update_policy"].flops
    update = seconds["update_policy"] - seconds["optimizer"]
    yield timed_row(bench, f"{name}: score a micro-batch", seconds["score_policy"] / passes, score / passes)
    yield timed_row(bench, f"{name}: forward and backward (share: MFU)", update / passes, learned / passes, note=what)
    nbytes = optimizer_bytes(estimate)
    yield timed_row(bench, f"{name}: optimizer", seconds["optimizer"] / UPDATES, 0.0, nbytes)
    yield Row(f"{name}: memory", held / 1e9, "GB", peak_bytes(estimate) / 1e9, note=what)
    yield moved_weights(name, estimate)


def moved_weights(name: str, estimate: Estimate) -> Row:
    """Bytes of weights, gradients and moments that an update moves, as the dry run counts them, and by operator."""
    moved = {name: nbytes / UPDATES / 1e9 for name, nbytes in estimate.phases["update_policy"].weight_bytes.items()}
    by_operator = ", ".join(f"{name} {moved[name]:.1f}" for name in sorted(moved, key=moved.__getitem__, reverse=True))
    return Row(f"{name}: weights moved by an update, predicted", sum(moved.values()), "GB", note=by_operator)


def optimizer_bytes(estimate: Estimate) -> float:
    """Bytes of a step: gradients are read, float32 weights and moments read and written, bfloat16 copies written."""
    return (4.0 * (1 + 2 * 3) + 2.0) * estimate.trained


def measured_step(
    bench: Bench, training: Training, numerics: str = "fast", mesh: Mesh | None = None
) -> tuple[dict[str, float], float]:
    """Median seconds of each phase of a step, after a first one which compiles; and the bytes held at most.

    Args:
      numerics: as --numerics.
      mesh: of the job, on which all ranks make this call; None: this process alone.
    """
    job = training.job(bench)
    mode = training.flags.get("compile") or ("auto" if bench.device.type == "cuda" else "off")
    settings = with_flags(job.settings, compile=mode, device=bench.device.type, numerics=numerics)
    job = dataclasses.replace(job, settings=settings, device=bench.device.type)
    mesh = mesh or Mesh(job.sizes, 0, bench.device)
    clock = Clock(bench.device)
    parts = with_timed_optimizers(build(job, mesh, lambda _: None), clock)
    rows = device_rows(job, parts, training.prompt, training.rows // mesh.size(mesh.row_axes))
    before = held_memory(bench.device)
    trainer, state = random_trainer(job, parts, rows, clock)
    del rows
    reset_peak(bench.device)  # making random weights takes more than holding them
    state, _ = one_step(trainer, state)
    held = peak_memory(bench.device) - before
    steps: list[dict[str, float]] = []
    begin = time.perf_counter()
    least = TURNS if mesh.world > 1 else 1  # ranks run as many steps
    while len(steps) < TURNS and (len(steps) < least or time.perf_counter() - begin < TIMED_S):
        state, seconds = one_step(trainer, state)
        steps.append(seconds)
    return {name: statistics.median(step[name] for step in steps) for name in steps[0]}, held


def one_step(trainer: phases.Trainer, state: State) -> tuple[State, dict[str, float]]:
    """Score the rows and learn from them; seconds by phase."""
    trainer.clock.take()
    rows, state, _ = phases.draw_batch(trainer, state)
    rows, state, _ = phases.score_batch(trainer, state, rows)
    state, _ = phases.learn_batch(trainer, state, rows)
    return state, trainer.clock.take()


def with_timed_optimizers(parts: Parts, clock: Clock) -> Parts:
    """The parts whose optimizers are a phase of the clock, inside of the update's."""
    timed = functools.partial(within, context=lambda grads: clock.phase("optimizer"))
    roles = {
        name: role if role.optimizer is None else role._replace(optimizer=timed(role.optimizer))
        for name, role in parts.roles.items()
    }
    return dataclasses.replace(parts, roles=roles)


def held_memory(device: torch.device) -> int:
    """Bytes held now: by the device's allocator, or resident on the host."""
    gc.collect()
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else resident("VmRSS")


def reset_peak(device: torch.device) -> None:
    """Begin to measure the peak."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        clear_peak()


def peak_memory(device: torch.device) -> int:
    """Bytes held at most since then."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else resident("VmHWM")
