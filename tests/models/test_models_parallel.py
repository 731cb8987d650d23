"""Tensor parallelism: every rank's log-probs, values and gradients equal those of one device, in float64."""

import pytest
import torch
from paged_rows import Rows
from selection import quick

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import rules
from funrl.mesh.mesh import SINGLE
from funrl.mesh.simulate import gather, scatter, simulate
from funrl.models import Config, Inputs, decoder_config, decoder_model, place, with_value_head
from funrl.models.decoder.gated_delta_net import GatedDeltaNet
from funrl.models.decoder.latent_attention import LatentSizes
from funrl.models.decoder.routing import Experts

WANT = ("logp", "entropy", "sum_pi_squared")


def _config(heads, kv_heads, **more) -> Config:
    more = {"family": "qwen3", "qk_norm": True, "attention_bias": True, "output_bias": True} | more
    sizes = {"vocab": 24, "embed": 12, "layers": 2, "head": 4, "mlp": 16}
    return decoder_config(heads=heads, kv_heads=kv_heads, **sizes | more)


GEMMA = {
    "norms": "sandwich",
    "norm_offset": 1.0,
    "activation": "gelu",
    "attention_cap": 0.8,
    "logit_cap": 1.5,
    "embed_scale": 12**0.5,
    "attention_scale": 0.4,
    "windows": (None, 3),
    "local_rope_theta": 100.0,
    "tied": True,
}
LATENT = {"family": "deepseek_v3", "qk_norm": False, "attention_bias": False, "output_bias": False, "head": 6}
NEXT = {
    "norm_offset": 1.0,
    "output_gate": True,
    "rotary_part": 2,
    "mixers": (GatedDeltaNet(2, 4, 4, 3, width=3), GatedDeltaNet(2, 2, 4, 5), None),
    "experts": Experts(4, 2, 8, shared=4, shared_weighted=True),
}
CASES = {
    "tp2 tied, multipliers": (
        "tp2",
        _config(4, 4, tied=True, embed_scale=3.0, residual_scale=0.4, attention_scale=0.3, logit_divisor=2.0),
    ),
    "tp2 three kv heads": ("tp2", _config(6, 3)),  # a rank's heads end within a group
    "tp2 one kv head": ("tp2", _config(4, 1, windows=(None, 3))),
    "tp4 norms over shared heads": (
        "tp4",
        _config(8, 2, qk_norm_over="projection", norms="post", rotates=(True, False)),
    ),
    "tp2 gemma": ("tp2", _config(4, 2, **GEMMA)),
    "tp4 latent": ("tp4", _config(4, 4, **LATENT, latent=LatentSizes(40, None, 4, 2, 7), attention_scale=0.7)),
    "tp2 gated delta nets": ("tp2", _config(4, 1, layers=3, **NEXT)),
}

QUICK = ("tp2 tied, multipliers", "tp2 three kv heads", "tp2 gemma, padded")


def _params(config):
    params = decoder_model(config).init(torch.Generator().manual_seed(0), torch.float64)
    generator = torch.Generator().manual_seed(1)  # norms away from 1, biases away from 0, logits that differ
    return trees.map(lambda x: x + 0.3 * torch.randn(x.shape, generator=generator, dtype=x.dtype), params)


def _tokens(config):
    return torch.randint(0, config.vocab, (2, 7), generator=torch.Generator().manual_seed(2))


SEGMENTS = torch.tensor([[1, 1, 1, 2, 2, 2, 2], [1, 1, 1, 1, 1, 0, 0]])
POSITIONS = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 2, 3, 4, 0, 0]])


def _placed(config, mesh=SINGLE):
    model = decoder_model(config)
    models = {"policy": model, "critic": with_value_head(model)}
    return {name: place(model, mesh, dtype=torch.float64) for name, model in models.items()}


def _loss(placed, packed):
    """A loss in which every output of the model has a weight of its own; with the outputs."""
    where = {"positions": POSITIONS, "segments": SEGMENTS} if packed else {}

    def loss(params, tokens_BT, weights):
        batch = Batch(tokens=tokens_BT, mask=None, **where)
        scores = placed["policy"].token_scores(params["policy"], batch, WANT, 0.7)
        values_BT = placed["critic"].values(params["critic"], batch)
        outputs = torch.stack([*trees.leaves(scores._replace(load=None)), values_BT])
        return (weights * outputs).sum(), outputs

    return loss


@pytest.mark.parametrize(
    "case", quick([name + ", padded" * (name == "tp2 gemma") for name in CASES if name != "tp2 one kv head"], QUICK)
)
def test_tensor_parallel_equals_one_device(case):
    name = case.removesuffix(", padded")
    packed = case == name
    text, config = CASES[name]
    alone, policy = _placed(config), _params(config)
    critic = alone["critic"].copy_from(alone["policy"], policy)
    critic["value"] = torch.randn(1, config.embed, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
    params = {"policy": policy, "critic": critic}
    # Drawn here: under simulation every rank would draw numbers of its own.
    weights = torch.randn(4, 2, 7, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    inputs = _tokens(config), weights
    (expected, outputs), grads = trees.value_and_grad(_loss(alone, packed))(params, *inputs)
    assert all(g.abs().max() > 1e-4 for g in trees.leaves(grads))

    with simulate(text) as mesh:
        placed = _placed(config, mesh)
        layouts = {name: item.stored for name, item in placed.items()}
        local = scatter(params, layouts)
        (got, got_outputs), got_grads = trees.value_and_grad(_loss(placed, packed))(local, *inputs)
        ranks = [gather((got, got_outputs, got_grads), rank) for rank in range(mesh.world)]
    for rank, (got, got_outputs, got_grads) in enumerate(ranks):
        assert (got - expected).abs() < 1e-9
        assert (got_outputs - outputs).abs().max() < 1e-9

        def own(x, layout, rank=rank):
            return x[tuple(slice(low, high) for low, high in layout.box(rank))]

        for (name, g), e in zip(trees.named(got_grads), trees.leaves(trees.map(own, grads, layouts)), strict=True):
            assert g.shape == e.shape, name
            assert (g - e).abs().max() < 1e-9, (name, rank)


DECODED = ["tp2 one kv head", "tp4 norms over shared heads", "tp2 gemma", "tp4 latent"]


@pytest.mark.parametrize("case", quick(DECODED, ["tp2 gemma"]))
def test_decode_over_pages_equals_forward(case):
    text, config = CASES[case]
    model, params, tokens_BT = decoder_model(config), _params(config), _tokens(config)
    expected = model.apply(params, Inputs(tokens_BT)).hidden
    with simulate(text) as mesh, torch.no_grad():
        local = scatter(params, rules.layouts(model.shapes, model.axes, rules.GENERATE, mesh.sizes))
        rows = Rows(model, local, tokens_BT, mesh)
        results, parts = [], []
        for counts in ([4, 3], [1, 2], [1, 1], [1, 1]):
            parts += [expected[r, at : at + n] for r, (at, n) in enumerate(zip(rows.ends, counts, strict=True))]
            results.append(rows.pass_of(counts))
        ranks = [gather(torch.cat(results), rank) for rank in range(mesh.world)]
    assert all((got - torch.cat(parts)).abs().max() < 1e-9 for got in ranks)


def test_replicated_vocabulary():
    config = CASES["tp2 three kv heads"][1]
    params, batch = _params(config), Batch(tokens=_tokens(config), mask=None)
    expected = trees.leaves(_placed(config)["policy"].token_scores(params, batch, WANT))
    table = dict(rules.STORED) | {"vocab": None}
    with simulate("tp2") as mesh:
        placed = place(decoder_model(config), mesh, table, table, torch.float64)
        got = placed.token_scores(scatter(params, placed.stored), batch, WANT)
        ranks = [gather(trees.leaves(got), rank) for rank in range(mesh.world)]
    assert all((a - b).abs().max() < 1e-9 for rank in ranks for a, b in zip(rank, expected, strict=True))
