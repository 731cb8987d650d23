"""Bytes of weights, gradients and moments that an update in bfloat16 moves on a GPU, and the memory of the copies."""

import pytest
from dry_jobs import CPU, H100, SIZES, small, write_config

from funrl import trees
from funrl.algos import grpo
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import COMMUNICATOR_BYTES, HARDWARE
from funrl.mesh import sums
from funrl.trainer.settings.settings import settings_of

GATHERED = {"mesh": "dp2", "fsdp": True}


def updated(hardware=H100, **flags):
    """The estimate of an update of two micro-batches."""
    job = small("grpo", {"kl_coef": 0.0}, batch_prompts=8, samples_per_prompt=2, token_budget=512, **flags)
    return job, dry_run.estimate(job, 40, hardware)


def test_each_number_of_a_weight_is_moved_once_by_the_sum_and_once_by_the_step():
    job, estimate = updated(dtype="bfloat16")
    moved = estimate.phases["update_policy"].weight_bytes
    count = trees.count(job.model.shapes)
    assert moved["add_leaves"] == (2 + 2 + 4) * count
    assert moved["adamw_leaves"] == pytest.approx((7 * 4 + 2) * count, rel=0.01)  # and a few scalars
    assert "_to_copy" not in moved  # no weight or gradient is cast: products sum the unembedding's in float32
    assert not any(name.startswith("_foreach") for name in moved)


def test_copies_are_held_beside_the_weights():
    wide, half = (updated(dtype=dtype)[1].phases["update_policy"].peaks for dtype in ("float32", "bfloat16"))
    for part in ("forward", "optimizer"):
        assert half[part]["weights"] == pytest.approx(1.5 * wide[part]["weights"], rel=0.01)
    assert half["optimizer"]["gradients"] == pytest.approx(wide["optimizer"]["gradients"])


@pytest.mark.parametrize(("hardware", "flags"), [(CPU, {}), (H100, GATHERED)])
def test_other_updates_are_counted_too(hardware, flags):
    _, estimate = updated(hardware, dtype="bfloat16", **flags)
    moved = estimate.phases["update_policy"].weight_bytes
    assert ("adamw_leaves" in moved) == hardware.accelerator
    assert ("_foreach_addcmul_" in moved) == (not hardware.accelerator)


def test_sums_over_ranks_run_beside_the_last_backward_pass(monkeypatch):
    monkeypatch.setattr(sums, "SUM_BYTES", 1 << 12)
    sent = updated(mesh="dp2", dtype="bfloat16")[1].phases["update_policy"]
    ((key, every),) = ((key, traffic) for key, traffic in sent.traffic.items() if key[0] == "all_reduce")
    # The embedding's gradient is the last, and a rank waits for its sum.
    embedding = 4 * SIZES["vocab"] * SIZES["embed"]
    assert sent.early[key].nbytes == pytest.approx(every.nbytes - embedding, rel=0.01)


@pytest.mark.parametrize(
    ("mesh", "flags", "count"),
    [  # with all combinations of axes these were 1, 3 and 7
        ("dp2", {}, 1),
        ("dp2,tp2", {"fsdp": True}, 3),
        ("dp2,sp2,tp2", {"fsdp": True}, 5),
    ],
)
def test_communicators_in_use_are_held_throughout(mesh, flags, count):
    phases = updated(mesh=mesh, dtype="bfloat16", **flags)[1].phases
    assert {costs.peak["communicators"] for costs in phases.values()} == {float(count * COMMUNICATOR_BYTES)}


def test_on_a_cpu_communicators_take_no_memory_of_a_device():
    phases = updated(CPU, mesh="dp2")[1].phases
    assert not any(costs.peak.get("communicators") for costs in phases.values())


@pytest.mark.slow
def test_an_update_of_1_7b_moves_at_most_70_gb(tmp_path):
    """28 layers of 2048/16/8/128/6144 with a tied embedding; 148 GB by casts, sums and steps in passes of their own."""
    sizes = {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    sizes |= {"head_dim": 128, "intermediate_size": 6144, "vocab_size": 151936, "tie_word_embeddings": True}
    path = write_config(tmp_path, model_type="qwen3", architectures=["Qwen3ForCausalLM"], **sizes)
    batch = {"batch_prompts": 4, "samples_per_prompt": 2, "token_budget": 4096, "max_new_tokens": 512, "minibatches": 1}
    settings = settings_of(model=path, mesh="dp1", dtype="bfloat16", **batch)
    job = dry_run.plain_job(settings, grpo(kl_coef=0.0), HARDWARE["h200"].memory)
    moved = dry_run.estimate(job, 512, HARDWARE["h200"]).phases["update_policy"].weight_bytes
    # The two gradients of the tied embedding are added in each micro-batch, by "add". The unembedding's is summed over
    # blocks of tokens by its products; the norm belongs to clipping.
    assert moved["adamw_leaves"] + moved["add_leaves"] + moved["add"] < 70e9
    assert moved["linalg_vector_norm"] < 7e9
    assert set(moved) == {"adamw_leaves", "add_leaves", "add", "linalg_vector_norm"}
