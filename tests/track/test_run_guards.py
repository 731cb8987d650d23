"""Guards: each speaks of its cause, once, and of nothing else."""

import math
import random
from pathlib import Path

import pytest

from funrl.track.records import guards

DOCS = Path(__file__).parents[2] / "docs/troubleshooting.md"


def healthy(steps=80):
    """A run that learns, with noise on everything."""
    draw = random.Random(0)
    rows = []
    for step in range(1, steps + 1):
        noise = draw.gauss(0, 1)
        reward = 0.2 + 0.6 * step / steps + 0.03 * noise
        rows.append(
            {
                "step": step,
                "reward/min": 0.0,
                "reward/max": 1.0,
                "reward/mean": reward,
                "reward/equal_groups": 0.3,
                "actor/grad_norm": 1 + 0.1 * noise,
                "actor/pg_clipfrac": 0.05,
                "actor/kl_loss": 0.1 * step / steps,
                "actor/ppo_kl": 0.01 * noise,
                "actor/entropy": 2 - step / steps,
                "response_length/clip_ratio": 0.1,
                "response_length/mean": 20 + step / 4,
                "rollout/logprob_gap_mean": 2e-6 * (1 + 0.1 * noise),
                "memory/host_gb": 1.5 + 0.01 * noise,
                "partial/staleness_mean": 0.7,
                "rollout/stale_gap_max": 2.0,
                "rollout/effective_share": 0.2 if step == 2 else 0.95,  # one token of a large weight
            }
        )
    return rows


def changed(change):
    """The healthy run from step 21 on, with `change(steps since, row)` for some of its numbers."""
    rows = healthy()
    return [row | (change(row["step"] - 20, row) if row["step"] > 20 else {}) for row in rows]


ILLS = {
    "host_memory_grows": lambda n, row: {"memory/host_gb": 1.5 + 0.02 * n},
    "engine_gap_grows": lambda n, row: {"rollout/logprob_gap_mean": min(2e-6 * 2.0**n, 0.1)},
    "equal_rewards": lambda n, row: {"reward/min": 0.0, "reward/max": 0.0, "reward/equal_groups": 1.0},
    "groups_without_difference": lambda n, row: {"reward/equal_groups": 0.9},
    "zero_gradient": lambda n, row: {"actor/grad_norm": 0.0},
    "skipped_updates": lambda n, row: {"update/skipped": 1.0 if n == 3 else 0.0},
    "clipped_tokens": lambda n, row: {"actor/pg_clipfrac": 0.6},
    "falling_reward": lambda n, row: {"reward/mean": 0.5 * 0.9**n},
    "running_kl": lambda n, row: {"actor/kl_loss": 0.1 * n},
    "running_entropy": lambda n, row: {"actor/entropy": 1.7 * 0.9**n},
    "long_completions": lambda n, row: {"response_length/clip_ratio": 0.95},
    "stale_tokens": lambda n, row: {"partial/staleness_mean": 6.0},
    "rows_too_old": lambda n, row: {"rollout/logprob_gap_mean": 0.35 if n in {4, 5} else 2e-6},
    "one_reward_drives": lambda n, row: {
        "eval/reward": 0.9 - 0.01 * n,
        "reward_gradient/length/share": 0.9,
        "reward_gradient/answer/share": 0.1,
        "reward_gradient/rest/share": 0.0,
    },
}


def test_a_healthy_run_is_told_nothing():
    assert not list(guards.findings(healthy()))


def test_a_guard_speaks_as_soon_as_it_has_its_steps():
    rows = [{"step": step, "partial/staleness_mean": 6.0} for step in range(1, guards.WINDOW + 2)]
    assert [(finding.cause, finding.step) for finding in guards.findings(rows)] == [("stale_tokens", guards.WINDOW)]


def test_rows_that_are_too_old_are_reported_at_the_second_such_step():
    rows = changed(ILLS["rows_too_old"])
    (finding,) = guards.findings(rows)
    assert finding.step == 25
    assert "0.35 nats" in finding.text and "--lr" in finding.text and "--algorithm=dppo" in finding.text
    fresh = [{name: x for name, x in row.items() if name != "rollout/stale_gap_max"} for row in rows]
    assert not list(guards.findings(fresh))


@pytest.mark.parametrize("cause", ILLS)
def test_an_ill_is_named_once_and_after_it_began(cause):
    result = list(guards.findings(changed(ILLS[cause])))
    assert [item.cause for item in result] == [cause]
    assert result[0].step > 20
    assert "--" in result[0].text or "reward" in result[0].text  # the flag that helps


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("running_entropy", lambda n, row: {"actor/entropy": 2.0 + n / 10}),
        ("running_kl", lambda n, row: {"actor/ppo_kl": 0.5}),
    ],
)
def test_other_forms_of_an_ill(cause, change):
    assert [finding.cause for finding in guards.findings(changed(change))] == [cause]


def test_numbers_that_are_missing_or_not_finite_are_passed_over():
    rows = [{"step": step, "reward/mean": math.nan, "actor/grad_norm": None} for step in range(1, 60)]
    assert not list(guards.findings(rows)) and not list(guards.findings([{"step": 1}]))


def test_every_guard_has_a_row_here_and_a_paragraph_in_the_page():
    names = list(guards.GUARDS)
    assert names == list(ILLS)
    page = DOCS.read_text()
    for name in names:
        assert f"### {name.replace('_', ' ')}\n" in page, name


@pytest.mark.slow
def test_a_long_run_is_thinned_and_its_ill_still_noticed():
    rows = [row | {"step": number * 80 + row["step"]} for number in range(60) for row in healthy()]
    ill = [row | {"actor/pg_clipfrac": 0.6} if row["step"] > 4000 else row for row in rows]
    monitor = guards.Monitor()
    for row in ill:
        monitor.add(row["step"], row)
    steps = [row["step"] for row in monitor.rows]
    assert len(steps) <= guards.KEPT_ROWS and steps == sorted(steps)
    assert steps[: guards.FIRST_ROWS] == list(range(1, guards.FIRST_ROWS + 1))
    assert steps[-guards.LAST_ROWS :] == list(range(4801 - guards.LAST_ROWS, 4801))
    (finding,) = [finding for finding in guards.findings(ill) if finding.cause == "clipped_tokens"]
    assert 4000 < finding.step <= 4020
