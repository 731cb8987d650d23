"""The compiled layer under tensor parallelism on real ranks. Run as a program by its own test, in a fresh process:
ranks are forked, and a process that has compiled before has threads that do not survive a fork."""

import os
import subprocess
import sys

import pytest
import torch

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import launch, rules
from funrl.mesh import mesh as meshes
from funrl.models import Config, compile_layer, decoder_model, place

CONFIG = Config(vocab=32, embed=16, layers=2, heads=4, kv_heads=1, head=6, mlp=24, family="qwen3", qk_norm=True)


def _program(mesh):
    """How far compiled and plain gradients are apart, and how many graphs were compiled, over three sizes."""
    model = decoder_model(CONFIG)
    both = [place(model, mesh, layer=compile_layer(model, mode)) for mode in ("on", "off")]
    params = rules.shard(model.init(torch.Generator().manual_seed(0)), both[0].stored, mesh)
    gaps = []
    for rows, length in ((4, 12), (5, 17), (3, 9)):
        tokens = torch.randint(0, CONFIG.vocab, (rows, length), generator=torch.Generator().manual_seed(1))

        def loss(p, placed, tokens=tokens):
            return placed.token_scores(p, Batch(tokens=tokens, mask=None)).logp.square().mean(), ()

        pairs = zip(*(trees.leaves(trees.value_and_grad(loss)(params, x)[1]) for x in both), strict=True)
        gaps += [((a - b).abs().max() / (1 + b.abs().max())).item() for a, b in pairs]
    return max(gaps), torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.slow
@pytest.mark.gloo
def test_compiled_layer_on_two_ranks():
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ran = subprocess.run([sys.executable, __file__], capture_output=True, text=True, timeout=300, env=env, check=False)
    assert ran.returncode == 0, ran.stderr
    gap, graphs = ran.stdout.split()[-2:]
    assert float(gap) < 1e-5
    assert int(graphs) == 1


if __name__ == "__main__":
    print(*launch.launch(_program, meshes.parse("tp2")))
