"""What algorithms read is written by roles, computed only where it is read, and named where a run lacks it."""

import dataclasses
import functools
import json

import pytest
import torch
from selection import quick, unlike_recipes
from small_runs import SIZES, begin, one_step, scored_batch, small_job

from funrl import trees
from funrl.algos import (
    adapt_entropy,
    add,
    clipped_surrogate,
    corrected,
    kl_to,
    mask_truncated,
    not_truncated,
    recipes,
    reduce,
    token_mean,
)
from funrl.algos.core import chain
from funrl.algos.reading import reads
from funrl.algos.recipes.distillation import distillation
from funrl.algos.recipes.gdpo import gdpo
from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.ppo import ppo
from funrl.algos.recipes.prime import prime
from funrl.data.tokenizer import character_tokenizer
from funrl.fields import FIELDS
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.role_kinds import ROLES
from funrl.tasks import arithmetic
from funrl.trainer import phases
from funrl.trainer.jobs.compatibility import check_algorithm
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.settings.declaration import run_kind
from funrl.trainer.settings.settings import Settings, SettingsError, settings_of, with_flags
from funrl.trainer.steps.learn import learn
from funrl.trainer.steps.roles import role_names

TINY = decoder_model(with_fields(arithmetic.model_config(), **SIZES | {"layers": 1}))
MAKERS = {name: recipes.recipe(name) for name in recipes.NAMES}
MADE = {name: make() for name, make in MAKERS.items()}
GENERATING = [name for name, made in MADE.items() if made.advantage is not None and run_kind(made, None) == "rl"]
OTHER_ROLES = {"critic", "implicit_reward", "teacher"}
WITH_OTHER_ROLES = [name for name in GENERATING if OTHER_ROLES & {*role_names(MADE[name])}]
COMPUTED = [*FIELDS.by(*ROLES), "greedy_score"]
QUICK = ("ppo", "remax", "prime", "distillation", "otb")


def digits(prompt, completion, **fields):
    return min(sum(map(completion.count, "12345")), 3) / 3


def equal(a, b):
    return all(map(torch.equal, trees.leaves(a), trees.leaves(b)))


def start(make, **settings):
    filtered = {"max_refills": 1} if make().filter is not None else {}
    return begin(small_job(make, **{"reward": digits, "dtype": "float32"} | filtered | settings), single())


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    folder = tmp_path_factory.mktemp("teacher")
    hf.save(folder, TINY, TINY.init(torch.Generator().manual_seed(9)), arithmetic.tokenizer())
    return str(folder)


def taught(algorithm, teacher):
    return {"teacher": teacher} if "teacher" in role_names(algorithm) else {}


def test_all_recipes_are_here():
    assert {"ppo", "prime", "distillation", "gdpo", "otb", "remax", "dr_grpo"} <= set(GENERATING)
    for role, kind in ROLES.items():
        assert set(kind.writes) == set(FIELDS.by(role))


@pytest.mark.parametrize("name", quick([name for name in GENERATING if name in unlike_recipes()], QUICK))
def test_a_step_provides_what_an_algorithm_reads_and_computes_nothing_else(name, teacher):
    algorithm = MAKERS[name]()
    run, state = start(MAKERS[name], **taught(algorithm, teacher))
    rows, state, _ = scored_batch(run, state)
    batch = rows.batch
    needed = reads(algorithm).required
    for field in needed - set(FIELDS.by("step")):
        x = getattr(batch, field)
        assert (x[batch.mask] if x.shape == batch.mask.shape else x).isfinite().all(), field
    ids = {"teacher_topk"} if "topk_logp" in needed else set()
    for field in COMPUTED:
        assert (field in batch.names()) == (field in needed | ids), field
    _, metrics = phases.learn_batch(run, state, rows)
    assert all(x == x for x in metrics.values()), metrics


@pytest.mark.parametrize("name", [name for name in WITH_OTHER_ROLES if name in unlike_recipes()])
def test_a_role_that_an_algorithm_reads_of_and_does_not_have_is_named(name, teacher):
    algorithm = MAKERS[name]()
    settings = settings_of(**taught(algorithm, teacher))
    check_algorithm(algorithm, settings)
    for role in set(role_names(algorithm)) & OTHER_ROLES:
        losses = {key: loss for key, loss in algorithm.losses.items() if key != role}
        lacking = dataclasses.replace(algorithm, losses=losses)
        without = with_flags(settings, teacher=None) if role == "teacher" else settings
        field = "|".join(FIELDS.by(role))
        with pytest.raises(SettingsError, match=rf"\b({field})\b"):
            check_algorithm(lacking, without)


def test_what_no_run_provides_is_named():
    loss = reduce(add(clipped_surrogate(), kl_to("margin", "k1", "kl")), token_mean())
    algorithm = dataclasses.replace(grpo(), losses={"policy": loss})
    with pytest.raises(SettingsError, match="returns"):  # a chain that sets none
        check_algorithm(dataclasses.replace(grpo(), losses=ppo().losses), Settings())
    run_fields = set(FIELDS.by("source")) - {"margin", "label"}
    with pytest.raises(SettingsError, match="margin"):
        check_algorithm(algorithm, Settings(), run_fields)
    loss = grpo().losses["policy"]
    with pytest.raises(SettingsError, match="has a loss for 'grader', which is not one of policy, critic"):
        check_algorithm(dataclasses.replace(grpo(), losses={**grpo().losses, "grader": loss}), Settings())


def test_filters_may_read_what_a_rollout_knows():
    check_algorithm(dataclasses.replace(grpo(), filter=not_truncated()), Settings())
    with pytest.raises(SettingsError, match="old_logp"):
        late = lambda batch: batch.old_logp.sum(1) > 0  # noqa: E731
        check_algorithm(dataclasses.replace(grpo(), filter=late), Settings())


@pytest.mark.parametrize(
    ("flags", "make"),
    [
        ({"critic_warmup_steps": 1}, grpo),
        ({"implicit_reward_lr": 1e-3}, grpo),
        ({"teacher": "somewhere"}, ppo),
        ({"critic_warmup_steps": 3}, ppo),
        ({"critic_warmup_steps": -1}, ppo),
    ],
)
def test_a_flag_that_would_do_nothing_is_refused(flags, make):
    (name,) = flags
    with pytest.raises(SettingsError, match=f"--{name}"):
        small_job(make, **flags)


def test_a_teacher_scores_by_its_own_weights_and_a_copy_of_the_policy_as_the_policy(teacher, tmp_path):
    run, state = start(distillation, teacher=teacher)
    hf.save(tmp_path, run.job.model, state.roles["policy"].params, arithmetic.tokenizer())
    batch = scored_batch(run, state)[0].batch
    assert (batch.teacher_logp - batch.rollout_logp)[batch.mask].abs().max() > 1e-3
    run, state = start(distillation, teacher=str(tmp_path))
    copy = scored_batch(run, state)[0].batch
    torch.testing.assert_close(copy.teacher_logp, copy.rollout_logp, rtol=0, atol=1e-5)


def test_a_teacher_gives_likely_tokens_and_the_policy_comes_nearer_to_it(teacher, tmp_path):
    make = functools.partial(distillation, kind="forward")
    with pytest.raises(SettingsError, match=r"teacher.*--teacher=DIR"):
        check_algorithm(make(), Settings())
    for k in (3, 64):
        run, state = start(make, teacher=teacher, teacher_top_k=k, lr=1e-2, minibatches=1)
        rows, state, _ = scored_batch(run, state)
        batch = rows.batch
        assert "teacher_logp" not in batch.names() and "old_logp" not in batch.names()
        expected = (*batch.tokens.shape, min(k, TINY.config.vocab))
        assert batch.teacher_topk.shape == batch.teacher_topk_logp.shape == expected
        assert (batch.teacher_topk_logp.diff(dim=-1)[batch.mask] <= 0).all()
        losses = []
        for _ in range(12):
            state, metrics = phases.learn_batch(run, state, rows)
            losses.append(metrics["distillation/loss"])
        assert losses[-1] < 0.5 * losses[0]
    assert metrics["distillation/teacher_mass"] == pytest.approx(1, abs=1e-5)  # all tokens
    run, state = start(make, teacher=teacher)
    hf.save(tmp_path, run.job.model, state.roles["policy"].params, arithmetic.tokenizer())
    run, state = start(make, teacher=str(tmp_path), minibatches=1)  # its own teacher has nothing to teach
    _, metrics = one_step(run, state)
    assert metrics["actor/pg_loss"] == pytest.approx(0, abs=1e-5)


def test_a_teacher_with_other_tokens_is_refused(tmp_path):
    hf.save(tmp_path, TINY, TINY.init(torch.Generator().manual_seed(1)), character_tokenizer(arithmetic.ALPHABET[::-1]))
    with pytest.raises(SettingsError, match="tokenizer is not the policy's"):
        prepare(settings_of(teacher=str(tmp_path), compile="off"), functools.partial(distillation, direct=True))
    with pytest.raises(SettingsError, match="nowhere"):
        prepare(settings_of(teacher="nowhere", compile="off"), distillation)


def test_old_entropy_is_that_of_the_policy():
    def make():
        return dataclasses.replace(grpo(kl_coef=0), advantage=chain(adapt_entropy(1.0, 0.1), grpo().advantage))

    run, state = start(make)
    rows, _, metrics = scored_batch(run, state)
    batch = rows.batch
    entropy = batch.old_entropy[batch.mask]
    assert ((entropy > 0) & (entropy <= torch.tensor(float(TINY.config.vocab)).log() + 1e-5)).all()
    # The mean of -log p over samples estimates it.
    assert abs(entropy.mean() + batch.old_logp[batch.mask].mean()) < 1.0
    assert "actor/entropy_coefficient" in metrics


def test_scores_are_those_of_each_reward_function_and_their_weighted_sum(tmp_path):
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+1="}) + "\n" for n in range(8)))
    code = "def first(prompt, completion, **_):\n    return len(completion)\n\n\n"
    code += "def second(prompt, completion, **_):\n    return len(prompt)\n"
    (tmp_path / "two_rewards.py").write_text(code)
    both = ",".join(f"{tmp_path / 'two_rewards.py'}:{f}" for f in ("first", "second"))
    flags = {"prompts": str(tmp_path / "prompts.jsonl"), "reward": both, "warmstart_steps": 0, "max_new_tokens": 4}
    run, state = start(gdpo, **flags, reward_weights="2,-0.5")
    rows, _, metrics = scored_batch(run, state)
    batch = rows.batch
    torch.testing.assert_close(batch.score, batch.scores @ torch.tensor([2.0, -0.5]))
    assert batch.scores.shape == (8, 2) and (batch.scores[:, 1] == 4).all()
    assert metrics["reward/second/mean"] == 4 and metrics["reward/first/mean"] == batch.scores[:, 0].mean().item()
    assert prepare(settings_of(compile="off", **flags), gdpo).task.weights == (1, 1)
    for weights in ("1", "1,2,3", "1,x", "1,nan"):
        with pytest.raises(SettingsError, match="reward_weights"):
            prepare(settings_of(compile="off", **flags, reward_weights=weights), gdpo)


def test_the_implicit_reward_model_begins_as_the_policy_and_learns_on_its_own():
    run, state = start(prime)
    rows, state, _ = scored_batch(run, state)
    batch = rows.batch
    torch.testing.assert_close(batch.implicit_logp, batch.ref_logp)
    before, reference = (trees.clone(tree) for tree in (state.roles["implicit_reward"].params, run.frozen["reference"]))
    state, metrics = phases.learn_batch(run, state, rows)
    assert {"implicit_reward/loss", "implicit_reward/grad_norm"} <= set(metrics)
    after = state.roles["implicit_reward"].params
    assert not all(map(torch.equal, trees.leaves(before), trees.leaves(after)))
    assert all(map(torch.equal, trees.leaves(reference), trees.leaves(run.frozen["reference"])))


def test_the_implicit_reward_model_learns_from_whole_completions_whatever_is_rejected():
    """Where every other completion is rejected as truncated, its step is the same; the policy's is not."""
    ends = []
    for pieces in ((), (mask_truncated(),)):
        make = lambda pieces=pieces: corrected(dataclasses.replace(prime(), filter=None), *pieces)  # noqa: E731
        run, state = start(make)
        rows, state, _ = phases.draw_batch(run, state)
        rows = rows.with_fields(truncated=torch.arange(len(rows.owner)) % 2 == 0)
        rows, state, _ = phases.score_batch(run, state, rows)
        assert rows.batch.sampled.sum() > rows.batch.mask.sum() or not pieces
        state, metrics = phases.learn_batch(run, state, rows)
        params = trees.leaves(state.roles["implicit_reward"].params)
        ends.append((params, metrics["implicit_reward/loss"], metrics["actor/pg_loss"]))
    assert all(map(torch.equal, ends[0][0], ends[1][0])) and ends[0][1] == ends[1][1]
    assert ends[0][2] != ends[1][2]


def test_in_the_first_steps_only_the_critic_learns():
    run, state = start(ppo, critic_warmup_steps=2)
    for step in (1, 2, 3):
        before = {name: trees.clone(role.params) for name, role in state.roles.items()}
        state, metrics = one_step(run, state)
        still = {
            name: all(map(torch.equal, trees.leaves(tree), trees.leaves(state.roles[name].params)))
            for name, tree in before.items()
        }
        assert still == {"policy": step <= 2, "critic": False}
        assert ("actor/pg_loss" not in metrics) == (step <= 2)


def test_a_critic_learns_several_times_from_the_rows_of_an_update():
    """As by hand: `learn` with the critic alone, as often, on the same mini-batches."""
    ends = []
    for updates in (1, 3):
        run, state = start(ppo, critic_updates=updates, minibatches=1)
        rows, state, _ = scored_batch(run, state)
        state, _ = phases.learn_batch(run, state, rows)
        ends.append(state.roles)
    run, state = start(ppo, minibatches=1)
    rows, state, _ = scored_batch(run, state)
    critics = {"critic": state.roles["critic"]}
    for _ in range(3):
        critics, _ = learn(
            {"critic": run.parts.roles["critic"]}, critics, rows, phases.update_plan(run.job, run.parts, 1)
        )
    assert equal(ends[0]["policy"].params, ends[1]["policy"].params)
    assert not equal(ends[0]["critic"].params, ends[1]["critic"].params)
    assert equal(ends[1]["critic"].params, critics["critic"].params)


def test_an_update_of_the_critic_that_is_left_out_is_not_repeated():
    run, state = start(ppo, critic_updates=3, minibatches=1)
    rows, state, _ = scored_batch(run, state)
    rows = rows.with_fields(returns=rows.batch.returns * float("nan"))
    state, metrics = phases.learn_batch(run, state, rows)
    assert metrics["update/skipped"] == 1 and "critic/vf_loss" not in metrics and "actor/pg_loss" in metrics


def test_parts_of_one_role_alone_are_frozen():
    run, state = start(ppo, freeze="critic:attention,unembed")
    before = {name: trees.clone(role.params) for name, role in state.roles.items()}
    state, _ = one_step(run, state)
    still = {
        name: {
            key
            for (key, x), y in zip(trees.named(tree), trees.leaves(state.roles[name].params), strict=True)
            if torch.equal(x, y)
        }
        for name, tree in before.items()
    }
    attention = {key for key, _ in trees.named(before["critic"]) if "/attn/" in key}
    assert len(attention) == 8 and still == {"policy": {"unembed"}, "critic": attention}


@pytest.mark.parametrize(
    "given, problem",
    [
        ("critik:attention", "no critik learns; there are critic, policy"),
        ("critic:atention", "begins with 'atention'"),
        ("critic:unembed", "begins with 'unembed'"),
        (":attention", "no role learns"),
        ("none,critic:attention", "none stands alone"),
    ],
)
def test_a_role_or_part_that_is_not_there_cannot_be_frozen(given, problem):
    with pytest.raises(SettingsError, match=f"--freeze={given}: .*{problem}"):
        start(ppo, freeze=given)


def test_the_state_of_a_controller_goes_from_step_to_step():
    run, state = start(functools.partial(ppo, kl_coef=0.1, kl_target=1e-9))
    before = [x.item() for x in trees.leaves(state.advantage)]
    run = run._replace(frozen={"reference": trees.map(lambda x: x + 0.1, run.frozen["reference"])})
    _, state, _ = scored_batch(run, state)
    assert [x.item() for x in trees.leaves(state.advantage)] != before


def test_a_filter_drops_single_rows_too():
    half = lambda batch: torch.arange(len(batch.score)) % 2 == 0  # noqa: E731
    run, state = start(lambda: dataclasses.replace(grpo(), filter=half))
    batch = phases.draw_batch(run, state)[0].batch
    assert len(batch.tokens) == 4 and len(set(batch.group.tolist())) == 4


def test_every_leaf_of_the_state_has_a_name():
    _, state = start(ppo)
    names = [name for name, _ in trees.named(state)]
    assert len(set(names)) == len(names)
    for part in ("roles/policy/params/layers/0/attn/q", "roles/critic/params/value", "source/prompts_consumed", "step"):
        assert part in names
    of_adam = [name for name in names if name.startswith("roles/policy/opt_state/") and "/mu/" in name]
    assert any(name.endswith("adam/mu/layers/0/attn/q") for name in of_adam)
