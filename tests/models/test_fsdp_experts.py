"""Experts and their router in the tables that shard weights fully: losses and gradients are those of one device."""

import functools

import torch
from test_fsdp import F64

from funrl import trees
from funrl.mesh.collectives import all_gather, psum, psum_scatter
from funrl.mesh.launch import launch, view
from funrl.mesh.mesh import parse, single
from funrl.mesh.reshard import unshard
from funrl.mesh.rules import COMPUTE, STORED, fully_sharded, gather_axes, layouts, rest_axes, shard
from funrl.mesh.sums import sum_rest
from funrl.models import fsdp


def _experts_loss(mesh, places, params):
    """A mixture of experts in which every expert sees every token; this rank's tokens, all experts."""
    stored, compute = places
    weights = fsdp.gathered(params, stored, compute, mesh, F64)
    tokens, count = mesh.index(mesh.token_axes), mesh.size(mesh.token_axes)
    x_TD = ACTIVATIONS.chunk(count)[tokens]
    gates_TE = (x_TD @ weights["router"].T).softmax(-1)
    over = compute["experts"]["up"].spec[0]  # own experts see the tokens of all ranks that have other experts
    x_TD, gates_TE = all_gather(x_TD, mesh, over), all_gather(gates_TE, mesh, over)
    own_TE = gates_TE.chunk(mesh.size(over), 1)[mesh.index(over)]
    h_TEF = torch.einsum("td,efd->tef", x_TD, weights["experts"]["up"]).tanh()
    y_TD = torch.einsum("tef,edf,te->td", h_TEF, weights["experts"]["down"], own_TE)
    y_TD = psum_scatter(y_TD, mesh, over)
    loss = (y_TD.sin() * torch.arange(1.0, 9.0)).sum()
    return psum(loss, mesh, "sequence"), None  # of rows: the same on the ranks that share them


ACTIVATIONS = torch.randn(16, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(4))
EXPERTS = {
    "experts": {"up": ("experts", "mlp", "expert_embed"), "down": ("experts", "expert_embed", "mlp")},
    "router": ("head", "embed"),
}
GATHERED_EXPERTS = {**COMPUTE, "experts": None}  # stored by experts, and computed with as any other weight
# mesh: how weights are stored and computed with; axes that are gathered, and those left to sum, of experts and router
EXPERT_CASES = {
    "dp2,ep2 replicated": ("dp2,ep2", STORED, COMPUTE, "", "data", "", "data expert"),
    "dp2,ep2": ("dp2,ep2", fully_sharded(STORED, ("data", "expert")), COMPUTE, "data", "", "data expert", ""),
    "dp2,ep2 in the other order": (
        "dp2,ep2",
        fully_sharded(STORED, ("expert", "data")),
        COMPUTE,
        "data",
        "",
        "expert data",
        "",
    ),
    "ep2,sp2 over both": (
        "ep2,sp2",
        fully_sharded(STORED, ("expert", "sequence")),
        COMPUTE,
        "sequence",
        "",
        "expert sequence",
        "",
    ),
    "dp2,ep2 along experts": (
        "dp2,ep2",
        {**STORED, "experts": ("expert", "data")},
        COMPUTE,
        "data",
        "",
        "",
        "data expert",
    ),
    "dp2,ep2 gathered": (
        "dp2,ep2",
        fully_sharded(STORED, ("data", "expert")),
        GATHERED_EXPERTS,
        "expert data",
        "",
        "data expert",
        "",
    ),
}


def _experts_program(table, rules, params, mesh):
    stored, compute = (layouts(params, EXPERTS, which, mesh.sizes) for which in (table, rules))
    (loss, _), grads = trees.value_and_grad(functools.partial(_experts_loss, mesh, (stored, compute)))(
        shard(params, stored, mesh)
    )
    names = [name for name, _ in trees.named(stored)]
    over = {
        name: [axis for axes in gather_axes(name, *pair) for axis in axes]
        for name, *pair in zip(names, trees.leaves(stored), trees.leaves(compute), strict=True)
    }
    rest = dict(zip(names, rest_axes(stored, compute, mesh), strict=True))
    grads, loss = sum_rest(grads, loss, stored, compute, mesh)
    return loss, unshard(grads, stored, mesh), over, rest


def _experts_programs(params, mesh):
    """Results of all cases, on meshes of the same ranks."""
    cases = {name: (view(mesh, parse(text)), table, rules) for name, (text, table, rules, *_) in EXPERT_CASES.items()}
    return {name: _experts_program(table, rules, params, on) for name, (on, table, rules) in cases.items()}


def test_experts_are_one_line_of_the_tables():
    generator = torch.Generator().manual_seed(5)
    shapes = {"experts": {"up": (4, 6, 8), "down": (4, 8, 6)}, "router": (4, 8)}
    params = {
        "experts": {k: torch.randn(s, dtype=torch.float64, generator=generator) for k, s in shapes["experts"].items()},
        "router": torch.randn(shapes["router"], dtype=torch.float64, generator=generator),
    }
    whole = [layouts(params, EXPERTS, COMPUTE, parse(""))] * 2
    (expected, _), gradient = trees.value_and_grad(functools.partial(_experts_loss, single(), whole))(params)
    results = launch(functools.partial(_experts_programs, params), parse("dp2,ep2"), "cpu")
    for case, (loss, grads, over, rest) in results.items():
        *_, gathers, left, router_gathers, router_left = EXPERT_CASES[case]
        assert abs(loss - expected) < 1e-12 * abs(expected), case
        for (name, x), y in zip(trees.named(grads), trees.leaves(gradient), strict=True):
            assert (x - y).abs().max() < 1e-11 and y.abs().max() > 1e-3, (case, name)
            of_router = name == "router"
            assert sorted(over[name]) == sorted((router_gathers if of_router else gathers).split()), (case, name)
            assert list(rest[name]) == (router_left if of_router else left).split(), (case, name)
