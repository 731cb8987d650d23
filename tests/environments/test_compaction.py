"""Histories that a summary by the policy shortens: rows of an episode, each sampled token in one of them."""

import json
import pickle

import cloudpickle
import pytest
import torch
from small_chats import SETUP, TEMPLATE, ScriptedEngine, chat_of, engine_of, examples_of, text

from funrl.environments.adapters import function_environment, message_environment, single_turn, tool_environment
from funrl.environments.chat import ChatOptions, TemplateChat
from funrl.environments.compaction import compacting
from funrl.environments.resumable import GroupRecord, ResumableEpisodes
from funrl.environments.row_paths import paths_of
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import EpisodeLimits, RunEndingError
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.sources.episode_rows import SUMMARY, rows_of_episodes, transcript_of
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


def run(environment, engine, *examples, limits=LIMITS, setup=LONG):
    groups = episode_groups(examples, 1, 0)
    return [episode for _, episode in run_episodes(engine, SINGLE, environment, groups, setup, limits).episodes]


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


def test_what_is_shown_and_measured_of_an_episode_has_all_segments():
    transcript = transcript_of(0, compacted_episode(), RowForm(dtype=torch.float64))
    segments = ["1</s>\nu>and</s>\nu>sum?</s>\na>1</s>"]
    segments += [f"#{n}</s>\na>{n + 1}</s>\nu>and</s>\nu>sum?</s>\na>{n + 1}</s>" for n in (1, 2)]
    assert text(transcript.tokens.tolist()) == "".join([*segments, "#3</s>\na>4</s>"])


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
    (record,) = episodes.continue_groups(engine, SINGLE, [group], allowance=4).records
    rounds = 0
    while record.waiting:
        rounds += 1
        episodes.close()
        record = GroupRecord.from_text(record.first, record.text)
        (record,) = episodes.continue_groups(engine, SINGLE, [], [(group, record, 4)]).records
    assert rounds > 1
    for (_, episode), resumed in zip(whole, record.ended, strict=True):
        assert episode.counts["compactions"] > 0
        for path, other in zip(paths_of(episode), paths_of(resumed), strict=True):
            assert path.trajectory.token_ids() == other.trajectory.token_ids()
            assert [node.summary for node in path.nodes] == [node.summary for node in other.nodes]


UPPER = "{{ m.content | upper if m.role == 'assistant' else m.content }}"
FORKING = chat_of(TEMPLATE.replace("{{ m.content }}", UPPER))
FORKS = LONG._replace(chat=TemplateChat(FORKING.tokenizer, options=ChatOptions(history="template")))


@pytest.mark.parametrize("at", [1000, 24])
@pytest.mark.parametrize("turns", [2, 3, 16])
def test_histories_that_a_template_renders_anew_are_compacted_too(at, turns):
    """Each turn of the policy is then on the trajectory before the fork."""
    environment = compacting(COUNTING, at=at, request="sum?", framing="#")
    limits = LIMITS._replace(turns=turns)
    (episode,) = run(environment, ScriptedEngine(lambda prompt: "a"), *examples_of("go"), limits=limits, setup=FORKS)
    paths = paths_of(episode)
    texts = [text(path.trajectory.token_ids()) for path in paths]
    assert episode.status == ("done" if turns == 16 else "turns"), episode.problem
    assert sum(len(path.trained) for path in paths) == (turns if turns < 16 else 4 if at == 1000 else 7)
    if at == 1000:
        assert "compactions" not in episode.counts and texts[1] == "s>s</s>\nu>go</s>\na>A</s>\nu>and</s>\na>a</s>"
    else:
        assert texts[:2] == [
            "s>s</s>\nu>go</s>\na>a</s>",
            "s>s</s>\nu>go</s>\na>A</s>\nu>and</s>\nu>sum?</s>\na>a</s>",
        ]
        assert all(line.startswith("s>s</s>\nu>go#a</s>") for line in texts[2:])


def test_where_roles_must_alternate_the_request_is_in_the_last_message():
    refusal = (
        "{% if not loop.first and m.role == messages[loop.index0 - 1].role %}{{ raise_exception('twice') }}{% endif %}"
    )
    chat = chat_of(TEMPLATE.replace("{% for m in messages %}", "{% for m in messages %}" + refusal))
    environment = compacting(COUNTING, at=24, request="sum?", framing="#")
    (episode,) = run(environment, ScriptedEngine(counter), *examples_of("go"), setup=LONG._replace(chat=chat))
    assert episode.status == "done", episode.problem
    first, *_ = [text(path.trajectory.token_ids()) for path in paths_of(episode)]
    assert first == "s>s</s>\nu>go</s>\na>1</s>\nu>and\n\nsum?</s>\na>1</s>" and episode.counts["compactions"] == 3


def test_a_summary_by_the_tool_answers_the_request():
    summary = compact_call("it: itit")
    environment = compacting(COUNTING, at=24, request="sum?", framing="#", tool=True)
    engine = ScriptedEngine(lambda prompt: summary if prompt.endswith("sum?</s>\na>") else "4")
    (episode,) = run(environment, engine, *examples_of("go"))
    begins = [text(path.nodes[0].tokens) for path in paths_of(episode)]
    assert begins[1:] == ["[compact]s>s</s>\nu>go#it: itit</s>\na>"] * 3


def test_summaries_of_what_the_environment_leaves_out_are_left_out():
    """A judge that is not trained, and replies that are thrown away; but not one after which a limit came."""

    class Judged:
        async def run(self, policy, example, seed):
            opened = policy.start([{"role": "user", "content": "judge"}], agent="judge")
            _, first = await policy.sample(opened)
            asked = policy.extend(first, [{"role": "user", "content": "and this long question?"}])
            await policy.sample(asked)
            episode = await COUNTING.run(policy, example, seed)
            (end,) = episode.ends
            again = policy.extend(end, [{"role": "user", "content": "thrown away"}])
            await policy.sample(again)
            return episode

    judged, plain = (compacting(x, at=24, request="sum?", framing="#") for x in (Judged(), COUNTING))
    (episode,), (alone,) = (run(x, ScriptedEngine(counter), *examples_of("go")) for x in (judged, plain))
    assert episode.status == "done", episode.problem
    mine, other = ([path.trajectory.token_ids() for path in paths_of(x)] for x in (episode, alone))
    assert mine == other and episode.counts["compactions"] > alone.counts["compactions"]


def test_the_first_messages_stay_whole():
    """Such as examples of replies, and a developer's instructions."""

    class Shown(Counting):
        async def reset(self, example, seed):
            messages, tools = await super().reset(example, seed)
            shown = [("developer", "d"), ("user", "one"), ("assistant", "1")]
            return [*({"role": role, "content": content} for role, content in shown), *messages[1:]], tools

    environment = compacting(message_environment(Shown), at=40, request="sum?", framing="#")
    (episode,) = run(environment, ScriptedEngine(lambda prompt: "4"), *examples_of("go"))
    begins = [text(path.nodes[0].tokens) for path in paths_of(episode)]
    assert len(begins) > 1 and begins[0] == "d>d</s>\nu>one</s>\na>1</s>\nu>go</s>\na>"
    assert set(begins[1:]) == {"d>d</s>\nu>one</s>\na>1</s>\nu>go#4</s>\na>"}


def test_a_summary_that_its_limit_cut_does_not_end_the_episode():
    setup = LONG._replace(sampling=Sampling(max_new_tokens=6, stop=(1,)))
    environment = compacting(COUNTING, at=24, request="sum?", framing="#")
    engine = ScriptedEngine(lambda prompt: "very long" if prompt.endswith("sum?</s>\na>") else "4")
    (episode,) = run(environment, engine, *examples_of("go"), setup=setup)
    assert [path.nodes[-1].finish for path in paths_of(episode)] == ["length"] * 3 + ["stop"]
    rows, table = rows_of_episodes([(0, episode)], 1, 1, RowForm(dtype=torch.float64), SINGLE)
    assert table.finished.all() and not rows.batch.truncated.any()


def test_a_limit_that_no_history_reaches_ends_the_run():
    with pytest.raises(RunEndingError, match=r"compacting\(at=64\): a history has at most 64 tokens in this run"):
        run(compacting(COUNTING, at=64), ScriptedEngine(counter), *examples_of("go"), limits=LIMITS._replace(length=64))


def test_an_allowance_bounds_what_all_rows_of_an_episode_grow_by():
    environment = compacting(COUNTING, at=24, request="sum?", framing="#")
    (group,) = episode_groups(examples_of("go"), 1, 0)
    episodes = ResumableEpisodes(environment, LONG, LIMITS)
    engine = ScriptedEngine(counter)
    (record,) = episodes.continue_groups(engine, SINGLE, [group], allowance=4).records
    rounds = 1
    while record.waiting:
        rounds += 1
        (record,) = episodes.continue_groups(engine, SINGLE, [], [(group, record, 4)]).records
    sampled = sum(len(node.tokens) for path in paths_of(record.ended[0]) for node in path.trained)
    assert sampled == 14 and rounds >= sampled / 4
