"""Plans of models of 70 and 671 billion parameters over 512 devices."""

import pytest
import torch

from funrl.mesh import rules
from funrl.mesh.buckets import program
from funrl.mesh.mesh import parse, ranks_of
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes, sent_bytes
from funrl.models import decoder_config, decoder_model
from funrl.models.decoder import weights as decoder_weights
from funrl.models.huggingface.config import config_from_hf

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


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "num_hidden_layers": 61,
    "intermediate_size": 18432,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
}


@pytest.mark.slow
def test_a_sync_of_deepseek_v3_has_few_messages_and_trainer_ranks_send_each_byte_once():
    """From dp4,ep64 to dp8,tp32: 5,059 receives of a rank; 222,976 when each bucket had a part from every peer."""
    model = decoder_model(config_from_hf(DEEPSEEK))
    made = plan(
        rules.layouts(model.shapes, model.axes, rules.fully_sharded(rules.STORED), parse("dp4,ep64")),
        rules.layouts(model.shapes, model.axes, {**rules.GENERATE, "experts": None}, parse("dp8,tp32")),
        torch.bfloat16,
        src_ranks=ranks_of(range(256)),
        dst_ranks=ranks_of(range(256, 512)),
    )
    received = received_bytes(made)
    assert received == lower_bound_bytes(made) and max(received) > 43e9
    assert max(sent_bytes(made)[:256]) < 7e9 < max(sent_bytes(made)) < max(received)
    steps = program(made, 256, 64 << 20, native=True, direct_bytes=8 << 20)
    assert sum(len(step.receives) for step in steps) < 8000
