"""Answers compared as mathematics."""

import pytest

from funrl.rewards.answers import last_boxed
from funrl.rewards.formulas import boxed_answer, check_formula, math_answer
from funrl.rewards.mathematics import judge

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
    monkeypatch.setattr(judge, "TIMEOUT_S", 120)  # what takes longer is wrong, also on a machine that is busy
    for completion, answer, by_math, by_box in CASES:
        assert math_answer("", completion, answer=answer) == by_math, (completion, answer)
        assert boxed_answer("", completion, solution=answer) == by_box, (completion, answer)
    with pytest.raises(ValueError, match="no formula in the right answer ''"):
        math_answer("", "3", answer="")


@pytest.mark.parametrize(
    "text,inside",
    [
        (r"\boxed{1} \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed{2} and \boxed{3", "2"),
        ("2", None),
        (r"\fbox{5}", "5"),
        (r"\boxed{\boxed{7}}", "7"),
    ],
)
def test_the_last_box_that_is_closed(text, inside):
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    "completion,answer,right",
    [
        ("1e-05", "0.00001", 1),
        ("The answer is 1e-05", "1", 0),
        ("The answer is 1e-05.", "0.00001", 1),
        ("So $x = 3$, and the answer is 4.", "4", 1),
        ("The answer is $x=3$.", "3", 1),
        ("**Answer: 42**", "42", 1),
        ("The final answer is (1, 3).", "(1,3)", 1),
        ("3 + 4 = 7 apples", "7", 1),
        ("She has 5 cm left.", "5 m", 0),
        ("She has 5 cm left.", "5 cm", 1),
        ("It costs $5 and then $7.", "7", 1),
        ("The answer is 10 000", "10000", 1),
        (r"Thus \(x=2\) or \[x=5\]", "5", 1),
        ("it is 5-3", "2", 1),
        ("The answer is 50%.", "50", 1),
        ("Answer: Paris", "Paris", 1),
        ("the answer is 1000, from step 3.", "1000", 1),
        ("no idea", "42", 0),
        ("Therefore, the answer is \n\n\\[ 7 \\]", "7", 1),
        ("The answer is .5", "1/2", 1),
        ("between 3 and 5", "5", 1),
        ("There are 2^10 ways", "1024", 1),
        ("x+1", "1+x", 1),
        ("The answer is \u22127.", "-7", 1),
        ("7" * 20_000, "7", 0),
        ("**42**", "42", 1),
        ("`42`", "42", 1),
        ("#### 42", "42", 1),
        ("x\n#### x+1", "x+1", 1),
        (r"<think>1</think><answer>\frac{1}{2}</answer>", "1/2", 1),
        ("The answer must be 7, as 8 is too many.", "7", 1),
        (r"<think>1</think><answer>\frac{1}{2}</answer>", "2", 0),
        ("#### Answer\n\n7", "7", 1),
        ("The answer is $x=4$ or $x=-4$.", "4", 0),
        ("The answers are $x=4$ and $x=-4$.", "4,-4", 1),
        (r"\boxed 7", "7", 1),
    ],
)
def test_an_answer_without_a_box(completion, answer, right):
    pytest.importorskip("math_verify")
    assert math_answer("", completion, answer=answer) == right


def test_a_right_answer_whose_braces_do_not_match_is_named():
    with pytest.raises(ValueError, match=r"braces of the right answer .* do not match"):
        check_formula({"answer": r"\frac{1}{"})
    check_formula({"answer": r"\left\{ 1, \frac{1}{2} \right."})


def test_drafts_are_not_answers():
    pytest.importorskip("math_verify")
    drafts = r"Try \boxed{3}. No, \boxed{5}. So \boxed{4}"
    assert [math_answer("", drafts, answer=answer) for answer in (3, 4, 5)] == [0.0, 1.0, 0.0]
    assert math_answer("", drafts + r", that is \boxed{", answer=4) == 1.0
