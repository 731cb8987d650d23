"""Histories that a summary by the policy shortens: rows of an episode, each sampled token in one of them."""

import json
import pickle

import cloudpickle
import pytest
import torch
from small_chats import SETUP, ScriptedEngine, engine_of, examples_of, text

from funrl.environments.adapters import function_environment, message_environment, single_turn, tool_environment
from funrl.environments.compaction import compacting
from funrl.environments.resumable import GroupRecord, ResumableEpisodes, Round
from funrl.environments.row_paths import paths_of
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import EpisodeLimits, RunEndingError
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.episode_rows import SUMMARY, rows_of_episodes
from funrl.trainer.sources.generation import RowForm

LONG = SETUP._replace(sampling=Sampling(max_new_tokens=200, stop=(1,)))
LIMITS = EpisodeLimits(environment_s=5, retries=0)


class Counting:
    """Ask four times; the answer is right if the policy has written 4."""

    async def reset(self, example, seed):
        self.asked = 0
        return [{"role": "system", "content": "s"}, {"role": "user", "content": example.text}], ()

    async def step(self, message):
        self.asked += 1
        ended = self.asked == 4
        return [{"role": "user", "content": "and"}], float(ended and message["content"] == "4") + 0.25, ended

    async def close(self): ...


COUNTING = message_environment(Counting)


def run(environment, engine, *examples, limits=LIMITS):
    groups = episode_groups(examples, 1, 0)
    return [episode for _, episode in run_episodes(engine, SINGLE, environment, groups, LONG, limits).episodes]


def counter(prompt):
    """Counts the questions, and summarises as the number that it has come to."""
    reached = int(prompt.partition("go#")[2][:1] or 0) + prompt.count("</s>\nu>and")
    return str(reached if "sum?" in prompt else reached + 1)


def compacted_episode():
    environment = compacting(COUNTING, at=24, request="sum?", framing="#")
    (episode,) = run(environment, ScriptedEngine(counter), *examples_of("go"))
    return episode


def test_a_summary_takes_the_place_of_a_long_history():
    episode = compacted_episode()
    first, *_ = texts = [text(path.trajectory.token_ids()) for path in paths_of(episode)]
    assert first == "s>s</s>\nu>go</s>\na>1</s>\nu>and</s>\nu>sum?</s>\na>1</s>"
    assert texts[1].startswith("s>s</s>\nu>go#1</s>\na>2</s>\nu>and</s>\n")
    assert len(texts) == 4 and episode.counts["compactions"] == 3 and episode.forked == 3
    assert episode.rewards == {"policy": 1.0 + 1.0} and episode.status == "done"
    summaries = [node for path in paths_of(episode) for node in path.trained if node.summary]
    assert [text(node.tokens) for node in summaries] == ["1</s>", "2</s>", "3</s>"]


def test_each_sampled_token_is_trained_once_and_all_rows_have_the_reward():
    episode = compacted_episode()
    rows, _ = rows_of_episodes([(0, episode)], 1, 1, RowForm(dtype=torch.float64), SINGLE)
    batch = rows.batch
    sampled = {node for end in episode.ends for node in end.nodes() if node.sampled}
    trained = [text(batch.tokens[row][batch.mask[row]].tolist()) for row in range(4)]
    assert trained == ["1</s>1</s>", "2</s>2</s>", "3</s>3</s>", "4</s>"]
    assert int(batch.mask.sum()) == sum(len(node.tokens) for node in sampled) == int(batch.episode_tokens[0])
    assert batch.score.tolist() == [2.0] * 4 and batch.episode_first.tolist() == [True, False, False, False]
    summaries = [text(batch.tokens[row][batch.author[row] == SUMMARY].tolist()) for row in range(4)]
    assert summaries == ["1</s>", "2</s>", "3</s>", ""] and not (batch.author[~batch.mask] == SUMMARY).any()
    assert [batch.turn[row][batch.mask[row]].unique().tolist() for row in range(4)] == [[0, 1], [2, 3], [4, 5], [6]]


def test_limits_count_all_rows_and_the_summary():
    environment = compacting(COUNTING, at=24, request="sum?", framing="#")
    for turns, total in ((2, 0.25), (3, 0.5)):
        limits = LIMITS._replace(turns=turns)
        (episode,) = run(environment, ScriptedEngine(counter), *examples_of("go"), limits=limits)
        paths = paths_of(episode)
        assert (episode.status, episode.rewards) == ("turns", {"policy": total})
        assert sum(len(path.trained) for path in paths) == turns
        assert sum(node.summary for path in paths for node in path.trained) == 1


def compact_call(text):
    return f"<tool_call>{json.dumps({'name': 'compact', 'arguments': {'summary': text}})}</tool_call>"


@pytest.mark.parametrize("at", [0, 1000])
def test_the_policy_compacts_by_a_tool(at):
    def look(word: str) -> str:
        """Look up a word.

        Args:
            word: which one.
        """
        return word * 2

    call = f"<tool_call>{json.dumps({'name': 'look', 'arguments': {'word': 'it'}})}</tool_call>"
    replies = {0: call, 1: compact_call("it: itit")}
    engine = ScriptedEngine(lambda prompt: "yes" if "#it: itit" in prompt else replies[prompt.count("t>")])
    environment = compacting(
        tool_environment([look], lambda messages: float(len(messages))), at, framing="#", tool=True
    )
    (episode,) = run(environment, engine, *examples_of("go"))
    first, second = (text(path.trajectory.token_ids()) for path in paths_of(episode))
    assert first.startswith("[look][compact]u>go</s>\na><tool_call>") and first.endswith(
        compact_call("it: itit") + "</s>"
    )
    assert second == "[look][compact]u>go#it: itit</s>\na>yes</s>" and episode.rewards == {"policy": 2.0}
    assert [node.summary for path in paths_of(episode) for node in path.nodes if node.sampled] == [False, True, False]
    assert [tool["function"]["name"] for tool in environment.tools] == ["look", "compact"]


def test_a_call_of_the_tool_without_a_summary_is_the_environment_s():
    unread = '<tool_call>{"name": "compact", "arguments": {}}</tool_call>'
    engine = ScriptedEngine(lambda prompt: "no" if "t>error" in prompt else unread)
    (episode,) = run(compacting(tool_environment([], lambda messages: 1.0), tool=True), engine, *examples_of("go"))
    assert episode.status == "done" and "compactions" not in episode.counts


def test_nothing_happens_below_the_limit_and_without_a_turn():
    for at, prompt in ((1000, "go"), (3, "go")):
        answers = function_environment(lambda messages: 1.0)
        (episode,) = run(compacting(answers, at=at), ScriptedEngine(counter), *examples_of(prompt))
        assert len(paths_of(episode)) == 1 and episode.status == "done"


def test_what_cannot_work_is_refused():
    for arguments in ({}, {"at": -1, "tool": True}):
        with pytest.raises(ValueError, match="give a limit above 0 in tokens, or the tool"):
            compacting(COUNTING, **arguments)
    with pytest.raises(RunEndingError, match="begins with token ids"):
        run(compacting(single_turn(), at=8), ScriptedEngine(counter), *examples_of("go"))


def test_the_rest_is_that_of_the_environment():
    class Scored:
        agents = ("policy", "rival")

        async def score(self, episodes):
            return [3.0 for _ in episodes]

        async def run(self, policy, example, seed):
            return await COUNTING.run(policy, example, seed)

    environment = compacting(Scored(), at=24, request="sum?", framing="#")
    assert environment.agents == ("policy", "rival") and not hasattr(environment, "prompts")
    copy = pickle.loads(cloudpickle.dumps(environment))
    (episode,) = run(copy, ScriptedEngine(counter), *examples_of("go"))
    assert episode.rewards == {"policy": 3.0} and episode.counts["compactions"] == 3


def test_a_resumed_episode_is_the_one_that_never_stopped():
    environment = compacting(COUNTING, at=30, request="sum?", framing="#")
    setup = SETUP._replace(sampling=Sampling(max_new_tokens=6, stop=(1,)))
    (group,) = episode_groups(examples_of("go"), 3, 0)
    whole = run_episodes(engine_of(), SINGLE, environment, [group], setup, LIMITS).episodes
    episodes = ResumableEpisodes(environment, setup, LIMITS)
    engine = engine_of()
    (record,) = episodes.continue_groups(engine, SINGLE, Round([group], allowance=4)).records
    rounds = 0
    while record.waiting:
        rounds += 1
        episodes.close()
        record = GroupRecord.from_text(record.first, record.text)
        (record,) = episodes.continue_groups(engine, SINGLE, Round([], [(group, record, 4)])).records
    assert rounds > 1
    for (_, episode), resumed in zip(whole, record.ended, strict=True):
        assert episode.counts["compactions"] > 0
        for path, other in zip(paths_of(episode), paths_of(resumed), strict=True):
            assert path.trajectory.token_ids() == other.trajectory.token_ids()
            assert [node.summary for node in path.nodes] == [node.summary for node in other.nodes]
