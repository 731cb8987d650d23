"""Multi-head latent attention: the keys and values of all heads are made of one small vector a token.

    c_t = norm(A h_t) [R]        k_t = rotate(A' h_t) [N'], the same for all heads
    key of head i = (B_i c_t, k_t)        value of head i = B'_i c_t        query of head i = (q_i, rotate(q'_i))

The cache holds (c_t, k_t), R + N' numbers a token for all heads, on every tensor rank. Training makes keys and values
of each head and attends as all models do; a cache is attended to by `latent_paged_attention`. On a CPU training's
queries meet (c_t, k_t) too, as those of decoding do, so both have the same bits.

Under tensor parallelism a rank has some of the heads. What is the same on all ranks, A h and what comes before it, is
computed outside of `enter`: its gradient is whole on each, once those of all heads are summed. Where the residual
stream is split it is computed of a rank's own tokens, and of these only the small vectors are gathered.

References: DeepSeek-AI, 2024, https://arxiv.org/abs/2405.04434
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.attention import attention
from funrl.compiled_kernels.exact.dispatch import computes_exactly
from funrl.compiled_kernels.latent_paged_attention import (
    attend_through_latent,
    latent_paged_attention,
    static_latent_paged_attention,
)
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.rotary import Rotary, halves_of_pairs, rotate
from funrl.mesh.mesh import Mesh
from funrl.models.decoder.layers import CacheShapes, Context, Rope, WeightAxes, WeightShapes
from funrl.models.decoder.row_parallel import multiply_and_sum
from funrl.models.decoder.sequence_parallel import split_attention
from funrl.models.errors import ModelError
from funrl.models.low_rank import Weight, computed_merged, multiply
from funrl.models.split_residual import enter
from funrl.models.token_costs import LayerCost

NORM_EPS = 1e-6  # of the norms inside, whatever config.json says of the others


@dataclass(frozen=True)
class LatentSizes:
    """Sizes of attention whose keys and values are made of one small vector a token, the same for all heads.

    Attributes:
      kv_rank: size of this vector.
      q_rank: size of the vector that queries are made of; None: they are made of the hidden states.
      nope, rope: sizes of the parts of a head's query and key: without positions, and rotated by them; the latter part
        of the keys is the same for all heads.
      value: size of a head's value.
      interleaved: neighbours are the pairs that are rotated, not numbers half a head apart.

    References: DeepSeek-AI, 2024, https://arxiv.org/abs/2405.04434
    """

    kv_rank: int
    q_rank: int | None
    nope: int
    rope: int
    value: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.rope % 2:
            raise ModelError(f"latent.rope is {self.rope}, rotary positions need an even size")

    @property
    def cached(self) -> int:
        """Cached elements per token and layer."""
        return self.kv_rank + self.rope

    @property
    def width(self) -> int:
        """Size of a head in training: of queries, keys and values; the smaller ones are padded."""
        return max(self.nope + self.rope, self.value)


@dataclass(frozen=True)
class LatentAttention:
    """Mixer: latent attention; see `Mixer`.

    Attributes:
      heads: query heads.
      latent: the other sizes.
      rope: as in `Mixer`.
      scale: factor of q k^T; None: 1 / sqrt(nope + rope).
    """

    heads: int
    latent: LatentSizes
    rope: Rope
    scale: float | None = None

    @property
    def window(self) -> None:
        """A token sees all tokens before it."""
        return None

    @property
    def paged(self) -> None:
        """The cache has a kernel of its own."""
        return None

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights."""
        latent = self.latent
        query = (self.heads, latent.nope + latent.rope)
        shapes: dict[str, tuple[int, ...]] = {"q": (*query, embed)}
        if latent.q_rank is not None:
            shapes = {"q_a": (latent.q_rank, embed), "q_a_norm": (latent.q_rank,), "q_b": (*query, latent.q_rank)}
        return shapes | {
            "kv_a": (latent.kv_rank + latent.rope, embed),
            "kv_a_norm": (latent.kv_rank,),
            "kv_b": (self.heads, latent.nope + latent.value, latent.kv_rank),
            "o": (embed, self.heads, latent.value),
        }

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        of_heads = ("heads", "head", "embed")
        return {
            "q": of_heads,
            "q_a": ("latent", "embed"),
            "q_a_norm": ("norm",),
            "q_b": of_heads,
            "kv_a": ("latent", "embed"),
            "kv_a_norm": ("norm",),
            "kv_b": of_heads,
            "o": ("embed", "heads", "head"),
        }

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight: as most begin."""
        return None

    def apply(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> Tensor:
        """Attend, and project the heads' results, as `Mixer.apply`."""
        out_BTHN = self._attend(params, h_BTD, mesh, context)
        return multiply_and_sum(out_BTHN.flatten(2), params["o"], mesh, context.split)

    def cache_shapes(self, page_tokens: int, tensor: int) -> CacheShapes:
        """Vectors that all heads make their keys and values of, on every rank."""
        return CacheShapes(((page_tokens, self.latent.cached),))

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in what attention takes."""
        queries = self.heads * self.latent.width
        keys = self.heads * (self.latent.nope + self.latent.rope)
        return cost._replace(queries=queries, keys=keys, projected=2 * queries, cached=self.latent.cached)

    def _attend(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> Tensor:
        """Results of this rank's heads, [B, T, H, value].

        Args:
          params: by the names of `shapes`; this rank's heads.
          h_BTD: as in `Mixer.apply`.
        """
        latent = self.latent
        q_BTHN = _queries(latent, mesh, params, h_BTD=h_BTD, context=context)
        latent_BTR = _latent(latent, mesh, params, h_BTD=h_BTD, context=context)
        scale = self.scale or (latent.nope + latent.rope) ** -0.5
        if context.kv_cache is not None and context.paging is not None:
            cached = (context.kv_cache[0], context.paging)

            def attend_cache(up_HMR: Tensor) -> Tensor:
                new = (q_BTHN[0], latent_BTR[0])
                if context.blockwise:
                    return static_latent_paged_attention(*new, up_HMR, *cached, scale)
                return latent_paged_attention(*new, up_HMR, *cached, latent.value, scale)

            return computed_merged(params["kv_b"], attend_cache).unsqueeze(0)
        if _meets_latent(q_BTHN, params["kv_b"], context):
            vectors = latent_BTR.unsqueeze(2)

            def attend(q_THL: Tensor) -> Tensor:
                new = (q_THL.unsqueeze(0), vectors, vectors)
                assert context.offsets is not None
                return split_attention(*new, context.offsets, mesh, None, context.form, scale=scale)[0]

            return attend_through_latent(q_BTHN[0], params["kv_b"], latent.value, attend).unsqueeze(0)
        k_BTHN, v_BTHN = _keys_values(latent, params, latent_BTR)
        # Kernels want heads of one size; 0s change no product.
        q, k, v = (F.pad(x, (0, latent.width - x.shape[-1])) for x in (q_BTHN, k_BTHN, v_BTHN))
        if context.offsets is not None:
            options = {"scale": scale, "blockwise": context.blockwise}
            out_BTHN = split_attention(
                q, k, v, offsets=context.offsets, mesh=mesh, window=None, form=context.form, **options
            )
        else:
            out_BTHN = attention(q, k, v, mask_BTS=context.attention_mask_BTS, causal=context.causal, scale=scale)
        return out_BTHN[..., : latent.value]


def _meets_latent(q_BTHN: Tensor, up: Weight, context: Context) -> bool:
    """True if queries of packed rows meet the latent vectors themselves, in the order of sums of decoding."""
    packed = context.offsets is not None and not context.blockwise
    return packed and isinstance(up, Tensor) and computes_exactly(q_BTHN, up)


def _queries(latent: LatentSizes, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, context: Context) -> Tensor:
    """[B, T, H, nope + rope] of this rank's heads."""
    from_BTR = h_BTD
    weight = params["q_b" if latent.q_rank is not None else "q"]
    if latent.q_rank is not None:
        from_BTR = rms_norm(multiply(h_BTD, params["q_a"]), params["q_a_norm"], NORM_EPS)
    q_BTHN = multiply(enter(from_BTR, mesh, context.split), weight).unflatten(-1, weight.shape[:2])
    plain, rotated = q_BTHN.split((latent.nope, latent.rope), -1)
    return torch.cat((plain, _rotated(latent, rotated, context.rope)), -1)


def _latent(latent: LatentSizes, mesh: Mesh, params: trees.Tree, h_BTD: Tensor, context: Context) -> Tensor:
    """Origin of keys and values, [B, T, kv_rank + rope]; the part of the keys that is rotated is so already."""
    plain, rotated = multiply(h_BTD, params["kv_a"]).split((latent.kv_rank, latent.rope), -1)
    both_BTR = torch.cat((rms_norm(plain, params["kv_a_norm"], NORM_EPS), rotated), -1)
    plain, rotated = enter(both_BTR, mesh, context.split).split((latent.kv_rank, latent.rope), -1)
    return torch.cat((plain, _rotated(latent, rotated.unsqueeze(-2), context.rope).squeeze(-2)), -1)


def _keys_values(latent: LatentSizes, params: trees.Tree, latent_BTR: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, T, H, nope + rope] and values [B, T, H, value] of this rank's heads."""
    plain, rotated = latent_BTR.split((latent.kv_rank, latent.rope), -1)
    both_BTHN = multiply(plain, params["kv_b"]).unflatten(-1, params["kv_b"].shape[:2])
    k_BTHN, v_BTHN = both_BTHN.split((latent.nope, latent.value), -1)
    rotated = rotated.unsqueeze(-2).expand(*k_BTHN.shape[:-1], latent.rope)
    return torch.cat((k_BTHN, rotated), -1), v_BTHN


def _rotated(latent: LatentSizes, x: Tensor, rope: Rotary | None) -> Tensor:
    """Heads [..., rope] rotated; of neighbouring pairs, the first of all come first then."""
    if latent.interleaved:
        x = halves_of_pairs(x, x.shape[-1])
    assert rope is not None
    return rotate(x, rope)
