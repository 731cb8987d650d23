"""Guards: functions of a run's metrics that return a message where something goes wrong, with the flag that helps.

A guard takes the rows of metrics.jsonl, newest last, and returns a message or None. A run calls them after every step
and shows the first message of each; the report calls them again. docs/troubleshooting.md has a paragraph for each.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

WINDOW = 5  # steps that are compared with earlier ones
KEPT_ROWS = 1000  # that a monitor keeps: the first and last of them are consecutive steps
FIRST_ROWS = 50
LAST_ROWS = 400
Row = Mapping[str, Any]
Guard = Callable[[Sequence[Row]], str | None]


class Finding(NamedTuple):
    """Message of a guard.

    Attributes:
      step: the first at which the guard returned it.
      cause: the guard's name, the heading of its paragraph in docs/troubleshooting.md.
    """

    step: int
    cause: str
    text: str

    def __str__(self) -> str:
        """The message with its step and the page that explains it."""
        return f"step {self.step}: {self.text} (docs/troubleshooting.md, {self.cause.replace('_', ' ')})"


class Monitor:
    """Guards over a running run: each reports once."""

    def __init__(self) -> None:
        """Begin before the first step."""
        self.rows: list[Row] = []
        self.reported: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, Any]) -> list[Finding]:
        """Add a step and return the messages that are new with it.

        Args:
          step: from 1.
          metrics: of the step.
        """
        self.add(step, metrics)
        return self.new_findings()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a step. The middle of a long run is thinned, so that a step costs the same in a run of any length."""
        self.rows.append({**metrics, "step": step})
        if len(self.rows) > KEPT_ROWS:
            self.rows[FIRST_ROWS:-LAST_ROWS] = self.rows[FIRST_ROWS:-LAST_ROWS:2]

    def new_findings(self) -> list[Finding]:
        """Messages about the newest step of the guards that have not reported yet."""
        findings = []
        for guard in GUARDS:
            name = guard.__name__
            if name not in self.reported and (text := guard(self.rows)) is not None:
                self.reported.add(name)
                findings.append(Finding(int(self.rows[-1]["step"]), name, text))
        return findings


def findings(rows: Sequence[Row]) -> Iterator[Finding]:
    """Messages of all guards about a run, from its metrics, in the order of steps.

    Of a run of more than 999 steps, about 500 are checked.
    """
    monitor = Monitor()
    stride = max(1, len(rows) // 500)
    for number, row in enumerate(rows, 1):
        monitor.add(int(row["step"]), row)
        if number % stride == 0 or number == len(rows):
            yield from monitor.new_findings()


# ---- resources


def host_memory_grows(rows: Sequence[Row]) -> str | None:
    """The host's memory rises from quarter to quarter of the run, by 30 % in all."""
    values = _series(rows, "memory/host_gb", least=50)[10:]
    size = len(values) // 4
    marks = [fmean(values[i * size : (i + 1) * size]) for i in range(4)] if values else [0.0]
    rises = all(a < b for a, b in itertools.pairwise(marks))
    if rises and marks[-1] > 1.3 * marks[0] and marks[-1] - marks[0] > 0.2:
        return (
            f"the memory of the host has grown from {marks[0]:.1f} to {marks[-1]:.1f} GB and grows: what a reward "
            "function keeps between calls is one cause; --save_every and --resume begin with fresh processes"
        )
    return None


# ---- communication


def engine_gap_grows(rows: Sequence[Row]) -> str | None:
    """The engine's log-probabilities move away from the trainer's."""
    values = _series(rows, "rollout/logprob_gap_mean", least=3 * WINDOW)
    if not values:
        return None
    before = median(values[:WINDOW])
    now = median(values[-WINDOW:])
    if now > 1e-3 and now > 3 * before:
        return (
            f"the engine's log-probabilities drift from the trainer's, {before:.2g} to {now:.2g} nats a token: an "
            "algorithm with importance_weights bounds the harm, --dtype=float32 shows if it is "
            "rounding, --probe_sync_every=1 if it is the weights"
        )
    return None


# ---- the algorithm


def equal_rewards(rows: Sequence[Row]) -> str | None:
    """Three steps in a row have a single reward."""
    recent = rows[-3:]
    if len(recent) < 3 or any(row.get("reward/min") is None for row in recent):
        return None
    if len({row[name] for row in recent for name in ("reward/min", "reward/max")}) == 1:
        return (
            f"every reward of the last three steps was {recent[-1]['reward/min']:.4g}: there is nothing to learn from; "
            "samples.jsonl has what the policy writes; a warm start (--warmstart_steps), easier prompts, more "
            "--samples_per_prompt or a higher --temperature find other rewards"
        )
    return None


def groups_without_difference(rows: Sequence[Row]) -> str | None:
    """Most groups have one reward for all of their completions."""
    values = _series(rows, "reward/equal_groups", least=WINDOW)
    if not values or min(values[-WINDOW:]) < 0.75 or equal_rewards(rows) is not None:
        return None
    return (
        f"in {fmean(values[-WINDOW:]):.0%} of the groups all completions have one reward, and learn nothing: prompts "
        "are too easy or too hard; raise --samples_per_prompt, or sample other prompts for them as dapo does"
    )


def zero_gradient(rows: Sequence[Row]) -> str | None:
    """The policy's gradient is 0 in two steps."""
    values = _series(rows, "actor/grad_norm", least=2)
    if not values or any(values[-2:]):
        return None
    return (
        "the policy's gradient was 0 in two steps: no token had an advantage (see equal rewards), or bounds of clips "
        "and corrections left none"
    )


def skipped_updates(rows: Sequence[Row]) -> str | None:
    """An update of the step was skipped, as its loss or gradient was not finite."""
    value = rows[-1].get("update/skipped") if rows else None
    if not value:
        return None
    return (
        f"{value:.0f} updates of this step were left out, as their loss or gradient was not finite: a line names "
        "the cause, and --max_skipped in a row end the run"
    )


def clipped_tokens(rows: Sequence[Row]) -> str | None:
    """The ratios of many tokens are clipped."""
    share = _recent(rows, "actor/pg_clipfrac")
    if share < 0.4:
        return None
    return (
        f"the ratios of {share:.0%} of the tokens are clipped: the policy moves too far in a step; lower --lr, or take "
        "fewer --epochs and --minibatches"
    )


def falling_reward(rows: Sequence[Row]) -> str | None:
    """The reward has lost half of its rise."""
    values = _series(rows, "reward/mean", least=4 * WINDOW)
    if not values:
        return None
    means = [fmean(values[i : i + WINDOW]) for i in range(len(values) - WINDOW + 1)]
    best = max(means)
    now = means[-1]
    spread = pstdev(values[: 2 * WINDOW])
    rise = best - means[0]
    if rise > 3 * spread / math.sqrt(WINDOW) and now < best - 0.5 * rise and now < best - 3 * spread:
        return (
            f"the reward has fallen from {best:.3g} to {now:.3g}: lower --lr, or hold the policy nearer to the "
            "reference by a higher --kl_coef; --eval_every shows which checkpoint was best"
        )
    return None


def running_kl(rows: Sequence[Row]) -> str | None:
    """The policy is far from its reference, or from the policy that sampled."""
    reference = "its reference: raise --kl_coef or lower --lr"
    sampler = "the policy that sampled, within a step: lower --lr, or take fewer --epochs and --minibatches"
    bounds = {"actor/kl_loss": 1.0, "actor/reward_kl_penalty": 1.0, "actor/ppo_kl": 0.2}
    for name, bound in bounds.items():
        distances = [abs(value) for value in _series(rows, name, least=WINDOW)[-WINDOW:]]
        if distances and fmean(distances) > bound:
            other = sampler if name == "actor/ppo_kl" else reference
            return f"the policy is {fmean(distances):.2g} nats a token from {other}"
    return None


def running_entropy(rows: Sequence[Row]) -> str | None:
    """The entropy collapses or explodes."""
    values = _series(rows, "actor/entropy", least=2 * WINDOW)
    if not values:
        return None
    before = fmean(values[:WINDOW])
    now = fmean(values[-WINDOW:])
    if before > 0.05 and now < 0.05 * before:
        return (
            f"the entropy has fallen from {before:.2g} to {now:.2g} nats a token: the policy no longer explores; lower "
            "--lr, raise --entropy_coef or --clip_high, or sample at a higher --temperature"
        )
    if now > 2 * before + 1:
        return (
            f"the entropy has risen from {before:.2g} to {now:.2g} nats a token: the policy comes apart; lower --lr or "
            "--entropy_coef, raise --kl_coef"
        )
    return None


def long_completions(rows: Sequence[Row]) -> str | None:
    """Most completions are cut off."""
    cut, length = (_series(rows, f"response_length/{name}", least=WINDOW) for name in ("clip_ratio", "mean"))
    if not cut or not length:
        return None
    share = fmean(cut[-WINDOW:])
    if share > 0.9 or (share > 0.5 and fmean(length[-WINDOW:]) > 2 * fmean(length[:WINDOW])):
        return (
            f"{share:.0%} of the completions are cut off at --max_new_tokens, without an end: raise it, or give the "
            "reward a price for length; a model that never ends needs its end token (eos_token_id of config.json)"
        )
    return None


def stale_tokens(rows: Sequence[Row]) -> str | None:
    """Tokens are trained many steps after they were sampled."""
    age = _recent(rows, "partial/staleness_mean")
    if age < 4:
        return None
    return (
        f"tokens are trained {age:.1f} steps after their weights on average: raise --new_tokens_per_step, or use an "
        "algorithm with importance_weights"
    )


def _series(rows: Sequence[Row], name: str, least: int) -> Sequence[float]:
    """The metric's finite values if the newest row has one and there are at least `least`; else none."""
    series = [row.get(name) for row in rows]
    values = [value for value in series if isinstance(value, (int, float)) and math.isfinite(value)]
    return values if len(values) >= least and values[-1] is series[-1] else []


def _recent(rows: Sequence[Row], name: str) -> float:
    """Mean of the metric over the last `WINDOW` steps that have it; 0 where there are fewer."""
    values = _series(rows, name, least=WINDOW)
    return fmean(values[-WINDOW:]) if values else 0.0


GUARDS: tuple[Guard, ...] = (
    host_memory_grows,
    engine_gap_grows,
    equal_rewards,
    groups_without_difference,
    zero_gradient,
    skipped_updates,
    clipped_tokens,
    falling_reward,
    running_kl,
    running_entropy,
    long_completions,
    stale_tokens,
)
