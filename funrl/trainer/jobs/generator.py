"""The engine of a run, and how weights come to it."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import NamedTuple, cast

from funrl import trees
from funrl.asynchrony.leases import LeaseRule
from funrl.mesh.launch import ranks_per_node, submesh, view
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan, plan
from funrl.mesh.pools.channel import Requests
from funrl.models import Model, Placed
from funrl.models.lora import added_adapters, trained_part
from funrl.models.model import Layer, Lora
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rollout.engine import Engine, WeightSpec
from funrl.rollout.engine_abilities import ENGINES
from funrl.rollout.joined.engine import JoinedEngine, LateProof
from funrl.rollout.joined.messages import TrainerFacts
from funrl.rollout.joined.office import Office
from funrl.rollout.joined.shelf import Shelf
from funrl.rollout.joint_engine import JointEngine
from funrl.rollout.native.adapter_engine import AdapterEngine
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.native.loading import native_weights, spec_of_adapter
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sync_proof import SyncProof
from funrl.trainer.jobs.agents import FrozenAgent, open_frozen_agents, open_policies
from funrl.trainer.jobs.engines import MAKERS, EnginePlace, native_options
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.settings.scorers import JUDGE
from funrl.trainer.settings.settings import Settings

BASE_VERSION = 0  # of the weights that adapters stand on


class AdaptedBase(NamedTuple):
    """The engine that has the base of the policy's adapters, and how its weights come to it, once.

    Attributes:
      engine: without adapters.
      to_engine: the plan from the base's stored layouts to the engine's.
    """

    engine: NativeEngine
    to_engine: Plan


class Generator(NamedTuple):
    """The engine, and how the policy's weights come to it.

    Attributes:
      engine: on `mesh`. Where it adds the policy's adapters to a base, its weights are theirs alone.
      to_engine: the plan from the policy's stored layouts to the engine's; where the engine takes merged adapters, from
        those of the weights that these are merged in.
      proof: that the engine holds the weights of the newest sync.
      base: None where the engine's weights are the whole policy.
      frozen: models of agents that do not learn, by name.
      policies: engines of second policies, by their roles.
    """

    engine: Engine
    mesh: Mesh
    to_engine: Plan
    proof: SyncProof
    base: AdaptedBase | None = None
    frozen: Mapping[str, FrozenAgent] = {}
    policies: Mapping[str, NativeEngine | RemoteEngine] = {}

    @property
    def sync_bytes(self) -> int:
        """Bytes of the weights that each sync gives to this rank's engine."""
        weights = self.engine.weights
        rank = max(0, weights.mesh.rank)  # where the engine is on other ranks, of the first of them
        dtypes = trees.leaves(weight_dtypes(weights.layouts, weights.dtype))
        shapes = (layout.local_shape(rank) for layout in trees.leaves(weights.layouts))
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in zip(shapes, dtypes, strict=True))

    @property
    def whole(self) -> Engine:
        """The engine that has a whole model: `engine`, or that of the base."""
        return self.engine if self.base is None else self.base.engine

    @property
    def to_whole(self) -> Plan:
        """The plan from a whole model's stored layouts to those of `whole`."""
        return self.to_engine if self.base is None else self.base.to_engine

    @property
    def further(self) -> dict[str, NativeEngine | RemoteEngine]:
        """The engines of the other models of agents, by name."""
        return {name: agent.engine for name, agent in self.frozen.items()} | dict(self.policies)

    @property
    def serving(self) -> Engine:
        """The engine that answers for all agents; where it is on other ranks, the policy's."""
        others = {name: engine for name, engine in self.further.items() if isinstance(engine, NativeEngine)}
        return JointEngine(self.engine, others) if others else self.engine


def policy_generator(job: Job, placed: Placed, policy: Placed, layer: Layer, note: Callable[[str], None]) -> Generator:
    """Make an engine for the policy, without weights yet. Every rank calls it.

    Args:
      placed: the model that the run begins with.
      policy: the same with adapters, where the policy has some: a native engine adds `added_adapters` to the base, and
        others are merged, as for other engines.
    """
    mesh = generating_mesh(job, placed.mesh)
    if job.settings.devices.joined:
        return _joined_generator(job, mesh, placed)
    if not mesh.here:
        return _remote_generator(job, mesh, placed, policy)
    engine = MAKERS[_engine_name(job, placed.model)].make(job, EnginePlace(placed.model, mesh, layer, note))
    if isinstance(engine, NativeEngine) and (lora := added_adapters(policy.model)):
        return _adapted_generator(job, engine, placed, policy, lora)
    return Generator(engine, mesh, _plan_to(engine.weights, placed.stored, placed.mesh, job), proof=SyncProof())


def _engine_name(job: Job, model: Model) -> str:
    """The engine of a flag; one without pages for a model that has none, which is built but gets no weights."""
    name = job.settings.engines.engine
    if model.pages or ENGINES[name].unpaged:
        return name
    return next(other for other, abilities in ENGINES.items() if abilities.unpaged)


def with_agents(job: RLJob, generator: Generator, layer_of: Callable[[Model], Layer]) -> Generator:
    """The generator with engines of the other models of a job's agents, without weights yet.

    The ranks that train see those of other ranks, but for models of directories, which are never sent.

    Args:
      layer_of: gives the layer that a model is computed with.
    """
    if generator.mesh.here:
        options = native_options(job)
        frozen = open_frozen_agents(job, generator.mesh, options, layer_of)
        return generator._replace(frozen=frozen, policies=open_policies(job, generator.mesh, options, layer_of))
    engine = cast(RemoteEngine, generator.whole)
    remote = functools.partial(RemoteEngine, engine.weights, engine.requests, digests=False)
    sent = {name: declared for name, declared in job.agents.frozen.items() if declared.directory is None}
    return generator._replace(
        frozen={name: FrozenAgent(declared, remote(model=name)) for name, declared in sent.items()},
        policies={name: remote(model=name) for name in job.agents.policies},
    )


def generating_mesh(job: Job, mesh: Mesh) -> Mesh:
    """The mesh to generate on: a view of that to train on, or one of other ranks. Every rank of the run calls it."""
    if job.placement is None:
        return view(mesh, job.generate_sizes)
    return submesh(mesh, job.placement.generate.sizes, job.placement.generate.ranks)


def judging_mesh(job: RLJob, mesh: Mesh, only: str | None) -> Mesh | None:
    """The mesh that the judge writes on; None: this rank is not in it. Called by every rank.

    Args:
      mesh: to train on, or that of the ranks of `only`.
      only: as of `build`.
    """
    assert job.judge is not None
    sizes = job.judge.sizes
    placement = job.placement
    if placement is None:
        meshes = (mesh, generating_mesh(job, mesh))
        return next((own for own in meshes if own.sizes == sizes), None) or view(mesh, sizes)
    if JUDGE in placement.scoring:
        return mesh if only == JUDGE else None
    own = submesh(mesh, sizes, placement.train.ranks)
    return own if own.here else None


def _remote_generator(job: Job, mesh: Mesh, placed: Placed, policy: Placed) -> Generator:
    """The generator of other ranks, as a rank that trains sees it."""
    requests = Requests(placed.mesh)
    digests = job.settings.engines.verify_sync
    lora = added_adapters(policy.model) if job.settings.engines.abilities.adapters else None
    weights = MAKERS[_engine_name(job, placed.model)].weights(placed.model, mesh, job.dtype)
    spec = dataclasses.replace(weights, streamed=False)  # they come by a plan
    engine = RemoteEngine(spec, requests, base=lora is not None, digests=digests)
    to_engine = _plan_to(spec, placed.stored, placed.mesh, job)
    if lora is None:
        return Generator(cast(Engine, engine), mesh, to_engine, proof=SyncProof())
    factors = spec_of_adapter(placed.model, mesh, spec, lora)
    to_factors = _plan_to(factors, trained_part(policy.model, policy.stored), placed.mesh, job)
    adapter = RemoteEngine(factors, requests, digests=digests)
    base = AdaptedBase(cast(NativeEngine, engine), to_engine)
    return Generator(cast(Engine, adapter), mesh, to_factors, proof=SyncProof(), base=base)


def _joined_generator(job: Job, mesh: Mesh, placed: Placed) -> Generator:
    """The generator of other jobs, which take weights as they are stored, adapters merged."""
    names = native_weights(placed.model, mesh, job.dtype).names
    weights = WeightSpec(names, placed.stored, placed.mesh, job.dtype)
    offices = [rank for rank in range(mesh.world) if not Mesh(mesh.sizes, rank).index("tensor")]
    digests = job.settings.engines.verify_sync
    shelf = Shelf(weights, TrainerFacts(dict(trees.named(placed.stored)), job.dtype, offices, digests))
    limit_s = 60.0 * job.settings.waiting.timeout
    office = None
    if mesh.index("tensor") == 0:
        office = Office(LeaseRule(stuck_s=limit_s), shelf)
    engine = JoinedEngine(placed.model.config, mesh, shelf, weights, office, limit_s=limit_s)
    to_engine = plan(placed.stored, placed.stored, weight_dtypes(placed.stored, job.dtype), ranks_per_node())
    return Generator(engine, mesh, to_engine, proof=LateProof())


def _adapted_generator(job: Job, base: NativeEngine, placed: Placed, policy: Placed, lora: Lora) -> Generator:
    """A generator whose engine adds the policy's adapters to the base."""
    engine = AdapterEngine(base, job.main_role, lora)
    to_engine = _plan_to(engine.weights, trained_part(policy.model, policy.stored), placed.mesh, job)
    to_base = AdaptedBase(base, _plan_to(base.weights, placed.stored, placed.mesh, job))
    return Generator(engine, base.weights.mesh, to_engine, proof=SyncProof(), base=to_base)


def _plan_to(weights: WeightSpec, stored: trees.Tree, mesh: Mesh, job: Job) -> Plan:
    """The plan from layouts on a mesh to those of an engine."""
    wanted = weights.layouts
    dtypes = weight_dtypes(wanted, job.dtype)
    if job.placement is None:
        return plan(stored, wanted, dtypes, ranks_per_node())
    return plan(stored, wanted, dtypes, ranks_per_node(), src_ranks=mesh.ranks, dst_ranks=weights.mesh.ranks)


def resumed_proof(settings: Settings, step: int, proof: dict[str, float]) -> dict[str, float]:
    """Metrics of the first sync of a run that goes on, as the run that never stopped has them in its next step.

    That one has reported them already where it evaluated or probed after `step`.
    """
    every = settings.engines.probe_sync_every
    reported = step % settings.evaluation.eval_every == 0 or (every > 0 and step % every == 0)
    return {} if reported else {name: value for name, value in proof.items() if name == "sync/verified"}
