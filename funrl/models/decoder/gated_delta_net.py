"""Gated delta net: a mixer whose heads keep a state of a fixed size instead of the keys and values of all tokens.

    q_t, k_t, v_t = silu(convolution of the last W tokens' projections), q and k normalized
    log_decay_t = -exp(a_log) softplus(a_t + dt_bias), beta_t = sigmoid(b_t)
    o_t = gated_delta_rule(q, k, v, log_decay, beta)_t
    out_t = O (norm(o_t) silu(z_t))

Each key head serves a group of value heads. Under tensor parallelism a rank has some of the key heads with their value
heads, and the channels of the convolution that are theirs.

References: Yang et al., 2024, https://arxiv.org/abs/2412.06464
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.delta_rule.gated_delta import causal_convolution, gated_delta_rule, packed_segments
from funrl.compiled_kernels.delta_rule.net_pass import DeltaInputs, convolved_heads, delta_net_pass
from funrl.compiled_kernels.delta_rule.split_rows import split_convolution, split_delta_rule
from funrl.compiled_kernels.delta_rule.static_pass import static_delta_net_pass
from funrl.compiled_kernels.norm import rms_norm
from funrl.mesh.collectives import pbroadcast
from funrl.mesh.mesh import Mesh
from funrl.models.decoder.layers import CacheShapes, Context, WeightAxes, WeightShapes
from funrl.models.decoder.row_parallel import multiply_and_sum
from funrl.models.decoder.sequence_parallel import AXIS as SEQUENCE
from funrl.models.errors import ModelError
from funrl.models.low_rank import multiply
from funrl.models.split_residual import enter
from funrl.models.token_costs import LayerCost

SMALLEST_A = 0.01  # of the first exp(a_log), uniform up to
LARGEST_A = 16.0


@dataclass(frozen=True)
class GatedDeltaNet:
    """Sizes of a gated delta net.

    Attributes:
      key_heads, value_heads: numbers of heads K and H; K divides H.
      key, value: sizes of a head's queries and keys N, and of its values M.
      width: number of tokens W that the convolution spans.
      norm_eps: of the norm of a head's output.
      joined: "qkvz" has for each key head the rows of its queries, keys, values and output gates, and "ba" those of its
        gates; False: "in_q", "in_k", "in_v", "in_z", "in_b" and "in_a" have them, head by head.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    width: int = 4
    norm_eps: float = 1e-6
    joined: bool = True

    def __post_init__(self) -> None:
        if self.value_heads % self.key_heads:
            raise ModelError(f"value_heads is {self.value_heads}, it must be a multiple of key_heads, {self.key_heads}")

    @property
    def rope(self) -> None:
        """Positions are in the state's decay."""
        return None

    @property
    def window(self) -> None:
        """The state is of all tokens before."""
        return None

    @property
    def paged(self) -> None:
        """A state has no pages for a kernel."""
        return None

    @property
    def _group(self) -> int:
        """Number of value heads of a key head."""
        return self.value_heads // self.key_heads

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights."""
        K = self.key_heads
        H = self.value_heads
        N = self.key
        M = self.value
        joined = {"qkvz": (K, 2 * N + 2 * self._group * M, embed), "ba": (K, 2 * self._group, embed)}
        apart = {"in_q": (K, N, embed), "in_k": (K, N, embed), "in_v": (H, M, embed), "in_z": (H, M, embed)}
        apart |= {"in_b": (H, 1, embed), "in_a": (H, 1, embed)}
        return {
            **(joined if self.joined else apart),
            "conv_q": (K, N, 1, self.width),
            "conv_k": (K, N, 1, self.width),
            "conv_v": (H, M, 1, self.width),
            "a_log": (H,),
            "dt_bias": (H,),
            "z_norm": (M,),
            "out": (embed, H, M),
        }

    def axes(self) -> WeightAxes:
        """Logical axes: every tensor rank has some of the heads, of both kinds the same part."""
        return {
            **dict.fromkeys(("qkvz", "ba", *(f"in_{part}" for part in "qkvzba")), ("state_heads", "head", "embed")),
            "conv_q": ("state_heads", "head", "head", "head"),
            "conv_k": ("state_heads", "head", "head", "head"),
            "conv_v": ("state_heads", "head", "head", "head"),
            "a_log": ("state_heads",),
            "dt_bias": ("state_heads",),
            "z_norm": ("head",),
            "out": ("embed", "state_heads", "head"),
        }

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values as in transformers: decays of 1 to 16 a token where a is 0, norms that change nothing."""
        if name in ("dt_bias", "z_norm"):
            return torch.ones(shape, device=generator.device)
        if name == "a_log":
            uniform = torch.rand(shape, generator=generator, device=generator.device)
            return (SMALLEST_A + (LARGEST_A - SMALLEST_A) * uniform).log()
        return None

    def apply(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> Tensor:
        """As `Mixer.apply`."""
        h_BTD = enter(h_BTD, mesh, context.split)
        channels_BTD, z_BTHM = self._projected(params, h_BTD)
        filters_DW = torch.cat([params[name].flatten(0, 2) for name in ("conv_q", "conv_k", "conv_v")])
        log_decay_BTH, beta_BTH = self._gates(params, h_BTD)
        key_heads = params["conv_q"].shape[0]
        if context.kv_cache is not None and context.paging is not None and context.cells_S is not None:
            of_tokens = channels_BTD[0], log_decay_BTH[0], beta_BTH[0]
            inputs = DeltaInputs(*of_tokens, filters_DW, key_heads, self.key)
            states, tails = context.kv_cache
            compute = static_delta_net_pass if context.blockwise else delta_net_pass
            out_BTHM = compute(inputs, (states, tails), context.cells_S, context.paging).unsqueeze(0)
        else:
            segments_BT = _segments(h_BTD, context, mesh.size(SEQUENCE))
            if mesh.size(SEQUENCE) > 1 and segments_BT is not None:
                mixed_BTD = split_convolution(channels_BTD, filters_DW, segments_BT, mesh)
            else:
                mixed_BTD = causal_convolution(channels_BTD, filters_DW, segments_BT)
            heads = convolved_heads(F.silu(mixed_BTD), key_heads, self.key, self.value)
            out_BTHM = _of_rows((*heads, log_decay_BTH, beta_BTH), segments_BT, mesh, context)
        weight_M = pbroadcast(params["z_norm"], mesh, "tensor")
        out_BTHM = rms_norm(out_BTHM, weight_M, self.norm_eps) * F.silu(_wide(z_BTHM))
        return multiply_and_sum(out_BTHM.to(h_BTD.dtype).flatten(2), params["out"], mesh, context.split)

    def _projected(self, params: trees.Tree, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs of the convolution [B, T, channels], and output gates [B, T, H, M]: of this rank's heads."""
        if not self.joined:
            channels_BTD = torch.cat([multiply(h_BTD, params[name]) for name in ("in_q", "in_k", "in_v")], -1)
            return channels_BTD, multiply(h_BTD, params["in_z"]).unflatten(-1, (-1, self.value))
        values = self._group * self.value
        qkvz_BTKR = multiply(h_BTD, params["qkvz"]).unflatten(-1, params["qkvz"].shape[:2])
        q, k, v, z = qkvz_BTKR.split((self.key, self.key, values, values), -1)
        return torch.cat([x.flatten(2) for x in (q, k, v)], -1), z.unflatten(-1, (-1, self.value)).flatten(2, 3)

    def _gates(self, params: trees.Tree, h_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Logarithm of the decay, and beta, [B, T, H] of this rank's heads."""
        if self.joined:
            ba_BTKR = multiply(h_BTD, params["ba"]).unflatten(-1, params["ba"].shape[:2])
            b_BTH, a_BTH = (x.flatten(2) for x in ba_BTKR.split(self._group, -1))
        else:
            b_BTH, a_BTH = (multiply(h_BTD, params[name]) for name in ("in_b", "in_a"))
        log_decay_BTH = -_wide(params["a_log"]).exp() * F.softplus(_wide(a_BTH) + _wide(params["dt_bias"]))
        return log_decay_BTH, b_BTH.sigmoid()

    def cache_shapes(self, page_tokens: int, tensor: int) -> CacheShapes:
        """A cell: the states of a rank's value heads, and its inputs of the convolution of the last tokens."""
        heads = self.value_heads // tensor
        channels = 2 * self.key_heads // tensor * self.key + heads * self.value
        return CacheShapes(cells=((heads, self.key, self.value), (self.width - 1, channels)))

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in the state; a gated delta net computes no pairs of tokens."""
        states, tails = map(math.prod, self.cache_shapes(1, 1).cells)
        passed = states + self.value_heads * self.key**2 + tails
        return cost._replace(state=states + tails, state_heads=self.key_heads, passed=passed)


def _segments(h_BTD: Tensor, context: Context, ranks: int) -> Tensor | None:
    """Number of each token's sequence, over the whole rows that so many ranks share; None: each row is one."""
    if context.offsets is None:
        return context.segments_BT
    return packed_segments(context.offsets, h_BTD.shape[1] * ranks)


def _of_rows(
    heads: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], segments_BT: Tensor | None, mesh: Mesh, context: Context
) -> Tensor:
    """The gated delta rule over rows without a cache: of queries, keys, values, decays and betas."""
    if context.offsets is not None and mesh.size(SEQUENCE) > 1 and segments_BT is not None:
        return split_delta_rule(heads, segments_BT, mesh)
    return gated_delta_rule(*heads, segments_BT=segments_BT)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
