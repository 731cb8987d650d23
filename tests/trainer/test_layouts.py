"""Steps of PPO in float64 are the same in every layout: samples, losses, gradients and weights to 1e-9."""

import functools

import pytest
import torch
from selection import quick
from small_runs import (
    GRPO,
    PPO,
    Quiet,
    assert_same,
    begin,
    gradients,
    relative,
    run_steps,
    scored_batch,
    small_job,
    whole_batch,
)

from funrl import trees
from funrl.mesh.launch import launch

pytestmark = pytest.mark.gloo

SIZES = {"embed": 16, "layers": 2, "heads": 8, "kv_heads": 2, "head": 4, "mlp": 32}
SPLIT = {"split_residual": "on"}
LAYOUTS = {
    "dp3 fully sharded": {"mesh": "dp3", "fsdp": True},
    "dp2 fully sharded to tp2": {"mesh": "dp2", "fsdp": True, "generate_mesh": "tp2"},
    "dp2,tp2 policy and critic fully sharded, to tp4": {
        "mesh": "dp2,tp2",
        "fsdp": True,
        "fsdp_models": "policy,critic",
        "generate_mesh": "tp4",
        "remat": "selective",
        **SPLIT,
    },
    "tp2,sp2 with a ring": {"mesh": "tp2,sp2", "sequence_parallel": "ring", "remat": "full", **SPLIT},
    "sp2 critic and reference sharded in groups": {
        "mesh": "dp2,sp2",
        "fsdp": True,
        "fsdp_axes": "sp",
        "fsdp_models": "critic,reference",
    },
}


def _steps(count, **settings):
    compose = functools.partial(PPO, entropy_coef=0.01, kl_coef=0.05)
    return run_steps(count, with_gradients=count > 1, compose=compose, sizes=SIZES, token_budget=64, **settings)


@functools.cache
def _alone(count):
    return _steps(count, mesh="dp1")


QUICK = ("dp2 fully sharded to tp2",)  # which takes two steps: what follows an update is sent from layout to layout


@pytest.mark.slow
@pytest.mark.parametrize("layout", quick(LAYOUTS, QUICK))
def test_ppo_is_the_same_in_every_layout(layout):
    count = 1 + (layout in QUICK)
    assert_same(_steps(count, **LAYOUTS[layout]), _alone(count), 1e-9)


def _noted_gradients(job, mesh):
    """What a run says, and the gradients of its first step."""
    observer = Quiet()
    run, state = begin(job, mesh, observer)
    batch, state, _ = scored_batch(run, state)
    return observer.notes, {name: gradient.tree for name, gradient in gradients(run, state, batch).items()}


@pytest.mark.slow
def test_gradients_are_summed_in_the_dtype_of_the_flag_and_the_run_says_it():
    results = []
    for dtype in ("auto", "float32", "bfloat16"):
        job = small_job(GRPO, sizes=SIZES, mesh="dp2", fsdp=True, grad_reduce_dtype=dtype)
        results.append(launch(functools.partial(_noted_gradients, job), job.sizes, "cpu"))
    notes, (exact, single, half) = zip(*results, strict=True)
    for note, dtype in zip(notes, ("float64", "float32", "bfloat16"), strict=True):
        assert f"--fsdp: gradients are summed over ranks in {dtype}" in note
    assert 0 < relative(single, exact) < 2**-22
    assert 2**-12 < relative(half, exact) < 2**-7


@pytest.mark.slow
def test_a_run_without_sharded_gradients_says_nothing_of_them():
    for settings in ({}, {"mesh": "dp2", "fsdp": True, "fsdp_models": "reference"}):
        job = small_job(GRPO, sizes=SIZES, **settings)
        notes, _ = launch(functools.partial(_noted_gradients, job), job.sizes, "cpu")
        assert not any("summed over ranks" in text for text in notes)


def _of_reference(job, mesh):
    """What policy and reference score before the first update, and the dtypes and memory of all models."""
    run, state = begin(job, mesh)
    weights = [*(state.roles[name].params for name in ("policy", "critic")), run.frozen["reference"]]
    memory = [x.untyped_storage().data_ptr() for tree in weights for x in trees.leaves(tree)]
    rows, state, _ = scored_batch(run, state)
    batch = whole_batch(rows)
    dtypes = [{x.dtype for x in trees.leaves(tree)} for tree in weights]
    return batch.old_logp, batch.ref_logp, dtypes, len(memory) == len(set(memory))


@pytest.mark.parametrize("layout", [{}, {"mesh": "dp2", "fsdp": True, "fsdp_models": "reference"}])
def test_a_reference_in_bfloat16_says_what_float32_weights_say(layout):
    job = small_job(dtype="bfloat16", **layout)
    old, ref, dtypes, apart = launch(functools.partial(_of_reference, job), job.sizes, "cpu")
    assert torch.equal(old, ref) and old.abs().max() > 0
    assert dtypes == [{torch.float32}, {torch.float32}, {torch.bfloat16}]
    assert apart  # the policy is updated in place


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"mesh": "tp2", "fsdp": True}, "--fsdp does nothing without several devices to shard over"),
        ({"mesh": "dp2", "fsdp_axes": "dp"}, "--fsdp_axes=dp does nothing without --fsdp"),
        ({"mesh": "dp2", "fsdp": True, "fsdp_axes": "tp"}, "--fsdp_axes=tp: it must be some of dp,ep"),
        ({"mesh": "dp2", "fsdp_models": "policy"}, "--fsdp_models=policy does nothing without --fsdp"),
        (
            {"mesh": "dp2", "fsdp": True, "fsdp_models": "policy,actor"},
            "--fsdp_models=policy,actor: this run has no actor; it has policy, critic, reference",
        ),
        (
            {"mesh": "dp2", "fsdp": True, "fsdp_models": "critic", "compose": GRPO},
            "this run has no critic; it has policy, reference",
        ),
        (
            {"mesh": "dp2", "fsdp": True, "fsdp_models": "reference", "compose": functools.partial(GRPO, kl_coef=0)},
            "--fsdp_models=reference: this run has no reference; it has policy",
        ),
        ({"mesh": "dp2,ep2"}, "a dense decoder has nothing to split over the expert axis"),
        (
            {"mesh": "dp2", "grad_reduce_dtype": "bfloat16"},
            "--grad_reduce_dtype=bfloat16 does nothing without --fsdp; give --fsdp too",
        ),
        (
            {"mesh": "dp2", "fsdp": True, "grad_reduce_dtype": "float64"},
            "--grad_reduce_dtype=float64: it must be one of auto, float32, bfloat16",
        ),
        (
            {"mesh": "dp2", "fsdp": True, "fsdp_models": "reference", "grad_reduce_dtype": "bfloat16"},
            "--grad_reduce_dtype=bfloat16 does nothing without a model that learns",
        ),
        ({"mesh": "dp2", "sequence_parallel": "ring"}, "--sequence_parallel=ring does nothing without sp"),
        (
            {"mesh": "sp3", "sequence_parallel": "ulysses"},
            "--sequence_parallel=ulysses: the policy has 8 query heads on a device, which do not divide over sp3; give "
            "--sequence_parallel=ring, or an sp that divides 8",
        ),
        (
            {"mesh": "sp2", "generate_mesh": "sp2"},
            "--generate_mesh=sp2: generation does not split the tokens of a row; write dp for sp",
        ),
        ({"mesh": "dp2", "split_residual": "on"}, "--split_residual=on does nothing without tp"),
        (
            {"mesh": "tp3", "split_residual": "on"},
            "--split_residual=on: the tokens of a micro-batch are a multiple of 8, which tp3 does not divide; leave",
        ),
        ({"remat": "half"}, "--remat=half: it must be one of none, full, selective"),
    ],
)
def test_flags_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        small_job(**settings)
