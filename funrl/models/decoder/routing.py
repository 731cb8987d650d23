"""Choice of experts: what a router gives each token, and how rows of tokens come to experts and back.

A token's k pairs (token, expert) are its slots. `ExpertSlots` sorts them by expert, `take_rows` makes a row of each,
and `combine` adds the experts' results back to their tokens. Both are gathers, forward and backward: they add in the
same order every time.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.gate import Activation
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.exact.router import largest, sigmoid, softmax
from funrl.models.errors import ModelError
from funrl.models.model import RouterLoad


@dataclass(frozen=True)
class ClampedGate:
    """Gate of experts: (min(max(up, -limit), limit) + 1) g sigmoid(alpha g), with g = min(gate, limit).

    Attributes:
      alpha, limit: as above.

    References: OpenAI, 2025, https://arxiv.org/abs/2508.10925
    """

    alpha: float = 1.702
    limit: float = 7.0


@dataclass(frozen=True)
class Experts:
    """Layers whose mlp is a mixture of experts.

    Attributes:
      count, per_token, mlp: experts of a layer E, experts per token, and the inner size of each F.
      normalized: whether the weights of a token's experts are divided by their sum.
      dense: numbers of the layers that have one mlp instead.
      scoring: of the router's logits: "softmax" over the experts, or "sigmoid" of each by itself.
      biased: experts are chosen by score + bias, and weighed by the score; the bias is a weight without a gradient.
      groups, chosen_groups: experts stand in groups, and a token goes to those of a few groups only.
      best_of_group: a group is as good as so many of its best experts together.
      scale: factor of the weights of a token's experts.
      shared: inner size of an mlp that every token goes to, beside its experts; 0: there is none.
      shared_weighted: what that mlp adds is multiplied by a weight of each token's own, by a sigmoid.
      wide: the router computes in float32 where weights are narrower, which separates nearly equal scores.
      clamped: the gate of experts of which all products have a bias, as the router's has; None: `activation`, without
        biases.
      activation: of the gate, as `gated` has them.
      scaled: each expert has a factor of its weight for a token, which is a weight of the model.
    """

    count: int
    per_token: int
    mlp: int
    normalized: bool = True
    dense: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    biased: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared: int = 0
    best_of_group: int = 2
    wide: bool = False
    shared_weighted: bool = False
    clamped: ClampedGate | None = None
    activation: Activation = "silu"
    scaled: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "mlp", "groups", "chosen_groups"):
            if getattr(self, name) < 1:
                raise ModelError(f"experts.{name} is {getattr(self, name)}, it must be at least 1")
        if self.per_token > self.count:
            raise ModelError(f"experts.per_token is {self.per_token}, it must be at most their count, {self.count}")
        if self.chosen_groups > self.groups:
            raise ModelError(f"experts.chosen_groups is {self.chosen_groups}, there are {self.groups} groups")
        size = self.count // self.groups
        if self.groups > 1 and (self.count % self.groups or size < self.best_of_group):
            least = f"at least {self.best_of_group}"
            raise ModelError(f"{self.count} experts do not make {self.groups} groups of {least}, equally large")
        if self.per_token > self.chosen_groups * size:
            raise ModelError(
                f"experts.per_token is {self.per_token}, but {self.chosen_groups} of {self.groups} groups have "
                f"{self.chosen_groups * size}"
            )


class Routes(NamedTuple):
    """Experts of every token.

    Attributes:
      weights_TK: what a token's chosen experts count, in the dtype of the hidden states.
      ids_TK: the chosen experts, int64; the number of experts where a token has none.
      probs_TE: of all experts, in float32 or wider; sigmoids are divided by their sum.
      logits_TE: likewise.
    """

    weights_TK: Tensor
    ids_TK: Tensor
    probs_TE: Tensor
    logits_TE: Tensor


class ExpertSlots(NamedTuple):
    """Rows for the slots of T tokens, sorted by expert, M of them.

    Attributes:
      token_M: the token of each row.
      slot_M: its number among the T k slots.
      row_TK: the row of each slot; of a slot without one, a row that counts 0.
      ends: number of rows up to each expert, itself included: [E] int32, or [R, E] in each of R ranks' blocks of rows.
      needed: rows that the slots take where every one has a row; of blocks, that of the fullest.
    """

    token_M: Tensor
    slot_M: Tensor
    row_TK: Tensor
    ends: Tensor
    needed: Tensor


def route(
    experts: Experts, logits_TE: Tensor, dtype: torch.dtype, bias_E: Tensor | None = None, ids_TK: Tensor | None = None
) -> Routes:
    """Choose the experts of each token: those with the best scores, weighed by these.

    Args:
      experts: how they are scored and weighed, and in which groups they are.
      dtype: of the weights.
      bias_E: added to the scores where experts are chosen, and nowhere else; None: 0.
      ids_TK: experts to take instead, such as an engine's choice.

    References: DeepSeek-AI, 2024, https://arxiv.org/abs/2412.19437
    """
    wide_TE = logits_TE.to(torch.promote_types(logits_TE.dtype, torch.float32))
    scores_TE = softmax(wide_TE) if experts.scoring == "softmax" else sigmoid(wide_TE)
    chosen_TK = _chosen(experts, scores_TE.detach(), bias_E) if ids_TK is None else ids_TK
    top_TK = scores_TE.gather(-1, chosen_TK)
    if experts.normalized:
        total_T1 = _sum_of_columns(top_TK).unsqueeze(-1)
        top_TK = top_TK / (total_T1 if experts.scoring == "softmax" else total_T1 + 1e-20)  # each may be 0
    top_TK = top_TK if experts.scale == 1 else top_TK * experts.scale
    probs_TE = scores_TE if experts.scoring == "softmax" else scores_TE / (scores_TE.sum(-1, keepdim=True) + 1e-20)
    return Routes(top_TK.to(dtype), chosen_TK, probs_TE, logits_TE=logits_TE)


def _chosen(experts: Experts, scores_TE: Tensor, bias_E: Tensor | None) -> Tensor:
    """Expert ids of each token, [T, k]."""
    wanted_TE = scores_TE if bias_E is None else scores_TE + bias_E.detach().to(scores_TE.dtype)
    return _choose(_of_best_groups(wanted_TE, experts), experts.per_token)


def _of_best_groups(wanted_TE: Tensor, experts: Experts) -> Tensor:
    """Numbers that experts are chosen by, -inf but in the groups whose best are best together."""
    if experts.groups == experts.chosen_groups:
        return wanted_TE
    wanted_TGE = wanted_TE.unflatten(-1, (experts.groups, -1))
    best_TG = _sum_of_columns(wanted_TGE.topk(experts.best_of_group, -1).values)
    best_TC = largest(best_TG, experts.chosen_groups)
    out_TG = torch.ones(wanted_TGE.shape[:2], dtype=torch.bool, device=wanted_TE.device).scatter(1, best_TC, False)
    return wanted_TGE.masked_fill(out_TG.unsqueeze(-1), -torch.inf).flatten(1)


def _sum_of_columns(x: Tensor) -> Tensor:
    """Sum over the last dim, one column after the other: the bits depend on no other row."""
    return functools.reduce(torch.add, x.unbind(-1))


@operator("funrl::choose_experts")
def _choose(probs: Tensor, per_token: int) -> Tensor:
    """Choose the experts with the largest numbers. An operator, so that what saves or pretends choices finds them."""
    return largest(probs, per_token)


@_choose.register_fake
def _(probs, per_token):
    return probs.new_empty(*probs.shape[:-1], per_token, dtype=torch.int64)


def load_of(routes: Routes, real_T: Tensor | None, peak: Tensor) -> RouterLoad:
    """Load of a layer's experts by its tokens.

    Args:
      real_T: bool, false at padding; None: there is none.
      peak: as in `RouterLoad`.
    """
    experts = routes.probs_TE.shape[-1]
    z_T = routes.logits_TE.to(routes.probs_TE.dtype).logsumexp(-1).square()
    probs_TE = routes.probs_TE
    if real_T is not None:
        z_T = z_T * real_T
        probs_TE = probs_TE * real_T.unsqueeze(-1)
    counts_E = expert_counts(routes.ids_TK, experts)
    return RouterLoad(counts_E, probs_TE.sum(0), z_T.sum(), ids_TK=routes.ids_TK, peak=peak)


def expert_counts(ids: Tensor, experts: int) -> Tensor:
    """Count each of the numbers 0 ... experts - 1, [experts] int64; others are left out."""
    flat = ids.flatten().clamp(max=experts)
    return flat.new_zeros(experts + 1).scatter_add_(0, flat, torch.ones_like(flat))[:experts]


def slots_of(ids_TK: Tensor, first: int, experts: int, static: bool = False) -> ExpertSlots:
    """The slots of some experts, sorted by expert and in the order of tokens.

    Args:
      ids_TK: experts of each token.
      first, experts: number of the first of these experts, and how many they are.
      static: give all T k slots a row, those of other experts behind the rest, so that no shape depends on numbers.
    """
    local_TK = ids_TK - first
    local = torch.where((local_TK >= 0) & (local_TK < experts), local_TK, experts).flatten()
    ends_E = expert_counts(local, experts).cumsum(0)
    slot_M = local.argsort(stable=True)
    # Slots of other experts come last: their rows are those of no expert, which are 0.
    row_TK = torch.minimum(inverse(slot_M), ends_E[-1]).view(ids_TK.shape)
    if not static:
        slot_M = slot_M[: ends_E[-1].item()]
    token_M = torch.div(slot_M, ids_TK.shape[1], rounding_mode="floor")
    return ExpertSlots(token_M, slot_M, row_TK, ends=ends_E.int(), needed=ends_E[-1])


def slots_by_rank(ids_TK: Tensor, ranks: int, experts: int, rows: int) -> ExpertSlots:
    """All slots in a block of rows for each rank, in it sorted by expert and in the order of tokens.

    Args:
      ids_TK: experts of each token, numbered rank by rank; those beyond the last rank are none.
      ranks: R, number of ranks.
      experts: of each rank.
      rows: of each block. Slots that find no room have no row; rows that no slot takes are for any token.
    """
    flat = ids_TK.flatten()
    ends_RE = expert_counts(flat, ranks * experts).view(ranks, experts).cumsum(1)
    counts_R = ends_RE[:, -1]
    begins_R = counts_R.cumsum(0) - counts_R
    order = flat.argsort(stable=True)
    rank = torch.div(flat, experts, rounding_mode="floor").clamp(max=ranks)
    place = inverse(order) - F.pad(begins_R, (0, 1))[rank]
    row = torch.where((rank < ranks) & (place < rows), rank * rows + place, ranks * rows)
    place_RC = begins_R.unsqueeze(1) + torch.arange(rows, device=flat.device)
    slot_M = order[place_RC.flatten().clamp(max=len(flat) - 1)]
    token_M = torch.div(slot_M, ids_TK.shape[1], rounding_mode="floor")
    row_TK = row.view(ids_TK.shape)
    return ExpertSlots(token_M, slot_M, row_TK, ends=ends_RE.clamp(max=rows), needed=counts_R.max())


def sort_blocks(ends_SE: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The order of rows by expert, [S rows], and the ends of the experts, [E] int32.

    Args:
      ends_SE: of S blocks of `rows` rows, each sorted by expert, as `slots_by_rank` has them.
    """
    place_C1 = torch.arange(rows, device=ends_SE.device).unsqueeze(1)
    expert_SC = (place_C1 >= ends_SE.unsqueeze(1)).sum(-1)
    return expert_SC.flatten().argsort(stable=True), ends_SE.sum(0).int()


def take_rows(x_TD: Tensor, slots: ExpertSlots) -> Tensor:
    """A row for each slot: its token's, [M, D]."""
    return _Take.apply(x_TD, slots.token_M, slots.row_TK)


def combine(y_MD: Tensor, weights_TK: Tensor, slots: ExpertSlots) -> Tensor:
    """For each token the sum of its slots' rows, each times its weight, [T, D]; slots without a row count 0."""
    return _Combine.apply(y_MD, weights_TK, slots.token_M, slots.slot_M, slots.row_TK)


def table_rows(table_ED: Tensor, ids: Tensor) -> Tensor:
    """Rows of a table by their numbers [...], 0 where a number is E: [..., D]. Its gradient is a product."""
    return _TableRows.apply(table_ED, ids)


def experts_of_rows(ends_E: Tensor, order_M: Tensor) -> Tensor:
    """The expert of each row, [M], where they are sorted and end at `ends_E`; E after the last end.

    Args:
      order_M: any numbers of the rows. No size is read: where ranks are simulated it may differ between them.
    """
    row_M = torch.ones_like(order_M).cumsum(0) - 1
    return (row_M.unsqueeze(-1) >= ends_E).sum(-1)


def permute(x_RD: Tensor, order_R: Tensor) -> Tensor:
    """The rows in another order; its gradient is a gather too."""
    return _Take.apply(x_RD, order_R, inverse(order_R).unsqueeze(1))


def inverse(order_R: Tensor) -> Tensor:
    """Place of each row in an order. No size is read: where ranks are simulated it may differ between them."""
    return torch.empty_like(order_R).scatter_(0, order_R, torch.ones_like(order_R).cumsum(0) - 1)


def _sum_rows(y_MD: Tensor, row_TK: Tensor, weights_TK: Tensor | None = None) -> Tensor:
    padded = torch.cat([y_MD, y_MD.new_zeros(1, y_MD.shape[1])])
    terms = [padded.index_select(0, row_T) for row_T in row_TK.unbind(1)]
    if weights_TK is not None:
        terms = [rows * weight_T.unsqueeze(1) for rows, weight_T in zip(terms, weights_TK.unbind(1), strict=True)]
    return functools.reduce(torch.add, terms)


class _TableRows(AutogradFunction):
    @staticmethod
    def forward(table, ids):
        padded = torch.cat([table, table.new_zeros(1, table.shape[1])])
        return padded[ids]

    @staticmethod
    def setup_context(ctx, inputs, output):
        table, ids = inputs
        ctx.rows = len(table)
        ctx.save_for_backward(ids)

    @staticmethod
    def backward(ctx, grad):
        (ids,) = ctx.saved_tensors
        chosen = ids.flatten().unsqueeze(-1) == torch.arange(ctx.rows, device=ids.device)
        return chosen.to(grad.dtype).T @ grad.flatten(0, -2), None


class _Take(AutogradFunction):
    @staticmethod
    def forward(x, token, row):
        return x[token]

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(inputs[2])

    @staticmethod
    def backward(ctx, grad):
        return _sum_rows(grad, ctx.saved_tensors[0]), None, None


class _Combine(AutogradFunction):
    @staticmethod
    def forward(y, weights, token, slot, row):
        return _sum_rows(y, row, weights)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad):
        y, weights, token, slot, row = ctx.saved_tensors
        d_y = d_weights = None
        if ctx.needs_input_grad[0]:
            d_y = grad[token] * weights.flatten()[slot].unsqueeze(1)
        if ctx.needs_input_grad[1]:
            padded = torch.cat([y, y.new_zeros(1, y.shape[1])])
            d_weights = torch.stack([(grad * padded[row[:, k]]).sum(-1) for k in range(row.shape[1])], 1)
        return d_y, d_weights, None, None, None
