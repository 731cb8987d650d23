"""The embedded task of several attempts: its verdicts and its demonstrator."""

import pytest

from funrl.tasks import retry as r


@pytest.mark.parametrize(
    "answer,wanted", [("1776", "===="), ("2555", "-+++"), ("", "++++"), ("17761", "====-"), ("1?76", "=-==")]
)
def test_each_digit_has_a_mark(answer, wanted):
    assert r.digit_marks(answer, "1776") == wanted


@pytest.mark.parametrize("answer", ["1776", "0099", "5005", "9801"])
def test_one_that_uses_the_verdicts_needs_at_most_five_attempts(answer):
    messages = [{"content": "the question"}, {"content": answer[0] + "555"}]
    while messages[-1]["content"] != answer:
        messages.append({"content": r.digit_marks(messages[-1]["content"], answer)})
        messages.append({"content": r.narrowed_answer(messages)})
    assert len(messages) // 2 <= r.PRODUCT_ATTEMPTS


def test_the_demonstrator_mostly_repeats_its_answer():
    replies = [[m["content"] for m in record["messages"][1::2]] for record in r.retry_conversations(0, 1000)]
    repeating = [x for x in replies if len(set(x)) == 1]
    assert abs(1 - len(repeating) / len(replies) - r.USING_VERDICTS) < 0.03
    products = [eval(record["messages"][0]["content"]) for record in r.retry_conversations(0, 1000)]
    solved = [int(x[-1]) == product for x, product in zip(replies, products, strict=True)]
    assert 0.1 < sum(solved) / len(solved) < 0.2
