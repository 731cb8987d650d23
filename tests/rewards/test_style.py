"""Rewards for repetition and length, by hand and at their ends."""

import doctest
import math

import pytest

from funrl.rewards import style
from funrl.rewards.style import cosine_length, repetition_penalty, words


def test_examples_print_what_they_say():
    assert doctest.testmod(style) == (0, 3)


@pytest.mark.parametrize(
    ("text", "n", "want"),
    [
        ("a b c d", 2, 0.0),
        ("a a a a a", 1, -4 / 5),
        ("A b a B", 2, -(1 - 2 / 3)),  # a b, b a, a b
        ("a b", 3, 0.0),  # shorter than an n-gram
        ("", 1, 0.0),
    ],
)
def test_repetition(text, n, want):
    assert repetition_penalty(n)("p", text, answer=1) == pytest.approx(want)
    assert repetition_penalty(n, penalty=0.5)("p", text) == pytest.approx(want / 2)


def test_length_goes_along_a_cosine_and_stops_at_the_longest():
    right = lambda prompt, completion, answer: float(answer in completion)  # noqa: E731
    reward = cosine_length(right, 10, (2.0, 1.0), (-10.0, 0.0))
    for count in (0, 3, 10, 25):
        wave = (1 + math.cos(math.pi * min(count / 10, 1))) / 2
        text = " ".join(["w"] * count)
        assert reward("", text, answer="w") == pytest.approx(1 + wave if count else -10.0)
        assert reward("", text, answer="x") == pytest.approx(-10 * wave)
    by_letters = cosine_length(right, 10, length=len)
    assert by_letters("", "wwwww", answer="w") == pytest.approx(0.75)
    assert words("  a  b ") == 2


def test_bad_arguments_are_refused():
    for make, message in (
        (lambda: repetition_penalty(0), "n=0"),
        (lambda: repetition_penalty(2, -1), "penalty=-1"),
        (lambda: cosine_length(words, 0), "longest=0"),
    ):
        with pytest.raises(ValueError, match=message):
            make()
