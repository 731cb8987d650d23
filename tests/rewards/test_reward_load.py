"""Loading a user's reward function and calling it with care."""

import math
import pickle

import numpy as np
import pytest
import torch

from funrl.loading import LoadError
from funrl.rewards.load import RewardError, load_rewards, score_all, score_row


def test_several_functions_of_a_file(tmp_path):
    (tmp_path / "two.py").write_text("def a(p, c):\n    return 1\n\ndef b(p, c):\n    return 2\n")
    a, b = load_rewards(f"{tmp_path}/two.py:a, {tmp_path}/two.py:b")
    assert (a("", ""), b("", "")) == (1, 2) and a.__globals__ is b.__globals__
    with pytest.raises(LoadError, match=r"^--reward=two\.py: write FILE.py:function"):
        load_rewards("two.py")


def test_scores_are_floats_of_each_row():
    values = [1, True, 0.25, np.float32(0.5), np.array(2.0), torch.tensor(3.0), torch.tensor([4], dtype=torch.int32)]
    got = score_all(lambda p, c, i: values[i], ["p"] * 7, ["c"] * 7, [{"i": i} for i in range(7)])
    assert got == [1.0, 1.0, 0.25, 0.5, 2.0, 3.0, 4.0]
    assert all(type(x) is float for x in got)


@pytest.mark.parametrize(
    "value", [math.nan, math.inf, -math.inf, 1e300, -3.5e38, 10**400, None, "1.0", b"1", [1.0], torch.ones(2), {}, 1j]
)
def test_what_is_no_finite_number_stops_with_the_row(value):
    rewards = [1.0, value]
    with pytest.raises(RewardError, match=r"(?s)finite number is needed.*prompt: 'p1'.*completion: 'c1'") as caught:
        score_all(lambda p, c, i: rewards[i], ["p0", "p1"], ["c0", "c1"], [{"i": 0}, {"i": 1}])
    assert (caught.value.prompt, caught.value.completion, caught.value.value) == ("p1", "c1", value) or value != value
    assert repr(value) in str(caught.value)


GREEDY_STATE = """
import torch

torch.set_default_dtype(torch.float64)
torch.set_grad_enabled(False)


def greedy(p, c):
    torch.set_default_dtype(torch.float16)
    torch.set_default_device("meta")
    torch.set_grad_enabled(False)
    return 1 / len(c)
"""


def state_of_torch():
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.empty(1).device.type


def test_a_reward_file_does_not_change_torch_for_the_run(tmp_path):
    before = state_of_torch()
    (tmp_path / "greedy.py").write_text(GREEDY_STATE)
    (reward,) = load_rewards(f"{tmp_path}/greedy.py:greedy")
    assert state_of_torch() == before
    assert score_all(reward, ["p"], ["c"], [{}]) == [1.0] and state_of_torch() == before
    with pytest.raises(RewardError, match="ZeroDivisionError"):
        score_all(reward, ["p"], [""], [{}])
    assert state_of_torch() == before


def test_the_largest_number_of_float32_is_taken():
    largest = torch.finfo(torch.float32).max
    assert score_all(lambda p, c: -largest, ["p"], ["c"], [{}]) == [-largest]


def test_an_exception_shows_the_row_and_the_users_own_traceback():
    def inner():
        raise KeyError("no such unit")

    def reward(prompt, completion, **fields):
        return inner()

    with pytest.raises(RewardError) as caught:
        score_all(reward, ["how far?"], ["3 km"], [{"level": 2}])
    text = str(caught.value)
    assert "raised KeyError('no such unit')" in text
    assert "'how far?'" in text and "'3 km'" in text and "{'level': 2}" in text
    assert "in inner" in text and "in reward" in text and "in _one" not in text
    assert isinstance(caught.value.__cause__, KeyError)


def test_a_field_that_the_function_does_not_take_is_shown():
    with pytest.raises(RewardError, match="unexpected keyword argument 'answer'"):
        score_all(lambda prompt, completion: 1.0, ["p"], ["c"], [{"answer": 1}])


def test_the_error_crosses_processes():
    error = pickle.loads(pickle.dumps(RewardError("it failed", "p", "c", 3)))
    assert (str(error), error.prompt, error.completion, error.value) == ("it failed", "p", "c", 3)


def test_one_of_several_rewards_may_not_apply_to_a_row():
    values = [1.0, None, math.nan, np.float32("nan"), 2.0]
    rows = (["p"] * 5, ["c"] * 5, [{"i": i} for i in range(5)])
    some = score_all(lambda p, c, i: values[i], *rows, one_of_several=True)
    assert [x if x == x else None for x in some] == [1.0, None, None, None, 2.0]
    rewards = (lambda p, c: None if "a" in c else 1, lambda p, c: math.nan if "b" in c else 2)
    assert [[x if x == x else None for x in score_row(rewards, "p", c, {})] for c in "abx"] == [
        [None, 2],
        [1, None],
        [1, 2],
    ]
    with pytest.raises(RewardError, match=r"none of the 2 reward functions applies.*\n  prompt: 'p'"):
        score_row(rewards, "p", "ab", {})
    with pytest.raises(RewardError, match="gave None, a finite number is needed"):
        score_row(rewards[:1], "p", "a", {})
    for value in (math.inf, "1.0", [None]):
        with pytest.raises(RewardError, match="finite number is needed"):
            score_all(lambda p, c, value=value: value, ["p"], ["c"], [{}], one_of_several=True)
