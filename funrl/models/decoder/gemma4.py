"""Parts of Gemma 4's layers: attention that lends its keys, experts beside a dense mlp, and vectors of each layer.

    attention     values v = k before its norm, or of a matrix of their own; v and k normalized by head, logits q k^T
    borrowing     a later layer has queries alone: it attends to the keys and values of an earlier layer of its kind
    experts       out = norm(dense(norm(x))) + norm(experts(norm'(x))), chosen by router(norm(x))
    vectors       x <- x + norm(P (gelu(G x) * u_i)), with u_i = (norm(W_i e) + table_i[token]) / sqrt(2)

e is the embedding of the token, u_i the layer's own vector of it.

References: Google DeepMind, 2026, https://ai.google.dev/gemma/docs/core
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.exact.gate import Activation, gated
from funrl.compiled_kernels.linear import linear
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.rotary import rotate
from funrl.mesh.collectives import pbroadcast
from funrl.mesh.mesh import Mesh
from funrl.models.decoder.attention import Attention, own_heads, project_heads
from funrl.models.decoder.dense import Dense
from funrl.models.decoder.experts import Moe, routed_mixture, routing_of
from funrl.models.decoder.layers import CacheShapes, Context, KeysValues, Norm, WeightAxes, WeightShapes
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.low_rank import multiply
from funrl.models.model import RouterLoad
from funrl.models.split_residual import enter
from funrl.models.token_costs import LayerCost


@dataclass(frozen=True)
class LendingAttention(Attention):
    """Mixer: attention with normalized keys and values, which later layers may attend to as well; see `Mixer`.

    Attributes:
      keys_as_values: values are the keys before their norm.
      lends: later layers attend to its keys and values.
      borrows: it attends to those of `Context.keys_values` and makes none.
    """

    keys_as_values: bool = False
    lends: bool = False
    borrows: bool = False

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights, as `Mixer.shapes`."""
        absent = ("k", "v", "k_bias", "v_bias", "k_norm") if self.borrows else ("v", "v_bias") * self.keys_as_values
        return {name: shape for name, shape in super().shapes(embed).items() if name not in absent}

    def apply(
        self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context
    ) -> Tensor | tuple[Tensor, KeysValues]:
        """Attend, and project the heads' results, as `Mixer.apply`.

        Raises:
          ModelError: it borrows, and no keys and values are given.
        """
        if self.borrows and context.keys_values is None:
            raise ModelError("a layer that borrows keys and values is computed without those of an earlier layer")
        if not self.lends:
            return super().apply(params, h_BTD, mesh, context)
        lent = self._keys_values(params, enter(h_BTD, mesh, context.split), mesh, context)
        out_BTD = super().apply(params, h_BTD, mesh, context._replace(keys_values=lent))
        assert isinstance(out_BTD, Tensor)
        return out_BTD, lent

    def cache_shapes(self, page_tokens: int, tensor: int) -> CacheShapes:
        """Keys and values of the heads that a rank needs; none where they are another layer's."""
        return CacheShapes() if self.borrows else super().cache_shapes(page_tokens, tensor)

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in what attention takes."""
        cost = super().cost(cost)
        return cost._replace(projected=cost.queries, cached=0, cached_heads=1) if self.borrows else cost

    def _attend_by(self, q_BTHN: Tensor, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> Tensor:
        """Results of heads with these queries, which are neither normalized nor rotated yet."""
        q_BTHN = self.norm(q_BTHN, pbroadcast(params["q_norm"], mesh, "tensor"))
        if context.rope is not None:
            q_BTHN = rotate(q_BTHN, context.rope)
        keys_values = context.keys_values or self._keys_values(params, h_BTD, mesh, context)
        return self._results(q_BTHN, keys_values, mesh, context)

    def _keys_values(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> KeysValues:
        """Rotated keys, and values, of this rank's heads.

        Args:
          h_BTD: all tokens, behind `enter`.
        """
        used = self._used_kv_heads(mesh, params["q"].shape[0], params["k"])
        k_BTKN = project_heads(h_BTD, *own_heads(params, "k", used, mesh=mesh))
        v_BTKN = k_BTKN
        if not self.keys_as_values:
            v_BTKN = project_heads(h_BTD, *own_heads(params, "v", used, mesh=mesh))
        k_BTKN = self.norm(k_BTKN, pbroadcast(params["k_norm"], mesh, "tensor"))
        v_BTKN = rms_norm(v_BTKN, v_BTKN.new_ones(self.head), self.norm.eps)
        if context.rope is not None:
            k_BTKN = rotate(k_BTKN, context.rope)
        return k_BTKN, v_BTKN


@dataclass(frozen=True)
class DenseBesideExperts:
    """Mlp: a dense mlp and a mixture of experts, which each have a norm before and a norm after; see `Mlp`.

    Attributes:
      dense: the dense one, whose norm before is the layer's.
      experts: the others.
      norm: of the further norms.
    """

    dense: Dense
    experts: Experts
    norm: Norm

    @property
    def routed(self) -> bool:
        """Tokens go to some of its experts."""
        return True

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights."""
        norms = ("dense_out_norm", "expert_norm", "expert_out_norm", "router_scale")
        return {**self.dense.shapes(embed), **Moe(self.experts).shapes(embed), **dict.fromkeys(norms, (embed,))}

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        norms = ("dense_out_norm", "expert_norm", "expert_out_norm", "router_scale")
        return {**self.dense.axes(), **Moe(self.experts).axes(), **dict.fromkeys(norms, ("norm",))}

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight: factors are 1, others as most begin."""
        if name == "router_scale":
            return torch.ones(shape, device=generator.device)
        return Moe(self.experts).initial(name, shape, generator)

    def apply(self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context) -> tuple[Tensor, RouterLoad]:
        """Compute both, as `Mlp.apply`."""
        dense_BTD, _ = self.dense.apply(params, h_BTD, mesh, context)
        dense_BTD = self.norm(dense_BTD, params["dense_out_norm"])
        x_BTD = context.stream_BTD
        assert x_BTD is not None
        router_BTD = self.norm(x_BTD, params["router_scale"]) * x_BTD.shape[-1] ** -0.5
        logits_BTE = multiply(router_BTD, params["router"])
        own_BTD = self.norm(x_BTD, params["expert_norm"])
        out_BTD, load = routed_mixture(self.experts, mesh, params, own_BTD, logits_BTE, routing_of(context))
        return dense_BTD + self.norm(out_BTD, params["expert_out_norm"]), load

    def cost(self, cost: LayerCost) -> LayerCost:
        """Fill in the experts, and the inner sizes that a token meets."""
        cost = Moe(self.experts).cost(cost)
        return cost._replace(inner=cost.inner + self.dense.inner)


@dataclass(frozen=True)
class LayerVectors:
    """Vectors of each token that every layer has of its own, from a table and from the token's embedding.

    Attributes:
      size: of a vector, P.
      activation: of the gate, as `gated` has them.
    """

    size: int
    activation: Activation = "gelu"

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ModelError(f"layer_vectors.size is {self.size}, it must be at least 1")

    def table_shapes(self, vocab: int, embed: int, layers: int) -> WeightShapes:
        """Shapes of the weights outside of the layers."""
        width = layers * self.size
        return {
            "embed_per_layer": (vocab, width),
            "embed_projection": (width, embed),
            "embed_projection_norm": (self.size,),
        }

    def table_axes(self) -> WeightAxes:
        """Logical axes of the weights outside of the layers."""
        return {
            "embed_per_layer": ("vocab", "embed"),
            "embed_projection": ("latent", "embed"),
            "embed_projection_norm": ("norm",),
        }

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the weights of a layer."""
        return {"vector_gate": (self.size, embed), "vector_projection": (embed, self.size), "vector_norm": (embed,)}

    def axes(self) -> WeightAxes:
        """Logical axes of the weights of a layer: all tensor ranks have the whole of them."""
        return {
            "vector_gate": ("latent", "embed"),
            "vector_projection": ("embed", "latent"),
            "vector_norm": ("norm",),
        }

    def make(self, params: trees.Tree, rows_BTX: Tensor, x_BTD: Tensor, norm: Norm) -> Tensor:
        """Vectors of all layers, [B, T, L, P].

        Args:
          params: with the weights of `table_shapes`.
          rows_BTX: the tokens' rows of the table, X = L P.
          x_BTD: their embeddings.
          norm: of what comes of the embeddings.
        """
        made_BTX = linear(x_BTD, params["embed_projection"]) * x_BTD.shape[-1] ** -0.5
        made_BTLP = norm(made_BTX.unflatten(-1, (-1, self.size)), params["embed_projection_norm"])
        # Rounded to the dtype before, as in transformers.
        rows_BTX = rows_BTX * rows_BTX.new_full((), math.sqrt(self.size))
        return (made_BTLP + rows_BTX.view_as(made_BTLP)) * 2**-0.5

    def apply(self, params: trees.Tree, x_BTD: Tensor, vectors_BTP: Tensor, norm: Norm) -> Tensor:
        """Part of the residual stream that a layer's vectors add, [B, T, D].

        Args:
          params: with the weights of `shapes`.
          x_BTD: the stream of this rank's tokens, and vectors_BTP: their vectors.
          norm: of the result.
        """
        inner_BTP = gated(linear(x_BTD, params["vector_gate"]), vectors_BTP, self.activation)
        return norm(linear(inner_BTP, params["vector_projection"]), params["vector_norm"])
