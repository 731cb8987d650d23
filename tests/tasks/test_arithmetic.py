"""The embedded task: problems, demonstrator, reward, and that its text fits its tokenizer and model."""

import random

import numpy as np
import pytest
import torch

from funrl.data.supervised import TEXT_FIELDS
from funrl.tasks import arithmetic as a
from funrl.tasks.embedded import TASK_NAMES, embedded_task


def forgetful(x, y):
    """The sum of each column, carries dropped, digit by digit on text."""
    width = max(len(str(x)), len(str(y)))
    columns = zip(str(x).zfill(width), str(y).zfill(width), strict=True)
    return int("".join(str((int(i) + int(j)) % 10) for i, j in columns))


@pytest.mark.parametrize("digits", [1, 2, 3, 5])
def test_problems_have_every_length_and_are_fixed_by_the_seed(digits):
    pairs = a.problems(3, 2000, digits)
    assert pairs.shape == (2000, 2) and pairs.dtype == np.int64
    lengths = np.vectorize(lambda x: len(str(x)))(pairs)
    shares = [(lengths == n).mean() for n in range(1, digits + 1)]
    assert sum(shares) == pytest.approx(1)
    assert min(shares) > 0.8 / digits
    assert (pairs == a.problems(3, 2000, digits)).all()
    assert (pairs != a.problems(4, 2000, digits)).any()
    with pytest.raises(ValueError, match="digits=0"):
        a.problems(0, 1, 0)


def test_the_splits_share_no_pair_in_either_order():
    train = {tuple(sorted(p)) for p in a.problems(0, 5000, 2, "train").tolist()}
    heldout = {tuple(sorted(p)) for p in a.problems(1, 5000, 2, "heldout").tolist()}
    assert not train & heldout
    every = np.array([(x, y) for x in range(100) for y in range(100)])
    share = a.is_held_out(every).mean()
    assert 0.07 < share < 0.13
    assert (a.is_held_out(every) == a.is_held_out(every[:, ::-1])).all()


def test_heldout_prompts_are_different_from_each_other():
    prompts = [p.prompt for p in a.heldout_prompts(256)]
    assert len(prompts) == len(set(prompts)) == 256
    few = a.heldout_prompts(256, digits=1)
    assert 0 < len(few) < 20
    assert not {p.prompt for p in a.training_prompts(0)} & set(prompts)


def test_the_demonstrator_forgets_carries():
    assert a.sum_without_carries(np.array([[27, 185], [5, 5], [999, 1], [12, 30]])).tolist() == [102, 0, 990, 42]
    assert a.sum_without_carries(np.array([[10, 0]])).tolist() == [10]
    pairs = a.problems(0, 500, 3)
    assert a.sum_without_carries(pairs).tolist() == [forgetful(x, y) for x, y in pairs.tolist()]
    assert all(a.reward(p, c) == 1 for p, c in a.demonstrations(0, 200, error=0.0))
    for prompt, completion in a.demonstrations(0, 200, error=1.0):
        x, y = map(int, prompt[:-1].split("+"))
        assert int(completion[::-1]) == forgetful(x, y)


def test_an_imitator_of_the_demonstrator_is_wrong_more_often_than_not():
    pairs = np.array([[int(x) for x in p.prompt[:-1].split("+")] for p in a.heldout_prompts(1000)])
    right = (a.sum_without_carries(pairs) == pairs.sum(1)).mean()
    assert right < 0.5  # the greedy imitator, who always forgets
    demonstrated = a.demonstrations(0, 2000)
    share = np.mean([a.reward(p, c) for p, c in demonstrated])
    assert right < share < 0.8  # sampled, it is sometimes right where a carry is needed
    assert a.demonstrations(0, 2000) == demonstrated
    assert a.demonstrations(1, 2000) != demonstrated


@pytest.mark.parametrize(
    "completion,reward",
    [("312", 1.0), ("213", 0.0), ("0312", 0.0), ("312 ", 0.0), (" 312", 0.0), ("", 0.0), ("+312", 0.0), ("3122", 0.0)],
)
def test_only_the_exact_sum_is_rewarded(completion, reward):
    assert a.reward("27+186=", completion, answer="312") == reward


def test_a_prompt_of_another_kind_is_an_error():
    with pytest.raises(ValueError, match="no addition problem"):
        a.reward("27-185=", "3")


def test_the_text_fits_the_tokenizer_and_the_model():
    tokenizer, config = a.tokenizer(), a.model_config()
    assert len(tokenizer) == config.vocab
    assert (tokenizer.pad_token_id, (tokenizer.eos_token_id,)) == (config.special_tokens.pad, config.special_tokens.eos)
    longest = 0
    for prompt, completion in a.demonstrations(0, 300):
        ids = tokenizer.encode(prompt + completion)
        assert tokenizer.decode(ids) == prompt + completion
        assert len(tokenizer.encode(completion)) + 1 <= a.MAX_NEW_TOKENS
        longest = max(longest, len(ids))
    assert longest + a.MAX_NEW_TOKENS <= config.max_positions
    assert all(p.fields["answer"] == str(sum(map(int, p.prompt[:-1].split("+"))))[::-1] for p in a.heldout_prompts(50))


def test_the_global_random_states_are_left_alone():
    torch.manual_seed(0), np.random.seed(0), random.seed(0)
    before = torch.random.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    a.demonstrations(0, 10), a.training_prompts(0, 10), a.heldout_prompts(10)
    after = torch.random.get_rng_state(), np.random.get_state()[1], random.getstate()
    assert torch.equal(before[0], after[0]) and (before[1] == after[1]).all() and before[2] == after[2]


@pytest.mark.parametrize("name", [name for name in TASK_NAMES if name.startswith("arithmetic")])
def test_the_record_of_a_task_fits_together(name):
    task = embedded_task(name)
    tokenizer = task.tokenizer()
    assert set(task.texts) == set(TEXT_FIELDS)
    assert len(tokenizer.get_vocab()) == task.model_config(1).vocab
    assert task.model_config(32).attention.head == 32
    for prompt in (*task.training_prompts(3)[:20], *task.heldout_prompts(20)):
        answer = prompt.fields["answer"]
        assert task.reward(prompt.prompt, answer, **prompt.fields) == 1.0
        assert len(tokenizer.encode(answer)) <= task.max_new_tokens
    right = task.texts["demonstrations"]
    assert right(0, 9, split="heldout") == right(5, 9, split="heldout") != right(0, 9, split="train")
