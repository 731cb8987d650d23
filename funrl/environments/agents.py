"""Agents of episodes and the models that answer for them: the value of `--agents`, NAME:ROLE pairs.

| ROLE | the agent's turns are sampled by |
|---|---|
| policy | the policy, which learns from them; so it is for an agent that is not named |
| policy:NAME | a second policy, which begins as the first one and learns from its own agents' turns |
| frozen | the run's initial weights |
| frozen:N | the policy's weights after the newest step divisible by N; before it, the run's initial weights |
| a path | the model of a directory, with the policy's tokenizer |

Nothing here imports torch.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple

POLICY = "policy"  # the role that learns, and the agent of an environment that names none
FROZEN = "frozen"
FORM = "NAME:policy, NAME:policy:ROLE, NAME:frozen, NAME:frozen:STEPS or NAME:DIR"


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
      models: agent -> name of the model that answers for it: "" the policy, or one of `frozen` or of `policies`.
      frozen: models by the name of the first agent that each answers for.
      policies: roles that learn beside the policy, each from the turns of its own agents.
    """

    models: Mapping[str, str] = {}
    frozen: Mapping[str, FrozenModel] = {}
    policies: tuple[str, ...] = ()

    @property
    def trained(self) -> tuple[str, ...]:
        """The agents whose turns are trained on."""
        return tuple(agent for agent, model in self.models.items() if model not in self.frozen)

    def trained_by(self, policy: str) -> tuple[int, ...]:
        """Indices, among the trained agents, of the agents that train a policy; "" is the first policy."""
        return tuple(number for number, agent in enumerate(self.trained) if self.models[agent] == policy)

    def with_one_policy(self) -> AgentMap:
        """The map in which the first policy answers for the others."""
        models = {agent: "" if model in self.policies else model for agent, model in self.models.items()}
        return AgentMap(models, self.frozen)


def parse_agents(text: str | None) -> AgentMap:
    """Parse the value of `--agents`; None names no agent.

    >>> parse_agents("solver:policy,opponent:frozen:10").frozen
    {'opponent': FrozenModel(every=10, directory=None)}

    Raises:
      ValueError: an item has another form, or an agent is named twice.
    """
    models: dict[str, str] = {}
    frozen: dict[str, FrozenModel] = {}
    policies: dict[str, None] = {}
    for item in () if text is None else text.split(","):
        agent, _, role = (part.strip() for part in item.partition(":"))
        if not agent.isidentifier() or not role:
            raise ValueError(f"{item!r} does not name an agent and its role; write {FORM}, with commas between")
        if agent in models:
            raise ValueError(f"agent {agent} is named twice; name each once")
        if role == POLICY:
            models[agent] = ""
            continue
        if (second := re.fullmatch(rf"{POLICY}:(.*)", role)) is not None:
            models[agent] = name = second[1]
            if not name.isidentifier() or name == POLICY:
                problem = f"{name!r} cannot name a second policy; give a name such as {POLICY}:other"
                raise ValueError(f"{item!r}: {problem}")
            policies[name] = None
            continue
        model = _frozen_model(item, role)
        name = next((name for name, known in frozen.items() if known == model), agent)
        frozen[name] = model
        models[agent] = name
    if both := sorted(set(policies) & set(frozen)):
        raise ValueError(f"{POLICY}:{both[0]} has the name of a frozen agent; give the policy another name")
    return AgentMap(models, frozen, tuple(policies))


def with_environment(agents: AgentMap, environment: object) -> AgentMap:
    """The map of all agents of an environment, in its order; an unnamed agent is the policy.

    An environment without an attribute `agents` has the agents of the map, or the agent "policy".

    Raises:
      ValueError: the map names an agent that the environment does not have, or nobody learns.
    """
    declared = tuple(getattr(environment, "agents", None) or agents.models or (POLICY,))
    unknown = [agent for agent in agents.models if agent not in declared]
    if unknown:
        raise ValueError(f"the environment has no agent {unknown[0]!r}; its agents are {', '.join(declared)}")
    whole = agents._replace(models={agent: agents.models.get(agent, "") for agent in declared})
    if not whole.trained_by(""):
        raise ValueError(f"no agent of {', '.join(declared)} is the policy, so it does not learn; map one to {POLICY}")
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
