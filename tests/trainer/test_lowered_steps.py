"""Gradients, scores and updates of a run in JAX against those in torch."""

import functools

import pytest

pytest.importorskip("jax")
import torch
from selection import quick
from small_runs import GRPO, PPO, SIZES, begin, gradients, relative, scored_batch, small_job

from funrl import trees
from funrl.algos.recipes.dpo import dpo
from funrl.algos.recipes.sft import sft
from funrl.mesh.mesh import single
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.layers import RopeScaling
from funrl.models.decoder.routing import Experts

pytestmark = pytest.mark.xla

RECIPES = {"grpo": GRPO, "ppo": functools.partial(PPO, entropy_coef=0.1), "sft": sft, "dpo": dpo}
EVERY_SWITCH = {
    "layers": 4,
    "mixers": (GatedDeltaNet(2, 4, 8, 6), None) * 2,
    "windows": (None, 3) * 2,
    "experts": Experts(4, 2, 8),
    "tied": True,
    "attention_cap": 5.0,
    "logit_cap": 3.0,
    "output_gate": True,
    "qk_norm": "head",
    "rope_scaling": RopeScaling("yarn", 2.0, 1.0, 32.0, original=4),
    "query_growth": 0.3,
    "rotary_pairs": True,
}


def jiggled(x):
    return x + 0.3 * torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(x.numel()))


def both(recipe="grpo", sizes=(), **settings):
    """A run, the same run with steps that are programs, its state and a batch."""
    jobs = (
        small_job(RECIPES[recipe], sizes=SIZES | dict(sizes), verify_sync=False, **settings, backend=name)
        for name in ("torch", "xla")
    )
    (run, state), (lowered, _) = (begin(job, single()) for job in jobs)
    state = state._replace(roles={n: r._replace(params=trees.map(jiggled, r.params)) for n, r in state.roles.items()})
    rows, state, _ = scored_batch(run, state)
    return run, lowered, state, rows


def assert_same_steps(run, lowered, state, rows, tolerance=1e-12):
    wanted = gradients(run, state, rows)
    result = gradients(lowered, state, rows)
    assert result.keys() == wanted.keys()
    for name, want in wanted.items():
        assert relative(result[name].tree, want.tree) < tolerance and abs(result[name].loss - want.loss) < tolerance, (
            name
        )
        assert result[name].metrics == pytest.approx(want.metrics, abs=10 * tolerance), name


@pytest.mark.parametrize("recipe", quick([*RECIPES], ["grpo"]))
def test_gradients_are_those_of_torch(recipe):
    kind = {"temperature": 0.7} if recipe in ("grpo", "ppo") else {"reward": None}
    kind |= {"token_budget": 32} if recipe == "sft" else {}  # several micro-batches
    run, lowered, state, rows = both(recipe, **kind)
    assert_same_steps(run, lowered, state, rows)


@pytest.mark.slow
def test_models_have_programs():
    assert_same_steps(*both(sizes=EVERY_SWITCH))
