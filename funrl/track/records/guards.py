"""Guards: functions of a run's metrics that return a message where something goes wrong, with the flag that helps.

A guard takes the rows of metrics.jsonl, newest last, and returns a message or None. A run calls them after every step
and shows the first message of each; the report calls them again. docs/troubleshooting.md has a paragraph for each.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from statistics import fmean, median, pstdev
from typing import Any, NamedTuple

WINDOW = 5  # steps that are compared with earlier ones
KEPT_ROWS = 1000  # that a monitor keeps: the first and last of them are consecutive steps
FIRST_ROWS = 50
LAST_ROWS = 400
DRIVING_SHARE = 0.8  # of the gradient: the one reward function that drives updates
_DRIVES = re.compile("reward_gradient/(?!rest/)[^/]+/share")
FARTHEST_SAMPLER = 0.28  # nats a token in two steps; docs/placement.md has runs on both sides
Row = Mapping[str, object]
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
        self.step = 0
        self.rows: list[Row] = []
        self.reported: set[str] = set()

    def add(self, step: int, metrics: Mapping[str, object]) -> None:
        """Add a step. The middle of a long run is thinned, so that a step costs the same in a run of any length."""
        self.step = step
        self.rows.append(metrics)
        if len(self.rows) > KEPT_ROWS:
            self.rows[FIRST_ROWS:-LAST_ROWS] = self.rows[FIRST_ROWS:-LAST_ROWS:2]

    def new_findings(self) -> list[Finding]:
        """Messages about the newest step of the guards that have not reported yet."""
        findings = []
        for name, guard in GUARDS.items():
            if name not in self.reported and (text := guard(self.rows)) is not None:
                self.reported.add(name)
                findings.append(Finding(self.step, name, text))
        return findings


def findings(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    """Messages of all guards about a run, from its metrics, in the order of steps.

    Of a run of more than 999 steps, about 500 are checked.
    """
    monitor = Monitor()
    stride = max(1, len(rows) // 500)
    for number, row in enumerate(rows, 1):
        monitor.add(row["step"], row)
        if number % stride == 0 or number == len(rows):
            yield from monitor.new_findings()


# ---- kinds of guards


def mean_above(metric: str, bound: float, text: str, window: int = WINDOW) -> Guard:
    """A guard of the size of a metric, as the mean over its newest values.

    Args:
      text: the message, in which {now} is the mean.
    """

    def guard(rows: Sequence[Row]) -> str | None:
        values = _series(rows, metric, least=window)
        now = abs(fmean(values[-window:])) if values else 0.0
        return text.format(now=now) if now > bound else None

    return guard


def drift(metric: str, least: int, drifts: Callable[[float, float], bool], text: str) -> Guard:
    """A guard of a metric that moves away from where it began.

    Args:
      least: number of values that it needs.
      drifts: (median after the first steps, median now) -> whether that is too far.
      text: the message, in which {before} and {now} are these medians.
    """

    def guard(rows: Sequence[Row]) -> str | None:
        values = _series(rows, metric, least=least)
        if not values:
            return None
        before, now = median(values[WINDOW : 2 * WINDOW]), median(values[-WINDOW:])
        return text.format(before=before, now=now) if drifts(before, now) else None

    return guard


def first_message(*guards: Guard) -> Guard:
    """The first message of several guards."""
    return lambda rows: next((text for guard in guards if (text := guard(rows)) is not None), None)


def equal_rewards(rows: Sequence[Row]) -> str | None:
    """Three steps in a row have a single reward."""
    rewards = {row.get(f"reward/{end}") for row in rows[-3:] for end in ("min", "max")}
    if len(rows) < 3 or len(rewards) > 1 or None in rewards:
        return None
    return f"every reward of the last three steps was {rewards.pop()}: see samples.jsonl; --temperature may help"


def groups_without_difference(rows: Sequence[Row]) -> str | None:
    """Most groups have one reward for all of their completions, and not all the same one."""
    text = (
        "in {now:.0%} of the groups all rewards are equal: raise --samples_per_prompt, or leave them out as dapo does"
    )
    return mean_above("reward/equal_groups", 0.75, text)(rows) if equal_rewards(rows) is None else None


def zero_gradient(rows: Sequence[Row]) -> str | None:
    """The policy's gradient is 0 in two steps."""
    values = _series(rows, "actor/grad_norm", least=2)
    if not values or any(values[-2:]):
        return None
    return "the policy's gradient was 0 in two steps: equal rewards, or bounds of clips and corrections, leave none"


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
        return f"the reward has fallen from {best:.3g} to {now:.3g}: lower --lr, or raise --kl_coef"
    return None


def one_reward_drives(rows: Sequence[Row]) -> str | None:
    """One of several reward functions drives the updates while the held-out reward falls twice in a row."""
    held_out = _series(rows, "eval/reward", least=3)
    if not held_out or not held_out[-3] > held_out[-2] > held_out[-1]:
        return None
    names = [name for name in dict.fromkeys(key for row in rows for key in row) if _DRIVES.fullmatch(name)]
    values = {name: [x for row in rows if isinstance(x := row.get(name), (int, float))] for name in names}
    shares = {name.split("/")[1]: fmean(series[-WINDOW:]) for name, series in values.items()}
    if len(shares) < 2 or max(shares.values()) < DRIVING_SHARE:
        return None
    name = max(shares, key=lambda name: shares[name])
    return (
        f"the reward {name!r} makes {shares[name]:.0%} of the updates, and the held-out reward fell from "
        f"{held_out[-3]:.3g} to {held_out[-1]:.3g}: lower its weight in --reward_weights, or take --algorithm=gdpo"
    )


def rows_too_old(rows: Sequence[Row]) -> str | None:
    """The policy is far from the older ones that sampled, in two steps whose rows may be stale.

    The effective sample size alone does not tell: a single token of a large weight makes it small for a step.
    """
    effective = _series(rows, "rollout/effective_share", least=2)
    gaps = _series(rows, "rollout/logprob_gap_mean", least=2)
    stale = _series(rows, "rollout/stale_gap_max", least=2)
    if not stale or not effective or not gaps or (far := fmean(gaps[-2:])) <= FARTHEST_SAMPLER:
        return None
    return (
        f"the policy is {far:.2g} nats a token from those that sampled in two steps, and {effective[-1]:.0%} of the "
        "tokens are effective: its rows are too old for it. Take --algorithm=dppo, lower --lr to a third, or give a "
        "smaller --staleness or larger --new_tokens_per_step"
    )


def _series(rows: Sequence[Row], name: str, least: int) -> Sequence[float]:
    """The metric's finite values if the newest row has one and there are at least `least`; else none."""
    series = [row.get(name) for row in rows]
    values = [value for value in series if isinstance(value, (int, float)) and math.isfinite(value)]
    return values if len(values) >= least and values[-1] is series[-1] else []


FAR_FROM_REFERENCE = "the policy is {now:.2g} nats a token from its reference: raise --kl_coef or lower --lr"
FAR_FROM_SAMPLER = (
    "the policy moves {now:.2g} nats a token in a step: lower --lr, or take fewer --epochs and --minibatches"
)
DRIFTING_GAP = (
    "the engine's log-probabilities drift from the trainer's, {before:.2g} to {now:.2g} nats: see --dtype=float32"
)
LOST_ENTROPY = "the entropy has fallen from {before:.2g} to {now:.2g} nats a token: lower --lr, or raise --entropy_coef"
MUCH_ENTROPY = "the entropy has risen from {before:.2g} to {now:.2g} nats a token: lower --lr or --entropy_coef"
SKIPPED_UPDATES = (
    "{now:.0f} updates were left out, as they were not finite: a line names the cause, --max_skipped ends the run"
)
CUT_OFF = "{now:.0%} of the completions are cut off: raise --max_new_tokens, or give the reward a price for length"
MORE_MEMORY = "the host's memory has grown from {before:.1f} to {now:.1f} GB: --reward_workers shows if rewards keep it"
GUARDS: dict[str, Guard] = {
    "host_memory_grows": drift("memory/host_gb", 50, lambda before, now: now > max(1.3 * before, 0.2), MORE_MEMORY),
    "engine_gap_grows": drift(
        "rollout/logprob_gap_mean", 3 * WINDOW, lambda before, now: now > max(1e-3, 3 * before), DRIFTING_GAP
    ),
    "equal_rewards": equal_rewards,
    "groups_without_difference": groups_without_difference,
    "zero_gradient": zero_gradient,
    "skipped_updates": mean_above("update/skipped", 0.0, SKIPPED_UPDATES, window=1),
    "clipped_tokens": mean_above(
        "actor/pg_clipfrac",
        0.4,
        "the ratios of {now:.0%} of the tokens are clipped: lower --lr, or take fewer --epochs and --minibatches",
    ),
    "falling_reward": falling_reward,
    "running_kl": first_message(
        mean_above("actor/kl_loss", 1.0, FAR_FROM_REFERENCE),
        mean_above("actor/reward_kl_penalty", 1.0, FAR_FROM_REFERENCE),
        mean_above("actor/ppo_kl", 0.2, FAR_FROM_SAMPLER),
    ),
    "running_entropy": first_message(
        drift("actor/entropy", 2 * WINDOW, lambda before, now: before > 0.05 and now < 0.05 * before, LOST_ENTROPY),
        drift("actor/entropy", 2 * WINDOW, lambda before, now: now > 2 * before + 1, MUCH_ENTROPY),
    ),
    "long_completions": mean_above("response_length/clip_ratio", 0.9, CUT_OFF),
    "stale_tokens": mean_above(
        "partial/staleness_mean",
        4.0,
        "tokens are trained {now:.1f} steps after their weights: raise --new_tokens_per_step, or weigh by importance",
    ),
    "rows_too_old": rows_too_old,
    "one_reward_drives": one_reward_drives,
}
