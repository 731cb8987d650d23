"""Lengths of completions: a lognormal law with a greatest length, of which each group shares a part."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import NamedTuple

import numpy as np

SPREAD = 0.8  # deviation of the logarithm, where none is given
SHARED = 0.5  # share of that variance which the completions of one prompt have in common
LEAST = 1  # tokens of the shortest completion
LONGEST_DEVIATIONS = 3.0  # deviations of the longest completion of a step from the median, for about a thousand of them


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
      1457
    """
    numbers: dict[str, float] = {}
    for word in text.split(","):
        name, _, number = word.partition(":")
        try:
            numbers[name] = float(number)
        except ValueError:
            numbers[name] = math.nan
    known = {"mean", "max"} <= set(numbers) <= {"mean", "max", "spread"}
    if not known or not all(map(math.isfinite, numbers.values())) or numbers.get("spread", 0.0) < 0:
        raise LengthError(f"{text!r} is not a law of lengths; write mean:2000,max:16384, perhaps with ,spread:0.8")
    return law_of_mean(numbers["mean"], int(numbers["max"]), numbers.get("spread", SPREAD))


def law_of_run(directory: Path) -> LengthLaw:
    """The law of the completions of a run, from its metrics: their mean, the share that was cut off, the longest.

    Raises:
      LengthError: it logged no completions, or all have one length.
    """
    if not (directory / "metrics.jsonl").is_file():
        raise LengthError(f"{directory} has no metrics.jsonl: give the --run_dir of a run, or mean:2000,max:16384")
    rows = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if {"response_length/mean", "response_length/max"} <= set(row)]
    if not rows:
        raise LengthError(f"{directory}/metrics.jsonl has no step with response_length/mean and response_length/max")
    mean = sum(row["response_length/mean"] for row in rows) / len(rows)
    longest = sum(row["response_length/max"] for row in rows) / len(rows)
    most = int(max(row["response_length/max"] for row in rows))
    if not LEAST <= mean < longest:
        raise LengthError(f"{directory}: completions of {mean:g} tokens in the mean, {longest:g} at most, have no law")
    cut = sum(row.get("response_length/clip_ratio", 0.0) for row in rows) / len(rows)
    low = 0.01
    high = 3.0
    for _ in range(50):
        spread = (low + high) / 2
        law = law_of_mean(mean, most, spread)
        beyond = 1 - _normal(math.log(most / law.median) / spread)
        expected = law.median * math.exp(LONGEST_DEVIATIONS * spread)
        if (beyond < cut) if cut else (expected < longest):
            low = spread
        else:
            high = spread
    return law_of_mean(mean, most, low)
