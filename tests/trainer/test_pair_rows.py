"""Pairs of sampled rows, and rows whose completion is another prompt's."""

import numpy as np
import pytest
import torch
from small_runs import begin, one_step, scored_batch, small_job

from funrl.algos.losses.pairs import online_pairs
from funrl.algos.recipes.kto import kto
from funrl.algos.recipes.online_dpo import online_dpo
from funrl.batch import Batch
from funrl.data.supervised import DataError, text_example
from funrl.data.text_lengths import mismatched
from funrl.mesh.mesh import single
from funrl.tasks import arithmetic
from funrl.trainer.settings.settings import SettingsError
from funrl.trainer.sources.pair_rows import paired
from funrl.trainer.steps.step_rows import rows_of


def sampled(scores):
    """Rows of 3 to 8 tokens, the last two sampled; two rows a prompt."""
    lengths = torch.tensor([3 + (5 * i) % 6 for i in range(len(scores))])
    at, end = torch.arange(8), lengths[:, None]
    tokens = torch.where(at < end, 10 * torch.arange(len(scores))[:, None] + at, 0)
    group = torch.arange(len(scores)) // 2
    logp = -tokens.double() / 7
    return Batch(
        tokens=tokens,
        mask=(at < end) & (at >= end - 2),
        length=lengths,
        group=group,
        score=torch.tensor(scores),
        rollout_logp=logp,
        truncated=torch.zeros(len(scores), dtype=torch.bool),
    )


def test_the_two_completions_of_a_pair_are_neighbours_without_padding():
    batch = sampled([0.0, 1.0, 1.0, 1.0, 3.0, 2.0])
    got, wide = paired(rows_of(batch)).batch, online_pairs(batch)  # which leaves padding between the two
    assert got.group.tolist() == [0, 2] and got.length.tolist() == [8 + 3, 5 + 4]
    for pair in range(2):
        used, inside = wide.segments[pair] > 0, slice(int(got.length[pair]))
        for name in ("tokens", "mask", "positions", "segments", "rollout_logp"):
            assert torch.equal(got.get(name)[pair, inside], wide.get(name)[pair, used].to(got.get(name))), name
            assert not got.get(name)[pair, int(got.length[pair]) :].any()
    none = paired(rows_of(sampled([1.0, 1.0, 0.0, 0.0])))
    assert len(none.owner) == 1 and not none.batch.mask.any()  # nothing to learn from


@pytest.mark.slow
def test_online_dpo_moves_towards_what_is_rewarded():
    job = small_job(online_dpo, batch_prompts=8, samples_per_prompt=4, minibatches=1, lr=3e-3, max_refills=1)
    run, state = begin(job, single())
    rewards = []
    for _ in range(12):
        rows, _, _ = scored_batch(run, state)
        assert rows.batch.segments.max() == 2 and rows.batch.ref_logp[rows.batch.mask].all()
        state, metrics = one_step(run, state)
        rewards.append(metrics["reward/mean"])
    assert metrics["preference/margin"] > 0
    assert "reward/equal_groups" in metrics and "critic/advantages/mean" not in metrics
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 3 * 0.1, rewards


@pytest.mark.slow
def test_kto_takes_its_reference_point_from_completions_of_other_prompts():
    job = small_job(kto, reward=None, lr=0.03)
    run, state = begin(job, single())
    state, _ = one_step(run, state)  # the policy has moved
    drawn, _, _ = run.source.next_rows(state.source, 2)
    batch = drawn.batch
    assert batch.mismatched.tolist() == [False] * 4 + [True] * 4
    texts = [arithmetic.tokenizer().decode(t[: int(n)]) for t, n in zip(batch.tokens, batch.length, strict=True)]
    for row in range(4):
        own, after = texts[row], texts[(row + 1) % 4]
        assert texts[4 + row] == own.partition("=")[0] + "=" + after.partition("=")[2]
    rows, _, metrics = scored_batch(run, state)
    assert len(rows.owner) == 4 and rows.batch.label.unique().tolist() == [0.0, 1.0]
    assert metrics["preference/kl_baseline"] == pytest.approx(rows.batch.kl_baseline[0, 0].item())
    assert metrics.keys() == {
        "perf/total_num_tokens",
        "preference/kl_baseline",
    }
    before = run.source.evaluate(state.roles, 1)["eval/loss"]
    for _ in range(10):
        state, metrics = one_step(run, state)
    after = run.source.evaluate(state.roles, 11)
    assert after["eval/loss"] < before and after["eval/chosen"] > after["eval/rejected"]


def test_a_mismatched_completion_is_cut_to_the_positions():
    tokenizer = arithmetic.tokenizer()
    first, other = (
        text_example({"prompt": p, "completion": c, "label": 1}, "ratings", tokenizer)
        for p, c in (("12+34=", "64"), ("5=", "1234567"))
    )
    for positions, text in ((64, "12+34=1234567</s>"), (9, "12+34=123"), (3, "12+34=1")):
        (made,) = mismatched(first, other, positions).texts
        assert tokenizer.decode(made.tokens) == text and sum(made.trained) == len(made.tokens) - 6


@pytest.mark.parametrize(
    "kind, change, message",
    [
        ("ratings", {"label": 2}, "'label' is 2; true, false or a number from 0 to 1"),
        ("ratings", {"label": None}, "there is no field 'label'"),
        ("steps", {"labels": [True]}, "'labels' must be a list of true or false, one for each of the 2 completions"),
        ("steps", {"completions": "ab"}, "'completions' must be a list of texts"),
        ("steps", {"completions": ["a", 1]}, "'completions' must be a list of texts"),
    ],
)
def test_labels_are_checked(kind, change, message):
    record = {"prompt": "1+1=", "completion": "2", "label": True, "completions": ["1", "2"], "labels": [True, False]}
    with pytest.raises(DataError, match=message):
        text_example(record | change, kind, arithmetic.tokenizer())


def test_labels_of_csv_and_of_the_embedded_task():
    for text, label in (("true", 1.0), ("False", 0.0), ("0.5", 0.5)):
        record = {"prompt": "1+1=", "completion": "2", "label": text}
        assert text_example(record, "ratings", arithmetic.tokenizer()).labels == (label,)
    for prompt, digits, labels in arithmetic.steps(3, 40):
        right = str(eval(prompt[:-1]))[::-1]
        assert labels == [right.startswith("".join(digits[:n])) for n in range(1, len(digits) + 1)]
    assert np.mean([label for *_, label in arithmetic.ratings(3, 40)]) == 0.5
    with pytest.raises(SettingsError, match=r"--step_separator=x does nothing without .* labelled steps to learn from"):
        small_job(kto, reward=None, step_separator="x")
    with pytest.raises(SettingsError, match="--batch_prompts=1: KTO compares with completions of other prompts"):
        small_job(kto, reward=None, batch_prompts=1)
