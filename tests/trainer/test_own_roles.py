"""Roles that a user's own file declares are placed, scored, trained and resumed like the built-in ones."""

import dataclasses
import functools

import pytest
import torch
from small_runs import SIZES, assert_same, run_steps, small_job
from test_checkpoint import assert_equal_steps, run, run_to_resume

from funrl import trees
from funrl.algos import PieceError, grpo
from funrl.data.tokenizer import character_tokenizer
from funrl.fields import FIELDS, Field
from funrl.loading import load_function
from funrl.mesh.launch import launch
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.role_kinds import ROLES, RateRule, RoleKind
from funrl.tasks import arithmetic
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.compatibility import check_algorithm
from funrl.trainer.jobs.learning_rates import learning_rates
from funrl.trainer.settings.settings import Settings, SettingsError, settings_of
from funrl.trainer.steps.roles import role_names
from funrl.trainer.steps.skipped import ADVICE

OWN = '''
from funrl.algos import Algorithm, add, chain, clipped_surrogate, group_center, reduce, stateless, to_tokens, token_mean
from funrl.fields import Field
from funrl.role_kinds import RateRule, RoleKind


def forecast_error(values, batch):
    return (values - batch.score) ** 2, {}


def imitation(logp, batch):
    return -batch.score.clamp(min=0) * logp, {}


def contrast(logp, batch):
    return (batch.graded_logp - batch.imitator_logp).clamp(-1, 1) * logp, {}


def own(grader: str | None = None):
    """GRPO beside three roles: a frozen grader, a forecaster of scores, and an imitator of good completions."""
    forecasts = stateless(lambda x, batch: x - 0.1 * batch.forecast, per="token")
    return Algorithm(
        advantage=chain(group_center(), to_tokens(), forecasts),
        losses={
            "forecaster": reduce(forecast_error, token_mean()),
            "imitator": reduce(imitation, token_mean()),
            "policy": reduce(add(clipped_surrogate(), contrast), token_mean()),
        },
        fields={
            "graded_logp": Field("token", "grader", "nats"),
            "forecast": Field("token", "forecaster", "expected score of the row"),
            "imitator_logp": Field("token", "imitator", "nats"),
        },
        roles={
            "grader": RoleKind("a frozen grader", writes={"graded_logp": "logp"}, model=grader),
            "forecaster": RoleKind(
                "a forecaster",
                writes={"forecast": "values"},
                value_head=True,
                learns=True,
                metric="forecast/error",
                rate=RateRule(factor=3.0),
            ),
            "imitator": RoleKind("an imitator", writes={"imitator_logp": "logp"}, learns=True),
        },
    )
'''
MODEL = decoder_model(with_fields(arithmetic.model_config(), **SIZES | {"layers": 1}))


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    file = tmp_path_factory.mktemp("own") / "own.py"
    file.write_text(OWN)
    return load_function("algorithm", f"{file}:own")


@pytest.fixture(scope="module")
def compose(own, tmp_path_factory):
    folder = tmp_path_factory.mktemp("grader")
    hf.save(folder, MODEL, MODEL.init(torch.Generator().manual_seed(9)), arithmetic.tokenizer())
    return functools.partial(own, str(folder))


def test_own_roles_have_their_place_among_the_others(compose):
    algorithm = compose()
    assert role_names(algorithm) == ("policy", "grader", "forecaster", "imitator")
    job = small_job(compose, lr=1e-3)
    assert job.main_role == "policy" and set(job.directories) == {"grader"}
    rates = learning_rates(job.settings, job.algorithm, job.model)
    assert rates == {"forecaster": pytest.approx(3e-3), "imitator": 1e-3, "policy": 1e-3}
    roles = launch(lambda mesh: build(job, mesh, print), job.sizes, "cpu").roles
    assert list(roles) == ["grader", "forecaster", "imitator", "policy"]
    assert roles["grader"].loss is None and roles["grader"].placed.model.config.layers == 1
    assert roles["forecaster"].placed.model.value is not None
    assert [role.metric for role in roles.values()][1:] == ["forecast/error", "imitator/loss", "actor/pg_loss"]
    sharded = small_job(compose, mesh="dp2", fsdp=True, fsdp_models="grader")
    assert sharded.sizes["data"] == 2


@pytest.mark.slow
@pytest.mark.gloo
def test_own_roles_score_and_learn_the_same_on_any_mesh(compose):
    alone = run_steps(2, compose=compose, minibatches=1, mesh="dp1")
    spread = run_steps(2, compose=compose, minibatches=1, mesh="dp2")
    assert_same(alone, spread, 1e-9)
    assert set(alone["weights"]) == {"forecaster", "imitator", "policy"}
    for batch in alone["batches"]:
        assert {"graded_logp", "forecast", "imitator_logp", "old_logp"} <= set(batch.names())
        gap = (batch.old_logp - batch.rollout_logp)[batch.mask].abs().max()
        assert gap < 1e-5  # the policy's, and not the imitator's
    first, second = alone["metrics"]
    assert first["forecast/error"] != second["forecast/error"]
    assert {"forecast/grad_norm", "imitator/loss", "imitator/grad_norm", "actor/entropy"} <= set(first)
    assert not {"forecast/entropy", "imitator/entropy"} & set(first)


@pytest.mark.slow
def test_a_run_with_own_roles_is_resumed(compose, tmp_path):
    settings = {"compose": compose, "steps": 2, "dtype": "float32"}
    folder = tmp_path / "checkpoints"
    _, expected, _, weights = run_to_resume(folder, **settings)
    _, steps, notes, again = run(folder, resume=True, run_dir="x", **settings)
    assert any("resumed after step 1" in note for note in notes)
    assert_equal_steps(steps, expected[1:])
    assert all(map(torch.equal, again, weights))


def test_a_model_that_does_not_fit_is_named(own, tmp_path):
    hf.save(
        tmp_path, MODEL, MODEL.init(torch.Generator().manual_seed(1)), character_tokenizer(arithmetic.ALPHABET[::-1])
    )
    with pytest.raises(SettingsError, match=r"RoleKind\(model='.*'\) of the role 'grader': its tokenizer is not"):
        small_job(functools.partial(own, str(tmp_path)))
    with pytest.raises(SettingsError, match="nowhere"):
        small_job(functools.partial(own, "nowhere"))
    with pytest.raises(SettingsError, match="--fsdp_models=critic: this run has no critic; it has policy, grader"):
        small_job(own, mesh="dp2", fsdp=True, fsdp_models="critic")


def test_adapters_of_own_roles_stand_on_the_base_which_is_a_role_too(compose, tmp_path):
    job = small_job(compose, lora_rank=2)
    roles = launch(lambda mesh: build(job, mesh, print), job.sizes, "cpu").roles
    assert {name: role.base for name, role in roles.items()} == {
        "base": None,
        "grader": None,
        "forecaster": "base",
        "imitator": "base",
        "policy": "base",
    }
    assert roles["base"].loss is None and not roles["base"].writes
    assert job.initial_role == "base" and job.main_role == "policy"
    stored = [{name for name, _ in trees.named(roles[name].stored)} for name in ("base", "policy")]
    assert not stored[0] & stored[1]
    learning = RoleKind("an imitator", writes={"imitator_logp": "logp"}, learns=True, model=compose.args[0])
    algorithm = dataclasses.replace(compose(), roles={**compose().roles, "imitator": learning})
    with pytest.raises(SettingsError, match=r"--lora_rank=2: .* of the role 'imitator' learns all weights of a model"):
        small_job(lambda: algorithm, lora_rank=2)


GRADER = RoleKind("a frozen grader", writes={"graded_logp": "logp"})
GRADED = {"graded_logp": Field("token", "grader", "nats")}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"roles": {"grader": GRADER}}, r"role 'grader' writes 'graded_logp', .* Field\('token', 'grader', text\)"),
        ({"roles": {"grader": "logp"}}, "role 'grader' is declared as 'logp': give RoleKind"),
        ({"roles": {"critic": GRADER}}, "role 'critic' is declared already: a critic; give yours another name"),
        ({"roles": {"base": GRADER}}, "role 'base': a run names the frozen weights under adapters so"),
        ({"roles": {"a b": GRADER}}, "'a b' cannot name a role: give a Python identifier"),
        ({"roles": {"actor": RoleKind("an actor", generates=True)}}, "role 'actor' generates, and so does 'policy'"),
        ({"roles": {"grader": RoleKind("a grader", reads="steps")}}, "role 'grader' reads 'steps': .*--reward_model"),
        ({"roles": {"coach": RoleKind("a coach", learns=True)}}, "role 'coach' learns but has no loss: give Algorithm"),
    ],
)
def test_a_declaration_that_cannot_work_is_refused(changes, message):
    with pytest.raises(PieceError, match=message):
        dataclasses.replace(grpo(), **changes)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RoleKind("x", reads="words"), "reads='words'.*one of tokens, completion, steps"),
        (lambda: RoleKind("x", writes={"y": "values"}), "without a value head gives logp, .* set value_head=True"),
        (lambda: RoleKind("x", writes={"y": "logp"}, value_head=True), "gives values; .* set value_head=False"),
        (lambda: RoleKind("x", metric="loss"), "metric='loss'.*PREFIX/NAME"),
    ],
)
def test_a_kind_that_contradicts_itself_is_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_a_role_that_nothing_reads_is_refused():
    idle = dataclasses.replace(grpo(), fields=GRADED, roles={"grader": GRADER})
    with pytest.raises(SettingsError, match=r"reads nothing that its role 'grader' writes \(graded_logp\)"):
        check_algorithm(idle, Settings())
    loss = grpo().losses["policy"]
    with pytest.raises(SettingsError, match=r"'coach', which is not one of policy, .*RoleKind\(text\)\}\) declares it"):
        check_algorithm(dataclasses.replace(grpo(), losses={**grpo().losses, "coach": loss}), Settings())


def test_every_list_of_roles_derives_from_their_kinds():
    assert set(ROLES) <= set(ADVICE)
    assert {field.writer for field in FIELDS.values()} & set(ROLES) == {n for n, kind in ROLES.items() if kind.writes}
    flags = [kind.rate.flag for kind in ROLES.values() if kind.rate != RateRule()] + list(ROLES.by_flag())
    assert settings_of(**dict.fromkeys(flags)) == Settings()
