"""A mixture of experts against a plain loop over tokens, on simulated meshes, and with every collective at fault."""

import dataclasses
import functools
import math
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from selection import quick

from funrl import trees
from funrl.compiled_kernels.exact import dispatch
from funrl.cost.tracing.estimate import pretended
from funrl.cost.tracing.hardware import HARDWARE
from funrl.cost.tracing.tracer import Tracer
from funrl.mesh import launch as launching
from funrl.mesh import rules
from funrl.mesh.collectives import gather_objects, psum
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, Mesh, coordinates, parse
from funrl.mesh.plan import lower_bound_bytes, plan, received_bytes
from funrl.mesh.simulate import gather, per_rank, scatter, simulate
from funrl.models import decoder_model
from funrl.models.decoder import experts as module
from funrl.models.decoder.experts import RoutingInputs, mixture
from funrl.models.decoder.routing import Experts, expert_counts, slots_by_rank, slots_of, sort_blocks, take_rows
from funrl.models.expert_rows import FIRST_BOUND, ExpertRows
from funrl.tasks import arithmetic

E, K, D, M, T = 4, 2, 8, 6, 32
ENOUGH = 4 * E  # bound of rows that leaves room for all slots
AXES = {
    "router": ("router", "embed"),
    "expert_gate": ("experts", "mlp", "expert_embed"),
    "expert_up": ("experts", "mlp", "expert_embed"),
    "expert_down": ("experts", "expert_embed", "mlp"),
}


@pytest.fixture(autouse=True)
def _any_bound(monkeypatch):
    """As few rows as the bound says: tests have few tokens."""
    monkeypatch.setattr(module, "LEAST_ROWS", 0)


def weights():
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    params = {"router": draw(E, D), "expert_gate": draw(E, M, D), "expert_up": draw(E, M, D)}
    return params | {"expert_down": draw(E, D, M)}, draw(T, D), draw(T, D)


def by_tokens(k, normalized, params, x_TD, ids_TK=None):
    """Each token by itself; and the probabilities."""
    out, probs = [], (x_TD @ params["router"].T).softmax(-1)
    for t, (x, p) in enumerate(zip(x_TD, probs, strict=True)):
        ids = p.topk(k).indices if ids_TK is None else ids_TK[t]
        top = p[ids]
        top = top / top.sum() if normalized else top
        gates = [F.silu(params["expert_gate"][e] @ x) * (params["expert_up"][e] @ x) for e in ids]
        out.append(sum(t * params["expert_down"][e] @ g for t, e, g in zip(top, ids, gates, strict=True)))
    return torch.stack(out), probs


def loss(out_TD, probs_E, g_TD):
    """Linear in tokens: outputs, and probabilities as routers' losses have them."""
    return (out_TD * g_TD).sum() + (probs_E * torch.arange(1.0, E + 1)).sum()


def expected(k, normalized, ids_TK=None):
    params, x_TD, g_TD = weights()
    leaves = [x.requires_grad_() for x in (*trees.leaves(params), x_TD)]
    out_TD, probs = by_tokens(k, normalized, params, x_TD, ids_TK)
    *grads, d_x = torch.autograd.grad(loss(out_TD, probs.sum(0), g_TD), leaves)
    return out_TD.detach(), trees.fill(params, grads), d_x


def worst(mesh_text, k, normalized=True, split=False, bound=None, rows=None, ids_TK=None, node=None):
    """The largest difference of outputs and gradients from those of one process, over all ranks.

    Args:
      split: each tensor rank has a part of the tokens of its group.
      bound: of the rows of a rank's experts, and where `rows` measure them, theirs.
      ids_TK: experts of all tokens.
      node: ranks of a node; None: all are on one.
    """
    out, grads, d_x = expected(k, normalized, ids_TK)
    params, x_TD, g_TD = weights()
    sizes = parse(mesh_text)
    tokens, shares = sizes["data"] * sizes["expert"], sizes["tensor"] if split else 1
    layouts = rules.layouts(params, AXES, rules.COMPUTE, sizes)
    partial = rules.partial_axes(params, AXES, rules.SPLIT_RESIDUAL if split else {})

    def group_of(x, rank):
        at = coordinates(sizes, rank)
        return x.chunk(tokens)[at["data"] * sizes["expert"] + at["expert"]]

    def own(x, rank):
        return group_of(x, rank).chunk(shares)[coordinates(sizes, rank)["tensor"] % shares].clone()

    with simulate(mesh_text, node) as mesh:
        mine = trees.map(lambda x: x.requires_grad_(), scatter(params, layouts))
        x_BTD = per_rank(mesh.world, lambda rank: own(x_TD, rank).unsqueeze(0)).requires_grad_()
        g = per_rank(mesh.world, lambda rank: own(g_TD, rank))
        ids_BTK = None if ids_TK is None else per_rank(mesh.world, lambda rank: group_of(ids_TK, rank).unsqueeze(0))
        bound = bound if rows is None else rows.bound
        inputs = RoutingInputs(None, ids_BTK, split=split, row_bound=bound)
        got, load = mixture(Experts(E, k, M, normalized), mesh, mine, x_BTD, inputs)
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
        if rows is not None:
            rows.add(torch.stack([gather(load.peak, rank) for rank in range(mesh.world)]))
    return max(gaps)


@pytest.mark.parametrize("bound", [None, ENOUGH])
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
def test_values_and_gradients_are_those_of_a_loop_over_tokens(mesh, k, normalized, bound):
    text, _, split = mesh.partition(" ")
    assert worst(text, k, normalized, bool(split), bound) < 1e-12


BY_NODE = [  # mesh, ranks of a node and experts of a token
    ("ep4", 2, 2),
    ("ep4", 2, 4),
    ("dp2,ep4", 2, 3),
    ("ep4,tp2", 4, 3),
    ("ep4,tp2 split", 4, 2),
    ("ep4", 2, 1),  # which is one row either way
    ("ep2,tp2 split", 2, 4),  # one rank of `expert` on each node
]


def by_any_node(experts, mesh):
    """Whether ranks are on several nodes, instead of `_goes_by_node`: tests have few experts and nodes."""
    return mesh.nodes is not None


@pytest.mark.parametrize("mesh,node,k", BY_NODE)
def test_tokens_that_go_once_to_a_node_give_the_values_and_gradients_of_a_loop(monkeypatch, mesh, node, k):
    monkeypatch.setattr(module, "_goes_by_node", by_any_node)
    text, _, split = mesh.partition(" ")
    assert worst(text, k, True, bool(split), ENOUGH, node=node) < 1e-12


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


# of ep2,tp2: whether rows are bounded, the collective, how many calls of it there are with floating point numbers, and
# whether the residual stream is split
CALLS = [
    (False, "all_gather", 2, False),
    (False, "psum_scatter", 1, False),
    (False, "pbroadcast", 1, False),
    (False, "enter", 1, False),
    (False, "leave", 1, False),
    (False, "all_tokens", 1, True),
    (False, "all_gather", 4, True),
    (False, "psum_scatter", 2, True),
    (False, "own_shard", 1, True),
    (True, "start_rows", 4, False),  # of two halves of the tokens
    (True, "wait_rows", 4, True),
    (True, "all_gather", 2, True),
    (True, "psum_scatter", 2, True),
]


@pytest.mark.parametrize("fault", quick(["doubled", "gradient doubled"], ["gradient doubled"]))
@pytest.mark.parametrize(
    "bounded,name,call,split",
    [(bounded, name, i, split) for bounded, name, calls, split in CALLS for i in range(calls)],
)
def test_a_collective_at_fault_is_found(monkeypatch, fault, bounded, name, call, split):
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
    assert worst("ep2,tp2", 2, split=split, bound=ENOUGH if bounded else None) > 1e-3
    assert (bounded, name, len(seen), split) in CALLS


@pytest.mark.parametrize("bounded,name", [(False, "all_gather"), (True, "all_to_all")])
def test_an_exchange_of_experts_ids_or_counts_at_fault_is_found(monkeypatch, bounded, name):
    right, seen = getattr(module, name), []

    def wrong(x, mesh, over, **dims):
        out = right(x, mesh, over, **dims)
        if x.is_floating_point():
            return out
        seen.append(over)
        return torch.cat([x] * (len(out) // len(x)))  # as if all had sent this

    monkeypatch.setattr(module, name, wrong)
    assert worst("ep2,tp2", 2, bound=ENOUGH if bounded else None) > 1e-3
    assert seen == [("expert",)]


@pytest.mark.parametrize("fault", ["doubled", "gradient doubled"])
@pytest.mark.parametrize("name", ["start_rows", "wait_rows"])
@pytest.mark.parametrize("call", range(10))
def test_a_message_between_or_inside_of_nodes_at_fault_is_found(monkeypatch, fault, name, call):
    right, seen = getattr(module, name), []

    def wrong(x, *args):
        out = right(x, *args)
        if not x.is_floating_point():
            return out
        seen.append(name)
        if len(seen) - 1 != call:
            return out
        return Scaled.apply(out, *((2, 1) if fault == "doubled" else (1, 2)))

    monkeypatch.setattr(module, name, wrong)
    assert worst("ep4", 3, bound=ENOUGH, node=2) > 1e-3
    assert len(seen) == 10  # of each half tokens and weights to nodes, rows to experts and back, and sums home


def by_nodes_and_flat(node, mesh):
    """Outputs and gradients of this rank's tokens and weights with the ranks on nodes, and with all on one."""
    params, x_TD, g_TD = weights()
    layouts = rules.layouts(params, AXES, rules.COMPUTE, mesh.sizes)
    assert mesh.nodes is not None and mesh.nodes.inside.size("expert") == node
    results = []
    for own in (mesh, dataclasses.replace(mesh, nodes=None)):
        mine = trees.map(lambda x: x.requires_grad_(), rules.shard(params, layouts, mesh))
        x_BTD = x_TD.chunk(mesh.world)[mesh.rank].unsqueeze(0).clone().requires_grad_()
        ways = {"_exact_parts": lambda *_: None, "_goes_by_node": by_any_node}
        with mock.patch.multiple(module, **ways):
            out_BTD, load = mixture(Experts(E, K, M), own, mine, x_BTD, RoutingInputs(row_bound=ENOUGH))
        grads = torch.autograd.grad(
            (out_BTD[0] * g_TD.chunk(mesh.world)[mesh.rank]).sum(), [*trees.leaves(mine), x_BTD]
        )
        results.append([out_BTD.detach(), load.counts_E, *grads])
    return gather_objects(list(zip(*results, strict=True)), mesh)


@pytest.mark.gloo
def test_ranks_on_two_nodes_have_the_bits_of_ranks_on_one(monkeypatch):
    """Of two experts of a token both orders of the sum are one; gradients of experts add up rows in another order."""
    monkeypatch.setattr(launching, "ranks_of_node", lambda: 2)
    for pairs in launch(functools.partial(by_nodes_and_flat, 2), parse("ep4"), "cpu"):
        for i, (nodes, flat) in enumerate(pairs):
            exact = i < 2 or i == len(pairs) - 1 or nodes.shape == (E, D)  # outputs, counts, tokens, and routers
            assert torch.equal(nodes, flat) if exact else (nodes - flat).abs().max() < 1e-13


@pytest.mark.slow
def test_the_way_by_node_is_one_graph():
    sizes = parse("ep4,tp2")
    draw = functools.partial(torch.randn, requires_grad=True, dtype=torch.float64)
    params = {"router": draw(8, 12), "expert_down": draw(2, 12, 8)}
    params |= {name: draw(2, 8, 12) for name in ("expert_gate", "expert_up")}

    def run(params, x_BTD):
        out_BTD, load = mixture(
            Experts(8, 3, 16), mesh, params, x_BTD, RoutingInputs(split=True, row_bound=FIRST_BOUND)
        )
        return out_BTD, load.peak

    with pretended(sizes, 4) as mesh, mock.patch.object(module, "_exact_parts", lambda *_: None):
        with mock.patch.object(dispatch, "has_kernels", lambda: False):
            compiled = torch.compile(run, fullgraph=True, backend="eager")
            out_BTD, peak = compiled(params, draw(1, 6, 12))
        out_BTD.sum().backward()
    assert out_BTD.shape == (1, 6, 12) and peak.ndim == 0 and params["expert_up"].grad is not None


def bytes_between_nodes(experts, embed, mesh_text, node):
    """Bytes that a rank's layer of experts sends to other nodes in a forward pass of 4,096 tokens in 16 bits."""
    sizes = parse(mesh_text)
    ranks, own, inner = sizes["expert"], experts.count // sizes["expert"], experts.mlp // sizes["tensor"]
    tracer = Tracer(HARDWARE["h100"])
    with pretended(sizes, node) as mesh, tracer, tracer.phase("forward"), torch.no_grad():
        empty = functools.partial(torch.empty, dtype=torch.bfloat16)
        params = {"router": empty(experts.count, embed), "expert_down": empty(own, embed, inner)}
        params |= {name: empty(own, inner, embed) for name in ("expert_gate", "expert_up")}
        inputs = RoutingInputs(split=sizes["tensor"] > 1, row_bound=FIRST_BOUND)
        mixture(experts, mesh, params, empty(1, 4096 // sizes["tensor"], embed), inputs)
        groups = {mesh.group_name("expert"): (ranks - 8 // sizes["tensor"]) / ranks}
        if mesh.nodes is not None:
            count = mesh.nodes.across.size("expert")
            groups |= {mesh.nodes.across.group_name("expert"): (count - 1) / count}
    traffic = tracer.phases["forward"].traffic
    return sum(groups.get(group, 0.0) * sent.nbytes for (op, group), sent in traffic.items() if "all_to_all" in op)


QWEN3_235B = Experts(128, 8, 1536)
DEEPSEEK_V3 = Experts(256, 8, 2048, True, (0, 1, 2), "sigmoid", False, 8, 4, scale=2.5)


@pytest.mark.parametrize(
    ("experts", "embed", "mesh", "flat", "by_node"),
    [  # megabytes
        (QWEN3_235B, 4096, "dp16,ep16", 168, 34),
        (QWEN3_235B, 4096, "dp8,ep32", 252, 101),
        (DEEPSEEK_V3, 7168, "dp64,ep64", 514, 232),
        (DEEPSEEK_V3, 7168, "dp8,ep64,tp8", 72, 72),  # one rank of `ep` on a node: eight experts are on seven nodes
    ],
)
def test_a_token_goes_once_to_a_node(experts, embed, mesh, flat, by_node):
    sent = [bytes_between_nodes(experts, embed, mesh, node) / 2e6 for node in (None, 8)]  # there, and as much home
    assert sent == pytest.approx([flat, by_node], abs=0.5)


def nodes_of_choices(experts, nodes, tokens=4096):
    """1 for each token and node that it goes to, [tokens, nodes], where experts are chosen evenly; 8 ranks a node."""
    generator = torch.Generator().manual_seed(0)
    size = experts.count // experts.groups
    open_TG = torch.rand(tokens, experts.groups, generator=generator).argsort(1) < experts.chosen_groups
    scores_TE = torch.rand(tokens, experts.count, generator=generator)
    scores_TE = scores_TE.masked_fill(~open_TG.repeat_interleave(size, 1), -1.0)
    held = 8 * -(-experts.count // (8 * nodes))
    ids_TK = scores_TE.topk(experts.per_token, 1).indices // held
    return F.one_hot(ids_TK, nodes).amax(1)


@pytest.mark.parametrize(
    "experts,nodes",
    [(QWEN3_235B, n) for n in (2, 3, 4, 5, 6, 7, 8)] + [(DEEPSEEK_V3, n) for n in (2, 3, 4, 5, 6, 7, 8, 12, 16)],
)
def test_the_first_bound_has_room_for_the_tokens_of_the_busiest_node(experts, nodes):
    visits_TN = nodes_of_choices(experts, nodes).double()
    bound = module._nodes_of_token(experts, nodes, experts.per_token)
    assert visits_TN.mean(0).max() < min(1.0001, FIRST_BOUND / 4 * bound / nodes)


@pytest.mark.parametrize(
    ("experts", "nodes", "by_node"),
    [
        (QWEN3_235B, 2, True),
        (QWEN3_235B, 8, True),
        (QWEN3_235B, 16, False),
        (DEEPSEEK_V3, 12, True),
        (DEEPSEEK_V3, 16, True),
        (Experts(8, 2, 8), 2, False),  # a row for each token instead of 1.25
        (Experts(8, 3, 8), 2, True),
        (Experts(60, 4, 8), 8, False),
    ],
)
def test_tokens_go_by_node_where_that_sends_clearly_fewer_rows(experts, nodes, by_node):
    across = mock.Mock(size=lambda axis: nodes)
    assert module._goes_by_node(experts, mock.Mock(nodes=mock.Mock(across=across))) == by_node
    assert not module._goes_by_node(experts, mock.Mock(nodes=None))


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
    x_TD = x_TD[:8]
    experts, real = Experts(E, K, M), torch.tensor([True] * 5 + [False] * 3)
    out, load = mixture(experts, SINGLE, params, x_TD[None], RoutingInputs(real[None]))
    assert not out[0, 5:].any() and out[0, :5].any(1).all()
    assert load.counts_E.sum() == 5 * K and (load.ids_TK[5:] == E).all()
    alone, less = mixture(experts, SINGLE, params, x_TD[None, :5])
    assert torch.allclose(alone[0], out[0, :5]) and torch.allclose(load.probs_E, less.probs_E)
    assert torch.allclose(load.z, less.z)

    routes = (less.ids_TK + 1) % E
    routes[2] = -1  # as the router says
    other, chosen = mixture(experts, SINGLE, params, x_TD[None, :5], RoutingInputs(None, routes[None]))
    assert torch.equal(chosen.ids_TK[[0, 1, 3, 4]], routes[[0, 1, 3, 4]]) and torch.allclose(other[0, 2], alone[0, 2])
    again, _ = mixture(experts, SINGLE, params, x_TD[None, :5], RoutingInputs(None, less.ids_TK[None]))
    assert torch.equal(again, alone) and not torch.allclose(other[0, 0], alone[0, 0])


def test_slots_are_sorted_by_expert_and_static_ones_have_a_tail():
    ids = torch.tensor([[2, 0], [3, 2], [4, 4], [2, 1]])  # 4: none
    assert expert_counts(ids, E).tolist() == [1, 1, 3, 1]
    slots = slots_of(ids, 2, 2)
    assert slots.token_M.tolist() == [0, 1, 3, 1] and slots.ends.tolist() == [3, 4] and slots.needed == 4
    assert slots.row_TK.tolist() == [[0, 4], [3, 1], [4, 4], [2, 4]]
    static = slots_of(ids, 2, 2, static=True)
    assert len(static.token_M) == 8 and torch.equal(static.token_M[:4], slots.token_M)
    assert torch.equal(take_rows(torch.eye(4), slots).argmax(-1), slots.token_M)


def test_blocks_of_ranks_are_sorted_by_expert_and_have_rows_up_to_a_bound():
    ids = torch.tensor([[2, 0], [3, 2], [4, 4], [2, 1]])  # 4: none
    blocks = slots_by_rank(ids, ranks=2, experts=2, rows=3)
    assert blocks.ends.tolist() == [[1, 2], [3, 3]] and blocks.needed == 4
    assert blocks.token_M.view(2, 3)[0, :2].tolist() == [0, 3] and blocks.token_M.view(2, 3)[1].tolist() == [0, 1, 3]
    assert blocks.row_TK.tolist() == [[3, 0], [6, 4], [6, 6], [5, 1]]  # the second of expert 3 has no room
    order, ends = sort_blocks(torch.tensor([[1, 2], [3, 3]]), 3)  # blocks of two senders for the same two experts
    assert order.tolist() == [0, 3, 4, 5, 1, 2] and ends.tolist() == [4, 5]


def drawn_ids(seed, k):
    """Experts of all tokens: even, drawn with a preference, or the same for all."""
    generator = torch.Generator().manual_seed(seed)
    if seed == 0:
        return torch.arange(T * k).view(T, k) % E
    if seed == 1:
        return torch.arange(k).expand(T, k)
    liked = torch.rand(E, generator=generator) ** 4 + 1e-3
    return torch.multinomial(liked.expand(T, E), k, generator=generator)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "mesh,k,split",
    [
        ("ep2", 2, False),
        ("ep4", 2, False),
        ("ep4 by 2", 2, False),
        ("ep2", 1, False),
        ("ep2,tp2", 1, True),
        ("ep2,tp2", 2, True),
        ("ep2,tp2 by 2", 3, True),
    ],
)
def test_bounded_rows_are_exact_however_uneven_the_load(mesh, k, split, seed, monkeypatch):
    """A pass that needs more rows than the bound says so, is wrong, and is repeated until it has enough."""
    mesh, _, node = mesh.partition(" by ")
    ids, sizes = drawn_ids(seed, k), parse(mesh)
    rows, taken, gaps = ExpertRows(Mesh(sizes)), [], []
    products = module.grouped_linear
    monkeypatch.setattr(module, "grouped_linear", lambda x, *rest: taken.append(x.shape[0]) or products(x, *rest))
    monkeypatch.setattr("funrl.models.expert_rows.pmax", lambda x, *_: x)  # `worst` has that of all simulated ranks
    bounds = []

    def run():
        bounds.append(rows.bound)
        gaps.append(worst(mesh, k, True, split, None, rows, ids, int(node) if node else None))
        return gaps[-1]

    assert rows.repeat(run) < 1e-12
    assert rows.bound is None and bounds[0] == FIRST_BOUND and len(bounds) <= 2  # by as much as it takes at once
    slots = T * k // 2  # of half of the tokens of all ranks; a rank of `expert` has a share of them on average
    most = max(math.ceil(bound / 4 * slots / sizes["expert"]) for bound in bounds) + sizes["expert"] * sizes["tensor"]
    assert max(taken) <= most
    if seed == 0:
        assert len(gaps) == 1 and max(taken) <= 1.25 * slots / sizes["expert"] + sizes["expert"] * sizes["tensor"]
    if seed == 1:
        assert len(gaps) == 2 and gaps[0] > 1e-3  # slots without a row count 0


@pytest.mark.parametrize("least", [T * K // 2 // 2, T * K // 2 // 2 - 1])
def test_a_pass_of_few_slots_has_room_at_any_bound(least, monkeypatch):
    """Half of the tokens of a rank of two send all their slots to one rank: that many rows are enough."""
    monkeypatch.setattr(module, "LEAST_ROWS", least)
    monkeypatch.setattr("funrl.models.expert_rows.pmax", lambda x, *_: x)
    rows = ExpertRows(Mesh(parse("ep2")))
    bounds = []

    def run():
        bounds.append(rows.bound)
        return worst("ep2", K, rows=rows, ids_TK=drawn_ids(1, K))

    assert rows.repeat(run) < 1e-12
    assert len(bounds) == (1 if least == T * K // 2 // 2 else 2)


def test_rows_of_one_half_of_the_tokens_travel_while_the_other_is_computed(monkeypatch):
    events = []

    def logged(name):
        right = getattr(module, name)

        def call(*args, **options):
            events.append(name)
            return right(*args, **options)

        monkeypatch.setattr(module, name, call)

    for name in ("start_rows", "wait_rows", "_feed_forward"):
        logged(name)
    assert worst("ep2", 2, bound=ENOUGH) < 1e-12
    half = ["wait_rows", "_feed_forward", "start_rows"]
    assert events == ["start_rows", "start_rows", *half, *half, "wait_rows", "wait_rows"]


def test_the_bound_of_rows_doubles_until_it_suffices_and_stays():
    rows = ExpertRows(Mesh(parse("ep8")))
    assert not rows.exceeded(1.25) and rows.exceeded(1.26)
    with rows.bounded():
        assert rows.bound == 10
    assert rows.exceeded(7.9) and not rows.exceeded(8.0) and not rows.exceeded(1.0)
    with rows.bounded():
        assert rows.bound == 40
    unlimited = ExpertRows(Mesh(parse("dp8")))
    with unlimited.bounded():
        assert unlimited.bound is None and not unlimited.limited


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


@pytest.mark.parametrize("bound", [None, FIRST_BOUND])
@pytest.mark.parametrize(
    "mesh,k,node", [("ep2", 2, None), ("ep4", 2, None), ("ep2,tp2", 1, None), ("ep4", 2, 2), ("ep4,tp2", 3, 4)]
)
def test_no_way_reads_anything_from_a_device(mesh, k, node, bound):
    """On "meta": the host can read no number of it."""
    sizes = parse(mesh)
    own, inner = 8 // sizes["expert"], 16 // sizes["tensor"]
    empty = functools.partial(torch.empty, device="meta", requires_grad=True)
    params = {
        "router": empty(8, 12),
        "expert_gate": empty(own, inner, 12),
        "expert_up": empty(own, inner, 12),
        "expert_down": empty(own, 12, inner),
    }
    with pretended(sizes, node) as mesh:
        inputs = RoutingInputs(split=sizes["tensor"] > 1, row_bound=bound)
        out_BTD, load = mixture(Experts(count=8, per_token=k, mlp=16), mesh, params, empty(1, 6, 12), inputs)
        out_BTD.sum().backward()
    assert out_BTD.shape == (1, 6, 12) and params["expert_gate"].grad.shape == (own, inner, 12)
    assert load.peak.device.type == "meta"
