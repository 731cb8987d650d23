"""Plans of a model of 70 billion parameters over 512 devices."""

import pytest
import torch

from funrl.mesh import rules
from funrl.mesh.mesh import parse
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes
from funrl.models import decoder_config
from funrl.models.decoder import weights as decoder_weights

LARGE = decoder_config(
    vocab=128256, embed=8192, layers=80, heads=64, kv_heads=4, head=128, mlp=28672, max_positions=512, eos=(1,), pad=0
)


@pytest.mark.slow
@pytest.mark.parametrize("mesh,generate_mesh", [("dp512", "dp64,tp8"), ("dp64,tp8", "dp512")])
def test_planning_for_512_devices_moves_the_least_and_is_done_once(mesh, generate_mesh):
    shapes, axes = decoder_weights.shapes(LARGE), decoder_weights.axes(LARGE)
    src = rules.layouts(shapes, axes, rules.fully_sharded(rules.STORED), parse(mesh))
    dst = rules.layouts(shapes, axes, rules.GENERATE, parse(generate_mesh))
    weights = plan(src, dst, torch.float16)
    assert plan(src, dst, torch.float16) is weights
    assert received_bytes(weights) == lower_bound_bytes(weights)
