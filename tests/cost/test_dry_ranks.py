"""The dry run of several ranks: what each of them holds, and what they send."""

import math

import pytest
import torch
from dry_jobs import CPU, H100, plain, small, write_config

from funrl import trees
from funrl.cost import dry_run
from funrl.cost.tracing import estimate as cost_estimate
from funrl.cost.tracing.estimate import pretended, tracer_of
from funrl.mesh import message_sizes
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.trainer.jobs.build import build


@pytest.mark.slow
def test_tensor_ranks_hold_a_share_and_talk(tmp_path):
    how = {"model": write_config(tmp_path), "minibatches": 2}
    first, two, split = (
        dry_run.estimate(plain("grpo", mesh=mesh, generate_mesh=mesh, **how, **more), 8, CPU)
        for mesh, more in (("dp2", {}), ("dp2,tp2", {}), ("dp2,tp2", {"split_residual": "on"}))
    )
    assert two.phases["update_policy"].peak["weights"] < 0.6 * first.phases["update_policy"].peak["weights"]
    group = {text: name for name, (text, *_) in two.axes.items()}
    assert {group["dp2"], group["tp2"]} <= {name for _, name in two.phases["update_policy"].traffic}
    # of one micro-batch: the embedding, 2 a layer, and the maximum and the sums of the logits
    assert two.phases["score_policy"].traffic["all_reduce", group["tp2"]].count == 1 + 2 * 2 + 2
    # with a split residual each of the former is scattered, and what each half and the unembedding begin with gathered
    whole, parts = (
        {kind: sent for (kind, name), sent in estimate.phases["score_policy"].traffic.items() if name == group["tp2"]}
        for estimate in (two, split)
    )
    assert parts["all_reduce"].count == 2
    summed = (1 + 2 * 2, whole["all_reduce"].nbytes - parts["all_reduce"].nbytes)
    assert parts["all_gather_into_tensor"] == parts["reduce_scatter_tensor"] == summed


@pytest.mark.slow
def test_the_proof_of_a_sync_reads_the_weights_and_sends_a_few_numbers_of_each(tmp_path):
    model = write_config(tmp_path)
    flags = {"model": model, "mesh": "dp2,tp2", "generate_mesh": "dp2,tp2", "dtype": "bfloat16"}
    on, off = (dry_run.estimate(plain("grpo", verify_sync=verify, **flags), 8, CPU) for verify in (True, False))
    assert set(on.phases) - set(off.phases) == {"verify"}
    ((op, group),) = on.phases["verify"].traffic
    weights = len(trees.leaves(on.job.model.shapes))
    assert op == "all_reduce" and on.axes[group][0] == "dp2,tp2"
    assert on.phases["verify"].traffic[op, group].nbytes == 40 * (weights + 1)
    read = 16 * on.parameters / 2 / CPU.bandwidth  # half of the bfloat16 copies, which the engine shares: only once
    assert read <= on.phases["verify"].seconds < 2 * read


@pytest.mark.slow
def test_512_ranks_and_sharding_over_data(tmp_path):
    flags = {"model": write_config(tmp_path), "mesh": "dp64,tp8", "batch_prompts": 128, "samples_per_prompt": 1}
    whole, sharded = (
        dry_run.estimate(plain("grpo", H100.memory, fsdp=fsdp, **flags), 8, H100) for fsdp in (False, True)
    )
    assert sharded.phases["reshard"].peak["optimizer"] < 0.1 * whole.phases["reshard"].peak["optimizer"]
    operations = {op for op, _ in sharded.phases["update_policy"].traffic}
    assert {"all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"} <= operations
    assert not torch.distributed.is_initialized()


@pytest.mark.slow
def test_the_sharded_gradients_of_many_micro_batches_are_gradients(tmp_path):
    model = write_config(tmp_path, num_hidden_layers=3)
    job = plain("grpo", model=model, mesh="dp4", fsdp=True, batch_prompts=64, token_budget=256)
    policy = dry_run.estimate(job, 8, CPU)
    with pretended(job.sizes) as mesh:
        placed = build(job, mesh, lambda _: None).roles["policy"].placed
        shards = sum(4 * math.prod(lay.local_shape(0)) for lay in trees.leaves(placed.stored))
    for part in ("backward", "optimizer"):
        assert policy.phases["update_policy"].peaks[part]["gradients"] >= 0.95 * shards, part


def test_gradients_that_are_summed_in_bfloat16_are_half_the_bytes(tmp_path):
    model = write_config(tmp_path, num_hidden_layers=3, hidden_size=512, intermediate_size=2048)
    flags = {"model": model, "mesh": "dp4", "fsdp": True, "dtype": "bfloat16", "remat": "full"}
    wide, half = (
        dry_run.estimate(plain("sft", batch_prompts=16, grad_reduce_dtype=dtype, **flags), 8, H100)
        for dtype in ("auto", "bfloat16")
    )
    sums = [
        next(
            sent for (op, _), sent in estimate.phases["update_policy"].traffic.items() if op == "reduce_scatter_tensor"
        )
        for estimate in (wide, half)
    ]
    assert sums[1] == (sums[0].count, sums[0].nbytes / 2)
    held = [item.phases["update_policy"].peaks["backward"] for item in (wide, half)]
    layer = sum(x.numel() for x in trees.leaves(wide.job.models["policy"].shapes["layers"][0]) if x.ndim > 1)
    saved = sum(held[0].values()) - sum(held[1].values())
    assert 1.5 * layer < saved < 2.5 * layer  # bytes: each gradient of a layer on its way takes 2 instead of 4


def test_muon_sends_matrices_where_they_are_whole(tmp_path):
    flags = {"model": write_config(tmp_path), "mesh": "dp4", "fsdp": True, "batch_prompts": 16}
    sent = [
        {
            op
            for op, _ in dry_run.estimate(plain("sft", optimizer=name, **flags), 8, CPU).phases["update_policy"].traffic
        }
        for name in ("adamw", "muon")
    ]
    assert sent[1] - sent[0] == {"all_to_all_single"}


@pytest.mark.slow
def test_messages_that_layers_share_are_on_a_line_too(monkeypatch):
    """Layers in twos, of which one is left over: the line through shallow models has the messages of all of them."""
    job = small("dpo", mesh="dp16", fsdp=True, batch_prompts=128, sizes={"layers": 11})
    layer = 4 * trees.count(job.model.shapes["layers"][0])
    monkeypatch.setattr(message_sizes, "PIECE_BYTES", 3 * layer // (2 * 16))
    monkeypatch.setattr(cost_estimate, "FURTHER", 0)
    results = []
    for depth in (3, 20):  # by the line, and all of them
        monkeypatch.setattr(cost_estimate, "DEPTH", depth)
        phases = dry_run.estimate(job, 8, CPU).phases
        results.append(
            {name: {key: item.count for key, item in costs.traffic.items()} for name, costs in phases.items()}
        )
    assert results[0].keys() == results[1].keys()
    for name, counts in results[0].items():
        assert counts == pytest.approx(results[1][name]), name
    gathers = next(n for (op, _), n in results[0]["score_reference"].items() if op.startswith("all_gather"))
    assert gathers == 6 + 2  # the embedding and the unembedding go by themselves


@pytest.mark.slow
def test_no_more_collectives_are_called_on_more_ranks():
    counts = []
    for data in (2, 8, 32):
        job = small("grpo", mesh=f"dp{data},tp2", fsdp=True, batch_prompts=128)
        with pretended(job.sizes) as mesh:
            parts = build(job, mesh, lambda _: None)
            trace_step = dry_run.trace_step(job, parts, dry_run.full_rows(job, parts, 8, 4), tracer_of(job, parts, CPU))
        counts.append(
            {phase: sum(item.count for item in costs.traffic.values()) for phase, costs in trace_step.phases.items()}
        )
    assert counts[0] == counts[1] and sum(counts[0].values()) > 0
    assert all(counts[2][phase] <= count for phase, count in counts[1].items())  # over nodes these layers join


@pytest.mark.slow
def test_ranks_that_share_tokens_share_the_work():
    """Twice as many tokens go together. Each of two layers exchanges four times for them with Ulysses, twice either
    way; and eight times with a ring: queries, keys and values there, sums back, and their gradients."""
    given = {"token_budget": 128, "sizes": {"layers": 2}, "batch_prompts": 16}
    phase = dry_run.estimate(small("sft", **given), 32, CPU).phases["update_policy"]
    for form in ("ulysses", "ring"):
        job = small("sft", **given, mesh="sp2", sequence_parallel=form)
        update = dry_run.estimate(job, 32, CPU).phases["update_policy"]
        micro_batches = 16 * 32 / 256
        exchanges = sum(traffic.count for (kind, _), traffic in update.traffic.items() if kind == "all_to_all_single")
        assert exchanges / micro_batches == (8 if form == "ulysses" else 16), form
        assert phase.flops / 2 <= update.flops * (1 + 1e-9) and update.flops < 0.75 * phase.flops, form
        assert update.peak["activations"] == pytest.approx(phase.peak["activations"], rel=0.4), form


@pytest.mark.slow
def test_ranks_that_share_tokens_gather_states():
    """Of each micro-batch a layer's ends, 4 heads of 8 x (6 + 8) numbers, and 3 tokens of 56 channels; and back."""
    nets = {"layers": 2, "family": "qwen3_next", "mixers": (GatedDeltaNet(2, 4, 8, 6),)}
    given = {"token_budget": 128, "mesh": "sp2", "batch_prompts": 16}
    job = small("sft", sizes=nets, **given)
    plain_job = small("sft", sizes={"layers": 2}, sequence_parallel="ring", **given)
    update, other = (dry_run.estimate(item, 32, CPU).phases["update_policy"] for item in (job, plain_job))
    passed = 4 * 8 * (6 + 8) + 3 * (2 * 2 * 8 + 4 * 6)
    assert [layer.passed for layer in job.model.abilities.cost.layers] == [passed] * 2
    for way in ("all_gather_into_tensor", "reduce_scatter_tensor"):
        sent, before = (
            sum(t.nbytes for (op, _), t in element.traffic.items() if op == way) for element in (update, other)
        )
        micro_batches = 16 * 32 / 256
        assert sent - before == micro_batches * 2 * 2 * passed * 4
