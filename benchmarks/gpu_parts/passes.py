"""Kernels of a decoding pass by the profiler: how many, for how long the device is busy, and for how long it waits."""

from __future__ import annotations

import collections
from typing import NamedTuple

import numpy as np
import torch
from gpu_parts.decoding import DTYPE, Generation, key_value_bytes, native, work_of
from gpu_parts.models import model_of, random_weights
from gpu_parts.rows import Bench, Row, Rows, now, roofline_seconds

from funrl import trees
from funrl.models import Model
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.requests import Request, request_seed
from funrl.rollout.sampling_parameters import Sampling

WARM = 6  # passes after the prompts before the profile
PROFILED = 8  # passes
FIRST = 1 << 20  # number of the first request of a profile
LARGEST = 4  # kernels that are named


class Census(NamedTuple):
    """Kernels of a pass; operators on a CPU.

    Attributes:
      count: of a pass.
      busy_s: seconds of a pass in which they run.
      largest: those that take longest, with their counts and milliseconds.
    """

    count: float
    busy_s: float
    largest: str


def pass_rows(bench: Bench) -> Rows:
    """Kernels, busy and idle time of a decoding pass of few and of many rows."""
    work = work_of(bench)
    model = model_of(work.model)
    engine = native(bench, model, static=True)
    engine.load(engine.weights.named(random_weights(model, bench.device, DTYPE)))
    for rows in work.rows:
        complete(engine, requests(model, work, rows, 0))  # captures
        yield from census_rows(bench, engine, work, rows)


def census_rows(bench: Bench, engine: NativeEngine, work: Generation, rows: int) -> Rows:
    """Rows of the table for one number of rows."""
    model = engine.model
    begin_decoding(engine, model, work, rows)
    begin = now(bench.device)
    for _ in range(PROFILED):
        engine.step()
    wall_s = (now(bench.device) - begin) / PROFILED
    census = census_of(bench, engine)
    engine.cancel(range(FIRST, FIRST + rows))
    weights = trees.count(model.shapes)
    tokens = work.prompt + WARM + PROFILED
    nbytes = 2.0 * weights + rows * tokens * key_value_bytes(model)
    bound = 1e3 * roofline_seconds(bench.hardware, 2.0 * weights * rows, nbytes)
    label = f"decoding pass, {work.model}, {rows} rows"
    yield Row(f"{label}: kernels", census.count, "kernels", note=census.largest)
    yield Row(f"{label}: busy", 1e3 * census.busy_s, "ms", bound, nbytes=nbytes)
    yield Row(f"{label}: idle", 1e3 * max(0.0, wall_s - census.busy_s), "ms", note=f"of {1e3 * wall_s:.3g} ms")


def begin_decoding(engine: NativeEngine, model: Model, work: Generation, rows: int) -> None:
    """Submit requests, and step until all of them decode."""
    prefilled = engine.cost().prefilled + rows * work.prompt
    engine.submit(requests(model, work, rows, FIRST))
    while engine.cost().prefilled < prefilled:
        engine.step()
    for _ in range(WARM):
        engine.step()


def requests(model: Model, work: Generation, rows: int, first: int) -> list[Request]:
    """Requests whose completions outlast a profile."""
    prompts = np.random.default_rng(first).integers(3, model.config.vocab, (rows, work.prompt)).tolist()
    sampling = Sampling(max_new_tokens=4 * (WARM + PROFILED))
    return [Request(first + i, prompt, sampling, request_seed(1, first + i)) for i, prompt in enumerate(prompts)]


def census_of(bench: Bench, engine: NativeEngine) -> Census:
    """Profile some passes."""
    gpu = bench.device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU] + [torch.profiler.ProfilerActivity.CUDA] * gpu
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(PROFILED):
            engine.step()
        now(bench.device)
    kind = torch.autograd.DeviceType.CUDA if gpu else torch.autograd.DeviceType.CPU
    counts: collections.Counter[str] = collections.Counter()
    spans: collections.Counter[str] = collections.Counter()
    for event in profile.events() or ():
        if event.device_type == kind:
            counts[event.name] += 1
            spans[event.name] += event.time_range.elapsed_us() if gpu else event.self_cpu_time_total
    largest = ", ".join(
        f"{counts[name] / PROFILED:.3g} x {name[:40]}: {span / 1e3 / PROFILED:.3g} ms"
        for name, span in spans.most_common(LARGEST)
    )
    return Census(sum(counts.values()) / PROFILED, sum(spans.values()) / 1e6 / PROFILED, largest)
