"""Loading a user's reward function and calling it with care."""

import dataclasses
import math
import pickle
import sys

import numpy as np
import pytest
import torch

from funrl.rewards.load import RewardError, load_reward, score

GOOD = """
from __future__ import annotations
from dataclasses import dataclass
import helper_of_reward

@dataclass
class Weights:
    bonus: float = helper_of_reward.BONUS

constant = 3

def score(prompt, completion, *, answer, **fields):
    return float(completion == answer) + Weights().bonus

def other(prompt, completion):
    return 0
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper_of_reward.py").write_text("BONUS = 0.5")
    (tmp_path / "json.py").write_text(GOOD)  # the name of a module that exists
    yield tmp_path
    sys.modules.pop("helper_of_reward", None)


def test_a_function_of_a_file_and_of_a_package(folder):
    fn = load_reward(f"{folder}/json.py:score")
    assert fn("1+1=", "2", answer="2", level=3) == 1.5
    assert sys.modules["json"].__file__ != str(folder / "json.py")
    assert load_reward("funrl.rewards.verifiers:exact_match")("", "2", answer=2) == 1.0


@pytest.mark.parametrize(
    "name,message",
    [
        ("json.py", "write FILE.py:function"),
        ("json.py:", "write FILE.py:function"),
        (":score", "write FILE.py:function"),
        ("nothing.py:score", r"nothing\.py: no such file"),
        ("json.py:scores", "has no 'scores'; its functions: .*score, other"),
        ("json.py:constant", "'constant' is 3, which cannot be called"),
        ("broken.py:score", r"(?s)does not import: SyntaxError.*broken\.py.*line 2"),
        ("raises.py:score", r"(?s)does not import: ZeroDivisionError.*raises\.py\", line 3"),
        ("leaves.py:score", "does not import: SystemExit"),
        ("needs.py:score", "does not import: ModuleNotFoundError.*no_such_module_anywhere"),
    ],
)
def test_what_cannot_be_loaded_is_explained(folder, monkeypatch, name, message):
    (folder / "broken.py").write_text("x = 1\ndef score(:\n")
    (folder / "raises.py").write_text("\n\n1 / 0\n")
    (folder / "leaves.py").write_text("import sys\nsys.exit(2)\n")
    (folder / "needs.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.chdir(folder)
    with pytest.raises(RewardError, match=message):
        load_reward(name)


def test_a_package_that_is_not_there_is_named():
    with pytest.raises(RewardError, match="does not import: ModuleNotFoundError"):
        load_reward("no_such_package.rewards:score")


def test_scores_are_floats_of_each_row():
    values = [1, True, 0.25, np.float32(0.5), np.array(2.0), torch.tensor(3.0), torch.tensor([4], dtype=torch.int32)]
    got = score(lambda p, c, i: values[i], ["p"] * 7, ["c"] * 7, [{"i": i} for i in range(7)])
    assert got == [1.0, 1.0, 0.25, 0.5, 2.0, 3.0, 4.0]
    assert all(type(x) is float for x in got)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "1.0", b"1", [1.0], torch.ones(2), {}, 1j])
def test_what_is_no_finite_number_stops_with_the_row(value):
    rewards = [1.0, value]
    with pytest.raises(RewardError, match=r"(?s)finite number is needed.*prompt: 'p1'.*completion: 'c1'") as caught:
        score(lambda p, c, i: rewards[i], ["p0", "p1"], ["c0", "c1"], [{"i": 0}, {"i": 1}])
    assert (caught.value.prompt, caught.value.completion, caught.value.value) == ("p1", "c1", value) or value != value
    assert repr(value) in str(caught.value)


def test_an_exception_shows_the_row_and_the_users_own_traceback():
    def inner():
        raise KeyError("no such unit")

    def reward(prompt, completion, **fields):
        return inner()

    with pytest.raises(RewardError) as caught:
        score(reward, ["how far?"], ["3 km"], [{"level": 2}])
    text = str(caught.value)
    assert "raised KeyError('no such unit')" in text
    assert "'how far?'" in text and "'3 km'" in text and "{'level': 2}" in text
    assert "in inner" in text and "in reward" in text and "in _one" not in text
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_field_that_the_function_does_not_take_is_shown():
    with pytest.raises(RewardError, match="unexpected keyword argument 'answer'"):
        score(lambda prompt, completion: 1.0, ["p"], ["c"], [{"answer": 1}])


def test_the_error_crosses_processes():
    error = pickle.loads(pickle.dumps(RewardError("it failed", "p", "c", 3)))
    assert (str(error), error.prompt, error.completion, error.value) == ("it failed", "p", "c", 3)


def test_a_dataclass_of_the_file_works_under_its_own_module_name(folder):
    fn = load_reward(f"{folder}/json.py:score")
    weights = fn.__globals__["Weights"]
    assert [f.name for f in dataclasses.fields(weights)] == ["bonus"]
    assert sys.modules[weights.__module__].Weights is weights
