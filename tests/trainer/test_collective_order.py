"""All ranks of a communicator start the same collectives in one order, in runs of every kind; see `collective_order`."""

import functools
import math

import pytest
import torch
from collective_order import check_order, read_records, run_recorded
from selection import quick
from small_runs import GRPO, PPO, Quiet, small_job

from funrl.algos.recipes.rollout_is import rollout_is
from funrl.mesh import collectives
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.trainer.placement.ranks import run_rank

pytestmark = pytest.mark.gloo
EVERY_STEP = {"steps": 2, "eval_every": 1, "save_every": "1"}
RUNS = {
    "dp2": (GRPO, {"mesh": "dp2"}),
    "dp3": (GRPO, {"mesh": "dp3"}),
    "dp4 fsdp": (GRPO, {"mesh": "dp4", "fsdp": True}),
    "tp2": (PPO, {"mesh": "tp2"}),
    "sp2": (GRPO, {"mesh": "sp2"}),
    "dp2,tp2 fsdp": (PPO, {"mesh": "dp2,tp2", "fsdp": True, "minibatches": 2}),
    "dp2,sp2": (GRPO, {"mesh": "dp2,sp2", "fsdp": True}),
    "sp2,tp2": (GRPO, {"mesh": "sp2,tp2"}),
    "another generate mesh": (GRPO, {"mesh": "dp2", "generate_mesh": "tp2", "fsdp": True}),
    "adapters": (GRPO, {"mesh": "dp2", "lora_rank": 2, "fsdp": True}),
    "pauses": (GRPO, {"mesh": "dp2", "new_tokens_per_step": 2}),
    "pools": (GRPO, {"place": "train:dp2 generate:1"}),
    "pools ahead": (rollout_is, {"place": "train:dp2 generate:tp2", "staleness": 1, "fsdp": True}),
    "pools and a reference": (
        functools.partial(PPO, kl_coef=0.1),
        {"place": "train:dp2 generate:1 reference:1"},
    ),
}


def rank_of(job, folder, mesh):
    outcome = run_rank(job, mesh, Quiet(str(folder) if mesh.rank == 0 else None))
    return outcome.error


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(RUNS, ["dp2,tp2 fsdp", "pools ahead"]))
def test_ranks_start_the_same_collectives_in_one_order(name, tmp_path):
    compose, settings = RUNS[name]
    job = small_job(compose, **EVERY_STEP | settings)
    program = functools.partial(rank_of, job, tmp_path / "checkpoints")
    assert launch(functools.partial(run_recorded, program, tmp_path), job.launched, "cpu") is None
    records = read_records(tmp_path)
    assert len(records) == math.prod(job.launched.values()) and len(records[0]) > 20
    check_order(records)


def gathers(order, mesh):
    """Two gathers over data, and a sum over tensor, in the order of this rank."""
    x = torch.zeros(4)
    started = {
        "float": lambda: collectives.start_all_gathers([x], mesh, "data"),
        "int": lambda: collectives.start_all_gathers([x.int()], mesh, "data"),
        "sum": lambda: [collectives.psum(x, mesh, "tensor")],
    }
    for name in order.get(mesh.rank, order[None]):
        started[name] = started[name]()
    for name in ("float", "int"):
        collectives.wait(started[name][0])


PLANTED = {
    "none": ({None: ("float", "int", "sum")}, None),
    "in a communicator": (
        {None: ("float", "int", "sum"), 1: ("int", "float", "sum")},
        r"communicator \S+ of ranks \(1, 3\), number 0: rank 1 starts all_gather_into_tensor \(2,\) of torch.int32 \[4\] "
        r"at test_collective_order.py:\d+, rank 3 all_gather_into_tensor \(2,\) of torch.float32 \[4\]",
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_swap_is_found_and_named(name, tmp_path):
    order, problem = PLANTED[name]
    launch(functools.partial(run_recorded, functools.partial(gathers, order), tmp_path), parse("dp2,tp2"), "cpu")
    records = read_records(tmp_path)
    assert len(records) == 4 and all(len(started) == 3 for started in records.values())
    if problem is None:
        check_order(records)
    else:
        with pytest.raises(AssertionError, match=problem):
            check_order(records)
