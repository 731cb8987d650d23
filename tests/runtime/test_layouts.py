"""Two PPO steps in float64 are the same in every layout: samples, losses, gradients and weights to 1e-9."""

import functools

import pytest
import torch._dynamo  # noqa: F401  checkpointing imports it: here once, and not in every rank
from small_runs import PPO, assert_same, run_steps, small_job

pytestmark = pytest.mark.gloo

SIZES = {"embed": 16, "layers": 2, "heads": 8, "kv_heads": 4, "head": 4, "mlp": 32}
LAYOUTS = {
    "dp4 fully sharded": {"mesh": "dp4", "fsdp": True},
    "dp2,tp2 fully sharded": {"mesh": "dp2,tp2", "fsdp": True},
    "dp2,tp2 fully sharded to tp4": {"mesh": "dp2,tp2", "fsdp": True, "generate_mesh": "tp4", "remat": "selective"},
    "dp2,tp2 computed again": {"mesh": "dp2,tp2", "remat": "full"},
    "dp2,ep2 sharded in groups": {"mesh": "dp2,ep2", "fsdp": True, "fsdp_axes": "ep"},
    "dp8": {"mesh": "dp8"},
    "dp4,tp2 to dp2,tp4": {"mesh": "dp4,tp2", "generate_mesh": "dp2,tp4"},
}


def _steps(**settings):
    compose = functools.partial(PPO, entropy_coef=0.01, kl_coef=0.05)
    return run_steps(2, compose=compose, sizes=SIZES, batch_prompts=8, token_budget=64, **settings)


@functools.cache
def _alone():
    return _steps(mesh="dp1")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ppo_is_the_same_in_every_layout(layout):
    assert_same(_steps(**LAYOUTS[layout]), _alone(), 1e-9)


@pytest.mark.parametrize(
    "settings,message",
    [
        ({"mesh": "tp2", "fsdp": True}, "--fsdp: the mesh tp2 has one device over dp,ep"),
        ({"mesh": "dp2", "fsdp_axes": "dp"}, "--fsdp_axes=dp says what --fsdp shards over; give --fsdp"),
        ({"mesh": "dp2", "fsdp": True, "fsdp_axes": "tp"}, "--fsdp_axes=tp: 'tp' is none of dp, ep"),
        ({"mesh": "dp3", "fsdp": True}, "embed has size 64, which does not divide over dp3"),
        ({"mesh": "dp2,ep2"}, "a dense decoder has nothing to split over the expert axis"),
        ({"remat": "half"}, "--remat=half: it must be one of none, full, selective"),
        ({"remat": "selective", "compile": "on"}, "--remat=selective .* --compile=on"),
    ],
)
def test_flags_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        small_job(**settings)
