"""A mixture of experts against a plain loop over tokens, on simulated meshes, and with every collective at fault."""

import functools

import pytest
import torch
import torch.nn.functional as F
from selection import quick

from funrl import trees
from funrl.cost.tracing.estimate import pretended
from funrl.mesh import rules
from funrl.mesh.collectives import psum
from funrl.mesh.mesh import SINGLE, coordinates, parse
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes
from funrl.mesh.simulate import gather, per_rank, scatter, simulate
from funrl.models import decoder_model
from funrl.models.decoder import experts as module
from funrl.models.decoder.experts import mixture
from funrl.models.decoder.routing import Experts, expert_counts, slots_of, take_rows
from funrl.tasks import arithmetic

E, K, D, M, T = 4, 2, 8, 6, 8
AXES = {
    "router": ("router", "embed"),
    "expert_gate": ("experts", "mlp", "expert_embed"),
    "expert_up": ("experts", "mlp", "expert_embed"),
    "expert_down": ("experts", "expert_embed", "mlp"),
}


def weights():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    params = {"router": draw(E, D), "expert_gate": draw(E, M, D), "expert_up": draw(E, M, D)}
    return params | {"expert_down": draw(E, D, M)}, draw(T, D), draw(T, D)


def by_tokens(k, normalized, params, x_TD):
    """Each token by itself; and the probabilities."""
    out, probs = [], (x_TD @ params["router"].T).softmax(-1)
    for x, p in zip(x_TD, probs, strict=True):
        top, ids = p.topk(k)
        top = top / top.sum() if normalized else top
        gates = [F.silu(params["expert_gate"][e] @ x) * (params["expert_up"][e] @ x) for e in ids]
        out.append(sum(t * params["expert_down"][e] @ g for t, e, g in zip(top, ids, gates, strict=True)))
    return torch.stack(out), probs


def loss(out_TD, probs_E, g_TD):
    """Linear in tokens: outputs, and probabilities as routers' losses have them."""
    return (out_TD * g_TD).sum() + (probs_E * torch.arange(1.0, E + 1)).sum()


def expected(k, normalized):
    params, x_TD, g_TD = weights()
    leaves = [x.requires_grad_() for x in (*trees.leaves(params), x_TD)]
    out_TD, probs = by_tokens(k, normalized, params, x_TD)
    *grads, d_x = torch.autograd.grad(loss(out_TD, probs.sum(0), g_TD), leaves)
    return out_TD.detach(), trees.fill(params, grads), d_x


def worst(mesh_text, k, normalized=True, split=False):
    """The largest difference of outputs and gradients from those of one process, over all ranks.

    Args:
      split: each tensor rank has a part of the tokens of its group.
    """
    out, grads, d_x = expected(k, normalized)
    params, x_TD, g_TD = weights()
    sizes = parse(mesh_text)
    tokens, shares = sizes["data"] * sizes["expert"], sizes["tensor"] if split else 1
    layouts = rules.layouts(params, AXES, rules.COMPUTE, sizes)
    partial = rules.partial_axes(params, AXES, rules.SPLIT_RESIDUAL if split else {})

    def own(x, rank):
        at = coordinates(sizes, rank)
        group = x.chunk(tokens)[at["data"] * sizes["expert"] + at["expert"]]
        return group.chunk(shares)[at["tensor"] % shares].clone()

    with simulate(mesh_text) as mesh:
        mine = trees.map(lambda x: x.requires_grad_(), scatter(params, layouts))
        x_BTD = per_rank(mesh.world, lambda rank: own(x_TD, rank).unsqueeze(0)).requires_grad_()
        g = per_rank(mesh.world, lambda rank: own(g_TD, rank))
        got, load = mixture(Experts(E, k, M, normalized), mesh, mine, x_BTD, split=split)
        *raw, d = torch.autograd.grad(loss(got[0], load.probs_E, g), [*trees.leaves(mine), x_BTD])
        rest = rules.rest_axes(layouts, layouts, mesh, partial)
        summed = trees.fill(mine, [psum(x, mesh, axes) for x, axes in zip(raw, rest, strict=True)])
        gaps = []
        for rank in range(mesh.world):
            pairs = [(gather(got, rank)[0], own(out, rank)), (gather(d, rank)[0], own(d_x, rank))]
            boxes = [tuple(slice(*b) for b in layout.box(rank)) for layout in trees.leaves(layouts)]
            parts = [x[box] for x, box in zip(trees.leaves(grads), boxes, strict=True)]
            pairs += zip(trees.leaves(gather(summed, rank)), parts, strict=True)
            gaps += [(a - b).abs().max().item() for a, b in pairs]
    return max(gaps)


@pytest.mark.parametrize(
    "mesh,k,normalized",
    [
        ("dp1", 1, False),
        ("dp1", 2, True),
        ("dp1", 4, True),
        ("dp2,ep2", 1, False),
        ("dp2,ep2", 2, True),
        ("ep2,tp2", 1, False),
        ("ep2,tp2", 4, True),
        ("ep4", 2, True),
        ("ep2,tp2 split", 1, False),
        ("ep2,tp2 split", 2, True),
    ],
)
def test_values_and_gradients_are_those_of_a_loop_over_tokens(mesh, k, normalized):
    text, _, split = mesh.partition(" ")
    assert worst(text, k, normalized, bool(split)) < 1e-12


class Scaled(torch.autograd.Function):
    """Times `forward`, and the gradient times `backward`."""

    @staticmethod
    def forward(x, forward, backward):
        return x * forward

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.backward_factor = inputs[2]

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.backward_factor, None, None


# k of ep2,tp2 (2: gathered, 1: ragged), the collective, and how many calls of it there are with floating point numbers
CALLS = [
    (2, "all_gather", 2),
    (2, "psum_scatter", 1),
    (2, "pbroadcast", 1),
    (2, "enter", 1),
    (2, "leave", 1),
    (2, "all_tokens", 1),
    (1, "ragged_all_to_all", 2),
]


@pytest.mark.parametrize("fault", quick(["doubled", "gradient doubled"], ["gradient doubled"]))
@pytest.mark.parametrize("k,name,call", [(k, name, i) for k, name, calls in CALLS for i in range(calls)])
def test_a_collective_at_fault_is_found(monkeypatch, fault, k, name, call):
    right, seen = getattr(module, name), []

    def wrong(x, *args, **options):
        out = right(x, *args, **options)
        if not x.is_floating_point() or options.get("axes", args[-1]) == ():
            return out
        seen.append(name)
        if len(seen) - 1 != call:
            return out
        return Scaled.apply(out, *((2, 1) if fault == "doubled" else (1, 2)))

    monkeypatch.setattr(module, name, wrong)
    assert worst("ep2,tp2", k, split=name == "all_tokens") > 1e-3
    assert len(seen) == next(calls for ways, item, calls in CALLS if (ways, item) == (k, name))


@pytest.mark.parametrize("k,name", [(2, "all_gather"), (1, "all_to_all")])
def test_an_exchange_of_experts_ids_or_counts_at_fault_is_found(monkeypatch, k, name):
    right, seen = getattr(module, name), []

    def wrong(x, mesh, over, **dims):
        out = right(x, mesh, over, **dims)
        if x.is_floating_point():
            return out
        seen.append(over)
        return torch.cat([x] * (len(out) // len(x)))  # as if all had sent this

    monkeypatch.setattr(module, name, wrong)
    try:
        gap = worst("ep2,tp2", k)
    except (RuntimeError, IndexError):  # sizes that do not match end a run
        gap = float("inf")
    assert gap > 1e-3 and seen == [("expert",)]


@pytest.mark.parametrize("fault", [("router", ()), ("expert_up", ("expert",))])
def test_a_gradient_summed_over_other_axes_is_found(monkeypatch, fault):
    right = rules.rest_axes

    def wrong(stored, *rest):
        axes = dict(zip([name for name, _ in trees.named(stored)], right(stored, *rest), strict=True))
        return list((axes | dict([fault])).values())

    monkeypatch.setattr(rules, "rest_axes", wrong)
    assert worst("ep2,tp2", 2) > 1e-3


def test_padding_goes_to_no_expert_and_given_routes_are_taken():
    params, x_TD, _ = weights()
    experts, real = Experts(E, K, M), torch.tensor([True] * 5 + [False] * 3)
    out, load = mixture(experts, SINGLE, params, x_TD[None], real[None])
    assert not out[0, 5:].any() and out[0, :5].any(1).all()
    assert load.counts_E.sum() == 5 * K and (load.ids_TK[5:] == E).all()
    alone, less = mixture(experts, SINGLE, params, x_TD[None, :5])
    assert torch.allclose(alone[0], out[0, :5]) and torch.allclose(load.probs_E, less.probs_E)
    assert torch.allclose(load.z, less.z)

    routes = (less.ids_TK + 1) % E
    routes[2] = -1  # as the router says
    other, chosen = mixture(experts, SINGLE, params, x_TD[None, :5], None, routes[None])
    assert torch.equal(chosen.ids_TK[[0, 1, 3, 4]], routes[[0, 1, 3, 4]]) and torch.allclose(other[0, 2], alone[0, 2])
    again, _ = mixture(experts, SINGLE, params, x_TD[None, :5], None, less.ids_TK[None])
    assert torch.equal(again, alone) and not torch.allclose(other[0, 0], alone[0, 0])


def test_slots_are_sorted_by_expert_and_static_ones_have_a_tail():
    ids = torch.tensor([[2, 0], [3, 2], [4, 4], [2, 1]])  # 4: none
    assert expert_counts(ids, E).tolist() == [1, 1, 3, 1]
    slots = slots_of(ids, 2, 2)
    assert slots.token_M.tolist() == [0, 1, 3, 1] and slots.ends_E.tolist() == [3, 4]
    assert slots.row_TK.tolist() == [[0, 4], [3, 1], [4, 4], [2, 4]]
    static = slots_of(ids, 2, 2, static=True)
    assert len(static.token_M) == 8 and torch.equal(static.token_M[:4], slots.token_M)
    assert torch.equal(take_rows(torch.eye(4), slots).argmax(-1), slots.token_M)


def test_experts_come_from_their_ranks_to_the_engine_in_as_few_bytes_as_there_can_be():
    config = arithmetic.model_config(model="arithmetic_moe")
    model = decoder_model(config)
    for table in (rules.STORED, rules.fully_sharded(rules.STORED, ("data", "expert"))):
        stored = rules.layouts(model.shapes, model.axes, table, parse("ep4"))
        wanted = rules.layouts(model.shapes, model.axes, rules.GENERATE, parse("ep2,tp2"))
        made = plan(stored, wanted, torch.float32)
        assert received_bytes(made) == lower_bound_bytes(made)
        experts = [i for i, name in enumerate(made.names) if "expert_" in name]
        only = plan(
            *(
                {name: dict(trees.named(tree))[name] for name in (made.names[i] for i in experts)}
                for tree in (stored, wanted)
            ),
            torch.float32,
        )
        # A rank keeps of its 2 experts the half that it generates with, and receives that half of 2 others.
        assert received_bytes(only) == [config.layers * 2 * 3 * 64 * 32 * 4] * 4


def test_the_gathered_way_reads_nothing_from_a_device():
    """On "meta": the host can read no number of it."""
    empty = functools.partial(torch.empty, device="meta", requires_grad=True)
    params = {
        "router": empty(8, 12),
        "expert_gate": empty(4, 16, 12),
        "expert_up": empty(4, 16, 12),
        "expert_down": empty(4, 12, 16),
    }
    with pretended(parse("ep2")) as mesh:
        out_BTD, _ = mixture(Experts(count=8, per_token=2, mlp=16), mesh, params, h_BTD=empty(2, 5, 12))
        out_BTD.sum().backward()
    assert out_BTD.shape == (2, 5, 12) and params["expert_gate"].grad.shape == (4, 16, 12)
