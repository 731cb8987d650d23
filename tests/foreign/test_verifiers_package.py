"""Environments of the package verifiers, where it is installed (.ci/setup_environments)."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from foreign_runs import LIMITS, page_module, page_source, run
from small_chats import SETUP, engine_of, text

import funrl
from funrl.data.conversations import ChatTemplate
from funrl.foreign import verifiers
from funrl.foreign.load import named_environment
from funrl.loading import LoadError
from funrl.serve.log_audit import audit_entry
from funrl.serve.log_files import read_logs
from funrl.testing import check_environment

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed: .ci/setup_environments")
sys.path.append(str(Path(__file__).parent / "plugins"))
small_model = page_module("small_model")
PERSONA = "You want: {scenario}. Say {done} at the end."
CHAT = {"harness": {"id": "plain_chat", "turns": 2}}


def letters(name="count_letters", **config):
    return named_environment(f"verifiers:{name}", {"config": {"agent": CHAT, **config}})


def assert_exact(episode):
    for end in episode.ends:
        for node in end.nodes():
            if node.sampled:
                assert len(node.raw_logp) == len(node.sampling_logp) == len(node.versions) == len(node.tokens)


def test_a_chat_of_two_turns_is_the_tokens_of_the_engine():
    environment = letters()
    assert [record["prompt"][0]["content"] for record in environment.prompts(0)] == ["write a", "write b", "write c"]
    episode = run(environment, "banana", "a", task=0)
    assert (episode.status, episode.rewards) == ("done", {"policy": 2.0})
    assert episode.parts["count"] == 2.0 and episode.parts["turns"] == 2.0
    (end,) = episode.ends
    assert text(end.token_ids()) == "u>write a</s>\na>banana</s>\nu>again</s>\na>a</s>"
    assert [node.sampled for node in end.nodes()].count(True) == 2
    assert [message["content"] for message in end.messages()] == ["write a", "banana", "again", "a"]
    assert_exact(episode)


def test_branches_share_nodes_of_the_graph_and_equal_replies_are_told_apart():
    environment = letters("best-of-n+count_letters", n=3)
    episode = run(environment, "b", "x", "bb", "x", "c", "x", task=1)
    assert [end.agent for end in episode.ends] == ["policy"] * 3 and episode.rewards == {"policy": 0.5}
    assert list(episode.turn_rewards.values()) == [0.5, 1.0, 0.0] and episode.parts["pass_at_n"] == 1.0
    assert_exact(run(environment, engine=engine_of(), setup=SETUP, task=1))
    same = run(environment, "b", task=1)
    sampled = [id(node.raw_logp) for end in same.ends for node in end.nodes() if node.sampled]
    assert len(sampled) == len(set(sampled)) == 6


def test_an_agent_that_is_not_trained_has_no_trajectory():
    role = {"harness": {"id": "plain_chat"}}
    config = {"user": {**role, "max_turns": 2}, "assistant": role, "persona": PERSONA}
    environment = named_environment("verifiers:user-sim+count_letters", {"config": config})
    assert environment.agents == ("policy", "assistant", "user")
    episode = run(environment, "please", "a banana", "###DONE###", task=0)
    assert episode.rewards == {"assistant": 2.0} and [end.agent for end in episode.ends] == ["assistant"]
    assert text(episode.ends[0].token_ids()) == "u>please</s>\na>a banana</s>"


def test_limits_and_errors():
    cut = run(letters(), "banana", limits=LIMITS._replace(turns=1), task=0)
    assert cut.status == "turns" and len(cut.ends) == 1
    assert cut.rewards == {"policy": 1.5}
    broken = run(letters(), "banana", limits=LIMITS._replace(length=3), task=0)
    assert broken.status == "failed" and not broken.ends
    assert "has no reply of the policy" in broken.problem and "context_length_exceeded" in broken.problem


def test_what_is_not_there_is_named():
    with pytest.raises(LoadError, match="taskset 'no_such_set' not found"):
        named_environment("verifiers:no_such_set")
    with pytest.raises(LoadError, match="verifiers:count_letters: the taskset has no task"):
        letters(taskset={"letters": ""})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["letters", "best-of-n+letters", "user-sim+letters"])
def test_three_environments_of_the_package_train(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "letters.py").write_text(page_source("letters"))
    small_model.save_small_model()
    role = {"harness": {"id": "plain_chat"}}
    config = {
        "letters": {"agent": CHAT},
        "best-of-n+letters": {"agent": CHAT, "n": 2},
        "user-sim+letters": {"user": {**role, "max_turns": 2}, "assistant": role, "persona": PERSONA},
    }[name]
    run = funrl.train(
        "grpo",
        model="MODEL_DIR",
        env=f"verifiers:{name}",
        env_args={"config": config},
        run_dir="run",
        save_rollouts=1,
        **small_model.SHORT | {"steps": 2},
    )
    assert len(run.metrics) == 2
    assert all(metrics["rollout/logprob_gap_max"] == 0 for metrics in run.metrics)


def test_properties_of_environments():
    examples = [("write a", {"task": 0}), ("write b", {"task": 1})]
    # The endpoint's server stays. Verifiers' own parser fails at a call whose name is a number, and at a cut reply.
    check_environment(letters(), examples=examples, without=["limited", "leaks", "completed"])


@pytest.fixture
def written_traces(tmp_path, monkeypatch):
    """Run an episode, as `run` does, and have verifiers write its traces; the episode and the file."""
    from verifiers.v1.utils.trace_store import TRACES_FILE, write_episode

    own = verifiers.graph_trajectories

    def graph(episode, *further):
        write_episode(tmp_path, episode)
        return own(episode, *further)

    monkeypatch.setattr(verifiers, "graph_trajectories", graph)
    return lambda *given, **how: (run(*given, **how), tmp_path / TRACES_FILE)


def test_traces_that_verifiers_writes_are_audited_token_for_token(written_traces):
    episode, file = written_traces(letters(), engine=engine_of(), setup=SETUP, task=0)
    template = ChatTemplate(SETUP.chat.tokenizer)
    (entry,) = read_logs(file, template)
    assert entry.form == f"verifiers {version('verifiers')}" and entry.logged
    (end,), (logged,) = episode.ends, entry.episode.ends
    assert logged.token_ids() == end.token_ids()
    sampled = [node.tokens for node in end.nodes() if node.sampled]
    assert [node.tokens for node in logged.nodes() if node.sampled] == sampled
    audit = audit_entry(entry, template)
    assert sum(audit.sampled.values()) == sum(map(len, sampled)) and "unknown weights" not in audit.sampled
    assert audit.given == sum(len(m["content"]) for n in end.nodes() if not n.sampled for m in n.messages)
    assert audit.trained["funrl"].as_sampled == sum(map(len, sampled)) and not audit.rewrites


def test_traces_without_token_ids_are_rendered(written_traces):
    """The client of evaluations asks a chat API, which gives none."""
    episode, file = written_traces(letters(), "banana", "a", task=0)
    record = json.loads(file.read_text())
    for node in record["traces"][0]["nodes"]:
        node.pop("token_ids"), node.pop("mask")
    file.write_text(json.dumps(record) + "\n")
    template = ChatTemplate(SETUP.chat.tokenizer)
    (entry,) = read_logs(file, template)
    assert not entry.logged and audit_entry(entry, template).paths == 1
    assert entry.episode.ends[-1].token_ids() == episode.ends[0].token_ids()


def test_each_trace_of_an_episode_is_an_entry(written_traces):
    episode, file = written_traces(letters("best-of-n+count_letters", n=3), "b", "x", "bb", "x", "c", "x", task=1)
    entries = [*read_logs(file, ChatTemplate(SETUP.chat.tokenizer))]
    assert [entry.episode.ends[0].token_ids() for entry in entries] == [end.token_ids() for end in episode.ends]
