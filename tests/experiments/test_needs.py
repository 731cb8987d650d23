"""What algorithms read is provided, computed only where it is read, and reported by name where a run lacks it."""

import dataclasses
import functools
import importlib
import json
import pkgutil
import typing

import pytest
import torch
from funrl.algos.distillation import distillation
from funrl.algos.gdpo import gdpo
from funrl.algos.grpo import grpo
from funrl.algos.kl import kl_to
from funrl.algos.ppo import ppo
from funrl.algos.prime import prime
from funrl.algos.reductions import token_mean
from funrl.algos.shaping import adaptive_kl, fixed_kl
from funrl.algos.terms import clipped_surrogate
from funrl.algos.terms_covariance import adapt_entropy
from funrl.trainer.spmd import Clock

import funrl.algos
from funrl import trees
from funrl.algos.compose import corrected
from funrl.algos.core import Algorithm, add, chain, needs_of, reduce
from funrl.algos.corrections import mask_truncated
from funrl.algos.filters import not_truncated
from funrl.data.tokenizer import character_tokenizer
from funrl.mesh.mesh import single
from funrl.models import decoder, hf
from funrl.tasks import arithmetic
from funrl.trainer import ensemble, phases, warmstart
from funrl.trainer import job as jobs
from funrl.trainer.job import SettingsError, check_needs, prepare
from funrl.trainer.settings import Settings

MODULES = {m.name: importlib.import_module(f"funrl.algos.{m.name}") for m in pkgutil.iter_modules(funrl.algos.__path__)}
MAKERS = {name: getattr(module, name) for name, module in MODULES.items() if hasattr(module, name)}
NAMED = [name for name, make in MAKERS.items() if typing.get_type_hints(make)["return"] is Algorithm]
COMPUTED = ("ref_logp", "teacher_logp", "reward_logp", "value", "sum_pi_squared", "greedy_score", "old_entropy")
TINY = dataclasses.replace(arithmetic.model_config(), embed=16, layers=1, heads=4, kv_heads=2, head=4, mlp=16)
SMALL = {
    "batch_prompts": 4, "samples_per_prompt": 2, "max_new_tokens": 4, "warmstart_steps": 0, "eval_prompts": 4,
    "compile": "off", "device": "cpu", "steps": 4, "max_refills": 1,
}  # fmt: skip
each = pytest.mark.parametrize("name", NAMED)


class Quiet:
    def note(self, text):
        pass

    def samples(self, *args):
        pass

    def supervised(self, *args):
        pass


def compose(name) -> Algorithm:
    return MAKERS[name]()


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    weights = decoder.init(TINY, torch.Generator().manual_seed(9), torch.float32)
    hf.save(folder, TINY, weights, arithmetic.tokenizer())
    return str(folder)


def digits(prompt, completion, **fields):
    return min(sum(map(completion.count, "12345")), 3) / 3


def begin(make, **settings):
    job = prepare(Settings(**SMALL | settings), make)
    rewards = job.task.rewards if settings.get("reward") else (digits,)
    job = job._replace(config=TINY, task=job.task._replace(rewards=rewards))
    models = ensemble.build(job, single(), Quiet().note)
    weights = warmstart.initial_weights(job, single(), models.policy_layouts, models.layer, Quiet())
    return job, models, phases.start(job, models, weights)


def scored(job, models, state):
    batch, state, _ = phases.collect(job, models, state, 1, Clock(), Quiet())
    return phases.score_batch(job, models, state, batch, Clock())


def settings_for(algorithm, teacher):
    return Settings(**SMALL, teacher=teacher if jobs.BY_TEACHER & needs_of(algorithm) else None)


def test_all_named_algorithms_are_here():
    assert len(NAMED) >= 21 and {"ppo", "prime", "distillation", "gdpo", "otb", "remax"} <= set(NAMED)


@each
def test_every_field_that_a_named_algorithm_reads_is_reported_by_name_where_a_run_lacks_it(name, teacher, monkeypatch):
    algorithm = compose(name)
    settings = settings_for(algorithm, teacher)
    check_needs(algorithm, settings)
    given = {"value": "value_loss", "reward_logp": "reward_loss"}
    for field in sorted(needs_of(algorithm)):
        with monkeypatch.context() as patch:
            without, lacking = algorithm, settings
            if field in given:
                without = dataclasses.replace(algorithm, **{given[field]: None})
            elif field == "teacher_logp":
                lacking = dataclasses.replace(settings, teacher=None)
            else:
                patch.setattr(jobs, "AVAILABLE", jobs.AVAILABLE - {field})
            with pytest.raises(SettingsError, match=rf"reads (.*, )?{field}\b"):
                check_needs(without, lacking)


@each
def test_a_step_provides_what_a_named_algorithm_reads_and_computes_nothing_else(name, teacher):
    algorithm = compose(name)
    chosen = settings_for(algorithm, teacher)
    job, models, state = begin(lambda: algorithm, teacher=chosen.teacher)
    batch, state, _ = scored(job, models, state)
    for field in needs_of(algorithm) - {"entropy"}:
        x = getattr(batch, field)
        assert x is not None, field
        assert (x[batch.mask] if x.shape == batch.mask.shape else x).isfinite().all(), field
    for field in COMPUTED:
        assert (getattr(batch, field) is not None) == (field in needs_of(algorithm)), field
    state, metrics = phases.learn(job, models, state, batch, 1, Clock())
    assert all(x == x for x in metrics.values()), metrics


def test_a_teacher_judges_its_own_way_and_a_copy_of_the_policy_judges_as_the_policy(teacher, tmp_path):
    job, models, state = begin(distillation, teacher=teacher)
    hf.save(tmp_path, TINY, state.policy.params, arithmetic.tokenizer())
    batch, _, _ = scored(job, models, state)
    assert (batch.teacher_logp - batch.old_logp)[batch.mask].abs().max() > 1e-3
    copy, _, _ = scored(*begin(distillation, teacher=str(tmp_path)))
    torch.testing.assert_close(copy.teacher_logp, copy.old_logp, rtol=0, atol=1e-5)


def test_old_entropy_is_that_of_the_policy(teacher):
    def make():
        adaptive = adapt_entropy(1.0, 0.1)
        return dataclasses.replace(grpo(kl_loss=0.0), advantage=chain(adaptive, grpo().advantage))

    job, models, state = begin(make)
    batch, _, metrics = scored(job, models, state)
    entropy = batch.old_entropy[batch.mask]
    assert ((entropy > 0) & (entropy <= torch.tensor(float(TINY.vocab)).log() + 1e-5)).all()
    # The mean of -log p over samples estimates it.
    assert abs(entropy.mean() + batch.old_logp[batch.mask].mean()) < 1.0
    assert "actor/entropy_coefficient" in metrics


def test_scores_are_those_of_each_reward_function_and_their_weighted_sum(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    code = "def first(prompt, completion, **_):\n    return len(completion)\n\n\n"
    code += "def second(prompt, completion, **_):\n    return len(prompt)\n"
    (tmp_path / "two_rewards.py").write_text(code)
    both = ",".join(f"{tmp_path / 'two_rewards.py'}:{f}" for f in ("first", "second"))
    flags = {"prompts": str(tmp_path / "prompts.jsonl"), "reward": both}
    job, models, state = begin(gdpo, **flags, reward_weights="2,-0.5")
    batch, _, metrics = scored(job, models, state)
    torch.testing.assert_close(batch.score, batch.scores @ torch.tensor([2.0, -0.5]))
    assert batch.scores.shape == (8, 2) and (batch.scores[:, 1] == 4).all()
    assert metrics["reward/2/mean"] == 4 and metrics["reward/1/mean"] == batch.scores[:, 0].mean().item()
    assert prepare(Settings(**SMALL, **flags), gdpo).task.weights == (1, 1)
    for weights in ("1", "1,2,3", "1,x", "1,nan"):
        with pytest.raises(SettingsError, match=r"reward_weights.*rewards \(2\)"):
            prepare(Settings(**SMALL, **flags, reward_weights=weights), gdpo)


def test_the_implicit_reward_model_begins_as_the_policy_and_learns_on_its_own():
    job, models, state = begin(prime)
    batch, state, _ = scored(job, models, state)
    torch.testing.assert_close(batch.reward_logp, batch.ref_logp)
    before = trees.clone(state.reward_model.params)
    reference = trees.clone(state.reference)
    state, metrics = phases.learn(job, models, state, batch, 1, Clock())
    assert {"reward_model/loss", "reward_model/grad_norm", "reward/accuracy"} <= set(metrics)
    moved = [
        not torch.equal(a, b)
        for a, b in zip(trees.leaves(before), trees.leaves(state.reward_model.params), strict=True)
    ]
    assert any(moved)
    assert all(torch.equal(a, b) for a, b in zip(trees.leaves(reference), trees.leaves(state.reference), strict=True))


def test_the_implicit_reward_model_learns_from_whole_completions_whatever_is_rejected():
    """Where every other completion is rejected as truncated, the reward model's step is the same; the policy's not."""
    ends = []
    for pieces in ((), (mask_truncated(),)):
        job, models, state = begin(lambda pieces=pieces: corrected(dataclasses.replace(prime(), keep=None), *pieces))
        batch, state, _ = phases.collect(job, models, state, 1, Clock(), Quiet())
        batch = batch._replace(truncated=torch.arange(len(batch.tokens)) % 2 == 0)
        batch, state, _ = phases.score_batch(job, models, state, batch, Clock())
        assert batch.sampled.sum() > batch.mask.sum() or not pieces
        state, metrics = phases.learn(job, models, state, batch, 1, Clock())
        ends.append((trees.leaves(state.reward_model.params), metrics["reward_model/loss"], metrics["actor/pg_loss"]))
    assert all(map(torch.equal, ends[0][0], ends[1][0])) and ends[0][1] == ends[1][1]
    assert ends[0][2] != ends[1][2]


def test_in_the_first_steps_only_the_critic_learns():
    job, models, state = begin(ppo, critic_warmup_steps=2)
    for step in (1, 2, 3):
        policy, critic = trees.clone(state.policy.params), trees.clone(state.critic.params)
        batch, state, _ = scored(job, models, state)
        state, metrics = phases.learn(job, models, state, batch, step, Clock())
        still = all(map(torch.equal, trees.leaves(policy), trees.leaves(state.policy.params)))
        assert still == (step <= 2) == ("actor/pg_loss" not in metrics)
        assert not all(map(torch.equal, trees.leaves(critic), trees.leaves(state.critic.params)))


def test_the_state_of_a_controller_goes_from_step_to_step():
    job, models, state = begin(lambda: ppo(kl_reward=adaptive_kl(0.1, 1e-9, horizon=8)))
    before = trees.leaves(state.advantage)[0].item()
    state = state._replace(reference=trees.map(lambda x: x + 0.1, state.reference))
    _, state, _ = scored(job, models, state)
    assert trees.leaves(state.advantage)[0].item() != before


def test_a_filter_drops_single_rows_too():
    half = lambda batch: torch.arange(len(batch.score)) % 2 == 0  # noqa: E731
    job, models, state = begin(lambda: dataclasses.replace(grpo(), keep=half))
    batch, _, _ = phases.collect(job, models, state, 1, Clock(), Quiet())
    assert len(batch.tokens) == 4 and len(set(batch.group.tolist())) == 4


def test_a_teacher_says_what_is_likely_and_a_student_comes_nearer_to_it(teacher, tmp_path):
    make = functools.partial(distillation, kind="forward")
    with pytest.raises(SettingsError, match=r"student_top_logp.*teacher_top_logp.*--teacher=DIR"):
        check_needs(make(), Settings(**SMALL))
    whole = Settings(**SMALL).teacher_top_k
    for k in (3, whole):
        job, models, state = begin(make, teacher=teacher, teacher_top_k=k, lr=1e-2, minibatches=1)
        batch, state, _ = scored(job, models, state)
        assert batch.teacher_logp is None and batch.old_logp is None
        assert batch.teacher_top.shape == batch.teacher_top_logp.shape == (*batch.tokens.shape, min(k, TINY.vocab))
        assert (batch.teacher_top_logp.diff(dim=-1)[batch.mask] <= 0).all()
        losses = []
        for _ in range(12):
            state, metrics = phases.learn(job, models, state, batch, 1, Clock())
            losses.append(metrics["distillation/loss"])
        assert losses[-1] < 0.5 * losses[0]
    assert metrics["distillation/teacher_mass"] == pytest.approx(1, abs=1e-5)  # all tokens
    job, models, state = begin(make, teacher=teacher)
    hf.save(tmp_path, TINY, state.policy.params, arithmetic.tokenizer())
    job, models, state = begin(make, teacher=str(tmp_path), minibatches=1)  # its own teacher has nothing to teach
    batch, state, _ = scored(job, models, state)
    _, metrics = phases.learn(job, models, state, batch, 1, Clock())
    assert metrics["actor/pg_loss"] == pytest.approx(0, abs=1e-5)


def test_what_no_run_provides_is_named():
    algorithm = dataclasses.replace(
        grpo(), policy_loss=reduce(add(clipped_surrogate(), kl_to("label", "k1", "kl")), token_mean())
    )
    with pytest.raises(SettingsError, match="reads label, which this run does not provide"):
        check_needs(algorithm, Settings(**SMALL))
    with pytest.raises(SettingsError, match="returns"):  # a chain that sets none
        check_needs(dataclasses.replace(grpo(), value_loss=ppo().value_loss), Settings(**SMALL))


def test_filters_may_read_what_a_rollout_knows():
    check_needs(dataclasses.replace(grpo(), keep=not_truncated()), Settings(**SMALL))
    late = lambda batch: batch.old_logp.sum(1) > 0  # noqa: E731
    late.needs = frozenset({"old_logp"})
    with pytest.raises(SettingsError, match="filter reads old_logp"):
        check_needs(dataclasses.replace(grpo(), keep=late), Settings(**SMALL))


@pytest.mark.parametrize(
    ("flags", "make"),
    [
        ({"critic_warmup_steps": 1}, grpo),
        ({"implicit_reward_lr": 1e-3}, grpo),
        ({"teacher": "somewhere"}, lambda: ppo(kl_reward=fixed_kl(0.1))),
        ({"critic_warmup_steps": 4}, ppo),
        ({"critic_warmup_steps": -1}, ppo),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(flags, make):
    (name,) = flags
    with pytest.raises(SettingsError, match=f"--{name}"):
        prepare(Settings(**SMALL | flags), make)


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    tokens = character_tokenizer(arithmetic.ALPHABET[::-1])
    hf.save(tmp_path, TINY, decoder.init(TINY, torch.Generator().manual_seed(1), torch.float32), tokens)
    with pytest.raises(SettingsError, match="tokenizer is not the policy's"):
        prepare(Settings(**SMALL, teacher=str(tmp_path)), distillation)
    with pytest.raises(ValueError, match="nowhere"):
        prepare(Settings(**SMALL, teacher="nowhere"), distillation)
