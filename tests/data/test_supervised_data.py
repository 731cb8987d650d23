"""Demonstrations and preferences as tokens: what is learnt, how rows lie, what is refused."""

import json

import pytest
import torch

from funrl.algos.preference import pair_sums
from funrl.data.supervised import DataError, Lesson, Text, check_lengths, lesson, load_lessons, to_batch
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


def learnt(text, tokenizer):
    return "".join(tokenizer.decode([t]) if on else "_" for t, on in zip(text.tokens, text.learnt, strict=True))


def test_a_completion_and_its_end_are_learnt(tokenizer):
    (text,) = lesson({"prompt": "ab", "completion": "cd"}, "demonstrations", tokenizer).texts
    assert learnt(text, tokenizer) == "__cd</s>"
    assert tokenizer.decode(text.tokens) == "abcd</s>"
    chat = [{"role": "user", "content": "x"}]
    for completion in ("yz", [{"role": "assistant", "content": "yz"}]):
        (text,) = lesson({"prompt": chat, "completion": completion}, "demonstrations", tokenizer).texts
        assert tokenizer.decode(text.tokens) == "u:x;a:yz</s>" and learnt(text, tokenizer) == "______yz</s>"


def test_of_a_conversation_the_assistants_turns_are_learnt(tokenizer):
    turns = [("system", "s"), ("user", "hi"), ("assistant", "ho"), ("user", "he"), ("assistant", "hu"), ("user", "end")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (text,) = lesson({"messages": messages}, "demonstrations", tokenizer).texts
    assert tokenizer.decode(text.tokens) == "s:s;u:hi;a:ho!;u:he;a:hu!;"  # what follows the last answer is left out
    assert learnt(text, tokenizer) == "___________ho!;_______hu!;"


def test_pairs_lie_side_by_side_in_one_row():
    tokens = arithmetic.tokenizer()
    records = [{"prompt": p, "chosen": c, "rejected": r} for p, c, r in arithmetic.preferences(0, 3)]
    batch = to_batch([lesson(r | {"margin": 2}, "preferences", tokens) for r in records], tokens.pad_token_id)
    for row, record in enumerate(records):
        for segment, name in ((1, "chosen"), (2, "rejected")):
            own = batch.segments[row] == segment
            assert tokens.decode(batch.tokens[row][own]) == record["prompt"] + record[name] + "</s>"
            assert batch.positions[row][own].tolist() == list(range(int(own.sum())))
            assert tokens.decode(batch.tokens[row][own & batch.mask[row]]) == record[name] + "</s>"
        assert batch.length[row] == (batch.segments[row] > 0).sum()
    assert (batch.margin == 2).all()
    chosen, _ = pair_sums(torch.ones(batch.mask.shape), batch)
    assert chosen[chosen > 0].tolist() == [len(r["chosen"]) + 1 for r in records]


def test_a_reader_stands_behind_every_text():
    tokens = arithmetic.tokenizer()
    one = lesson({"prompt": "1+2=", "chosen": "3", "rejected": "45"}, "preferences", tokens)
    batch = to_batch([one], 0, reader=True)
    assert batch.mask[0].nonzero().flatten().tolist() == [6, 14]  # 4 + 1 + end, and 7 + 4 + 2 + end
    assert (batch.tokens[batch.mask] == 0).all() and batch.length.tolist() == [15]
    assert batch.positions[0, :15].tolist() == [*range(7), *range(8)]


def test_a_reader_does_not_read_padding_at_the_end_of_a_text():
    """As transformers does not: where the end-of-text token pads, it is not read."""
    texts = (Text([5, 1, 6, 1, 1], [False, False, True, True, True]), Text([1, 1], [False, True]))
    batch = to_batch([Lesson(texts)], 1, reader=True)
    assert batch.tokens[0, :6].tolist() == [5, 1, 6, 1, 1, 1] and batch.length.tolist() == [6]
    assert batch.mask[0].nonzero().flatten().tolist() == [3, 5]


def test_a_text_that_is_too_long_is_named(tokenizer, tmp_path):
    file = tmp_path / "d.jsonl"
    lines = [{"prompt": "1+1=", "chosen": "2", "rejected": digits} for digits in ("3", "4" * 9, "5" * 99)]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    lessons = load_lessons(file, "preferences", arithmetic.tokenizer())
    check_lengths(lessons, 104, arithmetic.tokenizer())
    with pytest.raises(
        DataError, match=r"line 5: the prompt with 'rejected' has 104 tokens, but the model has 103 pos"
    ):
        check_lengths(lessons, 103, arithmetic.tokenizer())
    with pytest.raises(DataError, match=r"line 3: .*; 2 of 3 lessons are too long \(it begins '1\+1=444444444"):
        check_lengths(lessons, 13, arithmetic.tokenizer())
    with pytest.raises(DataError, match=r"^lesson 1: the text has 2 tokens"):
        check_lengths([Lesson((Text([2, 3], [False, True]),))], 1, arithmetic.tokenizer())


def test_the_embedded_preferences_are_right_and_wrong_sums():
    for prompt, chosen, rejected in arithmetic.preferences(3, 50):
        assert arithmetic.reward(prompt, chosen) == 1 and arithmetic.reward(prompt, rejected) == 0
    train = {p for p, _, _ in arithmetic.preferences(0, 500)}
    assert train.isdisjoint(p for p, _, _ in arithmetic.preferences(0, 200, split="heldout"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("[1]", "line 2: a JSON object is needed"),
        ('{"prompt": "a"', "line 2: "),
        ('{"prompt": "a"}', "line 2: there is no field 'chosen'; the fields are"),
        ('{"prompt": 3, "chosen": "a", "rejected": "b"}', "line 2: 'prompt' must be text"),
        ('{"prompt": "a", "chosen": 4, "rejected": "b"}', "line 2: 'chosen' must be text"),
        ('{"prompt": "a", "chosen": "A", "rejected": "b"}', "line 2: the tokenizer refuses it"),
        ('{"prompt": "a", "chosen": "b", "rejected": "c", "margin": "x"}', "line 2: 'margin' is 'x'"),
    ],
)
def test_a_line_that_cannot_be_learnt_from_is_named(line, said, tokenizer, tmp_path):
    file = tmp_path / "pairs.jsonl"
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    file.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(DataError, match=said):
        load_lessons(file, "preferences", tokenizer)
    file.write_text("\n" + json.dumps(good) + "\n\n")
    assert len(load_lessons(file, "preferences", tokenizer)) == 1


def test_files_and_conversations_that_hold_nothing_are_refused(tokenizer, tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(DataError, match="empty"):
        load_lessons(tmp_path / "empty.jsonl", "demonstrations", tokenizer)
    with pytest.raises(DataError, match="cannot be read"):
        load_lessons(tmp_path / "absent.jsonl", "demonstrations", tokenizer)
    with pytest.raises(DataError, match="by the assistant"):
        lesson({"messages": [{"role": "user", "content": "a"}]}, "demonstrations", tokenizer)
    tokenizer.chat_template = "{% for m in messages %}{{ 'z' if loop.last else '' }}{{ m.content }}{% endfor %}"
    turns = [{"role": r, "content": "a"} for r in ("user", "assistant", "user", "assistant")]
    with pytest.raises(DataError, match="changes earlier turns"):
        lesson({"messages": turns}, "demonstrations", tokenizer)
