"""Environments of verifiers: --env=verifiers:TASKSET, --env=verifiers:ENVIRONMENT+TASKSET.

Its agents ask the endpoint of the episode: verifiers renders and sends token ids to /inference/v1/generate, and each
node of a trace's graph becomes a node here.

Written for verifiers 0.4.0; reference: https://docs.primeintellect.ai/verifiers
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import math
import tempfile
import threading
import weakref
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from funrl.data.prompts import Example
from funrl.environments.agents import POLICY
from funrl.environments.calls import call
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.foreign.shapes import joined_text, mean_parts
from funrl.loading import LoadError
from funrl.rollout.episodes import Episode, Message, Node, Trajectory
from funrl.rollout.policy import Policy
from funrl.serve.endpoint import Endpoint, check_installed, serve_policy

NO_KEY = "FUNRL_NO_API_KEY"  # a variable that is not set: the key of an episode is in a header
RUNTIME = {"type": "subprocess"}  # of an agent whose configuration has none
HARNESS = {"id": "null"}  # a chat, which runs nothing that the policy writes
TOOL_PARSERS = {"hermes": "qwen3", "qwen_xml": "qwen3.5", "glm": "glm"}  # form of calls -> parser of renderers
DEFAULT_TASKS = 1000
JOIN_S = 5.0


def load_verifiers(
    name: str,
    tasks: int = DEFAULT_TASKS,
    config: Mapping[str, object] | None = None,
    renderer: Mapping[str, object] | None = None,
) -> Environment:
    """An environment of verifiers.

    Args:
      name: "TASKSET", or "ENVIRONMENT+TASKSET"; ids of installed packages.
      tasks: bound on the tasks that are the prompts of a run without --prompts.
      config: of the environment, as under [env] in verifiers' files, such as {"taskset": {...}, "agent": {...}}. An
        agent without a runtime has the subprocess runtime, one without a harness that of the taskset or "null".
      renderer: of `TrainClientConfig`, such as {"name": "qwen3"}; None: one by the run's chat template.

    Raises:
      LoadError: verifiers is not installed, or has no such environment.
    """
    try:
        import verifiers.v1  # type: ignore[import-not-found]  # noqa: F401
    except ImportError as error:
        raise LoadError(f"it needs verifiers ({error}): pip install 'verifiers>=0.4'") from error
    check_installed()
    try:
        environment = _made(name, dict(config or {}))
        bounded = list(itertools.islice(iter(environment.taskset), tasks))
    except Exception as error:  # of any taskset
        raise LoadError(f"{type(error).__name__}: {error}") from error
    if not bounded:
        raise LoadError("the taskset has no task")
    return _Verifiers(environment, bounded, renderer)


class _Verifiers:
    """See `load_verifiers`."""

    def __init__(self, environment: Any, tasks: Sequence[Any], renderer: Mapping[str, object] | None):
        roles = tuple(environment._agent_specs)
        self.agents = (POLICY,) if len(roles) == 1 else (POLICY, *roles)
        self._environment = environment
        self._tasks = tasks
        self._renderer = renderer
        self._serving = _Serving(environment)
        self._tokenizers: dict[int, tempfile.TemporaryDirectory[str]] = {}

    def prompts(self, seed: int) -> Sequence[Mapping[str, object]]:
        """The tasks in their order."""
        names = [task.data.prompt_text or task.data.name or f"task {n}" for n, task in enumerate(self._tasks)]
        return [{"prompt": [{"role": "user", "content": name}], "task": n} for n, name in enumerate(names)]

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Run an episode of the task of the record's field "task"."""
        from verifiers.v1 import ModelContext  # type: ignore[import-not-found]

        task = self._tasks[int(example.fields.get("task", 0))]
        async with serve_policy(policy) as (endpoint, session):
            context = ModelContext(model=endpoint.model, client=self._client(endpoint, policy))
            episode = await self._serving.run(lambda: self._environment.run_episode(task, context))
            if session.limit is None and not self._environment.complete(episode):
                raise RuntimeError(f"the episode of verifiers failed: {_problem(episode)}")
            recorded = session.trajectories()
        name = POLICY if len(self.agents) == 1 else None
        ends, rewards, turns = graph_trajectories(episode, recorded, name)
        if not ends:
            raise RuntimeError(f"the episode of verifiers has no reply of the policy: {_problem(episode)}")
        return Episode(ends, rewards, turns, parts=mean_parts(_numbers(episode)), status=session.limit or "done")

    def _client(self, endpoint: Endpoint, policy: Policy) -> Any:
        """Configuration of the client of an episode."""
        from verifiers.v1 import TrainClientConfig  # type: ignore[import-not-found]

        place = {"base_url": endpoint.base_url, "api_key_var": NO_KEY, "headers": {"x-api-key": endpoint.api_key}}
        chat = policy.chat
        assert isinstance(chat, TemplateChat)  # serve_policy has checked it
        renderer = self._renderer or {"name": "default", "tool_parser": TOOL_PARSERS.get(chat.form), **chat.arguments}
        return TrainClientConfig(**place, renderer=renderer, renderer_model_name=self._folder(chat.tokenizer))

    def _folder(self, tokenizer: Any) -> str:
        """A folder with the tokenizer, from which verifiers loads it."""
        if id(tokenizer) not in self._tokenizers:
            folder = tempfile.TemporaryDirectory(prefix="funrl-tokenizer-")
            tokenizer.save_pretrained(folder.name)
            self._tokenizers[id(tokenizer)] = folder
        return self._tokenizers[id(tokenizer)].name


class _Serving:
    """An event loop of an environment, in a thread, with its shared servers: parts of verifiers stay with one loop.

    It begins with the first episode and ends with the process, or when nobody has the environment any more. After an
    error the next episode begins it again.
    """

    def __init__(self, environment: Any):
        self._environment = environment
        self._ready: Future[asyncio.AbstractEventLoop] | None = None

    async def run(self, program: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
        """Run a coroutine there; it is cancelled with the caller."""
        if self._ready is None or _has_ended(self._ready):
            self._ready = Future()
            done = threading.Event()
            arguments = self._environment, self._ready, done
            thread = threading.Thread(target=_serve_here, args=arguments, name="verifiers", daemon=True)
            thread.start()
            weakref.finalize(self, _end_thread, thread, done)
        loop = await asyncio.shield(asyncio.wrap_future(self._ready))
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(program(), loop))


async def _serve(environment: Any, ready: Future[asyncio.AbstractEventLoop], done: threading.Event) -> None:
    """Keep the servers of an environment open until it is done."""
    async with environment.serving():
        ready.set_result(asyncio.get_running_loop())
        await call(done.wait)


def _serve_here(environment: Any, ready: Future[asyncio.AbstractEventLoop], done: threading.Event) -> None:
    """As `_serve`, on an event loop of this thread; `ready` has an error if that cannot begin."""
    try:
        asyncio.run(_serve(environment, ready, done))
    except BaseException as error:
        if ready.done():
            raise
        # What ends a process, such as SystemExit, must only end the episode.
        ready.set_exception(error if isinstance(error, Exception) else RuntimeError(f"verifiers raised {error!r}"))


def _has_ended(ready: Future[asyncio.AbstractEventLoop]) -> bool:
    return ready.done() and (ready.exception() is not None or ready.result().is_closed())


def _end_thread(thread: threading.Thread, done: threading.Event) -> None:
    done.set()
    thread.join(JOIN_S)


def graph_trajectories(
    episode: Any, recorded: Sequence[Trajectory], name: str | None = None
) -> tuple[list[Trajectory], dict[str, float | None], dict[Node, float]]:
    """The branches of an episode's traces as trajectories, whose sampled nodes are the recorded ones.

    A message becomes a node; a reply becomes one of the template's tokens before it and one of its own.

    Args:
      episode: of verifiers.
      recorded: what the endpoint has sampled.
      name: of the only agent; None: as verifiers names its agents.

    Returns: trajectories, the reward of each agent, and the rewards of its traces if it has several.

    Raises:
      ValueError: a trace has a reply that was not sampled.
    """
    replies = _sampled_nodes(recorded)
    ends: list[Trajectory] = []
    rewards: dict[str, list[float | None]] = {}
    turns: dict[Node, float] = {}
    for trace in episode.traces:
        if not trace.agent.trainable:
            continue
        nodes = _graph_nodes(trace, replies)
        leaves = [nodes[leaf] for leaf in _leaves(trace)]
        agent = name or trace.agent.name
        own = [Trajectory(agent, node) for node in leaves if node is not None and node.sampled]
        reward = trace_reward(trace)
        ends += own
        if own:
            rewards.setdefault(agent, []).append(reward)
            if reward is not None:
                turns[own[-1].leaf] = reward
    means = {agent: _mean(values) for agent, values in rewards.items()}
    several = any(len(values) > 1 for values in rewards.values())
    return ends, means, turns if several else {}


def trace_reward(trace: Any) -> float | None:
    """Weighted sum of a trace's rewards; None: nothing has scored it."""
    values = [reward.value for reward in trace.rewards.values() if reward is not None]
    return math.fsum(values) if values else None


def _mean(values: Sequence[float | None]) -> float | None:
    """Mean of the given values; None: there are none."""
    scored = [value for value in values if value is not None]
    return math.fsum(scored) / len(scored) if scored else None


def _sampled_nodes(recorded: Sequence[Trajectory]) -> dict[tuple[int, ...], list[Node]]:
    """The sampled nodes by all tokens up to their ends; equal ones in the order in which they were sampled."""
    replies: dict[tuple[int, ...], list[Node]] = {}
    for end in recorded:
        ids: list[int] = []
        for node in end.nodes():
            ids += node.tokens
            known = replies.setdefault(tuple(ids), []) if node.sampled else []
            if node.sampled and not any(node is other for other in known):
                known.append(node)
    return replies


def _graph_nodes(trace: Any, replies: Mapping[tuple[int, ...], list[Node]]) -> list[Node | None]:
    """The nodes of a trace's graph as nodes of an episode; None before the first token."""
    nodes: list[Node | None] = []
    ids: list[list[int]] = []
    for number, entry in enumerate(trace.nodes):
        parent = None if entry.parent is None else nodes[entry.parent]
        before = [] if entry.parent is None else ids[entry.parent]
        ids.append([*before, *entry.token_ids])
        message: Message = {"role": entry.message.role, "content": joined_text(entry.message.content)}
        sampled = sum(entry.mask)
        context = list(entry.token_ids[: len(entry.token_ids) - sampled])
        if context:
            parent = Node(parent, context, sampled=False, messages=() if sampled else (message,))
        if sampled:
            known = replies.get(tuple(ids[-1]))
            if not known:
                raise ValueError(f"node {number} of the trace of {trace.agent.name} is no reply that was sampled")
            reply = known[0] if len(known) == 1 else known.pop(0)
            parent = dataclasses.replace(reply, parent=parent, messages=(message,))
        nodes.append(parent)
    return nodes


def _leaves(trace: Any) -> list[int]:
    """Indices of the last nodes of the trained branches of a trace."""
    numbers = {id(node): number for number, node in enumerate(trace.nodes)}
    return [numbers[id(branch.nodes[-1])] for branch in trace.branches if branch.trainable and branch.nodes]


def _numbers(episode: Any) -> Iterator[tuple[str, float]]:
    """Metrics and single rewards of the traces."""
    for trace in episode.traces:
        single = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        numbers = {**single, **trace.metrics}
        yield from ((name, value) for name, value in numbers.items() if value is not None)


def _problem(episode: Any) -> str:
    """The last errors of an episode and of its traces."""
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    return "; ".join(f"{error.type}: {error.message}" for error in errors[-2:]) or "it gives no reason"


def _made(name: str, config: dict[str, Any]) -> Any:
    """The environment of a name and a configuration."""
    from verifiers.v1.configs.agent import agent_config_fields  # type: ignore[import-not-found]
    from verifiers.v1.configs.env import EnvConfig  # type: ignore[import-not-found]
    from verifiers.v1.env import Env  # type: ignore[import-not-found]
    from verifiers.v1.utils.generic import concrete_type  # type: ignore[import-not-found]
    from verifiers.v1.utils.loaders import (  # type: ignore[import-not-found]
        default_harness_id,
        environment_class,
        load_environment,
    )

    pairing, _, taskset = name.rpartition("+")
    kind = environment_class(taskset, pairing)
    config_type = concrete_type(kind, EnvConfig, origin=Env) or EnvConfig
    harness = default_harness_id(taskset)
    own = HARNESS if harness == "bash" else {"id": harness}
    roles = agent_config_fields(config_type())
    for role, declared in roles.items():
        given = dict(config.get(role) or {})
        given.setdefault("runtime", RUNTIME)
        if declared.harness is None:
            given.setdefault("harness", own)
        config[role] = given
    config["taskset"] = {"id": taskset, **(config.get("taskset") or {})}
    return load_environment(config_type.model_validate({"id": pairing, **config}))
