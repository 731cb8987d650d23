"""Programs by the arguments of other frameworks, in front of the endpoint."""

import json
import urllib.request

import pytest
from foreign_runs import LIMITS, run
from small_chats import SETUP, engine_of, examples_of, plain, text

from funrl.environments.hosted import hosted_environment, open_hosted
from funrl.environments.run import episode_groups, run_episodes
from funrl.foreign.load import named_environment
from funrl.foreign.program import agent_program
from funrl.loading import LoadError
from funrl.mesh.mesh import SINGLE
from funrl.serve.endpoint import serve_agent

pytest.importorskip("starlette", reason="pip install 'funrl[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'funrl[serve]'")

AGENT = """
import json, urllib.request

def say(base_url, api_key, messages):
    body = json.dumps({"model": "any", "messages": messages}).encode()
    request = urllib.request.Request(f"{base_url}/chat/completions", body, {"authorization": f"Bearer {api_key}"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)["choices"][0]["message"]["content"]

def run(base_url, api_key, prompt, bonus=0.0):
    return len(say(base_url, api_key, [{"role": "user", "content": prompt}])) + bonus

class Agent:
    def __init__(self, cost=3):
        self.cost = cost

    async def run(self, data, **extra):
        assert "cost" not in extra
        first = say_later(extra)
        return {"reward": float(len(await first)), "cost": self.cost, "note": "text"}

async def say_later(extra):
    import asyncio
    return await asyncio.to_thread(say, extra["base_url"], extra["api_key"], extra["messages"])
"""


@pytest.fixture
def agent(tmp_path):
    (tmp_path / "agent.py").write_text(AGENT)
    return f"program:{tmp_path}/agent.py"


def test_a_program_gets_the_arguments_that_it_takes(agent):
    episode = run(named_environment(f"{agent}:run", {"bonus": 0.5}), "four", other=1)
    assert episode.rewards == {"policy": 4.5} and episode.parts == {"forks": 0.0}
    assert text(episode.ends[0].token_ids()) == "u>go</s>\na>four</s>"


def test_a_class_may_return_a_reward_with_further_numbers(agent):
    episode = run(named_environment(f"{agent}:Agent"), engine=engine_of(), setup=SETUP)
    (node,) = [node for node in episode.ends[0].nodes() if node.sampled]
    written = node.tokens[:-1] if node.finish == "stop" else node.tokens
    assert episode.rewards == {"policy": float(len(text(written)))} and episode.parts["cost"] == 3.0
    assert len(node.sampling_logp) == len(node.tokens)
    assert run(named_environment(f"{agent}:Agent", {"cost": 5}), "yes").parts["cost"] == 5.0


def test_no_reward_is_unscored_and_an_error_fails():
    def ask(base_url, api_key, messages):
        body = json.dumps({"model": "any", "messages": messages}).encode()
        head = {"authorization": f"Bearer {api_key}"}
        with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, head)) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    def unscored(base_url, api_key, messages):
        ask(base_url, api_key, messages)

    assert run(agent_program(unscored), "yes").rewards == {"policy": None}

    def broken(base_url, api_key, messages):
        ask(base_url, api_key, messages)
        return {"score": 1.0}

    episode = run(agent_program(broken), "yes")
    assert episode.status == "failed" and "without 'reward'" in episode.problem

    def insisting(base_url, api_key):
        messages = [{"role": "user", "content": "x"}]
        for _ in range(3):
            content = ask(base_url, api_key, messages)
            messages += [{"role": "assistant", "content": content}, {"role": "user", "content": "y"}]
        return 1.0

    episode = run(agent_program(insisting), "yes", limits=LIMITS._replace(turns=2))
    assert (episode.status, episode.rewards) == ("turns", {"policy": None})


@pytest.mark.parametrize(
    "name,arguments,problem",
    [
        ("run", {"bonuss": 1}, "takes no argument 'bonuss', only base_url, api_key, prompt, bonus"),
        ("json", {}, "is neither a function nor has it run"),
    ],
)
def test_what_is_no_program_is_refused(agent, name, arguments, problem):
    with pytest.raises(LoadError, match=problem):
        named_environment(f"{agent}:{name}", arguments)
    with pytest.raises(TypeError, match="takes neither base_url nor api_key"):
        agent_program(len)


def test_a_program_and_its_endpoint_in_a_worker_have_the_same_tokens(agent):
    environment = named_environment(f"{agent}:Agent")
    here = run(environment, engine=engine_of(), setup=SETUP)
    hosted = hosted_environment(environment, 1)
    with open_hosted(hosted, SETUP.chat, serve_agent):
        there = run(hosted, engine=engine_of(), setup=SETUP)
        again = run(hosted, engine=engine_of(), setup=SETUP)  # by the server that the first one started
        groups = episode_groups(examples_of("go", "come"), 1, 0)
        both = run_episodes(engine_of(), SINGLE, hosted, groups, SETUP, LIMITS).episodes
    for episode in (there, again):
        assert plain(episode)[0] == plain(here)[0]
        assert (episode.status, episode.rewards, episode.parts) == (here.status, here.rewards, here.parts)
    assert [(episode.status, episode.problem) for _, episode in both] == [("done", "")] * 2
