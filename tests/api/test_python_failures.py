"""A run from Python that fails: it raises, with the cause and the run so far."""

import json
import math

import pytest

import funrl
from funrl.algos import Algorithm, chain, clipped_surrogate, group_center, reduce, scale, to_tokens, token_mean
from funrl.algos.metrics import PieceError
from funrl.batch import MissingField
from funrl.models.huggingface import directories as hf
from funrl.rewards.call import RewardError
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.step import NotFiniteError

TINY = {
    "steps": 3,
    "batch_prompts": 4,
    "samples_per_prompt": 2,
    "max_new_tokens": 4,
    "eval_prompts": 2,
    "device": "cpu",
}
PROMPTS = [{"prompt": f"{n}+{n}=", "wanted": str(n % 10)} for n in range(3, 23)]


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def algorithm(*terms):
    terms = terms or (clipped_surrogate(),)
    return Algorithm(chain(group_center(), to_tokens()), {"policy": reduce(*terms, token_mean())})


def fails_after(calls):
    """A reward function that raises after some calls."""
    left = [calls]

    def reward(prompt, completion, wanted):
        left[0] -= 1
        return float(completion[:1] == wanted) if left[0] > 0 else {}["no such key"]

    return reward


@pytest.mark.slow
def test_a_reward_that_raises_ends_in_an_exception_with_the_cause_and_the_run_so_far():
    reward = fails_after(2 + 8 + 3)  # an evaluation, a step, and a part of the next one
    with pytest.raises(funrl.RunError) as caught:
        funrl.train(algorithm(), prompts=PROMPTS, reward=reward, reward_workers=0, run_dir="run", **TINY)
    error = caught.value
    assert str(error) == (
        "the run failed after step 1: the reward function raised KeyError('no such key'); its files are in run"
    )
    assert isinstance(error.__cause__, RewardError)
    run = error.run
    assert [row["step"] for row in run.metrics] == [1]
    assert run.run_dir == "run" and "no such key" in run.outcome.error and "failed: " in repr(run)
    assert run.outcome.cause is None  # its traceback would hold the weights
    assert hf.check_directory(run.model.directory).config.embed > 0  # what was trained is saved


@pytest.mark.slow
def test_updates_that_are_not_finite_end_in_an_exception():
    with pytest.raises(funrl.RunError, match="3 in a row were left out") as caught:
        broken = algorithm(scale(math.inf, clipped_surrogate()))
        funrl.train(
            broken,
            prompts=PROMPTS,
            reward=lambda prompt, completion, wanted: len(completion),
            max_skipped=3,
            minibatches=1,
            **TINY,
        )
    assert isinstance(caught.value.__cause__, NotFiniteError)
    assert [row["update/skipped"] for row in caught.value.run.metrics] == [1, 1, 1]


@pytest.mark.slow
def test_a_piece_that_fails_raises_before_the_run_or_ends_it():
    """What the check of an algorithm finds is its own error; what only an update meets ends the run."""

    def term(logp, batch):
        return -logp * batch.no_such_field, {}

    with pytest.raises((MissingField, PieceError, SettingsError), match="no_such_field"):
        funrl.train(algorithm(term), prompts=PROMPTS, reward=len_reward, **TINY)

    calls = [0]

    def later(logp, batch):
        calls[0] += 1
        if calls[0] > 40:
            raise ZeroDivisionError("late")
        return -logp, {}

    with pytest.raises(funrl.RunError, match="after step 4: ZeroDivisionError: late") as caught:
        funrl.train(algorithm(later), prompts=PROMPTS, reward=len_reward, minibatches=8, **TINY | {"steps": 20})
    assert isinstance(caught.value.__cause__, ZeroDivisionError) and len(caught.value.run.metrics) == 4


def len_reward(prompt, completion, **fields):
    return len(completion)


@pytest.mark.slow
@pytest.mark.gloo
def test_ranks_of_their_own_raise_too():
    reward = fails_after(3)
    with pytest.raises(funrl.RunError, match=r"raised KeyError\('no such key'\)") as caught:
        funrl.train("grpo", prompts=PROMPTS, reward=reward, reward_workers=0, mesh="dp2", **TINY)
    assert isinstance(caught.value.__cause__, RewardError) and caught.value.run.metrics == []

    def dies(step, metrics):
        raise OSError("the disk of on_step is gone")

    with pytest.raises(funrl.RunError, match="rank 0 failed: OSError: the disk of on_step is gone") as caught:
        funrl.train("grpo", prompts=PROMPTS, reward=len_reward, mesh="dp2", on_step=dies, **TINY)
    assert [row["step"] for row in caught.value.run.metrics] == [1]


@pytest.mark.parametrize("reward", [[], {}, ()])
def test_an_empty_list_of_rewards_is_refused(reward, tmp_path):
    with pytest.raises(SettingsError, match="functions are needed"):
        funrl.train("grpo", prompts=PROMPTS, reward=reward, **TINY)
    with pytest.raises(SettingsError, match="functions are needed"):
        (tmp_path / "p.jsonl").write_text(json.dumps(PROMPTS[0]))
        hf_model = tmp_path / "model"
        hf_model.mkdir()
        (hf_model / "config.json").write_text("{}")
        funrl.evaluate(hf_model, data=PROMPTS, reward=reward)
    with pytest.raises(SettingsError, match=r"functions are needed, or a text such as 'FILE.py:function,format@0.1'"):
        funrl.train("grpo", prompts=PROMPTS, reward=["math"], **TINY)
