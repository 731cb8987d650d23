"""Environments that are given in Python, as objects, classes and functions."""

import functools
import json
from pathlib import Path

import pytest

import funrl
from funrl.environments.adapters import message_environment
from funrl.rollout.episodes import Episode
from funrl.trainer.settings.declaration import SettingsError

TINY = {
    "steps": 1,
    "batch_prompts": 4,
    "samples_per_prompt": 2,
    "max_new_tokens": 4,
    "eval_prompts": 4,
    "device": "cpu",
    "compile": "off",
    "warmstart_steps": 0,
}
PROMPTS = [{"prompt": f"{n}+{n}=", "turns": 2} for n in range(3, 23)]
TEMPLATE = "{% for m in messages %}={{ m['content'] }}-{% endfor %}{% if add_generation_prompt %}={% endif %}"


class Twice:
    """Two replies to token ids."""

    async def run(self, policy, example, seed):
        _, first = await policy.sample(policy.start(example.tokens))
        reply, last = await policy.sample(policy.extend(first, [5]))
        return Episode([last], {"policy": float(len(reply.tokens))})


class Talk:
    """A number of turns that the prompt's record gives."""

    def reset(self, example, seed):
        self.left = example.fields["turns"]
        return [{"role": "user", "content": example.text}], []

    def step(self, message):
        self.left -= 1
        return [{"role": "user", "content": "1"}], float(len(message["content"])), not self.left

    def close(self): ...


def talk(messages, *, turns, **fields):
    return "1" if len(messages) < 2 * turns else float(len(messages[-1]["content"]))


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("chat.jinja").write_text(TEMPLATE)


def trained(env, **settings):
    return funrl.train("grpo", **{"prompts": PROMPTS, "env": env, "chat_template": "chat.jinja"} | TINY | settings)


@pytest.mark.slow
def test_classes_functions_and_objects_are_environments():
    by_class, by_object, made = trained(Twice), trained(Twice()), trained(lambda: Twice())
    assert by_class.metrics[0]["episodes/turns"] == 2
    for name in ("reward/mean", "response_length/mean", "eval/reward"):
        assert len({run.metrics[0][name] for run in (by_class, by_object, made)}) == 1
    record = json.loads(Path(by_class.run_dir, "config.json").read_text())
    assert record["flags"]["given_in_python"] == "prompts, the environment" and record["inputs"]["env"]


@pytest.mark.parametrize("env", [Talk, message_environment(Talk), talk, functools.partial(talk)])
def test_conversations_are_environments(env):
    assert trained(env).metrics[0]["episodes/turns"] == 2


@pytest.mark.slow
@pytest.mark.gloo
def test_every_rank_has_the_environment():
    assert trained(Talk, mesh="dp2").metrics[0]["episodes/turns"] == 2


def test_an_environment_by_name():
    Path("own.py").write_text("def count(messages, **fields):\n    return float(len(messages))\n")
    assert trained("own.py:count").metrics[0]["reward/mean"] == 2


@pytest.mark.parametrize(
    "arguments,message",
    [
        ({"env": [talk]}, "tool talk needs types, and a docstring with a line for each argument"),
        ({"env": Talk()}, "each episode has its own; give the class Talk"),
        ({"env": 3}, "env=3: an object with run, a class, a function or a list of functions is needed"),
        ({"env": int}, "class int lacks reset, step, close"),
        ({"reward": talk}, "a reward function with --env=Twice: the environment rewards its episodes"),
        ({"reward": "math"}, "--reward=math with --env=Twice: the environment rewards its episodes"),
        ({"judge": "DIR"}, "--judge=DIR with --env=Twice: a judge reads single completions"),
        ({"new_tokens_per_step": 999}, "--new_tokens_per_step=999: a row has "),
        ({"prompts": None, "chat_template": None}, "--env=Twice needs --prompts"),
        ({"recipe": "online_dpo"}, "the algorithm compares two completions"),
        ({"recipe": "sft"}, "env=Twice does nothing: the recipe learns from texts"),
    ],
)
def test_what_cannot_work_is_refused(arguments, message):
    with pytest.raises(SettingsError, match=message):
        funrl.train(**{"recipe": "grpo", "prompts": PROMPTS, "env": Twice} | TINY | arguments)


def test_flags_of_episodes_need_an_environment():
    reward = {"reward": lambda prompt, completion, **fields: 1.0}
    with pytest.raises(SettingsError, match="--episode_turns=3 does nothing without an environment"):
        funrl.train("grpo", prompts=PROMPTS, episode_turns=3, **reward, **TINY)
