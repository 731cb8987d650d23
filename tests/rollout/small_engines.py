"""Engines of small models with random weights, and what their completions are compared with."""

import atexit
import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from forked_python import start_python
from plain_sampling import plain_logp

from funrl import trees
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.mesh import rules
from funrl.mesh.mesh import SINGLE
from funrl.models import Config, Inputs, decoder_config, decoder_model
from funrl.rollout.engine import complete
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.vllm.client import vllm_client
from funrl.rollout.vllm.contract import VLLMOptions
from funrl.rollout.vllm.core import start_vllm
from funrl.rollout.vllm.engine import VLLMEngine, vllm_weights

SMALL = {"vocab": 40, "embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 48, "max_positions": 128}
CONFIGS = {
    "llama": decoder_config(**SMALL),
    "llama tied": decoder_config(**SMALL | {"kv_heads": 4}, tied=True),
    "qwen2": decoder_config(**SMALL, family="qwen2", attention_bias=True),
    "qwen3": decoder_config(**SMALL | {"head": 16}, family="qwen3", qk_norm=True),
    "qwen3 window": decoder_config(**SMALL, family="qwen3", qk_norm=True, windows=(None, 6)),
}
PROMPTS = [[1, 2, 3], [7], [5, 6, 7, 8, 9, 10, 11, 12, 13], [4, 4], [30, 20, 10], [39] * 6, [2, 3, 5, 7, 11, 13, 17]]
NO_PACKING = library_problem()  # the reason why there is no compiled decoding step here
# The same of vLLM, which has an environment of its own.
NO_VLLM = None if importlib.util.find_spec("vllm") else "no vLLM here: ./test --all makes .venv-vllm for it"
# Heads of a size that vLLM's attention on a CPU takes.
WIDE = decoder_config(**SMALL | {"head": 32}, family="qwen3", qk_norm=True)


def weights(config, dtype=torch.float32, seed=0):
    """Random weights whose distributions are neither flat nor certain; the same numbers in float32 and float64."""
    params = decoder_model(config).init(torch.Generator().manual_seed(seed))
    for name in {"embed", "unembed"} & set(params):
        params[name] = params[name] * 25
    return trees.map(lambda x: x.to(dtype), params)


def decode(ids):
    """Token ids as text, a character each."""
    return "".join(chr(ord("0") + i) for i in ids)


class Kind(NamedTuple):
    """A way to make an engine.

    Attributes:
      make: (model, mesh, dtype) -> the engine.
      dtype: of its weights.
      close: bound on the error of its log-probabilities.
      same: bound on their difference where only the other requests differ.
      whole: it completes whole requests only.
      mesh: that it runs on, "" for one process.
      config: of the model that it is tried with.
    """

    make: Callable[..., Any]
    dtype: torch.dtype = torch.float32
    close: float = 2e-5
    same: float = 1e-5
    whole: bool = False
    mesh: str = ""
    config: Config = CONFIGS["qwen3 window"]

    def engine(self, config, mesh=SINGLE, seed=0, version=7):
        return load(self.make(decoder_model(config), mesh, self.dtype), weights(config, self.dtype, seed), version)


def _native(packed, speculate=0, static=False):
    how = {"decode": decode, "packed": packed, "speculate": speculate, "static": static}
    return lambda model, mesh, dtype: native_engine(model, mesh, dtype, NativeOptions(**how))


_vllm_cores = {}


def _vllm(model, mesh, dtype, **how):
    """An engine of its own over a vLLM that the tests of a process share, for it takes seconds to start."""
    options = VLLMOptions(64, 1 << 24, decode=decode, **how)
    key = model.config, mesh.rank, dtype, tuple(how.items())
    if key not in _vllm_cores:
        _vllm_cores[key] = start_vllm(model, mesh, dtype, options)
    core = _vllm_cores[key]
    core.wake()
    return VLLMEngine(model, vllm_weights(model, mesh, dtype), core, options)


class ServerProcess:
    """A server of vLLM in a process of its own."""

    def __init__(self, port=0):
        self.process = start_python(["-m", "funrl.rollout.vllm.server", f"--port={port}"], os.environ, stderr=None)
        atexit.register(self.process.kill)
        self.url = self.process.stdout.readline().split()[-1]

    def kill(self):
        self.process.kill()
        self.process.wait()


@functools.cache
def _server():
    return ServerProcess()


def _vllm_server(model, mesh, dtype):
    """An engine of its own over the server that the tests of a process share."""
    return vllm_client(_server().url, model, mesh, dtype, VLLMOptions(64, 1 << 24, decode=decode), timeout_s=120)


KINDS = {
    "packed float32": Kind(_native(True), same=0),
    "packed float32, drafts": Kind(_native(True, 4), same=0),
    "torch float64": Kind(_native(False), torch.float64, 1e-10, 1e-12),
    "static float64": Kind(_native(False, static=True), torch.float64, 1e-10, 1e-12),
    "torch float64 tp2": Kind(_native(True), torch.float64, 1e-10, 1e-12, mesh="tp2"),
    "hf": Kind(hf_engine, close=3e-5, whole=True),
    "vllm": Kind(_vllm, config=WIDE),
    "vllm tp2": Kind(_vllm, mesh="tp2", config=WIDE),
    "vllm server": Kind(_vllm_server, config=WIDE),
}


def load(engine, params, version=7):
    """The engine with whole weights; it takes its shards from them."""
    own = rules.shard(params, engine.weights.layouts, engine.weights.mesh)
    engine.load(engine.weights.named(own), version)
    return engine


def engine_of(config, dtype=torch.float32, seed=0, **how):
    """A native engine with weights."""
    engine = native_engine(decoder_model(config), dtype=dtype, options=NativeOptions(decode=decode, **how))
    return load(engine, weights(config, dtype, seed))


def completed(engine, prompts, sampling, seed=0, first_prompt=0):
    return complete(engine, requests_of(prompts, sampling, seed, first_prompt))


def rows(done):
    """Tokens of completions as lists."""
    return [completion.tokens.tolist() for completion in done]


def assert_same(ones, others, close=0.0):
    """Equal completions, log-probabilities up to a bound."""
    assert [(completion.number, completion.finish) for completion in ones] == [
        (item.number, item.finish) for item in others
    ]
    assert rows(ones) == rows(others)
    for element, other in zip(ones, others, strict=True):
        for a, b in ((element.sampling_logp, other.sampling_logp), (element.raw_logp, other.raw_logp)):
            assert a.dtype == b.dtype and (len(a) == 0 or (a - b).abs().max() <= close)


def plain_logps(config, prompt, tokens, sampling, seed=0):
    """Log-probabilities [T] in float64 of a completion: of the distribution that is drawn from, and the model's own."""
    model, params, ids = decoder_model(config), weights(config, torch.float64, seed), torch.tensor([[*prompt, *tokens]])
    logits_TV = model.apply(params, Inputs(ids)).hidden[0, len(prompt) - 1 : -1] @ model.unembed(params).T
    raw_TV = logits_TV.log_softmax(-1)
    seen_TV = torch.zeros(raw_TV.shape, dtype=torch.bool)
    for t, row in enumerate(seen_TV):
        row[[*prompt, *tokens[:t]]] = True
    drawn_TV = plain_logp(logits_TV, sampling, seen_TV)
    token_T1 = torch.tensor(tokens)[:, None]
    return (raw_TV if sampling.greedy else drawn_TV).gather(1, token_T1)[:, 0], raw_TV.gather(1, token_T1)[:, 0]
