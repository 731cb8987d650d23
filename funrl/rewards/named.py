"""Rewards named on a command line: functions in files and packages, and verifiers. Imports no torch.

--reward=FILE.py:function,format@0.1     the function, and a tenth of the verifier `format`
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from funrl.loading import LoadError

GOLD = ("answer", "solution", "ground_truth")  # fields for the right answer; the first present one holds it
TESTS = ("tests", "test_list", "test_cases", "test", "ground_truth")  # likewise for unit tests
WEIGHTED_REWARD = re.compile(r"(?P<source>.*?)(?:@(?P<weight>[^@:/]*))?")


class Verifier(NamedTuple):
    """A verifier by its short name.

    Attributes:
      source: "module:function".
      fields: tuples of fields; a prompt's record must have at least one field of each.
      package: module that it imports; "": only Python's own.
      extra: extra of funrl that installs the package.
      check: "module:function" that raises ValueError if a record's fields cannot be used; "": none.
    """

    source: str
    fields: tuple[tuple[str, ...], ...] = ()
    package: str = ""
    extra: str = ""
    check: str = ""


_HERE = "funrl.rewards"
VERIFIERS: Mapping[str, Verifier] = {
    "exact": Verifier(f"{_HERE}.verifiers:exact_match", (GOLD,), check=f"{_HERE}.verifiers:check_exact"),
    "gsm8k": Verifier(f"{_HERE}.verifiers:gsm8k", (GOLD,), check=f"{_HERE}.verifiers:check_number"),
    "math": Verifier(
        f"{_HERE}.formulas:math_answer", (GOLD,), "math_verify", extra="math", check=f"{_HERE}.formulas:check_formula"
    ),
    "boxed": Verifier(
        f"{_HERE}.formulas:boxed_answer", (GOLD,), "math_verify", extra="math", check=f"{_HERE}.formulas:check_formula"
    ),
    "choice": Verifier(f"{_HERE}.verifiers:multiple_choice", (GOLD,), check=f"{_HERE}.verifiers:check_choice"),
    "regex": Verifier(f"{_HERE}.verifiers:matches_pattern", (("pattern",),), check=f"{_HERE}.verifiers:check_pattern"),
    "json": Verifier(f"{_HERE}.style:json_schema", (), "jsonschema", extra="json", check=f"{_HERE}.style:check_schema"),
    "format": Verifier(f"{_HERE}.style:think_then_answer"),
    "length": Verifier(
        f"{_HERE}.style:within_length", (("min_words", "max_words"),), check=f"{_HERE}.style:check_length"
    ),
    "repetition": Verifier(f"{_HERE}.style:repetition"),
    "countdown": Verifier(
        f"{_HERE}.countdown:countdown", (("target",), ("nums", "numbers")), check=f"{_HERE}.countdown:check_countdown"
    ),
    "code": Verifier(f"{_HERE}.unit_tests:code_tests", (TESTS,), check=f"{_HERE}.unit_tests:check_tests"),
}


class NamedReward(NamedTuple):
    """One reward of a command line.

    Attributes:
      name: in metrics, samples and the report; unique on the command line.
      source: a name of `VERIFIERS`, "FILE.py:function" or "module:function".
      weight: of its score in the reward; None: not given.
    """

    name: str
    source: str
    weight: float | None


def parse_rewards(text: str) -> tuple[NamedReward, ...]:
    """Parse the rewards that a text names, at least one.

    >>> [tuple(reward) for reward in parse_rewards("own.py:score, format@0.1")]
    [('score', 'own.py:score', None), ('format', 'format', 0.1)]

    Raises:
      LoadError: a weight is not a finite number, or a name without a colon is not a verifier's.
    """
    sources = []
    weights = []
    for part in (part.strip() for part in text.split(",")):
        match = WEIGHTED_REWARD.fullmatch(part)
        assert match is not None
        sources.append(match["source"].strip())
        weights.append(None if match["weight"] is None else _weight(text, match["weight"]))
        if ":" not in sources[-1] and sources[-1] not in VERIFIERS:
            raise LoadError(
                f"--reward={text}: {sources[-1]!r} is not a verifier ({', '.join(VERIFIERS)}); of a function of your "
                "own write FILE.py:function or module:function"
            )
    names = unique_names([source.rpartition(":")[2] for source in sources], [_place(source) for source in sources])
    return tuple(map(NamedReward, names, sources, weights))


def unique_names(names: Sequence[str], places: Sequence[str] = ()) -> list[str]:
    """Make names unique by prefixing their place, or else by numbering them.

    >>> unique_names(["score", "score", "format"], ["a", "b", ""])
    ['a.score', 'b.score', 'format']
    >>> unique_names(["score", "score"])
    ['score', 'score.2']
    """
    placed = [
        f"{place}.{name}" if place and names.count(name) > 1 else name
        for name, place in zip(names, places or [""] * len(names), strict=True)
    ]
    return [f"{name}.{n}" if (n := placed[: i + 1].count(name)) > 1 else name for i, name in enumerate(placed)]


def _weight(text: str, given: str) -> float:
    try:
        weight = float(given)
    except ValueError:
        weight = math.nan
    if not math.isfinite(weight):
        raise LoadError(f"--reward={text}: the weight {given!r} is not a finite number; write for example format@0.1")
    return weight


def _place(source: str) -> str:
    """File or module of a function, without its folder; "" for a verifier."""
    module = source.rpartition(":")[0]
    return Path(module).stem if module.endswith(".py") else module.rpartition(".")[2]
