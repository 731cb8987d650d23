"""Environments of tinker-cookbook.

funrl grpo --model=DIR --prompts=FILE --env=examples/env_tinker.py:tinker_environment --env_args=name:riddles.py:Riddles

| name | prompts |
|---|---|
| an `EnvGroupBuilder`, a list of them, an `RLDataset` or an `RLDatasetBuilder` | each builder is one |
| a function or a class whose call gives an `EnvGroupBuilder` or an `Env` | those of the run, whose fields it gets |

Tinker need not be installed for what imports nothing of it. Written for tinker-cookbook 0.6; reference:
https://github.com/thinking-machines-lab/tinker-cookbook
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import math
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from numbers import Real
from types import SimpleNamespace
from typing import Any, NamedTuple

from recorded_replies import RecordedReplies

from funrl.data.prompts import Example
from funrl.environments.adapters import example_messages
from funrl.environments.agents import POLICY
from funrl.environments.builtin.load import FLAG
from funrl.environments.calls import call
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.foreign.shapes import check_arguments, check_text, mean_parts, taken_values
from funrl.loading import LoadError, load_object
from funrl.rollout.episodes import Episode, Node, Status
from funrl.rollout.policy import LimitReached, Policy

DEFAULT_GROUPS = 1000
ENV_METHODS = ("initial_observation", "step")


def tinker_environment(name: Any, groups: int = DEFAULT_GROUPS, **arguments: Any) -> Environment:
    """An environment of what tinker-cookbook trains on.

    The reward of an episode is the sum of what its steps return, and of what `compute_group_rewards` gives it.

    Args:
      name: "FILE.py:NAME" or "MODULE:NAME", or what it names: builders of groups, or what makes one of a record; see
        the table of this file.
      groups: bound on the builders that are the prompts of a run without --prompts.
      arguments: of a class or a function. With those of a builder of a dataset it is made; any other gets them beside
        the fields of each record, `tokenizer`, which is that of the run, and `messages`, of the prompt.

    Raises:
      LoadError: it cannot be loaded, or a module that it imports is not installed.
      TypeError: it is not one of these.
      ValueError: there is no builder.
    """
    given = _load(name) if isinstance(name, str) else name
    if isinstance(given, type) and _makes_dataset(given):
        given = given(**arguments)
        arguments = {}
    if _makes_dataset(type(given)):
        with ThreadPoolExecutor(1) as thread:  # where an event loop may be running
            given, _ = thread.submit(asyncio.run, given()).result()
    builders = _builders(given)
    if builders is not None:
        if arguments:
            raise TypeError(f"{given!r:.100} takes no arguments, but there is {next(iter(arguments))!r}")
        bounded = list(itertools.islice(builders, groups))
        if not bounded:
            raise ValueError("there is no builder of a group")
        groups_in_order = [
            {"prompt": [{"role": "user", "content": f"group {n}"}], "group": n} for n in range(len(bounded))
        ]
        environment = _Tinker(lambda example, policy: bounded[int(example.fields.get("group", 0))])
        environment.prompts = lambda seed: groups_in_order
        return environment
    if not callable(given):
        raise TypeError(
            f"{given!r:.100} is neither an EnvGroupBuilder, a list or a dataset of them, nor a function that makes one"
        )
    return _Tinker(_maker(given, arguments))


def _load(name: str) -> Any:
    """The object that a name stands for. Raises: LoadError."""
    try:
        return load_object(FLAG, name)
    except LoadError as error:
        if "No module named 'tinker" not in str(error):
            raise
        raise LoadError(f"{error}; this needs tinker-cookbook: pip install tinker-cookbook") from error


def _record(name: str) -> Callable[..., Any]:
    """A record of tinker-cookbook if its module is imported, else one with the same names."""
    return getattr(sys.modules.get("tinker_cookbook.rl.types"), name, SimpleNamespace)


def _maker(make: Callable[..., Any], arguments: Mapping[str, Any]) -> Callable[[Example, Policy], Any]:
    """A maker of the builders of records. Raises: TypeError."""
    check_arguments(make, arguments)

    def builder_of(example: Example, policy: Policy) -> Any:
        chat = policy.chat
        values: dict[str, Any] = {"messages": [dict(message) for message in example_messages(example)]}
        values["prompt"] = example.messages if example.conversational else example.text
        values["tokenizer"] = chat.tokenizer if isinstance(chat, TemplateChat) else None
        builder = make(**taken_values(make, {**values, **example.fields, **arguments}))
        if all(hasattr(builder, method) for method in ENV_METHODS):
            return SimpleNamespace(make_envs=lambda: [builder])
        if not hasattr(builder, "make_envs"):
            raise TypeError(f"{make!r:.100} made {builder!r:.100}, neither an EnvGroupBuilder nor an Env")
        return builder

    return builder_of


class _Group:
    """Environments that a builder has made together, each for one episode.

    Attributes:
      builder: that made them.
      unused: environments without an episode.
    """

    def __init__(self, builder: Any, envs: Sequence[Any]):
        self.builder = builder
        self.unused = list(envs)[::-1]
        # Of a group that is never scored, as one of its episodes failed, nobody tells when the last one has ended.
        self._unscored = weakref.finalize(self, _clean_up_beside, builder)

    async def clean_up(self) -> None:
        """Free what the builder holds."""
        if self._unscored.detach() is not None and hasattr(self.builder, "cleanup"):
            await call(self.builder.cleanup)


class _Member(NamedTuple):
    """An episode of a group.

    Attributes:
      env: its environment.
      trajectory: as tinker-cookbook has it.
      earned: sum of the rewards of its steps.
    """

    group: _Group
    env: Any
    trajectory: Any
    earned: float


class _Tinker:
    """See `tinker_environment`. `builder_of` gives the builder of an example."""

    agents = (POLICY,)
    prompts: Callable[[int], Sequence[Mapping[str, Any]]]
    scores_by_state = True  # by the environments that the episodes of a group have had

    def __init__(self, builder_of: Callable[[Example, Policy], Any]):
        self._builder_of = builder_of
        self._open: dict[int, tuple[Example, asyncio.Future[_Group]]] = {}
        self._members = weakref.WeakKeyDictionary[Node, _Member]()  # by the last reply of each episode

    async def run(self, policy: Policy, example: Example, seed: int) -> Episode:
        """Alternate turns, in token ids, of the policy and of an environment of the example's group."""
        check_text(example)
        group = await self._group(policy, example)
        env = group.unused.pop()
        replies = RecordedReplies(policy)
        opened = await call(env.initial_observation)
        if not isinstance(opened, tuple):
            raise RuntimeError(f"the first observation is too long for the environment: {opened!r:.500}")
        observation, stop = opened
        transitions: list[Any] = []
        rewards: dict[Node, float] = {}
        status: Status = "done"
        done = False
        while not done:
            tokens = _ids_of(observation)
            policy.answered([tokens, list(stop)])
            try:
                node = await replies.reply(tokens, stop=_stop_texts(stop, policy))
            except LimitReached as limit:
                if not transitions:
                    raise
                status = limit.status
                break
            reason = "length" if node.finish == "length" else "stop"
            step = await call(env.step, list(node.tokens), **_extra_of(env, reason))
            policy.answered(float(step.reward))
            rewards[node] = float(step.reward)
            transitions.append(_transition(observation, node, reason, step))
            observation, stop, done = step.next_observation, step.next_stop_condition, bool(step.episode_done)
        earned = math.fsum(rewards.values())
        trajectory = _record("Trajectory")(transitions=transitions, final_ob=observation, stop_reason=None)
        ends = policy.ends()
        self._members[ends[-1].leaf] = _Member(group, env, trajectory, earned)
        return Episode(ends, {POLICY: earned}, rewards, parts=mean_parts(_metrics(transitions)), status=status)

    async def score(self, episodes: Sequence[Episode]) -> Sequence[float | None]:
        """The rewards of a group, with its builder's."""
        members = [self._members.pop(episode.ends[-1].leaf) for episode in episodes]
        groups = {id(member.group): member.group for member in members}
        totals = [member.earned for member in members]
        try:
            builder = members[0].group.builder
            if hasattr(builder, "compute_group_rewards"):
                trajectories = [member.trajectory for member in members]
                given = await call(builder.compute_group_rewards, trajectories, [member.env for member in members])
                totals = [earned + float(reward) for earned, (reward, _) in zip(totals, given, strict=True)]
        finally:
            for key, (_, making) in list(self._open.items()):
                if making.done() and not making.exception() and id(making.result()) in groups:
                    del self._open[key]
            for group in groups.values():
                await group.clean_up()
        return totals

    async def _group(self, policy: Policy, example: Example) -> _Group:
        """The group of an example that has an unused environment; episodes that begin together share it."""
        while True:
            entry = self._open.get(id(example))
            if entry is None or entry[1].get_loop() is not asyncio.get_running_loop():
                entry = example, asyncio.ensure_future(self._new_group(policy, example))
                self._open[id(example)] = entry
            try:
                group = await asyncio.shield(entry[1])
            except Exception:
                self._open.pop(id(example), None)
                raise
            if group.unused:
                return group
            if self._open.get(id(example)) is entry:
                del self._open[id(example)]

    async def _new_group(self, policy: Policy, example: Example) -> _Group:
        builder = self._builder_of(example, policy)
        envs = await call(builder.make_envs)
        if not envs:
            raise ValueError(f"{builder!r:.100} has made no environment")
        return _Group(builder, envs)


def _makes_dataset(kind: type) -> bool:
    """True for a class of an `RLDatasetBuilder`: its objects are called without arguments and give datasets."""
    return any(base.__name__ == "RLDatasetBuilder" for base in kind.__mro__)


def _builders(given: Any) -> Iterable[Any] | None:
    """The builders of an object, of a list or of a dataset; None: it is not one of these."""
    if isinstance(given, type):
        return None
    if hasattr(given, "make_envs"):
        return [given]
    if hasattr(given, "get_batch"):
        return itertools.chain.from_iterable(given.get_batch(number) for number in range(len(given)))
    if isinstance(given, Sequence) and all(hasattr(builder, "make_envs") for builder in given):
        return given
    return None


def _clean_up_beside(builder: Any) -> None:
    """Free what a builder holds, on an event loop of its own."""
    if not hasattr(builder, "cleanup"):
        return
    with contextlib.suppress(RuntimeError):  # the interpreter is ending
        threading.Thread(target=lambda: asyncio.run(call(builder.cleanup))).start()


def _ids_of(observation: Any) -> list[int]:
    """Token ids of an observation. Raises ValueError if it has pictures."""
    if not hasattr(observation, "to_ints"):
        return list(observation)
    kinds = {str(getattr(chunk, "type", "encoded_text")) for chunk in getattr(observation, "chunks", ())}
    if kinds - {"encoded_text"}:
        raise ValueError(f"an observation has {', '.join(sorted(kinds - {'encoded_text'}))}; only text is served")
    return list(observation.to_ints())


def _stop_texts(stop: Sequence[Any], policy: Policy) -> list[str]:
    """Texts of a stop condition; its token ids must be among the run's end tokens."""
    others = [token for token in stop if not isinstance(token, str) and token not in policy.sampling.stop]
    if others:
        raise ValueError(
            f"the environment stops at token {others[0]}, where the run's replies do not end, only at "
            f"{list(policy.sampling.stop)}; give its stop condition as texts"
        )
    return [text for text in stop if isinstance(text, str)]


def _extra_of(env: Any, reason: str) -> dict[str, Any]:
    """The further argument of a step, where it takes one."""
    parameters = inspect.signature(env.step).parameters.values()
    taken = any(parameter.name == "extra" or parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    return {"extra": {"stop_reason": reason}} if taken else {}


def _transition(observation: Any, node: Node, reason: str, step: Any) -> Any:
    logp = None if node.sampling_logp is None else node.sampling_logp.tolist()
    action = _record("TokensWithLogprobs")(tokens=list(node.tokens), maybe_logprobs=logp, stop_reason=reason)
    return _record("Transition")(
        ob=observation,
        ac=action,
        reward=step.reward,
        episode_done=step.episode_done,
        metrics=dict(getattr(step, "metrics", None) or {}),
        logs=dict(getattr(step, "logs", None) or {}),
    )


def _metrics(transitions: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    for transition in transitions:
        yield from ((name, value) for name, value in transition.metrics.items() if isinstance(value, Real))
