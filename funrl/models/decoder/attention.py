"""Multi-head attention with rotary positions; several query heads may share keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.attention import attention
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.exact.router import sigmoid
from funrl.compiled_kernels.exact.shared_norm import NormNumbers, scale_rows, square_sums
from funrl.compiled_kernels.mutual_attention import mutual_paged_attention
from funrl.compiled_kernels.packed import AttentionOptions
from funrl.compiled_kernels.paged_attention import PagedHeads, paged_attention, static_paged_attention
from funrl.compiled_kernels.rotary import halves_of_pairs, rotate
from funrl.mesh.collectives import pbroadcast, psum, psum_pairwise
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.decoder.layers import CacheShapes, Context, KeysValues, Norm, Rope, WeightAxes, WeightShapes
from funrl.models.decoder.row_parallel import fixed_parts, multiply_and_sum
from funrl.models.decoder.sequence_parallel import split_attention
from funrl.models.low_rank import Weight, multiply, select_rows, used_by_parts
from funrl.models.split_residual import enter
from funrl.models.token_costs import LayerCost


@dataclass(frozen=True)
class Attention:
    """Mixer: softmax(scale q k^T) v over the tokens that a token sees; see `Mixer`.

    Attributes:
      heads, kv_heads, head: sizes H, K, N.
      rope: as in `Mixer`.
      norm: of q and k.
      window: as in `Mixer`.
      bias, output_bias: q, k, v have a bias; the output has one.
      qk_norm: q and k are normalized before rotation, "head": each head by itself; "projection": all heads of q
        together, and of k; None: they are not.
      scale: factor of q k^T; None: 1 / sqrt(N).
      cap: attention logits x become cap tanh(x / cap); None: they stay.
      gated: each head's result is multiplied by the sigmoid of a gate; "q" makes queries and gates [H, 2 N].
      sinks: each head has a further key, of a logit that is a weight and of value 0, which every token sees.
    """

    heads: int
    kv_heads: int
    head: int
    rope: Rope | None
    norm: Norm
    window: int | None = None
    bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    scale: float | None = None
    cap: float | None = None
    gated: bool = False
    sinks: bool = False

    @property
    def paged(self) -> PagedHeads:
        """Heads for the kernel of paged attention."""
        return PagedHeads(self.head, not self.cap and not self.sinks)

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights, as `Mixer.shapes`."""
        D = embed
        H = self.heads
        K = self.kv_heads
        N = self.head
        rows = 2 * N if self.gated else N
        shapes = {"q": (H, rows, D), "k": (K, N, D), "v": (K, N, D), "o": (D, H, N)}
        if self.bias:
            shapes |= {"q_bias": (H, rows), "k_bias": (K, N), "v_bias": (K, N)}
        if self.output_bias:
            shapes |= {"o_bias": (D,)}
        if self.qk_norm is not None:
            whole = self.qk_norm == "projection"
            shapes |= {"q_norm": (H, N) if whole else (N,), "k_norm": (K, N) if whole else (N,)}
        if self.sinks:
            shapes |= {"sinks": (H,)}
        return shapes

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        whole = self.qk_norm == "projection"
        keys = ("kv_heads", "head", "embed")
        return {
            "q": ("heads", "head", "embed"),
            "k": keys,
            "v": keys,
            "o": ("embed", "heads", "head"),
            "q_bias": ("heads", "head"),
            "k_bias": ("kv_heads", "head"),
            "v_bias": ("kv_heads", "head"),
            "o_bias": ("norm",),
            "sinks": ("heads",),
            "q_norm": ("heads", "head") if whole else ("head",),
            "k_norm": ("kv_heads", "head") if whole else ("head",),
        }

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight: as most begin."""
        return None

    def apply(
        self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context
    ) -> Tensor | tuple[Tensor, KeysValues]:
        """Attend, and project the heads' results, as `Mixer.apply`."""
        out_BTHN = self._attend(params, enter(h_BTD, mesh, context.split), mesh, context)
        out_BTD = multiply_and_sum(out_BTHN.flatten(2), params["o"], mesh, context.split)
        return out_BTD + params["o_bias"] if self.output_bias else out_BTD

    def cache_shapes(self, page_tokens: int, tensor: int) -> CacheShapes:
        """Keys and values of the heads that a rank needs."""
        if self.kv_heads % tensor == 0:
            local = self.kv_heads // tensor
        else:
            local = _kv_count(-(-self.heads // tensor), self.heads // self.kv_heads)
        page = (page_tokens, local, self.head)
        return CacheShapes((page, page))

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in what attention takes.

        Sinks are left out: one logit per head and query, beside products over all heads' numbers for each pair.
        """
        queries = self.heads * self.head
        keys = self.kv_heads * self.head
        return cost._replace(
            queries=queries,
            keys=keys,
            projected=queries + keys,
            normed=self.qk_norm is not None,
            window=self.window,
            cached=2 * keys,
            cached_heads=self.kv_heads,
        )

    def _attend(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> Tensor:
        """Results of this rank's heads, [B, T, H, N]."""
        q_BTHN = project_heads(h_BTD, params["q"], params.get("q_bias"))
        if not self.gated:
            return self._attend_by(q_BTHN, params, h_BTD, mesh, context)
        q_BTHN, gate_BTHN = q_BTHN.chunk(2, -1)
        out_BTHN = self._attend_by(q_BTHN, params, h_BTD, mesh, context)
        return out_BTHN * sigmoid(gate_BTHN)

    def _attend_by(self, q_BTHN: Tensor, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> Tensor:
        """Results of heads with these queries, which are neither normalized nor rotated yet."""
        q_BTHN, k_BTKN, v_BTKN = self._heads(q_BTHN, params, h_BTD, mesh)
        if self.rope is not None and context.rope is not None:
            if self.rope.interleaved:
                q_BTHN = halves_of_pairs(q_BTHN, self.rope.size)
                k_BTKN = halves_of_pairs(k_BTKN, self.rope.size)
            q_BTHN = rotate(q_BTHN, context.rope)
            k_BTKN = rotate(k_BTKN, context.rope)
            q_BTHN = q_BTHN if context.rope.growth is None else q_BTHN * context.rope.growth
        return self._results(q_BTHN, (k_BTKN, v_BTKN), mesh, context, params.get("sinks"))

    def _results(
        self, q_BTHN: Tensor, keys_values: KeysValues, mesh: Mesh, context: Context, sinks_H: Tensor | None = None
    ) -> Tensor:
        """Results of rotated queries over rotated keys and values."""
        k_BTKN, v_BTKN = keys_values
        options: dict[str, Any] = {"scale": self.scale, "cap": self.cap, "sinks_H": sinks_H}
        if context.kv_cache is not None and context.paging is not None:
            new = (q_BTHN[0], k_BTKN[0], v_BTKN[0])
            keys, values = context.kv_cache
            attend = static_paged_attention if context.blockwise else paged_attention
            out_NHD = attend(*new, (keys, values), context.paging, self.window, **options)
            if context.mutual_RM is not None:
                numbers = AttentionOptions(self.window or 0, self.scale or 0.0, self.cap or 0.0)
                groups = (context.paging, context.mutual_RM, numbers)
                out_NHD = mutual_paged_attention(new[0], out_NHD, (keys, values), *groups)
            return out_NHD.unsqueeze(0)
        if context.offsets is not None:
            options |= {"blockwise": context.blockwise, "mutual_RM": context.mutual_RM}
            row = (context.offsets, mesh, self.window, context.form)
            prefixes = context.prefixes
            if prefixes is None:
                return split_attention(q_BTHN, k_BTKN, v_BTKN, *row, **options)
            whole = (prefixes.spread(q_BTHN), prefixes.spread(k_BTKN), prefixes.spread(v_BTKN))
            return prefixes.narrow(split_attention(*whole, *row, **options))
        return attention(q_BTHN, k_BTKN, v_BTKN, mask_BTS=context.attention_mask_BTS, causal=context.causal, **options)

    def _heads(self, q_BTHN: Tensor, params: trees.Tree, h_BTD: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of this rank's heads, [B, T, heads, N] each, not rotated yet."""
        used = self._used_kv_heads(mesh, params["q"].shape[0], params["k"])
        v_BTKN = project_heads(h_BTD, *own_heads(params, "v", used, mesh=mesh))
        if self.qk_norm == "projection":
            q_BTHN = self._norm_all_heads(q_BTHN, params["q_norm"], self.heads, mesh)
            return q_BTHN, self._normed_keys(params, h_BTD, used, mesh), v_BTKN
        k_BTKN = project_heads(h_BTD, *own_heads(params, "k", used, mesh=mesh))
        if self.qk_norm is not None:
            q_BTHN = self.norm(q_BTHN, pbroadcast(params["q_norm"], mesh, "tensor"))
            k_BTKN = self.norm(k_BTKN, pbroadcast(params["k_norm"], mesh, "tensor"))
        return q_BTHN, k_BTKN, v_BTKN

    def _normed_keys(self, params: trees.Tree, h_BTD: Tensor, used: Tensor | None, mesh: Mesh) -> Tensor:
        """Keys of this rank's heads, normalized together with those of all heads."""
        weight = params["k"]
        bias = params.get("k_bias")
        norm = params["k_norm"]
        if used is not None:  # every rank norms all of them; its gradient is that of those it uses
            weight = used_by_parts(weight, mesh)
            norm = pbroadcast(norm, mesh, "tensor")
            bias = None if bias is None else pbroadcast(bias, mesh, "tensor")
        k_BTKN = self._norm_all_heads(project_heads(h_BTD, weight, bias), norm, self.kv_heads, mesh)
        return k_BTKN if used is None else k_BTKN.index_select(2, used)

    def _norm_all_heads(self, x_BTHN: Tensor, weight_HN: Tensor, heads: int, mesh: Mesh) -> Tensor:
        """A norm over all `heads` heads of a token; this rank may have a part of them.

        On a CPU its sum is one of fixed parts, as those of `multiply_and_sum`.
        """
        whole = weight_HN.shape[0] == heads
        if computes_exactly(x_BTHN, weight_HN):
            over = SINGLE if whole else mesh
            if (parts := fixed_parts(weight_HN.numel(), over)) is not None:
                return self._norm_in_parts(x_BTHN, weight_HN, heads, parts, over)
        if whole:
            return self.norm(x_BTHN.flatten(2), weight_HN.flatten()).view(x_BTHN.shape)
        wide_BTHN = x_BTHN.to(torch.promote_types(x_BTHN.dtype, torch.float32))
        total_BT11 = psum(wide_BTHN.square().sum((-2, -1), keepdim=True), mesh, "tensor")
        mean_BT11 = pbroadcast(total_BT11, mesh, "tensor") / (heads * self.head)
        weight_HN = weight_HN + self.norm.offset if self.norm.offset else weight_HN
        return (wide_BTHN * torch.rsqrt(mean_BT11 + self.norm.eps)).to(x_BTHN.dtype) * weight_HN

    def _norm_in_parts(self, x_BTHN: Tensor, weight_HN: Tensor, heads: int, parts: int, mesh: Mesh) -> Tensor:
        """A norm over the `heads` heads of all tensor ranks of a mesh, whose sum has so many parts on each."""
        x_MD = x_BTHN.flatten(2).flatten(0, 1)
        totals_M = square_sums(x_MD, parts)
        totals_M = pbroadcast(psum_pairwise(totals_M, mesh, "tensor"), mesh, "tensor")
        numbers = NormNumbers(heads * self.head, self.norm.eps, self.norm.offset)
        return scale_rows(x_MD, totals_M, weight_HN.flatten(), numbers).view(x_BTHN.shape)

    def _used_kv_heads(self, mesh: Mesh, heads: int, weight: Weight) -> Tensor | None:
        """Indices of the key-value heads that this rank's `heads` query heads use.

        None: it uses all heads that it holds.
        """
        if mesh.size("tensor") == 1 or weight.shape[0] != self.kv_heads:
            return None
        group = self.heads // self.kv_heads
        count = _kv_count(heads, group)
        first = mesh.index("tensor") * heads + torch.arange(count, device=weight.device) * (heads // count)
        used = torch.div(first, group, rounding_mode="floor")
        # Queries that fill the last ranks' parts see any head.
        return used if self.heads % mesh.size("tensor") == 0 else used.clamp(max=self.kv_heads - 1)


def _kv_count(heads: int, group: int) -> int:
    """Number of key-value heads that a rank with `heads` query heads needs, `group` query heads sharing each.

    Where the ranks' borders do not fall on the groups' it is one per query head, so that every rank has as many.
    """
    return 1 if group % heads == 0 else heads // group if heads % group == 0 else heads


def own_heads(params: trees.Tree, name: str, used: Tensor | None, mesh: Mesh) -> tuple[Weight, Tensor | None]:
    """Weight and bias of keys or values: of the used heads, where every rank holds all of them."""
    weight = params[name]
    bias = params.get(f"{name}_bias")
    if used is None:
        return weight, bias
    # Each rank's gradient reaches the heads it used; their sum is the whole one.
    own = select_rows(used_by_parts(weight, mesh), used)
    return own, None if bias is None else pbroadcast(bias, mesh, "tensor").index_select(0, used)


def project_heads(h_BTD: Tensor, weight: Weight, bias: Tensor | None) -> Tensor:
    """Hidden states to heads [B, T, H, N], by a weight [H, N, D] and a bias [H, N]."""
    return multiply(h_BTD, weight, bias).unflatten(-1, weight.shape[:2])
