"""Sizes and switches of a decoder: one frozen record."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Literal, Self

from funrl.models.decoder.attention import Attention
from funrl.models.decoder.dense import Dense
from funrl.models.decoder.experts import Moe
from funrl.models.decoder.latent_attention import Latent, LatentAttention
from funrl.models.decoder.layers import DecoderLayer, Mixer, Mlp, Norm, Rope, RopeScaling
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.model import LayerCost, ModelConfig, ModelCost


@dataclass(frozen=True)
class Config(ModelConfig):
    """Sizes and switches of a decoder, besides those of every model.

    Attributes:
      heads, kv_heads, head, mlp: sizes H, K, N, F.
      norm_eps: added to the mean square in every norm.
      norm_offset: added to the weight of every norm.
      norms: where they are: "pre", before attention and mlp; "post", behind them; "sandwich", both.
      activation: of the mlp's gate; "gelu" is the approximation by tanh.
      rope_theta: base of the rotary frequencies.
      rope_scaling: stretching of these; None: none.
      local_rope_theta: base in layers with a window, which are not stretched; None: these are like the others.
      rotates: per layer, whether q and k are rotated; None: in all of them.
      qk_norm: q and k are normalised before rotation.
      qk_norm_over: "head", each head by itself; "projection", all heads of q together, and of k.
      attention_bias, output_bias: q, k, v have a bias; the attention's output has one.
      attention_scale: factor of q k^T; None: 1 / sqrt(N).
      attention_cap: attention logits x become cap tanh(x / cap); None: they stay.
      embed_scale: factor of the embeddings.
      residual_scale: factor of what attention and mlp add to the residual stream.
      logit_divisor: divides the logits; the hidden states that leave the model are divided by it already.
      logit_cap: as attention_cap, of the logits.
      windows: per layer, the number of tokens that a token sees, itself and those before it, or None: all of them;
        None: there is no window.
      experts: layers with several mlps of which each token takes some; None: every layer has one.
      latent: keys and values are made of a small vector a token; `head` is then the size of queries and keys, and
        attention has neither bias nor window. None: they are made of the hidden states.
      output_gate: the results of attention are multiplied by the sigmoid of gates, which queries' weights make too.
      rotary_part: size of the part of a head that is rotated, its first numbers; None: all of it.
      mixers: further mixers, which layers take in turn: layer i has number i modulo their count. None in its place, or
        no mixers at all: attention of the sizes above.
    """

    heads: int
    kv_heads: int
    head: int
    mlp: int
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    windows: tuple[int | None, ...] | None = None
    norm_offset: float = 0.0
    norms: Literal["pre", "post", "sandwich"] = "pre"
    activation: Literal["silu", "gelu"] = "silu"
    local_rope_theta: float | None = None
    rotates: tuple[bool, ...] | None = None
    qk_norm_over: Literal["head", "projection"] = "head"
    attention_scale: float | None = None
    attention_cap: float | None = None
    embed_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    experts: Experts | None = None
    latent: Latent | None = None
    output_gate: bool = False
    rotary_part: int | None = None
    mixers: tuple[Mixer | None, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.kv_heads:
            raise ModelError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self._rotated % 2:
            raise ModelError(f"head is {self.head}, rotary positions need an even head size")
        if self.latent is not None:
            self._check_latent(self.latent)
        for name in ("windows", "rotates"):
            values = getattr(self, name)
            if values is not None and len(values) != self.layers:
                raise ModelError(f"{name} has {len(values)} entries for {self.layers} layers")

    def _check_latent(self, latent: Latent) -> None:
        if self.head != latent.nope + latent.rope or self.kv_heads != self.heads:
            raise ModelError(
                f"heads of size {self.head} with {self.kv_heads} keys are not those of latent attention: "
                f"{self.heads} of {latent.nope} + {latent.rope}"
            )
        for name in ("windows", "rotates", "qk_norm", "attention_bias", "output_bias", "attention_cap"):
            if getattr(self, name):
                raise ModelError(f"{name} is {getattr(self, name)}, which latent attention does not have")

    @property
    def _rotated(self) -> int:
        """Size of the part of a head that is rotated."""
        return self.rotary_part or self.head if self.latent is None else self.latent.rope

    def window(self, layer: int) -> int | None:
        """Attention window of one layer; None: it sees all tokens before."""
        return None if self.windows is None else self.windows[layer]

    def mixer(self, layer: int) -> Mixer:
        """The mixer of one layer."""
        given = self.mixers[layer % len(self.mixers)] if self.mixers else None
        if given is not None:
            return given
        rope = self._rope(layer)
        if self.latent is not None:
            assert rope is not None
            return LatentAttention(self.heads, self.latent, rope, self.attention_scale)
        return Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head=self.head,
            rope=rope,
            window=self.window(layer),
            bias=self.attention_bias,
            output_bias=self.output_bias,
            qk_norm=self.qk_norm_over if self.qk_norm else None,
            norm=Norm(self.norm_eps, self.norm_offset),
            scale=self.attention_scale,
            cap=self.attention_cap,
            gated=self.output_gate,
        )

    def mlp_of(self, layer: int) -> Mlp:
        """The mlp of one layer."""
        if self.experts is not None and layer not in self.experts.dense:
            return Moe(self.experts)
        return Dense(self.mlp, self.activation)

    def _rope(self, layer: int) -> Rope | None:
        """Rotary positions of one layer."""
        if self.rotates is not None and not self.rotates[layer]:
            return None
        if self.window(layer) is not None and self.local_rope_theta is not None:
            return Rope(self._rotated, self.local_rope_theta)
        return Rope(self._rotated, self.rope_theta, self.rope_scaling)

    def with_layers(self, layers: int) -> Self:
        """The same sizes with only the first `layers` layers."""
        windows = None if self.windows is None else self.windows[:layers]
        rotates = None if self.rotates is None else self.rotates[:layers]
        experts = self.experts
        if experts is not None:
            experts = replace(experts, dense=tuple(i for i in experts.dense if i < layers))
        return replace(self, layers=layers, windows=windows, rotates=rotates, experts=experts)


@functools.lru_cache(maxsize=64)
def layers_of(config: Config) -> tuple[DecoderLayer, ...]:
    """The layers of a decoder; equal ones are the same object."""
    known: dict[DecoderLayer, DecoderLayer] = {}
    layers = (DecoderLayer(config.mixer(i), config.mlp_of(i)) for i in range(config.layers))
    return tuple(known.setdefault(layer, layer) for layer in layers)


def cost_of(config: Config) -> ModelCost:
    """The cost of a decoder's tokens, pairs of tokens and caches."""
    layers = (layer.mlp.cost(layer.mixer.cost(LayerCost())) for layer in layers_of(config))
    return ModelCost(config.embed, tuple(layers))
