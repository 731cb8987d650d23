"""A feed-forward layer that is a mixture of experts, on one rank or over the mesh axis `expert`. No token is dropped.

Every token goes to its k experts, which may be on other ranks of `expert`. There are three ways there and back:

| way | sends to the experts | brings home | where |
|---|---|---|---|
| exchanged | a block of rows to each rank: all_to_all | the same back | rows are bounded, or sums have an order |
| by node | a row to each node, from there to ranks | a node's sums | the same, and a token's experts share nodes |
| gathered | every token to every rank of the group: all_gather | psum_scatter | else: a few tokens, and XLA |

No size depends on what the router says, so the host waits for no device. The experts of a rank have a fixed number of
rows: as many as all slots could take, or up to a bound (`RoutingInputs.row_bound`), but at least `LEAST_ROWS` from each
rank. Slots that find no room count 0, and the load's `peak` is then above the bound: such a pass is repeated with more
rows, as `ExpertRows` does.

Under tensor parallelism each rank has a part of every expert's inner dim, as of a dense layer's. Where the residual
stream is split, a tensor rank sends its own tokens alone to other ranks of `expert`, and the tensor ranks there, which
are neighbours, gather what they have received. A shared expert is a dense layer, to which every token goes at home.

On a CPU a token has the same bits on every mesh: what each of its experts makes is whole, summed over the tensor ranks
in fixed parts, before a token's experts are added up at home, in the order of their scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.gate import gated
from funrl.compiled_kernels.exact.router import sigmoid
from funrl.compiled_kernels.grouped_linear import grouped_linear, grouped_linear_in_parts
from funrl.compiled_kernels.linear import linear
from funrl.mesh.collectives import (
    all_gather,
    all_to_all,
    own_shard,
    pbroadcast,
    psum_pairwise,
    psum_scatter,
    psum_scatter_pairwise,
    start_rows,
    wait_rows,
)
from funrl.mesh.mesh import Axes, Mesh
from funrl.models.decoder.layers import Context, WeightAxes, WeightShapes
from funrl.models.decoder.routing import (
    Experts,
    ExpertSlots,
    Routes,
    combine,
    experts_of_rows,
    inverse,
    load_of,
    permute,
    route,
    slots_by_rank,
    slots_of,
    sort_blocks,
    table_rows,
    take_rows,
)
from funrl.models.decoder.row_parallel import fixed_parts, multiply_and_sum
from funrl.models.expert_rows import FIRST_BOUND
from funrl.models.low_rank import LowRank, grouped_factors, multiply
from funrl.models.model import RouterLoad
from funrl.models.split_residual import all_tokens, enter, leave, own_tokens
from funrl.models.token_costs import LayerCost

EXPERT_GATE_UP = "expert_gate_up"  # beside its parts in weights that do not learn: [E, 2 F, D]
_STACKED = ("expert_gate", "expert_up")
# Rows from each rank at any bound: of few slots a rank can get more than the bound by chance, which should not raise it
# for longer passes. So few rows cost no memory.
LEAST_ROWS = 256
NODE_SHARE = 0.7  # of the rows between nodes, below which two more hops inside of nodes are worth it


def stack_gate_up(params: trees.Tree) -> trees.Tree:
    """Weights in which layers of experts also have gate and up as one, for one product; None: no layer has experts.

    In the dicts of `params` both become parts of it, layer by layer, so that no more than one layer's are there twice.
    The result shares all memory with them.
    """
    if isinstance(params, dict):
        parts = {name: stack_gate_up(x) for name, x in params.items() if not isinstance(x, Tensor)}
        stacked = {name: x for name, x in parts.items() if x is not None}
        if all(name in params for name in _STACKED):
            whole_EFD = torch.cat([params[name].detach() for name in _STACKED], 1)
            params |= dict(zip(_STACKED, whole_EFD.chunk(2, 1), strict=True))
            stacked[EXPERT_GATE_UP] = whole_EFD
        return params | stacked if stacked else None
    if isinstance(params, tuple):
        layers = [stack_gate_up(x) for x in params]
        if any(x is not None for x in layers):
            return tuple(x if new is None else new for x, new in zip(params, layers, strict=True))
    return None


@dataclass(frozen=True)
class Moe:
    """Mlp: a mixture of experts; see `Mlp`.

    Attributes:
      experts: sizes, and how experts are chosen.
    """

    experts: Experts

    @property
    def routed(self) -> bool:
        """Tokens go to some of its experts."""
        return True

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights."""
        D = embed
        E = self.experts.count
        F_ = self.experts.mlp
        shapes: dict[str, tuple[int, ...]] = {
            "router": (E, D),
            "expert_gate": (E, F_, D),
            "expert_up": (E, F_, D),
            "expert_down": (E, D, F_),
        }
        if self.experts.biased:
            shapes["router_bias"] = (E,)
        if self.experts.clamped is not None:
            shapes |= {"router_logit_bias": (E,), "expert_down_bias": (E, D)}
            shapes |= {"expert_gate_bias": (E, F_), "expert_up_bias": (E, F_)}
        if shared := self.experts.shared:
            shapes |= {"shared_gate": (shared, D), "shared_up": (shared, D), "shared_down": (D, shared)}
        if self.experts.shared_weighted:
            shapes["shared_router"] = (1, D)
        if self.experts.scaled:
            shapes["expert_scale"] = (E,)
        return shapes

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        return {
            "router": ("router", "embed"),
            "router_bias": ("router",),
            "router_logit_bias": ("router",),
            "expert_gate_bias": ("experts", "mlp"),
            "expert_up_bias": ("experts", "mlp"),
            "expert_down_bias": ("router", "norm"),
            "shared_gate": ("mlp", "embed"),
            "shared_up": ("mlp", "embed"),
            "shared_down": ("embed", "mlp"),
            "shared_router": ("head", "embed"),
            "expert_scale": ("head",),
            "expert_gate": ("experts", "mlp", "expert_embed"),
            "expert_up": ("experts", "mlp", "expert_embed"),
            "expert_down": ("experts", "expert_embed", "mlp"),
        }

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight: factors of experts are 1, others as most begin."""
        return torch.ones(shape, device=generator.device) if name == "expert_scale" else None

    def apply(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> tuple[Tensor, RouterLoad]:
        """Send tokens to their experts, as `Mlp.apply`."""
        return mixture(self.experts, mesh, params, h_BTD, routing_of(context))

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in the experts, and the inner sizes that a token meets."""
        experts = self.experts
        return cost._replace(
            inner=experts.per_token * experts.mlp + experts.shared,
            experts=experts.count,
            chosen=experts.per_token,
            expert_mlp=experts.mlp,
        )


class RoutingInputs(NamedTuple):
    """Facts about the tokens of a mixture of experts.

    Attributes:
      real_BT: false at padding, which goes to no expert; None: there is none.
      ids_BTK: experts to take instead of the router's choice; a token whose first is negative has the router's.
      split: each tensor rank has its part of the tokens of the residual stream.
      row_bound: bound of the rows that the experts of a rank take, in quarters of the mean of all ranks; None: there is
        room for all slots.
    """

    real_BT: Tensor | None = None
    ids_BTK: Tensor | None = None
    split: bool = False
    row_bound: int | None = None


def routing_of(context: Context) -> RoutingInputs:
    """The facts that a layer's context has."""
    real_BT = None if context.segments_BT is None else context.segments_BT != 0
    return RoutingInputs(real_BT, context.routes_BTK, split=context.split, row_bound=context.row_bound)


def mixture(
    experts: Experts, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, inputs: RoutingInputs | None = None
) -> tuple[Tensor, RouterLoad]:
    """Sum of each token's experts, [B, T, D], the same on every tensor rank; and their load.

    Args:
      params: "router" [E, D], "expert_gate" and "expert_up" [E, F, D], "expert_down" [E, D, F]; where there are such,
        `EXPERT_GATE_UP` of `stack_gate_up`, "router_bias" [E], the shared expert's "shared_gate", "shared_up" and
        "shared_down", and "shared_router" [1, D]. This rank's parts.
      h_BTD: this rank's tokens, the same on every tensor rank; where `inputs.split`, its part of them, as is what is
        returned.
    """
    logits_BTE = _logits(experts, params, h_BTD)
    return routed_mixture(experts, mesh, params, h_BTD, logits_BTE, inputs or RoutingInputs())


class Dispatch(NamedTuple):
    """Way of tokens to experts.

    Attributes:
      mesh: the devices.
      over: axes whose ranks have other experts; (): each rank has all.
      spreads: whether each tensor rank sends its part of the tokens alone.
      exact: whether sums have a fixed order.
      row_bound: as in `RoutingInputs`.
    """

    mesh: Mesh
    over: Axes
    spreads: bool
    exact: bool
    row_bound: int | None

    def own(self, x_TK: Tensor) -> Tensor:
        """The part of the tokens that this rank sends, of what is the same on all tensor ranks."""
        return own_shard(x_TK, self.mesh, "tensor") if self.spreads else x_TK


def routed_mixture(
    experts: Experts, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, logits_BTE: Tensor, inputs: RoutingInputs
) -> tuple[Tensor, RouterLoad]:
    """`mixture` with a router's logits, of the tokens of `h_BTD`; of `params` the router is not needed."""
    logits_BTE = all_tokens(logits_BTE, mesh, inputs.split)
    real_T = None if inputs.real_BT is None else inputs.real_BT.flatten()
    ids_TK = None if inputs.ids_BTK is None else inputs.ids_BTK.flatten(0, 1)
    routes = _routes(experts, params, logits_BTE.flatten(0, 1), dtype=h_BTD.dtype, real_T=real_T, ids_TK=ids_TK)
    over = _expert_axes(experts, mesh, params["expert_gate"].shape[0])
    exact = _exact_parts(h_BTD, params, mesh) is not None
    way = Dispatch(mesh, over, spreads=inputs.split and bool(over), exact=exact, row_bound=inputs.row_bound)
    add_up = _exact_sum if exact else _partial_sums
    out_BTD, peak = add_up(experts, way, params, h_BTD, routes, inputs.split)
    return _with_down_biases(experts, mesh, params, out_BTD, routes, inputs.split), load_of(routes, real_T, peak)


def _with_down_biases(
    experts: Experts, mesh: Mesh, params: trees.Tree, out_BTD: Tensor, routes: Routes, split: bool
) -> Tensor:
    """The result of `mixture` with the biases of each token's experts, which every rank has, added at home."""
    if experts.clamped is None:
        return out_BTD
    ids_BTK, weights_BTK = (x.unflatten(0, (out_BTD.shape[0], -1)) for x in (routes.ids_TK, routes.weights_TK))
    ids_BTK = own_tokens(ids_BTK, mesh, split)
    weights_BTK = own_tokens(weights_BTK, mesh, split)
    biases_BTKD = table_rows(params["expert_down_bias"], ids_BTK) * weights_BTK.unsqueeze(-1)
    return functools.reduce(torch.add, biases_BTKD.unbind(2), out_BTD)


def _partial_sums(
    experts: Experts, way: Dispatch, params: trees.Tree, h_BTD: Tensor, routes: Routes, split: bool
) -> tuple[Tensor, Tensor]:
    """The result of `mixture` where each tensor rank sums a part of what experts make; and the peak of the load."""
    mesh = way.mesh
    # Each tensor rank has a part of what an expert adds: what enters it, and what scales it, have gradients in parts.
    all_BTD = enter(h_BTD, mesh, split) if experts.shared or not way.spreads else h_BTD
    tokens_BTD = h_BTD if way.spreads else all_BTD
    weights_TK = way.own(routes.weights_TK) if way.spreads else pbroadcast(routes.weights_TK, mesh, "tensor")
    dispatch = dispatch_gathered
    if way.over and way.row_bound is not None:
        dispatch = dispatch_by_node if _goes_by_node(experts, mesh) else dispatch_exchanged
    out_TD, peak = dispatch(experts, way, params, tokens_BTD.flatten(0, 1), weights_TK, way.own(routes.ids_TK))
    out_BTD = out_TD.view(tokens_BTD.shape)
    if not experts.shared:
        return out_BTD if way.spreads else leave(out_BTD, mesh, split), peak
    inner_BTF = gated(multiply(all_BTD, params["shared_gate"]), multiply(all_BTD, params["shared_up"]))
    shared_BTD = multiply(inner_BTF, params["shared_down"])
    if experts.shared_weighted:
        router_1D = pbroadcast(params["shared_router"], mesh, "tensor")
        shared_BTD = shared_BTD * linear(all_BTD, router_1D).sigmoid()
    if way.spreads:
        return out_BTD + leave(shared_BTD, mesh, split), peak
    return leave(out_BTD + shared_BTD, mesh, split), peak


def _exact_sum(
    experts: Experts, way: Dispatch, params: trees.Tree, h_BTD: Tensor, routes: Routes, split: bool
) -> tuple[Tensor, Tensor]:
    """The result of `mixture` with bits that do not depend on the mesh; and the peak of the load.

    Each tensor rank has the whole sums of each expert, so what scales them has its whole gradient there.
    """
    mesh = way.mesh
    all_BTD = enter(h_BTD, mesh, split) if experts.shared or not way.spreads else h_BTD
    tokens_BTD = h_BTD if way.spreads else all_BTD
    dispatch = dispatch_exchanged if way.over else dispatch_gathered
    weights_TK = way.own(routes.weights_TK)
    out_TD, peak = dispatch(experts, way, params, tokens_BTD.flatten(0, 1), weights_TK, way.own(routes.ids_TK))
    out_BTD = own_tokens(out_TD.view(tokens_BTD.shape), mesh, split and not way.spreads)
    if not experts.shared:
        return out_BTD, peak
    inner_BTF = gated(multiply(all_BTD, params["shared_gate"]), multiply(all_BTD, params["shared_up"]))
    shared_BTD = multiply_and_sum(inner_BTF, params["shared_down"], mesh, split)
    if experts.shared_weighted:
        router_1D = params["shared_router"]
        router_1D = pbroadcast(router_1D, mesh, "tensor") if split else router_1D
        shared_BTD = shared_BTD * sigmoid(linear(h_BTD, router_1D))
    return out_BTD + shared_BTD, peak


def dispatch_gathered(
    experts: Experts, way: Dispatch, params: trees.Tree, h_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum of the experts of this rank over tokens of all ranks, brought home; one rank: no detour. And the peak."""
    mesh = way.mesh
    axes = (way.over, "tensor") if way.spreads else (way.over,)
    for axis in axes:  # first those of other nodes, then neighbours
        h_TD, weights_TK, ids_TK = (all_gather(x, mesh, axis) for x in (h_TD, weights_TK, ids_TK))
    own = params["expert_gate"].shape[0]
    slots = ids_TK.numel()
    # One rank has all slots but those of padding. To ask a device how many they are, the host would wait for it.
    place = mesh.index(way.over) if way.over else 0  # a tensor in a program that is traced for all ranks
    fixed = torch.compiler.is_compiling() or not way.over or isinstance(place, Tensor) or h_TD.device.type != "cpu"
    taken = slots_of(_without_padding(experts, way, ids_TK, own), place * own, own, static=fixed)
    y_MD = _feed_forward(experts, mesh, params, take_rows(h_TD, taken), taken.ends, taken.slot_M)
    if way.exact:
        y_MD = psum_pairwise(y_MD, mesh, "tensor").to(h_TD.dtype)
    out_TD = combine(y_MD, weights_TK, taken)
    for axis in reversed(axes):
        out_TD = psum_scatter(out_TD, mesh, axis)
    return out_TD, _peak(way, taken.needed, slots)


def dispatch_exchanged(
    experts: Experts, way: Dispatch, params: trees.Tree, h_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """The same with blocks of rows, each for the experts of a rank, on their way.

    Where rows are bounded, the tokens go in two halves: rows of one are on their way while experts compute the other.
    """
    ids_TK = _without_padding(experts, way, ids_TK, params["expert_gate"].shape[0])
    halves = zip(*(x.chunk(1 if way.row_bound is None else 2) for x in (h_TD, weights_TK, ids_TK)), strict=True)
    sent, peaks = _to_experts(experts, way, params, [TokenPart(*half, slots=half[2].numel()) for half in halves])
    return torch.cat([_sum_home(rows) for rows in sent]), torch.stack(peaks).max()


class TokenPart(NamedTuple):
    """Tokens that go to experts together.

    Attributes:
      tokens_tD: the tokens, or what `start_rows` gave for them.
      weights_tK, ids_tK: of their experts; ids are rank by rank, and those beyond the last rank's are none.
      slots: number of rows that they are taken to need over all ranks.
      path: arguments of `wait_rows` for the tokens; None: they are there.
    """

    tokens_tD: Tensor
    weights_tK: Tensor
    ids_tK: Tensor
    slots: int
    path: tuple[list[int], list[int], Mesh, Axes] | None = None


class RowsHome(NamedTuple):
    """Rows of a part of the tokens on their way home from experts; `path` has the arguments of `wait_rows`."""

    y_MD: Tensor
    weights_tK: Tensor
    slots: ExpertSlots
    path: tuple[list[int], list[int], Mesh, Axes]


def _to_experts(
    experts: Experts, way: Dispatch, params: trees.Tree, parts: list[TokenPart]
) -> tuple[list[RowsHome], list[Tensor]]:
    """Send the parts to their experts, which compute one after the other; and the peak of each."""
    ranks = way.mesh.size(way.over)
    own = params["expert_gate"].shape[0]
    slots: list[ExpertSlots] = []
    paths = []
    for part in parts:
        rows = _bounded_rows(way, part.slots, ranks, most=part.ids_tK.numel())
        slots.append(slots_by_rank(part.ids_tK, ranks, own, rows))
        paths.append(([rows] * ranks, [rows] * ranks, way.mesh, way.over))
    ends_SE = all_to_all(torch.cat([x.ends for x in slots], 1), way.mesh, way.over, split=0, concat=0)
    arriving = []
    for part, places, path in zip(parts, slots, paths, strict=True):
        h_tD = part.tokens_tD if part.path is None else wait_rows(part.tokens_tD, *part.path)
        arriving.append(start_rows(take_rows(h_tD, places), *path))
    home = []
    for part, places, path, rows_MD, ends_Se in zip(parts, slots, paths, arriving, ends_SE.split(own, 1), strict=True):
        y_MD = _at_experts(experts, way, params, wait_rows(rows_MD, *path), ends_Se)
        home.append(RowsHome(start_rows(y_MD, *path), part.weights_tK, places, path))
    return home, [_peak(way, places.needed, part.slots) for part, places in zip(parts, slots, strict=True)]


def _sum_home(rows: RowsHome) -> Tensor:
    """The sums of experts for a part of the tokens."""
    return combine(wait_rows(rows.y_MD, *rows.path), rows.weights_tK, rows.slots)


class NodeVisits(NamedTuple):
    """Tokens on their way to the nodes of their experts.

    Attributes:
      slots: a row for each token and node.
      path: arguments of `wait_rows`.
      weights_MK, ids_MK: of the rows, on their way.
      mean: number of tokens that go to a node, where experts are chosen evenly.
    """

    slots: ExpertSlots
    path: tuple[list[int], list[int], Mesh, Axes]
    weights_MK: Tensor
    ids_MK: Tensor
    mean: float


def dispatch_by_node(
    experts: Experts, way: Dispatch, params: trees.Tree, h_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
) -> tuple[Tensor, Tensor]:
    """The same where ranks with other experts are on several nodes: a token goes once to each node of its experts.

    From there rows go to the experts inside of the node. What these make of a token is added up in the node and comes
    home as one row. Rows of one half of the tokens are on their way while experts compute the other.
    """
    nodes = way.mesh.nodes
    assert nodes is not None
    own = params["expert_gate"].shape[0]
    held = own * nodes.inside.size(way.over)
    first = nodes.across.index(way.over) * held
    halves = [x.chunk(2) for x in (h_TD, weights_TK, _without_padding(experts, way, ids_TK, own))]
    visits = [_start_visits(experts, way, held, *half) for half in zip(*halves[1:], strict=True)]
    tokens = [start_rows(take_rows(h_tD, x.slots), *x.path) for h_tD, x in zip(halves[0], visits, strict=True)]
    parts = []
    for h_MD, x in zip(tokens, visits, strict=True):
        ids_MK, weights_MK = (wait_rows(sent, *x.path) for sent in (x.ids_MK, x.weights_MK))
        local_MK = torch.where((ids_MK >= first) & (ids_MK < first + held), ids_MK - first, held)
        parts.append(TokenPart(h_MD, weights_MK, local_MK, slots=x.slots.row_TK.numel(), path=x.path))
    sent, peaks = _to_experts(experts, way._replace(mesh=nodes.inside), params, parts)
    peaks += [torch.where(x.slots.needed > LEAST_ROWS, x.slots.needed.double() / x.mean, 0.0) for x in visits]
    home = [start_rows(_sum_home(rows), *x.path) for rows, x in zip(sent, visits, strict=True)]
    ones = [torch.ones_like(x.slots.row_TK, dtype=h_TD.dtype) for x in visits]
    sums = [_sum_home(RowsHome(y, ones_N, x.slots, x.path)) for y, ones_N, x in zip(home, ones, visits, strict=True)]
    return torch.cat(sums), torch.stack(peaks).max()


def _start_visits(experts: Experts, way: Dispatch, held: int, weights_TK: Tensor, ids_TK: Tensor) -> NodeVisits:
    """Rows for tokens and the nodes of their experts, of which each node has `held`; weights and ids are sent."""
    assert way.mesh.nodes is not None
    across = way.mesh.nodes.across
    count = across.size(way.over)
    tokens, chosen = ids_TK.shape
    mean = tokens * _nodes_of_token(experts, count, chosen) / count
    rows = _bounded_rows(way, mean, 1, most=tokens)
    slots = slots_by_rank(_first_of_each(torch.div(ids_TK, held, rounding_mode="floor"), count), count, 1, rows)
    # A row that no token takes has a token's content, and no expert.
    taken_M = (torch.arange(rows, device=ids_TK.device) < slots.ends).flatten()
    ids_MK = torch.where(taken_M.unsqueeze(1), ids_TK[slots.token_M], count * held)
    path = [rows] * count, [rows] * count, across, way.over
    return NodeVisits(slots, path, start_rows(take_rows(weights_TK, slots), *path), start_rows(ids_MK, *path), mean)


def _goes_by_node(experts: Experts, mesh: Mesh) -> bool:
    """True if tokens go once to a node: if that sends less than `NODE_SHARE` of a row for each token and expert.

    Both count the rows that are sent at the first bound; to a node goes no more than a row for each token.
    """
    if mesh.nodes is None:
        return False
    nodes = mesh.nodes.across.size("expert")
    by_node = min(nodes, FIRST_BOUND / 4 * _nodes_of_token(experts, nodes, experts.per_token))
    return by_node < NODE_SHARE * FIRST_BOUND / 4 * experts.per_token


def _nodes_of_token(experts: Experts, nodes: int, chosen: int) -> float:
    """Number of nodes of a token's experts, about the mean over even choices from the groups that it may go to.

    Where groups and nodes do not divide each other, a group may be on one node more than is counted here; the first
    bound on rows still has room for the busiest node.
    """
    reached = min(nodes, experts.chosen_groups * -(-nodes // experts.groups)) if experts.groups > 1 else nodes
    return reached * (1 - (1 - 1 / reached) ** chosen)


def _first_of_each(nodes_TK: Tensor, count: int) -> Tensor:
    """Numbers below `count`, and `count` in place of those that a token has before."""
    same_TKK = nodes_TK.unsqueeze(2) == nodes_TK.unsqueeze(1)
    return torch.where(same_TKK.tril(-1).any(2), count, nodes_TK).clamp(max=count)


def _bounded_rows(way: Dispatch, slots: float, parts: int, most: int) -> int:
    """Number of rows up to the bound for a part of some slots."""
    return most if way.row_bound is None else min(most, max(int(-(-way.row_bound * slots // (4 * parts))), LEAST_ROWS))


def _at_experts(experts: Experts, way: Dispatch, params: trees.Tree, x_MD: Tensor, ends_SE: Tensor) -> Tensor:
    """The sums of experts for the rows that have arrived, in their order."""
    mesh = way.mesh
    rows = len(x_MD) // mesh.size(way.over)
    if way.spreads:
        ends_SE, x_MD = (all_gather(x, mesh, "tensor") for x in (ends_SE.contiguous(), x_MD))
    order_M, ends_E = sort_blocks(ends_SE, rows)
    y_MD = permute(_feed_forward(experts, mesh, params, permute(x_MD, order_M), ends_E, order_M), inverse(order_M))
    if way.exact:
        return (psum_scatter_pairwise if way.spreads else psum_pairwise)(y_MD, mesh, "tensor").to(x_MD.dtype)
    return psum_scatter(y_MD, mesh, "tensor") if way.spreads else y_MD


def _without_padding(experts: Experts, way: Dispatch, ids_TK: Tensor, own: int) -> Tensor:
    """Ids of experts; beyond those that the last rank is filled up with, where a token has none."""
    most = own * way.mesh.size(way.over)
    return ids_TK if most == experts.count else torch.where(ids_TK < experts.count, ids_TK, most)


def _peak(way: Dispatch, needed: Tensor, slots: int) -> Tensor:
    """Rows that a rank's experts need over its share of some slots; 0: it has them at any bound, or has all experts."""
    peak = needed.double() * (way.mesh.size(way.over) / slots) if way.over else torch.zeros_like(needed).double()
    return torch.where(needed > LEAST_ROWS, peak, 0.0)


def _logits(experts: Experts, params: trees.Tree, h_BTD: Tensor) -> Tensor:
    """[B, T, E] of a router."""
    router_ED = params["router"]
    if experts.wide:
        wide = torch.promote_types(h_BTD.dtype, torch.float32)
        h_BTD = h_BTD.to(wide)
        router_ED = router_ED.to(wide)
    return multiply(h_BTD, router_ED, params.get("router_logit_bias"))


def _routes(
    experts: Experts,
    params: trees.Tree,
    logits_TE: Tensor,
    dtype: torch.dtype,
    real_T: Tensor | None,
    ids_TK: Tensor | None,
) -> Routes:
    bias_E = params["router_bias"] if experts.biased else None
    if ids_TK is not None:
        own_TK = route(experts, logits_TE.detach(), dtype, bias_E=bias_E).ids_TK
        ids_TK = torch.where(ids_TK[:, :1] < 0, own_TK, ids_TK)
    routes = route(experts, logits_TE, dtype, bias_E=bias_E, ids_TK=ids_TK)
    if experts.scaled:
        factors_TK = table_rows(params["expert_scale"].unsqueeze(-1), routes.ids_TK).squeeze(-1)
        routes = routes._replace(weights_TK=routes.weights_TK * factors_TK)
    if real_T is None:
        return routes
    return routes._replace(ids_TK=torch.where(real_T.unsqueeze(-1), routes.ids_TK, experts.count))


def _feed_forward(
    experts: Experts, mesh: Mesh, params: trees.Tree, x_MD: Tensor, ends_E: Tensor, order_M: Tensor
) -> Tensor:
    """The experts on rows that are sorted by them: this tensor rank's part of each; where exact, in a wide dtype.

    Args:
      order_M: numbers of the rows before they were sorted.
    """
    if EXPERT_GATE_UP in params:
        gate_MF, up_MF = grouped_linear(x_MD, params[EXPERT_GATE_UP], ends_E).chunk(2, -1)
    else:
        gate_MF, up_MF = (_expert_products(x_MD, params[name], ends_E) for name in _STACKED)
    if (clamped := experts.clamped) is None:
        inner_MF = gated(gate_MF, up_MF, experts.activation)
    else:
        expert_M = experts_of_rows(ends_E, order_M)
        gate_MF = (gate_MF + table_rows(params["expert_gate_bias"], expert_M)).clamp(max=clamped.limit)
        up_MF = (up_MF + table_rows(params["expert_up_bias"], expert_M)).clamp(-clamped.limit, clamped.limit)
        inner_MF = (up_MF + 1) * (gate_MF * sigmoid(gate_MF * clamped.alpha))
    parts = _exact_parts(x_MD, params, mesh)
    if parts is None:
        return _expert_products(inner_MF, params["expert_down"], ends_E)
    wide = mesh.size("tensor") > 1
    return grouped_linear_in_parts(inner_MF, params["expert_down"], ends_E, parts, wide=wide)


def _expert_products(x_MK: Tensor, weight: Tensor | LowRank, ends_E: Tensor) -> Tensor:
    """Products of rows, sorted by expert, with the matrices of their experts, and with their factors."""
    if isinstance(weight, Tensor):
        return grouped_linear(x_MK, weight, ends_E)
    return grouped_linear(x_MK, weight.plain, ends_E) + grouped_factors(x_MK, weight, ends_E)


def _exact_parts(x: Tensor, params: trees.Tree, mesh: Mesh) -> int | None:
    """Number of this rank's fixed parts of a sum over an expert's inner dim; None: sums have no fixed order."""
    weights = [params[name] for name in ("expert_gate", "expert_up", "expert_down")]
    adapted = any(isinstance(weight, LowRank) for weight in weights)
    return None if adapted or not computes_exactly(x, *weights) else fixed_parts(weights[2].shape[2], mesh)


def _expert_axes(experts: Experts, mesh: Mesh, held: int) -> tuple[str, ...]:
    """The axes whose ranks have other experts, by how many this rank holds while the layer computes."""
    return () if held == experts.count else ("expert",)
