"""Tokens of generation per second on a GPU: the native engine with CUDA graphs and without, and transformers.

    python benchmarks/generate_gpu.py
    python benchmarks/generate_gpu.py --layers=2 --batches=1,4 --new=16 --device=cpu   # the program, not the numbers

The model is a Qwen2 of 0.5B with random weights in bfloat16; prompts have 128 tokens, and all completions have the same
length. transformers generates with its static cache. Each takes its turn with the same prompts, the first of which is
not counted: graphs are captured in it.

The roofline of a row is the time that its passes take at least: the weights and each sequence's keys and values from
memory once, at the bandwidth that is measured here, or the products at the rate of a large matrix product, whichever is
longer.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch
from absl import app, flags
from transformers import GenerationConfig

from funrl import trees
from funrl.mesh.mesh import Mesh, parse
from funrl.models import Config, Model, decoder_config, decoder_model
from funrl.rollout.engine import complete
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.rollout.requests import Request, request_seed
from funrl.rollout.sampling_parameters import Sampling

BATCHES = flags.DEFINE_list("batches", ["1", "64", "256"], "completions that are drawn together")
NEW = flags.DEFINE_integer("new", 256, "tokens of a completion")
PROMPT = flags.DEFINE_integer("prompt", 128, "tokens of a prompt")
LAYERS = flags.DEFINE_integer("layers", 24, "of the model")
REPEATS = flags.DEFINE_integer("repeats", 3, "turns, of which the median is taken")
DEVICE = flags.DEFINE_enum("device", "cuda", ["cuda", "cpu"], "where")
Turn = Callable[[Sequence[Sequence[int]], int], float]


def main(argv: list[str]) -> None:
    del argv
    if DEVICE.value == "cuda" and not torch.cuda.is_available():
        raise app.UsageError("there is no GPU here; --device=cpu tries the program")
    device = torch.device(DEVICE.value)
    config = decoder_config(
        family="qwen2", vocab=151936, embed=896, layers=LAYERS.value, heads=14, kv_heads=2, head=64, mlp=4864,
        attention_bias=True, tied=True, rope_theta=1e6,
    )  # fmt: skip
    model = decoder_model(config)
    params = trees.map(lambda x: x.to(device), model.init(torch.Generator().manual_seed(0), torch.bfloat16))
    bandwidth, rate = memory_bandwidth(device), matrix_rate(device)
    print(f"{device}: {bandwidth / 1e9:.0f} GB/s, {rate / 1e12:.2f} TFLOP/s, {trees.count(params) / 1e9:.2f}B weights")
    engines = {"graphs": native(model, device, True), "eager": native(model, device, False)}
    turns = {name: engine_turn(engine, params) for name, engine in engines.items()}
    turns["transformers"] = static_cache_turn(model, params, device)
    for batch in map(int, BATCHES.value):
        prompts = np.random.default_rng(1).integers(3, config.vocab, (batch, PROMPT.value)).tolist()
        rounds = [{name: turn(prompts, seed) for name, turn in turns.items()} for seed in range(REPEATS.value + 1)][1:]
        seconds = {name: statistics.median(one[name] for one in rounds) for name in turns}
        least = roofline(config, params, batch, bandwidth, rate)
        speeds = "  ".join(f"{name} {batch * NEW.value / s:.0f}" for name, s in seconds.items())
        shares = "  ".join(f"{name} {least / s:.0%}" for name, s in seconds.items())
        print(f"{batch:4} | tokens/s: {speeds} | of the roofline: {shares}", flush=True)


def native(model: Model, device: torch.device, static: bool) -> NativeEngine:
    mesh = Mesh(parse("dp1"), 0, device)
    return native_engine(
        model, mesh, torch.bfloat16, options=NativeOptions(packed=False, static=static, cache_bytes=16 << 30)
    )


def engine_turn(engine: NativeEngine, params: trees.Tree) -> Turn:
    """Turns of the native engine."""
    engine.load(engine.weights.named(params))

    def turn(prompts: Sequence[Sequence[int]], seed: int) -> float:
        how = Sampling(max_new_tokens=NEW.value)
        begin = now()
        done = complete(engine, [Request(i, p, how, request_seed(seed, i)) for i, p in enumerate(prompts)])
        seconds = now() - begin
        assert all(len(one.tokens) == NEW.value for one in done)
        return seconds

    return turn


def static_cache_turn(model: Model, params: trees.Tree, device: torch.device) -> Turn:
    """Turns of transformers' `generate`."""
    engine = hf_engine(model, Mesh(parse("dp1"), 0, device), dtype=torch.bfloat16)
    engine.load(engine.weights.named(params))
    module = engine.model

    def turn(prompts: Sequence[Sequence[int]], seed: int) -> float:
        torch.manual_seed(seed)
        config = GenerationConfig(
            max_new_tokens=NEW.value, do_sample=True, top_k=0, cache_implementation="static", eos_token_id=-1,
            pad_token_id=0,
        )  # fmt: skip
        begin = now()
        found = module.generate(torch.tensor(prompts, device=device), config)
        seconds = now() - begin
        assert found.shape[1] == PROMPT.value + NEW.value
        return seconds

    return turn


def roofline(config: Config, params: trees.Tree, batch: int, bandwidth: float, rate: float) -> float:
    """Seconds of prefill and of all passes at least. The tied embedding is read once a pass, for the logits."""
    weights = trees.count(params)
    kv_bytes = 2 * 2 * config.layers * config.attention.kv_heads * config.attention.head
    seconds = 2 * (weights - params["embed"].numel()) * batch * PROMPT.value / rate
    for at in range(NEW.value - 1):
        memory = 2 * weights + batch * (PROMPT.value + at) * kv_bytes
        seconds += max(memory / bandwidth, 2 * weights * batch / rate)
    return seconds


def memory_bandwidth(device: torch.device) -> float:
    """Bytes a second that are read from memory."""
    x = torch.ones((1 << 31) if device.type == "cuda" else (1 << 27), dtype=torch.bfloat16, device=device)
    return max(x.nbytes / timed(lambda: x.view(torch.int32).max()) for _ in range(5))


def matrix_rate(device: torch.device) -> float:
    """FLOPs a second of a large product."""
    size = 8192 if device.type == "cuda" else 512
    x = torch.ones(size, size, dtype=torch.bfloat16, device=device)
    return max(2 * size**3 / timed(lambda: x @ x) for _ in range(5))


def timed(run: Callable[[], object]) -> float:
    begin = now()
    run()
    return now() - begin


def now() -> float:
    """Seconds of the clock, when the device has done all its work."""
    if DEVICE.value == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    app.run(main)
