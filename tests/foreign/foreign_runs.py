"""Episodes of environments of other frameworks, by scripted replies or by a small model."""

import json
import re
from pathlib import Path
from types import ModuleType

from small_chats import SETUP, ScriptedEngine, examples_of

from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.policy import EpisodeLimits
from funrl.rollout.sampling_parameters import Sampling

LONG = SETUP._replace(sampling=Sampling(max_new_tokens=200, stop=(1,)))
LIMITS = EpisodeLimits(environment_s=20, retries=0)


def call_text(name, **arguments):
    """A call as the policy writes it."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def run(environment, /, *replies, prompt="go", limits=LIMITS, setup=LONG, engine=None, **fields):
    """An episode in which the policy gives these replies, the last one again and again."""
    left = list(replies)
    engine = engine or ScriptedEngine(lambda prompt: left.pop(0) if len(left) > 1 else left[0])
    groups = episode_groups(examples_of(prompt, **fields), 1, 0)
    ((_, episode),) = run_episodes(engine, SINGLE, environment, groups, setup, limits).episodes
    return episode


def heard(episode):
    """What the environment said to the policy, after the prompt."""
    nodes = list(episode.ends[0].nodes())[1:]
    return [message["content"] for node in nodes if not node.sampled for message in node.messages]


def page_text(file, language="python"):
    """Text of a file of docs/foreign_environments.md."""
    page = Path(__file__).parents[2] / "docs/foreign_environments.md"
    (source,) = re.findall(rf"^```{language} file={re.escape(file)}\n(.*?)^```", page.read_text(), re.M | re.S)
    return source


def page_source(name):
    """Source of a module of that page."""
    return page_text(f"{name}.py")


def page_module(name):
    """A file of the page as a module."""
    module = ModuleType(name)
    exec(compile(page_source(name), f"{name}.py", "exec"), vars(module))
    return module
