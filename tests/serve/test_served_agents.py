"""Environments that ask for the endpoint of an agent, and programs in processes of their own."""

import json
import os
import time
import urllib.error
import urllib.request

import pytest
from small_chats import SETUP, engine_of, examples_of
from small_servers import LIMITS, LONG, TOOL, needs_clients, scripted

from funrl.environments.calls import call
from funrl.environments.hosted import hosted_environment, open_hosted
from funrl.environments.run import episode_groups, run_episodes
from funrl.mesh.mesh import SINGLE
from funrl.rollout.episodes import Episode
from funrl.rollout.policy import EpisodeLimits, UnknownAgentError
from funrl.serve.endpoint import serve_agent
from funrl.serve.programs import endpoint_environment

pytestmark = needs_clients
SERVED = SETUP._replace(serve=serve_agent)


def ask(messages, base_url, api_key, model, **further):
    """The message of one reply."""
    body = json.dumps({"model": model, "messages": messages, **further}).encode()
    headers = {"authorization": f"Bearer {api_key}"}
    with urllib.request.urlopen(urllib.request.Request(f"{base_url}/chat/completions", body, headers)) as answer:
        return json.load(answer)["choices"][0]["message"]


def run(environment, setup=SERVED, limits=LIMITS, count=1, engine=None):
    examples = [example for n in range(count) for example in examples_of(f"prompt {n}", number=n)]
    groups = episode_groups(examples, 1, seed=1)
    done = run_episodes(engine or engine_of(), SINGLE, environment, groups, setup, limits)
    return [episode for _, episode in done.episodes]


def status_of(endpoint):
    """HTTP status of a request."""
    try:
        ask([{"role": "user", "content": "x"}], *endpoint)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


class Debate:
    """Two agents that talk over HTTP, and one turn without it; then the keys of the episode before."""

    def __init__(self):
        self.ended = []
        self.statuses = []

    async def run(self, policy, example, seed):
        self.statuses += [await call(status_of, endpoint) for endpoint in self.ended]
        speaker, critic = self.ended = [await policy.endpoint(), await policy.endpoint(agent="critic")]
        messages = [{"role": "user", "content": example.text}]
        first = await call(ask, messages, *speaker)
        await call(ask, [*messages, first, {"role": "user", "content": "why?"}], *speaker)
        await call(ask, [{"role": "user", "content": "judge " + first["content"]}], *critic)
        await policy.sample(policy.start([{"role": "user", "content": "alone"}], agent="critic"))
        return Episode(policy.ends(), {"policy": 1.0, "critic": 0.5})


def test_agents_of_an_environment_have_endpoints_that_end_with_the_episode():
    environment = Debate()
    episodes = run(environment, limits=LIMITS._replace(waiting=1), count=2)
    for episode in episodes:
        assert episode.status == "done", episode.problem
        shape = [(end.agent, sum(node.sampled for node in end.nodes())) for end in episode.ends]
        assert sorted(shape) == [("critic", 1), ("critic", 1), ("policy", 2)]
    assert environment.statuses == [401, 401] and len({endpoint.api_key for endpoint in environment.ended}) == 2


class Asking:
    """Asks for replies of an agent over HTTP, with arguments."""

    def __init__(self, agent="policy", turns=1, **further):
        self.agent, self.turns, self.further = agent, turns, further

    async def run(self, policy, example, seed):
        endpoint = await policy.endpoint(self.agent)
        messages = [{"role": "user", "content": example.text}]
        for _ in range(self.turns):
            reply = await call(ask, messages, *endpoint, **self.further)
            messages += [reply, {"role": "user", "content": "on"}]
        return Episode(policy.ends(), {self.agent: float(len(reply.get("tool_calls") or ()))})


def test_an_environment_whose_program_passes_a_limit_is_unscored():
    (episode,) = run(Asking(turns=4), limits=EpisodeLimits(turns=2, retries=0))
    assert (episode.status, episode.rewards) == ("turns", {"policy": None}), episode.problem
    assert [sum(node.sampled for node in end.nodes()) for end in episode.ends] == [2]
    (failed,) = run(Asking(colour=1), limits=EpisodeLimits(retries=0))
    assert failed.status == "failed" and "HTTPError" in failed.problem


def test_a_demanded_call_is_one_turn():
    rest = 'add", "arguments": {"a": 4}}</tool_call>'
    asking = Asking(turns=2, tools=[TOOL], tool_choice="required")
    (episode,) = run(asking, SERVED._replace(sampling=LONG.sampling), engine=scripted(rest, rest))
    assert episode.rewards == {"policy": 1.0}, episode.problem
    (end,) = episode.ends
    first, second = [node for node in end.nodes() if node.sampled]
    for node in (first, second):
        (message,) = node.messages
        assert [row["function"]["arguments"] for row in message["tool_calls"]] == [{"a": 4}]


def test_an_endpoint_without_a_server_or_of_an_unknown_agent_is_refused():
    (episode,) = run(Asking(), setup=SETUP, limits=EpisodeLimits(retries=0))
    assert "serve=funrl.serve.endpoint.serve_agent" in episode.problem
    with pytest.raises(UnknownAgentError, match="'critic'"):
        run(Asking("critic"), SERVED._replace(models={"policy": ""}))


def program(messages, *, base_url, api_key, model, number):
    """Runs in a worker process; some end it or never answer."""
    if number == 1:
        os._exit(3)
    reply = ask(messages, base_url, api_key, model)
    if number == 2:
        time.sleep(1e3)
    ask([*messages, reply, {"role": "user", "content": "on"}], base_url, api_key, model)
    return float(os.getpid())


def test_a_program_in_a_process_of_its_own_reaches_the_endpoint():
    environment = hosted_environment(endpoint_environment(program), workers=4)
    with open_hosted(environment, SERVED.chat, serve_agent):
        limits = EpisodeLimits(environment_s=3, retries=0)
        first, ended, hanging, last = run(environment, limits=limits, count=4)
    for episode in (first, last):
        assert episode.status == "done", episode.problem
        assert episode.rewards["policy"] != os.getpid()
        assert [sum(node.sampled for node in end.nodes()) for end in episode.ends] == [2]
    assert "ended with exit code 3" in ended.problem and "longer than 3 s" in hanging.problem
