"""The dry run of learning from given texts: its rows, its phases, its meshes."""

import pytest
import torch
from dry_jobs import CPU, H100, plain, small, write_config

from funrl import trees
from funrl.cost import dry_run
from funrl.cost.rows import full_batch
from funrl.cost.tracing.estimate import tracer_of
from funrl.mesh.mesh import single
from funrl.trainer.jobs.build import build
from funrl.trainer.settings.declaration import SettingsError


def test_rows_are_those_of_the_trainer():
    batch = full_batch(small("reward_model", {"margin": True}), 30, 4)
    assert batch.tokens.shape == (4, 64) and batch.length.tolist() == [62] * 4  # two texts of 30 tokens and one to read
    assert batch.mask.sum(1).tolist() == [2] * 4 and batch.margin is not None
    batch = full_batch(small("dpo"), 30, 4)
    assert batch.mask.sum(1).tolist() == [58] * 4 and batch.segments.max() == 2
    batch = full_batch(small("sft"), 30, 4)
    assert batch.tokens.shape == (4, 32) and batch.mask.sum(1).tolist() == [29] * 4


@pytest.mark.parametrize(
    "name, phases",
    [
        ("sft", ["update_policy"]),
        ("dpo", ["score_reference", "update_policy"]),
        ("simpo", ["update_policy"]),
        ("reward_model", ["update_reward_model"]),
    ],
)
def test_phases_are_scores_of_what_is_frozen_and_updates(name, phases):
    job = small(name)
    estimate = dry_run.estimate(job, 30, CPU)
    assert list(estimate.phases) == phases
    learns = next(iter(job.algorithm.losses))
    assert estimate.parameters == trees.count(job.models[learns].shapes)
    states = 4 * estimate.parameters
    for costs in estimate.phases.values():
        assert costs.peak["weights"] == states * (1 + (name == "dpo"))
        assert costs.peak["optimizer"] == pytest.approx(2 * states, rel=1e-2)


@pytest.mark.slow
def test_deep_models_and_many_micro_batches_are_on_the_line():
    job = small("dpo", sizes={"layers": 7}, batch_prompts=12)  # three micro-batches of four rows
    parts = build(job, single(), lambda _: None)
    exact = dry_run.trace_step(job, parts, dry_run.full_rows(job, parts, 30, 12), tracer_of(job, parts, CPU))
    estimate = dry_run.estimate(job, 30, CPU)
    for phase, costs in exact.phases.items():
        assert estimate.phases[phase].total == pytest.approx(costs.total, rel=0.1), phase
        assert estimate.phases[phase].flops == pytest.approx(costs.flops, rel=1e-6), phase


@pytest.mark.slow
def test_any_mesh_and_a_table_for_each_model(tmp_path):
    model, mesh = write_config(tmp_path, num_hidden_layers=4), "dp4,tp2"
    flags = {"model": model, "mesh": mesh, "dtype": "bfloat16", "batch_prompts": 16}
    whole, both, policy = (
        dry_run.estimate(plain("dpo", H100.memory, **flags, **fsdp), 64, H100).phases
        for fsdp in ({}, {"fsdp": True}, {"fsdp": True, "fsdp_models": "policy"})
    )
    job = plain("dpo", model=model)
    share = trees.count(job.model.shapes) / 2  # of a tensor rank, norms apart
    norms = 2 * 64 * job.model.config.layers + 64
    for item, reference in ((whole, 1), (both, 4), (policy, 1)):
        trained = 1 if item is whole else 4
        least = 4 * share / trained + 2 * share / reference
        held = item["score_reference"].peak["weights"]
        assert least <= held + 0.1 * least and (item is both or held <= least + 8 * norms + 2 * share)
    assert policy["score_reference"].peak["weights"] > both["score_reference"].peak["weights"]
    messages = [row["score_reference"].traffic for row in (whole, both, policy)]
    gathers = [sum(op == "all_gather_into_tensor" for op, _ in those) for those in messages]
    assert gathers == [1, 2, 1]  # of tokens over tensor ranks; where the reference is sharded, of weights too
    assert not torch.distributed.is_initialized()


def test_a_text_may_be_as_long_as_the_models_positions_and_no_longer(tmp_path):
    model = write_config(tmp_path)
    job = plain("sft", model=model)
    assert dry_run.check_width(job, 4096) == 4096 and dry_run.check_width(plain("dpo", model=model), 4096) == 2 * 4096
    with pytest.raises(SettingsError, match="--text_tokens=4097: a row has 4097 tokens, and the model 4096 positions"):
        dry_run.estimate(job, 4097, CPU)
    with pytest.raises(SettingsError, match="--text_tokens=4096 "):  # a value head reads at one token more
        dry_run.check_width(plain("reward_model", model=model), 4096)
