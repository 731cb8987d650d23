"""The host's own work in a decoding step of the native engine: microseconds a step, whatever the model.

    OMP_NUM_THREADS=1 python benchmarks/host_step.py
    OMP_NUM_THREADS=1 python benchmarks/host_step.py --rows=64,512 --profile

The model computes nothing: what is left is Python. "ordinary" is the way of a CPU, where each pass looks at what the
one before has drawn; "static" is that of a GPU, where passes are graphs. Times are of the processor.
"""

from __future__ import annotations

import cProfile
import time

import numpy as np
import torch
from absl import app, flags
from torch import Tensor
from weightless import Weightless, smallest_config

from funrl.mesh.mesh import SINGLE
from funrl.models import Model, decoder_model
from funrl.rollout.engine import WeightSpec
from funrl.rollout.native.engine import NativeEngine, NativeOptions, native_engine
from funrl.rollout.native.passes import PassWork, SampledRows
from funrl.rollout.requests import Request
from funrl.rollout.sampling_parameters import Sampling

ROWS = flags.DEFINE_list("rows", ["1", "64", "512"], "completions that are decoded together")
STEPS = flags.DEFINE_integer("steps", 200, "that are measured")
PROFILE = flags.DEFINE_bool("profile", False, "print what takes longest")
WAYS = flags.DEFINE_list("ways", ["ordinary", "static"], "of decoding")
PROMPT, PAGE = 64, 256


class NothingComputed(Weightless):
    """A backend that draws token 7."""

    page_tokens, page_bytes, vocab = PAGE, 1 << 10, 32

    def forward(self, work: PassWork) -> Tensor:
        return torch.zeros(len(work.sampled_positions), 1)

    def sample(
        self, output_M: Tensor, source_R: Tensor, noise_R: Tensor | None, sampling: Sampling, seen_RV: Tensor | None
    ) -> SampledRows:
        zeros_R = torch.zeros(len(source_R))
        return torch.full((len(source_R),), 7), zeros_R, zeros_R


def main(argv: list[str]) -> None:
    del argv
    torch.set_num_threads(1)
    for way in WAYS.value:
        for rows in map(int, ROWS.value):
            engine = ordinary(rows) if way == "ordinary" else static(rows)
            how = Sampling(max_new_tokens=STEPS.value + 100, stop=(3, 5))
            prompts = np.random.default_rng(0).integers(8, 30, (rows, PROMPT)).tolist()
            engine.submit([Request(i, p, how, i) for i, p in enumerate(prompts)])
            while engine._scheduler.waiting or engine.cost().passes < 20:
                engine.step()
            profile = cProfile.Profile() if PROFILE.value else None
            begin = time.process_time()
            if profile is not None:
                profile.enable()
            for _ in range(STEPS.value):
                engine.step()
            if profile is not None:
                profile.disable()
                profile.print_stats("tottime")
            micros = (time.process_time() - begin) / STEPS.value * 1e6
            print(f"{way:8} {rows:4} rows: {micros:7.0f} microseconds a step", flush=True)


def smallest_model() -> Model:
    return decoder_model(smallest_config(32, 1 << 16))


def ordinary(rows: int) -> NativeEngine:
    """An engine over nothing."""
    spec = WeightSpec({}, {}, SINGLE, torch.float32)
    engine = NativeEngine(smallest_model(), spec, NothingComputed(), NativeOptions(rows, 1 << 30))
    engine.load([], 0)
    return engine


def static(rows: int) -> NativeEngine:
    """An engine whose passes, once they only decode, are what the first one found."""
    model = smallest_model()
    engine = native_engine(model, options=NativeOptions(max_rows=rows, packed=False, static=True, cache_bytes=1 << 30))
    engine.load(engine.weights.named(model.init(torch.Generator().manual_seed(0))))
    assert engine._static is not None
    found = (torch.full((rows,), 7), torch.zeros(rows), torch.zeros(rows))
    engine._static._graphs.run = lambda key, compute, kind="": found
    return engine


if __name__ == "__main__":
    app.run(main)
