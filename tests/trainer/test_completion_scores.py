"""A reward model scores completions in the source: as transformers reads it, on every mesh, before filter and chain."""

import dataclasses
import functools
import json

import pytest
import torch
from small_runs import SIZES, assert_same, begin, digits_reward, run_steps, scored_batch, small_job

from funrl.algos import unequal_scores
from funrl.algos.recipes.gdpo import gdpo
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.remax import remax
from funrl.batch import Batch
from funrl.cli.run import main
from funrl.data.json_lines import DataError
from funrl.data.packing import pad_rows
from funrl.mesh.mesh import single
from funrl.models import Inputs, decoder_model, place, with_fields, with_value_head
from funrl.models.huggingface import directories as hf
from funrl.rewards.load import RewardError
from funrl.tasks import arithmetic
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.settings import SettingsError, settings_of
from funrl.trainer.sources.completion_scores import completion_scores
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step_rows import rows_of

DECODER = decoder_model(with_fields(arithmetic.model_config(), **SIZES | {"layers": 1}))
MODEL = with_value_head(DECODER)


def random_reward_model():
    generator = torch.Generator().manual_seed(3)
    params = MODEL.init(generator, torch.float64)
    params["value"] = torch.randn(params["value"].shape, generator=generator, dtype=torch.float64) / 4
    return params


@pytest.fixture(scope="module")
def reward_model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reward_model")
    hf.save(folder, MODEL, random_reward_model(), arithmetic.tokenizer())
    return str(folder)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+{7 * n}="}) + "\n" for n in range(12)))
    return str(file)


def by_hand(folder, batch):
    """Each row's number: the head on the hidden state of its last token that is not padding, alone in a batch."""
    model, params = hf.load(folder, torch.float64)
    results = []
    for row, length in zip(batch.tokens, batch.length.tolist(), strict=True):
        last = row[:length].nonzero().max()
        hidden = model.apply(params, Inputs(row[None, : last + 1])).hidden[0, -1]
        results.append(hidden @ params["value"][0])
    return torch.stack(results)


def rows_of_tokens(texts):
    tokens = torch.as_tensor(pad_rows(texts, 0, 8))
    return rows_of(Batch(tokens=tokens, mask=tokens > 0, length=torch.tensor([len(text) for text in texts])))


def test_the_number_at_the_end_of_the_whole_text_is_added_with_its_weight(reward_model):
    run, state = begin(small_job(gdpo, reward_model=reward_model, reward_weights="2,-0.5"), single())
    rows, _, metrics = scored_batch(run, state)
    batch = rows.batch
    assert batch.scores.shape == (8, 2) and len(set(batch.length.tolist())) > 1
    decode = functools.partial(run.job.tokenizer.decode, skip_special_tokens=True)
    texts = [decode(t[m]) for t, m in zip(batch.tokens, batch.mask, strict=True)]
    torch.testing.assert_close(batch.scores[:, 0], torch.tensor([digits_reward("", t) for t in texts]).double())
    torch.testing.assert_close(batch.scores[:, 1], by_hand(reward_model, batch), rtol=0, atol=1e-12)
    torch.testing.assert_close(batch.score, batch.scores @ torch.tensor([2.0, -0.5], dtype=torch.float64))
    assert batch.scores[:, 1].unique().numel() > 4
    assert metrics["reward/reward_model/mean"] == pytest.approx(batch.scores[:, 1].mean().item())
    assert "score_reward_model" in run.clock.seconds


@pytest.mark.gloo
@pytest.mark.slow
def test_scores_are_the_same_on_every_mesh(reward_model):
    settings = {"compose": gdpo, "reward_model": reward_model, "token_budget": 64}
    steps = run_steps(2, **settings)
    assert steps["batches"][0].scores.shape == (8, 2)
    assert_same(run_steps(2, mesh="dp3", **settings), steps, 1e-9)


def test_a_rank_with_fewer_rows_and_texts_of_one_token_are_read_too(reward_model):
    model, params = hf.load(reward_model, torch.float64)
    role = Role(place(model, dtype=torch.float64))
    texts = [[3], [3, 4, 5], [3, 4, 5, 0, 0], [4, 3]]
    whole = completion_scores(role, params, rows_of_tokens(texts), pad=0)
    assert whole[1] == whole[2]  # padding tokens at the end are not read
    alone = [completion_scores(role, params, rows_of_tokens([text]), pad=0, token_budget=8) for text in texts]
    torch.testing.assert_close(whole, torch.cat(alone), rtol=0, atol=1e-12)


def test_it_may_be_all_that_scores(reward_model, prompts):
    job = small_job(grpo, reward=None, prompts=prompts, reward_model=reward_model, reward_weights="-3")
    assert job.task.rewards == () and job.task.weights == (-3.0,)
    run, state = begin(job, single())
    rows, _, metrics = scored_batch(run, state)
    batch = rows.batch
    torch.testing.assert_close(batch.score, -3 * by_hand(reward_model, batch), rtol=0, atol=1e-12)
    assert batch.scores.shape == (8, 1) and metrics["reward/mean"] == pytest.approx(batch.score.mean().item())
    reported = run.source.evaluate(state.roles, 0)
    assert set(reported) == {
        "eval/examples",
        "eval/reward",
        "eval/response_length",
        "eval/clip_ratio",
    }  # there is no most that it can give


def test_the_embedded_task_s_reward_stays_and_the_filter_and_the_baseline_see_the_sum(reward_model):
    job = prepare(settings_of(reward_model=reward_model, compile="off"), grpo)
    assert job.task.rewards == (arithmetic.reward,) and job.task.weights == (1.0, 1.0)

    def flat(prompt, completion, **fields):
        return 0.0

    filtered = lambda: dataclasses.replace(grpo(), filter=unequal_scores())  # noqa: E731
    run, state = begin(small_job(filtered, reward=flat, reward_model=reward_model), single())
    _, _, metrics = scored_batch(run, state)
    assert metrics["filter_groups/kept_share"] > 0.5  # by the function alone all completions are equal
    run, state = begin(small_job(remax, reward=flat, reward_model=reward_model), single())
    rows, _, _ = scored_batch(run, state)
    assert rows.batch.greedy_score.abs().min() > 1e-6
    reported = run.source.evaluate(state.roles, 0)
    assert reported["eval/accuracy"] == 0 and reported["eval/reward"] != 0


def test_a_model_of_the_wrong_kind_is_refused(reward_model, prompts, tmp_path):
    hf.save(tmp_path / "decoder", DECODER, DECODER.init(torch.Generator().manual_seed(1)), arithmetic.tokenizer())
    with pytest.raises(SettingsError, match=r"--reward_model=.*decoder: this model has no value head"):
        small_job(grpo, reward_model=str(tmp_path / "decoder"))
    with pytest.raises(SettingsError, match=r"--reward_weights=1: give one number for each of the rewards \(2\)"):
        small_job(grpo, reward_model=reward_model, reward_weights="1")
    with pytest.raises(DataError, match="64 positions, 1 of them to read the whole completion"):
        small_job(grpo, reward=None, prompts=prompts, reward_model=reward_model, max_new_tokens=58)
    small_job(grpo, reward=None, prompts=prompts, reward_model=reward_model, max_new_tokens=57)


def test_a_number_that_is_not_finite_ends_the_run(tmp_path):
    params = random_reward_model()
    largest = 1.7e308 * params["value"].sign()  # finite, or it would not load; its sums are not
    hf.save(tmp_path, MODEL, params | {"value": largest}, arithmetic.tokenizer())
    run, state = begin(small_job(grpo, reward_model=str(tmp_path)), single())
    with pytest.raises(RewardError, match=r"the reward model gave (nan|inf|-inf) for a completion of the prompt"):
        scored_batch(run, state)


@pytest.mark.slow
def test_sft_then_a_reward_model_then_ppo_from_the_command_line(prompts, tmp_path, capsys):
    def run(name, *flags):
        tiny = ("--device=cpu", "--compile=off", "--batch_prompts=4", "--eval_prompts=4", "--warmstart_steps=0")
        folder = tmp_path / name
        assert main(name, [name, *tiny, *flags, f"--run_dir={folder}"]) == 0, capsys.readouterr().err
        return folder / "model", [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

    policy, _ = run("sft", "--steps=3")
    pairs = tmp_path / "pairs.jsonl"
    wrong = [str(n * n * 7919).replace("1", "3")[-1 - n % 3 :] for n in range(40)]
    records = [{"prompt": f"{n}+{n}=", "chosen": "1" * len(x), "rejected": x} for n, x in enumerate(wrong)]
    pairs.write_text("".join(json.dumps(record) + "\n" for record in records))
    grader, rows = run("reward_model", f"--model={policy}", f"--data={pairs}", "--steps=20", "--lr=0.003")
    assert rows[-1]["eval/accuracy"] == 1  # it tells ones from other digits
    flags = (f"--model={policy}", f"--prompts={prompts}", f"--reward_model={grader}", "--max_new_tokens=4")
    final, rows = run("ppo", *flags, "--steps=12", "--lr=0.01", "--samples_per_prompt=16")
    rewards = [row["reward/mean"] for row in rows]
    assert sum(rewards[-3:]) > sum(rewards[:3]) + 3 * 0.5, rewards
    assert all("time_s/score_reward_model" in row for row in rows)
    assert hf.check_directory(final).unembed is not None
