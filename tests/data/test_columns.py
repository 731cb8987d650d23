"""Columns as TRL, verl and raw files name them, and as a flag names them."""

import json

import pytest

from funrl.data.columns import parse_fields, prompt_columns, rename_columns, text_columns
from funrl.data.json_lines import DataError
from funrl.data.supervised import text_example
from funrl.data.tokenizer import character_tokenizer

USER, GOOD, BAD = ({"role": r, "content": c} for r, c in (("user", "hi"), ("assistant", "ho"), ("assistant", "no")))


def test_fields_name_columns_and_entries_of_columns():
    record = {"question": "q", "solution": "s", "extra": {"answer": 3, "level": 1}, "id": 7}
    fields = parse_fields("prompt:question, answer:extra.answer")
    assert rename_columns(record, fields) == {k: v for k, v in record.items() if k != "question"} | {
        "prompt": "q",
        "answer": 3,
    }
    assert rename_columns({"a": 1, "b": 2}, parse_fields("a:b,b:a")) == {"a": 2, "b": 1}
    assert rename_columns({"a.b": 1}, parse_fields("c:a.b")) == {"c": 1}
    with pytest.raises(DataError, match=r"no field 'extra\.no', which --fields=answer:extra\.no names; the fields are"):
        rename_columns(record, parse_fields("answer:extra.no"))


@pytest.mark.parametrize("text", ["", "prompt", "prompt:", ":question", "a:b,a:c"])
def test_fields_that_name_nothing_are_refused(text):
    with pytest.raises(DataError, match=f"--fields={text}: write NAME:COLUMN"):
        parse_fields(text)


def test_verl_s_and_gsm8k_s_columns_are_taken():
    verl = {"data_source": "d", "prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "4"}}
    assert prompt_columns(verl) == verl | {"ground_truth": "4"}
    assert prompt_columns({"question": "q", "answer": "a"}) == {"prompt": "q", "answer": "a"}
    both = {"prompt": "p", "question": "q"}
    assert prompt_columns(both) == both


@pytest.mark.parametrize("prompt", [None, "hi", [USER]])
def test_the_prompt_of_conversations_is_their_common_beginning(prompt):
    record = {"prompt": prompt, "chosen": [USER, GOOD], "rejected": [USER, BAD]}
    assert text_columns(record, "preferences") == {"prompt": [USER], "chosen": [GOOD], "rejected": [BAD]}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"chosen": [GOOD], "rejected": [BAD]}, "no common first message"),
        ({"chosen": [USER, GOOD], "rejected": [USER, GOOD, USER]}, "must differ only in their last message"),
        ({"chosen": [USER, GOOD, USER], "rejected": [USER, BAD, USER]}, "must differ only in their last message"),
        ({"prompt": [GOOD], "chosen": [USER, GOOD], "rejected": [USER, BAD]}, "do not begin with those of 'prompt'"),
        ({"chosen": "a", "rejected": "b"}, "there is no field 'prompt', and 'chosen' is not a list of messages"),
    ],
)
def test_pairs_without_a_prompt_are_refused(record, message):
    with pytest.raises(DataError, match=message):
        text_columns(record, "preferences")


def test_raw_questions_and_whole_texts_are_trained():
    tokenizer = character_tokenizer("abcd")
    (text,) = text_example({"question": "ab", "answer": "cd"}, "demonstrations", tokenizer).texts
    assert tokenizer.decode(text.tokens) == "abcd</s>" and text.trained == [False, False, True, True, True]
    (text,) = text_example({"text": "abcd", "prompt": None}, "demonstrations", tokenizer).texts
    assert tokenizer.decode(text.tokens) == "abcd</s>" and text.trained == [False, True, True, True, True]
    for record, item in (({"text": 3}, "'text' must be text"), ({"text": ""}, "at least two tokens")):
        with pytest.raises(DataError, match=item):
            text_example(record, "demonstrations", tokenizer)
    assert (
        json.dumps(text_columns({"prompt": "a", "margin": "1"}, "demonstrations")) == '{"prompt": "a", "margin": 1.0}'
    )
