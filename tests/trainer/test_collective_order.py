"""All ranks of a communicator start the same collectives in one order, in runs of every kind."""

import functools
import math

import pytest
import torch
import torch.distributed as dist
from collective_order import check_order, read_records, run_recorded
from selection import quick
from small_runs import GRPO, PPO, SIZES, Quiet, small_job

from funrl.algos.recipes.rollout_is import rollout_is
from funrl.cost import dry_run
from funrl.cost.tracing.hardware import COMMUNICATOR_BYTES, HARDWARE
from funrl.mesh import collectives
from funrl.mesh import launch as launching
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse
from funrl.models.decoder import experts
from funrl.models.decoder.routing import Experts
from funrl.trainer.placement.ranks import run_rank

pytestmark = pytest.mark.gloo
EVERY_STEP = {"steps": 2, "eval_every": 1, "save_every": "1"}
EXPERTS = {"task": "arithmetic_moe", "token_budget": 48, "router_aux_coef": 0.1}
RUNS = {
    "dp2": (GRPO, {"mesh": "dp2"}),
    "dp3": (GRPO, {"mesh": "dp3"}),
    "dp4 fsdp": (GRPO, {"mesh": "dp4", "fsdp": True}),
    "tp2": (PPO, {"mesh": "tp2"}),
    "sp2": (GRPO, {"mesh": "sp2"}),
    "dp2,tp2 fsdp": (PPO, {"mesh": "dp2,tp2", "fsdp": True, "minibatches": 2}),
    "dp2,sp2": (GRPO, {"mesh": "dp2,sp2", "fsdp": True}),
    "sp2,tp2": (GRPO, {"mesh": "sp2,tp2"}),
    "ep2": (GRPO, {"mesh": "ep2", **EXPERTS}),
    "dp2,ep2 fsdp": (GRPO, {"mesh": "dp2,ep2", "fsdp": True, **EXPERTS}),
    "ep2,tp2": (GRPO, {"mesh": "ep2,tp2", "fsdp": True, "remat": "selective", **EXPERTS}),
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
    sizes = SIZES | ({"mlp": 8, "experts": Experts(4, 2, 8)} if "task" in settings else {})
    job = small_job(compose, sizes, **EVERY_STEP | settings)
    program = functools.partial(rank_of, job, tmp_path / "checkpoints")
    assert launch(functools.partial(run_recorded, program, tmp_path), job.launched, "cpu") is None
    records = read_records(tmp_path)
    assert len(records) == math.prod(job.launched.values()) and len(records[0]) > 20
    check_order(records)


@pytest.mark.slow
def test_ranks_of_experts_on_two_nodes_start_them_in_one_order(tmp_path, monkeypatch):
    monkeypatch.setattr(launching, "ranks_of_node", lambda: 2)
    monkeypatch.setattr(experts, "_exact_parts", lambda *_: None)  # as on a GPU
    job = small_job(GRPO, SIZES | {"mlp": 8, "experts": Experts(4, 3, 8)}, mesh="ep4", fsdp=True, steps=2, **EXPERTS)
    program = functools.partial(rank_of, job, tmp_path / "checkpoints")
    assert launch(functools.partial(run_recorded, program, tmp_path), job.launched, "cpu") is None
    records = read_records(tmp_path)
    check_order(records)
    across = {x.ranks for x in records[0] if x.content.startswith("all_to_all_single")}
    assert {(0, 2), (0, 1)} <= across


SPLIT = {"split_residual": "on", "fsdp": True}
IN_USE = {
    "dp2,tp2": {"mesh": "dp2,tp2", **SPLIT},
    "dp2,sp2,tp2": {"mesh": "dp2,sp2,tp2", **SPLIT},
    "another generate mesh": {"mesh": "dp4", "generate_mesh": "dp2,tp2"},
    "ep2,tp2": {"mesh": "ep2,tp2", **EXPERTS, **SPLIT},
    "dp2,ep2,tp2 and generate_mesh": {"mesh": "dp2,ep2,tp2", "generate_mesh": "dp4,tp2", **EXPERTS, **SPLIT},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", quick(IN_USE, ["dp2,ep2,tp2 and generate_mesh"]))
def test_a_rank_uses_as_many_communicators_as_the_dry_run_counts(name, tmp_path):
    sizes = SIZES | ({"mlp": 8, "experts": Experts(4, 2, 8)} if "task" in IN_USE[name] else {})
    job = small_job(GRPO, sizes, steps=2, **IN_USE[name])
    program = functools.partial(rank_of, job, tmp_path / "checkpoints")
    assert launch(functools.partial(run_recorded, program, tmp_path), job.launched, "cpu") is None
    used = {x.ranks for x in read_records(tmp_path)[0] if not x.content.startswith("new_group")}
    phases = dry_run.estimate(job, 8, HARDWARE["h100"]).phases
    counted = {costs.peak["communicators"] for costs in phases.values()}
    assert counted == {float(len(used) * COMMUNICATOR_BYTES)}, sorted(used)


def exchange(order, mesh):
    """Two gathers over data, a sum over all ranks and two messages, in the order of this rank."""
    x = torch.zeros(4)
    message = (dist.isend, 1) if mesh.rank == 0 else (dist.irecv, 0)
    calls = {
        "float": lambda: collectives.start_all_gathers([x], mesh, "data"),
        "int": lambda: collectives.start_all_gathers([x.int()], mesh, "data"),
        "sum": lambda: [collectives.psum(x, mesh, ("data", "tensor"))],
        "short": lambda: message[0](torch.zeros(2), message[1], tag=1),
        "long": lambda: message[0](torch.zeros(3), message[1], tag=2),
    }
    started = {name: calls[name]() for name in order.get(mesh.rank, order[None]) if name in TOGETHER or mesh.rank < 2}
    for name in ("float", "int"):
        collectives.wait(started[name][0])
    for name in ("short", "long") if mesh.rank < 2 else ():
        started[name].wait()


TOGETHER = ("float", "int", "sum")
ALL = (*TOGETHER, "short", "long")
INT = r"all_gather_into_tensor \(2,\) of torch.int32 \[4\]"
FLOAT = r"all_gather_into_tensor \(2,\) of torch.float32 \[4\]"
SITE = r" on communicator \S+ at test_collective_order.py:\d+"
PLANTED = {
    "in a communicator": (
        ("int", "float", "sum", "short", "long"),
        rf"communicator \S+ of ranks \(1, 3\), number 0: rank 1 starts {INT}{SITE}, rank 3 {FLOAT}{SITE}",
    ),
    "between communicators": (
        ("sum", "float", "int", "short", "long"),
        rf"communicators that ranks \(1, 3\) share, number 0: rank 1 starts all_reduce \('sum',\) of torch.float32 "
        rf"\[4\]{SITE}, rank 3 {FLOAT}{SITE}",
    ),
    "of messages": (
        (*TOGETHER, "long", "short"),
        rf"messages of MainThread from rank 0 to rank 1, number 0: rank 0 starts message of 8 bytes{SITE}, "
        rf"rank 1 message of 12 bytes{SITE}",
    ),
    "none": (ALL, ""),
}


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_swap_is_found_and_named(name, tmp_path):
    of_rank_1, problem = PLANTED[name]
    program = functools.partial(exchange, {None: ALL, 1: of_rank_1})
    launch(functools.partial(run_recorded, program, tmp_path), parse("dp2,tp2"), "cpu")
    records = read_records(tmp_path)
    assert [len(records[rank]) for rank in range(4)] == [5, 5, 3, 3]
    if not problem:
        check_order(records)
        return
    with pytest.raises(AssertionError, match=problem):
        check_order(records)
