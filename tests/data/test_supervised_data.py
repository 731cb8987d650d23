"""Demonstrations and preferences as tokens: what is trained, how rows are laid out, what is refused."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys

import pytest

from funrl.data import supervised
from funrl.data.order import Mixture
from funrl.data.supervised import (
    DataError,
    KeptTexts,
    Text,
    TextExample,
    load_examples,
    shortened,
    text_batch,
    text_example,
)
from funrl.data.text_lengths import check_lengths, fit_examples
from funrl.data.tokenizer import character_tokenizer
from funrl.tasks import arithmetic

TEMPLATE = (
    "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}{% if m.role == 'assistant' %}!{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.fixture
def tokenizer():
    made = character_tokenizer("abcdefghijklmnopqrstuvwxyz:;! ")
    made.chat_template = TEMPLATE
    return made


def trained(text, tokenizer):
    return "".join(tokenizer.decode([t]) if on else "_" for t, on in zip(text.tokens, text.trained, strict=True))


def test_a_completion_and_its_end_are_trained(tokenizer):
    (text,) = text_example({"prompt": "ab", "completion": "cd"}, "demonstrations", tokenizer).texts
    assert trained(text, tokenizer) == "__cd</s>"
    assert tokenizer.decode(text.tokens) == "abcd</s>"
    chat = [{"role": "user", "content": "x"}]
    for completion in ("yz", [{"role": "assistant", "content": "yz"}]):
        (text,) = text_example({"prompt": chat, "completion": completion}, "demonstrations", tokenizer).texts
        assert tokenizer.decode(text.tokens) == "u:x;a:yz</s>" and trained(text, tokenizer) == "______yz</s>"


def test_of_a_conversation_the_assistants_turns_are_trained(tokenizer):
    turns = [("system", "s"), ("user", "hi"), ("assistant", "ho"), ("user", "he"), ("assistant", "hu"), ("user", "end")]
    messages = [{"role": role, "content": content} for role, content in turns]
    texts = text_example({"messages": messages}, "demonstrations", tokenizer).texts
    # The template ends turns by plain text, so that only the end-of-text token can end a reply: each has its own row.
    assert [tokenizer.decode(text.tokens) for text in texts] == ["s:s;u:hi;a:ho</s>", "s:s;u:hi;a:ho!;u:he;a:hu</s>"]
    assert [trained(text, tokenizer) for text in texts] == ["___________ho</s>", "______________________hu</s>"]
    tokenizer.chat_template = tokenizer.chat_template.replace("!", "</s>")
    (text,) = text_example({"messages": messages}, "demonstrations", tokenizer).texts
    assert tokenizer.decode(text.tokens) == "s:s;u:hi;a:ho</s>;u:he;a:hu</s>"  # nothing behind the last answer
    assert trained(text, tokenizer) == "___________ho</s>________hu</s>"


def test_pairs_lie_side_by_side_in_one_row():
    tokens = arithmetic.tokenizer()
    records = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in arithmetic.preferences(0, 3)]
    batch = text_batch([text_example(r | {"margin": 2}, "preferences", tokens) for r in records], tokens.pad_token_id)
    for row, record in enumerate(records):
        for segment, name in ((1, "chosen"), (2, "rejected")):
            own = batch.segments[row] == segment
            assert tokens.decode(batch.tokens[row][own]) == record["prompt"] + record[name] + "</s>"
            assert batch.positions[row][own].tolist() == list(range(int(own.sum())))
            assert tokens.decode(batch.tokens[row][own & batch.mask[row]]) == record[name] + "</s>"
        assert batch.length[row] == (batch.segments[row] > 0).sum()
    assert (batch.margin == 2).all()
    chosen = (batch.mask & (batch.segments == 1)).sum(1)
    assert chosen.tolist() == [len(r["chosen"]) + 1 for r in records]


def test_a_reader_stands_behind_every_text():
    tokens = arithmetic.tokenizer()
    first = text_example({"prompt": "1+2=", "chosen": "3", "rejected": "45"}, "preferences", tokens)
    batch = text_batch([first], 0, reader=True)
    assert batch.mask[0].nonzero().flatten().tolist() == [6, 14]  # 4 + 1 + end, and 7 + 4 + 2 + end
    assert (batch.tokens[batch.mask] == 0).all() and batch.length.tolist() == [15]
    assert batch.positions[0, :15].tolist() == [*range(7), *range(8)]


def test_a_reader_does_not_read_padding_at_the_end_of_a_text():
    """As transformers does not: where the end-of-text token pads, it is not read."""
    texts = (Text([5, 1, 6, 1, 1], [False, False, True, True, True]), Text([1, 1], [False, True]))
    batch = text_batch([TextExample(texts)], 1, reader=True)
    assert batch.tokens[0, :6].tolist() == [5, 1, 6, 1, 1, 1] and batch.length.tolist() == [6]
    assert batch.mask[0].nonzero().flatten().tolist() == [3, 5]


def test_a_text_that_is_too_long_is_named(tokenizer, tmp_path):
    file = tmp_path / "d.jsonl"
    lines = [{"prompt": "1+1=", "chosen": "2", "rejected": digits} for digits in ("3", "4" * 9, "5" * 99)]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    examples = load_examples(file, "preferences", arithmetic.tokenizer())
    check_lengths(examples, 104, arithmetic.tokenizer())
    with pytest.raises(
        DataError, match=r"line 5: the prompt with 'rejected' has 104 tokens, but the model has 103 pos"
    ):
        check_lengths(examples, 103, arithmetic.tokenizer())
    with pytest.raises(DataError, match=r"line 3: .*; 2 of 3 examples are too long: .*line 3, 5 \(it begins '1\+1=444"):
        check_lengths(examples, 13, arithmetic.tokenizer())
    with pytest.raises(DataError, match=r"^example 1: the text has 2 tokens"):
        check_lengths([TextExample((Text([2, 3], [False, True]),))], 1, arithmetic.tokenizer())


def test_a_prompt_loses_its_beginning_before_what_is_trained_its_end():
    def text(prompt, rest):
        return Text([*range(prompt + rest)], [False] * prompt + [True] * rest)

    def cut(most, *texts, labels=()):
        result = shortened(TextExample(texts, labels=labels), most)
        assert result.labels == labels[: sum(result.texts[0].trained)]
        return [(completion.tokens, sum(completion.trained)) for completion in result.texts]

    assert cut(8, text(5, 3)) == [([*range(8)], 3)]
    assert cut(5, text(5, 3)) == [([3, 4, 5, 6, 7], 3)]
    assert cut(5, text(5, 3), text(5, 1)) == [([3, 4, 5, 6, 7], 3), ([3, 4, 5], 1)]  # the same prompt
    assert cut(4, text(5, 9)) == [([3, 4, 5, 6], 2)] and cut(4, text(1, 9)) == [([0, 1, 2, 3], 3)]
    steps = Text([*range(9)], [False, False, False, True, False, True, False, False, True])
    assert cut(7, steps, labels=(1.0, 0.0, 1.0)) == [([2, 3, 4, 5, 6, 7, 8], 3)]
    assert cut(4, steps, labels=(1.0, 0.0, 1.0)) == [([1, 2, 3, 4], 1)]


@pytest.mark.parametrize("kind", ["list", "file", "mixture"])
def test_texts_that_are_too_long_are_left_out_or_shortened(kind, tmp_path):
    tokens, file = arithmetic.tokenizer(), tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps({"prompt": "1+1=", "completion": "2" * n}) + "\n" for n in (1, 9, 2, 7)))
    examples = load_examples(file, "demonstrations", tokens)
    if kind != "file":
        examples = list(examples) if kind == "list" else Mixture([examples[:2], examples[2:]], (500, 500))
    lengths = lambda items: [len(item.texts[0].tokens) for item in items]  # noqa: E731
    left, remark = fit_examples(examples, 8, "drop", "why", tokens)
    assert lengths(left) == [6, 7] and remark == f"2 of 4 are left out, as why: {file}, line 2, 4"
    cut, remark = fit_examples(examples, 8, "truncate", "why", tokens)
    assert lengths(cut) == [6, 8, 7, 8] and remark == f"2 of 4 are shortened to 8 tokens, as why: {file}, line 2, 4"
    assert fit_examples(examples, 99, "drop", "why", tokens).remark == ""
    if kind == "mixture":
        assert left.shares == cut.shares == (500, 500)
    with pytest.raises(DataError, match="--long_prompts=drop: no example of a file is left, as why"):
        fit_examples(examples, 5, "drop", "why", tokens)


def test_pairs_are_ratings_of_two_texts(tokenizer, tmp_path):
    """As TRL's: the chosen one is good, the rejected one is bad; a conversation's prompt is what both begin with."""
    file, turn = tmp_path / "pairs.jsonl", {"role": "user", "content": "q"}
    rows = [
        {"question": "a", "chosen": "b", "rejected": "cd"},
        {side: [turn, {"role": "assistant", "content": side[0]}] for side in ("chosen", "rejected")},
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    examples = load_examples(file, "ratings", tokenizer)
    results = [(tokenizer.decode(example.texts[0].tokens), example.labels, example.source) for example in examples]
    first, second = (f"{file}, line {n}" for n in (1, 2))
    assert results == [
        ("ab</s>", (1.0,), first),
        ("acd</s>", (0.0,), first),
        ("u:q;a:c</s>", (1.0,), second),
        ("u:q;a:r</s>", (0.0,), second),
    ]
    assert [item.labels for item in pickle.loads(pickle.dumps(examples))[1:3]] == [(0.0,), (1.0,)]
    file.write_text(json.dumps(rows[0]) + '\n{"prompt": "a", "completion": "b", "label": true}\n')
    with pytest.raises(DataError, match="line 2: there is no field 'chosen'"):
        load_examples(file, "ratings", tokenizer)


def test_the_embedded_preferences_are_right_and_wrong_sums():
    for prompt, chosen, rejected in arithmetic.preferences(3, 50):
        assert arithmetic.reward(prompt, chosen) == 1 and arithmetic.reward(prompt, rejected) == 0
    train = {p for p, _, _ in arithmetic.preferences(0, 500)}
    assert train.isdisjoint(p for p, _, _ in arithmetic.preferences(0, 200, split="heldout"))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2: a JSON object is needed"),
        ('{"prompt": "a"', "line 2: "),
        ('{"prompt": "a"}', "line 2: there is no field 'chosen'; the fields are"),
        ('{"prompt": 3, "chosen": "a", "rejected": "b"}', "line 2: 'prompt' must be text"),
        ('{"prompt": "a", "chosen": 4, "rejected": "b"}', "line 2: 'chosen' must be text"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}', "line 2: 'margin' is 'x'"),
    ],
)
def test_a_line_that_cannot_be_trained_from_is_named(line, message, tokenizer, tmp_path):
    file = tmp_path / "pairs.jsonl"
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(DataError, match=message):
        load_examples(file, "preferences", tokenizer)
    file.write_text("\n" + json.dumps(good) + "\n\n")
    assert len(load_examples(file, "preferences", tokenizer)) == 1


def test_files_and_conversations_that_hold_nothing_are_refused(tokenizer, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="empty"):
        load_examples(tmp_path / "empty.jsonl", "demonstrations", tokenizer)
    with pytest.raises(DataError, match="cannot be read"):
        load_examples(tmp_path / "absent.jsonl", "demonstrations", tokenizer)
    with pytest.raises(DataError, match="by the assistant"):
        text_example({"messages": [{"role": "user", "content": "a"}]}, "demonstrations", tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ 'z' if loop.last else '' }}{{ m.content }}{% endfor %}"
    turns = [{"role": r, "content": "a"} for r in ("user", "assistant", "user", "assistant")]
    with pytest.raises(DataError, match="otherwise once there is one"):
        text_example({"messages": turns}, "demonstrations", tokenizer)


def test_a_text_that_the_tokenizer_refuses_is_named_when_it_is_read(tokenizer, tmp_path):
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(json.dumps({"prompt": "a", "chosen": c, "rejected": "b"}) + "\n" for c in "xYz"))
    examples = load_examples(file, "preferences", tokenizer)
    assert examples[0].source == f"{file}, line 1" and examples[-1].source == f"{file}, line 3"
    for read in (lambda: examples[1], lambda: check_lengths(examples, 99, tokenizer)):
        with pytest.raises(DataError, match="line 2: the tokenizer refuses it"):
            read()


def test_examples_of_a_file_are_a_sequence_of_views(tokenizer, tmp_path):
    file = tmp_path / "d.jsonl"
    file.write_text("\n".join(json.dumps({"prompt": "a", "completion": "b" * n}) for n in range(1, 9)))
    examples = load_examples(file, "demonstrations", tokenizer)
    whole = [len(item.texts[0].tokens) for item in examples]
    assert whole == [n + 2 for n in range(1, 9)]
    train, heldout = examples[:-3], examples[-3:]
    assert len(train) == 5 and [len(element.texts[0].tokens) for element in heldout] == whole[-3:]
    assert heldout[1:][0] == examples[6] and examples[-1] == examples[7]
    with pytest.raises(IndexError):
        examples[8]
    copied = pickle.loads(pickle.dumps(examples))
    assert copied[2] == examples[2]
    assert train[1].texts[0] is examples[1].texts[0]  # tokenized once
    fresh = load_examples(file, "demonstrations", tokenizer)
    file.write_text(file.read_text() + "\n\n")
    assert [len(example.texts[0].tokens) for example in examples] == whole
    with pytest.raises(DataError, match="has been changed since the run began"):
        fresh[0]
    file.unlink()
    with pytest.raises(DataError, match="cannot be read: No such file"):
        fresh[0]


def test_texts_are_kept_up_to_a_number_of_tokens(tokenizer, tmp_path):
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": "a" * n}) + "\n" for n in (3, 9, 2)))
    examples = load_examples(file, "demonstrations", tokenizer)
    sizes = [len(example.texts[0].tokens) for example in examples]
    examples = dataclasses.replace(examples, kept=KeptTexts(room=sizes[0] + sizes[2]))
    again = [[examples[i].texts[0] for i in range(3)] for _ in range(2)]
    assert again[0] == again[1]
    assert [x is y for x, y in zip(*again, strict=True)] == [True, False, True]
    assert examples.kept.room == 0


def test_a_margin_is_of_all_lines_or_of_none(tokenizer, tmp_path):
    file = tmp_path / "pairs.jsonl"
    lines = [{"prompt": "a", "chosen": "b", "rejected": "c", "margin": m} for m in (1, 2.5)]
    file.write_text("\n".join(map(json.dumps, lines)))
    examples = load_examples(file, "preferences", tokenizer)
    assert examples.has_margin and [example.margin for example in examples] == [1, 2.5]
    file.write_text("\n".join(map(json.dumps, [*lines, {"prompt": "a", "chosen": "b", "rejected": "c"}])))
    examples = load_examples(file, "preferences", tokenizer)
    assert not examples.has_margin and [item.margin for item in examples] == [None] * 3


def test_of_a_large_file_those_texts_are_tokenized_that_may_be_too_long(tokenizer, tmp_path, monkeypatch):
    file = tmp_path / "d.jsonl"
    lengths = [5] * 40
    lengths[30] = 300
    file.write_text("\n".join(json.dumps({"prompt": "a", "completion": "b" * n}) for n in lengths))
    examples = load_examples(file, "demonstrations", tokenizer)
    assert list(examples.suspects(100)) == list(range(40))
    monkeypatch.setattr(supervised, "SMALL_BYTES", 100)
    monkeypatch.setattr(supervised, "FIRST_LINES", 4)
    assert list(examples.suspects(100)) == [0, 1, 2, 3, 30]
    check_lengths(examples, 302, tokenizer)
    with pytest.raises(DataError, match="line 31: the text has 302 tokens, but the model has 301 positions"):
        check_lengths(examples, 301, tokenizer)


MEMORY = """
import json, sys
from funrl.data.supervised import load_examples, text_batch
from funrl.data import supervised
from funrl.data.order import Mixture
from funrl.data.tokenizer import character_tokenizer

tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
tokenizer.encode("ab")
# Not ru_maxrss, which a process has from the one that has started it, if that is larger.
peak = lambda: next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
before = peak()
examples = load_examples(sys.argv[1], "demonstrations", tokenizer)
assert len(examples) == 40_000
for start in range(0, 39_000, 3000):
    assert text_batch([examples[start + i] for i in range(64)], 0).tokens.shape == (64, 200)
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="needs Linux's /proc to measure memory")
@pytest.mark.slow
def test_memory_does_not_depend_on_the_size_of_the_file(tmp_path):
    """40,000 lines of 200 tokens: their lists of ids alone would be over 120 MB."""
    file = tmp_path / "large.jsonl"
    with open(file, "w") as out:
        for number in range(40_000):
            out.write(json.dumps({"prompt": "abc", "completion": "x" * 96 + " " + "y" * 99, "id": number}) + "\n")
    grown = float(subprocess.run([sys.executable, "-c", MEMORY, file], check=True, capture_output=True).stdout)
    assert grown < 60  # MiB


def test_a_rank_without_texts_agrees_with_the_others_about_dtypes():
    some, none = text_batch([TextExample((Text([1, 2], [False, True]),))], 0), text_batch([], 0)
    assert {name: getattr(none, name).dtype for name in none.names()} == {
        name: getattr(some, name).dtype for name in some.names()
    }


def test_the_three_texts_of_a_triple_lie_in_one_row(tmp_path):
    file, tokens = tmp_path / "triples.jsonl", arithmetic.tokenizer()
    record = {"prompt": "1+2=", "chosen": "3", "rejected": "45", "reference": "678"}
    file.write_text(json.dumps(record) + "\n")
    batch = text_batch(list(load_examples(file, "triples", tokens)), tokens.pad_token_id)
    lengths = [4 + 1 + 1, 4 + 2 + 1, 4 + 3 + 1]
    assert batch.length.tolist() == [sum(lengths)]
    assert batch.segments[0, : sum(lengths)].tolist() == [n for n, k in enumerate(lengths, 1) for _ in range(k)]
    trained = [batch.tokens[batch.mask & (batch.segments == n)].tolist() for n in (1, 2, 3)]
    assert [tokens.decode(ids, skip_special_tokens=True) for ids in trained] == ["3", "45", "678"]
    file.write_text(json.dumps({k: x for k, x in record.items() if k != "reference"}) + "\n")
    with pytest.raises(DataError, match="there is no field 'reference'"):
        load_examples(file, "triples", tokens)


def test_steps_have_a_label_each():
    check = supervised.normal_record
    check({"prompt": "a", "completions": ["b", "c"], "labels": [True, 0.5]}, "steps")
    for labels in ([True], [True, False, True], [True, 2], "ab", None):
        with pytest.raises(DataError, match="'labels' must be a list of true or false, one for each of the 2"):
            check({"prompt": "a", "completions": ["b", "c"], "labels": labels}, "steps")
    for completions in ([], "bc", ["b", 1]):
        with pytest.raises(DataError, match="'completions' must be a list of texts"):
            check({"prompt": "a", "completions": completions, "labels": [True, False]}, "steps")
