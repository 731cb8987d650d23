"""Models of agents that do not learn: earlier selves of the policy, and models of directories.

Each has an engine on the generate mesh, beside the policy's. What never changes is in that engine alone; an earlier
self that is renewed is in the state too, so that a run that goes on meets the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from funrl import trees
from funrl.environments.agents import FrozenModel
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan
from funrl.mesh.reshard import reshard
from funrl.models import Model
from funrl.models.huggingface import directories as hf
from funrl.models.model import Layer
from funrl.models.placed import Placed
from funrl.models.weight_dtypes import weight_dtype
from funrl.rollout.engine import Engine
from funrl.rollout.joint_engine import JointEngine
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.state import EarlierSelf


class FrozenAgent(NamedTuple):
    """A frozen model on its devices.

    Attributes:
      declared: where its weights are from, and when they change.
      engine: that generates with them.
    """

    declared: FrozenModel
    engine: NativeEngine


def open_frozen_agents(
    job: RLJob, mesh: Mesh, options: NativeOptions, layer_of: Callable[[Model], Layer]
) -> dict[str, FrozenAgent]:
    """Engines of the frozen models of a job's agents, without weights yet.

    Args:
      mesh: of the policy's engine.
      options: of each engine.
      layer_of: gives the layer that a model is computed with.
    """
    agents = {}
    for name, declared in job.agents.frozen.items():
        model = job.agent_models.get(name, job.model)
        engine = native_engine(model, mesh, job.dtype, options=options, layer=layer_of(model), note=lambda _: None)
        agents[name] = FrozenAgent(declared, engine)
    return agents


def joined_engine(policy: Engine, agents: Mapping[str, FrozenAgent]) -> Engine:
    """The engine that answers for all agents."""
    if not agents:
        return policy
    return JointEngine(policy, {name: agent.engine for name, agent in agents.items()})


def load_first(
    agents: Mapping[str, FrozenAgent], begin: Placed, params: trees.Tree, to_engine: Plan, *, trains: bool = True
) -> None:
    """Give the engines the weights that never change. Collective.

    Args:
      begin: the model that the run begins with.
      params: its weights, which are copied: the policy takes them over.
      to_engine: the plan from its layouts to an engine's.
      trains: whether the policy learns; if not, each earlier self is what it is.
    """
    for agent in agents.values():
        if agent.declared.directory is not None:
            spec = agent.engine.weights
            model = agent.engine.model
            _, own = hf.load(agent.declared.directory, spec.dtype, spec.mesh, layouts=spec.layouts, model=model)
            agent.engine.load(spec.named(own))
        elif not (trains and agent.declared.every):
            agent.engine.load(agent.engine.weights.named(trees.clone(reshard(params, to_engine, begin.mesh))))


def first_selves(agents: Mapping[str, FrozenAgent], role: Role, params: trees.Tree) -> dict[str, EarlierSelf]:
    """Earlier selves before the first step, of models that are renewed.

    Args:
      role: the policy's.
      params: its own weights.
    """
    return {name: earlier_self(role, params, step=0) for name, agent in agents.items() if agent.declared.every}


def earlier_self(role: Role, params: trees.Tree, step: int) -> EarlierSelf:
    """A copy of the policy's own weights: of adapters as they are, and of all others in the dtype to compute in.

    So an engine has the same bits of it as of the policy.

    Args:
      role: the policy's.
      params: its own weights.
      step: after which it is taken.
    """
    if role.base is not None:
        return EarlierSelf(trees.clone(params), step)
    dtype = role.placed.dtype
    copy = trees.map_named(lambda name, x: x.detach().to(weight_dtype(name, dtype), copy=True), params)
    return EarlierSelf(copy, step)
