"""Costs of generation: prompts, then one token of every row a pass, traced with the engine's own backend.

Prompts and completions have full length here, so that rows which begin together end together: continuous batching is
then waves of rows.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.core import reads
from funrl.cost.tracing.costs import Costs, after, plus, times
from funrl.cost.tracing.estimate import make_weights
from funrl.cost.tracing.hardware import Hardware
from funrl.cost.tracing.tracer import Tracer
from funrl.rollout.native.backends import PassWork, TorchBackend
from funrl.rollout.native.engine import NativeEngine, page_tokens, pass_tokens
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.jobs.build import Generator
from funrl.trainer.jobs.job import Job


def generation(
    job: Job, generator: Generator, whole: Generator, prompt_tokens: int, room: float, hardware: Hardware
) -> Costs:
    """Costs of the completions of a step, greedy baselines included.

    Args:
      job, generator: of this or of a smaller depth.
      whole: at full depth: by it rows go together.
      room: bytes that the cache may have where no flag says how many.
    """
    greedy = dataclasses.replace(job.sampling, greedy=True, samples=1)
    baseline = [greedy] if "greedy_score" in reads(job.algorithm).required else []
    found = Costs()
    for sampling in (job.sampling, *baseline):
        found = after(found, completions(job, generator, whole, sampling, prompt_tokens, room, hardware))
    return found


def completions(
    job: Job, generator: Generator, whole: Generator, sampling: Sampling, prompt_tokens: int, room: float,
    hardware: Hardware,
) -> Costs:  # fmt: skip
    """Costs of completions that are drawn alike; the others as in `generation`."""
    found = Costs()
    for often, count in waves(job, whole, sampling, prompt_tokens, room, hardware):
        found = after(found, times(_wave(job, generator, sampling, prompt_tokens, count, hardware), often))
    return found


def waves(
    job: Job, generator: Generator, sampling: Sampling, prompt_tokens: int, room: float, hardware: Hardware
) -> list[tuple[int, int]]:
    """Waves of completions of one rank of the engine, all of full length: how often it decodes how many together.

    Args:
      generator: at the full depth of the model.
      room: bytes that the cache may have where no flag says how many.
    """
    assert isinstance(generator.engine, NativeEngine)
    model = generator.engine.model
    rows, page = own_prompts(job, generator) * sampling.samples, _page_tokens(hardware)
    pages = -(-(prompt_tokens + sampling.max_new_tokens) // page)
    assert model.init_cache is not None
    one = trees.nbytes(model.init_cache(generator.mesh, pages, page, job.dtype, torch.device("meta")))
    given = round((job.settings.engines.kv_cache_gb or 0) * 1e9) or room
    most = max(1, min(rows, job.settings.engines.decode_rows, int(given // one)))
    full, rest = divmod(rows, most)
    return [(full, most)] + [(1, rest)] * (rest > 0)


def own_prompts(job: Job, generator: Generator) -> int:
    """Prompts that a rank of the engine completes."""
    return -(-job.settings.run.batch_prompts // generator.mesh.size(generator.mesh.row_axes))


def _wave(
    job: Job, generator: Generator, sampling: Sampling, prompt_tokens: int, count: int, hardware: Hardware
) -> Costs:
    """A pass over prompts and one of decoding half-way, traced; every row is decoded to the limit.

    Args:
      count: rows that are decoded together.
    """
    model, mesh, wanted = job.model, generator.mesh, generator.engine.weights.layouts
    page = _page_tokens(hardware)
    length = prompt_tokens + sampling.max_new_tokens
    each = -(-length // page)
    assert model.init_cache is not None
    cache = trees.leaves(model.init_cache(mesh, count * each, page, job.dtype, torch.device("meta")))[0]
    assert model.unembed is not None
    vocabulary = model.unembed(wanted).local_shape(0)[0]
    shapes = [layout.local_shape(0) for layout in trees.leaves(wanted)]
    tracer = Tracer(hardware, shapes, (vocabulary, model.config.vocab), tuple(cache.shape))
    params = make_weights(tracer, wanted, job.dtype)
    backend = TorchBackend(model, mesh, job.dtype, None, page)
    table_SP = torch.arange(count * each, dtype=torch.int32).view(count, each)
    most = pass_tokens(_device(hardware))
    at_once = min(prompt_tokens, most)
    fresh = count / sampling.samples  # prompts of a wave: what completions of a prompt have in common is computed once
    prompts = min(max(1, most // prompt_tokens), math.ceil(fresh))

    def work(rows: int, tokens: int, end: int) -> PassWork:
        draws = list(range(tokens - 1, rows * tokens, tokens))
        zeros_N = torch.zeros(rows * tokens, dtype=torch.int64)
        return PassWork(zeros_N, [tokens] * rows, [end] * rows, table_SP[:rows], draws)

    def draw(found: Tensor) -> None:
        noise_R = torch.zeros(len(found), dtype=torch.float64)
        backend.sample(found, torch.arange(len(found)), noise_R, sampling, None)

    with tracer, torch.no_grad():
        with tracer.phase("prefill"):
            backend.load(params)
            backend.resize(count * each)
            draw(backend.forward(work(prompts, at_once, prompt_tokens)))
        with tracer.phase("decode"):
            draw(backend.forward(work(count, 1, prompt_tokens + sampling.max_new_tokens // 2)))
    passes = (fresh if fresh < 1 else math.ceil(fresh / prompts)) * -(-prompt_tokens // at_once)
    whole = after(times(tracer.phases["prefill"], passes), times(tracer.phases["decode"], sampling.max_new_tokens))
    return plus(whole, {"weights": -float(trees.nbytes(params))})


def _device(hardware: Hardware) -> str:
    return "cuda" if hardware.accelerator else "cpu"


def _page_tokens(hardware: Hardware) -> int:
    return page_tokens(_device(hardware))
