"""The policy of an episode: trajectories are values, and noise belongs to what is asked for."""

import asyncio
import itertools
import pickle

import pytest
import torch

from funrl.rollout.episodes import Episode, Node, Trajectory, from_record, to_record
from funrl.rollout.policy import EpisodeLimits, LimitReached, Policy, PolicySetup, ReadReply
from funrl.rollout.requests import Completion
from funrl.rollout.sampling_parameters import Sampling

SAMPLING = Sampling(max_new_tokens=8, stop=(9,), samples=4)


class Digits:
    """A chat in which a message is its digits, 8 begins a turn and 9 ends it."""

    def opening(self, messages, tools):
        return [*(int(digit) for message in messages for digit in message["content"]), 8]

    def continuation(self, messages, tools, last, reply):
        return [*([] if last == 9 else [9]), *self.opening(messages, tools)]

    def fork_cause(self, nodes, tools):
        return "", False

    def expanded(self, tokens, messages):
        return tokens, None

    def read(self, before, tokens, tools):
        return ReadReply({"role": "assistant", "content": "".join(map(str, tokens))})


class Asked:
    """Completions that are the digits of their seed; keeps what was asked for."""

    def __init__(self):
        self.requests = []

    async def __call__(self, request):
        self.requests.append(request)
        await asyncio.sleep(0)
        tokens = [int(digit) % 8 for digit in str(abs(request.seed))][: request.sampling.max_new_tokens - 1]
        logp = torch.arange(len(tokens) + 1.0)
        versions = torch.full((len(tokens) + 1,), 3)
        return Completion(0, torch.tensor([*tokens, 9]), logp, raw_logp=logp, versions=versions, finish="stop")


def message(content, role="user"):
    return {"role": role, "content": content}


def policy_of(seed=5, limits=EpisodeLimits(), chat=Digits()):  # noqa: B008
    asked = Asked()
    return Policy(asked, PolicySetup(SAMPLING, chat), seed, limits), asked


def test_a_trajectory_is_a_value_and_its_nodes_are_what_each_side_added():
    policy, asked = policy_of()

    async def talk():
        opened = policy.start([message("12"), message("3")], [{"name": "f"}], agent="writer")
        reply, first = await policy.sample(opened)
        longer = policy.extend(first, [message("4")])
        again = policy.extend(longer, [message("5")])  # both are rendered together
        _, end = await policy.sample(again, max_tokens=3)
        raw = policy.extend(end, [7, 7])
        return opened, reply, first, longer, again, end, raw

    opened, reply, first, longer, again, end, raw = asyncio.run(talk())
    assert (opened.token_ids(), opened.agent, opened.tools) == ([1, 2, 3, 8], "writer", [{"name": "f"}])
    assert reply.tokens == [5, 9] and (reply.message["content"], reply.finish) == ("5", "stop")
    assert longer.token_ids() == [1, 2, 3, 8, 5, 9, 4, 8] and again.token_ids() == [1, 2, 3, 8, 5, 9, 4, 5, 8]
    assert longer.leaf.parent is again.leaf.parent is first.leaf and first.leaf.parent is opened.leaf
    assert [list(request.prompt) for request in asked.requests] == [opened.token_ids(), again.token_ids()]
    assert [request.computed for request in asked.requests] == [0, 5] and len(end.leaf.tokens) == 3
    assert [row["content"] for row in end.messages()] == ["12", "3", "5", "4", "5", end.messages()[-1]["content"]]
    assert raw.token_ids() == [*end.token_ids(), 7, 7] and policy.ends() == [end]
    node = end.leaf
    assert node.raw_logp is not None and node.versions is not None and node.versions.tolist() == [3, 3, 3]


def test_noise_is_of_what_is_asked_for_and_not_of_when():
    async def talk(policy, order):
        opened, other = policy.start([message("1")]), policy.start([message("2")])
        calls = [
            policy.sample(opened),
            policy.sample(opened),
            policy.sample(other),
            policy.sample(opened, max_tokens=5),
            policy.sample(opened, stop=("x",)),
            policy.sample(opened, seed=1),
            policy.sample(opened, seed=1),
            policy.sample(opened, seed=2),
        ]
        tasks = {n: asyncio.ensure_future(calls[n]) for n in order}
        ends = {n: (await task)[1] for n, task in tasks.items()}
        await policy.sample(policy.extend(ends[2], [message("3")]))

    def seeds(order, seed=5):
        policy, asked = policy_of(seed)
        asyncio.run(talk(policy, order))
        return dict(zip([*order, 8], [request.seed for request in asked.requests], strict=True))

    whole = seeds(range(8))
    assert whole[0] == 5 and whole[5] == whole[6] and len(set(whole.values())) == 8
    assert all(-(1 << 63) <= seed < 1 << 63 for seed in whole.values())
    for order in itertools.islice(itertools.permutations(range(8)), 0, None, 997):
        other = seeds(order)
        if order.index(1) < order.index(0):  # equal calls are exchanged
            other[0], other[1] = other[1], other[0]
        assert other == whole
    assert not set(seeds(range(8), 6).values()) & set(whole.values())


def test_limits_are_of_a_trajectory():
    async def longest(limits, **how):
        policy, asked = policy_of(12345678, limits)
        trajectory = policy.start([1, 2])
        try:
            while True:
                _, trajectory = await policy.sample(trajectory, **how)
        except LimitReached as limit:
            return limit.status, [request.sampling.max_new_tokens for request in asked.requests], str(limit)

    assert asyncio.run(longest(EpisodeLimits(turns=2)))[:2] == ("turns", [8, 8])
    assert asyncio.run(longest(EpisodeLimits(tokens=18)))[:2] == ("tokens", [8, 8, 2])
    assert asyncio.run(longest(EpisodeLimits(length=14), max_tokens=5))[:2] == ("tokens", [5, 5, 2])
    assert asyncio.run(longest(EpisodeLimits(length=14), max_tokens=50))[2].startswith("the trajectory has 14 tokens")


def test_what_cannot_be_said_is_an_error():
    policy, _ = policy_of()
    for nothing in ([], [message("1"), 2]):
        with pytest.raises(ValueError, match="give messages or token ids, at least one"):
            policy.start(nothing)
    opened = policy.start([1, 2])
    with pytest.raises(ValueError, match="messages cannot follow token ids"):
        policy.extend(opened, [message("1")])
    with pytest.raises(ValueError, match="messages need a chat template"):
        policy_of(chat=None)[0].start([message("1")])


@pytest.mark.slow
def test_episodes_of_many_turns_are_recorded_without_depth():
    root = Node(None, [1], sampled=False, messages=(message("1"),))
    leaf, turns = root, []
    for n in range(5000):
        leaf = Node(leaf, [n], sampled=True, raw_logp=torch.ones(1), finish="stop")
        turns.append(leaf)
    branch = Node(turns[7], [3], sampled=True)
    ends = [Trajectory("a", leaf), Trajectory("b", branch, ({"name": "f"},)), Trajectory("b", Node(None, [4], True))]
    episode = Episode(ends, {"a": 1.0, "b": None}, {turns[3]: 0.5}, {"part": 2.0}, "turns", "none")
    again = from_record(pickle.loads(pickle.dumps(to_record(episode))))
    assert [end.token_ids() for end in again.ends] == [end.token_ids() for end in episode.ends]
    assert [(end.agent, end.tools) for end in again.ends] == [(end.agent, end.tools) for end in ends]
    assert again.ends[0].leaf.path()[8] is again.ends[1].leaf.parent and again.ends[0].messages() == [message("1")]
    assert {node.tokens[0]: reward for node, reward in again.turn_rewards.items()} == {3: 0.5}
    assert (again.rewards, again.parts, again.status, again.problem) == (
        {"a": 1.0, "b": None},
        {"part": 2.0},
        "turns",
        "none",
    )
