"""Unit tests of programs in completions: the forms of data sets, and what counts as passing."""

import json
import platform
import sys

import pytest

from funrl.rewards import confine
from funrl.rewards.sandbox import Limits
from funrl.rewards.unit_tests import code_tests, program_of, read_tests, unit_tests

CONFINED = pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() not in confine.MACHINES, reason="programs are confined on Linux"
)
ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."
SUM = "```\nprint(sum(map(int, input().split())))\n```"
PAIRS = {"inputs": ["1 2\n", "3 4"], "outputs": ["3\n", "7"]}


@CONFINED
@pytest.mark.parametrize(
    "completion,fields,reward,share",
    [
        (ADD, {"tests": "assert add(1, 2) == 3"}, 1.0, 1.0),
        (ADD, {"test_list": ["assert add(1, 2) == 3", "assert add(1, 2) == 4"]}, 0.0, 0.5),
        (SUM, {"ground_truth": json.dumps(PAIRS)}, 1.0, 1.0),
        (SUM, {"test_cases": [{"input": ["1 2"], "output": "3"}, {"input": "1", "output": "2"}]}, 0.0, 0.5),
        ("    return a + b", {"test": "def check(f):\n    assert f(1, 2) == 3", "entry_point": "add"}, 1.0, 1.0),
        ("```python\nimport os\nos._exit(0)\n```", {"tests": ["assert True"]}, 0.0, 0.0),
        ("```python\nprint(3)\nraise KeyError\n```", {"tests": {"inputs": [""], "outputs": ["3"]}}, 0.0, 0.0),
        ("", {"tests": ["assert add(1, 2) == 3"]}, 0.0, 0.0),
        (ADD, {"tests": ["raise SystemExit", "assert add(1, 2) == 3"]}, 0.0, 0.5),
    ],
)
def test_a_program_is_worth_what_its_tests_say(completion, fields, reward, share):
    limits = Limits(wall_s=8, cpu_s=4)
    assert unit_tests(share=True, limits=limits)("def add(a, b):\n", completion, **fields) == share
    if share not in (0.0, 1.0):
        assert code_tests("def add(a, b):\n", completion, **fields) == reward


def test_the_program_of_a_completion():
    assert program_of("", ADD, {}) == "def add(a, b):\n    return a + b\n"
    assert program_of("", "```python\na\n```\n```py\nb\n```", {}) == "b\n"
    assert program_of("", "```python\ncut off", {}) == "cut off" and program_of("", "plain", {}) == "plain"
    assert program_of("def f():\n", "    return 1", {"entry_point": "f"}) == "def f():\n    return 1"
    assert program_of("def f():\n", "def f(): return 1", {"entry_point": "f"}) == "def f(): return 1"


@CONFINED
def test_the_right_block_is_run():
    program = "def inc(x):\n    return x + 1\n"
    answers = (
        f"First:\n```bash\npip list\n```\nThen:\n```python\n{program}```\nThat is all.",
        f"```python\n{program}```\nIt prints:\n```text\n2\n```\n",
        f"```Python3\n{program}```\nDone.".replace("\n", "\r\n"),
    )
    assert [code_tests("", answer, tests=["assert inc(1) == 2"]) for answer in answers] == [1.0] * 3


def test_the_forms_of_tests():
    assert read_tests({"tests": "assert f() == [1]"}).sources == ("assert f() == [1]",)
    assert read_tests({"tests": "[print(x) for x in f()]"}).sources == ("[print(x) for x in f()]",)
    assert read_tests({"tests": None, "test_list": '["a", "b"]'}).sources == ("a", "b")
    assert read_tests({"tests": {"inputs": [["1", "2"]], "outputs": [3]}}).pairs == (("1\n2", "3"),)
    for bad in (7, [], [1], {"inputs": [1], "outputs": [1], "fn_name": "f"}, {"inputs": [1], "outputs": []}):
        with pytest.raises(ValueError, match=r"no tests|one of the fields tests, test_list"):
            read_tests({"tests": bad})
