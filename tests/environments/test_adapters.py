"""Environments of tools, of a function and of one completion."""

import asyncio
import json
import time

import pytest
from PIL import Image
from small_chats import CHAT, SETUP, ScriptedEngine, examples_of, text

from funrl.environments.adapters import (
    function_environment,
    message_environment,
    single_turn,
    tool_environment,
    tool_schema,
)
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rewards.call import Score as RewardScore
from funrl.rollout.policy import EpisodeLimits, RunEndingError
from funrl.rollout.sampling_parameters import Sampling

LONG = SETUP._replace(sampling=Sampling(max_new_tokens=200, stop=(1,)))


GO = [{"role": "user", "content": "f"}], []


def run(environment, engine, *examples, limits=EpisodeLimits(environment_s=5, retries=0)):  # noqa: B008
    groups = episode_groups(examples, 1, 0)
    return [episode for _, episode in run_episodes(engine, SINGLE, environment, groups, LONG, limits).episodes]


def multiply(a: int, b: int) -> int:
    """Multiply two numbers.

    Args:
        a: the first.
        b: the second.
    """
    time.sleep(0.01)
    return a * b


async def look(word: str) -> list:
    """Look up a word.

    Args:
        word: which one.
    """
    await asyncio.sleep(0.01)
    if word == "none":
        raise LookupError("no such word")
    return [word, 1]


def call_text(name, **arguments):
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_tools_are_called_until_a_reply_has_no_call():
    replies = [
        call_text("multiply", a=17, b=23) + call_text("look", word="it"),
        "so " + call_text("look", word="none") + "<tool_call>what</tool_call>" + call_text("guess"),
        call_text("multiply", a=1),
        "391",
    ]
    engine = ScriptedEngine(lambda prompt: replies[prompt.count("a>") - 1])
    scored = []

    def score(messages, answer):
        scored.append(messages)
        return float(messages[-1]["content"] == answer)

    environment = tool_environment([multiply, look], score, system="Use tools.")
    (episode,) = run(environment, engine, *examples_of("17*23", answer="391"))
    assert (episode.status, episode.rewards) == ("done", {"policy": 1.0})
    assert episode.parts == {"tool_calls": 6.0, "failed_tool_calls": 4.0}
    assert [tool["function"]["name"] for tool in episode.ends[0].tools] == ["multiply", "look"]
    seen = text(episode.ends[0].token_ids())
    assert seen.startswith("[multiply][look]s>Use tools.</s>\nu>17*23</s>\na><tool_call>") and seen.endswith(
        "a>391</s>"
    )
    outputs = [part.split("</s>")[0] for part in seen.split("\nt>")[1:]]
    assert outputs[:3] == ["391", '["it", 1]', "error: LookupError: no such word"]
    assert outputs[3] == "error: there is no tool 'guess', only multiply, look"
    assert outputs[4].startswith("error: a call is not JSON") and outputs[5] == "error: multiply needs b; it has a, b"
    assert [message["role"] for message in scored[0]][:4] == ["system", "user", "assistant", "tool"]


def test_a_message_environment_may_be_plain_and_sees_calls_and_problems():
    class Plain:
        def reset(self, example, seed):
            assert example.text == "go" and isinstance(seed, int)
            return [{"role": "user", "content": "f"}], [tool_schema(multiply)]

        def step(self, message):
            seen.append(message)
            return [{"role": "tool", "content": "6"}], None, len(seen) == 2

        def close(self):
            seen.append("closed")

    seen = []
    replies = [call_text("multiply", a=2, b=3) + "<tool_call>", "six"]
    engine = ScriptedEngine(lambda prompt: replies[prompt.count("a>") - 1])
    (episode,) = run(message_environment(Plain), engine, *examples_of("go"))
    assert (episode.status, episode.rewards, episode.turn_rewards) == ("done", {"policy": None}, {})
    first, second, closed = seen
    assert first["tool_calls"][0]["function"] == {"name": "multiply", "arguments": {"a": 2, "b": 3}}
    assert first["problems"] == ["a call has no </tool_call>: ''"] and closed == "closed"
    assert second == {"role": "assistant", "content": "six"}


@pytest.mark.parametrize(
    "opened,answer,problem",
    [
        ("hello", None, "reset returned 'hello'; return a tuple: messages, tools"),
        (([], [], 0), None, "reset returned ([], [], 0); return a tuple: messages, tools"),
        (GO, ([], 1.0), "step returned ([], 1.0); return a tuple: messages, reward, whether the episode ends"),
        (GO, ([], "high", True), "step returned the reward 'high'; a number or None is needed"),
    ],
)
def test_what_a_message_environment_returns_is_checked(opened, answer, problem):
    class Wrong:
        def reset(self, example, seed):
            return opened

        def step(self, message):
            return answer

        def close(self): ...

    (episode,) = run(message_environment(Wrong), ScriptedEngine(lambda prompt: "six"), *examples_of("go"))
    assert episode.status == "failed" and problem in episode.problem.partition("\n")[0]


def test_a_score_follows_where_a_limit_ends_the_calls():
    engine = ScriptedEngine(lambda prompt: call_text("multiply", a=1, b=1))
    environment = tool_environment([multiply], lambda messages: None)
    (episode,) = run(environment, engine, *examples_of("go"), limits=EpisodeLimits(turns=3))
    assert (episode.status, episode.rewards) == ("turns", {"policy": None}) and episode.ends[0].leaf.sampled


def test_a_tool_needs_types_and_a_docstring():
    assert tool_schema(multiply)["function"]["parameters"]["required"] == ["a", "b"]
    with pytest.raises(ValueError, match="tool <lambda> needs types, and a docstring"):
        tool_environment([lambda a: a], lambda messages: 0.0)


def test_a_function_answers_until_it_gives_a_reward():
    def answer(messages, goal):
        results = [message["content"] for message in messages if message["role"] == "assistant"]
        if results[-1] == goal:
            return 1 / len(results)
        return (
            "higher"
            if len(results) == 1
            else [{"role": "tool", "content": "log"}, {"role": "user", "content": "lower"}]
        )

    engine = ScriptedEngine(lambda prompt: {1: "1", 2: "9", 3: "5"}[prompt.count("a>")])
    (episode,) = run(function_environment(answer), engine, *examples_of("guess", goal="5"))
    assert episode.rewards == {"policy": pytest.approx(1 / 3)}
    assert text(episode.ends[0].token_ids()) == (
        "u>guess</s>\na>1</s>\nu>higher</s>\na>9</s>\nt>log</s>\nu>lower</s>\na>5</s>"
    )


def test_one_completion_is_rewarded_by_a_function_of_any_form():
    def plain(prompt, completion, answer):
        return RewardScore(float(completion == answer), {"length": len(completion)})

    async def batched(completions, answer):
        return [float(completion == right) for completion, right in zip(completions, answer, strict=True)]

    def wrong(prompt, completion, answer):
        raise ValueError("no")

    engine = ScriptedEngine(lambda prompt: "four")
    examples = examples_of("2+2=", answer="four") + examples_of("1+1=", answer="two")
    for reward in (plain, batched):
        episodes = run(single_turn(reward), engine, *examples)
        assert [episode.rewards["policy"] for episode in episodes] == [1.0, 0.0]
    assert run(single_turn(lambda prompt, completion, answer: {"score": 1, "part": 2}), engine, *examples)[0].parts == {
        "part": 2.0
    }
    assert [episode.status for episode in run(single_turn(wrong), engine, *examples)] == ["failed"] * 2


def test_a_tool_may_return_a_picture(monkeypatch):
    picture = Image.new("RGB", (8, 8))

    def draw(boxed: bool):
        """Draw.

        Args:
          boxed: whether a text goes with it.
        """
        return ["a box", picture] if boxed else picture

    shown = []

    def expanded(tokens, messages):
        shown.extend(message["content"] for message in messages if message["role"] == "tool")
        return tokens, None

    monkeypatch.setattr(CHAT, "expanded", expanded)
    replies = [call_text("draw", boxed=True) + call_text("draw", boxed=False), "a box"]
    scored = []

    def score(messages, images):
        scored.extend(images)
        return 1.0

    engine = ScriptedEngine(lambda prompt: replies.pop(0))
    (episode,) = run(tool_environment([draw], score), engine, *examples_of("what?"))
    part = {"type": "image", "image": picture}
    assert scored == [picture, picture]
    assert shown == [[{"type": "text", "text": "a box"}, part], [part]] and episode.rewards == {"policy": 1.0}


def test_pictures_of_a_tool_for_a_model_of_text_end_the_run():
    def draw():
        """Draw."""
        return Image.new("RGB", (8, 8))

    engine = ScriptedEngine(lambda prompt: call_text("draw"))
    with pytest.raises(RunEndingError, match="the model reads text only"):
        run(tool_environment([draw], lambda messages: 1.0), engine, *examples_of("what?"))
