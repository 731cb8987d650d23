"""From prompts to a batch: alignment, masks, engine and trainer, filters and refills."""

import dataclasses
import functools
import math

import numpy as np
import pytest
import torch
from scripted_engine import ScriptedEngine
from small_runs import GRPO, PPO, Quiet, begin, digits_reward, scored_batch, small_job, whole_batch

from funrl import trees
from funrl.algos import corrected, mask_truncated, unequal_scores
from funrl.data.prompts import Example, prompt_batch
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.models.model import Inputs
from funrl.rewards.load import RewardError
from funrl.rewards.pool import Pool
from funrl.rollout.requests import Completion, RequestGroups, requests_of
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer import phases
from funrl.trainer.phases import draw_batch, learn_batch
from funrl.trainer.sources.generation import (
    RewardedEngine,
    Rollout,
    completion_texts,
    first_texts,
    rollout,
    to_rows,
)

HELD_OUT_NOTE = "6 held-out prompts: one alone moves a mean over them by 17% of its range"  # of every small job
# Two prompts with two samples each: lengths 3, 1, 2, 3; rows 1 and 2 were ended by the stop token 9.
EXAMPLES = [Example([5, 6], "p", {}), Example([7, 8, 4, 3, 2, 6, 5], "q", {})]
NATS = [[0.1, 0.2, 0.3], [0.4], [0.5, 0.6], [0.7, 0.8, 0.9]]
DONE = [
    Completion(i, torch.tensor(ids), -torch.tensor(nats), -1 - torch.tensor(nats), torch.zeros(len(ids)).long(), finish)
    for i, (ids, nats, finish) in enumerate(
        zip([[11, 12, 13], [9], [14, 9], [15, 16, 17]], NATS, ["length", "stop", "stop", "length"], strict=True)
    )
]
SCORES = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0], [0.25, 0.0]], dtype=torch.float64)
WEIGHTS = torch.tensor([1.0, 0.5], dtype=torch.float64)
ROLLOUT = Rollout(
    DONE,
    torch.tensor([3, 1, 2, 3]),
    torch.tensor([False, True, True, False]),
    SCORES @ WEIGHTS,
    SCORES,
    np.zeros(4, dtype=np.int64),
    single(),
)
SAMPLING = Sampling(max_new_tokens=3, stop=(9,), samples=2)


def test_position_t_of_a_batch_speaks_of_token_t():
    batch = to_rows(EXAMPLES, ROLLOUT, SAMPLING).batch
    assert batch.tokens.shape == (4, 16)  # 7 + 3 tokens at most, rounded up to a multiple of 8
    assert batch.tokens[1].tolist() == [5, 6, 9] + [0] * 13
    assert batch.tokens[3].tolist() == [7, 8, 4, 3, 2, 6, 5, 15, 16, 17] + [0] * 6
    assert batch.length.tolist() == [5, 3, 9, 10]
    assert batch.group.tolist() == [0, 0, 1, 1]
    assert batch.truncated.tolist() == [True, False, False, True]
    assert batch.score.tolist() == [1.0, 0.0, 0.5, 0.25]
    assert batch.scores.tolist() == SCORES.tolist()
    sampled = [row[mask].tolist() for row, mask in zip(batch.tokens, batch.mask, strict=True)]
    assert sampled == [[11, 12, 13], [9], [14, 9], [15, 16, 17]]  # never the prompt, never padding, with the stop
    tolists = [row[mask].tolist() for row, mask in zip(batch.rollout_logp, batch.mask, strict=True)]
    assert tolists[2] == pytest.approx([-0.5, -0.6])
    assert batch.rollout_logp[~batch.mask].abs().max() == 0


def test_the_model_s_own_distribution_is_reported_where_tokens_were_cut_away_or_penalised():
    for how in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"repetition_penalty": 1.1}):
        batch = to_rows(EXAMPLES, ROLLOUT, Sampling(**how, samples=2, stop=(9,))).batch
        assert batch.rollout_logp[2][batch.mask[2]].tolist() == pytest.approx([-1.5, -1.6])


def test_the_stop_token_is_not_part_of_the_text():
    decode = lambda ids: "".join(f"<{number}>" for number in ids)  # noqa: E731
    texts = completion_texts([done.written for done in DONE], decode, [7] * 4)
    assert texts == ["<11><12><13>", "", "<14>", "<15><16><17>"]


@pytest.mark.slow
@pytest.mark.parametrize("count,queue", [(1, "tickets"), (5, "fixed")])
@pytest.mark.gloo
def test_every_rank_has_all_rows_even_with_fewer_prompts_than_ranks(count, queue):
    """An engine that repeats its prompt's first token: rows, widths and rewards must come back in order."""
    examples = [Example([10 + i] * (1 + i % 3), f"p{i}", {"n": i}) for i in range(count)]

    def echo(request):
        return [request.prompt[0]] * len(request.prompt)

    engine = functools.partial(ScriptedEngine, echo, order=lambda request: -request.number)
    pool = Pool([lambda prompt, completion, n: n, lambda prompt, completion, n: len(completion)])

    def program(mesh):
        rewarded = RewardedEngine(engine(), mesh, lambda ids: "x" * len(ids), pool, (1.0, 0.01), queue)
        done = rollout(rewarded, examples, SAMPLING, 0)
        rows = to_rows(examples, done, SAMPLING)
        return whole_batch(rows), first_texts(done, range(0, 2 * count, 2), str, [0] * count)

    (whole, texts), (expected, others) = launch(program, parse("dp3,tp2"), "cpu"), program(single())
    assert texts == others
    for name in expected.names():
        assert whole.get(name).dtype == expected.get(name).dtype and torch.equal(whole.get(name), expected.get(name))
    assert whole.score.tolist() == [e.fields["n"] + 0.01 * n for e in examples for n in [len(e.tokens)] * 2]


def test_a_prompts_requests_are_made_alone_and_are_those_of_the_whole_batch():
    prompts = [example.tokens for example in EXAMPLES]
    groups = RequestGroups(prompts, SAMPLING, seed=7)
    whole = requests_of(prompts, SAMPLING, 7)
    assert [request for group in groups[:] for request in group] == whole
    assert groups[1] == groups[1:][0] == whole[SAMPLING.samples :] and len(groups) == len(prompts)


@pytest.mark.slow
@pytest.mark.gloo
def test_a_reward_that_fails_on_one_rank_is_raised_on_every_rank():
    job = small_job(mesh="dp2,tp2", reward=None)
    seen = job.task.prompts

    def reward(prompt, completion, **fields):
        if prompt == drawn[-1].text:
            raise ValueError("no such animal")
        return 0.0

    drawn = prompt_batch(seen, job.settings.run.batch_prompts, job.settings.run.seed, 0)
    job = dataclasses.replace(job, task=job.task._replace(rewards=(reward,)))

    def program(mesh):
        run, state = begin(job, mesh)
        try:
            draw_batch(run, state)
        except RewardError as error:
            return str(error)
        return ""

    message = launch(program, job.sizes, "cpu")
    assert "no such animal" in message and repr(drawn[-1].text) in message


@pytest.mark.parametrize("settings", [{}, {"temperature": 0.7}, {"top_k": 5}, {"top_p": 0.8}, {"min_p": 0.05}])
def test_engine_and_trainer_agree_on_log_probabilities(settings):
    job = small_job(max_new_tokens=12, **settings)
    run, state = begin(job, single())
    rows, _, metrics = scored_batch(run, state)
    batch = rows.batch
    assert batch.mask.sum() > 20
    assert (batch.old_logp - batch.rollout_logp).abs()[batch.mask].max() < 1e-10
    assert metrics["rollout/logprob_gap_max"] < 1e-10
    assert batch.old_logp[~batch.mask].abs().max() == 0


def test_old_log_probabilities_are_those_of_the_plain_model():
    """Token by token, from the softmax of the logits of the tokens before it, without batching."""
    job = small_job(temperature=0.7)
    run, state = begin(job, single())
    batch = scored_batch(run, state)[0].batch
    model, params = job.model, state.roles["policy"].params
    for row in range(4):
        n = int(batch.length[row])
        hidden = model.apply(params, Inputs(batch.tokens[row : row + 1, :n])).hidden
        logp = (hidden[0] @ model.unembed(params).T / 0.7).log_softmax(-1)
        for t in batch.mask[row].nonzero().squeeze(1).tolist():
            assert batch.old_logp[row, t].item() == pytest.approx(logp[t - 1, batch.tokens[row, t]].item(), abs=1e-12)


def test_rewards_and_samples_stay_with_their_prompts():
    job = small_job(reward=lambda prompt, completion, **fields: len(prompt) + len(completion) / 10)
    run, state = begin(job, single())
    rows, after, _ = scored_batch(run, state)
    batch = rows.batch
    drawn = prompt_batch(job.task.prompts, 4, 0, 0)
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    for row, (tokens, mask) in enumerate(zip(batch.tokens, batch.mask, strict=True)):
        prompt, text = drawn[row // 2], decode(tokens[mask].tolist())
        assert tokens[: len(prompt.tokens)].tolist() == prompt.tokens
        assert batch.score[row].item() == pytest.approx(len(prompt.text) + len(text) / 10)
    assert after.source["prompts_consumed"] == 4


def test_evaluation_is_greedy_repeatable_and_of_the_held_out_prompts():
    job, show = small_job(reward=lambda prompt, completion, answer, **_: float(completion[:1] == "1")), Quiet()
    run, state = begin(job, single(), show)
    evaluation = run.source.evaluate(state.roles, 0)
    assert evaluation == run.source.evaluate(state.roles, 7)
    assert {"eval/reward", "eval/accuracy", "eval/accuracy_ci_low", "eval/response_length"} < set(
        evaluation
    ) and 0 <= evaluation["eval/accuracy"] <= 1
    (step, prompts, texts, scores), again = show.shown
    assert (step, again[0]) == (0, 7) and again[1:] == (prompts, texts, scores)
    assert prompts == [e.text for e in job.task.heldout[:6]]
    assert evaluation["eval/reward"] == pytest.approx(sum(scores) / 6)  # all six held-out prompts are shown
    # Greedy: every token is the most probable one.
    example = job.task.heldout[0]
    ids = job.tokenizer.encode(texts[0], add_special_tokens=False)
    for i, token in enumerate(ids):
        params = state.roles["policy"].params
        hidden = job.model.apply(params, Inputs(torch.tensor([example.tokens + ids[:i]]))).hidden
        assert (hidden[0, -1] @ job.model.unembed(params).T).argmax().item() == token


@pytest.mark.slow
@pytest.mark.gloo
def test_evaluation_with_fewer_held_out_prompts_than_ranks():
    job = small_job(mesh="dp4", eval_prompts=2)
    first = small_job(eval_prompts=2)

    def program(job):
        def evaluate(mesh):
            run, state = begin(job, mesh)
            return run.source.evaluate(state.roles, 0)

        return evaluate

    assert launch(program(job), job.sizes, "cpu") == launch(program(first), first.sizes, "cpu")


def filtered(keep=None):
    """GRPO with a filter; the default keeps the groups whose scores differ."""
    return dataclasses.replace(GRPO(), filter=keep or unequal_scores())


def test_refills_replace_what_the_filter_drops():
    job = small_job(filtered, max_refills=40)
    run, state = begin(job, single())
    rows, after, metrics = draw_batch(run, state)
    batch = rows.batch
    assert batch.tokens.shape[0] == 8
    assert all(len(set(batch.score[i : i + 2].tolist())) == 2 for i in range(0, 8, 2))
    assert metrics["filter_groups/sampled_prompts"] == after.source["prompts_consumed"] > 4  # some were thrown away
    assert metrics["filter_groups/dropped_prompts"] == after.source["prompts_consumed"] - 4  # nothing that it keeps
    assert metrics["filter_groups/kept_share"] == pytest.approx(4 / after.source["prompts_consumed"])
    assert len(set(batch.group.tolist())) == 4


def test_refills_are_bounded_and_a_short_batch_is_reported():
    # The fourth prompt of a draw is kept: then three are missing, and drawn three times in vain, the last two of them
    # are all that the bound allows.
    job = small_job(lambda: filtered(lambda batch: batch.group % 4 == 3), max_refills=3)
    show = Quiet()
    run, state = begin(job, single(), show)
    rows, after, metrics = draw_batch(run, state)
    batch = rows.batch
    assert after.source["prompts_consumed"] == 3 * 4
    assert len(batch.tokens) == 2
    assert counts(metrics) == {"kept_share": 1 / 12, "sampled": 12, "dropped": 11, "rows": 0, "skipped": 0}
    about_heldout, note = show.notes
    assert about_heldout == HELD_OUT_NOTE and "kept 1 of 12 prompts, the batch needs 4" in note


def counts(metrics):
    short = {"sampled_prompts": "sampled", "dropped_prompts": "dropped"}
    names = {key: key.removeprefix("filter_groups/") for key in metrics}
    return {(short | {"dropped_rows": "rows"}).get(name, name): metrics[key] for key, name in names.items()}


def test_what_is_sampled_and_not_used_is_counted():
    """Two of three prompts are kept, and one more prompt is drawn for the one that is not; of every second prompt that
    is kept, one row is."""

    def keep(batch):
        prompt, sample = batch.group % 3, torch.arange(len(batch.group)) % 2
        return (prompt == 0) | ((prompt == 1) & (sample == 0))

    job = small_job(lambda: filtered(keep))
    show = Quiet()
    run, state = begin(job, single(), show)
    rows, _, metrics = draw_batch(run, state)
    batch = rows.batch
    # kept are prompts 0, 1, 3 of the first draw; the filter numbers the second from 0 again
    assert counts(metrics) == {"kept_share": 4 / 5, "sampled": 5, "dropped": 1, "rows": 1, "skipped": 0}
    assert len(batch.tokens) == 7 and show.notes == [HELD_OUT_NOTE]


@pytest.mark.parametrize("compose", [GRPO, PPO], ids=["grpo", "ppo"])
def test_a_batch_of_which_every_token_is_rejected_changes_nothing(compose):
    """After a step that moved the optimizer: no loss, no gradient, no change of any weight, no number that is not
    finite."""
    job = small_job(lambda: corrected(compose(), mask_truncated()))
    run, state = begin(job, single())
    for cut in (False, True):
        rows, state, _ = draw_batch(run, state)
        rows = rows.with_fields(truncated=torch.full_like(rows.batch.truncated, cut))
        rows, state, scored = phases.score_batch(run, state, rows)
        before = trees.clone(state.roles)
        state, learned = learn_batch(run, state, rows)
        same = all(torch.equal(a, b) for a, b in zip(trees.leaves(before), trees.leaves(state.roles), strict=True))
        assert same == cut
        assert all(map(math.isfinite, (scored | learned).values()))
    assert "critic/advantages/max" not in scored and "reward/mean" in scored
    assert learned["actor/pg_loss"] == 0 and learned["actor/grad_norm"] == 0


def test_a_filter_that_drops_everything_is_said_and_ends():
    nothing = lambda: filtered(lambda batch: torch.zeros(len(batch.score), dtype=torch.bool))  # noqa: E731
    job = small_job(nothing, max_refills=2, empty_filter="use")
    show = Quiet()
    run, state = begin(job, single(), show)
    rows, after, metrics = draw_batch(run, state)
    batch = rows.batch
    assert after.source["prompts_consumed"] == 8 and len(batch.tokens) == 8
    assert any("dropped all of 8" in note for note in show.notes)
    assert metrics["filter_groups/kept_share"] == 0


def test_a_filter_of_rows_leaves_groups_of_unequal_sizes_that_train():
    """Every third row is dropped: groups keep two samples or one, and the rows keep their own rewards."""
    job = small_job(lambda: filtered(lambda batch: torch.arange(len(batch.score)) % 3 != 2))
    run, state = begin(job, single())
    rows, state, _ = scored_batch(run, state)
    batch = rows.batch
    assert [batch.group.tolist().count(g) for g in sorted(set(batch.group.tolist()))] == [2, 1, 1, 2]
    decode = functools.partial(job.tokenizer.decode, skip_special_tokens=True)
    texts = [decode(t[m].tolist()) for t, m in zip(batch.tokens, batch.mask, strict=True)]
    assert batch.score.tolist() == [digits_reward("", text) for text in texts]
    _, learned = learn_batch(run, state, rows)
    assert math.isfinite(learned["actor/grad_norm"])


@pytest.mark.slow
@pytest.mark.gloo
def test_a_filter_chooses_the_same_rows_on_every_mesh():
    def program(job):
        def run(mesh):
            started, state = begin(job, mesh)
            return whole_batch(draw_batch(started, state)[0])

        return run

    first, two = (small_job(filtered, mesh=m, max_refills=2) for m in ("dp1", "dp3"))
    a, b = (launch(program(job), job.sizes, "cpu") for job in (first, two))
    assert torch.equal(a.tokens, b.tokens) and torch.equal(a.score, b.score) and torch.equal(a.group, b.group)


def test_without_a_filter_nothing_is_sampled_twice():
    job = small_job(PPO)
    run, state = begin(job, single())
    rows, after, metrics = draw_batch(run, state)
    batch = rows.batch
    assert metrics == {} and after.source["prompts_consumed"] == 4
    assert math.isclose(batch.rollout_logp[batch.mask].exp().mean().item(), 1 / 16, rel_tol=0.5)  # nearly uniform
