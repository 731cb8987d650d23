"""Rewards for form: tags, JSON by a schema, numbers of words, and the countdown game."""

import pytest

from funrl.rewards.countdown import countdown
from funrl.rewards.style import json_schema, repetition, think_then_answer, within_length


@pytest.mark.parametrize(
    "prompt,completion,right",
    [
        ("", "<think>a\nb</think>\n<answer>4</answer>\n", 1),
        ("", "<think></think><answer></answer>", 1),
        ("", "<answer>4</answer>", 0),
        ("", "<think>a</think> 4", 0),
        ("", "x<think>a</think><answer>4</answer>", 0),
        ("", "<think>a</think><answer>4</answer>.", 0),
        ("", "<think>a<think></think><answer>4</answer>", 0),
        ("", "<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("", "", 0),
        ("go\n<think>\n", "a</think><answer>4</answer>", 1),
        ("<think>", "<think>a</think><answer>4</answer>", 0),
    ],
)
def test_thoughts_come_before_the_answer(prompt, completion, right):
    assert think_then_answer(prompt, completion, level=1) == right


AGE = {"type": "object", "required": ["age"], "properties": {"age": {"type": "integer"}}}


def test_json_of_a_schema():
    pytest.importorskip("jsonschema")
    for text, right in [
        ('{"age": 7}', 1),
        ('{"age": 7.5}', 0),
        ("{}", 0),
        ("{'age': 7}", 0),
        ("", 0),
        ("[" * 100_000, 0),
        ('{"age": NaN}', 0),
        ('so:\n```json\n{"age": 7}\n```', 1),
        ('```\n{}\n```\n```json\n{"age": 7}\n```\n', 1),
    ]:
        assert json_schema("", text, schema=AGE) == right, text
    assert json_schema("", '{"age": 7}', schema='{"required": ["age"]}') == 1.0
    assert json_schema("", "7") == 1.0 and json_schema("", "Infinity") == json_schema("", "x") == 0.0
    for schema in ("{", {"type": 7}):
        with pytest.raises(ValueError, match="the field 'schema' is not a JSON schema: "):
            json_schema("", "7", schema=schema)


def test_words_within_bounds_and_said_again():
    assert [within_length("", text, min_words=2, max_words=3) for text in ("a", "a b", "a b c", "a b c d")] == [
        0,
        1,
        1,
        0,
    ]
    assert within_length("", "a", max_words=1) == within_length("", "a", min_words=1) == 1.0
    assert repetition("", "so it is so it is so") < repetition("", "so it goes on and on") == 0.0


RIGHT = "<answer>(4 - 1) * 8</answer>"


@pytest.mark.parametrize(
    "completion,right",
    [
        (RIGHT, 1),
        ("try 1 + 4 + 8\n(4 - 1) * 8 = 24\n", 1),
        ("-(1 - 4) * 8", 1),
        ("", 0),
        ("(" * 400, 0),
        *[(RIGHT.replace(")", before), 0) for before in (") + 0", ") * 1", ") ** 1", ")) if 1 else (0", " + 1)")],
        ("<answer>8 * 3</answer>", 0),
        ("<answer>24</answer>", 0),
        ("<answer>1 + 4 + 8</answer>", 0),
        ("<answer>(8 - 8) / 0</answer>", 0),
        ("<answer>__import__('os')</answer>", 0),
        ("1+" * 10**6, 0),
        (RIGHT.replace("*", "\u00d7"), 1),
        (RIGHT.replace("-", "\u2212"), 0),
    ],
)
def test_countdown_takes_each_number_once(completion, right):
    assert countdown("", completion, target=24, nums=[1, 4, 8]) == right


def test_countdown_is_exact():
    assert countdown("", "(1 / 3 - 0.5) * 6", target="-1", numbers=[1, 3, 0.5, 6]) == 1.0
