"""The embedded task of several attempts: its verdicts and its demonstrator."""

import pytest

from funrl.environments.builtin.retry import Retry
from funrl.tasks import retry as r
from funrl.tasks.conversations import as_example


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


def test_a_right_product_is_rewarded_and_ends_the_episode():
    for prompt in r.retry_task().training_prompts(0, 5):
        game = Retry(r.scored_product, r.PRODUCT_ATTEMPTS)
        game.reset(as_example(prompt), 0)
        right = prompt.fields["answer"]
        wrong = str((int(right[0]) + 1) % 10) + right[1:]
        replies, reward, ended = game.step({"role": "assistant", "content": wrong})
        assert (reward, ended) == (0.0, False) and replies[0]["content"] == r.digit_marks(wrong, right)
        _, reward, ended = game.step({"role": "assistant", "content": right})
        assert (reward, ended) == (1.0, True)
