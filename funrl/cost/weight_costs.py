"""Weights in a dry run: those of a rank, of its engine and of one pool's ranks, and the cost of a sync."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping

import torch

from funrl import trees
from funrl.cost.tracing.costs import Costs, Traffic, plus
from funrl.cost.tracing.estimate import MOVES, RESHARD, make_weights, stage_of
from funrl.cost.tracing.hardware import Hardware, op_seconds
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh.buckets import staged_bytes
from funrl.mesh.mesh import AXES
from funrl.mesh.plan import Box, held, received_bytes, volume
from funrl.mesh.reshard import BUCKET_BYTES
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rollout.certificate import DIGEST_PASSES, GPU_PIECE
from funrl.trainer import offload
from funrl.trainer.jobs.job import Job
from funrl.trainer.steps.parts import GeneratingParts, Generator, Parts
from funrl.trainer.steps.roles import Role, bases


def role_weights(tracer: Tracer, job: Job, parts: Parts) -> tuple[trees.Tree, trees.Tree]:
    """Make fake weights of the trained and the frozen roles, both by name."""
    own = {}
    frozen = {}
    for name, role in parts.roles.items():
        if role.loss is not None:
            own[name] = make_weights(tracer, role.stored, job.master)
        elif role.base is None:
            frozen[name] = make_weights(tracer, role.stored, job.dtype)
    return own, frozen


def engine_bytes(job: Job, parts: Parts, generator: Generator) -> tuple[float, float]:
    """Bytes of the engine's own weights, and bytes that it shares with the trainer."""
    own = shared = 0.0
    leaves = ((nbytes, is_shared) for _, nbytes, is_shared in _leaves(job, parts, generator))
    for nbytes, is_shared in itertools.chain(leaves, _base_leaves(job, generator)):
        own, shared = (own, shared + nbytes) if is_shared else (own + nbytes, shared)
    return own, shared


def agent_bytes(job: Job, parts: Parts, pool: str = "") -> float:
    """Bytes of the weights of agents' further models: in their engines, and the copies that a checkpoint holds.

    Args:
      pool: what the rank does: "train", "generate", or "" for both.
    """
    role = parts.roles[parts.main_role]
    copies = sum(declared.every > 0 for declared in job.agents.frozen.values()) if pool in ("", "train") else 0
    nbytes = copies * _local_bytes(role.stored, job.master if role.base is not None else job.dtype)
    if not isinstance(parts, GeneratingParts):
        return nbytes
    engines = parts.generator.further.values()
    return nbytes + sum(_local_bytes(engine.weights.layouts, job.dtype) for engine in engines)


def _local_bytes(layouts: trees.Tree, dtype: torch.dtype) -> float:
    """Bytes of a rank's shards."""
    return float(dtype.itemsize * sum(math.prod(layout.local_shape(0)) for layout in trees.leaves(layouts)))


def resharding(job: Job, parts: Parts, generator: Generator, resting: dict[str, float]) -> Costs:
    """Cost of a sync: the engine's old copy is freed first, and a few buckets are sent at once.

    Weights with merged adapters are temporary: each is freed once it is sent. To an engine that adds adapters to a base
    they alone are sent; the first sync of a run, which sends the base, is not counted.
    """
    engine, _ = engine_bytes(job, parts, generator)
    names = offload.made_weights(parts)
    stored = dict(trees.named(parts.begin.stored))
    merged = job.dtype.itemsize * sum(math.prod(stored[name].local_shape(0)) for name in names)
    most = max(received_bytes(generator.to_engine), default=0)
    weights = resting["weights"] + max(engine, float(merged))
    bucket = max((staged_bytes(route, BUCKET_BYTES) for route in generator.to_engine.routes), default=0)
    peak = resting | {"weights": weights, "staging": float(min(2 * bucket, 2 * most))}
    traffic = {(RESHARD, "all"): Traffic(1, float(most))} if most else {}
    return Costs({"other": peak}, 0.0, 0.0, traffic)


def verifying(job: Job, parts: Parts, generator: Generator, resting: dict[str, float], hardware: Hardware) -> Costs:
    """Cost of digests of the trainer's and of the engine's weights, with one sum over all ranks."""
    mesh = parts.mesh
    seconds = 0.0
    for (old, new), _, is_shared in _leaves(job, parts, generator):
        numbers = sum(volume(box) for box in ([new] if is_shared else [old, new]) if box is not None)
        seconds += DIGEST_PASSES * op_seconds(hardware, 0.0, 8.0 * numbers, torch.int64)
    traffic = {}
    if mesh.world > 1:
        traffic["all_reduce", mesh.group_name(AXES)] = Traffic(1, 40.0 * (1 + len(generator.to_engine.names)))
    return Costs({"other": resting | {"staging": 16.0 * GPU_PIECE}}, 0.0, seconds, traffic)


def _leaves(job: Job, parts: Parts, generator: Generator) -> Iterator[tuple[tuple[Box | None, Box | None], int, bool]]:
    """Boxes of each weight in a sync's plan before and after it, its bytes in the engine, and whether it is shared.

    A shared weight is the trainer's own tensor.
    """
    plan = generator.to_engine
    merged = offload.made_weights(parts)
    own = job.initial_dtype if generator.base is None else job.master
    for name, has, dtype in zip(plan.names, held(plan, 0), plan.dtypes, strict=True):
        nbytes = 0 if has.new is None else volume(has.new) * dtype.itemsize
        yield (has.old, has.new), nbytes, has.old == has.new and dtype == own and name not in merged


def _base_leaves(job: Job, generator: Generator) -> Iterator[tuple[int, bool]]:
    """Bytes in the engine of each weight of a base that adapters are added to, and whether it is shared."""
    if generator.base is None:
        return
    plan = generator.base.to_engine
    for has, dtype in zip(held(plan, 0), plan.dtypes, strict=True):
        yield 0 if has.new is None else volume(has.new) * dtype.itemsize, has.old == has.new and dtype == job.dtype


def without_offloaded(job: Job, parts: Parts, phases: dict[str, Costs], rests: dict[str, float]) -> dict[str, Costs]:
    """Subtract from each phase the bytes that are offloaded while it runs.

    Args:
      rests: bytes of weights and optimizers, by kind.
    """
    stages = offload.frozen_stages(parts.roles)
    itemsize = job.dtype.itemsize
    shared_weights = bases(parts.roles)
    own = {
        name: role
        for name, role in parts.roles.items()
        if role.loss is None and role.base is None and name not in shared_weights
    }
    stored = {name: trees.leaves(role.stored) for name, role in own.items()}
    frozen = {
        name: float(itemsize * sum(math.prod(x.local_shape(0)) for x in layout)) for name, layout in stored.items()
    }
    shared = engine_bytes(job, parts, parts.generator)[1] if isinstance(parts, GeneratingParts) else 0.0
    of_part = {
        "optimizer": {"optimizer": rests["optimizer"]},
        "params": {"weights": rests["weights"] - sum(frozen.values()) - shared},
    }
    away = offload.offloaded_parts(job.settings.devices.offload)
    for name, costs in phases.items():
        stage = "update" if stage_of(name) == "reshard" else stage_of(name)
        stage = "generate" if name == MOVES[0] else stage
        for part in away.difference(offload.NEEDS[stage], ["reference"]):
            costs = plus(costs, {kind: -nbytes for kind, nbytes in of_part[part].items()})
        if "reference" in away:
            gone = sum(nbytes for role, nbytes in frozen.items() if stage not in stages.get(role, {stage}))
            costs = plus(costs, {"weights": -gone})
        phases[name] = costs
    return phases


def pool_phases(
    phases: Mapping[str, Costs],
    parts: Parts,
    dtype: torch.dtype,
    *,
    rests: Mapping[str, float],
    pool: str,
    apart: Collection[str],
) -> dict[str, Costs]:
    """Phases of the ranks of one pool.

    Args:
      phases: of a rank with all roles.
      parts: on its mesh.
      dtype: of the weights of roles that do not learn.
      rests: bytes by kind that it holds between phases.
      pool: what the rank does: "train", "generate" or the name of a role.
      apart: roles, or the judge, on ranks of their own.
    """
    if pool == "train":
        others = sum(stored_bytes(role, dtype) for name, role in parts.roles.items() if name in apart)
        gone = {MOVES[0], *(f"score_{name}" for name in apart)}  # rows come from the other ranks
        return {name: plus(costs, {"weights": -others}) for name, costs in phases.items() if name not in gone}
    own = {kind: -nbytes for kind, nbytes in rests.items()}
    if pool == "generate":
        return {pool: plus(phases[pool], own)}
    own["weights"] += stored_bytes(parts.roles[pool], dtype)
    name = f"score_{pool}"
    return {name: plus(phases[name], own)}


def stored_bytes(role: Role, dtype: torch.dtype) -> float:
    """Bytes of a role's weights that a rank stores, where they do not learn."""
    dtypes = trees.leaves(weight_dtypes(role.placed.stored, dtype))
    layouts = trees.leaves(role.placed.stored)
    return float(sum(math.prod(x.local_shape()) * item.itemsize for x, item in zip(layouts, dtypes, strict=True)))
