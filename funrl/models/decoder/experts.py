"""A feed-forward layer that is a mixture of experts, on one rank or over the mesh axis `expert`. No token is dropped.

Every token goes to its k experts, which may be on other ranks of `expert`. There are two ways there and back:

| way | sends to the experts | brings home | taken where |
|---|---|---|---|
| gathered | every token to every rank of the group: all_gather | psum_scatter | there are at most k such ranks |
| ragged | each token to its experts' ranks: all_to_all of uneven parts | the same, backwards | more, or on a CPU |

The ragged way waits for the device: the host has to know the sizes of what it sends and receives. It does so three
times in a layer's forward pass.

Under tensor parallelism each rank has a part of every expert's inner dim, as of a dense layer's. A shared expert is
such a layer, to which every token of a rank goes at home.

On a CPU a token has the same bits on every mesh: what each of its experts makes is whole, summed over the tensor ranks
in fixed parts, before a token's experts are added up at home, in the order of their scores.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.gate import gated
from funrl.compiled_kernels.exact.router import sigmoid
from funrl.compiled_kernels.grouped_linear import grouped_linear, grouped_linear_in_parts
from funrl.compiled_kernels.linear import linear
from funrl.mesh.collectives import all_gather, all_to_all, pbroadcast, psum_pairwise, psum_scatter, ragged_all_to_all
from funrl.mesh.mesh import Axes, Mesh
from funrl.models.decoder.layers import Context, WeightAxes, WeightShapes
from funrl.models.decoder.routing import (
    Experts,
    Routes,
    combine,
    expert_counts,
    experts_of_rows,
    load_of,
    permute,
    route,
    slots_of,
    table_rows,
    take_rows,
)
from funrl.models.decoder.row_parallel import fixed_parts, multiply_and_sum
from funrl.models.low_rank import multiply
from funrl.models.model import RouterLoad
from funrl.models.split_residual import all_tokens, enter, leave, own_tokens
from funrl.models.token_costs import LayerCost

EXPERT_GATE_UP = "expert_gate_up"  # beside its parts in weights that do not learn: [E, 2 F, D]
_STACKED = ("expert_gate", "expert_up")


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
        real_BT = None if context.segments_BT is None else context.segments_BT != 0
        return mixture(
            self.experts, mesh, params, h_BTD=h_BTD, real_BT=real_BT, ids_BTK=context.routes_BTK, split=context.split
        )

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in the experts, and the inner sizes that a token meets."""
        experts = self.experts
        return cost._replace(
            inner=experts.per_token * experts.mlp + experts.shared,
            experts=experts.count,
            chosen=experts.per_token,
            expert_mlp=experts.mlp,
        )


def mixture(
    experts: Experts,
    mesh: Mesh,
    params: trees.Tree,
    h_BTD: Tensor,
    real_BT: Tensor | None = None,
    ids_BTK: Tensor | None = None,
    split: bool = False,
) -> tuple[Tensor, RouterLoad]:
    """Sum of each token's experts, [B, T, D], the same on every tensor rank; and their load.

    Args:
      params: "router" [E, D], "expert_gate" and "expert_up" [E, F, D], "expert_down" [E, D, F]; where there are such,
        `EXPERT_GATE_UP` of `stack_gate_up`, "router_bias" [E], the shared expert's "shared_gate", "shared_up" and
        "shared_down", and "shared_router" [1, D]. This rank's parts.
      h_BTD: this rank's tokens, the same on every tensor rank; where `split`, its part of them, as is what is returned.
      real_BT: false at padding, which goes to no expert; None: there is none.
      ids_BTK: experts to take instead of the router's choice; a token whose first is negative has the router's.
    """
    tokens = RoutedTokens(_logits(experts, params, h_BTD), real_BT, ids_BTK, split=split)
    return routed_mixture(experts, mesh, params, h_BTD, tokens)


class RoutedTokens(NamedTuple):
    """Tokens on their way to experts.

    Attributes:
      logits_BTE: a router's, of the tokens that a rank has of the residual stream.
      real_BT, ids_BTK, split: as in `mixture`.
    """

    logits_BTE: Tensor
    real_BT: Tensor | None = None
    ids_BTK: Tensor | None = None
    split: bool = False


def routed_mixture(
    experts: Experts, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, tokens: RoutedTokens
) -> tuple[Tensor, RouterLoad]:
    """`mixture` with logits that are there already; of `params` the router is not needed."""
    real_BT = tokens.real_BT
    ids_BTK = tokens.ids_BTK
    split = tokens.split
    logits_BTE = all_tokens(tokens.logits_BTE, mesh, split)
    real_T = None if real_BT is None else real_BT.flatten()
    ids_TK = None if ids_BTK is None else ids_BTK.flatten(0, 1)
    routes = _routes(experts, params, logits_BTE.flatten(0, 1), dtype=h_BTD.dtype, real_T=real_T, ids_TK=ids_TK)
    load = load_of(routes, real_T)
    if _exact_parts(h_BTD, params, mesh) is not None:
        out_BTD = _exact_sum(experts, mesh, params, h_BTD, routes, split)
    else:
        out_BTD = _partial_sums(experts, mesh, params, h_BTD, routes, split)
    return _with_down_biases(experts, mesh, params, out_BTD, routes, split), load


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
    experts: Experts, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, routes: Routes, split: bool
) -> Tensor:
    """The result of `mixture` where each tensor rank sums a part of what experts make."""
    over = _expert_axes(experts, mesh, params["expert_gate"].shape[0])
    # Each tensor rank has a part of what an expert adds: what enters it, and what scales it, have gradients in parts.
    h_BTD = enter(h_BTD, mesh, split)
    weights_TK = pbroadcast(routes.weights_TK, mesh, "tensor")
    way = dispatch_gathered if mesh.size(over) <= experts.per_token else dispatch_ragged
    h_TD = h_BTD.flatten(0, 1)
    out_TD = way(experts, mesh, over, params, h_TD, weights_TK, routes.ids_TK)
    if experts.shared:
        inner_TF = gated(multiply(h_TD, params["shared_gate"]), multiply(h_TD, params["shared_up"]))
        shared_TD = multiply(inner_TF, params["shared_down"])
        if experts.shared_weighted:
            router_1D = pbroadcast(params["shared_router"], mesh, "tensor")
            shared_TD = shared_TD * linear(h_TD, router_1D).sigmoid()
        out_TD = out_TD + shared_TD
    return leave(out_TD.view(h_BTD.shape), mesh, split)


def _exact_sum(experts: Experts, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, routes: Routes, split: bool) -> Tensor:
    """The result of `mixture` with bits that do not depend on the mesh.

    Each tensor rank has the whole sums of each expert, so what scales them has its whole gradient there.
    """
    over = _expert_axes(experts, mesh, params["expert_gate"].shape[0])
    all_BTD = enter(h_BTD, mesh, split)
    way = dispatch_gathered if mesh.size(over) == 1 else dispatch_ragged
    all_TD = all_BTD.flatten(0, 1)
    out_TD = way(experts, mesh, over, params, all_TD, weights_TK=routes.weights_TK, ids_TK=routes.ids_TK)
    out_BTD = own_tokens(out_TD.view(all_BTD.shape), mesh, split)
    if not experts.shared:
        return out_BTD
    inner_BTF = gated(multiply(all_BTD, params["shared_gate"]), multiply(all_BTD, params["shared_up"]))
    shared_BTD = multiply_and_sum(inner_BTF, params["shared_down"], mesh, split)
    if experts.shared_weighted:
        router_1D = params["shared_router"]
        router_1D = pbroadcast(router_1D, mesh, "tensor") if split else router_1D
        shared_BTD = shared_BTD * sigmoid(linear(h_BTD, router_1D))
    return out_BTD + shared_BTD


def dispatch_gathered(
    experts: Experts, mesh: Mesh, over: Axes, params: trees.Tree, h_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
) -> Tensor:
    """Sum of the experts of this rank over tokens of all ranks of `over`, brought home. One rank: no detour."""
    h_TD, weights_TK, ids_TK = (all_gather(x, mesh, over) for x in (h_TD, weights_TK, ids_TK))
    own = params["expert_gate"].shape[0]
    # One rank has all slots but those of padding. To ask a device how many they are, the host would wait for it.
    place = mesh.index(over) if over else 0  # a tensor in a program that is traced for all ranks
    static = torch.compiler.is_compiling() or not over or isinstance(place, Tensor) or h_TD.device.type != "cpu"
    slots = slots_of(ids_TK, place * own, own, static=static)
    y_MD = _feed_forward(experts, mesh, params, take_rows(h_TD, slots), slots.ends_E, slots.slot_M)
    return psum_scatter(combine(y_MD, weights_TK, slots), mesh, over)


def dispatch_ragged(
    experts: Experts, mesh: Mesh, over: Axes, params: trees.Tree, h_TD: Tensor, weights_TK: Tensor, ids_TK: Tensor
) -> Tensor:
    """The same with only those rows on their way that have an expert there."""
    ranks = mesh.size(over)
    own = params["expert_gate"].shape[0]
    slots = slots_of(ids_TK, 0, experts.count)
    sent_E = F.pad(
        expert_counts(ids_TK, experts.count), (0, own * ranks - experts.count)
    )  # nothing to experts that pad
    came_RE = all_to_all(sent_E, mesh, over, split=0, concat=0).view(ranks, own)  # from each rank, for each expert here
    send = sent_E.view(ranks, own).sum(1).tolist()
    receive = came_RE.sum(1).tolist()
    x_MD = ragged_all_to_all(take_rows(h_TD, slots), send, receive, mesh=mesh, axes=over)
    expert_M = torch.arange(own, device=h_TD.device).repeat(ranks).repeat_interleave(came_RE.flatten())
    order_M = expert_M.argsort(stable=True)  # they came by rank
    ends_E = came_RE.sum(0).cumsum(0).int()
    y_MD = _feed_forward(experts, mesh, params, permute(x_MD, order_M), ends_E, order_M)
    y_MD = permute(y_MD, order_M.argsort())
    return combine(ragged_all_to_all(y_MD, receive, send, mesh=mesh, axes=over), weights_TK, slots)


def _logits(experts: Experts, params: trees.Tree, h_BTD: Tensor) -> Tensor:
    """[B, T, E] of a router."""
    router_ED = params["router"]
    if experts.wide:
        wide = torch.promote_types(h_BTD.dtype, torch.float32)
        return linear(h_BTD.to(wide), router_ED.to(wide))
    return linear(h_BTD, router_ED, params.get("router_logit_bias"))


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
    """The experts on rows that are sorted by them: this tensor rank's part of each, or where it is exact, the whole.

    Args:
      order_M: numbers of the rows before they were sorted.
    """
    if EXPERT_GATE_UP in params:
        gate_MF, up_MF = grouped_linear(x_MD, params[EXPERT_GATE_UP], ends_E).chunk(2, -1)
    else:
        gate_MF, up_MF = (grouped_linear(x_MD, params[name], ends_E) for name in _STACKED)
    if (clamped := experts.clamped) is None:
        inner_MF = gated(gate_MF, up_MF, experts.activation)
    else:
        expert_M = experts_of_rows(ends_E, order_M)
        gate_MF = (gate_MF + table_rows(params["expert_gate_bias"], expert_M)).clamp(max=clamped.limit)
        up_MF = (up_MF + table_rows(params["expert_up_bias"], expert_M)).clamp(-clamped.limit, clamped.limit)
        inner_MF = (up_MF + 1) * (gate_MF * sigmoid(gate_MF * clamped.alpha))
    parts = _exact_parts(x_MD, params, mesh)
    if parts is None:
        return grouped_linear(inner_MF, params["expert_down"], ends_E)
    ranks = mesh.size("tensor")
    sums_MD = grouped_linear_in_parts(inner_MF, params["expert_down"], ends_E, parts, wide=ranks > 1)
    return psum_pairwise(sums_MD, mesh, "tensor").to(x_MD.dtype)


def _exact_parts(x: Tensor, params: trees.Tree, mesh: Mesh) -> int | None:
    """Number of this rank's fixed parts of a sum over an expert's inner dim; None: sums have no fixed order."""
    weights = [params[name] for name in ("expert_gate", "expert_up", "expert_down")]
    return fixed_parts(weights[2].shape[2], mesh) if computes_exactly(x, *weights) else None


def _expert_axes(experts: Experts, mesh: Mesh, held: int) -> tuple[str, ...]:
    """The axes whose ranks have other experts, by how many this rank holds while the layer computes."""
    return () if held == experts.count else ("expert",)
