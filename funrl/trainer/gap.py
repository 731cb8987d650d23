"""The gap between engine and trainer: where it is 0 by construction, and what a run does if it is not.

On a CPU both compute with the functions of the decoding step, so that the log-probability of a token has the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from funrl.compiled_kernels.arguments import BITS, FIXED_PARTS
from funrl.compiled_kernels.exact.dispatch import kernels_work
from funrl.compiled_kernels.packed import parts_of
from funrl.mesh.collectives import gather_objects
from funrl.models.decoder.sequence_parallel import is_ring
from funrl.trainer.jobs.job import Job
from funrl.trainer.settings.settings import given_flag
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows

_log = logging.getLogger(__name__)
GAP_METRIC = "rollout/logprob_gap_max"


class GapError(RuntimeError):
    """Engine and trainer gave different log-probabilities where the same bits are promised."""


def gap_check(job: Job, parts: Parts, note: Callable[[str], None]) -> GapCheck | None:
    """The check of a run's steps; None: engine and trainer may differ by rounding."""
    if not isinstance(parts, GeneratingParts):
        return None
    if problem := gap_problem(job, parts):
        _log.info("engine and trainer may differ by rounding: %s", problem)
        return None
    return GapCheck(job.settings.engines.on_gap == "stop", note)


def gap_problem(job: Job, parts: GeneratingParts) -> str | None:
    """The reason why engine and trainer may differ by rounding; None: their log-probabilities have the same bits.

    Args:
      job: one that generates.
      parts: of the run.
    """
    settings = job.settings
    policy = parts.roles[job.main_role].placed
    sums = policy.model.abilities.exact_sums
    sizes = policy.mesh.sizes
    if policy.mesh.device.type != "cpu":
        return f"the kernels of {policy.mesh.device.type} sum in orders that depend on the batch"
    if settings.models.backend != "torch":
        return f"--backend={settings.models.backend} sums in orders of its own"
    if not kernels_work():
        return "there are no C++ kernels here"
    if not settings.engines.abilities.own_steps or settings.engines.float8:
        name = "rollout_dtype" if settings.engines.float8 else "engine"
        return f"{given_flag(settings, name)} has kernels of its own"
    if job.dtype not in BITS:
        return f"there are no C++ kernels for {job.dtype}"
    if isinstance(sums, str):
        return sums
    if job.lora is not None and job.agents.policies:
        return "the engines of second policies merge adapters, which the trainer adds"
    if is_ring(settings.devices.sequence_parallel, -(-policy.model.abilities.heads // sizes["tensor"]), sizes):
        return "ring attention adds up keys by ranks"
    splits = {policy.mesh.size("tensor"), parts.generator.mesh.size("tensor")}
    heads = policy.model.abilities.heads
    if len(splits) > 1 and any(heads % ranks for ranks in splits):
        return f"{' and '.join(map(str, sorted(splits)))} tensor ranks do not all divide {heads} heads"
    return split_problem(sums, splits)


def split_problem(sums: tuple[int, ...], splits: set[int]) -> str | None:
    """The reason why some numbers of tensor ranks share sums of these sizes in ways that differ."""
    for size in sums:
        for ranks in splits:
            if parts_of(size) % ranks:
                return (
                    f"a sum over {size} terms has {parts_of(size)} of {FIXED_PARTS} equal parts, which {ranks} tensor "
                    "ranks cannot share"
                )
    return None


class GapCheck(NamedTuple):
    """Check of a step's metrics: report a gap that is not 0 where it should be, or stop the run.

    Attributes:
      stops: raise `GapError` instead of a note.
      note: receives the message.
    """

    stops: bool
    note: Callable[[str], None]

    def scored(self, rows: Rows, metrics: Mapping[str, float]) -> None:
        """Check rows that have been scored. Collective where there is a gap.

        Args:
          metrics: of the step, in which there may be a gap.

        Raises:
          GapError: there is one, and --on_gap=stop.
        """
        if metrics.get(GAP_METRIC, 0.0) == 0:
            return
        text = f"{_difference(metrics[GAP_METRIC])}{worst_token(rows)}"
        if self.stops:
            raise GapError(text)
        self.note(text)

    def learned(self, metrics: Mapping[str, float]) -> None:
        """Check an update whose forward pass was the scoring."""
        if metrics.get(GAP_METRIC, 0.0) != 0:
            text = "--on_gap=stop names the token, which it scores before the update"
            self.note(f"{_difference(metrics[GAP_METRIC])}; {text}")


def _difference(gap: float) -> str:
    return f"engine and trainer differ by {gap:.3g} nats where they should have the same bits"


def worst_token(rows: Rows) -> str:
    """Row, position and log-probabilities of the token with the largest gap; "" without `old_logp`. Collective."""
    batch = rows.batch
    old_logp = batch.get("old_logp")
    if old_logp is None:
        return ""
    counted_bT = batch.mask
    for name in ("stale", "demonstration"):
        left_out = batch.get(name)
        counted_bT = counted_bT if left_out is None else counted_bT & ~left_out
    gap_bT = torch.where(counted_bT, (old_logp - batch.rollout_logp).abs().nan_to_num(torch.inf), -1.0)
    worst = (-1.0, "")
    if gap_bT.numel() and counted_bT.any():
        i, position = divmod(int(gap_bT.argmax()), gap_bT.shape[1])
        place = f"row {int(rows.own[i])}, position {position} (token {int(batch.tokens[i, position])})"
        engine, trainer = (x[i, position].item() for x in (batch.rollout_logp, old_logp))
        worst = (gap_bT[i, position].item(), f", most at {place}: engine {engine}, trainer {trainer} nats")
    return max(gather_objects(worst, rows.mesh), key=lambda pair: pair[0])[1]
