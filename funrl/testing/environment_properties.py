"""Properties of an environment of one's own: what it does with odd replies and limits, and what it leaves behind."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import string
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from funrl.algos.guarding import defined_at, name_of
from funrl.data.prompts import Example, Prompt, encode
from funrl.data.tokenizer import TextTokenizer, chat_character_tokenizer
from funrl.environments.attempt import CLEAN_UP_S, EpisodeClock, attempt_episode
from funrl.environments.builtin.load import environment_from
from funrl.environments.chat import TemplateChat
from funrl.environments.environment import Environment
from funrl.rollout.episodes import Episode, to_record
from funrl.rollout.policy import EpisodeLimits, Policy, PolicySetup
from funrl.rollout.requests import Completion, Request
from funrl.rollout.resident import run_coroutine
from funrl.rollout.sampling_parameters import Sampling
from funrl.testing.subjects import assert_all

if TYPE_CHECKING:
    pass

PLAIN_TEMPLATE = (
    "{% for t in tools or [] %}{{ t | tojson }}\n{% endfor %}{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}{% for c in m.tool_calls or [] %}"
    "{{ '<tool_call>' + (c.function | tojson) + '</tool_call>' }}{% endfor %}{{ '</s>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ODD_REPLIES = (
    "",
    " \n",
    "yes",
    "no",
    "42",
    "nan",
    "<tool_call>{</tool_call>",
    '<tool_call>{"name": "no_such_tool", "arguments": {}}</tool_call>',
    '<tool_call>{"name": 3}</tool_call><tool_call>',
    "a" * 2000,
    "?? \x00 ??",
)
EPISODES = 3  # for each property
LEAK_WAIT_S = 2.0  # for threads and processes to end
SHORT_LIMITS = (EpisodeLimits(turns=1), EpisodeLimits(turns=2), EpisodeLimits(tokens=5), EpisodeLimits(length=1 << 12))


class EnvironmentSubject(NamedTuple):
    """An environment and what it is checked with.

    Attributes:
      make: gives the environment.
      chat: renders its messages.
      examples: prompts.
      replies: of the policy.
      limit_s: seconds between two calls of the policy.
    """

    make: Callable[[], Environment]
    chat: TemplateChat
    examples: Sequence[Example]
    replies: Sequence[str]
    limit_s: float


def check_environment(
    environment: Environment | Callable[..., object] | Sequence[Callable[..., object]],
    examples: Sequence[tuple[str | Sequence[Mapping[str, object]], Mapping[str, object]]] = (("What is 6 * 7?", {}),),
    replies: Sequence[str] = (),
    tokenizer: TextTokenizer | None = None,
    without: Sequence[str] = (),
    limit_s: float = 10.0,
) -> None:
    """Check an environment by episodes with a policy that replies at random.

    Args:
      environment: of any form that `funrl.train(env=...)` takes: a class, a function, an object with `run`.
      examples: (prompt, fields of its record).
      replies: texts that the policy may say besides odd ones, such as calls of the tools.
      tokenizer: of the model, with its chat template; None: one of characters, with a plain template.
      without: properties that it is not to have, of `ENVIRONMENT_PROPERTIES`.
      limit_s: seconds that it may take between two calls of the policy.

    Raises:
      AssertionError: the first property that it lacks, with the environment, its file and line, and what it did.
      ValueError: `without` names what is no property.
    """
    marks = ("<|im_start|>", "<tool_call>", "</tool_call>")
    renders = tokenizer or chat_character_tokenizer(string.printable, marks, PLAIN_TEMPLATE, unknown="?")
    prompts = [encode(Prompt(_copied(prompt), dict(fields)), renders) for prompt, fields in examples]
    chat = TemplateChat(renders)
    subject = EnvironmentSubject(
        lambda: environment_from(environment), chat, prompts, (*replies, *ODD_REPLIES), limit_s
    )
    what = f"environment {name_of(environment)}{defined_at(environment)}"
    assert_all(ENVIRONMENT_PROPERTIES, subject, what, without)


def run_one(subject: EnvironmentSubject, seed: int, limits: EpisodeLimits) -> Episode:
    """Run an episode of the example of a number, with replies that the seed chooses."""
    return run_coroutine(_episode(subject, seed, limits))


async def _episode(subject: EnvironmentSubject, seed: int, limits: EpisodeLimits) -> Episode:
    policy = Policy(_Replies(subject, seed), _setup(subject), seed, limits)
    example = subject.examples[seed % len(subject.examples)]
    environment = subject.make()
    clock = EpisodeClock(subject.limit_s)
    return await attempt_episode(lambda: environment.run(policy, example, seed), policy, clock)


def completed(subject: EnvironmentSubject) -> None:
    """Whatever the policy says, there is an episode with finite rewards, rendered by the chat template."""
    for seed in range(len(subject.replies)):
        episode = run_one(subject, seed, EpisodeLimits(turns=6))
        assert episode.status != "failed", f"seed {seed}: {episode.problem}"


def deterministic(subject: EnvironmentSubject) -> None:
    """Equal seeds and replies give equal messages and rewards, and no global random state is used."""
    for seed in range(EPISODES):
        records: list[str] = []
        for state in (1, 2):
            random.seed(state)
            torch.manual_seed(state)
            records.append(_plain(run_one(subject, seed, EpisodeLimits(turns=6))))
        place = next((n for n, pair in enumerate(zip(*records, strict=False)) if pair[0] != pair[1]), 0)
        near = [text[max(0, place - 60) : place + 60] for text in records]
        assert records[0] == records[1], f"seed {seed}: {near[0]!r} and then {near[1]!r}"


def limited(subject: EnvironmentSubject) -> None:
    """Limits of turns and tokens end an episode, which is scored or unscored and does not fail."""
    for limits in SHORT_LIMITS:
        for seed in range(EPISODES):
            episode = run_one(subject, seed, limits)
            assert episode.status != "failed", f"{limits}, seed {seed}: {episode.problem}"
            for end in episode.ends:
                turns = [len(node.tokens) for node in end.nodes() if node.sampled]
                assert len(turns) <= limits.turns, f"{limits}: a trajectory has {len(turns)} turns"
                assert not limits.tokens or sum(turns) <= limits.tokens, f"{limits}: it has {sum(turns)} tokens"


def cancellable(subject: EnvironmentSubject) -> None:
    """An episode that is cancelled while the policy writes ends within seconds."""
    environment = subject.make()

    async def run() -> None:
        replies = _Replies(subject, 0, hang_after=1)
        policy = Policy(replies, _setup(subject), 0, EpisodeLimits(turns=6))
        task = asyncio.ensure_future(environment.run(policy, subject.examples[0], 0))
        await asyncio.wait({task, asyncio.ensure_future(replies.hanging.wait())}, return_when=asyncio.FIRST_COMPLETED)
        task.cancel()
        await asyncio.wait({task}, timeout=CLEAN_UP_S)
        assert task.done(), f"it continues for {CLEAN_UP_S:g} s: it swallows asyncio.CancelledError"

    asyncio.run(run())


def leaks(subject: EnvironmentSubject) -> None:
    """Further episodes leave no task, thread, process or open file behind."""
    run_one(subject, 0, EpisodeLimits(turns=6))  # what is made once may stay
    before = _resources()
    for seed in range(EPISODES):
        left = asyncio.run(_tasks_left(subject, seed))
        assert not left, f"seed {seed}: tasks are left: {left}"
    deadline = time.monotonic() + LEAK_WAIT_S
    after = _resources()
    while any(after[name] > count for name, count in before.items()) and time.monotonic() < deadline:
        time.sleep(0.02)
        after = _resources()
    grown = [f"{after[name] - count} {name}" for name, count in before.items() if after[name] > count]
    assert not grown, f"{EPISODES} episodes leave {', '.join(grown)}"


ENVIRONMENT_PROPERTIES: dict[str, Callable[[EnvironmentSubject], None]] = {
    "completed": completed,
    "deterministic": deterministic,
    "limited": limited,
    "cancellable": cancellable,
    "leaks": leaks,
}


class _Replies:
    """Completions that are texts: the first that of the seed's number, the others as it chooses."""

    def __init__(self, subject: EnvironmentSubject, seed: int, hang_after: int | None = None):
        self.hanging = asyncio.Event()
        self._subject = subject
        self._chance = random.Random(seed)
        self._next = subject.replies[seed % len(subject.replies)]
        self._left = hang_after

    async def __call__(self, request: Request) -> Completion:
        if self._left is not None:
            if not self._left:
                self.hanging.set()
                await asyncio.Event().wait()
            self._left -= 1
        tokenizer = self._subject.chat.tokenizer
        ids = tokenizer.encode(self._next, add_special_tokens=False)
        self._next = self._chance.choice(self._subject.replies)
        ids = [*ids, tokenizer.eos_token_id]
        most = request.sampling.max_new_tokens
        finish = "stop" if len(ids) <= most else "length"
        tokens = torch.tensor(ids[:most])
        logp = torch.zeros(len(tokens))
        versions = torch.zeros(len(tokens), dtype=torch.int64)
        return Completion(0, tokens, logp, raw_logp=logp, versions=versions, finish=finish)


def _setup(subject: EnvironmentSubject) -> PolicySetup:
    """Setup of a policy whose replies end as the tokenizer's do."""
    return PolicySetup(Sampling(max_new_tokens=4096, stop=(subject.chat.tokenizer.eos_token_id,)), subject.chat)


def _copied(prompt: str | Sequence[Mapping[str, object]]) -> Any:
    """A prompt, whose messages are dicts."""
    return prompt if isinstance(prompt, str) else [dict(message) for message in prompt]


def _plain(episode: Episode) -> str:
    """All of an episode as text, but for tensors and counts."""
    record = to_record(episode)
    nodes = [(list(node["tokens"]), node["sampled"], list(node["messages"]), node["finish"]) for node in record.nodes]
    rest = {name: value for name, value in record.rest.items() if name != "counts"}
    return repr((nodes, list(record.parents), list(record.ends), dict(record.turn_rewards), rest))


async def _tasks_left(subject: EnvironmentSubject, seed: int) -> list[str]:
    """Tasks of the event loop that an episode leaves."""
    await _episode(subject, seed, EpisodeLimits(turns=6))
    await asyncio.sleep(0.05)
    return [str(task.get_coro()) for task in asyncio.all_tasks() - {asyncio.current_task()}]


def _resources() -> dict[str, int]:
    """Counts of threads, child processes and open files of this process."""
    gc.collect()
    counts = {"threads": threading.active_count()}
    if os.path.isdir("/proc/self/fd"):
        counts["open files"] = len(os.listdir("/proc/self/fd"))
        counts["processes"] = sum(_parent(entry) == os.getpid() for entry in os.listdir("/proc") if entry.isdigit())
    return counts


def _parent(process: str) -> int:
    """Number of the parent of a process; 0 if it is gone."""
    try:
        with open(f"/proc/{process}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[1])
    except OSError:
        return 0
