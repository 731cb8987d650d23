"""Whole steps with experts on meshes, in float64, against one process: samples, losses, gradients and parameters."""

import dataclasses
import functools

import pytest
import torch
from selection import quick
from small_runs import GRPO, SIZES, assert_same, small_job, steps_program

from funrl import trees
from funrl.mesh.launch import launch
from funrl.models import expert_rows
from funrl.models.decoder import experts
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import Experts
from funrl.models.huggingface.peft_files import targets_of
from funrl.models.lora import with_lora
from funrl.models.model import Lora
from funrl.trainer.settings.settings import with_flags
from funrl.trainer.steps.router_losses import biases_of

pytestmark = pytest.mark.gloo
EXPERTS = SIZES | {"experts": Experts(count=4, per_token=2, mlp=8, dense=(0,))}
DEEPSEEK = SIZES | {
    "family": "deepseek_v3",
    "kv_heads": 4,
    "head": 6,
    "latent": LatentSizes(8, 8, 4, 2, 4),
    "experts": Experts(8, 2, 8, True, (0,), "sigmoid", True, groups=4, chosen_groups=2, scale=2.5, shared=8, wide=True),
}
BIASES = {"router_bias_rate": 0.01}
LOSSES = {"router_aux_coef": 0.1, "router_z_coef": 0.01}
SPLIT = {"split_residual": "on"}
MESHES = {
    "ep2": ("ep2", EXPERTS, LOSSES),  # gathered: a token has as many experts as there are ranks
    "ep2,sp2": (  # several micro-batches
        "ep2,sp2",
        EXPERTS,
        LOSSES | {"fsdp": True, "token_budget": 16, "generate_mesh": "ep2,dp2"},
    ),
    "ep4": ("ep4", EXPERTS, LOSSES | {"generate_mesh": "ep4"}),
    "dp2,ep2": ("dp4", EXPERTS, LOSSES | {"generate_mesh": "dp2,ep2"}),
    "ep2,tp2 deepseek": ("ep2,tp2", DEEPSEEK, BIASES | {"fsdp": True, "remat": "selective", **SPLIT}),
}


def steps_on(mesh, sizes, steps, router_bias_rate=0.0, **more):
    how = {"task": "arithmetic_moe", "token_budget": 48, "steps": steps, "minibatches": 2} | more
    job = small_job(functools.partial(GRPO, entropy_coef=0.01), sizes, mesh=mesh, **how)
    job = dataclasses.replace(job, settings=with_flags(job.settings, router_bias_rate=router_bias_rate))
    return launch(steps_program(job, steps), job.sizes, "cpu")


@functools.cache
def alone(deepseek, steps):
    return steps_on("dp1", DEEPSEEK, steps, **BIASES) if deepseek else steps_on("dp1", EXPERTS, steps, **LOSSES)


@pytest.mark.slow
@pytest.mark.parametrize("case", quick(MESHES, ["ep2"]))
def test_steps_are_those_of_one_process(case, monkeypatch):
    """Where a bound that is far too low lets all passes of the first update, and of scoring, be computed again."""
    monkeypatch.setattr(experts, "LEAST_ROWS", 0)
    monkeypatch.setattr(expert_rows, "FIRST_BOUND", 1)  # ranks are forked from this process
    mesh, sizes, more = MESHES[case]
    steps = 2 if case == "ep2" else 1  # rows of the second are of weights that an update has changed
    first, result = alone(sizes is DEEPSEEK, steps), steps_on(mesh, sizes, steps, **more)
    assert_same(result, first, 1e-9)
    if "ep" in mesh:
        assert min(metrics["router/peak_rows"] for metrics in result["metrics"]) > 0.25
    if sizes is DEEPSEEK:
        (bias,), (expected,) = (biases_of(run["weights"]["policy"]) for run in (result, first))
        assert torch.equal(bias, expected) and 0 < bias.abs().max() <= 2 * 0.01 + 1e-12
    learned = [x for name, x in _grads(first) if "expert_" in name or name.endswith("router")]
    assert len(learned) == 4 and all(x.abs().max() > 1e-6 for x in learned)


def adapted_steps(mesh, targets="all-linear", sizes=DEEPSEEK, **more):
    job = small_job(GRPO, sizes, task="arithmetic_moe", mesh=mesh, lora_rank=2, batch_prompts=2, **more)
    lora = Lora(2, 4.0, targets_of(targets, job.model))
    models = {name: with_lora(x.adapters.plain, lora) if x.adapters else x for name, x in job.models.items()}
    return launch(steps_program(dataclasses.replace(job, models=models, lora=lora), 2), job.sizes, "cpu")


ROUTED = {"ep2": {}, "dp2,ep2": {"fsdp": True}, "tp2": SPLIT, "ep2,tp2": {"fsdp": True, "remat": "selective", **SPLIT}}


@pytest.mark.slow
@pytest.mark.parametrize("mesh", quick(ROUTED, ["ep2"]))
def test_adapters_of_routers_and_experts_learn_alike_on_every_mesh(mesh):
    sizes = DEEPSEEK if "tp2" in mesh else EXPERTS
    targets = "router,experts,q_b_proj" if sizes is DEEPSEEK else "router,experts,q_proj"
    first = adapted_steps("dp1", targets, sizes)
    learned = [(name.rsplit("/", 1)[-1], x) for name, x in _grads(first, 1)]
    assert {name for name, x in learned if "expert" in name or "router" in name} == {
        f"{weight}_lora_{end}" for weight in ("router", "expert_gate", "expert_up", "expert_down") for end in "ab"
    }
    assert all(x.abs().max() > 1e-9 for _, x in learned)
    assert_same(adapted_steps(mesh, targets, sizes, **ROUTED[mesh]), first, 1e-9)


@pytest.mark.slow
def test_adapters_of_latent_attention_learn_alike_where_tensor_ranks_share_tokens():
    steps = adapted_steps
    first = steps("dp1")
    learned = {name.rsplit("/", 1)[-1] for name, x in _grads(first, 1) if x.any()}
    assert {"q_a_lora_b", "kv_a_lora_a", "kv_b_lora_b", "o_lora_a", "shared_up_lora_b", "down_lora_b"} <= learned
    assert not any("expert" in name or "router" in name for name in learned)
    assert_same(steps("tp2", **SPLIT), first, 1e-9)


def _grads(run, step=0):
    return trees.named(run["grads"][step]["policy"].tree)
