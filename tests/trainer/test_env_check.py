"""Environments that never work: an error in a line before the run, and no model where the trial is left out."""

import functools
import json

import pytest
from small_runs import GRPO, SMALL

from funrl.cli.run import main
from funrl.loading import LoadError
from funrl.trainer.env_check import check_first_episode
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of

ENVIRONMENTS = """
import time

class Works:
    def reset(self, example, seed): return [{"role": "user", "content": "1+1="}], ()
    def step(self, message): return [{"role": "user", "content": "2"}], 1.0, False
    def close(self): pass

class OnlyMessages(Works):
    def reset(self, example, seed): return [{"role": "user", "content": "1"}]

class OneArgument(Works):
    def reset(self, example): return [{"role": "user", "content": "1"}], ()

class Text(Works):
    def reset(self, example, seed): return "observed", ()

class Observation(Works):
    def reset(self, example, seed): return "observed", {}

class NoMessage(Works):
    def reset(self, example, seed): return [], ()

class Pair(Works):
    def step(self, message): return [], True

class TextReward(Works):
    def step(self, message): return [], "1.0", True

class NaNReward(Works):
    def step(self, message): return [], float("nan"), True

class Hangs(Works):
    def step(self, message): time.sleep(1000)

class Gymnasium:
    def reset(self, *, seed=None, options=None): return "observed", {}
    def step(self, action): return "observed", 1.0, True, False, {}
    def close(self): pass

class NoClose:
    def reset(self, *, seed=None, options=None): return "observed", {}
    def step(self, action): return "observed", 1.0, True, False, {}

class NoMessageLater(Works):
    def step(self, message): return [], 0.0, False

class Raises(Works):
    def step(self, message): raise RuntimeError("no database")

class Making:
    def __init__(self): raise RuntimeError("no database")
    async def run(self, policy, example, seed): ...

class Prompting:
    async def run(self, policy, example, seed): ...
    def prompts(self, seed): raise KeyError("no file")

class NotAnEpisode:
    async def run(self, policy, example, seed): return 1.0

def raises(): raise RuntimeError("no database")

TOOLS = [1, 2]
"""
TEMPLATE = "{% for m in messages %}={{ m['content'] }}-{% endfor %}{% if add_generation_prompt %}={% endif %}"
NEVER = {  # name: what the line says
    "OnlyMessages": r"OnlyMessages.reset returned \[\{'role': 'user', .*\}\]; return a tuple: messages, tools",
    "OneArgument": r"TypeError\('OneArgument.reset\(\) takes 2 positional arguments but 3 were given'\)",
    "Text": r"Text.reset returned \('observed', \(\)\); return a tuple: messages, tools, such as ",
    "Observation": r"Observation.reset returned \('observed', \{\}\).*--env=gymnasium:FILE.py:NAME",
    "NoMessage": r"NoMessage.reset returned \(\[\], \(\)\); return a tuple: messages, tools",
    "Pair": r"Pair.step returned \(\[\], True\); return a tuple: messages, reward, whether the episode ends",
    "TextReward": r"TextReward.step returned the reward '1.0'; a number or None is needed",
    "NaNReward": r"NaNReward.step returned the reward nan; a finite number is needed, or None",
    "Hangs": r"the environment took longer than 0.3 s between two calls of the policy \(--env_timeout\)",
    "Gymnasium": r"TypeError\('Gymnasium.reset\(\) takes 1 positional argument but 3 were given'\)",
    "NoClose": r"class NoClose lacks close; .*--env=gymnasium:FILE.py:NAME",
    "NoMessageLater": r"NoMessageLater.step returned the messages \[\] and continues; at least one message",
    "Raises": r"RuntimeError\('no database'\) at .*own.py:\d+; --env_check=off",
    "Making": r"class Making raised RuntimeError: no database \(.*own.py:\d+\)",
    "Prompting": r"prompts\(\) raised KeyError: 'no file' \(.*own.py:\d+\)",
    "NotAnEpisode": r"the environment gave 1.0, not an Episode",
    "raises": r"raises\(\) raised RuntimeError: no database \(.*own.py:\d+\)",
    "TOOLS": r"1 is no tool: a list of functions with types and docstrings is needed",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("environments")
    (folder / "own.py").write_text(ENVIRONMENTS)
    (folder / "prompts.jsonl").write_text("\n".join(json.dumps({"prompt": f"{n}+{n}="}) for n in range(20)))
    (folder / "chat.jinja").write_text(TEMPLATE)
    return folder


def check(files, name, **settings):
    given = {"prompts": str(files / "prompts.jsonl"), "chat_template": str(files / "chat.jinja"), "episode_retries": 0}
    if name == "Prompting":
        del given["prompts"]
    environment = {"env": f"{files / 'own.py'}:{name}", "env_timeout": 0.3 if name == "Hangs" else 60.0}
    job = prepare(settings_of(**SMALL | given | environment | settings), functools.partial(GRPO, kl_coef=0.0))
    check_first_episode(job)


@pytest.mark.parametrize("name", NEVER)
def test_one_that_never_works_is_named_before_the_run(files, name):
    with pytest.raises((SettingsError, LoadError, ValueError), match=NEVER[name]) as caught:
        check(files, name)
    text = str(caught.value)
    assert "\n" not in text and "funrl/environments" not in text
    assert name == "Prompting" or text.startswith(f"--env={files / 'own.py'}:{name}: ")


def test_one_that_works_is_tried_without_a_trace(files):
    check(files, "Works")
    check(files, "Works", env_workers=1)
    check(files, "NaNReward", env_check="off")


def run(files, folder, *flags):
    given = ["--batch_prompts=2", "--samples_per_prompt=2", "--max_new_tokens=2", "--eval_prompts=2", "--device=cpu"]
    given += [f"--prompts={files / 'prompts.jsonl'}", f"--chat_template={files / 'chat.jinja'}"]
    given += ["--steps=2", "--save_every=0", "--compile=off", "--warmstart_steps=0", f"--run_dir={folder}"]
    return main("grpo", ["grpo", *given, f"--env={files / 'own.py'}:NaNReward", *flags])


def test_a_run_without_a_usable_episode_fails_and_exports_nothing(files, tmp_path, capsys):
    assert run(files, tmp_path / "refused") == 2
    assert "NaNReward.step returned the reward nan" in capsys.readouterr().err
    assert not (tmp_path / "refused").exists()
    assert run(files, tmp_path / "off", "--env_check=off") == 1
    errors = capsys.readouterr().err
    assert "error: none of the run's 2 steps had an episode that can be trained on" in errors
    assert (tmp_path / "off" / "metrics.jsonl").exists() and not (tmp_path / "off" / "model").exists()
