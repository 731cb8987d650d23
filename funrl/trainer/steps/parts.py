"""Meshes, roles and engines of a run: what is made once, before its first step."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from funrl import trees
from funrl.environments.agents import FrozenModel
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan
from funrl.models import Model, Placed
from funrl.models.compiling.compile import Compilations
from funrl.models.weight_dtypes import weight_dtypes
from funrl.rewards.pool import Pool
from funrl.rollout.engine import Engine
from funrl.rollout.joint_engine import JointEngine
from funrl.rollout.native.engine import NativeEngine
from funrl.rollout.remote.engine import RemoteEngine
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.sync_proof import SyncProof
from funrl.trainer.steps.remote_scores import RemoteRewards, RemoteScorer
from funrl.trainer.steps.roles import Role


class AdaptedBase(NamedTuple):
    """The engine that has the base of the policy's adapters, and the plan of its weights, which it gets once.

    Attributes:
      engine: without adapters.
      placed: the model that the engine has.
      make_plan: () -> the plan from the base's stored layouts to the engine's, made once.
    """

    engine: Engine
    placed: Placed
    make_plan: Callable[[], Plan]

    @property
    def to_engine(self) -> Plan:
        """The plan from the base's stored layouts to the engine's."""
        return self.make_plan()


class FrozenAgent(NamedTuple):
    """A frozen model on its devices.

    Attributes:
      declared: source of its weights, and when they change.
      engine: generates with them, on these ranks or, as a client sees it, on others.
    """

    declared: FrozenModel
    engine: NativeEngine | RemoteEngine


class Generator(NamedTuple):
    """The engine, and the plans by which the policy's weights come to it.

    Attributes:
      engine: on `mesh`. Where it adds the policy's adapters to a base, its weights are theirs alone.
      mesh: its "tensor" ranks are those of a replica; the engine's weights may be split over other axes of these ranks.
      make_plan: () -> the plan from the policy's stored layouts to the engine's, made once; where the engine takes
        merged adapters, from those of the weights that these are merged in.
      proof: that the engine holds the weights of the newest sync.
      base: None where the engine's weights are the whole policy.
      frozen: models of agents that do not learn, by name.
      policies: engines of second policies, by their roles.
    """

    engine: Engine
    mesh: Mesh
    make_plan: Callable[[], Plan]
    proof: SyncProof
    base: AdaptedBase | None = None
    frozen: Mapping[str, FrozenAgent] = {}
    policies: Mapping[str, NativeEngine | RemoteEngine] = {}

    @property
    def to_engine(self) -> Plan:
        """The plan by which the policy's weights come to the engine."""
        return self.make_plan()

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


class JudgeJob(NamedTuple):
    """A judge, checked and ready to be loaded.

    Attributes:
      directory, model, tokenizer: of the judge.
      template: text with {{prompt}}, {{completion}} and names of fields.
      pattern: compiled; its last match in a verdict holds the score.
      sampling: of a verdict.
      sizes: axis sizes of the mesh that it generates on.
    """

    directory: str
    model: Model
    tokenizer: Any
    template: str
    pattern: Any
    sampling: Sampling
    sizes: dict[str, int]


class Judge(NamedTuple):
    """A judge on its devices.

    Attributes:
      job: its configuration.
      engine: with the judge's weights; paused between verdicts.
      mesh: of the engine.
    """

    job: JudgeJob
    engine: Engine
    mesh: Mesh


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Meshes, roles and functions that are made once.

    Attributes:
      mesh: to train on.
      begin: the model that the run begins with.
      main_role: name of the role that takes over the weights of `begin`, and generates if anything is generated.
      roles: by name; roles that learn are in the order of the algorithm's losses.
      compilations: of the layers of all models; None where no layer is compiled.
      agents: of each role that sees only some agents' rows, the numbers of these agents.
      judge: None where no model writes verdicts on these ranks.
      remote_scorers: roles on ranks of their own, by name; they are not among `roles`.
    """

    mesh: Mesh
    begin: Placed
    main_role: str
    roles: Mapping[str, Role]
    compilations: Compilations | None = None
    agents: Mapping[str, Collection[int]] = field(default_factory=dict)
    judge: Judge | None = None
    remote_scorers: Mapping[str, RemoteScorer] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class GeneratingParts(Parts):
    """Parts of a run that also generates.

    Attributes:
      generator: the engine of the main role.
      pool: this rank's reward workers; None: it has none.
      remote_rewards: models on other ranks that reward completions, by name.
    """

    generator: Generator
    pool: Pool | None = None
    remote_rewards: Mapping[str, RemoteRewards] = field(default_factory=dict)


def with_generator(
    parts: Parts, generator: Generator, remote_rewards: Mapping[str, RemoteRewards] | None = None
) -> GeneratingParts:
    """The parts of a run, with an engine that generates."""
    return GeneratingParts(**vars(parts), generator=generator, remote_rewards=remote_rewards or {})


def without_generator(parts: Parts) -> Parts:
    """The parts of a run without its engine."""
    return Parts(**{field.name: getattr(parts, field.name) for field in fields(Parts)})
