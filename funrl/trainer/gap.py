"""The gap between engine and trainer: where it is 0 by construction, and what a run does if it is not.

On a CPU both compute with the functions of the decoding step, so that the log-probability of a token has the same bits.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import kernels_work
from funrl.compiled_kernels.linear_logprob import project
from funrl.compiled_kernels.packed import BITS, FIXED_PARTS, parts_of
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import SINGLE
from funrl.models.decoder.sequence_parallel import is_ring
from funrl.models.model import Inputs, Model
from funrl.rollout.native.backends import PackedBackend, PassWork, TorchBackend, packed_problem
from funrl.trainer.jobs.build import Parts
from funrl.trainer.jobs.job import Job
from funrl.trainer.steps.step_rows import Rows

_log = logging.getLogger(__name__)
GAP_METRIC = "rollout/logprob_gap_max"


class GapError(RuntimeError):
    """Engine and trainer gave different log-probabilities where the same bits are promised."""


def gap_check(
    job: Job, parts: Parts, note: Callable[[str], None]
) -> Callable[[Rows, Mapping[str, float]], None] | None:
    """The check of a step's rows and metrics, as --on_gap says; None: engine and trainer may differ by rounding."""
    if parts.generator is None:
        return None
    if problem := gap_problem(job, parts):
        _log.info("engine and trainer may differ by rounding: %s", problem)
        return None
    return functools.partial(check_gap, stop=job.settings.engines.on_gap == "stop", note=note)


def gap_problem(job: Job, parts: Parts) -> str | None:
    """The reason why engine and trainer may differ by rounding; None: their log-probabilities have the same bits.

    Args:
      job: one that generates.
      parts: of the run.
    """
    settings = job.settings
    policy = parts.roles[job.main_role].placed
    assert parts.generator is not None
    sums = policy.model.abilities.exact_sums
    sizes = policy.mesh.sizes
    if policy.mesh.device.type != "cpu":
        return f"the kernels of {policy.mesh.device.type} sum in orders that depend on the batch"
    if not kernels_work():
        return "there are no C++ kernels here"
    if settings.engines.engine != "native":
        return f"--engine={settings.engines.engine} has kernels of its own"
    if job.dtype not in BITS:
        return f"there are no C++ kernels for {job.dtype}"
    if policy.model.adapters is not None:
        return "the engine computes with merged adapters"
    if isinstance(sums, str):
        return sums
    if is_ring(settings.devices.sequence_parallel, policy.model.abilities.heads // sizes["tensor"], sizes):
        return "ring attention adds up keys by ranks"
    return _split_problem(sums, {policy.mesh.size("tensor"), parts.generator.mesh.size("tensor")})


def _split_problem(sums: tuple[int, ...], splits: set[int]) -> str | None:
    """The reason why some numbers of tensor ranks share sums of these sizes in ways that differ."""
    if len(splits) == 1 and splits == {1}:
        return None
    for size in sums:
        for ranks in splits:
            if parts_of(size) % ranks:
                return (
                    f"a sum over {size} terms has {parts_of(size)} of {FIXED_PARTS} equal parts, which {ranks} tensor "
                    "ranks cannot share"
                )
    return None


def check_gap(rows: Rows, metrics: Mapping[str, float], stop: bool, note: Callable[[str], None]) -> None:
    """Say that a gap is not 0 where it should be, or stop the run. Collective where it is not 0.

    Args:
      rows: of the step.
      metrics: of the step, in which there may be a gap.
      stop: raise an error.
      note: receives the message.

    Raises:
      GapError: there is a gap, and `stop`.
    """
    gap = metrics.get(GAP_METRIC, 0.0)
    if gap == 0:
        return
    text = (
        f"engine and trainer differ by {gap:.3g} nats where they should have the same bits{worst_token(rows)}; "
        "funrl.trainer.gap.first_differing_layer names the first layer that differs (docs/engines.md)"
    )
    if stop:
        raise GapError(text)
    note(text)


def worst_token(rows: Rows) -> str:
    """Place of the largest gap, in words; "" where no old log-probabilities are kept. Collective."""
    batch = rows.batch
    old_logp = batch.get("old_logp")
    if old_logp is None:
        return ""
    counted_bT = batch.mask
    for name in ("stale", "demonstration"):
        left_out = batch.get(name)
        counted_bT = counted_bT if left_out is None else counted_bT & ~left_out
    gap_bT = torch.where(counted_bT, (old_logp - batch.rollout_logp).abs(), 0.0)
    worst = (-1.0, 0, 0, 0)
    if gap_bT.numel():
        row, position = divmod(int(gap_bT.argmax()), gap_bT.shape[1])
        number = int(np.flatnonzero(rows.owner == rows.index)[row])
        worst = (gap_bT[row, position].item(), number, position, int(batch.tokens[row, position]))
    _, number, position, token = max(gather_objects(worst, rows.mesh))
    return f", most at row {number}, position {position} (token {token})"


def first_differing_layer(
    model: Model, params: trees.Tree, tokens_T: Tensor, dtype: torch.dtype = torch.float32
) -> int | None:
    """Number of the first layer after which engine and trainer have other logits of a text; None: all have the same.

    Args:
      model: a decoder.
      params: its whole weights, on the CPU.
      tokens_T: the text.
      dtype: to compute in.
    """
    params = trees.map(lambda x: x.detach().to(dtype), params)
    for count in range(1, model.config.layers + 1):
        first = model.with_layers(count)
        weights = {**params, "layers": params["layers"][:count]}
        if not torch.equal(_engine_logits(first, weights, tokens_T, dtype), _trainer_logits(first, weights, tokens_T)):
            return count - 1
    return None


def _trainer_logits(model: Model, params: trees.Tree, tokens_T: Tensor) -> Tensor:
    assert model.unembed is not None
    offsets = torch.tensor([0, len(tokens_T)], dtype=torch.int32)
    with torch.no_grad():
        hidden_TD = model.apply(params, Inputs(tokens_T[None], offsets=offsets)).hidden[0]
        return project(hidden_TD, model.unembed(params), model.abilities.logit_cap)


def _engine_logits(model: Model, params: trees.Tree, tokens_T: Tensor, dtype: torch.dtype) -> Tensor:
    """Logits token by token, as the engine decodes."""
    if packed_problem(model, SINGLE, dtype) is None:
        backend = PackedBackend(model, dtype)
    else:
        backend = TorchBackend(model, SINGLE, dtype, None, 16)
    backend.load(params)
    pages = math.ceil(len(tokens_T) / backend.page_tokens)
    backend.resize(pages)
    table_SP = torch.arange(pages, dtype=torch.int32)[None]
    logits = []
    with torch.inference_mode():
        for t in range(len(tokens_T)):
            output = backend.forward(PassWork(tokens_T[t : t + 1], [1], [t + 1], table_SP, [0]))
            logits.append(backend.logits(output) if isinstance(backend, TorchBackend) else output.clone())
    return torch.cat(logits)
