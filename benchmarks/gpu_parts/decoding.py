"""Tokens of generation per second: the native engine, and vLLM where it is installed.

The roofline is the time that the passes take at least: the prompts' products; then for each token the weights and each
sequence's keys and values from memory once, or the products, whichever takes longer.
"""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from gpu_parts.models import model_of, random_weights
from gpu_parts.rows import Bench, Row, Rows, now, roofline_seconds
from vllm_peer import Peer, PeerOptions

from funrl import trees
from funrl.mesh.mesh import Mesh, parse
from funrl.models import Model, compile_layer
from funrl.rollout.engine import complete
from funrl.rollout.native import static_decode
from funrl.rollout.native.engine import NATIVE_DEFAULTS, NativeEngine, NativeOptions, native_engine
from funrl.rollout.requests import Request, request_seed
from funrl.rollout.sampling_parameters import Sampling

DTYPE = torch.bfloat16
TURNS = 3  # timed turns
TIMED_S = 20.0  # in which no further turn is begun
Turn = Callable[[Sequence[Sequence[int]], int], float]  # (prompts, seed) -> seconds


class Generation(NamedTuple):
    """Prompts to complete, all of one length.

    Attributes:
      model: its name in the table.
      rows: numbers of completions that are decoded together.
      prompt, new: tokens of a prompt and of a completion.
    """

    model: str = "1.7B"
    rows: tuple[int, ...] = (1, 64, 512)
    prompt: int = 128
    new: int = 256


SMALL = Generation("0.2M", (1, 2), 8, 4)


def work_of(bench: Bench) -> Generation:
    """The prompts for a device."""
    return SMALL if bench.small else Generation()


def native_rows(bench: Bench) -> Rows:
    """The native engine with passes of static shape, which are CUDA graphs on a GPU, and once without."""
    work = work_of(bench)
    model = model_of(work.model)
    params = random_weights(model, bench.device, DTYPE)
    turn = engine_turn(native(bench, model, static=True), params, work)
    for rows in work.rows:
        yield measured(bench, "native engine", work, (turn, rows))
    eager = engine_turn(native(bench, model, static=False), params, work)
    yield measured(bench, "native engine without graphs", work, (eager, work.rows[1]))


def mixed_rows(bench: Bench) -> Rows:
    """Rows that end one by one while as many others wait: most passes also compute a prompt, captured and eager."""
    work = work_of(bench)
    model = model_of(work.model)
    params = random_weights(model, bench.device, DTYPE)
    rows = work.rows[-1]
    news = [2 + n % 5 if bench.small else 32 + 97 * n % 224 for n in range(2 * rows)]
    prompts = np.random.default_rng(2).integers(3, model.config.vocab, (len(news), work.prompt)).tolist()
    bound = sum(news) / least_refilled(bench, model, work, news)
    sizes = static_decode.MIXED_TOKENS
    for name, captured in (("refilled rows", sizes), ("refilled rows, prompts without graphs", (0,))):
        static_decode.MIXED_TOKENS = captured
        engine = native(bench, model, static=True, rows=rows)
        engine.load(engine.weights.named(params))
        for seed in range(2):  # the first one compiles and captures
            passes = engine.cost().passes
            requests = [
                Request(n, prompt, Sampling(max_new_tokens=new), request_seed(seed, n))
                for n, (prompt, new) in enumerate(zip(prompts, news, strict=True))
            ]
            begin = now(bench.device)
            complete(engine, requests)
            seconds = now(bench.device) - begin
        passes = engine.cost().passes - passes
        label = f"{name}, {work.model}, {len(news)} rows through {rows}"
        note = f"{passes} passes of {1e3 * seconds / passes:.3g} ms"
        yield Row(label, sum(news) / seconds, "tokens/s", bound, note=note)
    static_decode.MIXED_TOKENS = sizes


def vllm_rows(bench: Bench) -> Rows:
    """vLLM, compiled and with CUDA graphs."""
    work = work_of(bench)
    if importlib.util.find_spec("vllm") is None:
        yield Row(f"vLLM, {work.model}", None, "tokens/s", note="left out: vllm is not installed here")
        return
    model = model_of(work.model)
    params = trees.map(lambda x: x.cpu(), random_weights(model, bench.device, DTYPE))
    if bench.device.type == "cuda":
        torch.cuda.empty_cache()
    tokens = max(work.rows) * (work.prompt + work.new + 64)
    cache_bytes = tokens * key_value_bytes(model) + (1 << 30)
    with Peer(model, params, "bfloat16", PeerOptions(cache_bytes=cache_bytes, rows=max(work.rows))) as peer:
        for rows in work.rows:
            turn = lambda prompts, seed: peer.turn(prompts, [work.new] * len(prompts), seed)  # noqa: E731
            yield measured(bench, "vLLM", work, (turn, rows))


def native(bench: Bench, model: Model, static: bool, rows: int = NATIVE_DEFAULTS.max_rows) -> NativeEngine:
    """The native engine as a run makes it: with a compiled layer on a GPU."""
    layer = compile_layer(model, "auto", bench.device.type)
    options = NativeOptions(max_rows=rows, packed=False, static=static)
    return native_engine(model, Mesh(parse("dp1"), 0, bench.device), DTYPE, options=options, layer=layer)


def engine_turn(engine: NativeEngine, params: trees.Tree, work: Generation) -> Turn:
    """Turns of an engine in this process."""
    engine.load(engine.weights.named(params))
    device = engine.weights.mesh.device

    def turn(prompts: Sequence[Sequence[int]], seed: int) -> float:
        sampling = Sampling(max_new_tokens=work.new)
        requests = [Request(i, prompt, sampling, request_seed(seed, i)) for i, prompt in enumerate(prompts)]
        begin = now(device)
        completions = complete(engine, requests)
        seconds = now(device) - begin
        assert all(len(completion.tokens) == work.new for completion in completions)
        return seconds

    return turn


def measured(bench: Bench, name: str, work: Generation, case: tuple[Turn, int]) -> Row:
    """Median tokens a second of turns after one that compiles and captures graphs.

    Args:
      case: the turn, and the number of its rows.
    """
    turn, rows = case
    model = model_of(work.model)
    prompts = np.random.default_rng(1).integers(3, model.config.vocab, (rows, work.prompt)).tolist()
    turn(prompts, 0)
    spans: list[float] = []
    begin = time.perf_counter()
    while len(spans) < TURNS and (not spans or time.perf_counter() - begin < TIMED_S):
        spans.append(turn(prompts, 1 + len(spans)))
    tokens = rows * work.new
    seconds, flops, nbytes = least(bench, model, work, rows)
    label = f"{name}, {work.model}, {rows} rows"
    return Row(label, tokens / statistics.median(spans), "tokens/s", tokens / seconds, flops=flops, nbytes=nbytes)


def least(bench: Bench, model: Model, work: Generation, rows: int) -> tuple[float, float, float]:
    """Seconds that the completions take at least, and the FLOPs and bytes of their passes."""
    weights = trees.count(model.shapes)  # a tied embedding is read once a pass, for the logits
    inner = weights - trees.count(model.shapes["embed"])
    flops = 2.0 * inner * rows * work.prompt
    nbytes = 2.0 * inner
    seconds = roofline_seconds(bench.hardware, flops, nbytes)
    for step in range(work.new - 1):
        read = 2.0 * weights + rows * (work.prompt + step) * key_value_bytes(model)
        products = 2.0 * weights * rows
        seconds += roofline_seconds(bench.hardware, products, read)
        flops += products
        nbytes += read
    return seconds, flops, nbytes


def least_refilled(bench: Bench, model: Model, work: Generation, news: Sequence[int]) -> float:
    """Seconds that completions of different lengths take at least, where as many rows as fit are always decoded."""
    weights = trees.count(model.shapes)
    inner = weights - trees.count(model.shapes["embed"])
    rows = work.rows[-1]
    read = sum(work.prompt * new + new * (new - 1) / 2 for new in news) * key_value_bytes(model)
    passes = sum(news) / rows
    prompts = roofline_seconds(bench.hardware, 2.0 * inner * len(news) * work.prompt, 2.0 * inner)
    return prompts + passes * roofline_seconds(bench.hardware, 2.0 * weights * rows, 2.0 * weights + read / passes)


def key_value_bytes(model: Model) -> int:
    """Bytes of a token's keys and values, all layers together."""
    return round(model.abilities.cost.cached(1) * DTYPE.itemsize)
