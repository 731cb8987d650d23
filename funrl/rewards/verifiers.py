"""Rewards that can be computed: the answer is right or it is not.

Each is, or makes, a function `(prompt, completion, **fields) -> float` that gives 1.0 or 0.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

_NUMBER = r"[-+]?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)"


def exact_match(prompt: str, completion: str, *, answer: Any, **fields: Any) -> float:
    """1 if the completion is the field "answer", blanks around either aside.

    Example: exact_match("2+2=", " 4", answer=4) is 1.0.
    """
    return float(completion.strip() == str(answer).strip())


def gsm8k(prompt: str, completion: str, *, answer: Any, **fields: Any) -> float:
    """1 if the number after the last "####" of the completion is that of the field "answer".

    Args:
      answer: a number, or a solution that ends in "#### number", as in the data set.

    Raises:
      ValueError: there is no number in `answer`.

    Example: gsm8k("...", "3 * 400 = 1200 #### 1,200.00", answer="... #### 1200") is 1.0.
    References: Cobbe et al., 2021, https://arxiv.org/abs/2110.14168
    Warning: strict: without "####" the reward is 0. verl's flexible mode takes the last number of the completion.
    """
    wanted = number_after("####", str(answer)) if "####" in str(answer) else _decimal(str(answer))
    if wanted is None:
        raise ValueError(f"there is no number in the field answer={answer!r}")
    return float(number_after("####", completion) == wanted)


def contains_any(*words: str) -> Callable[..., float]:
    """A reward of 1.0 for a completion in which at least one of the words stands as a whole, in upper or lower case.

    Example: contains_any("cat", "dog")("", "A Dog ran.") is 1.0, and of "A hotdog." it is 0.0.
    """
    if not words:
        raise ValueError("contains_any() needs at least one word")
    return matches(r"\b(?:" + "|".join(map(re.escape, words)) + r")\b", re.IGNORECASE)


def matches(pattern: str, flags: int = 0) -> Callable[..., float]:
    """A reward of 1.0 for a completion in which the regular expression is found; anchor it to match the whole.

    Example: matches("<think>.*</think>", re.DOTALL)("", "<think>so</think> 4") is 1.0.
    """
    compiled = re.compile(pattern, flags)

    def reward(prompt: str, completion: str, **fields: Any) -> float:
        return float(compiled.search(completion) is not None)

    return reward


def number_after(mark: str, text: str) -> Decimal | None:
    """The number right after the last `mark`: "$1,200.50" is 1200.5; None where there is none."""
    _, found, rest = text.rpartition(mark)
    match = re.match(rf"\s*({_NUMBER})", rest) if found else None
    return None if match is None else _decimal(match[1])


def _decimal(text: str) -> Decimal | None:
    plain = re.fullmatch(_NUMBER, text.strip())
    return None if plain is None else Decimal(re.sub(r"[$,]", "", plain[0]))
