"""The compiled layer on real ranks, without inductor. tests/trainer/test_compile_phase.py has inductor, on one rank.

Where one of two ranks compiles, its messages are those of the other's plain layer.

Run as a program by its own tests, in a fresh process: ranks are forked, and a process that has compiled before has
threads that do not survive a fork.
"""

import dataclasses
import functools
import importlib
import json
import os
import subprocess
import sys

import pytest
import torch
from test_models_compile import packed_row

from funrl import trees
from funrl.mesh import collectives, launch, rules
from funrl.mesh import mesh as meshes
from funrl.mesh.rules import COMPUTE, STORED, fully_sharded
from funrl.models import compile_layer, decoder_config, decoder_model, place, with_fields
from funrl.models.decoder import experts
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.routing import Experts
from funrl.models.expert_rows import ExpertRows

CONFIG = decoder_config(vocab=31, embed=16, layers=2, heads=4, kv_heads=1, head=6, mlp=24, family="qwen3", qk_norm=True)
WHOLE = dataclasses.replace(CONFIG, vocab=32)
ONE = with_fields(WHOLE, family="qwen3_moe", experts=Experts(4, 1, 8, True))
NETS = with_fields(WHOLE, heads=3, mixers=(GatedDeltaNet(2, 4, 4, 3), None))
# mesh, model, what is computed again, over which axis weights are fully sharded, backend, ranks that compile
CASES = {
    "experts, bounded and fully sharded": ("ep2", ONE, "selective", "expert", "aot_eager", (1,)),
    "sequence, states and ring": ("sp2", NETS, "none", None, "eager", (1,)),
    "tensor ranks": ("tp2", WHOLE, "selective", None, "eager", (0, 1)),
}


def _program(case, mesh):
    """How far compiled and plain gradients of rank 1 are apart, and how many graphs it compiled, over two sizes."""
    _, config, remat, over, backend, compiling = CASES[case]
    model, stored = decoder_model(config), STORED if over is None else fully_sharded(STORED, over)
    modes = "on" if mesh.rank in compiling else "off", "off"
    layers = [compile_layer(model, mode, remat=remat, backend=backend) for mode in modes]
    rows = ExpertRows(mesh)
    shared = {"shares_prefixes": False, "expert_rows": rows}  # as runs do with a compiled layer
    both = [place(model, mesh, stored, COMPUTE, torch.float64, layer, **shared) for layer in layers]
    params = rules.shard(model.init(torch.Generator().manual_seed(0), torch.float64), both[0].stored, mesh)
    gaps = []
    for row in (packed_row((5, 9, 2), 4), packed_row((20, 1, 2), 1)):

        def loss(p, placed, row=row):
            with rows.bounded():
                return placed.token_scores(p, row).logp.square().mean(), ()

        pairs = zip(*(trees.leaves(trees.value_and_grad(loss)(params, x)[1]) for x in both), strict=True)
        gaps += [((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in pairs]
    return collectives.gather_objects((max(gaps), torch._dynamo.utils.counters["stats"]["unique_graphs"]), mesh)[1]


@pytest.fixture(scope="module")
def results():
    """What `_program` gives of each case: one process starts the ranks of all, and compiles nothing itself."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=900, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("case", CASES)
def test_a_compiled_layer_on_ranks(case, results):
    """Each kind of layers is one graph: two where some have states and some attend."""
    gap, graphs = results[case]
    assert gap < 1e-9
    assert graphs == len(set(decoder_model(CASES[case][1]).abilities.layer_kinds))


if __name__ == "__main__":
    experts.LEAST_ROWS = 0  # rows have few tokens
    importlib.import_module("torch._dynamo")  # what compiles: once here, and not in each rank
    result = {
        case: launch.launch(functools.partial(_program, case), meshes.parse(mesh)) for case, (mesh, *_) in CASES.items()
    }
    print("\n" + json.dumps(result))
