"""Models of agents where some ranks train and others generate: earlier selves, directories and second policies."""

import functools

import pytest
import torch
from selection import quick
from small_runs import SIZES, SMALL, resized
from test_agents import Rivals
from test_placement_runs import compare, rank_of

from funrl.algos.recipes.grpo import grpo
from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh.launch import launch
from funrl.models.huggingface import directories as hf
from funrl.trainer.jobs.prepare import prepare
from funrl.trainer.jobs.provenance import Given
from funrl.trainer.settings.settings import settings_of

pytestmark = pytest.mark.gloo


def job_of(compose, environment=None, **settings):
    given = Given(environment=environment or Rivals(), records=[{"prompt": f"{n}+{n}="} for n in range(24)])
    return resized(prepare(settings_of(**SMALL | {"samples_per_prompt": 3} | settings), compose, given), SIZES)


def run(compose, **settings):
    job = job_of(compose, **settings)
    return launch(functools.partial(rank_of, job), job.launched, "cpu")


GRPO = functools.partial(grpo, kl_coef=0.0)
AGENTS = {
    "first self": "rival:frozen",
    "renewed self": "rival:frozen:2",
    "second policy": "rival:policy:second",
}
LAYOUTS = {
    "dp1": ({"place": "generate:1"}, {}),
    "fsdp, tp2": (
        {"place": "train:dp2 generate:tp2", "fsdp": True},
        {"mesh": "dp2", "generate_mesh": "tp2", "fsdp": True},
    ),
    "adapters": ({"place": "generate:1", "lora_rank": 2}, {"lora_rank": 2}),
}


@pytest.mark.parametrize("layout", quick(LAYOUTS, ["dp1"]))
@pytest.mark.parametrize("agents", quick(AGENTS, ["renewed self"]))
def test_apart_they_give_the_same_bits(agents, layout):
    apart, together = LAYOUTS[layout]
    flags = {"agents": AGENTS[agents], "steps": 4}
    compare(run(GRPO, **flags, **apart), run(GRPO, **flags, **together))


@pytest.mark.slow
def test_so_does_a_model_of_a_directory(tmp_path):
    job = job_of(GRPO, seed=3)
    hf.save(tmp_path / "model", job.model, job.model.init(torch.Generator().manual_seed(7), torch.float64), job.tokenizer)
    flags = {"agents": f"rival:{tmp_path / 'model'}"}
    compare(run(GRPO, place="train:dp1 generate:tp2", **flags), run(GRPO, mesh="tp2", **flags), 1e-9)
