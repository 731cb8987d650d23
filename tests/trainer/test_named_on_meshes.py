"""Algorithms take the same step on two ranks as on one: samples, metrics and weights to 1e-9.

Rows are of very uneven lengths, and some mini-batches have fewer rows than there are ranks for them.
"""

import functools

import pytest
import torch
from small_runs import SIZES, assert_same, small_job, steps_program, uneven

from funrl.algos import recipes
from funrl.loading import load_function
from funrl.mesh.launch import launch
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.tasks import arithmetic
from funrl.trainer.settings.declaration import run_kind
from funrl.trainer.steps.roles import fields_read, role_names

MAKERS = {name: load_function("algorithm", f"funrl.algos.recipes.{name}:{name}") for name in recipes.NAMES}
LIKELY = "distillation over likely tokens"
SPLIT = (  # what they read of a row is on all ranks that have a part of it: ratios, sums, KLs, returns, pairs, ends
    "gspo",
    "gmpo",
    "sppo",
    "otb",
    "vapo",
    "flowrl",
    "prime",
    "gkd",
    "dpo",
    "kto",
    "reward_model",
    "process_reward_model",
)
# what they read of the logits: log-probabilities and values, entropies, likely tokens, rewards
TENSOR = ("ppo", "flowrl", "gkd", LIKELY, "otb", "process_reward_model")
ROWS_APART = (  # each field and role once, means over all rows, groups, pairs, labels, filters and demonstrations
    "ppo",
    "remax",
    "reinforce_plus_plus",
    "gdpo",
    "prime",
    "gkd",
    "dpo",
    "online_dpo",
    "kto",
    "process_reward_model",
    "chord",
    "m2po",
    "eaft",
    "flowrl",
    LIKELY,
)
NAMED = {
    name: functools.partial(MAKERS["distillation"], kind="forward") if name == LIKELY else MAKERS[name]
    for name in dict.fromkeys([*ROWS_APART, *SPLIT, *TENSOR])
}
ROWS = {"batch_prompts": 2, "samples_per_prompt": 3, "minibatches": 2, "token_budget": 64}


def _jobs(mesh, teacher, names):
    for name in names:
        make = NAMED[name]
        made = make()
        given = {"teacher": teacher} if "teacher" in role_names(made) else {}
        given |= {"reward": None} if run_kind(made, None) == "supervised" else {}
        given |= {} if made.filter is None else {"max_refills": 1}
        given |= {"teacher_top_k": 5} if "teacher_topk" in fields_read(made) else {}
        yield name, uneven(small_job(make, SIZES | {"layers": 1}, mesh=mesh, **given, **ROWS))


def _one_step_each(jobs, mesh):
    return {name: steps_program(job, 1, with_gradients=False)(mesh) for name, job in jobs}


@pytest.fixture(scope="module")
def steps(tmp_path_factory):
    """What a step of algorithms gives on a mesh: of all of them, or of the named ones."""
    folder = tmp_path_factory.mktemp("teacher")
    model = decoder_model(with_fields(arithmetic.model_config(), **SIZES))
    hf.save(folder, model, model.init(torch.Generator().manual_seed(9)), arithmetic.tokenizer())

    @functools.cache
    def of_mesh(mesh, names=tuple(NAMED)):
        jobs = list(_jobs(mesh, str(folder), names))
        return launch(functools.partial(_one_step_each, jobs), jobs[0][1].sizes, "cpu")

    return of_mesh


def _comparable(step):
    """A step's result without a reward model's accuracy: untrained, it scores every row 0, up to rounding."""
    (metrics,) = step["metrics"]
    return step | {"metrics": [{name: x for name, x in metrics.items() if name != "reward/accuracy"}]}


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS_APART)
def test_a_step_is_the_same_where_ranks_share_the_rows(name, steps):
    """What ranks share of a model, an algorithm does not see: tests/trainer/test_layouts.py."""
    assert_same(_comparable(steps("dp2", ROWS_APART)[name]), _comparable(steps("dp1")[name]), 1e-9)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", TENSOR)
def test_a_step_is_the_same_where_the_logits_of_a_token_are_split(name, steps):
    assert_same(_comparable(steps("tp2", TENSOR)[name]), _comparable(steps("dp1")[name]), 1e-9)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("name", SPLIT)
def test_a_step_is_the_same_where_the_tokens_of_a_row_are_split(name, steps):
    assert_same(_comparable(steps("sp2", SPLIT)[name]), _comparable(steps("dp1")[name]), 1e-9)
