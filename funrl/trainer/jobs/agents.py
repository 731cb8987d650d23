"""Models of agents: earlier selves of the policy and models of directories, which do not learn, and second policies.

Each has an engine on the generate mesh, beside the policy's. What never changes is in that engine alone; an earlier
self that is renewed is in the state too, so that a run that goes on meets the same one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

from funrl import trees
from funrl.algos.core import Algorithm
from funrl.environments.agents import POLICY
from funrl.mesh.mesh import Mesh
from funrl.mesh.plan import Plan
from funrl.mesh.reshard import reshard
from funrl.models import Model
from funrl.models.huggingface import directories as hf
from funrl.models.model import Layer
from funrl.models.placed import Placed
from funrl.role_kinds import ROLES, RoleMessages
from funrl.rollout.engine import WeightSpec
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.steps.parts import FrozenAgent
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.state import EarlierSelf
from funrl.trainer.steps.sync import earlier_self


def with_policies(algorithm: Algorithm, names: Sequence[str]) -> Algorithm:
    """The algorithm with further policies, each of which has the policy's loss and begins as it.

    Raises:
      ValueError: a name is that of another role, or the algorithm has no loss of a policy alone.
    """
    if not names:
        return algorithm
    if POLICY not in algorithm.losses or algorithm.divergence is not None:
        raise ValueError(f"{POLICY}:{names[0]}: the algorithm has no loss of a policy alone, as grpo has")
    # What it writes are the policy's fields, on the rows of its own agents.
    kind = dataclasses.replace(ROLES[POLICY], writes={}, generates=False, metric="", messages=RoleMessages())
    kinds = {name: dataclasses.replace(kind, text=f"the policy {name!r}") for name in names}
    losses = {**algorithm.losses, **dict.fromkeys(names, algorithm.losses[POLICY])}
    extended = dataclasses.replace(algorithm, roles={**algorithm.roles, **kinds}, losses=losses)
    extended.role_kinds  # noqa: B018  (refuses names of other roles)
    return extended


def open_frozen_agents(
    job: RLJob, mesh: Mesh, options: NativeOptions, layer_of: Callable[[Model], Layer]
) -> dict[str, FrozenAgent]:
    """Engines of the frozen models of a job's agents, without weights yet.

    Args:
      mesh: of the policy's engine, with this rank.
      options: of each engine.
      layer_of: gives the layer that a model is computed with.
    """
    agents = {}
    for name, declared in job.agents.frozen.items():
        model = job.agent_models.get(name, job.model)
        engine = native_engine(model, mesh, job.dtype, options=options, layer=layer_of(model), note=lambda _: None)
        agents[name] = FrozenAgent(declared, engine)
    return agents


def open_policies(
    job: RLJob, mesh: Mesh, options: NativeOptions, layer_of: Callable[[Model], Layer]
) -> dict[str, NativeEngine]:
    """Engines of the second policies, without weights yet; the arguments are those of `open_frozen_agents`."""
    layer = layer_of(job.model)
    return {
        name: native_engine(job.model, mesh, job.dtype, options=options, layer=layer, note=lambda _: None)
        for name in job.agents.policies
    }


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
    load_directories(agents)
    for agent in agents.values():
        if agent.declared.directory is None and not (trains and agent.declared.every):
            agent.engine.load(_copied(agent.engine.weights, begin.mesh, params, to_engine))


def _copied(weights: WeightSpec, mesh: Mesh, params: trees.Tree, to_engine: Plan) -> Iterator[tuple[str, Tensor]]:
    """A copy of weights as an engine takes them; they move when they are asked for."""
    own = reshard(params, to_engine, mesh)
    yield from weights.named(trees.clone(own) if weights.mesh.here else own)


def load_directories(agents: Mapping[str, FrozenAgent]) -> None:
    """Give the engines of this rank the weights of their directories. Collective."""
    for agent in agents.values():
        engine = agent.engine
        if agent.declared.directory is not None and isinstance(engine, NativeEngine):
            spec = engine.weights
            _, own = hf.load(agent.declared.directory, spec.dtype, spec.mesh, layouts=spec.layouts, model=engine.model)
            engine.load(spec.named(own))


def first_selves(agents: Mapping[str, FrozenAgent], role: Role, params: trees.Tree) -> dict[str, EarlierSelf]:
    """Earlier selves before the first step, of models that are renewed.

    Args:
      role: the policy's.
      params: its own weights.
    """
    return {name: earlier_self(role, params, step=0) for name, agent in agents.items() if agent.declared.every}
