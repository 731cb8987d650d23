"""Cost of kernels of a fixed order of sums (`--numerics=aligned`) beside the default ones; see docs/engines.md."""

from __future__ import annotations

import gc
from typing import NamedTuple

import torch
from gpu_parts.decoding import DTYPE, engine_turn, measured, native, work_of
from gpu_parts.models import PIECES, UPDATES, fitting, model_of, random_weights
from gpu_parts.rows import Bench, Row, Rows, median_seconds, timed_row
from gpu_parts.training import measured_step

from funrl.compiled_kernels.exact.dispatch import align_gpu_kernels

KINDS = ("fast", "aligned")
PRODUCTS = ((64, 2048, 2048), (64, 2048, 6144), (512, 12288, 2048), (4096, 6144, 2048))  # rows, outputs, terms


class Predicted(NamedTuple):
    """Times on an H200 that nobody has measured: those of 28 November 2026 with the costs that docs/tuning.md names.

    Attributes:
      score_ms, learn_ms: of a micro-batch of 4,096 tokens by aligned kernels.
      iteration_ms: of 64 decoded rows.
    """

    score_ms: float = 41.0
    learn_ms: float = 119.0
    iteration_ms: float = 3.1


def aligned_rows(bench: Bench) -> Rows:
    """Products, a training step and decoding of 1.7B, by both kinds of kernels."""
    predicted = Predicted()
    if bench.device.type != "cuda":
        note = f"left out: on a CPU all kernels are aligned; predicted for an H200: {predicted}"
        yield Row("aligned kernels", None, "ms", note=note)
        return
    for rows, outputs, terms in PRODUCTS:
        yield from _product_rows(bench, rows, outputs, terms)
    training, _, what = fitting(bench, "1.7B", 4096, 1024)
    if training is None:
        yield Row("aligned training", None, "ms", note=f"left out: {what}")
        return
    for kind in KINDS:
        seconds, _ = measured_step(bench, training, kind)
        passes = UPDATES * PIECES
        notes = (
            ("", "") if kind == "fast" else (f"predicted {predicted.score_ms} ms", f"predicted {predicted.learn_ms} ms")
        )
        yield timed_row(bench, f"{kind}: score a micro-batch", seconds["score_policy"] / passes, 0.0, note=notes[0])
        update = (seconds["update_policy"] - seconds["optimizer"]) / passes
        yield timed_row(bench, f"{kind}: forward and backward", update, 0.0, note=notes[1])
        gc.collect()
        torch.cuda.empty_cache()
    work = work_of(bench)
    model = model_of(work.model)
    params = random_weights(model, bench.device, DTYPE)
    for kind in KINDS:
        align_gpu_kernels(kind == "aligned")
        turn = engine_turn(native(bench, model, static=True), params, work)
        for rows in work.rows:
            yield measured(bench, f"native engine, {kind}", work, (turn, rows))


def _product_rows(bench: Bench, rows: int, outputs: int, terms: int) -> Rows:
    """One product by the library and by kernels of a fixed order."""
    from funrl.compiled_kernels.gpu_kernels.aligned_kernels import launch_product

    x = torch.randn(rows, terms, device=bench.device, dtype=DTYPE)
    weight = torch.randn(outputs, terms, device=bench.device, dtype=DTYPE)
    runs = {"fast": lambda: x @ weight.T, "aligned": lambda: launch_product(x, weight, None, False)}
    for kind, run in runs.items():
        nbytes = 2.0 * (x.numel() + weight.numel() + rows * outputs)
        seconds = median_seconds(bench, run, captured=True)
        name = f"{kind}: product of {rows} rows, {outputs} x {terms}"
        yield timed_row(bench, name, seconds, 2.0 * rows * outputs * terms, nbytes)
