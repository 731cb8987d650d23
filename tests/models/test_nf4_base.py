"""Families with a base in 4 bits compute, and learn adapters, as with the values that it stands for."""

import importlib.util

import pytest
import torch
from family_configs import ALL
from hf_peers import SMALL
from selection import quick

from funrl import trees
from funrl.models import decoder_model
from funrl.models.huggingface.config import config_from_hf
from funrl.models.huggingface.peft_files import targets_of
from funrl.models.lora import is_trained, with_lora
from funrl.models.model import Inputs, Lora
from funrl.models.nf4_base import nf4_model_problem, quantized, whole_weights_of, with_nf4

pytestmark = pytest.mark.skipif(importlib.util.find_spec("bitsandbytes") is None, reason="needs funrl[nf4]")

BLOCKS = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
}
FAMILIES = {
    name: raw for name, raw in ALL.items() if not any("expert" in key for key in raw) and "longrope" not in name
}


@pytest.mark.parametrize("name", quick(FAMILIES, ["llama mlp bias", "qwen3_5 in turn", "gemma4 vectors"]))
def test_a_family_computes_with_the_values_of_its_base(name):
    model = decoder_model(config_from_hf(SMALL | FAMILIES[name] | BLOCKS))
    assert nf4_model_problem(model) is None
    adapted = with_lora(model, Lora(2, 4.0, targets_of("all-linear", model)))
    generator = torch.Generator().manual_seed(0)
    params = trees.map_named(
        lambda name, x: x + 0.1 * torch.randn(x.shape, generator=generator) if is_trained(name) else x,
        adapted.init(generator, torch.float64),
    )
    packed_model = with_nf4(adapted)
    packed = trees.from_named(packed_model.shapes, quantized(trees.named(params)))
    weight_of = whole_weights_of(dict(trees.named(packed)), torch.float64)
    whole = trees.map_named(lambda name, _: weight_of(name), params)
    inputs = Inputs(torch.tensor([[1, 5, 7, 3, 9, 11, 4, 6]]))
    factors = dict(trees.named(params))
    results = []
    for own, weights in ((packed_model, packed), (adapted, whole)):
        leaves = {name: x.clone().requires_grad_() for name, x in factors.items() if is_trained(name)}
        tree = trees.map_named(lambda name, x, leaves=leaves: leaves.get(name, x), weights)
        hidden = own.apply(tree, inputs).hidden
        results.append([hidden, *torch.autograd.grad(hidden.sin().sum(), list(leaves.values()), allow_unused=True)])
    for value, expected in zip(*results, strict=True):
        assert (value is None) == (expected is None)
        if value is not None:
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-10)
    assert sum(x.dtype == torch.uint8 for x in trees.leaves(packed)) > len(params["layers"])
    assert (adapted.apply(params, inputs).hidden - results[0][0]).abs().max() > 0.01
