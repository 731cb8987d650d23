"""Episodes as conversations, in samples.jsonl and on the pages."""

import dataclasses
import json

import torch

from funrl.environments.conversation import LONGEST_TEXT, conversation_of, short_text
from funrl.rollout.episodes import Episode, Node, Trajectory


def sampled(parent, tokens, message=None, finish="stop"):
    number = torch.zeros(len(tokens))
    return Node(
        parent,
        tokens,
        sampled=True,
        raw_logp=number,
        sampling_logp=number,
        versions=number.long(),
        messages=() if message is None else (message,),
        finish=finish,
    )


def decode(ids):
    return " ".join(map(str, ids))


def test_branches_are_whole_and_say_what_an_earlier_one_has():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    root = Node(None, [1], sampled=False, messages=({"role": "user", "content": "add"},))
    first = sampled(root, [2, 3], {"role": "assistant", "content": "well", "tool_calls": [call]})
    answer = Node(first, [4], sampled=False, messages=({"role": "tool", "name": "add", "content": "x" * 5000},))
    left, right = sampled(answer, [5], {"role": "assistant", "content": "5"}), sampled(answer, [6], finish="length")
    raw = Node(None, [7, 8], sampled=False)
    episode = Episode(
        [Trajectory("policy", left), Trajectory("policy", right), Trajectory("other", sampled(raw, [9]))],
        {"policy": 0.5, "other": None},
        {first: 0.25},
        {"right": 1.0},
        status="turns",
    )
    conversation = json.loads(json.dumps(conversation_of(episode, decode)))
    assert conversation["status"] == "turns" and conversation["parts"] == {"right": 1.0}
    row, two, other = conversation["branches"]
    assert [branch["agent"] for branch in (row, two, other)] == ["policy", "policy", "other"]
    assert [branch["reward"] for branch in (row, two, other)] == [0.5, 0.5, None]
    assert row["says"][0] == {"role": "user", "text": "add"}
    calls = [["add", '{"a": 1}']]
    results = {"role": "assistant", "text": "2 3", "sampled": True, "calls": calls, "content": "well", "reward": 0.25}
    assert row["says"][1] == results and two["says"][1] == results | {"before": True}
    tool = row["says"][2]
    assert tool["role"] == "tool add" and tool["text"] == "x" * LONGEST_TEXT + " (1000 more characters)"
    assert row["says"][3] == {"role": "assistant", "text": "5", "sampled": True}
    assert two["says"][3] == {"role": "assistant", "text": "6", "sampled": True, "finish": "length"}
    assert other["says"][0] == {"role": "context", "text": "7 8"}
    assert short_text(conversation)[:2] == [(False, "add"), (True, "2 3")] and "forked" not in conversation
    conversation = conversation_of(dataclasses.replace(episode, forked=2), decode)
    assert conversation["forked"] == 2 and short_text(conversation) == [(False, "7 8"), (True, "9")]


def test_parts_are_shown_and_other_lists_are_json():
    parts = [{"type": "image", "image": object()}, {"type": "text", "text": "how many?"}]
    results = [{"title": "a"}, "b"]
    root = Node(None, [1], sampled=False, messages=({"role": "user", "content": parts},))
    leaf = Node(root, [2], sampled=False, messages=({"role": "tool", "content": results},))
    conversation = conversation_of(Episode([Trajectory("policy", leaf)], {}), decode)
    assert short_text(conversation) == [(False, "[image]how many?"), (False, json.dumps(results))]


def test_an_episode_that_failed_says_why():
    conversation = conversation_of(Episode([], {}, status="failed", problem="no server"), decode)
    assert conversation == {"branches": [], "status": "failed", "problem": "no server"}
    assert short_text(conversation) == []
