"""Tokens of generation per second: the native engine, and its ratio to vLLM.

The roofline is the time that the passes take at least: the prompts' products; then for each token the weights and each
sequence's keys and values from memory once, or the products, whichever takes longer.
"""

from __future__ import annotations

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
    news = refilled_news(bench, rows)
    prompts = np.random.default_rng(2).integers(3, model.config.vocab, (len(news), work.prompt)).tolist()
    bound = sum(news) / least_refilled(bench, model, work, news)
    sizes = static_decode.MIXED_TOKENS
    for name, captured in (("refilled rows", sizes), ("refilled rows, prompts without graphs", (0,))):
        static_decode.MIXED_TOKENS = captured
        engine = native(bench, model, static=True, rows=rows)
        engine.load(engine.weights.named(params))
        for seed in range(2):  # the first one compiles and captures
            passes = engine.cost().passes
            seconds = timed_completions(engine, prompts, news, seed)
        passes = engine.cost().passes - passes
        label = f"{name}, {work.model}, {len(news)} rows through {rows}"
        note = f"{passes} passes of {1e3 * seconds / passes:.3g} ms"
        yield Row(label, sum(news) / seconds, "tokens/s", bound, note=note)
    static_decode.MIXED_TOKENS = sizes


def float8_rows(bench: Bench) -> Rows:
    """The native engine with products in 8 bits, beside the roofline of 16 bits."""
    work = work_of(bench)
    model = model_of(work.model)
    params = random_weights(model, bench.device, DTYPE)
    turn = engine_turn(native(bench, model, static=True, float8=True), params, work)
    for rows in work.rows:
        yield measured(bench, "native engine in float8", work, (turn, rows))


class PeerCase(NamedTuple):
    """Prompts that both engines complete.

    Attributes:
      name: in the table.
      news: tokens to sample after each prompt.
    """

    name: str
    news: Sequence[int]


def peer_rows(bench: Bench, python: str | None) -> Rows:
    """Ratios of the native engine to vLLM, compiled and with CUDA graphs, turn by turn on the same device.

    Args:
      python: interpreter of an environment that has vLLM; None: there is none.
    """
    if python is None:
        yield Row("native over vLLM", None, "x", note="left out: --vllm_python=PATH names an interpreter that has vLLM")
        return
    work = work_of(bench)._replace(**{"model": "0.2M, head 32"} if bench.small else {})
    model = model_of(work.model)
    params = random_weights(model, bench.device, DTYPE)
    most = work.rows[-1]
    cache_bytes = most * (work.prompt + work.new + 64) * key_value_bytes(model) + (1 << 30)
    engine = native(bench, model, static=True, rows=most, cache_bytes=cache_bytes)
    engine.load(engine.weights.named(params))
    cases = [PeerCase(f"{rows} rows", [work.new] * rows) for rows in work.rows]
    cases.append(PeerCase(f"{2 * most} rows through {most}", refilled_news(bench, most)))
    on_host = trees.map(lambda x: x.cpu(), params)
    options = PeerOptions(python, cache_bytes=cache_bytes, rows=most)
    with Peer(model, on_host, str(DTYPE).removeprefix("torch."), options) as peer:
        for case in cases:
            prompts = np.random.default_rng(3).integers(3, model.config.vocab, (len(case.news), work.prompt)).tolist()
            spans = [
                (timed_completions(engine, prompts, case.news, seed), peer.turn(prompts, case.news, seed))
                for seed in range(1 + TURNS)
            ][1:]  # the first ones compile and capture
            own, other = (sum(case.news) / statistics.median(seconds) for seconds in zip(*spans, strict=True))
            note = f"native {own:,.4g}, vLLM {other:,.4g} tokens/s; vLLM {peer.version}: {peer.flags}"
            yield Row(f"native over vLLM, {work.model}, {case.name}", own / other, "x", note=note)


def refilled_news(bench: Bench, rows: int) -> list[int]:
    """Tokens of twice as many completions as rows are decoded together, which end one by one."""
    return [2 + n % 5 if bench.small else 32 + 97 * n % 224 for n in range(2 * rows)]


def native(
    bench: Bench,
    model: Model,
    static: bool,
    rows: int = NATIVE_DEFAULTS.max_rows,
    cache_bytes: int = 0,
    float8: bool = False,
) -> NativeEngine:
    """The native engine as a run makes it: with a compiled layer on a GPU."""
    layer = compile_layer(model, "auto", bench.device.type)
    options = NativeOptions(rows, cache_bytes, packed=False, static=static, float8=float8)
    return native_engine(model, Mesh(parse("dp1"), 0, bench.device), DTYPE, options=options, layer=layer)


def engine_turn(engine: NativeEngine, params: trees.Tree, work: Generation) -> Turn:
    """Turns of an engine in this process."""
    engine.load(engine.weights.named(params))
    return lambda prompts, seed: timed_completions(engine, prompts, [work.new] * len(prompts), seed)


def timed_completions(engine: NativeEngine, prompts: Sequence[Sequence[int]], news: Sequence[int], seed: int) -> float:
    """Seconds in which an engine completes prompts with so many new tokens each."""
    device = engine.weights.mesh.device
    requests = [
        Request(n, prompt, Sampling(max_new_tokens=new), request_seed(seed, n))
        for n, (prompt, new) in enumerate(zip(prompts, news, strict=True))
    ]
    begin = now(device)
    completions = complete(engine, requests)
    seconds = now(device) - begin
    assert [len(completion.tokens) for completion in completions] == list(news)
    return seconds


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
