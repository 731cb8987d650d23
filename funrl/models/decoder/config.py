"""Sizes and switches of a decoder: a tree of frozen records by subject."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, Literal, Self

from funrl.compiled_kernels.exact.gate import Activation
from funrl.models.decoder.attention import Attention
from funrl.models.decoder.dense import Dense
from funrl.models.decoder.experts import Moe
from funrl.models.decoder.gemma4 import LayerVectors
from funrl.models.decoder.latent_attention import LatentAttention, LatentSizes
from funrl.models.decoder.layers import DecoderLayer, Mixer, Mlp, Norm, Rope, RopeScaling
from funrl.models.decoder.routing import Experts
from funrl.models.errors import ModelError
from funrl.models.flat import by_record
from funrl.models.model import ModelConfig, ModelFiles, SpecialTokens, check_sizes
from funrl.models.token_costs import LayerCost, ModelCost


@dataclass(frozen=True)
class AttentionConfig:
    """Sizes and switches of attention.

    Attributes:
      heads, kv_heads, head: sizes H, K, N.
      bias, output_bias: q, k, v have a bias; the output has one.
      qk_norm: q and k are normalized before rotation: "head", each head by itself; "projection", all heads of q
        together, and of k; None: they are not.
      scale: factor of q k^T; None: 1 / sqrt(N).
      cap: attention logits x become cap tanh(x / cap); None: they stay.
      windows: per layer, the number of tokens that a token sees, itself and those before it, or None: all of them;
        None: there is no window.
      gated: results are multiplied by the sigmoid of gates, which the weights of the queries make too.
      sinks: each head has a further key of value 0, whose logit is a weight.
      latent: keys and values are made of a small vector a token; `head` is then the size of queries and keys, and
        there is neither a bias nor a window. None: they are made of the hidden states.
      mixers: layers take these in turn: layer i has number i modulo their count. None in its place, or no mixers at
        all: attention of the sizes above.
      lenders: per layer, the layer before it whose keys and values it attends to; None: it makes its own. (): so do
        all.
    """

    heads: int
    kv_heads: int
    head: int
    _: KW_ONLY
    bias: bool = False
    output_bias: bool = False
    qk_norm: Literal["head", "projection"] | None = None
    scale: float | None = None
    cap: float | None = None
    windows: tuple[int | None, ...] | None = None
    gated: bool = False
    sinks: bool = False
    latent: LatentSizes | None = None
    mixers: tuple[Mixer | None, ...] = ()
    lenders: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(heads=self.heads, kv_heads=self.kv_heads, head=self.head)
        if self.heads % self.kv_heads:
            raise ModelError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.latent is not None:
            self._check_latent(self.latent)

    def _check_latent(self, latent: LatentSizes) -> None:
        if self.head != latent.nope + latent.rope or self.kv_heads != self.heads:
            raise ModelError(
                f"heads of size {self.head} with {self.kv_heads} keys are not those of latent attention: "
                f"{self.heads} of {latent.nope} + {latent.rope}"
            )
        switches = {
            "windows": self.windows,
            "qk_norm": self.qk_norm,
            "attention_bias": self.bias,
            "output_bias": self.output_bias,
            "attention_cap": self.cap,
        }
        for name, value in switches.items():
            if value:
                raise ModelError(f"{name} is {value}, which latent attention does not have")

    def window(self, layer: int) -> int | None:
        """Window of one layer; None: a token sees all tokens before it."""
        return None if self.windows is None else self.windows[layer]

    def lender(self, layer: int) -> int | None:
        """The layer whose keys and values one layer attends to; None: its own."""
        return self.lenders[layer] if self.lenders else None


@dataclass(frozen=True)
class RopeConfig:
    """Rotary positions of a decoder.

    Attributes:
      theta: base of the frequencies.
      scaling: stretching of these; None: none.
      local_theta: base in layers with a window, which are not stretched; None: these are like the others.
      rotates: per layer, whether q and k are rotated; None: in all of them.
      part: size of the part of a head that is rotated, its first numbers; None: all of it.
      interleaved: neighbours are the pairs that are rotated, not numbers half a head apart.
      query_growth: rate by which queries grow with their positions, as `Rope` says; 0: they do not.
      axes: for each frequency which of a token's three positions it takes; (): tokens have one.
    """

    theta: float = 10000.0
    scaling: RopeScaling | None = None
    local_theta: float | None = None
    rotates: tuple[bool, ...] | None = None
    part: int | None = None
    interleaved: bool = False
    query_growth: float = 0.0
    axes: tuple[int, ...] = ()


@dataclass(frozen=True)
class NormConfig:
    """Root mean square norms of a decoder.

    Attributes:
      eps: added to the mean square.
      offset: added to the weight.
      places: "pre", before attention and mlp; "post", after them; "sandwich", both.
    """

    eps: float = 1e-6
    offset: float = 0.0
    places: Literal["pre", "post", "sandwich"] = "pre"


@dataclass(frozen=True)
class MlpConfig:
    """Mlps of a decoder.

    Attributes:
      inner: size F.
      activation: of the gate of a dense one, as `gated` has them.
      bias: the products of a dense one have biases.
      experts: layers with several mlps; each token takes some. None: every layer has one.
      mlps: layers take these in turn, as `AttentionConfig.mixers`; None in its place, or none at all: one of the above.
    """

    inner: int
    activation: Activation = "silu"
    bias: bool = False
    experts: Experts | None = None
    mlps: tuple[Mlp | None, ...] = ()

    def __post_init__(self) -> None:
        check_sizes(mlp=self.inner)

    def layer(self, layer: int) -> Mlp:
        """The mlp of one layer."""
        given = self.mlps[layer % len(self.mlps)] if self.mlps else None
        if given is not None:
            return given
        if self.experts is not None and layer not in self.experts.dense:
            return Moe(self.experts)
        return Dense(self.inner, self.activation, self.bias)


@dataclass(frozen=True)
class ScaleConfig:
    """Factors on the way from tokens to logits.

    Attributes:
      embed: of the embeddings.
      residual: of what attention and mlp add to the residual stream.
      logit_divisor: divides the logits; the hidden states that leave the model are divided by it already.
      logit_cap: logits x become cap tanh(x / cap); None: they stay.
      layers: each layer has a factor of its result, a number of its files that does not learn.
    """

    embed: float = 1.0
    residual: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float | None = None
    layers: bool = False


@dataclass(frozen=True, kw_only=True)
class Config(ModelConfig):
    """Sizes and switches of a decoder, besides those of every model.

    Attributes:
      attention: of attention, and of the mixers in its place.
      mlp: of the mlps.
      rope: of rotary positions.
      norm: of the norms.
      scales: factors on the way from tokens to logits.
      layer_vectors: vectors of each token that every layer has of its own; None: there are none.
    """

    attention: AttentionConfig
    mlp: MlpConfig
    rope: RopeConfig = RopeConfig()
    norm: NormConfig = NormConfig()
    scales: ScaleConfig = ScaleConfig()
    layer_vectors: LayerVectors | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self._rotated % 2:
            part = "" if self.rope.part is None else f", of which {self.rope.part} numbers are rotated"
            raise ModelError(f"head is {self.attention.head}{part}; rotary positions need an even number")
        if self.attention.latent is not None and self.rope.rotates:
            raise ModelError(f"rotates is {self.rope.rotates}, which latent attention does not have")
        scaling = self.rope.scaling
        if scaling is not None and scaling.kind == "longrope" and len(scaling.short) != self._rotated // 2:
            raise ModelError(
                f"rope_scaling has {len(scaling.short)} short factors, the rotated part of a head has "
                f"{self._rotated // 2} frequencies"
            )
        if self.rope.axes and len(self.rope.axes) != self._rotated // 2:
            raise ModelError(
                f"rope_axes has {len(self.rope.axes)} entries, the rotated part of a head has {self._rotated // 2} "
                "frequencies"
            )
        lenders = self.attention.lenders or None
        for name, values in (
            ("windows", self.attention.windows),
            ("rotates", self.rope.rotates),
            ("lenders", lenders),
        ):
            if values is not None and len(values) != self.layers:
                raise ModelError(f"{name} has {len(values)} entries for {self.layers} layers")

    @property
    def _rotated(self) -> int:
        """Size of the part of a head that is rotated."""
        if self.attention.latent is not None:
            return self.attention.latent.rope
        return self.rope.part or self.attention.head

    def mixer(self, layer: int) -> Mixer:
        """The mixer of one layer."""
        attention = self.attention
        given = attention.mixers[layer % len(attention.mixers)] if attention.mixers else None
        if given is not None:
            return given
        rope = self._rope(layer)
        if attention.latent is not None:
            assert rope is not None
            return LatentAttention(attention.heads, attention.latent, rope, scale=attention.scale)
        return Attention(
            heads=attention.heads,
            kv_heads=attention.kv_heads,
            head=attention.head,
            rope=rope,
            window=attention.window(layer),
            bias=attention.bias,
            output_bias=attention.output_bias,
            qk_norm=attention.qk_norm,
            norm=Norm(self.norm.eps, self.norm.offset),
            scale=attention.scale,
            cap=attention.cap,
            gated=attention.gated,
            sinks=attention.sinks,
        )

    def _rope(self, layer: int) -> Rope | None:
        """Rotary positions of one layer."""
        rope = self.rope
        if rope.rotates is not None and not rope.rotates[layer]:
            return None
        if self.attention.window(layer) is not None and rope.local_theta is not None:
            return Rope(self._rotated, rope.local_theta, interleaved=rope.interleaved)
        return Rope(self._rotated, rope.theta, rope.scaling, rope.interleaved, rope.query_growth, rope.axes)

    def of_layers(self, chosen: Sequence[int]) -> Self:
        """The same sizes with only the layers of these numbers, in their order.

        Raises:
          ModelError: one attends to keys and values of a layer that is left out.
        """
        attention = self.attention
        experts = self.mlp.experts
        if experts is not None:
            experts = replace(experts, dense=tuple(n for n, i in enumerate(chosen) if i in experts.dense))
        return replace(
            self,
            layers=len(chosen),
            attention=replace(
                attention,
                windows=attention.windows and tuple(attention.windows[i] for i in chosen),
                mixers=_in_turn(attention.mixers, chosen),
                lenders=_places_of(attention.lenders, chosen),
            ),
            rope=replace(self.rope, rotates=self.rope.rotates and tuple(self.rope.rotates[i] for i in chosen)),
            mlp=replace(self.mlp, experts=experts, mlps=_in_turn(self.mlp.mlps, chosen)),
        )


def _in_turn(parts: tuple[object, ...], chosen: Sequence[int]) -> tuple[Any, ...]:
    """Parts of some layers: layer i takes part i modulo their count."""
    return tuple(parts[i % len(parts)] for i in chosen) if parts else ()


def _places_of(lenders: tuple[int | None, ...], chosen: Sequence[int]) -> tuple[int | None, ...]:
    """Lenders of some layers, by their places among these.

    Raises:
      ModelError: one is left out.
    """
    places = {layer: place for place, layer in enumerate(chosen)}
    own = [lenders[i] for i in chosen] if lenders else []
    missing = [layer for layer in own if layer is not None and layer not in places]
    if missing:
        raise ModelError(f"layers {list(chosen)} attend to keys of layer {missing[0]}, which is left out")
    return tuple(None if layer is None else places[layer] for layer in own)


def decoder_config(**fields: object) -> Config:
    """The config of a decoder from its flat fields; see `models.flat` for their names.

    Example: decoder_config(vocab=32, embed=16, layers=2, heads=4, kv_heads=2, head=4, mlp=24, qk_norm=True)

    Raises:
      ModelError: sizes do not fit together.
      TypeError: a name is unknown, or a size is missing.
    """
    own, records = by_record(fields)
    return Config(
        **own,
        attention=AttentionConfig(**records.pop("attention", {})),
        mlp=MlpConfig(**records.pop("mlp", {})),
        **{name: _RECORDS[name](**values) for name, values in records.items()},
    )


_RECORDS = {
    "rope": RopeConfig,
    "norm": NormConfig,
    "scales": ScaleConfig,
    "special_tokens": SpecialTokens,
    "source": ModelFiles,
}


@functools.lru_cache(maxsize=64)
def layers_of(config: Config) -> tuple[DecoderLayer, ...]:
    """The layers of a decoder; equal ones are the same object."""
    known: dict[DecoderLayer, DecoderLayer] = {}
    layers = (DecoderLayer(config.mixer(i), config.mlp.layer(i)) for i in range(config.layers))
    return tuple(known.setdefault(layer, layer) for layer in layers)


def cost_of(config: Config) -> ModelCost:
    """The cost of a decoder's tokens, pairs of tokens and caches."""
    layers = (layer.mlp.cost(layer.mixer.cost(LayerCost())) for layer in layers_of(config))
    table = 0 if config.layer_vectors is None else config.vocab * config.layers * config.layer_vectors.size
    return ModelCost(config.embed, tuple(layers), looked_up=table)
