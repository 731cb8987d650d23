"""Rewards that can be computed: the answer is right or it is not.

Each is, or makes, a function `(prompt, completion, **fields) -> float` that gives 1.0 or 0.0. The right answer is the
first of the fields "answer", "solution" and "ground_truth" that a prompt's record has.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any

import regex

from funrl.rewards.mathematics.numbers import decimal_of, number_after, right_answer_text, same_text_or_number
from funrl.rewards.named import GOLD
from funrl.rewards.views import ANSWER, MARKS, read_as

_LAST_PART = 10_000  # characters, in which a completion says what its answer is


def right_answer(fields: Mapping[str, object]) -> Any:
    """The field that holds the right answer. Raises: ValueError, there is none."""
    name = next((name for name in GOLD if fields.get(name) is not None), None)
    if name is None:
        raise ValueError(f"one of the fields {', '.join(GOLD)} is needed; there are {', '.join(fields) or 'none'}")
    return fields[name]


@read_as(ANSWER)
def exact_match(prompt: str, completion: str, **fields: object) -> float:
    """1 if the completion is the right answer, blanks around either aside.

    A right answer that is a number, not text, is compared as a number: 72.0 and "72" are the same.

    Raises:
      ValueError: the right answer is neither text nor a finite number.

    Example: exact_match("2+2=", " 4", answer=4) is 1.0.
    """
    return float(same_text_or_number(right_answer(fields), completion))


def check_exact(fields: Mapping[str, object]) -> None:
    """Check the right answer of a record before anything is computed. Raises: ValueError, as `exact_match`."""
    right_answer_text(right_answer(fields))


@read_as(ANSWER, example="#### 4")
def gsm8k(prompt: str, completion: str, **fields: object) -> float:
    """1 if the number after the last "####" of the completion is that of the right answer.

    The right answer is a number, or a solution that ends in "#### number", as in the data set.

    Raises:
      ValueError: there is no number in it.

    Example: gsm8k("...", "3 * 400 = 1200 #### 1,200.00", answer="... #### 1200") is 1.0.
    References: Cobbe et al., 2021, https://arxiv.org/abs/2110.14168
    Warning: strict: without "####" the reward is 0. verl's flexible mode takes the last number of the completion.
    """
    return float(number_after("####", completion) == _right_number(fields))


def check_number(fields: Mapping[str, object]) -> None:
    """Check the right answer of a record before anything is computed. Raises: ValueError, as `gsm8k`."""
    _right_number(fields)


def _right_number(fields: Mapping[str, object]) -> Decimal:
    answer = right_answer_text(right_answer(fields))
    wanted = number_after("####", answer) if "####" in answer else decimal_of(answer.replace(",", ""))
    if wanted is None:
        raise ValueError(f"there is no number in the right answer {answer[:200]!r}")
    return wanted


@read_as(ANSWER)
def multiple_choice(
    prompt: str, completion: str, *, choices: Sequence[object] | None = None, **fields: object
) -> float:
    r"""1 if the completion chooses the right letter.

    Its choice is the last \boxed{B}, else the last "answer is B", "answer: (B)", "correct option is B" or <answer>B in
    its last 10,000 characters, else a letter that it consists of or begins with, as in "B" and "(B) Paris"; a letter in
    brackets counts in lower case too.

    Args:
      choices: the texts to choose from, where the record has them. The right answer may then be one of these texts, or
        its number, from 0, instead of a letter.

    Raises:
      ValueError: the right answer is neither.

    Example: multiple_choice("Which?", "Not A. The answer is (B).", answer="B") is 1.0.
    """
    wanted = _letter_of(right_answer(fields), () if choices is None else choices)
    # No two neighbouring parts of these patterns match the same text: they take time linear in the completion.
    boxed = re.findall(r"\\boxed\{\s*(?:\\(?:text(?:bf)?|mathrm)\{\s*)?\(?([A-Za-z])\)?[\s.:}]", completion)
    stated = re.findall(
        r"\b(?i:answer|correct (?:option|choice))\b(?:(?i: is| option)|[\s:*$`\"\[>])*(?:\(([A-Za-z])\)|([A-Z])\b)",
        completion[-_LAST_PART:],
    )
    first = re.match(r"\s*(?:\*\*)?(?:\(([A-Za-z])\)|([A-Z])(?=[).:,*]|[ \t]*(?:[\r\n]|$)))", completion)
    letters = boxed[-1:] or ["".join(pair) for pair in stated[-1:]] or (["".join(first.groups(""))] if first else [])
    return float([letter.upper() for letter in letters] == [wanted])


def check_choice(fields: Mapping[str, Any]) -> None:
    """Check the right answer of a record before anything is computed. Raises: ValueError, as `multiple_choice`."""
    choices = fields.get("choices")
    _letter_of(right_answer(fields), () if choices is None else choices)


@read_as(MARKS)
def matches_pattern(prompt: str, completion: str, *, pattern: str, **fields: object) -> float:
    """1 if the regular expression of the field "pattern" is found; anchor it to match the whole.

    Raises:
      PatternError: as `compile_pattern` and `matches_anywhere`.

    Example: matches_pattern("How many?", "I count 12.", pattern=r"\\b12\\b") is 1.0.
    """
    return float(matches_anywhere(compile_pattern(pattern), completion))


def check_pattern(fields: Mapping[str, object]) -> None:
    """Check the field "pattern" of a record before anything is computed. Raises: PatternError."""
    compile_pattern(fields["pattern"])


def contains_any(*words: str) -> Callable[..., float]:
    """A reward of 1.0 for a completion in which at least one of the words stands as a whole, in upper or lower case.

    Example: contains_any("cat", "dog")("", "A Dog ran.") is 1.0, and of "A hotdog." it is 0.0.
    """
    if not words:
        raise ValueError("contains_any() needs at least one word")
    return matches(r"\b(?:" + "|".join(map(re.escape, words)) + r")\b", re.IGNORECASE)


def matches(pattern: str, flags: int = 0) -> Callable[..., float]:
    """A reward of 1.0 for a completion in which the regular expression is found; anchor it to match the whole.

    Args:
      flags: as those of the module `re`.

    Raises:
      PatternError: as `compile_pattern`; the reward raises it as `matches_anywhere` does.

    Example: matches("<think>.*</think>", re.DOTALL)("", "<think>so</think> 4") is 1.0.
    """
    compiled = compile_pattern(pattern, flags)

    def reward(prompt: str, completion: str, **fields: object) -> float:
        return float(matches_anywhere(compiled, completion))

    return reward


def _letter_of(answer: object, choices: Sequence[object]) -> str:
    """The letter of a right answer: itself, its place among the choices, or the place of its text."""
    text = right_answer_text(answer).strip()
    place = None if isinstance(answer, (str, bool)) else decimal_of(text)
    if place is not None and 0 <= place < (len(choices) or 26) and place == int(place):
        return chr(ord("A") + int(place))
    texts = [right_answer_text(choice).strip() for choice in choices]
    plain = re.fullmatch(r"\(?([A-Za-z])\)?[.:]?", text)
    if plain is not None and (not texts or ord(plain[1].upper()) - ord("A") < len(texts)):
        return plain[1].upper()
    if text in texts:
        return chr(ord("A") + texts.index(text))
    raise ValueError(f"the right answer {answer!r} is no letter, nor one of the choices {list(choices)!r}")


SEARCH_TIMEOUT_S = 5.0  # of one search, in seconds of this process
_SHOWN = 200  # characters of a pattern in a message


class PatternError(ValueError):
    """A pattern is not a regular expression, or its search took too long."""


@functools.lru_cache(maxsize=1024)
def compile_pattern(pattern: str, flags: int = 0) -> Any:
    """Compile a regular expression; cached.

    Args:
      pattern: the expression.
      flags: flags as in `re`.

    Raises:
      PatternError: it is not one.
    """
    if not isinstance(pattern, str):
        raise PatternError(f"a regular expression is text, not {pattern!r}")
    try:
        return regex.compile(pattern, flags)
    except regex.error as error:
        raise PatternError(f"{pattern[:_SHOWN]!r} is not a regular expression: {error}") from None


def matches_anywhere(compiled: object, text: str) -> bool:
    """True if a compiled pattern matches anywhere in a text. Raises: PatternError, after `SEARCH_TIMEOUT_S`."""
    return next(matches_in(compiled, text), None) is not None


def matches_in(compiled: Any, text: str) -> Iterator[Any]:
    """Yield the matches of a compiled pattern in a text. Raises: PatternError, after `SEARCH_TIMEOUT_S`."""
    try:
        yield from compiled.finditer(text, timeout=SEARCH_TIMEOUT_S)
    except TimeoutError:
        raise PatternError(
            f"the pattern {compiled.pattern[:_SHOWN]!r} was still searching a text of {len(text)} characters after "
            f"{SEARCH_TIMEOUT_S:g} s: repetitions within repetitions, such as (a+)+, backtrack; write it without them"
        ) from None
