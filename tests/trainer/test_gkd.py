"""Distillation over the whole vocabulary: the teacher runs beside the policy in the step, on own samples or texts."""

import dataclasses
import functools
import json

import pytest
import torch
from small_runs import (
    SIZES,
    Quiet,
    assert_same,
    assert_same_gradients,
    begin,
    gradients,
    one_step,
    run_steps,
    scored_batch,
    small_job,
)
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.algos import recipes, unequal_scores
from funrl.algos.core import Algorithm, Divergence, add, reduce, scale
from funrl.algos.losses.likelihood import negative_log_likelihood
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.teacher import divergence_to_teacher
from funrl.algos.recipes.asft import asft
from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.gkd import gkd
from funrl.algos.recipes.grpo import grpo
from funrl.batch import Batch
from funrl.cli.run import main
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import single
from funrl.models import Inputs, decoder_model, place, with_fields
from funrl.models.huggingface import directories as hf
from funrl.models.placed import Teacher
from funrl.tasks import arithmetic
from funrl.trainer import offload
from funrl.trainer.jobs.compatibility import check_algorithm
from funrl.trainer.jobs.job import RLJob
from funrl.trainer.settings.declaration import kinds_of
from funrl.trainer.settings.settings import Settings, SettingsError
from funrl.trainer.steps.roles import reads_scores, role_names

LARGER = decoder_model(with_fields(arithmetic.model_config(), **SIZES | {"embed": 24, "head": 8}))


def saved(folder, model, seed, tokenizer=None):
    params = trees.map(lambda x: 3 * x, model.init(torch.Generator().manual_seed(seed), torch.float64))
    hf.save(folder, model, params, tokenizer or arithmetic.tokenizer())
    return str(folder)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("teacher"), LARGER, 9)


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    file = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": f"{n}+{7 * n}="}) + "\n" for n in range(12)))
    return str(file)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = [{"prompt": f"{n}+{n}=", "completion": str(2 * n)[::-1]} for n in range(3, 33)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


def by_hand(run, params, batch, beta, temperature):
    """The mean divergence over sampled tokens, from whole logits."""
    both = []
    for name, weights in (("teacher", run.frozen["teacher"]), ("policy", params)):
        model = run.parts.roles[name].placed.model
        logits = model.apply(weights, Inputs(batch.tokens)).hidden[:, :-1] @ model.unembed(weights).T
        both.append((logits / temperature).softmax(-1)[batch.mask[:, 1:]])
    p, q = both
    kl = lambda a, b: (a * (a / b).log()).sum(-1)  # noqa: E731
    if beta in (0, 1):
        return (kl(p, q) if beta == 0 else kl(q, p)).mean()
    m = beta * p + (1 - beta) * q
    return (beta * kl(p, m) + (1 - beta) * kl(q, m)).mean()


@pytest.mark.parametrize(("beta", "temperature"), [(0, 1.0), (0.3, 2.0), (1, 0.7)])
def test_loss_and_gradient_are_those_of_whole_distributions(beta, temperature, teacher):
    run, state = begin(small_job(functools.partial(gkd, beta, temperature), teacher=teacher), single())
    rows, state, metrics = scored_batch(run, state)
    batch = rows.batch
    assert batch.mask.sum() > 20 and "reward/mean" in metrics  # the embedded task has one
    result = gradients(run, state, rows, token_budget=40)["policy"]  # in several micro-batches
    params = state.roles["policy"].params
    (value, _), grads = trees.value_and_grad(lambda w: (by_hand(run, w, batch, beta, temperature), ()))(params)
    assert value > 0.005
    assert_same_gradients({"policy": result}, {"policy": result._replace(tree=grads, loss=value)}, 1e-10)
    assert result.metrics["distillation/loss"] == pytest.approx(value.item(), abs=1e-10)


def test_a_teacher_that_is_the_student_gives_zero(teacher, tmp_path):
    run, state = begin(small_job(gkd, teacher=teacher), single())
    hf.save(tmp_path, run.job.model, state.roles["policy"].params, arithmetic.tokenizer())
    for beta in (0, 0.5, 1):
        run, state = begin(small_job(functools.partial(gkd, beta), teacher=str(tmp_path)), single())
        rows, state, _ = scored_batch(run, state)
        result = gradients(run, state, rows)["policy"]
        assert abs(result.loss) < 1e-14
        assert max(x.abs().max() for x in trees.leaves(result.tree)) < 1e-14


@pytest.mark.gloo
@pytest.mark.slow
def test_steps_are_the_same_fully_sharded(teacher):
    settings = {"compose": functools.partial(gkd, 0.5, entropy_coef=0.01), "teacher": teacher, "token_budget": 40}
    steps = run_steps(2, **settings)
    assert steps["metrics"][0]["actor/pg_loss"] > 0.01
    assert_same(run_steps(2, mesh="dp2", fsdp=True, **settings), steps, 1e-9)


@pytest.mark.slow
def test_the_policy_comes_nearer_to_a_teacher_that_stays_as_it_is(teacher, prompts):
    job = small_job(gkd, reward=None, teacher=teacher, prompts=prompts, samples_per_prompt=8, minibatches=1, lr=0.03)
    assert job.task.rewards == () and job.task.weights == () and job.warmstart_steps == 0
    show = Quiet()
    run, state = begin(job, single(), show)
    before = trees.clone(run.frozen["teacher"])
    assert set(run.source.evaluate(state.roles, 0)) == {"eval/examples", "eval/response_length", "eval/clip_ratio"}
    losses = []
    rows, state, reported = scored_batch(run, state)
    for _ in range(30):
        state, metrics = one_step(run, state)
        losses.append(metrics["distillation/loss"])
    assert not {"score", "scores", "advantage", "divergence"} & set(rows.batch.names())
    assert not [name for name in reported | metrics if name.startswith(("reward", "critic"))]
    names = {"response_length/mean", "actor/pg_loss", "actor/entropy", "rollout/logprob_gap_max"}
    assert names <= set(reported | metrics)
    assert sum(losses[-3:]) < 0.75 * sum(losses[:3]), losses
    assert all(map(torch.equal, trees.leaves(before), trees.leaves(run.frozen["teacher"])))
    assert set(show.shown[0][3]) == {None}


def test_prompts_come_without_a_reward_only_where_nothing_goes_by_it(teacher, prompts):
    without = [name for name in recipes.NAMES if not reads_scores(recipes.recipe(name)())]
    given = [name for name in recipes.NAMES if kinds_of(recipes.recipe(name)()) == ("supervised",)]
    assert set(without) == {"gkd", "distillation", "iw_opd", "spin", "ssd", *given} and "sft" in given
    assert not reads_scores(distillation(kind="forward")) and not reads_scores(distillation(direct=True))
    assert reads_scores(dataclasses.replace(gkd(), filter=unequal_scores()))
    with pytest.raises(SettingsError, match=r"--prompts=.* needs --reward=FILE.py:function or --reward_model=DIR"):
        small_job(grpo, reward=None, prompts=prompts)
    run, state = begin(small_job(distillation, reward=None, prompts=prompts, teacher=teacher), single())
    rows, state, metrics = scored_batch(run, state)
    assert "score" not in rows.batch.names() and "critic/advantages/mean" in metrics and "reward/mean" not in metrics


@pytest.mark.slow
def test_given_texts_are_distilled_too(teacher, texts):
    job = small_job(gkd, reward=None, teacher=teacher, data=texts, minibatches=7, lr=0.06)
    assert not isinstance(job, RLJob) and job.settings.updates.minibatches == 1 and job.warmstart_steps == 0
    run, state = begin(job, single())
    rows, state, _ = scored_batch(run, state)
    result = gradients(run, state, rows, token_budget=30)["policy"]
    value = by_hand(run, state.roles["policy"].params, rows.batch, 0.5, 1.0)
    assert result.loss.item() == pytest.approx(value.item(), abs=1e-12)
    first, losses = run.source.evaluate(state.roles, 0), []
    for _ in range(24):
        state, metrics = one_step(run, state)
        losses.append(metrics["train/loss"])
    last = run.source.evaluate(state.roles, 24)
    assert set(first) == {"eval/examples", "eval/loss"} and "train/loss" in metrics
    assert sum(losses[-5:]) < 0.75 * sum(losses[:5]), losses
    assert last["eval/loss"] < first["eval/loss"]


@pytest.mark.slow
@pytest.mark.gloo
def test_given_texts_give_the_same_on_a_mesh(teacher, texts):
    settings = {"compose": mixed, "reward": None, "teacher": teacher, "data": texts, "token_budget": 40}
    assert_same(run_steps(2, mesh="dp2,tp2", **settings), run_steps(2, **settings), 1e-9)


def mixed():
    """The divergence beside the likelihood of the texts."""
    term = add(negative_log_likelihood(), scale(0.3, divergence_to_teacher()))
    return Algorithm(None, {"policy": reduce(term, token_mean())}, divergence=Divergence(0.2))


@pytest.mark.parametrize("flags", [{}, {"lora_rank": 2}], ids=["all weights", "adapters"])
def test_an_anchored_policy_is_compared_with_what_it_was(flags, texts):
    """DFT and 0.3 KL(reference || policy) over the whole vocabulary; no teacher is given."""
    compose = functools.partial(asft, 0.3)
    assert kinds_of(compose()) == ("supervised",) and role_names(compose()) == ("policy", "reference")
    run, state = begin(small_job(compose, reward=None, data=texts, lr=0.05, **flags), single())
    before = trees.clone(run.frozen)
    assert run.source.evaluate(state.roles, 0).keys() == {"eval/examples", "eval/loss", "eval/nll"}
    state, first = one_step(run, state)
    assert first["distillation/loss"] == pytest.approx(0, abs=1e-12)
    state, _ = one_step(run, state)
    rows, _, _ = scored_batch(run, state)
    batch, role = rows.batch, run.parts.roles["policy"]

    def log_softmax(placed, weights):
        logits = placed.model.apply(weights, Inputs(batch.tokens)).hidden[:, :-1] @ placed.model.unembed(weights).T
        return logits.log_softmax(-1)[batch.mask[:, 1:]]

    reference = run.parts.roles["reference"]
    log_p = log_softmax(reference.placed, reference.whole(run.frozen.get("reference"), run.frozen))
    log_q = log_softmax(role.placed, role.whole(state.roles["policy"].params, run.frozen))
    token_logp = log_q.gather(-1, batch.tokens[:, 1:][batch.mask[:, 1:]].long()[:, None])[:, 0]
    kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
    assert kl > 1e-4
    want = -(token_logp.exp() * token_logp).mean() + 0.3 * kl
    assert gradients(run, state, rows, token_budget=40)["policy"].loss.item() == pytest.approx(want.item(), abs=1e-11)
    assert all(map(torch.equal, trees.leaves(before), trees.leaves(run.frozen)))


class Shapes(TorchDispatchMode):
    """The shapes of all results that are as wide as a vocabulary."""

    def __init__(self, width):
        super().__init__()
        self.width, self.rows = width, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in trees.leaves(out):
            if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[-1] == self.width:
                self.rows.add(x.numel() // self.width)
        return out


def test_no_logits_of_all_tokens_are_ever_whole():
    config = dataclasses.replace(LARGER.config, vocab=37)
    placed, teacher = (place(decoder_model(dataclasses.replace(config, embed=embed))) for embed in (24, 20))
    params, frozen = (item.model.init(torch.Generator().manual_seed(1)) for item in (placed, teacher))
    batch = Batch(tokens=torch.arange(60 * 41).view(60, 41) % 37)
    with Shapes(37) as seen:
        loss = lambda w: (placed.token_scores(w, batch, teacher=Teacher(teacher, frozen)).divergence.mean(), ())  # noqa: E731
        (value, _), _ = trees.value_and_grad(loss)(params)
    assert value > 0
    assert 512 in seen.rows and max(seen.rows) <= 1024 < 60 * 40  # chunks of the two kernels


def test_what_cannot_be_compared_is_refused(prompts, texts, tmp_path):
    with pytest.raises(SettingsError, match=r"batch\.divergence is missing.*give --teacher=DIR"):
        check_algorithm(gkd(), Settings())
    with pytest.raises(SettingsError, match="give --teacher=DIR"):
        small_job(gkd, reward=None, data=texts)
    alphabet = arithmetic.ALPHABET
    padded = dataclasses.replace(LARGER.config, vocab=LARGER.config.vocab + 8)
    wide = saved(tmp_path / "wide", decoder_model(padded), 1)
    with pytest.raises(SettingsError, match=r"its vocabulary has \d+ rows and the policy's \d+; a divergence"):
        small_job(gkd, teacher=wide)
    other = saved(tmp_path / "other", LARGER, 1, character_tokenizer(alphabet[::-1]))
    with pytest.raises(SettingsError, match="tokenizer is not the policy's"):
        small_job(gkd, teacher=other)


def test_frozen_weights_are_on_the_device_in_the_stages_that_read_them(teacher):
    both = lambda: dataclasses.replace(  # noqa: E731
        distillation(), losses=gkd().losses, divergence=gkd().divergence
    )
    for make, stages in ((gkd, {"update"}), (distillation, {"score"}), (both, {"score", "update"})):
        run, _ = begin(small_job(make, teacher=teacher), single())
        assert offload.frozen_stages(run.parts.roles) == {"teacher": stages}


@pytest.mark.slow
def test_from_the_command_line(teacher, prompts, texts, tmp_path, capsys):
    def run(*flags):
        tiny = ("--device=cpu", "--compile=off", "--batch_prompts=4", "--eval_prompts=4", "--steps=2", "--lr=0.01")
        status = main("gkd", ["gkd", *tiny, *flags])
        return status, capsys.readouterr().err

    own = (
        f"--prompts={prompts}",
        "--max_new_tokens=4",
        f"--teacher={teacher}",
        "--temperature=0.8",
        f"--run_dir={tmp_path / 'own'}",
    )
    assert run(*own) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and "actor/pg_loss" in rows[0] and "eval/reward" not in rows[0]
    given = (f"--data={texts}", f"--teacher={teacher}", "--temperature=2", f"--run_dir={tmp_path / 'given'}")
    assert run(*given) == (0, "")
    rows = [json.loads(line) for line in (tmp_path / "given" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 2 and {"train/loss", "eval/loss"} <= set(rows[-1])
    for flags, item in (
        ((f"--prompts={prompts}", "--max_new_tokens=4"), "give --teacher=DIR"),
        ((f"--data={texts}", f"--prompts={prompts}"), "--prompts has no effect in learning from given texts"),
    ):
        status, err = run(*flags)
        assert status == 2 and item in err
    assert main("gkd", ["gkd", "--help"]) == 0
    assert {"--prompts", "--data", "--beta=0.5"} <= set(capsys.readouterr().out.split())
    assert run(f"--teacher={teacher}", "--dry_run") == (0, "")
