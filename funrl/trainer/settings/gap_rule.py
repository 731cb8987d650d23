"""Rule of `--on_gap`: which gap between engine and trainer a run reports, and which one ends it."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

GAP_NAMES = (
    *(f"logprob_gap_{statistic}" for statistic in ("mean", "p50", "p99", "p999", "max")),
    "ratio_mean",
    "effective_share",
)
ROLLOUT = "rollout/"
_BOUND = re.compile(r"(say|stop)(?::(?:rollout/)?(\w+)([<>])(\d*\.?\d+(?:[eE][+-]?\d+)?))?")


class GapRule(NamedTuple):
    """Rule of `--on_gap`.

    Attributes:
      stops: end the run instead of a remark.
      metric: of the gap's distribution, with a bound; None: the rule is about the gap where the same bits are promised.
      above: whether values above the bound break the rule; else those below.
      bound: in the unit of the metric.
    """

    stops: bool
    metric: str | None = None
    above: bool = True
    bound: float = 0.0

    @classmethod
    def from_text(cls, text: str) -> GapRule:
        """The rule that a text such as "stop:logprob_gap_p99>0.1" means. Raises: ValueError, it means none.

        Example:
          >>> GapRule.from_text("say:effective_share<0.5")
          GapRule(stops=False, metric='rollout/effective_share', above=False, bound=0.5)
        """
        match = _BOUND.fullmatch(text)
        if match is None or match[2] not in (None, *GAP_NAMES) or math.isinf(float(match[4] or 0)):
            raise ValueError(f"{text!r} is not say, stop, or one of them with NAME>VALUE or NAME<VALUE")
        action, name, sign, bound = match.groups()
        return (
            cls(action == "stop") if name is None else cls(action == "stop", ROLLOUT + name, sign == ">", float(bound))
        )

    def broken_by(self, metrics: Mapping[str, float]) -> bool:
        """True if the metrics have the rule's, and it is beyond the bound or no number."""
        value = None if self.metric is None else metrics.get(self.metric)
        return value is not None and not (value <= self.bound if self.above else value >= self.bound)


def is_gap_rule(text: str) -> bool:
    """True if a text means a rule."""
    try:
        GapRule.from_text(text)
    except ValueError:
        return False
    return True
