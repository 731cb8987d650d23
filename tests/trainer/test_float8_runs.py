"""Runs whose engine multiplies in 8 bits: their gap, their proof, and what is refused."""

import functools
import math

import pytest
import torch
from selection import quick
from small_runs import GRPO, begin, one_step, run_steps, scored_batch, small_job

import funrl
from funrl.algos import corrected, importance_weights
from funrl.algos.recipes.dppo import dppo
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.cost.dry_run import engine_bytes
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields
from funrl.models.decoder.routing import Experts
from funrl.rollout.native.engine import NativeEngine
from funrl.trainer.gap import gap_problem
from funrl.trainer.jobs.engines import check_engine
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.clock import Clock
from funrl.trainer.steps.sync import begin_proof, sync

SIZES = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 16, "mlp": 64}
FLOAT8 = {"rollout_dtype": "float8", "compose": rollout_is, "sizes": SIZES}


def corrected_grpo():
    return corrected(GRPO(), importance_weights("token", high=2.0))


def test_the_cache_holds_a_completion_and_its_control_row():
    """With --kv_cache_gb for two rows a run begins, with less it is refused before it has a process."""
    job = small_job(**FLOAT8, max_new_tokens=40)
    model = job.model
    longest = max(len(example.tokens) for example in (*job.task.prompts, *job.task.heldout)) + 40
    unshrunk = small_job(**FLOAT8 | {"sizes": None}, max_new_tokens=40).model
    row = -(-longest // 16) * unshrunk.page_bytes(single(), 16, job.dtype) / 1e9
    assert small_job(**FLOAT8, max_new_tokens=40, kv_cache_gb=2.01 * row).model.config == model.config
    with pytest.raises(SettingsError, match=rf"{longest} tokens.* on a rank, for it and a control row; give it"):
        small_job(**FLOAT8, max_new_tokens=40, kv_cache_gb=1.9 * row)


@pytest.mark.parametrize("compose", quick([rollout_is, dppo, corrected_grpo], [rollout_is]))
def test_a_run_in_8_bits_shows_its_gap_and_proves_its_weights(compose):
    run = funrl.train(
        compose(), steps=2, rollout_dtype="float8", batch_prompts=16, warmstart_steps=0, probe_sync_every=1
    )
    for metrics in run.metrics:
        assert metrics["sync/verified"] == 1 and 0 < metrics["sync/probe_gap"] < 1
        gaps = [metrics[f"rollout/logprob_gap_{name}"] for name in ("p50", "p99", "p999", "max")]
        assert 1e-4 < gaps[0] < gaps[1] <= gaps[2] <= gaps[3] < 1
        assert abs(metrics["rollout/ratio_mean"] - 1) < 0.02
        assert 0.9 < metrics["rollout/effective_share"] < 1
        assert 1e-4 < metrics["rollout/control_gap_mean"] < 0.3 and 0 < metrics["rollout/control_kept"] <= 1


def test_the_engine_rounds_and_the_trainer_does_not():
    rows, metrics = {}, {}
    for dtype in ("auto", "float8"):
        run, state = begin(small_job(**FLOAT8 | {"rollout_dtype": dtype, "compose": corrected_grpo}), single())
        assert (gap_problem(run.job, run.parts) is None) == (dtype == "auto")
        rows[dtype], _, metrics[dtype] = scored_batch(run, state)
    assert metrics["auto"]["rollout/logprob_gap_max"] == 0 == metrics["auto"]["rollout/logprob_gap_p999"]
    assert metrics["auto"]["rollout/ratio_mean"] == metrics["auto"]["rollout/effective_share"] == 1
    assert 1e-5 < metrics["float8"]["rollout/logprob_gap_p50"] <= metrics["float8"]["rollout/logprob_gap_max"]
    first = {name: x.batch for name, x in rows.items()}
    same = (first["auto"].tokens == first["float8"].tokens).all(1)
    assert torch.equal(first["auto"].old_logp[same], first["float8"].old_logp[same])


@pytest.mark.gloo
@pytest.mark.parametrize("settings", [{"mesh": "dp2"}, {"mesh": "dp2", "generate_mesh": "tp2"}], ids=str)
def test_ranks_generate_in_8_bits(settings):
    metrics = run_steps(1, **FLOAT8, **settings)["metrics"][0]
    assert 0 < metrics["rollout/logprob_gap_p50"] < 0.3
    assert 0 < metrics["rollout/control_gap_mean"] < 0.3


@pytest.mark.slow
def test_adapters_are_added_to_a_base_in_8_bits():
    run, state = begin(small_job(**FLOAT8, lora_rank=2), single())
    generator = run.parts.generator
    assert isinstance(generator.whole, NativeEngine) and generator.base is not None
    state = sync(run.parts, state, frozen=run.frozen)
    assert begin_proof(run.parts, state, run.frozen, run.job.settings, Clock(), first=True)["sync/verified"] == 1
    state, metrics = one_step(run, state)
    assert 0 < metrics["rollout/logprob_gap_mean"] < 0.3 and math.isfinite(metrics["actor/grad_norm"])


def test_bytes_of_the_quantized_weights_are_counted():
    totals = []
    for dtype in ("auto", "float8"):
        run, _ = begin(small_job(**FLOAT8 | {"rollout_dtype": dtype}), single())
        totals.append(sum(engine_bytes(run.job, run.parts, run.parts.generator)))
    rows = 2 * (64 + 32 + 32 + 32 + 64 + 64 + 32)
    numbers = 2 * 32 * (64 + 32 + 32 + 64 + 3 * 64)
    assert totals[1] - totals[0] == numbers + 4 * rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"compose": GRPO}, "rollout_dtype=float8: products of generation are rounded .* leave --rollout_dtype out"),
        ({"compose": functools.partial(rollout_is, sampled_by="old_logp")}, "does not depend on rollout_logp"),
        ({"engine": "hf"}, "rollout_dtype=float8 does nothing without --engine=native; leave it out"),
    ],
)
def test_what_has_no_correction_or_ability_is_refused(settings, message):
    with pytest.raises(SettingsError, match=message):
        small_job(**FLOAT8 | settings)


def test_a_mixture_of_experts_is_refused():
    job = small_job(**FLOAT8)
    model = decoder_model(with_fields(job.model.config, **SIZES, experts=Experts(4, 2, 16)))
    with pytest.raises(SettingsError, match="rollout_dtype=float8: products of experts are not taken in 8 bits"):
        check_engine(job.settings, model, single(), job.sampling, job.eval_sampling)
