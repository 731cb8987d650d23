"""The verifiers on right, wrong and awkward completions."""

import itertools
import json
import os
import re
from pathlib import Path

import pytest

from funrl.rewards import verifiers as v


def test_the_printed_examples():
    assert v.exact_match("2+2=", " 4", answer=4) == 1.0
    assert v.gsm8k("...", "3 * 400 = 1200 #### 1,200.00", answer="... #### 1200") == 1.0
    assert v.contains_any("cat", "dog")("", "A Dog ran.") == 1.0
    assert v.contains_any("cat", "dog")("", "A hotdog.") == 0.0
    assert v.matches("<think>.*</think>", re.DOTALL)("", "<think>so</think> 4") == 1.0


@pytest.mark.parametrize("completion,answer,reward", [("a b", "a b\n", 1.0), ("a  b", "a b", 0.0), ("", "x", 0.0)])
def test_exact_match(completion, answer, reward):
    assert v.exact_match("p", completion, answer=answer, other=1) == reward


@pytest.mark.parametrize(
    "completion,reward",
    [
        ("#### 18", 1.0),
        ("so\n####18", 1.0),
        ("#### $18.", 1.0),
        ("#### 18.0 dollars", 1.0),
        ("#### 17 #### 18", 1.0),
        ("#### 18 #### 17", 0.0),
        ("#### 180", 0.0),
        ("#### 18.5", 0.0),
        ("#### -18", 0.0),
        ("#### eighteen", 0.0),
        ("#### 18/2", 0.0),
        ("#### 18:2", 0.0),
        ("#### 18 - 5", 0.0),
        ("#### 18.0.1", 0.0),
        ("#### 18 - that is all", 1.0),
        ("The answer is 18", 0.0),
        ("####", 0.0),
        ("", 0.0),
    ],
)
def test_gsm8k_takes_the_number_after_the_last_mark(completion, reward):
    for answer in ("9 * 2 = <<9*2=18>>18\n#### 18", "18", 18, 18.0):
        assert v.gsm8k("p", completion, answer=answer, level="easy") == reward


@pytest.mark.parametrize(
    "text,number", [("1,234,567", 1234567), ("-0.5", -0.5), (".25", 0.25), ("+3", 3), ("-$1,000", -1000)]
)
def test_numbers_are_read_as_people_write_them(text, number):
    assert float(v.number_after("####", f"#### {text}")) == number


def test_an_answer_without_a_number_is_an_error():
    with pytest.raises(ValueError, match="no number in the right answer 'none'"):
        v.gsm8k("p", "#### 1", answer="none")
    with pytest.raises(ValueError, match="at least one word"):
        v.contains_any()


def test_words_with_signs_are_taken_literally():
    assert v.contains_any("a.c")("", "abc") == 0.0
    assert v.contains_any("a.c", "x")("", "say A.C now") == 1.0
    assert v.matches(r"^\d+$")("", "12") == 1.0
    assert v.matches(r"^\d+$")("", "12 ") == 0.0


@pytest.mark.data
def test_every_solution_of_gsm8k_earns_its_own_reward():
    folder = Path(os.environ.get("FUNRL_DATA") or Path(__file__).parents[3] / "shared" / "data")
    path = folder / "gsm8k" / "test.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there; set FUNRL_DATA to the folder that holds gsm8k")
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(lines) == 1319
    assert all(v.gsm8k(x["question"], x["answer"], answer=x["answer"]) == 1.0 for x in lines)
    assert sum(v.gsm8k("", x["answer"], answer=y["answer"]) for x, y in itertools.pairwise(lines)) < 60
    for line in lines:
        number = line["answer"].rpartition("####")[2].strip()
        plain = number.replace(",", "")
        for near in (f"{plain}0", f"{int(plain) + 1}", f"{plain}.5", f"-{plain}", f"{int(plain) - 1}", f"x{plain}"):
            assert v.gsm8k("", f"so #### {near}", answer=line["answer"]) == 0.0 or near == "-0", (number, near)
        for same in (plain, f"{plain}.00", f"{int(plain):,}", f"{number} apples", f"{number}."):
            assert v.gsm8k("", f"so #### {same}", answer=line["answer"]) == 1.0, (number, same)
        assert v.gsm8k("", f"The answer is {number}", answer=line["answer"]) == 0.0


def test_the_right_answer_is_found_under_the_names_that_data_sets_give_it():
    assert v.exact_match("", "2", solution=2) == v.exact_match("", "2", answer=None, ground_truth="2") == 1.0
    assert v.exact_match("", "2", answer="2", solution="3") == 1.0
    with pytest.raises(ValueError, match="one of the fields answer, solution, ground_truth is needed; there are level"):
        v.exact_match("", "2", level=3)


@pytest.mark.parametrize(
    "completion,letter",
    [
        ("B", "B"),
        ("(b)", "B"),
        ("B. Paris", "B"),
        ("**B**", "B"),
        ("B) Paris, not A", "B"),
        ("A dog ran.", ""),
        ("Not A. The answer is (B).", "B"),
        ("the answer is B", "B"),
        ("Answer: **C**", "C"),
        ("answer is a", ""),
        ("The answer is A. No: the answer is C", "C"),
        (r"so \boxed{D}.", "D"),
        (r"\boxed{\text{(D)}}", "D"),
        (r"\boxed{A} or \boxed{B}, the answer is C", "B"),
        ("", ""),
        ("42", ""),
        ("The answer is Brussels", ""),
        ("B\n\nAs it rains.", "B"),
        ("<think>A</think>\n<answer>B</answer>", "B"),
        ("The correct option is (C).", "C"),
        ("Answer: $B$", "B"),
        ("The answer is option D.", "D"),
        (r"\boxed{\mathrm{B}}", "B"),
        (r"\boxed{B: Paris}", "B"),
    ],
)
def test_multiple_choice(completion, letter):
    results = [right for right in "ABCD" if v.multiple_choice("", completion, answer=right) == 1.0]
    assert results == [letter] * bool(letter)


def test_the_right_choice_may_be_a_number_or_a_text():
    cities = ["Rome", "Paris"]
    for answer in ("B", "b.", "(B)", 1, "Paris"):
        assert v.multiple_choice("", "B", answer=answer, choices=cities) == 1.0
        assert v.multiple_choice("", "A", answer=answer, choices=cities) == 0.0
    with pytest.raises(ValueError, match="'Bern' is no letter, nor one of the choices \\['Rome', 'Paris'\\]"):
        v.multiple_choice("", "B", answer="Bern", choices=cities)
    assert v.multiple_choice("", "B", answer="y", choices=["x", "y"]) == 1.0
    with pytest.raises(ValueError, match="'C' is no letter, nor one of the choices"):
        v.check_choice({"answer": "C", "choices": cities})


def test_a_pattern_of_the_record():
    assert v.matches_pattern("", "I count 12.", pattern=r"\b12\b", level=1) == 1.0
    assert v.matches_pattern("", "I count 123.", pattern=r"\b12\b") == 0.0
