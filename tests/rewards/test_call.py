"""Calls of reward functions of every form: what they are given, what they may give, and how they fail."""

import asyncio
import functools
import math
import pickle

import numpy as np
import pytest
import torch
from rewarded_rows import score_rows

from funrl.rewards.call import (
    CompletedRow,
    Failure,
    RewardError,
    awaited_outcomes,
    columns_of,
    describe_function,
    outcomes,
    picklable,
    reward_functions,
    score_all,
)
from funrl.rewards.load import check_fields, load_rewards
from funrl.rewards.pool import Pool


def test_scores_are_floats_of_each_row():
    values = [1, True, 0.25, np.float32(0.5), np.array(2.0), torch.tensor(3.0), torch.tensor([4], dtype=torch.int32)]
    got = score_all(lambda p, c, i: values[i], ["p"] * 7, ["c"] * 7, [{"i": i} for i in range(7)])
    assert got == [1.0, 1.0, 0.25, 0.5, 2.0, 3.0, 4.0]
    assert all(type(x) is float for x in got)


def test_a_dict_without_a_score_is_told_so():
    with pytest.raises(
        RewardError, match=r"gave \{'acc': 1.0\}, a finite number is needed \(in a dict under .* 'score'\)"
    ):
        score_all(lambda prompt, completion: {"acc": 1.0}, ["p"], ["c"], [{}])


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
    assert "in inner" in text and "in reward" in text and "funrl/rewards" not in text


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
    pool = Pool([lambda p, c: None if "a" in c else 1, lambda p, c: math.nan if "b" in c else 2])
    *result, neither = score_rows(pool, [CompletedRow("p", c) for c in ("a", "b", "x", "ab")])
    assert [[x if x == x else None for x in row.result()] for row in result] == [[None, 2], [1, None], [1, 2]]
    with pytest.raises(RewardError, match=r"none of the 2 reward functions applies.*\n  prompt: 'p'"):
        neither.result()
    with pytest.raises(RewardError, match="gave None, a finite number is needed"):
        score_all(lambda p, c: None, ["p"], ["a"], [{}])
    for value in (math.inf, "1.0", [None]):
        with pytest.raises(RewardError, match="finite number is needed"):
            score_all(lambda p, c, value=value: value, ["p"], ["c"], [{}], one_of_several=True)


ROWS = [CompletedRow("p", "aa", {"answer": 1, "level": "x"}, [5, 6]), CompletedRow("q", "b", {"answer": 2}, [7])]


def described(function):
    return describe_function(function, "f")


async def patient(prompt, completion, **fields):
    await asyncio.sleep(0)
    return len(completion)


class Awaited:
    async def __call__(self, completions):
        return [len(text) for text in completions]


@pytest.mark.parametrize(
    "function,batched,awaited",
    [
        (lambda prompt, completion: 0, False, False),
        (lambda prompts, completions, **columns: 0, True, False),
        (lambda completion_ids, **columns: 0, True, False),
        (lambda prompts: 0, True, False),
        (len, False, False),
        (patient, False, True),
        (functools.partial(patient, "p"), False, True),
        (Awaited(), True, True),
    ],
)
def test_the_form_of_a_function_is_read_from_its_signature(function, batched, awaited):
    first = described(function)
    assert (first.batched, first.awaited) == (batched, awaited)


def test_a_function_of_verl_is_called_by_name():
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return {"score": float(solution_str == ground_truth), "of": data_source}

    first = described(compute_score)
    rows = [CompletedRow("p", text, {"data_source": "d", "ground_truth": "4", "level": 1}) for text in "45"]
    assert outcomes(first, rows) == [1.0, 0.0]
    assert not any(hasattr(value, "entries") for value in outcomes(first, rows))  # "of" is no number
    check_fields("f", first, [row.fields for row in rows])
    with pytest.raises(RewardError, match="missing a required argument: 'data_source'"):
        check_fields("f", first, [{"ground_truth": "4"}])


def test_other_numbers_of_a_dict_stay_with_the_score_between_processes():
    first = described(lambda prompt, completion: {"score": 0.5, "acc": True, "format": 2, "text": "x", "odd": math.nan})
    (value,) = pickle.loads(pickle.dumps([*map(picklable, outcomes(first, [CompletedRow("p", "c")]))]))
    assert value == 0.5 and value.entries == {"acc": 1.0, "format": 2.0}


def test_a_batched_function_is_given_what_it_names():
    everything = {"prompts": ["p", "q"], "completions": ["aa", "b"], "answer": [1, 2], "level": ["x", None]}
    assert columns_of(described(lambda completions, **columns: 0), ROWS) == everything
    assert columns_of(described(lambda completions, answer: 0), ROWS) == {"completions": ["aa", "b"], "answer": [1, 2]}
    assert columns_of(described(lambda completion_ids, **columns: 0), ROWS) == everything | {
        "completion_ids": [[5, 6], [7]]
    }


@pytest.mark.parametrize("values", [[1, 0.5], (1, 0.5), np.array([1, 0.5]), torch.tensor([1, 0.5])])
def test_a_batched_function_gives_a_number_a_row(values):
    assert outcomes(described(lambda completions: values), ROWS) == [1.0, 0.5]


@pytest.mark.parametrize(
    "values,says",
    [
        ([1.0], "the reward function gave 1 numbers; a list of a number for each of 2 completions is needed"),
        (1.0, "the reward function gave 1.0; a list"),
        (None, "the reward function gave None; a list"),
        ([1.0, "x"], "the reward function gave 'x', a finite number"),
        (
            KeyError("k"),
            "the reward function raised KeyError('k') for 2 completions, the first of which is\n  prompt: 'p'",
        ),
    ],
)
def test_what_a_batched_function_may_not_give(values, says):
    def function(completions):
        if isinstance(values, Exception):
            raise values
        return values

    result = outcomes(described(function), ROWS)
    assert isinstance(result[1], Failure) and result[1].message.startswith(says)
    assert result[0] == 1.0 if says.endswith("finite number") else isinstance(result[0], Failure)
    if isinstance(values, Exception):
        assert "in function" in result[0].message and "funrl/rewards" not in result[0].message


def test_awaited_functions_are_under_way_together_and_fail_alone():
    begun = []

    async def reward(prompt, completion, **fields):
        begun.append(completion)
        while len(begun) < 2:
            await asyncio.sleep(0)
        if completion == "b":
            await asyncio.sleep(60)
        return prompt

    first, second = asyncio.run(awaited_outcomes(described(reward), ROWS, timeout_s=1))
    assert "gave 'p', a finite number is needed" in first.message
    assert second.message.startswith("the reward function took longer than 1 s\n  prompt: 'q'")
    assert asyncio.run(awaited_outcomes(described(Awaited()), ROWS)) == [2.0, 1.0]
    (failure, _) = asyncio.run(awaited_outcomes(described(lambda prompt, completion: 1), ROWS[:1] * 2))
    assert "TypeError" in failure.message  # the fields have no place


def test_functions_are_named_in_errors_where_there_are_several():
    def score(prompt, completion):
        return None

    both = reward_functions([score, score, lambda p, c: "x"])
    assert [item.name for item in both] == ["score", "score.2", "lambda"] and not any(element.alone for element in both)
    assert outcomes(both[2], ROWS[:1])[0].message.startswith("the reward function lambda raised TypeError")


def test_batched_functions_are_given_messages_where_prompts_are_chats():
    chat = [{"role": "user", "content": "Who?"}]
    rows = [CompletedRow("<user>Who?", "Me.", {}, (), chat), CompletedRow("q", "b")]
    given = columns_of(described(lambda prompts, completions: 0), rows)
    assert given["prompts"] == [chat, "q"]
    assert given["completions"] == [[{"role": "assistant", "content": "Me."}], "b"]
    seen = []
    plain = described(lambda prompt, completion, **fields: seen.append((prompt, completion)) or 0.0)
    assert outcomes(plain, rows) == [0.0, 0.0] and seen[0] == ("<user>Who?", "Me.")
