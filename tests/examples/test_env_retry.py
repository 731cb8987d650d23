"""Several attempts at a prompt, with a reward function and a verdict; the task of products and its demonstrator."""

import env_retry as r
import pytest
from env_retry import VERDICT, Retry, ScoredAnswer, retry
from task_files import as_example

from funrl.data.prompts import Example
from funrl.loading import LoadError

EXAMPLE = Example([], "2+2", {"answer": "4"})


def replies(environment, *texts):
    """Steps of a new conversation."""
    assert environment.reset(EXAMPLE, 0)[0] == [{"role": "user", "content": "2+2"}]
    return [environment.step({"role": "assistant", "content": text}) for text in texts]


def other_side(environment):
    return environment.make()


def test_a_wrong_answer_gets_a_verdict_and_the_last_one_the_reward():
    steps = replies(other_side(retry("exact", attempts=3)), "5", "3", "4")
    assert steps == [
        ([{"role": "user", "content": VERDICT}], reward, ended)
        for reward, ended in [(0.0, False), (0.0, False), (1.0, True)]
    ]
    assert replies(other_side(retry("exact", attempts=2)), "5", "3")[-1][1:] == (0.0, True)
    assert replies(other_side(retry("exact")), "4")[-1][1:] == (1.0, True)


async def awaited(prompt, completion, answer):
    return 1.0 - 0.25 * abs(int(completion) - int(answer))


def test_a_reward_may_be_awaited_and_the_verdict_a_function(tmp_path):
    (tmp_path / "own.py").write_text("def say(prompt, completion, answer):\n    return f'{completion}, not {answer}'")
    environment = retry(awaited, attempts=2, verdict=f"{tmp_path}/own.py:say")
    first, second = replies(other_side(environment), "5", "2")
    assert first[0][0]["content"] == "5, not 4" and first[1] == 0.0 and second[1] == 0.5


def test_what_cannot_work_is_refused():
    with pytest.raises(ValueError, match="attempts=0"):
        retry("exact", attempts=0)
    with pytest.raises(ValueError, match="one reward here, not 2"):
        retry("exact,format")
    with pytest.raises(LoadError, match="no such file"):
        retry("absent.py:score")


def test_an_error_of_the_reward_is_the_environment_s():
    def broken(prompt, completion, **fields):
        raise KeyError("gone")

    with pytest.raises(Exception, match="gone"):
        replies(other_side(retry(broken)), "4")


def test_conversations_do_not_share_their_attempts():
    first, other = (Retry(lambda example, answer: ScoredAnswer(0.0, "no"), attempts=2) for _ in range(2))
    assert not replies(first, "1")[-1][2] and not replies(other, "1")[-1][2]


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
    for prompt in r.questions(0, 5):
        game = Retry(r.scored_product, r.PRODUCT_ATTEMPTS)
        game.reset(as_example(prompt), 0)
        right = prompt.fields["answer"]
        wrong = str((int(right[0]) + 1) % 10) + right[1:]
        replies, reward, ended = game.step({"role": "assistant", "content": wrong})
        assert (reward, ended) == (0.0, False) and replies[0]["content"] == r.digit_marks(wrong, right)
        _, reward, ended = game.step({"role": "assistant", "content": right})
        assert (reward, ended) == (1.0, True)
