"""pass@k, majority votes and intervals, each against all subsets, or against draws whose truth is known."""

import itertools
import math

import numpy as np
import pytest

from funrl.rewards.answers import final_answer
from funrl.trainer.sources.eval_statistics import best_at, interval, majority_at, mean_over_samples, sample_counts


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_best_at_k_is_the_mean_over_all_subsets(k):
    values_PN = np.random.default_rng(0).normal(size=(4, 5)).round(1)
    values_PN[0, :3] = 0.5  # ties
    for item, values_N in zip(best_at(values_PN, k), values_PN, strict=True):
        assert item == pytest.approx(np.mean([max(combination) for combination in itertools.combinations(values_N, k)]))


@pytest.mark.parametrize(("right", "count", "k"), [(0, 8, 4), (1, 8, 4), (5, 8, 4), (8, 8, 4), (3, 200, 100)])
def test_of_verdicts_it_is_the_estimator_of_chen_et_al(right, count, k):
    verdicts = np.arange(count)[None] < right
    expected = 1 - math.comb(count - right, k) / math.comb(count, k)
    assert best_at(verdicts.astype(float), k)[0] == pytest.approx(expected)


def test_the_most_frequent_answer_of_a_block_counts_and_the_first_of_several():
    answers, values = ["3", "4", "4", "3", "5", "5", "4", "9"], np.array([0.0, 1, 1, 0, 0, 0, 1, 0])
    assert majority_at(answers[:3], values, 3) == 1 and majority_at(answers[:2], values, 2) == 0
    assert majority_at(answers, values, 4) == 0  # "3" before "4", then "5"
    assert majority_at(answers, values, 8) == 1  # "4" three times
    assert majority_at(answers[1:], values[1:], 3) == 0.5  # two blocks, 4 4 3 and 5 5 4; the rest is left out


def test_a_sample_without_a_value_is_left_out():
    nan = math.nan
    values_PN = np.array([[0.0, nan, 1.0, 0.0], [1.0, 0.0, 1.0, 0.0], [nan, 1.0, nan, nan], [nan] * 4])
    assert best_at(values_PN, 2) == pytest.approx([2 / 3, 5 / 6, nan, nan], nan_ok=True)
    assert best_at(values_PN, 3) == pytest.approx([1, 1, nan, nan], nan_ok=True)
    assert mean_over_samples(values_PN) == pytest.approx([1 / 3, 0.5, 1, nan], nan_ok=True)
    answers = ["5", "4", "4", "4"]
    assert majority_at(answers, np.array([0.0, nan, nan, 1.0]), 2) == 0  # one vote each, and "5" is first
    assert majority_at(answers, np.array([0.0, nan, 1.0, 1.0]), 3) == 1
    assert math.isnan(majority_at(answers, np.array([0.0, nan, nan, 1.0]), 3))


@pytest.mark.parametrize("verdicts", [True, False])
@pytest.mark.parametrize(("prompts", "samples"), [(200, 1), (60, 8)])
def test_an_interval_has_the_true_mean_in_about_95_of_100_draws(prompts, samples, verdicts):
    rng, inside, truth = np.random.default_rng(0), 0, 0.3
    for _ in range(400):
        solved_P = rng.beta(0.6, 1.4, prompts)  # prompts differ; the mean is 0.3
        values_P = (rng.random((prompts, samples)) < solved_P[:, None]).mean(1)
        low, high = interval(values_P, verdicts)
        inside += low <= truth <= high
    assert 0.92 <= inside / 400 <= 0.98


def test_where_all_prompts_are_alike_the_interval_has_a_width_all_the_same():
    low, high = interval(np.zeros(10), True)
    assert low == 0 and high == pytest.approx(1.96**2 / (10 + 1.96**2), abs=1e-3)  # Wilson's, of none in ten
    assert interval(np.ones(10), True) == pytest.approx((1 - high, 1))
    assert interval(np.ones(1), True).low < 0.3
    assert interval(np.full(10, 7.0), False) == (7.0, 7.0) and interval(np.ones(1), False) is None


def test_counts_of_samples():
    assert [sample_counts(n) for n in (1, 2, 3, 8)] == [[], [2], [2, 3], [2, 4, 8]]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        (r"so \boxed{3} or \boxed{\frac{1}{2}} it is", r"\frac{1}{2}"),
        (r"\boxed{1,234}", "1234"),
        (r"\boxed{3", "3"),
        ("<answer> a\nb </answer> then", "a\nb"),
        ("6 * 2 = <<6*2=12>>12\n#### $1,200.50\nmore", "1200.50"),
        ("####", ""),
        ("  plain text ", "plain text"),
    ],
)
def test_the_answer_that_a_completion_ends_with(completion, answer):
    assert final_answer(completion) == answer
