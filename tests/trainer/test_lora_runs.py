"""Runs with adapters: one base, which is the reference; what is saved, synced and refused."""

import functools

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_runs import GRPO, PPO, Quiet, begin, one_step, scored_batch, small_job
from test_checkpoint import assert_equal_steps, run, run_to_resume

from funrl import trees
from funrl.algos.recipes.reward_model import reward_model
from funrl.algos.recipes.sft import sft
from funrl.mesh.mesh import single
from funrl.models import with_value_head
from funrl.models.huggingface import directories as hf
from funrl.models.huggingface.names import names_of
from funrl.models.lora import is_trained
from funrl.rollout.certificate import SyncError, certify
from funrl.trainer import offload
from funrl.trainer.checkpoints.checkpoint import complete_checkpoints, recorded
from funrl.trainer.jobs.learning_rates import learning_rates
from funrl.trainer.loop import train_loop
from funrl.trainer.phases import prove_sync
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.steps.sync import compare_base, sync
from funrl.trainer.storage.shard_server import CheckpointError

LORA = {"lora_rank": 2, "lora_alpha": 4.0}
WITH_REFERENCE = functools.partial(PPO, kl_coef=0.05)


def test_the_base_is_the_reference_and_only_adapters_are_in_the_state():
    run, state = begin(small_job(WITH_REFERENCE, minibatches=1, **LORA), single())
    assert list(run.frozen) == ["base"] and {"reference", "policy", "critic"} <= set(run.parts.roles)
    before = trees.clone(run.frozen["base"])
    rows, _, _ = scored_batch(run, state)
    assert torch.equal(rows.batch.old_logp, rows.batch.ref_logp) and rows.batch.ref_logp.any()
    for _ in range(2):
        state, metrics = one_step(run, state)
    rows, _, _ = scored_batch(run, state)
    assert not torch.equal(rows.batch.old_logp, rows.batch.ref_logp) and metrics["critic/grad_norm"] > 0
    assert all(map(torch.equal, trees.leaves(before), trees.leaves(run.frozen["base"])))
    for role in state.roles.values():
        assert all(is_trained(name) for name, _ in trees.named(role.params))
        own = trees.count(role.params)
        assert own < trees.count(before) and 2 * own <= trees.count(role.opt_state) <= 2 * own + 8
    assert all(x.any() for name, x in trees.named(state.roles["critic"].params))


def test_the_engine_adds_adapters_to_a_base_and_both_are_certified():
    run, state = begin(small_job(GRPO, **LORA), single())
    assert prove_sync(run, state, first=True)["sync/verified"] == 1.0
    generator, before = run.parts.generator, trees.clone(run.frozen["base"])
    sent = []
    load = generator.whole.load
    generator.whole.load = lambda *args: sent.append("base") or load(*args)
    state, _ = one_step(run, state)
    assert not sent and generator.whole.version == 0 and generator.engine.version == state.version == 2
    role, engine = run.parts.roles["policy"], generator.engine
    params = role.whole(state.roles["policy"].params, run.frozen)
    metrics = certify(role.placed, params, engine, state.version, probes=True)
    assert metrics["sync/verified"] == 1.0 and metrics["sync/probe_gap"] < 1e-12
    assert all(map(is_trained, engine.weights.names)) and len(engine.weights.names) == 28
    assert all(map(torch.equal, trees.leaves(before), trees.leaves(run.frozen["base"])))

    other = trees.map(torch.clone, state.roles["policy"].params)
    other["layers"][1]["mlp"]["up_lora_b"][3, 1] += 1e-9
    engine.load(engine.weights.named(other), state.version)
    with pytest.raises(SyncError, match=r"layers/1/mlp/up_lora_b differs on rank 0; 1 of 28 weights"):
        certify(role.placed, params, engine, state.version)
    before["layers"][0]["attn"]["k"][0, 0, 0] += 1e-9
    with pytest.raises(SyncError, match=r"layers/0/attn/k differs on rank 0; 1 of 21 weights"):
        compare_base(run.parts, {"base": before})


def test_an_engine_that_takes_no_adapters_holds_merged_weights():
    run, state = begin(small_job(GRPO, engine="hf", dtype="float32", **LORA), single())
    state, _ = one_step(run, state)
    role, engine = run.parts.roles["policy"], run.parts.generator.engine
    params = role.whole(state.roles["policy"].params, run.frozen)
    assert certify(role.placed, params, engine, state.version)["sync/verified"] == 1.0
    assert run.parts.generator.base is None and not any(map(is_trained, engine.weights.names))
    base = trees.clone(run.frozen["base"])
    sync(run.parts, state, frozen=run.frozen)  # it takes what is merged, and leaves the base as it is
    assert all(map(torch.equal, trees.leaves(base), trees.leaves(run.frozen["base"])))


@pytest.mark.slow
def test_a_resumed_run_has_the_same_bits_and_no_base_in_its_checkpoints(tmp_path):
    _, steps, _, weights = run_to_resume(tmp_path / "checkpoints", compose=WITH_REFERENCE, **LORA)
    assert (tmp_path / "base" / "model.safetensors").exists()
    newest = complete_checkpoints(tmp_path / "checkpoints")[1]
    names = [name for name in recorded(newest).arrays if "/params/" in name]
    assert names and all(is_trained(name.split("/params/")[1]) for name in names)
    _, resumed, _, ends = run(tmp_path / "checkpoints", compose=WITH_REFERENCE, resume=True, run_dir="x", **LORA)
    assert_equal_steps(resumed, steps[1:])
    assert all(map(torch.equal, ends, weights))


@pytest.mark.slow
def test_a_checkpoint_of_other_adapters_or_of_another_base_is_refused(tmp_path):
    run(tmp_path / "checkpoints", compose=GRPO, steps=2, save_every="2", **LORA)
    again = functools.partial(run, tmp_path / "checkpoints", compose=GRPO, resume=True, run_dir="x")
    flags = "give --lora_rank=2 --lora_alpha=4 --lora_targets=q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
    for settings in ({"lora_rank": 2}, LORA | {"lora_targets": "q_proj"}, {}):
        with pytest.raises(CheckpointError, match=f"step-2: it holds other adapters; {flags}"):
            again(**settings)
    file = tmp_path / "base" / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] += 1e-12
    save_file(tensors, file, metadata={"format": "pt"})
    message = "the base base is not the one that its adapters were trained on: layers/1/mlp/up differs"
    with pytest.raises(CheckpointError, match=message):
        again(**LORA)


@pytest.mark.slow
def test_a_reward_model_learns_its_head_and_adapters(tmp_path):
    job = small_job(
        reward_model, None, reward=None, steps=12, batch_prompts=16, eval_prompts=32, dtype="float32", **LORA
    )
    observer = Quiet(str(tmp_path / "checkpoints"))
    outcome = train_loop(job, single(), observer)
    assert outcome.last["eval/loss"] < outcome.first["eval/loss"] - 0.05
    assert observer.params["value"].any() and "unembed" not in observer.params["decoder"]
    base, _ = hf.load(tmp_path / "base")
    assert names_of(base) == names_of(job.model) and with_value_head(base).value is not None


@pytest.mark.slow
def test_adapters_learn_from_texts():
    sizes = {"embed": 32, "layers": 2, "heads": 4, "kv_heads": 2, "head": 8, "mlp": 64}
    job = small_job(sft, sizes, reward=None, steps=8, lr=3e-2, dtype="float32", batch_prompts=16, **LORA)
    outcome = train_loop(job, single(), Quiet())
    assert outcome.last["eval/loss"] < outcome.first["eval/loss"] - 0.03


@pytest.mark.parametrize("engine", ["native", "hf"])
def test_the_base_is_offloaded_with_the_policy_but_for_what_the_engine_shares(engine):
    run, _ = begin(small_job(WITH_REFERENCE, engine=engine, dtype="float32", **LORA), single())
    plan, made = run.parts.generator.to_whole, offload.made_weights(run.parts)
    stays = dict(zip(plan.names, offload.shared(run.frozen["base"], plan, made), strict=True))
    assert {name for name, stay in stays.items() if not stay} == made
    assert stays["embed"] and len(made) == (0 if engine == "native" else 14)
    assert offload.frozen_stages(run.parts.roles) == {}  # the reference has no weights of its own


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lora_rank": 0}, "--lora_rank=0: it must be at least 1"),
        ({"lora_alpha": 8.0}, "--lora_alpha=8 does nothing without --lora_rank"),
        ({"lora_targets": "q_proj"}, "--lora_targets=q_proj does nothing without --lora_rank"),
        (LORA | {"lora_targets": "q_proj,lm_head"}, "--lora_targets=q_proj,lm_head: 'lm_head' is not one of"),
        (LORA | {"optimizer": "muon"}, "--optimizer=muon with --lora_rank=2: .* use --optimizer=adamw"),
        (
            LORA | {"fsdp": True, "fsdp_models": "policy", "mesh": "dp2"},
            "--fsdp_models=policy with --lora_rank=2: all models share one base",
        ),
    ],
)
def test_flags_that_cannot_work_are_named(settings, message):
    with pytest.raises(SettingsError, match=message):
        small_job(GRPO, **settings)


def test_adapters_learn_faster_where_no_flag_says():
    jobs = [small_job(GRPO, lr=None, **more) for more in ({}, LORA)]
    rates = [learning_rates(job.settings, job.algorithm, job.model, job.lora is not None) for job in jobs]
    assert [rate["policy"] for rate in rates] == [1e-3, 3e-3]
