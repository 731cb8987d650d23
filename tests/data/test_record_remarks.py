"""Remarks on records before a run: fields that nothing reads, equal pairs, texts with a begin of their own."""

import json

import pytest

from funrl.data.json_lines import DataError
from funrl.data.messages import RecordRemarks
from funrl.data.supervised import load_examples
from funrl.data.tokenizer import character_tokenizer

TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }}</s>{% endfor %}{{ mood }}"


@pytest.fixture
def tokenizer():
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz:0123456789<>")
    made.add_special_tokens({"bos_token": "<b>"})
    made.chat_template = TEMPLATE
    return made


def message(**more):
    return {"role": "user", "content": "a", **more}


def lines_of(records, tokenizer):
    remarks = RecordRemarks(tokenizer)
    for number, record in enumerate(records):
        remarks.see(number, record)
    return remarks.lines(lambda number: f"line {number + 1}")


def test_fields_that_nothing_reads_are_named_once_with_their_first_place(tokenizer):
    records = [
        {"prompt": [message()]},
        {"prompt": [message(mood="x", own=None)]},  # the template reads a mood
        {"prompt": [message(), message(own=1)]},
        {"messages": [message(own=2, further=3)]},
    ]
    assert lines_of(records, tokenizer) == [
        "messages have a field 'own', which nothing reads (line 3)",
        "messages have a field 'further', which nothing reads (line 4)",
    ]


def test_texts_that_begin_with_the_begin_of_text_token_are_counted(tokenizer):
    records = [{"prompt": "a"}, {"prompt": "<b>a"}, {"text": "<b>a"}]
    (line,) = lines_of(records, tokenizer)
    assert line.startswith("2 texts begin with '<b>'") and "(the first: line 2)" in line
    tokenizer.bos_token = None
    assert lines_of(records, tokenizer) == []


def test_equal_pairs_are_counted_and_refused_where_there_are_no_others(tokenizer):
    equal = {"prompt": "a", "chosen": "b", "rejected": "b"}
    (line,) = lines_of([equal | {"chosen": "c"}, equal, equal], tokenizer)
    assert line.startswith("in 2 of 3 pairs 'chosen' and 'rejected' are equal") and "line 2" in line
    with pytest.raises(DataError, match="line 1: in all pairs 'chosen' and 'rejected' are equal"):
        lines_of([equal, equal], tokenizer)


def test_a_file_has_the_remarks_on_its_records(tokenizer, tmp_path):
    file = tmp_path / "data.jsonl"
    reply = {"role": "assistant", "content": "b"}
    rows = [{"messages": [message(), reply]}, {"messages": [message(own=1), reply]}]
    file.write_text("\n".join(map(json.dumps, rows)))
    assert load_examples(file, "demonstrations", tokenizer).remarks == (
        f"messages have a field 'own', which nothing reads ({file}, line 2)",
    )
    file.write_text(json.dumps({"messages": [{"role": "usr", "content": "a"}, reply]}))
    with pytest.raises(DataError, match="line 1: message 1 has the role 'usr', which the chat template does not name"):
        load_examples(file, "demonstrations", tokenizer)
