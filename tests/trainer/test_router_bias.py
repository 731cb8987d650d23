"""Balance of experts by the bias that they are chosen by: a router becomes even without a loss."""

import dataclasses

import pytest
import torch
from small_runs import GRPO, begin, one_step, small_job
from test_experts_on_meshes import DEEPSEEK

from funrl import trees
from funrl.mesh.mesh import single
from funrl.models import decoder_model, with_fields
from funrl.models.huggingface import directories as hf
from funrl.models.weight_dtypes import cast_weights
from funrl.rollout.certificate import certify
from funrl.tasks import arithmetic
from funrl.trainer.jobs.sharding import check_experts
from funrl.trainer.settings.checks import check_together
from funrl.trainer.settings.declaration import SettingsError
from funrl.trainer.settings.settings import settings_of, with_flags
from funrl.trainer.steps.optimizer import with_gradient
from funrl.trainer.steps.router_losses import biases_of, move_biases_


def run_with(rate, **more):
    job = small_job(GRPO, DEEPSEEK, task="arithmetic_moe", minibatches=1, lr=1e-9, token_budget=48, **more)
    return begin(dataclasses.replace(job, settings=with_flags(job.settings, router_bias_rate=rate)), single())


def test_an_expert_with_less_than_the_mean_is_chosen_more_easily():
    params = {"layers": ({"mlp": {"gate": torch.ones(2)}}, {"mlp": {"router_bias": torch.zeros(4)}})}
    move_biases_(params, torch.tensor([[4.0, 0, 2, 2]], dtype=torch.float64), 0.25)
    assert params["layers"][1]["mlp"]["router_bias"].tolist() == [-0.25, 0.25, 0, 0]
    assert params["layers"][0]["mlp"]["gate"].tolist() == [1, 1]


@pytest.mark.slow
@pytest.mark.parametrize("rate", [0.0, 0.05])
def test_an_uneven_router_becomes_even(rate):
    run, state = run_with(rate)
    (bias,) = biases_of(state.roles["policy"].params)
    bias += torch.arange(8) / 20  # the last experts are chosen first
    begun, loads = bias.clone(), []
    for _ in range(8):
        state, metrics = one_step(run, state)
        loads.append(metrics["router/load_max"])
    (bias,) = biases_of(state.roles["policy"].params)
    if not rate:
        assert torch.equal(bias, begun) and min(loads) > 2
        return
    assert loads[0] > 2.5 and max(loads[-2:]) < 0.7 * loads[0]
    steps = (bias - begun) / rate
    assert (steps - steps.round()).abs().max() < 1e-9 and steps[7] < -3 and steps[0] > 3
    held = dict(run.parts.generator.engine.held_weights())
    assert torch.equal(held["layers/1/mlp/router_bias"], bias)
    moments = [x for name, x in trees.named(state.roles["policy"].opt_state) if name.endswith("router_bias")]
    assert moments and not any(x.any() for x in moments)


def test_what_no_gradient_moves_does_not_decay_with_all_other_weights():
    job = small_job(GRPO, DEEPSEEK, task="arithmetic_moe", token_budget=48, weight_decay=0.5, decay_all=True)
    run, state = begin(job, single())
    params = state.roles["policy"].params
    (bias,) = biases_of(params)
    bias += torch.arange(8) / 20
    begun = bias.clone()
    norm = params["norm"].clone()
    state, _ = one_step(run, state)
    (bias,) = biases_of(state.roles["policy"].params)
    assert torch.equal(bias, begun) and not torch.equal(state.roles["policy"].params["norm"], norm)
    assert with_gradient({"layers": ({"layer_scale": bias, "norm": bias},)}) == {
        "layers": ({"layer_scale": False, "norm": True},)
    }


def test_biases_stay_in_float32_wherever_other_weights_are_bfloat16(tmp_path):
    """One that is large beside its steps would not move otherwise."""
    run, state = run_with(0.001, dtype="bfloat16")
    role, engine = run.parts.roles["policy"], run.parts.generator.engine
    (bias,) = biases_of(state.roles["policy"].params)
    bias += 14
    state, _ = one_step(run, state)
    steps = (bias - 14) / 0.001
    assert (steps - steps.round()).abs().max() < 2e-3 and steps.abs().min() < 1.1 and steps.any()
    held = dict(engine.held_weights())
    assert held["layers/1/mlp/router_bias"].equal(bias) and held["embed"].dtype == torch.bfloat16
    assert certify(role.placed, state.roles["policy"].params, engine, state.version)["sync/verified"] == 1
    assert biases_of(run.frozen["reference"])[0].dtype == torch.float32
    hf.save(tmp_path, role.placed.model, cast_weights(state.roles["policy"].params, torch.bfloat16))
    model, params = hf.load(tmp_path)
    assert biases_of(params)[0].equal(bias) and model.config.source.dtype == "bfloat16"
    assert params["embed"].dtype == torch.bfloat16


def test_models_without_such_a_bias_and_adapters_are_refused():
    for task, item in (("arithmetic", "with experts"), ("arithmetic_moe", "that chooses experts by biases")):
        with pytest.raises(SettingsError, match=f"--router_bias_rate=0.001 does nothing without a model {item}"):
            small_job(GRPO, None, task=task, router_bias_rate=0.001)
    model = decoder_model(with_fields(arithmetic.model_config(), **DEEPSEEK))
    check_experts(settings_of(router_bias_rate=0.001), [model])
    with pytest.raises(SettingsError, match=r"with --lora_rank=2: the biases belong to the frozen base"):
        check_together(settings_of(router_bias_rate=0.001, lora_rank=2))
