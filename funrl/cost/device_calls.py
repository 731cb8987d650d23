"""Kernel launches and copied bytes of a micro-batch and of a decoding iteration, by the functions of a run."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch

from funrl import trees
from funrl.cost.decoding import own_prompts
from funrl.cost.full_rows import full_rows, score_or_fill, written_fields
from funrl.cost.row_pictures import assumed_prompt, encode_pictures, owned_bytes, with_assumed_pictures
from funrl.cost.row_plan import rows_of_step
from funrl.cost.tracing.costs import UPDATES
from funrl.cost.tracing.device_counter import DEVICE, DeviceCalls, DeviceCounter, calls_along
from funrl.cost.tracing.estimate import FieldShapes, TracedClock, of_all_layers, pretended, rows_of_a_pass
from funrl.mesh.mesh import Mesh
from funrl.models.model import Lora
from funrl.models.weight_dtypes import weight_dtype
from funrl.rollout.engine import WeightSpec
from funrl.rollout.native.device.captured import CapturedFunctions, Compute
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.rollout.requests import Request
from funrl.trainer import phases
from funrl.trainer.jobs.build import build, first_state
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.settings.settings import scoring_budget, with_flags
from funrl.trainer.sources.source import Source
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import mapped

DECODE = "generate: a decoding iteration"
ENCODE = "generate: the pictures of a prompt"
PICTURES = "the pictures of a step's rows"
AS_GRAPH = "generate: the same as a CUDA graph"
WARM = 3  # iterations after which nothing is new: a prefill, the first decoding and one more
PROMPT = 2  # tokens of a prompt that is decoded
ADAPTER = "policy"


def device_calls(job: Job, tokens: int) -> dict[str, DeviceCalls]:
    """Calls of one rank by name: of a micro-batch in each phase, of what else an update does, of decoding.

    Args:
      job: by `plain_job`, with its judge left out.
      tokens: of a prompt or text.

    Raises:
      RuntimeError: the program reads numbers of the device that the host does not know.
    """
    with pretended(job.sizes) as mesh:
        mesh = dataclasses.replace(mesh, device=DEVICE)
        return of_all_layers(job, lambda shallow: _calls(shallow, mesh, tokens), calls_along)


def _calls(job: Job, mesh: Mesh, tokens: int) -> dict[str, DeviceCalls]:
    parts = build(job, mesh, lambda _: None)
    once = dataclasses.replace(job, settings=with_flags(job.settings, epochs=1, minibatches=1))
    calls = training_calls(once, with_assumed_pictures(job, parts, tokens), tokens)
    if nbytes := sum(owned_bytes(job, tokens)):
        rows = math.ceil(rows_of_step(job) / mesh.size(mesh.row_axes))
        calls[PICTURES] = DeviceCalls(to_device=rows * nbytes)
    if (
        isinstance(job, RLJob)
        and isinstance(parts, GeneratingParts)
        and isinstance(parts.generator.whole, NativeEngine)
    ):
        added = None if parts.generator.base is None else job.lora
        calls |= decoding_calls(job, parts.generator.whole, added) | encoding_calls(job, parts.generator.whole, tokens)
    return calls


def training_calls(job: Job, parts: Parts, tokens: int) -> dict[str, DeviceCalls]:
    """Calls of a micro-batch in each phase that has some, and of the rest of an update."""
    width = int(full_rows(job, parts, tokens, 1).lengths.max())
    calls = {}
    written = None
    for phase, budget in (("score_", scoring_budget(job.settings)), (UPDATES, job.settings.updates.token_budget)):
        piece = rows_of_a_pass(budget, width, parts.mesh)
        learns = phase == UPDATES
        single, double = (step_calls(job, parts, tokens, rows, learns, written) for rows in (piece, 2 * piece))
        written = single.written
        for name in (name for name in single.phases if name.startswith(phase)):
            once, twice = single.phases[name], double.phases[name]
            calls[f"{name}: a micro-batch"] = calls_along(DeviceCalls(), (twice, 1), (once, -1))
            if learns:
                calls[f"{name}: the rest of an update"] = calls_along(DeviceCalls(), (once, 2), (twice, -1))
    return calls


class StepCalls(NamedTuple):
    """Calls of a step by phase, and the fields that roles have written in it."""

    phases: dict[str, DeviceCalls]
    written: FieldShapes


def step_calls(
    job: Job, parts: Parts, tokens: int, local: int, learns: bool = True, written: FieldShapes | None = None
) -> StepCalls:
    """Count a step by phase.

    Args:
      job: of the run, with one update a step.
      parts: on `DEVICE`.
      tokens: of a prompt or text.
      local: rows of each rank.
      learns: update the weights; False: only score the rows.
      written: as in `score_or_fill`.
    """
    counter = DeviceCounter()
    rows = mapped(full_rows(job, parts, tokens, local), counter.put)
    own = {}
    frozen = {}
    for name, role in parts.roles.items():
        if role.loss is not None:
            own[name] = empty_weights(role.stored, job.master)
        elif role.base is None:
            frozen[name] = empty_weights(role.stored, job.dtype)
    source = Source(dict, lambda state, step: (rows, state, {}), lambda roles, step: {})
    trainer = phases.Trainer(job, dataclasses.replace(parts, agents={}), source, frozen, TracedClock(counter))
    first = max(role.first_step for role in parts.roles.values()) - 1
    state = first_state(job, parts, own, ())._replace(step=first)
    with counter:
        drawn, state, _ = phases.draw_batch(trainer, state)
        drawn, state = score_or_fill(trainer, state, drawn, written, functools.partial(torch.empty, device=DEVICE))
        if learns:
            phases.learn_batch(trainer, state, drawn)
    return StepCalls(counter.phases, written_fields(parts, drawn))


def empty_weights(stored: trees.Tree, dtype: torch.dtype) -> trees.Tree:
    """Rank 0's weights on the device."""
    return trees.map(lambda layout: torch.empty(layout.local_shape(0), dtype=dtype, device=DEVICE), stored)


class _ReplayedFunctions(CapturedFunctions):
    """Functions whose calls are counted as a phase, for a graph of them is one launch."""

    def __init__(self, mesh: Mesh, counter: DeviceCounter):
        super().__init__(mesh)
        self._counter = counter

    def run(self, key, compute: Compute):
        with self._counter.phase("graph"):
            return compute()


def decoding_calls(job: RLJob, built: NativeEngine, lora: Lora | None = None) -> dict[str, DeviceCalls]:
    """Calls of an iteration in which no sequence begins, ends or takes a new page; as a graph if it can be one.

    Args:
      job: of the run.
      built: its engine, on `DEVICE`, which decodes there as on a CPU.
      lora: the adapter of all sequences; None: they have none.
    """
    mesh = built.weights.mesh
    rows = min(job.settings.engines.decode_rows, own_prompts(job, mesh) * job.sampling.samples)
    speculate = job.settings.engines.speculate
    options = NativeOptions(rows, cache_bytes=1 << 62, packed=False, speculate=speculate, static=True)
    engine = native_engine(built.model, mesh, job.dtype, options)
    engine.load(_empty_weights(engine.weights))
    if lora is not None:
        engine.load_adapter(ADAPTER, lora, _empty_weights(engine.adapter_weights(lora)))
    counter = DeviceCounter()
    if engine._static is not None:
        engine._static._graphs = _ReplayedFunctions(mesh, counter)
    sampling = dataclasses.replace(job.sampling, max_new_tokens=4 * WARM, stop=(), stop_strings=(), samples=1)
    with counter:
        adapter = None if lora is None else ADAPTER
        engine.submit([Request(i, [1] * PROMPT, sampling, i, adapter=adapter) for i in range(rows)])
        for _ in range(WARM):
            engine.step()
        counter.phases.clear()
        with counter.phase(DECODE):
            engine.step()
    calls = {DECODE: counter.phases[DECODE]}
    graph = counter.phases.get("graph")
    if graph is not None:
        calls[AS_GRAPH] = calls[DECODE]._replace(launches=calls[DECODE].launches - graph.launches + 1)
    return calls


def encoding_calls(job: RLJob, built: NativeEngine, tokens: int) -> dict[str, DeviceCalls]:
    """Calls of the states of a prompt's pictures, which an engine computes once; none where prompts have no pictures.

    Args:
      job: of the run.
      built: its engine, on `DEVICE`.
      tokens: of a prompt.
    """
    counter = DeviceCounter()
    with counter, torch.no_grad():
        request = assumed_prompt(job, tokens)
        if request is None:
            return {}
        with counter.phase(ENCODE):
            encode_pictures(built.model, empty_weights(built.weights.layouts, job.dtype), request)
    return {ENCODE: counter.phases[ENCODE]}


def _empty_weights(spec: WeightSpec) -> Iterator[tuple[str, torch.Tensor]]:
    """Weights without numbers, as an engine takes them."""
    for name, layout in trees.named(spec.layouts):
        yield name, torch.empty(layout.local_shape(spec.mesh.rank), dtype=weight_dtype(name, spec.dtype), device=DEVICE)
