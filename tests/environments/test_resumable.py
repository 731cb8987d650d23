"""Episodes that go on over several rollouts: nothing is lost, doubled or different, alive or from their records."""

import asyncio
import collections
import itertools
import json
import re
import time
from typing import ClassVar

import pytest
import torch
from small_chats import CHAT, SETUP, STATES, engine_of, examples_of
from test_run import PROMPTS, Talk, run

from funrl.environments.adapters import message_environment, tool_environment
from funrl.environments.chat import TemplateChat
from funrl.environments.resumable import GroupRecord, ResumableEpisodes
from funrl.environments.run import episode_groups
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse
from funrl.rollout.episode_records import record_from_json
from funrl.rollout.episodes import Episode, from_record
from funrl.rollout.policy import EPISODE_LIMITS, EpisodeLimits


class Branches:
    """Chains of two turns side by side, after a first turn."""

    async def run(self, policy, example, seed):
        _, start = await policy.sample(policy.start(example.tokens))

        async def chain(token):
            _, first = await policy.sample(policy.extend(start, [token]))
            await asyncio.sleep(0.03 * (token == 41))
            _, two = await policy.sample(policy.extend(first, [token, token]))
            return two

        return Episode(await asyncio.gather(*map(chain, (40, 41))), {"policy": float(seed % 3)})


def count(text: str) -> int:
    """Count.

    Args:
        text: what to count.
    """
    return len(text)


TALK = message_environment(lambda: Talk(4, 0.001))
TOOLS = tool_environment([count], lambda messages, **fields: float(len(messages)))
ENVIRONMENTS = {"talk": TALK, "branches": Branches(), "tools": TOOLS}


def told(episode):
    """What a rollout that is not interrupted gives too."""
    ends = [[(node.sampled, list(node.tokens), node.finish, node.seed) for node in end.nodes()] for end in episode.ends]
    logps = [node.raw_logp for end in episode.ends for node in end.nodes() if node.sampled]
    return ends, episode.rewards, list(episode.turn_rewards.values()), torch.cat(logps)


def assert_equal_episodes(some, others, tolerance=0.0):
    for item, other in zip(some, others, strict=True):
        assert told(item)[:3] == told(other)[:3]
        assert (told(item)[3] - told(other)[3]).abs().max() <= tolerance


def reread(record):
    """The record as a checkpoint gives it."""
    return GroupRecord.from_text(record.first, record.text)


def rounds(
    environment,
    allowance,
    engine=None,
    renewed=0,
    limits=EPISODE_LIMITS,
    between=lambda run: None,
    setup=SETUP,
    samples=3,
):
    """All episodes and the records after each rollout, which are made anew after the first `renewed` ones."""
    engine = engine or engine_of()
    groups = episode_groups(examples_of(*PROMPTS), samples, 4)
    by_number = {group.first: group for group in groups}
    ongoing = ResumableEpisodes(environment, setup, limits)
    done, records, new, own = {}, [], groups, []
    while new or own:
        result = ongoing.continue_groups(engine, SINGLE, new, own, allowance)
        records.append(result)
        between(result)
        done |= {x.first: x.ended for x in result.records if not x.waiting}
        again = len(records) <= renewed
        own = [(by_number[x.first], reread(x) if again else x, allowance) for x in result.records if x.waiting]
        new = []
        if again:
            ongoing.close()
            ongoing = ResumableEpisodes(environment, setup, limits)
    ongoing.close()
    return [episode for first in sorted(done) for episode in done[first]], records


@pytest.mark.parametrize(
    ("name", "renewed"), [("talk", 0), ("branches", 99), ("tools", 99)], ids=["talk alive", "branches", "tools"]
)
def test_with_the_same_weights_episodes_are_those_of_one_rollout(name, renewed):
    environment = ENVIRONMENTS[name]
    whole = [episode for _, episode in run(environment, examples_of(*PROMPTS)).episodes]
    episodes, records = rounds(environment, 5, renewed=renewed)
    assert len(records) > 2 and sum(x.waiting for x in records[0].records) > 5
    assert_equal_episodes(episodes, whole, 1e-5)
    assert not any(run.problems for run in records)


class Forking(TemplateChat):
    """Every history is rendered anew."""

    def fork_cause(self, nodes, tools=()):
        return "thinking", True


def test_forks_keep_the_rewards_of_their_turns_over_rollouts():
    setup = SETUP._replace(chat=Forking(CHAT.tokenizer))
    whole = [episode for _, episode in run(TALK, examples_of(*PROMPTS), setup=setup).episodes]
    assert all(episode.status == "done" and len(episode.turn_rewards) == len(episode.ends) for episode in whole)
    assert whole[0].counts["forks/thinking"] == len(whole[0].ends) - 1 > 1
    episodes, records = rounds(TALK, 5, renewed=99, setup=setup)
    assert len(records) > 2 and not any(run.problems for run in records)
    assert_equal_episodes(episodes, whole, 1e-5)
    assert [episode.counts for episode in episodes] == [episode.counts for episode in whole]


@pytest.mark.parametrize("name", list(ENVIRONMENTS))
def test_a_path_grows_by_its_allowance_and_keeps_its_versions(name):
    engine = engine_of()
    version = [7]

    def sync(result):
        for record in result.records:
            for entry in json.loads(record.text):
                calls = from_record(record_from_json(entry["done"] or entry["calls"])).ends
                for call in calls:
                    nodes = [node for node in call.nodes() if node.sampled and node.tokens]
                    versions = torch.cat([node.versions for node in nodes] or [torch.zeros(0)])
                    assert (versions.diff() >= 0).all()
                    assert len(versions) == 0 or versions.unique(return_counts=True)[1].max() <= 5
        version[0] += 1
        engine.load(engine.held_weights(), version[0])

    episodes, records = rounds(ENVIRONMENTS[name], 5, engine, between=sync)
    mixed = [node for x in episodes for end in x.ends for node in end.nodes() if node.sampled]
    assert any(node.versions.unique().numel() > 1 for node in mixed)
    assert version[0] == 7 + len(records)


@pytest.mark.slow
def test_with_states_episodes_go_on_under_further_versions():
    """Rollouts end amid a turn, and new weights, here equal ones, drop all states."""
    engines = [engine_of(dtype=torch.float64, config=STATES, snapshot_tokens=16) for _ in range(3)]
    whole = [episode for _, episode in run(TALK, examples_of(*PROMPTS), 1, engines[0]).episodes]
    alive, _ = rounds(TALK, 5, engines[1], samples=1)
    versions = itertools.count(8)
    engine = engines[2]
    load = lambda run: engine.load(list(engine.held_weights()), next(versions))  # noqa: E731
    synced, _ = rounds(TALK, 5, engine, between=load, samples=1)
    assert_equal_episodes(alive, whole, 1e-12)
    assert_equal_episodes(synced, whole, 1e-12)
    assert engine.cost().recomputed > 2 * engines[1].cost().recomputed
    nodes = [node for episode in synced for end in episode.ends for node in end.nodes() if node.sampled]
    assert any(node.versions.unique().numel() > 1 for node in nodes)


class Moody(Talk):
    """Rewards otherwise each time that it is made, where a reply has an even length."""

    made: ClassVar = itertools.count()

    async def reset(self, example, seed):
        self.mood = next(self.made)
        messages, tools = await super().reset(example, seed)
        return messages, tools

    async def step(self, message):
        messages, reward, ended = await super().step(message)
        return messages, reward + self.mood * (len(message["content"]) % 2 == 0), ended


def test_an_environment_that_does_not_repeat_itself_begins_anew():
    Moody.made = itertools.count()
    environment = message_environment(lambda: Moody(3))
    episodes, records = rounds(environment, 5, renewed=3)
    assert len(episodes) == 12 and all(x.status == "done" and len(x.turn_rewards) == 3 for x in episodes)
    assert sum(len(run.problems) for run in records) > 3
    problem = next(run.problems[0] for run in records if run.problems)
    assert re.match(r"answer \d of the environment is \[\[\{.*\}\], \d.*, \w+\], it was \[\[", problem)
    alive, records = rounds(environment, 5)
    assert len(alive) == 12 and not any(run.problems for run in records)


class Leaves(Talk):
    """Does not begin a second time."""

    made: ClassVar = itertools.count()

    async def reset(self, example, seed):
        if next(self.made) >= 12:
            raise RuntimeError("no such place")
        return await super().reset(example, seed)


def test_an_environment_that_cannot_begin_again_fails_after_its_tries():
    Leaves.made = itertools.count()
    episodes, records = rounds(message_environment(lambda: Leaves(3)), 5, renewed=1)
    failed = [x for x in episodes if x.status == "failed"]
    assert failed and all("no such place" in x.problem for x in failed)
    assert sum(len(run.problems) for run in records) == len(failed)


class Fragile(Talk):
    """Raises in its second turn, for some examples in every attempt."""

    attempts: ClassVar = collections.Counter()

    async def reset(self, example, seed):
        self.key = example.text, seed
        self.attempts[self.key] += 1
        return await super().reset(example, seed)

    async def step(self, message):
        if self.count == 1 and self.key[0] == "say it":
            raise RuntimeError("broken")
        return await super().step(message)


@pytest.mark.parametrize("renewed", [0, 99], ids=["alive", "from records"])
def test_a_failed_attempt_stays_counted(renewed):
    Fragile.attempts.clear()
    episodes, records = rounds(message_environment(Fragile), 5, renewed=renewed, limits=EpisodeLimits(retries=2))
    assert [x.status for x in episodes] == ["done"] * 3 + ["failed"] * 3 + ["done"] * 6
    assert not any(run.problems for run in records)
    if not renewed:
        assert {n for (text, _), n in Fragile.attempts.items() if text == "say it"} == {3}


def test_between_rollouts_no_time_limit_runs():
    limits = EpisodeLimits(environment_s=0.3, retries=0)
    episodes, _ = rounds(TALK, 20, limits=limits, between=lambda run: time.sleep(0.4))
    assert {x.status for x in episodes} == {"done"}


def test_max_waiting_bounds_what_begins_and_loses_nothing():
    whole = [episode for _, episode in run(TALK, examples_of(*PROMPTS)).episodes]
    episodes, _ = rounds(TALK, 9, limits=EpisodeLimits(waiting=1))
    assert_equal_episodes(episodes, whole, 1e-5)


def test_what_is_computed_again_is_counted():
    engine = engine_of()
    rounds(TALK, 5, engine, between=lambda run: engine.load(engine.held_weights(), 8))
    assert engine.cost().recomputed > 100


class Opaque(Talk):
    async def step(self, message):
        messages, reward, ended = await super().step(message)
        return [{**messages[0], "seen": object()}], reward, ended


def test_a_message_that_no_checkpoint_holds_is_an_error():
    with pytest.raises(TypeError, match=r"a message of an environment has a object, which .* give text, numbers"):
        rounds(message_environment(Opaque), 5, renewed=1)


def of_mesh(mesh, renewed):
    groups = episode_groups(examples_of(*PROMPTS), 3, 4)
    engine = engine_of(mesh, torch.float64)
    ongoing = ResumableEpisodes(Branches(), SETUP)
    by_number = {group.first: group for group in groups}
    done = {}
    result = ongoing.continue_groups(engine, mesh, groups, allowance=5)
    for _ in range(20):
        done |= {x.first: x.ended for x in result.records if not x.waiting}
        if renewed:
            ongoing.close()
        own = [(by_number[x.first], reread(x) if renewed else x, 5) for x in result.records if x.waiting]
        result = ongoing.continue_groups(engine, mesh, (), own)
    ongoing.close()
    return done


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "renewed"), [("dp2", True), ("tp2", False)])
def test_replicas_and_tensor_ranks(sizes, renewed):
    def program(mesh):
        return gather_objects(of_mesh(mesh, renewed), mesh)

    parts = launch(program, parse(sizes), "cpu")
    if sizes == "tp2":
        assert [list(map(told, x)) for x in parts[0].values()] and parts[0].keys() == parts[1].keys()
    together = {first: episodes for part in parts for first, episodes in part.items()}
    alone = of_mesh(SINGLE, False)
    assert sorted(together) == sorted(alone) == [0, 3, 6, 9]
    for first, episodes in alone.items():
        assert_equal_episodes(together[first], episodes, 1e-9)


class Handover:
    """A branch that waits for another one by an event."""

    async def run(self, policy, example, seed):
        start = policy.start(example.tokens)
        heard = asyncio.Event()

        async def lead():
            _, end = await policy.sample(start)
            heard.set()
            return end

        async def follow():
            _, end = await policy.sample(policy.extend(start, [40]), max_tokens=1)
            await heard.wait()
            _, end = await policy.sample(policy.extend(end, [41]))
            return end

        return Episode(await asyncio.gather(lead(), follow()), {"policy": 0.0})


def test_a_branch_that_waits_for_another_one_unseen_holds_up_no_step_for_good():
    limits = EpisodeLimits(environment_s=0.2)
    whole = [episode for _, episode in run(Handover(), examples_of(*PROMPTS)).episodes]
    episodes, records = rounds(Handover(), 5, limits=limits)
    assert_equal_episodes(episodes, whole, 1e-5)
    assert len(records) > 2
