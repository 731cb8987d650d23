"""A simulated 7B generates on 8 and on 512 GPUs: the engine's scheduler and the ticket queue beside static chunks.

    OMP_NUM_THREADS=1 python benchmarks/scheduler.py
    OMP_NUM_THREADS=1 python benchmarks/scheduler.py --ranks=512 --rows=4096 --stride=128 --queues=tickets
    OMP_NUM_THREADS=1 python benchmarks/scheduler.py --passes

Everything but the model is real: `complete_shared`, `NativeEngine`, its scheduler and its pages. The model computes
nothing; a clock says how long its passes would take by the data sheet that --dry_run uses, and the ranks run in the
order of their clocks. Lengths are lognormal with a median of 4,096 tokens and at most 32,768; the scheduler does not
know them. A simulated pass stands for --stride passes of decoding, and a simulated token for as many tokens.

Static chunks decode as many rows as the cache holds at full length until the last of them ends, then the next. The
ideal has the cache full of rows of mean length to the end. "fixed" is the same engine with prompts shared out by their
numbers.

--passes prints milliseconds a pass of a 1.7B on one H200 whose rows are refilled as they end: with CUDA graphs of
passes that only decode, in powers of two of rows, and with graphs of passes with prompts too, in the row and token
sizes of `static_decode`. The clock is a prediction: captured passes of 1, 64 and 512 rows and an eager one as they were
measured (`benchmarks/README.md`, "One GPU"), and for each token beyond its rows what its products take at 780 TFLOP/s.
"""

from __future__ import annotations

import heapq
import threading
import time

import numpy as np
import torch
from absl import app, flags
from torch import Tensor
from weightless import Weightless, smallest_config

from funrl.cost.tracing.hardware import HARDWARE, USABLE, Hardware, op_seconds
from funrl.mesh.mesh import Mesh, parse
from funrl.models import decoder_model
from funrl.rollout.engine import WeightSpec, complete
from funrl.rollout.native.engine import NativeEngine, NativeOptions
from funrl.rollout.native.passes import PassWork, SampledRows
from funrl.rollout.native.static_decode import MIXED_TOKENS, bucket, row_bucket
from funrl.rollout.requests import Request, request_seed
from funrl.rollout.sampling import stream_noise
from funrl.rollout.sampling_parameters import Sampling
from funrl.rollout.tickets import Tickets, complete_shared

RANKS = flags.DEFINE_list("ranks", ["8"], "GPUs, each a replica")
ROWS = flags.DEFINE_integer("rows", 1024, "completions a rank")
SAMPLES = flags.DEFINE_integer("samples", 16, "completions of a prompt")
STRIDE = flags.DEFINE_integer("stride", 16, "tokens that a simulated token stands for; divides 256")
DEVICE = flags.DEFINE_enum("hardware", "h100", ["a100", "h100", "h200", "mi300x"], "data sheet")
MOST_ROWS = flags.DEFINE_integer("decode_rows", 512, "as the flag of a run")
QUEUES = flags.DEFINE_list("queues", ["tickets", "fixed"], "how prompts come to ranks")
SIGMA = flags.DEFINE_float("sigma", 1.0, "of the logarithm of a length")
PASSES = flags.DEFINE_bool("passes", False, "milliseconds a pass on one GPU, instead")
MEAN = flags.DEFINE_integer("mean_tokens", 512, "of completions with --passes")
PROMPT, MEDIAN, LONGEST, PAGE = 512, 4096, 32768, 256
PARAMETERS, LAYERS, KV_WIDTH = 7.6e9, 28, 4 * 128  # of Qwen2.5-7B, in bfloat16
KV_BYTES, WEIGHT_BYTES = 2 * 2 * LAYERS * KV_WIDTH, 2 * PARAMETERS

CAPTURED_ROWS = (1, 64, 512)  # of passes that decode
CAPTURED_MS = (2.76, 2.85, 9.4)  # of these passes
EAGER_MS = 24.0  # of the host, for any eager pass
TOKEN_MS = 2e3 * 1.409e9 / 780e12  # products of one token of the 1.7B
SHORT_PROMPT = 128


class SimulatedClocks:
    """Clocks of ranks that run as threads; the one that is furthest behind runs next."""

    def __init__(self, ranks: int):
        self.now = [0.0] * ranks
        self._waiting = [(0.0, rank) for rank in range(ranks)]
        self._turns = [threading.Semaphore(0) for _ in range(ranks)]

    def begin(self) -> None:
        self._next()

    def wait(self, rank: int) -> None:
        """Wait for the rank's first turn."""
        self._turns[rank].acquire()

    def advance(self, rank: int, seconds: float) -> None:
        """Advance a rank's clock; returns when no other one is further behind."""
        self.now[rank] += seconds
        if not self._waiting or (self.now[rank], rank) < self._waiting[0]:
            return
        heapq.heappush(self._waiting, (self.now[rank], rank))
        self._next()
        self._turns[rank].acquire()

    def leave(self) -> None:
        """End a rank's thread."""
        if self._waiting:
            self._next()

    def _next(self) -> None:
        _, rank = heapq.heappop(self._waiting)
        self._turns[rank].release()


class SimulatedModel(Weightless):
    """A backend that draws numbers of requests, and their end at the right length, and takes simulated time for it."""

    vocab = 1 << 40

    def __init__(self, rank: int, clocks: SimulatedClocks, lengths: np.ndarray, numbers: dict[float, int]):
        self.page_tokens, self.page_bytes = PAGE // STRIDE.value, PAGE * KV_BYTES
        self._rank, self._clocks, self._lengths, self._numbers = rank, clocks, lengths, numbers
        self._prompt = PROMPT // STRIDE.value

    def forward(self, work: PassWork) -> Tensor:
        counts = np.asarray(work.counts)
        decoding, new = int((counts == 1).sum()), int(counts[counts > 1].sum())
        seconds = pass_seconds(decoding, float(np.asarray(work.ends)[counts == 1].sum()) * STRIDE.value)
        seconds = STRIDE.value * (seconds if decoding else 0.0)
        seconds += op_seconds(HARDWARE[DEVICE.value], 2 * PARAMETERS * new * STRIDE.value, 0.0, torch.bfloat16)
        self._clocks.advance(self._rank, seconds)
        ends = np.repeat(np.asarray(work.ends), counts)[work.sampled_positions]
        return torch.stack([work.tokens_N[work.sampled_positions], torch.from_numpy(ends)], 1)

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        assert noise_R is not None
        token_R, end_R = output_M[source_R].numpy().T
        first_R = end_R == self._prompt
        for row in np.flatnonzero(first_R).tolist():  # which of a prompt's samples it is its noise tells
            token_R[row] = 2 + self._numbers[float(noise_R[row])]
        ended_R = end_R + 1 - self._prompt >= self._lengths[token_R - 2]
        logp_R = torch.zeros(len(token_R))
        return torch.from_numpy(np.where(ended_R, 1, token_R)), logp_R, logp_R


def pass_seconds(rows: int, kv_tokens: float) -> float:
    """Of one pass that decodes: products of all weights, and keys and values from memory."""
    hardware: Hardware = HARDWARE[DEVICE.value]
    products = op_seconds(hardware, 2 * PARAMETERS * rows, WEIGHT_BYTES, torch.bfloat16)
    return products + op_seconds(hardware, 0.0, kv_tokens * KV_BYTES, torch.bfloat16)


def cache_bytes() -> float:
    """Memory for keys and values, beside the weights and 2 GB of activations and logits."""
    return USABLE * HARDWARE[DEVICE.value].memory - WEIGHT_BYTES - 2e9


class CountedPasses(Weightless):
    """A backend that computes nothing and notes the rows and new tokens of each pass."""

    vocab = 1 << 20
    page_tokens, page_bytes = PAGE, 1

    def __init__(self) -> None:
        self.sizes: list[tuple[int, int]] = []

    def forward(self, work: PassWork) -> Tensor:
        self.sizes.append((len(work.counts), len(work.tokens_N)))
        return torch.zeros(len(work.sampled_positions), 1)

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        zeros_R = torch.zeros(len(source_R))
        return zeros_R.long() + 2, zeros_R, zeros_R


def captured_ms(rows: int, tokens: int) -> float:
    """Milliseconds of a captured pass."""
    return float(np.interp(rows, CAPTURED_ROWS, CAPTURED_MS)) + TOKEN_MS * max(0, tokens - rows)


def eager_ms(rows: int, tokens: int) -> float:
    """Milliseconds of a pass without a graph: the host's, or the device's if those are more."""
    return max(EAGER_MS, captured_ms(rows, tokens))


def decoding_graphs_ms(rows: int, tokens: int) -> float:
    """Milliseconds of a pass where only those that decode are captured."""
    size = bucket(rows, MOST_ROWS.value)
    return captured_ms(size, size) if rows == tokens else eager_ms(rows, tokens)


def mixed_graphs_ms(rows: int, tokens: int) -> float:
    """Milliseconds of a pass where those with few tokens of prompts are captured too."""
    size = row_bucket(rows, MOST_ROWS.value)
    if rows == tokens:
        return captured_ms(size, size)
    padded = next((x for x in MIXED_TOKENS if x >= tokens), None)
    return eager_ms(rows, tokens) if padded is None else captured_ms(size, padded)


def print_passes() -> None:
    """Print milliseconds a pass of an engine whose rows are refilled, and of the tail in which none waits any more."""
    lengths = np.ceil(np.random.default_rng(0).exponential(MEAN.value, 4 * MOST_ROWS.value)).astype(int).tolist()
    requests = [
        Request(n, [2 + n // SAMPLES.value] * SHORT_PROMPT, Sampling(max_new_tokens=length), request_seed(0, n))
        for n, length in enumerate(lengths)
    ]
    backend = CountedPasses()
    model = decoder_model(smallest_config(backend.vocab, 1 << 20))
    mesh = Mesh(parse("dp1"), 0)
    options = NativeOptions(MOST_ROWS.value, 1 << 30)
    engine = NativeEngine(model, WeightSpec({}, {}, mesh, torch.float32), backend, options)
    engine.load([], 0)
    engine.submit(requests)
    last = 0
    while engine.unfinished():
        engine.step()
        if engine._scheduler.waiting:
            last = len(backend.sizes)
    first = next(i for i, (rows, _) in enumerate(backend.sizes) if rows == MOST_ROWS.value)
    print("passes of | passes, with prompts | ms a pass: graphs of decoding, graphs of prompts too")
    for name, sizes in (("refilled rows", backend.sizes[first:last]), ("the tail", backend.sizes[last:])):
        mixed = np.mean([rows < tokens for rows, tokens in sizes])
        spans = (np.mean([clock(*size) for size in sizes]) for clock in (decoding_graphs_ms, mixed_graphs_ms))
        print(f"{name} | {len(sizes)}, {mixed:.0%} | {'  '.join(f'{x:.2f}' for x in spans)}", flush=True)


def main(argv: list[str]) -> None:
    del argv
    torch.set_num_threads(1)
    if PASSES.value:
        print_passes()
        return
    print("ranks, rows | tokens a second and GPU: ideal, tickets, fixed, static chunks | slowest over mean rank")
    for ranks in map(int, RANKS.value):
        begin, rows = time.process_time(), ranks * ROWS.value
        draws = np.random.default_rng(0).lognormal(np.log(MEDIAN), SIGMA.value, rows)
        lengths = np.clip(draws / STRIDE.value, 1, LONGEST // STRIDE.value).astype(np.int64)
        tokens = float(lengths.sum()) * STRIDE.value
        best = tokens / ranks / ideal_seconds(lengths, ranks)
        found = {queue: simulate(ranks, lengths, queue) for queue in QUEUES.value}
        found["static"] = static_seconds(lengths, ranks)
        speeds = {name: tokens / ranks / seconds.max() for name, seconds in found.items()}
        speed = "  ".join(f"{name} {x:.0f} ({x / best:.0%})" for name, x in speeds.items())
        slowest = "  ".join(f"{name} {seconds.max() / seconds.mean():.3f}" for name, seconds in found.items())
        cost = f"{time.process_time() - begin:.0f} CPU-seconds"
        print(f"{ranks}, {rows} | ideal {best:.0f}  {speed} | {slowest} | {cost}", flush=True)


def simulate(ranks: int, lengths: np.ndarray, queue: str) -> np.ndarray:
    """Seconds until each rank has completed what it took."""
    stride, samples = STRIDE.value, SAMPLES.value
    sampling = Sampling(max_new_tokens=LONGEST // stride, stop=(1,))
    seeds = [request_seed(0, n) for n in range(len(lengths))]
    noise = stream_noise(torch.tensor(seeds), torch.tensor(0)).tolist()
    numbers = {x: n for n, x in enumerate(noise)}
    groups = []
    for first in range(0, len(lengths), samples):
        prompt = [2 + first] * (PROMPT // stride)
        groups.append([Request(n, prompt, sampling, seeds[n]) for n in range(first, first + samples)])
    clocks, ends, taken = SimulatedClocks(ranks), np.zeros(ranks), [0]
    model, whole = decoder_model(smallest_config(2 + len(lengths), 1 << 20)), parse(f"dp{ranks}")

    def take(count: int) -> int:
        taken[0] += count
        return taken[0] - count

    def program(rank: int) -> None:
        mesh = Mesh(whole, rank)
        backend = SimulatedModel(rank, clocks, lengths, numbers)
        spec = WeightSpec({}, {}, mesh, torch.float32)
        engine = NativeEngine(model, spec, backend, NativeOptions(MOST_ROWS.value, int(cache_bytes())))
        engine.load([], 0)
        clocks.wait(rank)
        if queue == "tickets":
            complete_shared(engine, Tickets(groups, take, ranks, size=len(groups[0])), mesh)
        else:
            share = groups[rank * len(groups) // ranks : (rank + 1) * len(groups) // ranks]
            complete(engine, [request for group in share for request in group])
        ends[rank] = clocks.now[rank]
        clocks.leave()

    threads = [threading.Thread(target=program, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    clocks.begin()
    for thread in threads:
        thread.join()
    return ends


def ideal_seconds(lengths: np.ndarray, ranks: int) -> float:
    """With the cache always full of rows whose lengths are those of a random moment."""
    tokens = lengths * STRIDE.value
    mean = PROMPT + (tokens.astype(float) ** 2).sum() / tokens.sum() / 2
    rows = int(min(MOST_ROWS.value, cache_bytes() / KV_BYTES / mean))
    prompts = len(lengths) / SAMPLES.value * PROMPT
    prefill = op_seconds(HARDWARE[DEVICE.value], 2 * PARAMETERS * prompts, 0.0, torch.bfloat16)
    return (tokens.sum() * pass_seconds(rows, rows * mean) / rows + prefill) / ranks


def static_seconds(lengths: np.ndarray, ranks: int) -> np.ndarray:
    """Seconds of each rank with static chunks; rows that ended cost nothing more."""
    stride, rows = STRIDE.value, int(min(MOST_ROWS.value, cache_bytes() // ((PROMPT + LONGEST) * KV_BYTES)))
    found = np.zeros(ranks)
    for rank, share in enumerate(np.array_split(lengths, ranks)):
        for first in range(0, len(share), rows):
            chunk = np.sort(share[first : first + rows])
            for at in range(int(chunk[-1])):
                alive = len(chunk) - int(np.searchsorted(chunk, at, side="right"))
                found[rank] += stride * pass_seconds(alive, alive * (PROMPT + at * stride))
    return found


if __name__ == "__main__":
    app.run(main)
