"""The global norm and a clipped AdamW step on simulated meshes against one device."""

import functools

import pytest
import torch

from funrl import optim, trees
from funrl.mesh import mesh as meshes
from funrl.mesh.rules import layouts
from funrl.mesh.simulate import gather, scatter, simulate

AXES = {"embed": ("vocab", "embed"), "q": ("heads", "head"), "k": ("kv_heads", "head"), "norm": ("norm",)}
TP = {"vocab": "tensor", "embed": None, "heads": "tensor", "kv_heads": None, "head": None, "norm": None}
RULES = {"tp": TP, "fsdp": TP | {"embed": "data", "heads": ("data", "tensor")}}


def whole(seed):
    generator = torch.Generator().manual_seed(seed)
    w = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=generator)  # noqa: E731
    return {"embed": w(8, 4), "q": w(8, 3), "k": w(3, 5), "norm": w(4)}


@pytest.mark.parametrize("rules", RULES)
@pytest.mark.parametrize("mesh", ["dp2", "tp2", "dp4,tp2", "dp2,sp2,tp2"])
def test_a_norm_counts_every_element_once(mesh, rules):
    tree = whole(0)
    lay = layouts(tree, AXES, RULES[rules], meshes.parse(mesh))
    expected = torch.cat([x.flatten() for x in trees.leaves(tree)]).norm()
    with simulate(mesh) as m:
        norm = optim.global_norm(scatter(tree, lay), lay, m)
        for rank in range(m.world):
            torch.testing.assert_close(gather(norm, rank), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("make", [optim.adamw, optim.fused_adamw])
def test_clipped_steps_on_shards_are_shards_of_the_steps_on_the_whole(make):
    def three_steps(params, grads, norm):
        step = optim.chain(optim.clip_by_global_norm(0.5, norm), make(optim.warmup_constant(0.1, 2), weight_decay=0.1))
        state = step.init(params)
        for g in grads:
            updates, state = step.update(g, state, params)
            params = optim.apply_updates(params, updates)
        return params

    start, grads = whole(0), [whole(seed) for seed in (1, 2, 3)]
    lay = layouts(start, AXES, RULES["fsdp"], meshes.parse("dp2,tp2"))
    with simulate("dp2,tp2") as m:
        norm = functools.partial(optim.global_norm, layouts=lay, mesh=m)
        got = three_steps(scatter(start, lay), [scatter(g, lay) for g in grads], norm)
        ranks = [gather(got, r) for r in range(m.world)]
    expected = three_steps(start, grads, optim.global_norm)
    for rank, tree in enumerate(ranks):
        for x, y, where in zip(trees.leaves(tree), trees.leaves(expected), trees.leaves(lay), strict=True):
            part = y[tuple(slice(low, high) for low, high in where.box(rank))]
            torch.testing.assert_close(x, part, rtol=1e-12, atol=1e-12)
