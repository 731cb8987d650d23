"""Patterns of users end, and verifiers take time linear in a completion."""

import os
import re
import subprocess
import sys

import pytest

from funrl.rewards import verifiers as patterns
from funrl.rewards.answers import final_answer, last_tagged
from funrl.rewards.call import RewardError
from funrl.rewards.load import check_fields, load_rewards
from funrl.rewards.verifiers import PatternError, compile_pattern, matches_anywhere, matches_in, matches_pattern

BACKTRACKS = r"(a|aa)+$"


def test_a_search_that_takes_too_long_is_an_error_that_names_the_pattern(monkeypatch):
    monkeypatch.setattr(patterns, "SEARCH_TIMEOUT_S", 0.2)
    message = re.escape(repr(BACKTRACKS)) + " was still searching a text of 61 characters"
    with pytest.raises(PatternError, match=message):
        matches_pattern("p", "a" * 60 + "b", pattern=BACKTRACKS)
    assert matches_pattern("p", "aaa", pattern=BACKTRACKS) == 1.0


def test_patterns_are_those_of_re():
    assert matches_anywhere(compile_pattern("b.d", re.DOTALL), "ab\nd")
    assert not matches_anywhere(compile_pattern("b.d"), "ab\nd")
    assert matches_anywhere(compile_pattern("ABC", re.IGNORECASE), "xabcx")
    matches = list(matches_in(compile_pattern(r"\[\[(-?[\d.]+)\]\]"), "[[1]] and [[2.5]]"))
    assert [match[1] for match in matches] == ["1", "2.5"]


def test_a_pattern_or_test_that_cannot_be_used_is_refused_before_the_run():
    for name, fields, message in (
        ("regex", {"pattern": "(a"}, r"--reward=regex: '\(a' is not a regular expression: missing \)"),
        ("regex", {"pattern": 7}, "a regular expression is text, not 7"),
        ("code", {"tests": "[1,2"}, r"--reward=code: test 0 is not Python, '\[1,2': .*was never closed"),
        ("code", {"tests": ["assert f() == 1", "assert f( == 1"]}, "test 1 is not Python"),
        ("code", {"tests": [1]}, "the field 'tests' holds no tests"),
    ):
        (reward,) = load_rewards(name)
        with pytest.raises(RewardError, match=message):
            check_fields(name, reward, [fields])


def test_the_last_tagged_answer():
    for text, content in (
        ("<answer>1</answer> <Answer>2</ANSWER>", "2"),
        ("<answer>1</answer><answer>", "1"),
        ("</answer><answer>a<answer>b</answer></answer>", "a<answer>b"),
        ("<answer>", None),
    ):
        assert last_tagged(text) == content, text
    assert final_answer("<answer> 4 </answer>") == "4"


ADVERSARIAL = """
from funrl.rewards import load
for name, fields in (("gsm8k", {"answer": "1"}), ("choice", {"answer": "B"}), ("format", {}), ("exact", {"answer": 1}),
                     ("countdown", {"target": 1, "nums": [1]}), ("length", {"max_words": 9}), ("repetition", {})):
    (reward,) = load.load_rewards(name)
    for piece in ("<answer>", "</answer>", "<think>", "</think><answer>", "answer :", " ", "\\\\boxed{", "answer is ",
                  ":", "1,", "#### ", "(", "```json\\n", "A ", "answer" + " is" * 3, "\\\\boxed{ "):
        reward("p", piece * (200_000 // len(piece)), **fields)
    reward("p", "\\\\boxed{" + " " * 200_000, **fields)
    reward("p", "answer" + ":" * 200_000, **fields)
"""


@pytest.mark.slow
def test_verifiers_take_time_linear_in_the_completion():
    import resource

    def bound():
        resource.setrlimit(resource.RLIMIT_CPU, (30, 30))  # patterns that backtrack take minutes

    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-c", ADVERSARIAL], preexec_fn=bound, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-2000:]
