"""Passes in bfloat16 read the copies of the weights, which are the weights' casts after every update."""

import functools

import pytest
import torch
from small_runs import GRPO, PPO, begin, gradients, one_step, scored_batch, small_job
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.mesh.launch import launch
from funrl.models.weight_dtypes import narrow_weight

pytestmark = pytest.mark.gloo

SIZES = {"embed": 16, "layers": 2, "heads": 8, "kv_heads": 2, "head": 4, "mlp": 32, "tied": True}


class Reads(TorchDispatchMode):
    """Operators that compute with some tensors."""

    def __init__(self, tensors):
        super().__init__()
        self.storages = {x.untyped_storage()._cdata for x in tensors}
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in trees.leaves(list(args)) if isinstance(x, torch.Tensor)]
        if not func.is_view and any(x.untyped_storage()._cdata in self.storages for x in tensors):
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def reads_and_stale_copies(job, mesh):
    """Operators of a step's passes that read float32 weights; numbers in which their copies differ from their casts."""
    run, state = begin(job, mesh)
    differences = 0
    for _ in range(2):
        state, _ = one_step(run, state)
        for name, role in state.roles.items():
            dtype = run.parts.roles[name].placed.dtype
            for x in trees.leaves(role.params):
                copy = narrow_weight(x, dtype)
                assert copy.dtype == dtype
                differences += (copy != x.to(dtype)).sum().item()
    with Reads([x for role in state.roles.values() for x in trees.leaves(role.params)]) as reads:
        rows, state, _ = scored_batch(run, state)
        gradients(run, state, rows)
    return reads.names, differences


@pytest.mark.parametrize(
    "settings",
    [
        {"compose": functools.partial(PPO, kl_coef=0.05)},
        {"mesh": "dp2", "fsdp": True, "generate_mesh": "tp2"},
        {"mesh": "tp2"},
        {"lora_rank": 2},
        {"optimizer": "muon"},
        {"freeze": "embed"},
    ],
    ids=lambda settings: " ".join(settings),
)
def test_a_pass_reads_copies_alone(settings):
    alone = {"verify_sync": False}  # digests are of the weights themselves
    job = small_job(**{"compose": GRPO, "sizes": SIZES, "dtype": "bfloat16", "minibatches": 2} | alone | settings)
    reads, differences = launch(functools.partial(reads_and_stale_copies, job), job.sizes, "cpu")
    assert reads == []
    assert differences == 0
