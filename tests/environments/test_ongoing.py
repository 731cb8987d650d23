"""Episodes that go on over several rollouts: nothing is lost, doubled or different, alive or from their records."""

import asyncio
import json

import pytest
import torch
from small_chats import SETUP, engine_of, examples_of
from test_run import PROMPTS, Talk, run

from funrl.environments.adapters import message_environment, tool_environment
from funrl.environments.ongoing import OngoingEpisodes, Round, recorded_episodes
from funrl.environments.run import episode_groups
from funrl.mesh.mesh import SINGLE
from funrl.rollout.episode_records import from_record, record_from_json
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EpisodeLimits


class Branches:
    """Chains of two turns side by side, after a first turn."""

    async def run(self, policy, example, seed):
        _, start = await policy.sample(policy.start(example.tokens))

        async def chain(token):
            _, one = await policy.sample(policy.extend(start, [token]))
            await asyncio.sleep(0)
            _, two = await policy.sample(policy.extend(one, [token, token]))
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
    for one, other in zip(some, others, strict=True):
        assert told(one)[:3] == told(other)[:3]
        assert (told(one)[3] - told(other)[3]).abs().max() <= tolerance


def rounds(environment, allowance, engine=None, renewed=False, limits=EpisodeLimits(), between=lambda run: None):  # noqa: B008
    """All episodes and the records after each rollout, of one that is alive or is made anew for each rollout."""
    engine = engine or engine_of()
    groups = episode_groups(examples_of(*PROMPTS), 3, 4)
    by_number = {group.first: group for group in groups}
    ongoing = OngoingEpisodes(environment, SETUP, limits)
    done, records, new, own = {}, [], groups, []
    while new or own:
        result = ongoing.run(engine, SINGLE, Round(new, own, allowance))
        records.append(result)
        between(result)
        done |= {x.first: recorded_episodes(x.text) for x in result.groups if not x.waiting}
        own = [(by_number[x.first], x.text, allowance) for x in result.groups if x.waiting]
        new = []
        if renewed:
            ongoing.close()
            ongoing = OngoingEpisodes(environment, SETUP, limits)
    ongoing.close()
    return [episode for first in sorted(done) for episode in done[first]], records


@pytest.mark.parametrize("renewed", [False, True], ids=["alive", "from records"])
@pytest.mark.parametrize("name", list(ENVIRONMENTS))
def test_with_the_same_weights_episodes_are_those_of_one_rollout(name, renewed):
    environment = ENVIRONMENTS[name]
    whole = [episode for _, episode in run(environment, examples_of(*PROMPTS)).episodes]
    episodes, records = rounds(environment, 5, renewed=renewed)
    assert len(records) > 2 and sum(x.waiting for x in records[0].groups) > 5
    assert_equal_episodes(episodes, whole, 1e-5)
    assert not any(run.restarted for run in records)


@pytest.mark.parametrize("name", list(ENVIRONMENTS))
def test_a_path_grows_by_its_allowance_and_keeps_its_versions(name):
    engine = engine_of()
    version = [7]

    def sync(result):
        for record in result.groups:
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
