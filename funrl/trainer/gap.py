"""The gap between engine and trainer: where it is 0 by construction, and what a run does if it is too large.

Where `sums_problem` finds none, both compute with functions of a fixed order, so that the log-probability of a token
has the same bits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

from funrl.mesh.collectives import gather_objects
from funrl.trainer.jobs.job import Job, RLJob
from funrl.trainer.jobs.numerics import sums_problem
from funrl.trainer.settings.gap_rule import GapRule
from funrl.trainer.steps.parts import GeneratingParts, Parts
from funrl.trainer.steps.step_rows import Rows

_log = logging.getLogger(__name__)
GAP_METRIC = "rollout/logprob_gap_max"


class GapError(RuntimeError):
    """Engine and trainer are farther apart than --on_gap=stop allows."""


def gap_check(job: Job, parts: Parts, note: Callable[[str], None]) -> GapCheck | None:
    """The check of a run's steps; None: engine and trainer may differ by rounding, and no metric has a bound."""
    if not isinstance(parts, GeneratingParts) or not isinstance(job, RLJob):
        return None
    rule = job.settings.engines.gap_rule
    if problem := gap_problem(job, parts):
        _log.info("engine and trainer may differ by rounding: %s", problem)
        if rule.metric is None:
            return None
    return GapCheck(rule, problem is None, note)


def gap_problem(job: RLJob, parts: GeneratingParts) -> str | None:
    """The reason why engine and trainer may differ by rounding; None: their log-probabilities have the same bits.

    Args:
      job: one that generates.
      parts: of the run.
    """
    policy = parts.roles[job.main_role].placed
    return sums_problem(job, policy.model, policy.mesh, parts.generator.whole.weights.mesh)


class GapCheck(NamedTuple):
    """Check of a step's metrics: report a gap that is not 0 where it should be, or beyond a bound, or stop the run.

    Attributes:
      rule: of --on_gap.
      promised: whether engine and trainer should agree to the bit.
      note: receives the message.
    """

    rule: GapRule
    promised: bool
    note: Callable[[str], None]

    def scored(self, rows: Rows, metrics: Mapping[str, float]) -> None:
        """Check rows that have been scored. Collective where there is a message.

        Args:
          metrics: of the step, in which there may be a gap.

        Raises:
          GapError: the rule stops the run.
        """
        if (text := self._message(metrics)) is None:
            return
        text += worst_token(rows)
        if self.rule.stops and (self.rule.metric is None or self.rule.broken_by(metrics)):
            raise GapError(text)
        self.note(text)

    def learned(self, metrics: Mapping[str, float]) -> None:
        """Check an update whose forward pass was the scoring."""
        if text := self._message(metrics):
            self.note(f"{text}; --on_gap=stop names the token, which it scores before the update")

    def _message(self, metrics: Mapping[str, float]) -> str | None:
        """Message about the metrics; None: they keep the rule and the promise."""
        rule = self.rule
        if rule.metric is not None and rule.broken_by(metrics):
            side = "above" if rule.above else "below"
            return f"{rule.metric} is {metrics[rule.metric]:.3g}, {side} the {rule.bound:g} of --on_gap"
        if self.promised and (gap := metrics.get(GAP_METRIC, 0.0)) != 0:
            return f"engine and trainer differ by {gap:.3g} nats where they should have the same bits"
        return None


def worst_token(rows: Rows) -> str:
    """Row, position and log-probabilities of the token with the largest gap; "" without one. Collective."""
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
    largest, text = max(gather_objects(worst, rows.mesh), key=lambda pair: pair[0])
    return text if largest > 0 else ""
