"""Layers as records: a mixer that the decoder does not know, and what a model says of itself."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from funrl import trees
from funrl.batch import Batch
from funrl.models import Inputs, ModelError, decoder_config, decoder_model, place, with_value_head
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import Experts
from funrl.models.lora import with_lora
from funrl.models.model import Lora
from funrl.rollout.native.engine import native_engine

SIZES = {"vocab": 11, "embed": 8, "layers": 4, "heads": 4, "kv_heads": 2, "head": 4, "mlp": 12}


@dataclass(frozen=True)
class PreviousToken:
    """Mixer: a matrix times the hidden state of the token before, within its sequence."""

    rope = None
    window = None
    paged = None

    def shapes(self, embed):
        return {"previous": (embed, embed), "decay": (embed,)}

    def axes(self):
        return {"previous": ("norm", "embed"), "decay": ("norm",)}

    def initial(self, name, shape, generator):
        return torch.full(shape, 0.5) if name == "decay" else None

    def apply(self, params, h_BTD, mesh, context):
        before_BTD = torch.cat([torch.zeros_like(h_BTD[:, :1]), h_BTD[:, :-1]], 1)
        if context.offsets is not None:
            first_T = torch.isin(torch.arange(h_BTD.shape[1]), context.offsets)
            before_BTD = before_BTD.masked_fill(first_T[:, None], 0)
        return params["decay"] * (before_BTD @ params["previous"].T)

    def cache_shapes(self, page_tokens, tensor):
        return None

    def cost(self, cost):
        return cost


MIXED = decoder_model(decoder_config(**SIZES, mixers=(PreviousToken(), None)))


def test_another_mixer_takes_its_turn_and_begins_as_it_says():
    params = MIXED.init(torch.Generator().manual_seed(0))
    assert [sorted(layer["attn"])[0] for layer in params["layers"]] == ["decay", "k", "decay", "k"]
    assert (params["layers"][2]["attn"]["decay"] == 0.5).all()
    assert MIXED.axes["layers"][0]["attn"] == {"previous": ("norm", "embed"), "decay": ("norm",)}
    assert [layer.queries for layer in MIXED.abilities.cost.layers] == [0, 16, 0, 16]


def test_packed_rows_of_another_mixer_are_those_of_single_sequences():
    params = MIXED.init(torch.Generator().manual_seed(0), torch.float64)
    placed = place(MIXED, dtype=torch.float64)
    tokens = torch.randint(11, (1, 9), generator=torch.Generator().manual_seed(1))
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4]])
    segments = torch.tensor([[1] * 4 + [2] * 5])
    offsets = torch.tensor([0, 4, 9], dtype=torch.int32)
    packed = placed.token_scores(
        params, Batch(tokens=tokens, positions=positions, segments=segments, offsets=offsets)
    ).logp
    for low, high in ((0, 4), (4, 9)):
        alone = placed.token_scores(params, Batch(tokens=tokens[:, low:high])).logp
        assert (packed[:, low:high] - alone).abs().max() < 1e-12


def test_a_model_with_a_mixer_without_pages_does_not_decode():
    assert not MIXED.pages and MIXED.generates
    with pytest.raises(ModelError, match="the model is without pages: use hf_engine"):
        native_engine(MIXED)
    assert "mixers" in MIXED.abilities.compiled_step


def test_equal_layers_are_one_record_that_a_layer_is_given():
    seen = []

    def layer(config, mesh, params, x_BTD, context):
        seen.append(context.layer)
        return MIXED.layer(config, mesh, params, x_BTD, context)

    MIXED.apply(MIXED.init(torch.Generator().manual_seed(0)), Inputs(torch.zeros(1, 3).long()), layer=layer)
    assert len({id(x) for x in seen}) == 2 and seen[0] is seen[2] and seen[1] is seen[3]


@pytest.mark.parametrize(
    "more",
    [
        {"qk_norm": True, "windows": (None, 4, None, 4)},
        {"experts": Experts(6, 2, 5, biased=True, shared=7, dense=(0,))},
        {"kv_heads": 4, "head": 6, "latent": LatentSizes(8, 6, 4, 2, 5)},
    ],
    ids=["windows", "experts", "latent"],
)
def test_a_model_says_what_it_takes(more):
    model = decoder_model(decoder_config(**SIZES | more))
    cost = model.abilities.cost
    cache = model.init_cache(place(model).mesh, 1, 1, torch.float32)
    assert cost.cached() == trees.count(cache)
    named = dict(trees.named(model.shapes))
    experts = {name: x.numel() for name, x in named.items() if "/expert_" in name}
    assert cost.expert_parameters == sum(experts.values())
    assert cost.used_parameters(trees.count(model.shapes)) == trees.count(model.shapes) - sum(experts.values()) * 4 // 6
    assert [layer.window for layer in cost.layers] == list(more.get("windows", (None,) * 4))
    routers = model.abilities.routers
    assert (routers is None) == (not experts)
    assert routers is None or (routers.layers == (1, 2, 3) and model.abilities.choices == 6 and routers.biased)
    critic = with_value_head(model)
    assert not critic.generates and critic.abilities.cost is cost
    adapted = with_lora(model, Lora(2, 2.0, ("o",)))
    assert isinstance(adapted.abilities.compiled_step, str) and adapted.pages
