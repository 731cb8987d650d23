"""Adapters of low rank: what they add, what learns, and the same gradients on every mesh."""

import math

import pytest
import torch
from hf_peers import SMALL, tokens_of
from selection import quick
from test_models_parallel import CASES, POSITIONS, SEGMENTS, _config, _params, _tokens

from funrl import trees
from funrl.batch import Batch
from funrl.mesh.mesh import SINGLE, Mesh, parse, single
from funrl.mesh.rules import STORED, fully_sharded, shard
from funrl.mesh.simulate import gather, scatter, simulate
from funrl.models import Inputs, ModelError, decoder_config, decoder_model, place, with_value_head
from funrl.models.deployed import deployed
from funrl.models.huggingface.config import config_from_hf
from funrl.models.huggingface.names import names_of
from funrl.models.huggingface.peft_files import targets_of
from funrl.models.lora import PROJECTIONS, first_trained, on_base, trained_part, with_lora
from funrl.models.model import Lora

WIDE = torch.float64
CONFIG = decoder_config(vocab=24, embed=12, layers=2, heads=4, kv_heads=2, head=4, mlp=16)
MODEL = decoder_model(CONFIG)


def random_like(tree, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return trees.map(lambda x: torch.randn(x.shape, generator=generator, dtype=WIDE) / 3, tree)


def test_a_model_begins_as_the_one_without_adapters():
    model, generator = with_lora(MODEL, Lora(3, 6.0, PROJECTIONS)), torch.Generator()
    params, base = (item.init(generator.manual_seed(0), WIDE) for item in (model, MODEL))
    inputs = Inputs(tokens_of(CONFIG))
    assert torch.equal(model.apply(params, inputs).hidden, MODEL.apply(base, inputs).hidden)
    own = dict(trees.named(trained_part(model, params)))
    assert len(own) == 2 * 7 * 2 and all(x.any() == name.endswith("_lora_a") for name, x in own.items())
    for name, x in own.items():  # PEFT's: uniform within 1 / sqrt(fan-in), whose variance is a third of its square
        if name.endswith("_lora_a"):
            bound = math.prod(x.shape[1:]) ** -0.5
            assert x.abs().max() <= bound and 0.5 < x.square().mean() / (bound**2 / 3) < 1.6, name
    assert model.with_layers(1).config.layers == 1 and model.with_layers(1).adapters.lora == model.adapters.lora


@pytest.mark.parametrize("valued", [False, True], ids=["policy", "critic"])
def test_what_learns_begins_with_the_same_numbers_on_every_mesh(valued):
    model = with_lora(with_value_head(MODEL) if valued else MODEL, Lora(3, 6.0, ("q", "down")))

    def begin(mesh, **head):
        table = fully_sharded(STORED) if mesh.world > 1 else STORED
        stored = trained_part(model, place(model, mesh, table).stored)
        return first_trained(model, stored, mesh, torch.Generator().manual_seed(1), torch.float32, **head), stored

    whole, _ = begin(single())
    assert len(trees.leaves(whole)) == 8 + valued
    for rank in range(4):
        mesh = Mesh(parse("dp2,tp2"), rank)
        own, stored = begin(mesh)
        expected = shard(whole, stored, mesh)
        assert all(map(torch.equal, trees.leaves(own), trees.leaves(expected)))
        assert trees.count(own) < trees.count(whole)
    if valued:
        assert not whole["value"].any() and begin(single(), given={"value": torch.ones(1, 12)})[0]["value"].all()


@pytest.mark.parametrize("case", ["tp2 three kv heads", "tp4 norms over shared heads", "tp2 gemma"])
def test_merged_weights_compute_what_adapters_do(case):
    config = CASES[case][1]
    plain, base = decoder_model(config), _params(config)
    model = with_lora(plain, Lora(2, 3.0, PROJECTIONS))
    params = on_base(model, base, random_like(trained_part(model, model.shapes)))
    result, inputs = deployed(place(model, dtype=WIDE), params), Inputs(_tokens(config))
    assert result.model is plain and len(result.merged) == 7 * config.layers
    hidden = model.apply(params, inputs).hidden
    assert (plain.apply(result.tree(), inputs).hidden - hidden).abs().max() < 1e-12
    assert (plain.apply(base, inputs).hidden - hidden).abs().max() > 0.1
    named = dict(result.exported(names_of(plain)))
    assert {name: tuple(x.shape) for name, x in named.items()} == dict(names_of(plain).values())
    q = params["layers"][1]["attn"]["q"] + 1.5 * torch.einsum(
        "hnr,rd->hnd", params["layers"][1]["attn"]["q_lora_b"], params["layers"][1]["attn"]["q_lora_a"]
    )
    assert (named["model.layers.1.self_attn.q_proj.weight"] - q.flatten(0, 1)).abs().max() < 1e-14
    assert named["model.norm.weight"].data_ptr() == base["norm"].data_ptr()  # not adapted: not copied


def _loss(placed, base, weights, tokens_BT):
    """A loss in which every output of policy and critic has a weight of its own, by what learns of them."""
    batch = Batch(tokens=tokens_BT, mask=None, positions=POSITIONS, segments=SEGMENTS)

    def loss(own):
        whole = {name: on_base(item.model, base, own[name]) for name, item in placed.items()}
        scores = placed["policy"].token_scores(whole["policy"], batch, ("logp", "entropy"), 0.7)
        outputs = torch.stack([*trees.leaves(scores), placed["critic"].values(whole["critic"], batch)])
        return (weights * outputs).sum(), outputs

    return trees.value_and_grad(loss)


ON_RANKS = ["tp4 norms over shared heads", "tp4 latent"]


@pytest.mark.parametrize("case", quick(ON_RANKS, ["tp4 norms over shared heads"]))
def test_tensor_parallel_gradients_are_those_of_one_device(case):
    text, config = CASES[case]
    plain = decoder_model(config)
    models = {"policy": with_lora(plain, Lora(2, 3.0, targets_of("all-linear", plain)))}
    models["critic"] = with_lora(with_value_head(plain), Lora(3, 3.0, ("k", "kv_b", "o", "up")))
    base, tokens_BT = _params(config), _tokens(config)
    own = {name: random_like(trained_part(model, model.shapes)) for name, model in models.items()}
    weights = torch.randn(3, 2, 7, generator=torch.Generator().manual_seed(3), dtype=WIDE)
    alone = {name: place(model, SINGLE, dtype=WIDE) for name, model in models.items()}
    (expected, outputs), grads = _loss(alone, base, weights, tokens_BT)(own)
    assert all(g.abs().max() > 1e-4 for g in trees.leaves(grads))
    with simulate(text) as mesh:
        placed = {name: place(model, mesh, dtype=WIDE) for name, model in models.items()}
        layouts = {name: trained_part(item.model, item.stored) for name, item in placed.items()}
        local = scatter(base, place(plain, mesh).stored)
        result = _loss(placed, local, weights, tokens_BT)(scatter(own, layouts))
        ranks = [gather(result, rank) for rank in range(mesh.world)]
    for rank, ((got, got_outputs), got_grads) in enumerate(ranks):
        assert (got - expected).abs() < 1e-9 and (got_outputs - outputs).abs().max() < 1e-9
        wanted = trees.map(lambda x, layout, r=rank: x[tuple(slice(*edge) for edge in layout.box(r))], grads, layouts)
        for (name, g), e in zip(trees.named(got_grads), trees.leaves(wanted), strict=True):
            assert g.shape == e.shape and (g - e).abs().max() < 1e-9, (name, rank)


def test_projections_are_named_as_in_peft():
    assert targets_of("all-linear", MODEL) == PROJECTIONS
    assert targets_of("v_proj, q_proj", with_value_head(MODEL)) == ("q", "v")
    phi = decoder_model(config_from_hf(SMALL | {"model_type": "phi3"}))
    assert targets_of("qkv_proj,down_proj", phi) == ("q", "k", "v", "down")
    for text, item in (
        ("q_proj,wq", "'wq' is not one of its projections: all-linear, or some of q_proj, k_proj, v_proj, o_proj"),
        ("q_proj,q_proj", "a projection is named twice"),
        ("lm_head", "'lm_head' is not one of"),
        ("", "'' is not one of"),
    ):
        with pytest.raises(ModelError, match=item):
            targets_of(text, MODEL)
    with pytest.raises(ModelError, match="a projection is named twice"):
        targets_of("qkv_proj,k_proj", phi)
    experts = {
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_group": 1,
        "topk_group": 1,
    }
    deepseek = decoder_model(config_from_hf(SMALL | {"model_type": "deepseek_v3", "num_key_value_heads": 6, **experts}))
    assert targets_of("gate_proj,kv_b_proj", deepseek) == ("gate", "kv_b", "shared_gate")  # and no routed expert's
    with pytest.raises(
        ModelError, match=r"kv_a_proj_with_mqa.*, router, experts, experts.gate_up_proj, experts.down_proj$"
    ):
        targets_of("gate", deepseek)
    assert targets_of("experts,router,o_proj", deepseek) == ("o", "router", "expert_gate", "expert_up", "expert_down")
    assert targets_of("experts.gate_up_proj", deepseek) == ("expert_gate", "expert_up")
    with pytest.raises(ModelError, match="a projection is named twice"):
        targets_of("experts,experts.down_proj", deepseek)
    with pytest.raises(ModelError, match="the model has adapters already"):
        with_lora(with_lora(MODEL, Lora(1, 1.0, ("q",))), Lora(1, 1.0, ("k",)))


def test_a_family_s_names():
    model = with_lora(with_value_head(decoder_model(_config(4, 2))), Lora(2, 2.0, ("o",)))
    names = {name: there for name, there in names_of(model).items() if "_lora_" in name and "/1/" in name}
    assert names == {
        "decoder/layers/1/attn/o_lora_a": ("model.layers.1.self_attn.o_proj.lora_A.weight", (2, 16)),
        "decoder/layers/1/attn/o_lora_b": ("model.layers.1.self_attn.o_proj.lora_B.weight", (12, 2)),
    }
