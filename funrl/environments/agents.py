"""Agents of episodes and the models that answer for them: the value of `--agents`, NAME:ROLE pairs.

| ROLE | the agent's turns are sampled by |
|---|---|
| policy | the policy, which learns from them; so it is for an agent that is not named |
| frozen | the weights that the run began with |
| frozen:N | those of the policy after the newest step that N divides; before it, those that the run began with |
| a path | the model of a directory, with the policy's tokenizer |

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

POLICY = "policy"  # the role that learns, and the agent of an environment that names none
FROZEN = "frozen"
FORM = "NAME:policy, NAME:frozen, NAME:frozen:STEPS or NAME:DIR"


class FrozenModel(NamedTuple):
    """The model of agents that do not learn.

    Attributes:
      every: steps after which it becomes the policy again; 0: it stays what it is.
      directory: that its weights are from; None: it is an earlier self of the policy.
    """

    every: int = 0
    directory: str | None = None


class AgentMap(NamedTuple):
    """The models of a run's agents.

    Attributes:
      models: agent -> name of the model that answers for it: "" the policy, or one of `frozen`.
      frozen: models by the name of the first agent that each answers for.
    """

    models: Mapping[str, str] = {}
    frozen: Mapping[str, FrozenModel] = {}

    @property
    def trained(self) -> tuple[str, ...]:
        """The agents whose turns are trained on."""
        return tuple(agent for agent, model in self.models.items() if not model)


def parse_agents(text: str | None) -> AgentMap:
    """Parse the value of `--agents`; None names no agent.

    >>> parse_agents("solver:policy,opponent:frozen:10").frozen
    {'opponent': FrozenModel(every=10, directory=None)}

    Raises:
      ValueError: an item has another form, or an agent is named twice.
    """
    models: dict[str, str] = {}
    frozen: dict[str, FrozenModel] = {}
    for item in () if text is None else text.split(","):
        agent, _, role = (part.strip() for part in item.partition(":"))
        if not agent.isidentifier() or not role:
            raise ValueError(f"{item!r} does not name an agent and its role; write {FORM}, with commas between")
        if agent in models:
            raise ValueError(f"agent {agent} is named twice; name each once")
        if role == POLICY:
            models[agent] = ""
            continue
        model = _frozen_model(item, role)
        name = next((name for name, known in frozen.items() if known == model), agent)
        frozen[name] = model
        models[agent] = name
    return AgentMap(models, frozen)


def with_environment(agents: AgentMap, environment: object) -> AgentMap:
    """The map of all agents of an environment, in its order; those that are not named are the policy.

    An environment without an attribute `agents` has those that the map names, or the agent "policy".

    Raises:
      ValueError: the map names an agent that the environment does not have, or nobody learns.
    """
    declared = tuple(getattr(environment, "agents", None) or agents.models or (POLICY,))
    unknown = [agent for agent in agents.models if agent not in declared]
    if unknown:
        raise ValueError(f"the environment has no agent {unknown[0]!r}; its agents are {', '.join(declared)}")
    whole = AgentMap({agent: agents.models.get(agent, "") for agent in declared}, agents.frozen)
    if not whole.trained:
        raise ValueError(f"every agent ({', '.join(declared)}) is frozen, so nothing learns; map one to {POLICY}")
    return whole


def _frozen_model(item: str, role: str) -> FrozenModel:
    match = re.fullmatch(rf"{FROZEN}(?::(.*))?", role)
    if match is None:
        return FrozenModel(directory=role)
    if match[1] is None:
        return FrozenModel()
    if not re.fullmatch(r"[1-9]\d*", match[1]):
        raise ValueError(f"{item!r}: {match[1]!r} is no number of steps, at least 1; write {FORM}")
    return FrozenModel(every=int(match[1]))
