"""Lengths of completions: a lognormal law with a greatest length, of which each group shares a part."""

from __future__ import annotations

import contextlib
import math
from typing import NamedTuple

import numpy as np

SPREAD = 0.8  # deviation of the logarithm, where none is given
SHARED = 0.5  # share of that variance which the completions of one prompt have in common
LEAST = 16  # tokens of the shortest completion


class LengthError(ValueError):
    """A text that describes no law of lengths."""


class LengthLaw(NamedTuple):
    """Lengths of completions, exp(normal), cut at the greatest.

    Attributes:
      median: tokens, before the cut.
      spread: deviation of the logarithm.
      most: tokens at which a completion is cut.
    """

    median: float
    spread: float
    most: int

    @property
    def mean(self) -> float:
        """Mean tokens of a completion after the cut."""
        if not self.spread:
            return min(self.median, self.most)
        bound = math.log(self.most / self.median) / self.spread
        below = self.median * math.exp(self.spread**2 / 2) * _normal(bound - self.spread)
        return below + self.most * (1 - _normal(bound))

    def draw(self, random: np.random.Generator, groups: int, samples: int) -> np.ndarray:
        """Lengths [groups, samples] in tokens."""
        prompt = random.normal(0, self.spread * math.sqrt(SHARED), (groups, 1))
        own = random.normal(0, self.spread * math.sqrt(1 - SHARED), (groups, samples))
        return np.clip(self.median * np.exp(prompt + own), min(LEAST, self.most), self.most)


def _normal(x: float) -> float:
    """The standard normal distribution's share below x."""
    return 0.5 * math.erfc(-x / math.sqrt(2))


def law_of_mean(mean: float, most: int, spread: float = SPREAD) -> LengthLaw:
    """The law with a mean after the cut.

    Raises:
      LengthError: the mean is not between the shortest and the greatest length.
    """
    if not LEAST <= mean < most:
        raise LengthError(f"a mean of {mean:g} tokens is not between {LEAST} and the greatest length, {most}")
    low = 1e-3
    high = 1e3 * most
    for _ in range(100):
        middle = math.sqrt(low * high)
        if LengthLaw(middle, spread, most).mean < mean:
            low = middle
        else:
            high = middle
    return LengthLaw(low, spread, most)


def parse_lengths(text: str) -> LengthLaw:
    """The law of "mean:2000,max:16384", with "spread:0.8" behind it where that is known.

    Raises:
      LengthError: the text is another.

    Example:
      >>> round(parse_lengths("mean:2000,max:16384").median)
      1467
    """
    numbers: dict[str, float] = {}
    for word in text.split(","):
        name, _, number = word.partition(":")
        with contextlib.suppress(ValueError):
            numbers[name] = float(number)
    if not {"mean", "max"} <= set(numbers) <= {"mean", "max", "spread"}:
        raise LengthError(f"{text!r} is not a law of lengths; write mean:2000,max:16384, perhaps with ,spread:0.8")
    return law_of_mean(numbers["mean"], int(numbers["max"]), numbers.get("spread", SPREAD))
