"""Answers that are numbers are read exactly, whatever a column made of them."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from funrl.rewards.countdown import check_countdown, countdown
from funrl.rewards.formulas import math_answer
from funrl.rewards.mathematics.numbers import decimal_of, right_answer_text
from funrl.rewards.verifiers import exact_match, gsm8k, multiple_choice

HUGE = 10**5000 + 7  # more digits than Python converts to text


def test_answers_that_are_numbers_are_right_in_any_form():
    pytest.importorskip("math_verify")
    assert math_answer("", "\\boxed{0.00001}", answer=0.00001) == 1.0
    assert math_answer("", "\\boxed{2.5 \\times 10^{-7}}", answer=2.5e-7) == 1.0
    assert math_answer("", "\\boxed{10000000000000000000000}", answer=1e22) == 1.0
    assert math_answer("", f"\\boxed{{1{'0' * 4999}7}}", answer=HUGE) == 1.0
    assert math_answer("", f"\\boxed{{1{'0' * 4999}8}}", answer=HUGE) == 0.0


@pytest.mark.parametrize(
    "answer,completion,right",
    [
        (72.0, "72", 1),
        (72, "72.0", 1),
        (72, " 7.2e1\n", 1),
        (0.00001, "1e-05", 1),
        (0.00001, "0.00001", 1),
        (Decimal("72.00"), "72", 1),
        (np.float64(72), "72", 1),
        (np.int64(72), "72", 1),
        (-0.0, "0", 1),
        (72.0, "73", 0),
        (72, "7,2", 0),
        (72, "seventy-two", 0),
        (1e22, "1" + "0" * 22, 1),
        ("72.0", "72", 1),
        ("1e-05", "0.00001", 1),
        ("3.10", "3.1", 0),
        ("007", "7", 0),
        ("72", "72", 1),
        ("72", "72.0", 0),
        (True, "True", 1),
        (True, "1", 0),
        (1e300, "1e300", 1),
    ],
)
def test_exact_compares_numbers_as_numbers_and_texts_as_texts(answer, completion, right):
    assert exact_match("", completion, answer=answer) == right


@pytest.mark.parametrize(
    "answer,completion,right",
    [
        (42, "#### 4.2e1", 1),
        (0.00001, "#### 1e-05", 1),
        (0.00001, "#### 0.00001", 1),
        ("1e3", "#### 1,000", 1),
        (42.0, "#### 42", 1),
        (42, "#### 4e", 0),
        (42, "#### 1e999999999", 0),
        ("#### 1e400", "#### 1e400", 1),
    ],
)
def test_gsm8k_reads_exponents(answer, completion, right):
    assert gsm8k("", completion, answer=answer) == right


def test_integers_of_any_length():
    right, wrong = (f"1{'0' * 4999}{end}" for end in "78")
    assert exact_match("", right, answer=HUGE) == gsm8k("", f"#### {right}", answer=HUGE) == 1.0
    assert exact_match("", wrong, answer=HUGE) == gsm8k("", f"#### {wrong}", answer=HUGE) == 0.0


def test_choices_and_games_of_whole_floats():
    assert multiple_choice("", "B", answer=1.0) == multiple_choice("", "B", answer=4.0, choices=[3.0, 4.0]) == 1.0
    assert multiple_choice("", "B", answer="B", choices=None) == 1.0
    assert countdown("", "(4 - 1) * 8", target=24.0, nums=[1.0, 4, np.int64(8)], numbers=None) == 1.0
    assert countdown("", "(4 - 1) * 8", target="24", nums=None, numbers=["1", "4", "8"]) == 1.0
    for target, nums in ((None, [1]), (24, None), (24, []), (24, [1, None]), (24, "148"), (float("nan"), [1])):
        with pytest.raises(ValueError, match="number"):
            check_countdown({"target": target, "nums": nums})


def test_texts_of_answers():
    texts = [right_answer_text(answer) for answer in (1e-05, 1e22, -0.5, Fraction(1, 3), Fraction(6, 2), " x ", False)]
    assert texts == ["0.00001", "10000000000000000000000", "-0.5", "1/3", "3", " x ", "False"]
    for answer in (None, [4], {"a": 1}, b"4", float("nan"), float("inf"), Decimal("NaN"), 1j):
        with pytest.raises(ValueError, match="the right answer is"):
            right_answer_text(answer)


def test_commas_stand_between_thousands():
    assert [decimal_of(text) for text in ("1,000", "1,234,567.5", "12,34", "1,2", "0,000", "1,0000")] == [
        1000,
        Decimal("1234567.5"),
        None,
        None,
        None,
        None,
    ]
    assert decimal_of("1e" + "9" * 30) is None
