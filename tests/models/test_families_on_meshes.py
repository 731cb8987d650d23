"""Families on simulated meshes, in float64: scores and gradients are those of one device, with adapters too.

Values are those of tests/models/test_sequence_parallel.py: a value head does not depend on the family.
"""

import functools

import pytest
import torch
from family_configs import ALL, MESHES
from selection import quick
from test_sequence_parallel import WEIGHTS, draw, packed

from funrl import trees
from funrl.mesh import rules
from funrl.mesh.mesh import SINGLE
from funrl.mesh.simulate import gather, scatter, simulate
from funrl.mesh.sums import sum_rest
from funrl.models import decoder_model, place, with_fields
from funrl.models.huggingface.config import config_from_hf
from funrl.models.huggingface.peft_files import targets_of
from funrl.models.lora import is_trained, with_lora
from funrl.models.model import Lora

TINY = {
    "vocab_size": 24,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
ADAPTED = (  # whose weights tensor ranks split in ways of their own
    "ernie4_5 bias",
    "qwen3_5_moe",
    "gemma4 vectors",
)
CASES = [f"{name} on {mesh}" for name in MESHES for mesh in MESHES[name]]


def config_of(name):
    """A small model with the switches of a family's configuration, whose sizes divide."""
    other = ("moe_intermediate_size", "head_dim", "num_key_value_heads")
    raw = {key: value for key, value in ALL[name].items() if key not in other}
    raw |= {"head_dim": 8} | ({"moe_intermediate_size": 8} if "moe_intermediate_size" in ALL[name] else {})
    for field in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"):
        if field in raw:
            raw[field] = 8
    if "vocab_size_per_layer_input" in raw:
        raw["vocab_size_per_layer_input"] = TINY["vocab_size"]
    layers = 4 if "num_kv_shared_layers" in raw else 2
    return with_fields(config_from_hf(TINY | raw).of_layers(range(layers)), norm_eps=1e-2)


def place_on(mesh, config, lora, table=rules.STORED, splits=False):
    model = decoder_model(config)
    if lora:
        model = with_lora(model, Lora(2, 3.0, targets_of("all-linear", model)))
    return place(model, mesh, table, rules.COMPUTE, torch.float64, splits=splits)


def outputs(placed, params, batch):
    """A number that depends on every output of the model, and the outputs."""
    scores = placed.token_scores(params, batch, ("logp", "entropy"), 0.7)
    result = torch.stack([scores.logp, scores.entropy])
    return (WEIGHTS[:2] * result).sum(), result


@functools.cache
def alone(name, lora):
    placed = place_on(SINGLE, config_of(name), lora)
    params = placed.model.init(torch.Generator().manual_seed(0), torch.float64)
    params = trees.map(lambda x: x + 0.3 * draw(*x.shape, seed=x.numel()), params)
    return params, trees.value_and_grad(lambda p: outputs(placed, p, packed()))(params)


def gaps(name, text, lora=False):
    """The largest differences of any rank's outputs and gradients from those of one device.

    Ranks of data and expert have the same row each, so their gradients add up to as many times the one's.
    """
    params, ((_, whole), grads) = alone(name, lora)
    batch = packed()
    text, _, way = text.partition(" ")
    with simulate(text) as mesh:
        table = rules.fully_sharded(rules.STORED, mesh.row_axes) if way == "fsdp" else rules.STORED
        placed = place_on(mesh, config_of(name), lora, table, way == "split")
        local = scatter(params, placed.stored)
        (_, got), made = trees.value_and_grad(lambda p: outputs(placed, p, batch))(local)
        summed, _ = sum_rest(made, (), placed.stored, placed.compute, mesh, placed.partial)
        copies = mesh.size(mesh.row_axes)
        ranks = [gather((got, summed), rank) for rank in range(mesh.world)]

    def own(x, layout, rank):
        return copies * x[tuple(slice(low, high) for low, high in layout.box(rank))]

    for rank, (got, grad) in enumerate(ranks):
        yield (got - whole).abs().max().item()
        expected = trees.map(lambda x, la, r=rank: own(x, la, r), grads, placed.stored)
        for (key, x), y in zip(trees.named(grad), trees.leaves(expected), strict=True):
            frozen = lora and not is_trained(key)  # whose gradients no rank has whole
            yield (x - y).abs().max().item() if x.numel() and not frozen else 0.0


@pytest.mark.parametrize("case", quick(CASES, ["gpt_oss on sp2"]))
def test_scores_and_gradients_are_those_of_one_device(case):
    name, _, mesh = case.partition(" on ")
    _, (_, grads) = alone(name, False)
    fixed = ("router_bias", "layer_scale")  # which do not learn
    assert all(g.abs().max() > 1e-9 for key, g in trees.named(grads) if not key.endswith(fixed))
    assert WEIGHTS.any() and max(gaps(name, mesh)) < 1e-9


@pytest.mark.parametrize("name", quick(ADAPTED, ["ernie4_5 bias"]))
def test_so_are_those_of_adapters(name):
    assert max(gaps(name, "tp2", lora=True)) < 1e-9
