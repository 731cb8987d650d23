"""A server of the package openenv on loopback, in a process of its own (.ci/setup_environments)."""

import asyncio
import json
import select
import subprocess
from pathlib import Path

import pytest
from foreign_runs import LIMITS, call_text, heard, page_module, page_source, run
from small_chats import SETUP, engine_of, text

import funrl
from funrl.foreign.load import named_environment
from funrl.loading import LoadError
from funrl.testing import check_environment

HERE = Path(__file__).parent
connect = pytest.importorskip("websockets.asyncio.client", reason="pip install 'funrl[environments]'").connect
START_S = 120
PYTHON = HERE.parents[1] / ".venv-openenv/bin/python"
pytestmark = pytest.mark.skipif(not PYTHON.exists(), reason="openenv is not installed: .ci/setup_environments")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """Name of an environment -> the URL of its server; one process serves all."""
    page = tmp_path_factory.mktemp("page") / "guessing_server.py"
    page.write_text(page_source("guessing_server"))
    command = [PYTHON, HERE / "plugins/openenv_server.py", page]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert select.select([process.stdout], [], [], START_S)[0], "the servers do not start"
            ports = process.stdout.readline()
            assert ports, f"the servers end with status {process.wait()}"
            urls = {name: f"http://127.0.0.1:{port}" for name, port in json.loads(ports).items()}
            yield urls.__getitem__
        finally:
            process.kill()


def test_tools_of_mcp_are_tools(servers):
    environment = named_environment(f"openenv:{servers('echo')}")
    replies = [
        call_text("echo_message", message="hi"),
        call_text("measure", message="four"),
        call_text("measure"),
        "ok",
    ]
    episode = run(environment, *replies)
    assert [tool["function"]["name"] for tool in episode.ends[0].tools] == ["echo_message", "measure"]
    assert heard(episode) == ["hi", '{"length": 4}', "error: measure needs message; it has message"]
    assert (episode.status, episode.rewards) == ("done", {"policy": None})
    assert text(episode.ends[0].token_ids()).startswith('[echo_message][measure]u>go\n\n{"status": "ready"}</s>')
    failed = run(environment, call_text("measure", message=""), "ok")
    assert failed.parts["failed_tool_calls"] == 1.0 and "it is empty" in heard(failed)[0]
    rewarded = named_environment(f"openenv:{servers('echo')}", {"reward": "exact"})
    assert run(rewarded, call_text("echo_message", message="hi"), "yes", answer="yes").rewards == {"policy": 1.0}


def test_a_typed_action_is_one_tool(servers):
    environment = named_environment(f"openenv:{servers('guess')}")
    calls = [call_text("step", number=n) for n in (3, -1, 7)]
    episode = run(environment, *calls, seed=27)
    assert (episode.status, episode.rewards) == ("done", {"policy": 1.0})
    assert heard(episode)[0] == "higher" and "numbers are positive" in heard(episode)[1]
    assert list(episode.turn_rewards.values()) == [0.0, 1.0]
    (tool,) = episode.ends[0].tools
    assert tool["function"]["description"] == "Guess the number."
    wrong = run(environment, call_text("step", number="x"), "no", seed=27)
    assert (
        heard(wrong) == ['error: step: number is of type integer, not "x" (string)'] and wrong.rewards["policy"] is None
    )
    cut = run(environment, calls[0], limits=LIMITS._replace(turns=1), seed=27)
    assert (cut.status, cut.rewards) == ("turns", {"policy": 0.0})


@pytest.mark.slow
def test_episodes_train(servers, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small_model = page_module("small_model")
    small_model.save_small_model()
    given = {"model": "MODEL_DIR", "env": f"openenv:{servers('say')}", "env_args": {"episodes": 8, "reply": "message"}}
    trained = funrl.train("grpo", run_dir="run", episode_turns=3, **given, **small_model.SHORT | {"steps": 2})
    assert all(metrics["rollout/logprob_gap_max"] == 0 for metrics in trained.metrics)


def test_the_server_of_the_page(servers):
    episode = run(named_environment(f"openenv:{servers('page')}"), call_text("step", number=4), seed=4)
    assert episode.rewards == {"policy": 1.0}


def test_replies_may_be_actions(servers):
    environment = named_environment(f"openenv:{servers('say').replace('http', 'ws')}", {"reply": "message"})
    episode = run(environment, "hello", "you")
    assert heard(episode) == ["HELLO"] and episode.rewards["policy"] == pytest.approx(0.8)
    exact = run(environment, engine=engine_of(), setup=SETUP)
    for node in exact.ends[0].nodes():
        assert not node.sampled or len(node.sampling_logp) == len(node.tokens)
    records = environment.prompts(1)
    assert len({record["seed"] for record in records}) == len(records) == 256


def test_large_messages_pass(servers):
    episode = run(named_environment(f"openenv:{servers('guess')}"), "no", padding=700)
    assert "x" * 700 in text(episode.ends[0].token_ids())

    async def talk(size):
        async with connect(servers("say").replace("http", "ws") + "/ws") as connection:
            await connection.send('{"type": "reset"}')
            await connection.recv()
            await connection.send('{"type": "step", "data": {"message": "%s"}}' % ("x" * size))
            return len(await connection.recv())

    for size in (10, 200, 70_000):
        assert asyncio.run(talk(size)) > size


def test_a_server_that_is_full_or_absent_is_named(servers):
    environment = named_environment(f"openenv:{servers('crowded')}", {"reply": "message"})

    async def crowd():
        async with connect(servers("crowded").replace("http", "ws") + "/ws") as connection:
            await connection.send('{"type": "reset"}')
            await connection.recv()
            return await asyncio.to_thread(run, environment, "hello")

    episode = asyncio.run(crowd())
    assert episode.status == "failed" and "CAPACITY_REACHED" in episode.problem
    with pytest.raises(LoadError, match=r"no OpenEnv server answers at http://127.0.0.1:1/schema .* start it first"):
        named_environment("openenv:127.0.0.1:1")
    with pytest.raises(LoadError, match="an action has no field 'text', only message"):
        named_environment(f"openenv:{servers('say')}", {"reply": "text"})


@pytest.mark.slow
def test_properties_of_environments(servers):
    tools = named_environment(f"openenv:{servers('guess')}")
    check_environment(tools, examples=[("go", {"seed": 3})], replies=[call_text("step", number=n) for n in (1, 3, -1)])
    check_environment(named_environment(f"openenv:{servers('say')}", {"reply": "message"}))
