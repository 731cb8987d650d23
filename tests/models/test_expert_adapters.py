"""Adapters of routers and of routed experts: against merging by hand, and with the same gradients on every mesh."""

import pytest
import torch
from test_experts import AXES, ENOUGH, D, E, M, by_tokens, loss, weights

from funrl import trees
from funrl.batch import Batch
from funrl.mesh import rules
from funrl.mesh.collectives import psum
from funrl.mesh.mesh import SINGLE, coordinates, parse
from funrl.mesh.simulate import gather, per_rank, scatter, simulate
from funrl.models import compile_layer, decoder_config, decoder_model, lora, place
from funrl.models.decoder import experts as module
from funrl.models.decoder.experts import RoutingInputs, mixture
from funrl.models.decoder.routing import Experts
from funrl.models.lora import FIRST, ROUTED, SECOND, is_trained
from funrl.models.low_rank import merged
from funrl.models.model import Lora

R, SCALE, K = 3, 0.7, 2


@pytest.fixture(autouse=True)
def _any_bound(monkeypatch):
    """As few rows as the bound says: tests have few tokens."""
    monkeypatch.setattr(module, "LEAST_ROWS", 0)


def adapted():
    """Weights of a layer with factors beside each, tokens, and weights of the loss."""
    params, x_TD, g_TD = weights()
    generator = torch.Generator().manual_seed(5)
    names = {"router": ((R, D), (E, R)), "expert_down": ((E, R, M), (E, D, R))}
    names |= dict.fromkeys(("expert_gate", "expert_up"), ((E, R, D), (E, M, R)))
    for name, shapes in names.items():
        for end, shape in zip((FIRST, SECOND), shapes, strict=True):
            params[name + end] = torch.randn(shape, dtype=torch.float64, generator=generator) / 2
    return params, x_TD, g_TD


def merged_by_hand(params):
    """Each expert's matrix with its own product, one after the other."""
    whole = {"router": params["router"] + SCALE * params["router" + SECOND] @ params["router" + FIRST]}
    for name in lora.BY_EXPERT:
        a, b = params[name + FIRST], params[name + SECOND]
        whole[name] = torch.stack([params[name][e] + SCALE * b[e] @ a[e] for e in range(E)])
    return whole


def expected():
    """Outputs, and gradients of all factors, by a loop over tokens with merged weights."""
    params, x_TD, g_TD = adapted()
    own = {name: x.requires_grad_() for name, x in params.items() if is_trained(name)}
    out_TD, probs = by_tokens(K, True, merged_by_hand(params), x_TD)
    grads = torch.autograd.grad(loss(out_TD, probs.sum(0), g_TD), list(own.values()))
    return out_TD.detach(), dict(zip(own, grads, strict=True))


def test_merged_weights_are_those_that_are_merged_by_hand():
    params, _, _ = adapted()
    parts = lora._low_rank(params, SINGLE, SCALE, split=False)
    for name, whole in merged_by_hand(params).items():
        assert (merged(parts[name]) - whole).abs().max() < 1e-14


@pytest.mark.parametrize("bound", [None, ENOUGH])
@pytest.mark.parametrize(
    "mesh", ["dp1", "dp2", "ep2", "tp2", "dp2,ep2", "ep2,tp2", "dp2,ep2,tp2", "ep4", "tp2 split", "ep2,tp2 split"]
)
def test_values_and_gradients_are_those_of_merged_weights(mesh, bound):
    text, _, split = mesh.partition(" ")
    out, grads = expected()
    params, x_TD, g_TD = adapted()
    axes = dict(AXES)
    for name in ROUTED:
        axes[name + FIRST], axes[name + SECOND] = lora._factor_axes(name, AXES[name])
    sizes = parse(text)
    tokens, shares = sizes["data"] * sizes["expert"], sizes["tensor"] if split else 1
    layouts = rules.layouts(params, axes, rules.COMPUTE, sizes)
    partial = rules.partial_axes(params, axes, rules.SPLIT_RESIDUAL if split else {})

    def own(x, rank):
        at = coordinates(sizes, rank)
        part = x.chunk(tokens)[at["data"] * sizes["expert"] + at["expert"]]
        return part.chunk(shares)[at["tensor"] % shares].clone()

    with simulate(text) as mesh:
        mine = scatter(params, layouts)
        factors = {name: x.requires_grad_() for name, x in mine.items() if is_trained(name)}
        x_BTD = per_rank(mesh.world, lambda rank: own(x_TD, rank).unsqueeze(0))
        g = per_rank(mesh.world, lambda rank: own(g_TD, rank))
        parts = lora._low_rank(mine, mesh, SCALE, split=bool(split))
        inputs = RoutingInputs(None, None, split=bool(split), row_bound=bound)
        got, load = mixture(Experts(E, K, M), mesh, parts, x_BTD, inputs)
        raw = torch.autograd.grad(loss(got[0], load.probs_E, g), list(factors.values()))
        names = [name for name, _ in trees.named(layouts)]
        rest = dict(zip(names, rules.rest_axes(layouts, layouts, mesh, partial), strict=True))
        summed = {name: psum(x, mesh, rest[name]) for name, x in zip(factors, raw, strict=True)}
        for rank in range(mesh.world):
            assert (gather(got, rank)[0] - own(out, rank)).abs().max() < 1e-12
            for name, g_own in gather(summed, rank).items():
                box = tuple(slice(*b) for b in layouts[name].box(rank))
                assert (g_own - grads[name][box]).abs().max() < 1e-12, (name, rank)


@pytest.mark.slow
def test_a_compiled_layer_has_the_same_numbers():
    torch._dynamo.reset()
    plain = decoder_model(
        decoder_config(vocab=31, embed=16, layers=2, heads=4, kv_heads=2, head=6, mlp=24, experts=Experts(4, 2, 8))
    )
    model = lora.with_lora(plain, Lora(2, 3.0, ("q", *ROUTED)))
    generator = torch.Generator().manual_seed(1)
    params = trees.map(
        lambda x: x + torch.randn(x.shape, generator=generator, dtype=x.dtype) / 5,
        model.init(torch.Generator().manual_seed(0), torch.float64),
    )
    batch = Batch(tokens=torch.randint(0, 31, (2, 9), generator=generator), mask=None)

    def results(layer):
        placed = place(model, layer=layer, dtype=torch.float64)
        return trees.value_and_grad(lambda p: (placed.token_scores(p, batch).logp.square().mean(), ()))(params)

    compiled = results(compile_layer(model, "on", backend="aot_eager"))
    pairs = zip(trees.leaves(results(model.layer)), trees.leaves(compiled), strict=True)
    assert all((a - b).abs().max() < 1e-12 for a, b in pairs)
