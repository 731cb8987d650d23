"""Several attempts at a prompt, with a reward function and a verdict."""

import pytest

from funrl.data.prompts import Example
from funrl.environments.builtin.retry import VERDICT, Retry, ScoredAnswer, retry
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
    one, other = (Retry(lambda example, answer: ScoredAnswer(0.0, "no"), attempts=2) for _ in range(2))
    assert not replies(one, "1")[-1][2] and not replies(other, "1")[-1][2]
