"""Answers compared as mathematics."""

import pytest

from funrl.rewards import formulas
from funrl.rewards.formulas import boxed_answer, last_boxed, math_answer

CASES = [  # completion, right answer, whether `math` and `boxed` take it
    (r"It is $\frac{1}{2}$.", "0.5", True, False),
    ("half", "0.5", False, False),
    (r"\boxed{\tfrac12}", r"Now $x = 3$, so \boxed{0.5}.", True, True),
    ("the answer is 1000", "1,000", True, False),
    (r"\boxed{(1, 2)}", "(1,2)", True, True),
    (r"\boxed{(2, 1)}", "(1,2)", False, False),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", True, True),
    (r"\boxed{x^2+2x}", "(x+1)^2", False, False),
    (r"first \boxed{3}, then \boxed{4}", "3", False, False),
    (r"first \boxed{3}, then \boxed{4}", "4", True, True),
    (r"\boxed{4", "4", False, False),
    (r"\boxed{42}", "3 * 14 = 42\n#### 42", True, True),
    (r"\boxed{43}", "3 * 14 = 42\n#### 42", False, False),
    (r"\boxed{}", "42", False, False),
    ("", "42", False, False),
]


@pytest.mark.slow
def test_equal_formulas_are_right_and_near_misses_wrong(monkeypatch):
    pytest.importorskip("math_verify")
    monkeypatch.setattr(formulas, "TIMEOUT_S", 120)  # what takes longer is wrong, also on a machine that is busy
    for completion, answer, by_math, by_box in CASES:
        assert math_answer("", completion, answer=answer) == by_math, (completion, answer)
        assert boxed_answer("", completion, solution=answer) == by_box, (completion, answer)
    with pytest.raises(ValueError, match="no formula in the right answer ''"):
        math_answer("", "3", answer="")


@pytest.mark.parametrize(
    "text,inside",
    [
        (r"\boxed{1} \boxed{\frac{1}{2}}.", r"\frac{1}{2}"), (r"\boxed{2} and \boxed{3", "2"), ("2", None),
        (r"\fbox{5}", "5"), (r"\boxed{\boxed{7}}", "7"),
    ],
)  # fmt: skip
def test_the_last_box_that_is_closed(text, inside):
    assert last_boxed(text) == inside
