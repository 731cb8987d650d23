"""The dry run of adapters: one base for all roles, states and gradients of what learns alone."""

import pytest
from dry_jobs import CPU, H100, plain, settings, small, write_config
from test_dry_run import trace

from funrl import trees
from funrl.algos.recipes import recipe
from funrl.cost import dry_run
from funrl.cost.report import rank_report
from funrl.models.lora import trained_part

LORA = {"lora_rank": 4}


def own(job, role):
    model = job.models[role]
    return trees.count(trained_part(model, model.shapes))


@pytest.mark.slow
def test_a_step_holds_one_base_and_the_states_of_what_learns():
    job = small("ppo", arguments={"kl_coef": 0.1}, **LORA)
    assert {"policy", "critic", "reference"} <= set(job.models)
    resting, learning = trace(job, 8, 8).resting, own(job, "policy") + own(job, "critic")
    base = trees.count(job.model.shapes)
    assert resting["weights"] == 4 * (base + learning)
    assert 8 * learning <= resting["optimizer"] <= 8 * learning + 64 and learning < 0.3 * base
    update = trace(job, 8, 8).phases["update_policy"].peaks["optimizer"]
    assert update["gradients"] <= 4 * own(job, "policy")


def test_a_reward_model_s_base_has_no_unembedding():
    job = small("reward_model", **LORA)
    without = trees.count(job.model.shapes) - job.model.shapes["unembed"].numel()
    assert trace(job, 8, 8).resting["weights"] == 4 * (without + own(job, "reward_model"))


@pytest.mark.slow
def test_gradients_of_the_base_are_neither_computed_nor_sent(tmp_path):
    flags = {"model": write_config(tmp_path, num_hidden_layers=3), "mesh": "dp4", "fsdp": True, "batch_prompts": 64}
    whole, adapted = (dry_run.estimate(plain("grpo", **flags, **more), 8, CPU) for more in ({}, LORA))
    phase, full = adapted.phases["update_policy"], whole.phases["update_policy"]
    assert phase.flops < 0.8 * full.flops

    def sent(costs, op):
        return sum(traffic.nbytes for (name, _), traffic in costs.traffic.items() if name == op)

    ratio = own(adapted.job, "policy") / trees.count(adapted.job.model.shapes)
    assert 0 < sent(phase, "reduce_scatter_tensor") <= 1.1 * ratio * sent(full, "reduce_scatter_tensor")
    assert sent(phase, "all_gather_into_tensor") > 0.9 * sent(full, "all_gather_into_tensor")
    assert phase.total < full.total


@pytest.mark.slow
def test_the_engine_holds_the_trainer_s_base_and_adapters(tmp_path):
    """Where nothing moves the engine holds the trainer's own weights."""
    flags = {"model": write_config(tmp_path), "offload": "params,optimizer"}
    whole, adapted = (dry_run.estimate(plain("grpo", **flags, **more), 8, H100) for more in ({}, LORA))
    base = 4 * trees.count(adapted.job.model.shapes)
    learning = 4 * own(adapted.job, "policy")
    assert whole.phases["reshard"].peak["weights"] == 2 * base  # the policy, which the engine shares, and the reference
    assert adapted.phases["reshard"].peak["weights"] == base + learning
    assert adapted.phases["generate"].peak["weights"] == pytest.approx(base + learning)


@pytest.mark.slow
def test_a_sync_sends_adapters_alone_and_generation_multiplies_by_them(tmp_path):
    flags = {"model": write_config(tmp_path), "mesh": "dp2", "fsdp": True}
    whole, adapted = (dry_run.estimate(plain("grpo", **flags, **more), 8, CPU) for more in ({}, LORA))

    def sent(estimate):
        return sum(traffic.nbytes for traffic in estimate.phases["reshard"].traffic.values())

    ratio = own(adapted.job, "policy") / trees.count(adapted.job.model.shapes)
    assert 0 < sent(adapted) <= 1.1 * ratio * sent(whole)
    matrices = sum(x.numel() for x in trees.leaves(adapted.job.model.shapes["layers"]) if x.ndim > 1)
    generated = [estimate.phases["generate"].flops for estimate in (whole, adapted)]
    # Each token meets each number of a matrix once; attention and logits are the same.
    more = generated[0] * own(adapted.job, "policy") / (matrices + adapted.job.model.shapes["embed"].numel())
    assert 0.9 * more < generated[1] - generated[0] < 1.2 * more


@pytest.mark.slow
def test_the_report_says_what_learns(tmp_path):
    flags = settings(model=write_config(tmp_path), dry_run=True, **LORA)
    text, _, _ = rank_report(flags, recipe("grpo")(), dry_run.RankWork(8, CPU))
    assert text.startswith("llama, 0.2 M parameters, of which 0.0 M are trained (rank 4), bfloat16, 1 device")


def test_a_base_of_8_billion_in_4_bits_takes_5_instead_of_16_gigabytes(tmp_path):
    sizes = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8}
    flags = {"model": write_config(tmp_path, **sizes, intermediate_size=14336, vocab_size=32000), "dtype": "bfloat16"}
    forms = {"auto": None, "nf4": None}
    for form in forms:
        job = plain("grpo", **flags, **LORA, base_format=form, token_budget=1024)
        forms[form] = dry_run.estimate(job, 8, H100)
    layers = 32 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 14336)
    others = 2 * (2 * 32000 * 4096 + 65 * 4096)
    for phase in ("generate", "update_policy"):
        whole, stored = (estimate.phases[phase].peak["weights"] for estimate in forms.values())
        learning = 4 * own(forms["nf4"].job, "policy")
        assert stored == pytest.approx(layers * 4.5 / 8 + others + learning, rel=0.02)
        assert whole - stored == pytest.approx(layers * (16 - 4.5) / 8, rel=0.02)
    assert forms["auto"].parameters == forms["nf4"].parameters
