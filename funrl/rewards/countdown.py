"""The countdown game: an expression of given numbers that has a given value."""

from __future__ import annotations

import ast
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

from funrl.rewards.answers import last_tagged
from funrl.rewards.mathematics.numbers import decimal_of, right_answer_text
from funrl.rewards.views import MARKS, read_as

_OPERATIONS: dict[type, Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
LONGEST_EXPRESSION = 500  # characters of an expression


@read_as(MARKS)
def countdown(
    prompt: str,
    completion: str,
    *,
    target: object,
    nums: Sequence[object] | None = None,
    numbers: Sequence[object] | None = None,
    **fields: object,
) -> float:
    """1 if the completion's expression uses each of the numbers once and has the value of the target.

    The expression is the last <answer>...</answer>, else the last line that is not empty; of an equation, its left
    side. It may have +, -, *, / and parentheses, and is computed in fractions, so exactly.

    Args:
      target: a number.
      nums, numbers: the numbers, by either name; None: it has the other one.

    Raises:
      ValueError: the target or the numbers are not numbers.

    Example: countdown("...", "<answer>(4 - 1) * 8 = 24</answer>", target=24, nums=[1, 4, 8]) is 1.0.
    References: the game as TinyZero trains it, https://github.com/Jiayi-Pan/TinyZero
    """
    wanted, given = _game(target, nums, numbers)
    tagged = last_tagged(completion)
    lines = completion.strip().splitlines()
    text = (lines or [""])[-1] if tagged is None else tagged
    expression = text.split("=")[0].replace("\u00d7", "*").replace("\u00f7", "/").strip()
    used: list[Fraction] = []
    try:
        value = _value(ast.parse(expression, mode="eval").body, used) if len(expression) <= LONGEST_EXPRESSION else None
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return 0.0
    return float(value == wanted and Counter(used) == Counter(given))


def check_countdown(fields: Mapping[str, object]) -> None:
    """Check the fields of a record before anything is computed. Raises: ValueError, as `countdown`."""
    _game(fields.get("target"), fields.get("nums"), fields.get("numbers"))


def _game(target: object, nums: Any, numbers: Any) -> tuple[Fraction, list[Fraction]]:
    """The target and the numbers. Raises: ValueError."""
    given = numbers if nums is None or not len(nums) else nums
    if given is None or isinstance(given, str) or not len(given):
        raise ValueError(f"one of the fields nums, numbers must hold a list of numbers, not {given!r}")
    values = [decimal_of(right_answer_text(number)) for number in (target, *given)]
    bad = next((number for number, value in zip((target, *given), values, strict=True) if value is None), None)
    if bad is not None or None in values:
        raise ValueError(f"the target {target!r} and the numbers {list(given)!r} must be numbers; {bad!r} is not")
    wanted, *rest = [Fraction(value) for value in values if value is not None]
    return wanted, rest


def _value(node: ast.expr, used: list[Fraction]) -> Fraction:
    """Value of an expression; appends its numbers to `used`. Raises: ValueError."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_value(node.left, used), _value(node.right, used))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_value(node.operand, used)
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        used.append(Fraction(str(node.value)))
        return used[-1]
    raise ValueError(ast.dump(node))
