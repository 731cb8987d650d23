"""Environments of NeMo-Gym: a server that speaks as its agent, model and resources servers do."""

import contextlib
import http.server
import json
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import closing
from pathlib import Path
from typing import ClassVar

import pytest
from foreign_runs import LIMITS, call_text, page_module, page_text, run
from free_ports import free_port
from small_chats import SETUP, engine_of, text

import funrl
from funrl.environments.builtin.load import load_environment
from funrl.loading import LoadError

pytest.importorskip("starlette", reason="pip install 'funrl[serve]'")
pytest.importorskip("uvicorn", reason="pip install 'funrl[serve]'")

RELAY = Path(__file__).parents[2] / "examples" / "nemo_gym_relay.py"
ENVIRONMENT = "examples/env_nemo_gym.py:nemo_gym"
TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": True,
}
JSON = {"content-type": "application/json"}
ROW = {"responses_create_params": {"input": "what's it like in sf?", "tools": [TOOL]}, "city": "sf"}


class Gym(http.server.BaseHTTPRequestHandler):
    """The requests `/run` of nemo-gym's `simple_agent`, with the model server `openai_model` and a weather server."""

    model_url = ""
    asked: ClassVar = []

    def log_message(self, *args): ...

    def do_GET(self):
        self.answer(404, {"detail": "Not Found"})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        try:
            self.answer(200, self.run(body))
        except urllib.error.HTTPError as error:
            self.answer(500, {"detail": error.read().decode()})

    def run(self, row):
        given = row["responses_create_params"]
        prompt = given["input"]
        items = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        while True:
            response = self.respond({**given, "input": items})
            items += response["output"]
            calls = [item for item in response["output"] if item["type"] == "function_call"]
            for call in calls:
                weather = json.dumps({"city": json.loads(call["arguments"])["city"], "weather": "cold"})
                items.append({"type": "function_call_output", "call_id": call["call_id"], "output": weather})
            if not calls:
                break
        called = [item["arguments"] for item in items if item.get("type") == "function_call"]
        reward = float(any(row["city"] in arguments for arguments in called))
        verified = {**row, "response": response, "reward": reward, "calls": len(called), "mask_sample": False}
        return verified | row.get("overrides", {})

    def respond(self, body):
        type(self).asked.append(body)
        data = json.dumps({**body, "model": "policy"}).encode()
        headers = {"authorization": "Bearer any", **JSON}
        request = urllib.request.Request(f"{self.model_url}/responses", data, headers)
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextlib.contextmanager
def running_relay():
    """Run the relay of examples/; gives its port."""
    port = free_port(20_000, 32_000)
    with subprocess.Popen([sys.executable, RELAY, str(port)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert f"127.0.0.1:{port}" in process.stdout.readline()
            yield port
        finally:
            process.kill()


@pytest.fixture(scope="module")
def gym():
    with running_relay() as port, http.server.ThreadingHTTPServer(("127.0.0.1", 0), Gym) as server:
        Gym.model_url = f"http://127.0.0.1:{port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def endpoint():
    """A socket that listens as an endpoint does, and the port of a relay."""
    with running_relay() as relay, socket.create_server(("127.0.0.1", 0)) as server:
        yield server, relay


def test_an_episode_of_an_agent_server(gym):
    environment = load_environment(ENVIRONMENT, {"url": gym})
    episode = run(environment, call_text("get_weather", city="sf"), "cold", **ROW)
    assert (episode.status, episode.rewards) == ("done", {"policy": 1.0}) and episode.parts["calls"] == 1.0
    (end,) = episode.ends
    written = text(end.token_ids())
    assert written.startswith("[get_weather]u>what's it like in sf?</s>\na><tool_call>") and written.endswith(
        "a>cold</s>"
    )
    assert [node.sampled for node in end.nodes()] == [False, True, False, True]
    assert run(environment, "hot", **ROW).rewards == {"policy": 0.0}
    masked = run(environment, "hot", overrides={"mask_sample": True}, **ROW)
    assert masked.rewards == {"policy": None}
    several = run(environment, "hot", overrides={"reward_components": {"style": 0.5}}, **ROW)
    assert several.parts["style"] == 0.5
    plain = run(environment, "hot", city="sf")  # a prompt of the run's own
    assert text(plain.ends[0].token_ids()) == "u>go</s>\na>hot</s>"


def test_tokens_are_those_of_the_engine(gym):
    environment = load_environment(ENVIRONMENT, {"url": gym})
    for node in run(environment, engine=engine_of(), setup=SETUP, **ROW).ends[0].nodes():
        assert not node.sampled or len(node.sampling_logp) == len(node.tokens) == len(node.versions)


def test_errors_and_limits(gym):
    environment = load_environment(ENVIRONMENT, {"url": gym})
    broken = run(environment, "x", responses_create_params={"input": "hi", "background": True}, city="sf")
    assert broken.status == "failed" and "answers with status 500" in broken.problem
    assert "background=true is not served" in broken.problem
    cut = run(environment, call_text("get_weather", city="sf"), limits=LIMITS._replace(turns=1), **ROW)
    assert (cut.status, cut.rewards) == ("turns", {"policy": None})
    without = run(environment, "hot", overrides={"reward": None}, **ROW)
    assert without.status == "done" and without.rewards == {"policy": None}


def test_rows_of_a_file_are_prompts(gym, tmp_path):
    developer = {"input": [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "hi"}]}
    rows = [ROW, {"responses_create_params": developer, "city": "rome"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    environment = load_environment(ENVIRONMENT, {"url": gym, "data": str(tmp_path / "rows.jsonl")})
    first, second = environment.prompts(0)
    assert first == {"prompt": [{"role": "user", "content": "what's it like in sf?"}], **ROW}
    assert [message["role"] for message in second["prompt"]] == ["system", "user"] and second["city"] == "rome"
    (tmp_path / "rows.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(LoadError, match="line 1 has no responses_create_params"):
        load_environment(ENVIRONMENT, {"url": gym, "data": str(tmp_path / "rows.jsonl")})


@pytest.mark.parametrize(
    "body,status",
    [
        (b'{"input": "x"}', 401),
        (b'{"input": "x", "user": "1.key"}', 401),
        (b'{"input": "x", "user": "99999.key"}', 401),
        (b"{", 400),
        (b"[]", 401),
    ],
)
def test_a_request_without_an_episode_is_refused(gym, body, status):
    run(load_environment(ENVIRONMENT, {"url": gym}), "hot", **ROW)
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{Gym.model_url}/responses", body, JSON))
    with closing(refused.value) as answer:
        assert answer.code == status and json.load(answer)["error"]["message"]


@pytest.mark.parametrize(
    "path,headers,status",
    [
        ("/v1/responses", {**JSON, "origin": "http://elsewhere.example"}, 403),
        ("/v1/responses", {"content-type": "text/plain"}, 415),
        ("/shutdown", JSON, 404),
        ("/v1/../shutdown", JSON, 404),
    ],
)
def test_what_is_no_request_of_a_model_server_reaches_no_port(endpoint, path, headers, status):
    server, relay = endpoint
    body = json.dumps({"user": f"{server.getsockname()[1]}.key"}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"http://127.0.0.1:{relay}{path}", body, headers))
    with closing(refused.value) as answer:
        assert answer.code == status
    server.settimeout(0)
    with pytest.raises(BlockingIOError):
        server.accept()


def test_a_client_that_goes_away_ends_its_request_at_the_endpoint(endpoint):
    server, relay = endpoint
    body = json.dumps({"user": f"{server.getsockname()[1]}.key"}).encode()
    head = f"POST /v1/responses HTTP/1.1\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    server.settimeout(60)
    with socket.create_connection(("127.0.0.1", relay)) as client:
        client.sendall(head.encode() + body)
        asked, _ = server.accept()
    with asked:
        asked.settimeout(60)
        received = b""
        while data := asked.recv(1 << 16):
            received += data
    assert received.endswith(body)


def test_a_key_ends_with_its_episode(gym):
    run(load_environment(ENVIRONMENT, {"url": gym}), "hot", **ROW)
    body = json.dumps({**Gym.asked[-1], "model": "policy"}).encode()
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(urllib.request.Request(f"{Gym.model_url}/responses", body, JSON))
    assert refused.value.code == 401
    refused.value.close()


def test_what_is_not_there_is_named():
    with pytest.raises(LoadError, match=r"no agent server of NeMo-Gym answers at http:.*start it first"):
        load_environment(ENVIRONMENT, {"url": "http://127.0.0.1:1"})


@pytest.mark.slow
def test_the_example_of_the_page_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letters.jsonl").write_text(page_text("letters.jsonl", "json"))
    small_model, page = page_module("small_model"), page_module("agent_server")
    small_model.save_small_model()
    with running_relay() as port, page.ThreadingHTTPServer(("127.0.0.1", 0), page.Agent) as server:
        page.POLICY_URL = f"http://127.0.0.1:{port}/v1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        run = funrl.train(
            "grpo",
            model="MODEL_DIR",
            env=ENVIRONMENT,
            env_args={"url": f"http://127.0.0.1:{server.server_port}", "data": "letters.jsonl"},
            run_dir="letters",
            mesh="dp2",
            generate_mesh="dp2",
            **small_model.SHORT | {"steps": 2},
        )
        server.shutdown()
    assert all(metrics["rollout/logprob_gap_max"] == 0 for metrics in run.metrics)
    assert all(metrics["episodes/failed"] == 0 for metrics in run.metrics)
