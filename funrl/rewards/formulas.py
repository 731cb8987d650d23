"""Answers that are formulas, compared as mathematics by the library math-verify."""

from __future__ import annotations

import functools
import logging
import threading
from typing import Any

from funrl.rewards.verifiers import right_answer

TIMEOUT_S = 3  # of reading a formula, and of one comparison


def math_answer(prompt: str, completion: str, **fields: Any) -> float:
    r"""1 if the completion's answer is equal to the right answer.

    Its answer is the last \boxed{...}, else the last formula in dollar signs or the last number. The right answer is
    that alone, or a solution with \boxed{...}. What cannot be read, or takes long to compare, is wrong.

    Raises:
      ValueError: there is no formula in the right answer.

    Example: math_answer("Half of 1?", r"It is $\frac{1}{2}$.", answer="0.5") is 1.0.
    """
    if last_boxed(completion) is not None:
        return boxed_answer(prompt, completion, **fields)
    wanted = _right_formulas(str(right_answer(fields)))
    return float(_equal(wanted, _formulas(completion)))


def boxed_answer(prompt: str, completion: str, **fields: Any) -> float:
    r"""1 if the last \boxed{...} of the completion is equal to the right answer, and 0 without one.

    Raises:
      ValueError: there is no formula in the right answer.

    Example: boxed_answer("Half of 1?", r"So \boxed{\tfrac12}", answer=r"... \boxed{0.5}") is 1.0.
    """
    wanted = _right_formulas(str(right_answer(fields)))
    given = last_boxed(completion)
    return float(given is not None and _equal(wanted, _formulas(rf"\boxed{{{given}}}")))


def last_boxed(text: str) -> str | None:
    r"""The text inside of the last \boxed{...} that is closed; None where there is none."""
    for mark in (r"\boxed{", r"\fbox{"):
        begin = text.rfind(mark)
        while begin >= 0:
            depth = 1
            inside = begin + len(mark)
            for end in range(inside, len(text)):
                depth += (text[end] == "{") - (text[end] == "}")
                if depth == 0:
                    return text[inside:end]
            begin = text.rfind(mark, 0, begin)
    return None


@functools.lru_cache(maxsize=4096)
def _right_formulas(answer: str) -> tuple[Any, ...]:
    # the latter as in GSM8K
    boxed = last_boxed(answer)
    plain = answer.rpartition("####")[2].strip()
    for text in (rf"\boxed{{{plain if boxed is None else boxed}}}", plain):
        if formulas := _formulas(text):
            return formulas
    raise ValueError(f"there is no formula in the right answer {answer!r}")


def _formulas(text: str) -> tuple[Any, ...]:
    """The formula that a text ends with, as math-verify reads it: an expression, and how it was written."""
    from math_verify import parse

    return tuple(parse(text, parsing_timeout=_timeout_s()))


def _equal(wanted: tuple[Any, ...], given: tuple[Any, ...]) -> bool:
    from math_verify import verify

    return verify(list(wanted), list(given), timeout_seconds=_timeout_s())


def _timeout_s() -> Any:
    """math-verify's timeouts are signals, which only the main thread can take: the pool's must do in others."""
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns of every formula that takes long
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
