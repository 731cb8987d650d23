"""Drafts by prompt lookup: tokens per CPU-second with and without, on two texts.

    OMP_NUM_THREADS=1 python benchmarks/speculate.py
    OMP_NUM_THREADS=1 python benchmarks/speculate.py --drafts=0,2,8 --rows=1,16

The embedded task's completions are short and repeat little; the model is warm-started before. The other text repeats
itself: a model whose next token depends on the last one alone, so that greedy completions become loops, at the cost of
a whole model. Completions are the same with and without drafts,
which is checked.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence

import numpy as np
import torch
from absl import app, flags

from funrl.algos.recipes.grpo import grpo
from funrl.api.warm_start import warm_started
from funrl.mesh.mesh import single
from funrl.models import Model, decoder_config, decoder_model
from funrl.rollout.engine import complete
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.rollout.requests import Request, requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer import startup
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import settings_of

DRAFTS = flags.DEFINE_list("drafts", ["0", "4", "8"], "tokens of a draft at most")
ROWS = flags.DEFINE_list("rows", ["1", "4", "16", "64"], "completions at once")
BACKENDS = flags.DEFINE_list("backends", ["packed"], "packed: the compiled step; torch")
SIZES = flags.DEFINE_list("sizes", ["4x256"], "layers x width of the model of the repeating text; vocabulary 2,048")
WARMSTART = flags.DEFINE_integer("warmstart_steps", 100, "supervised steps on the embedded task before")
REPEATS = flags.DEFINE_integer("repeats", 3, "timed turns after one that is not timed")


class Silent:
    """An observer that says nothing."""

    def __getattr__(self, name: str):
        return lambda *args: None


def main(argv: list[str]) -> None:
    del argv
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    job = prepare(settings_of(warmstart_steps=WARMSTART.value, dtype="float32", device="cpu"), grpo)
    with warm_started(job) as started:
        _, state = startup.begin_run(started, single(), Silent())
    prompts = [example.tokens for example in job.task.prompts]
    measure("embedded task", job.model, state.roles["policy"].params, prompts, job.sampling)
    for size in SIZES.value:
        layers, embed = (int(x) for x in size.split("x"))
        config = decoder_config(
            vocab=2048,
            embed=embed,
            layers=layers,
            heads=embed // 64,
            kv_heads=embed // 128,
            head=64,
            mlp=4 * embed,
            max_positions=2048,
            family="qwen3",
            qk_norm=True,
        )
        model = decoder_model(config)
        params = model.init(torch.Generator().manual_seed(0))
        for layer in params["layers"]:  # then a token depends on the one before alone, and greedy texts become loops
            layer["attn"]["o"].zero_()
            layer["mlp"]["down"].zero_()
        texts = np.random.default_rng(1).integers(3, config.vocab, (64, 32)).tolist()
        measure(f"loops, {size}", model, params, texts, Sampling(greedy=True, max_new_tokens=256))


def measure(name: str, model: Model, params, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Print the speed of all backends, numbers of rows and drafts."""
    for backend in BACKENDS.value:
        engines = {
            draft: native_engine(model, options=NativeOptions(packed=backend == "packed", speculate=int(draft)))
            for draft in DRAFTS.value
        }
        for engine in engines.values():
            engine.load(engine.weights.named(params))
        for rows in map(int, ROWS.value):
            requests = [one for one in requests_of(prompts[:rows], sampling, 0) if one.number % sampling.samples == 0]
            times = {draft: [] for draft in engines}
            for _ in range(REPEATS.value + 1):
                found = {draft: timed(engine, requests, times[draft]) for draft, engine in engines.items()}
            same = len({str(x) for x in found.values()}) == 1
            tokens = sum(map(len, next(iter(found.values()))))
            speeds = "  ".join(
                f"drafts of {draft}: {tokens / statistics.median(times[draft][1:]):.0f} ({share(engine)})"
                for draft, engine in engines.items()
            )
            note = "" if same else "  (other tokens)"
            print(f"{name:>16} {backend:>6} {rows:>3} rows | tokens per CPU-second, {speeds}{note}", flush=True)


def timed(engine: NativeEngine, requests: Sequence[Request], times: list[float]) -> list[list[int]]:
    """Tokens of the completions; the CPU-seconds go to `times`."""
    begin = time.process_time()
    done = complete(engine, requests)
    times.append(time.process_time() - begin)
    return [one.tokens.tolist() for one in done]


def share(engine: NativeEngine) -> str:
    """The part of all drafted tokens that was drawn."""
    cost = engine.cost()
    return f"{cost.accepted / cost.drafted:.0%} of drafts" if cost.drafted else "no drafts"


if __name__ == "__main__":
    app.run(main)
