"""Sizes and switches of a decoder: one frozen record, from and to a Hugging Face config.json.

What is peculiar to a Hugging Face family is in `families.py`.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from funrl.models.config_fields import LARGEST_SIZES
from funrl.models.families import FAMILIES, FULL, SLIDING, HFFamily
from funrl.models.fp8_files import fp8_blocks
from funrl.models.sizes import Experts, Latent, ModelError

DTYPES = ("float32", "bfloat16", "float16", "float64")


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies beyond the lengths of pretraining.

    Attributes:
      kind: "linear" divides every frequency by `factor`; "llama3" only the low ones, with a ramp between that is even
        in turns; "yarn" likewise with one that is even in the numbers of frequencies.
      factor: the divisor.
      low, high: frequencies that turn fewer times than `low` over the original length are divided by `factor`, those
        that turn more often than `high` are kept.
      original: length of pretraining, in tokens.
      mscale, mscale_all: yarn: how much attention is sharpened: in its rotated part, and in all of it; 0: as yarn says.
    """

    kind: Literal["linear", "llama3", "yarn"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    mscale: float = 0.0
    mscale_all: float = 0.0

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        if self.kind != "yarn":
            return 1.0
        both = self.mscale > 0 and self.mscale_all > 0
        return self._sharper(self.mscale) / self._sharper(self.mscale_all) if both else self._sharper(1.0)

    @property
    def sharpness(self) -> float:
        """Factor of the logits of latent attention."""
        return self._sharper(self.mscale_all) ** 2 if self.kind == "yarn" and self.mscale_all else 1.0

    def _sharper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1


class LayerKind(NamedTuple):
    """Properties of one layer besides its weights.

    Attributes:
      window: the number of tokens that a token sees, itself and those before it; None: all of them.
      rotates: whether q and k are rotated by their positions.
    """

    window: int | None
    rotates: bool


@dataclass(frozen=True)
class Config:
    """Sizes and switches of a decoder.

    Attributes:
      vocab, embed, layers, heads, kv_heads, head, mlp: sizes V, D, L, H, K, N, F.
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
      tied: the unembedding is the embedding.
      windows: per layer, as in `LayerKind`; None: there is none.
      max_positions: longest sequence that the model was made for.
      dtype: of the weights in the file.
      family: its model_type in transformers.
      bos, eos, pad: token ids; there may be several that end a sequence.
      generation: the JSON text of the model's generation_config.json; "" where it has none.
      module: the JSON text of the config.json of a model that transformers' own code computes, of which the sizes
        above are a summary; "" for the decoder of this package.
      experts: layers with several mlps of which each token takes some; None: every layer has one.
      latent: keys and values are made of a small vector a token; `head` is then the size of queries and keys, and
        attention has neither bias nor window. None: they are made of the hidden states.
    """

    vocab: int
    embed: int
    layers: int
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
    tied: bool = False
    windows: tuple[int | None, ...] | None = None
    max_positions: int = 2048
    dtype: str = "float32"
    family: str = "llama"
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    generation: str = ""
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
    module: str = ""
    experts: Experts | None = None
    latent: Latent | None = None

    def __post_init__(self) -> None:
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head", "mlp"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.layers > LARGEST_SIZES["num_hidden_layers"]:
            raise ModelError(f"layers is {self.layers}, it must be at most {LARGEST_SIZES['num_hidden_layers']}")
        if self.module:
            return
        if self.heads % self.kv_heads:
            raise ModelError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.rotated % 2:
            raise ModelError(f"head is {self.head}, rotary positions need an even head size")
        if self.latent is not None:
            self._check_latent(self.latent)
        for name in ("windows", "rotates"):
            one = getattr(self, name)
            if one is not None and len(one) != self.layers:
                raise ModelError(f"{name} has {len(one)} entries for {self.layers} layers")

    def _check_latent(self, latent: Latent) -> None:
        if self.head != latent.nope + latent.rope or self.kv_heads != self.heads:
            raise ModelError(
                f"heads of size {self.head} with {self.kv_heads} keys are not those of latent attention: "
                f"{self.heads} of {latent.nope} + {latent.rope}"
            )
        for name in ("windows", "rotates", "qk_norm", "attention_bias", "output_bias", "attention_cap"):
            if getattr(self, name):
                raise ModelError(f"{name} is {getattr(self, name)}, which latent attention does not have")

    def window(self, layer: int) -> int | None:
        """Attention window of one layer; None: it sees all tokens before."""
        return None if self.windows is None else self.windows[layer]

    def kind(self, layer: int) -> LayerKind:
        """Properties of one layer besides its weights."""
        return LayerKind(self.window(layer), self.rotates is None or self.rotates[layer])

    def has_experts(self, layer: int) -> bool:
        """True if the mlp of a layer is a mixture of experts."""
        return self.experts is not None and layer not in self.experts.dense

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have experts."""
        return tuple(i for i in range(self.layers) if self.has_experts(i))

    @property
    def choices(self) -> int:
        """Number of experts that a token goes to, in all layers together."""
        return 0 if self.experts is None else len(self.expert_layers) * self.experts.per_token

    def used_parameters(self, parameters: int) -> int:
        """Of the `parameters` of this model those that a token meets: of the experts, its own."""
        if self.experts is None:
            return parameters
        unused = self.experts.count - self.experts.per_token
        return parameters - self.expert_parameters // self.experts.count * unused

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        if self.experts is None:
            return 0
        return 3 * self.experts.count * self.experts.mlp * self.embed * len(self.expert_layers)

    def attention_cost(self, parameters: int) -> float:
        """FLOPs of attention for one pair of tokens, divided by the FLOPs of everything else for one token.

        Args:
          parameters: of the model.
        """
        return 4 * self.layers * self.attention_width / (2 * self.used_parameters(parameters))

    @property
    def attention_width(self) -> int:
        """Numbers of a token's queries, as attention computes with them."""
        return self.heads * (self.head if self.latent is None else self.latent.width)

    @property
    def rotated(self) -> int:
        """Size of the part of a head that is rotated."""
        return self.head if self.latent is None else self.latent.rope

    def cached(self, tensor: int = 1) -> float:
        """Numbers of a token in a layer's cache, on one of the ranks that share the heads."""
        return 2 * self.kv_heads * self.head / tensor if self.latent is None else self.latent.cached

    def with_layers(self, layers: int) -> Config:
        """The same sizes with only the first `layers` layers."""
        windows = None if self.windows is None else self.windows[:layers]
        rotates = None if self.rotates is None else self.rotates[:layers]
        experts = self.experts
        if experts is not None:
            experts = replace(experts, dense=tuple(i for i in experts.dense if i < layers))
        return replace(self, layers=layers, windows=windows, rotates=rotates, experts=experts)


def config_from_hf(raw: Mapping[str, Any]) -> Config:
    """The record of a parsed config.json, written by transformers 4 or 5.

    Raises:
      ModelError: a field has a value that is not supported, or is missing.
    """
    name = raw.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise ModelError(f"model_type is {name!r}, supported are {sorted(FAMILIES)}")
    family = FAMILIES[name]
    got = {**family.defaults, **raw}
    _refuse(family, got)
    fp8_blocks(raw)  # weights that are quantized in another way cannot be read
    embed, layers, heads = (_size(got, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    eos = got.get("eos_token_id")
    fields: dict[str, Any] = {
        "vocab": _size(got, "vocab_size"),
        "embed": embed,
        "layers": layers,
        "heads": heads,
        "kv_heads": heads if got.get("num_key_value_heads") is None else _size(got, "num_key_value_heads"),
        "head": embed // heads if got.get("head_dim") is None else _size(got, "head_dim"),
        "mlp": _size(got, "intermediate_size"),
        "norm_eps": float(got["rms_norm_eps"]),
        "tied": bool(got["tie_word_embeddings"]),
        "windows": _windows(family, got, layers),
        "max_positions": _size(got, "max_position_embeddings"),
        "dtype": _dtype(got),
        "family": name,
        "bos": got.get("bos_token_id"),
        "eos": () if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
        "pad": got.get("pad_token_id"),
    }
    config = Config(**fields | _rotary(family, got) | family.read(got))
    if config.latent is None or config.rope_scaling is None or config.rope_scaling.sharpness == 1:
        return config
    return replace(config, attention_scale=config.head**-0.5 * config.rope_scaling.sharpness)


def config_to_hf(config: Config) -> dict[str, Any]:
    """The fields of this model's config.json, readable by transformers 4 and 5."""
    if config.module:
        return json.loads(config.module)
    family = FAMILIES[config.family]
    raw: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": config.family,
        "vocab_size": config.vocab,
        "hidden_size": config.embed,
        "intermediate_size": config.mlp,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tied,
        "bos_token_id": config.bos,
        "eos_token_id": config.eos[0] if len(config.eos) == 1 else list(config.eos) or None,
        "pad_token_id": config.pad,
        "dtype": config.dtype,
        "torch_dtype": config.dtype,
    }
    if config.rope_scaling is not None:
        raw["rope_scaling"] = _rope_to_hf(config.rope_scaling)
    raw |= family.write(config)
    written = replace(config_from_hf(raw), generation=config.generation)  # which has a file of its own
    if written != config:
        lost = [k for k, v in vars(written).items() if v != getattr(config, k)]
        raise ModelError(
            f"a {config.family} config.json cannot hold {', '.join(f'{k}={getattr(config, k)}' for k in lost)}"
        )
    return raw


def architecture(config: Config) -> str:
    """The name in transformers of the class of a model that transformers' own code computes."""
    return (json.loads(config.module).get("architectures") or [config.family])[0]


def _refuse(family: HFFamily, got: Mapping[str, Any]) -> None:
    supported: dict[str, Any] = {
        "hidden_act": ("silu",),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1, 1.0, None),
    }
    for name, values in (supported | dict(family.supported)).items():
        if got.get(name) not in values:
            raise ModelError(f"{name} is {got[name]!r}, supported is {values[0]!r}")


def _size(got: Mapping[str, Any], name: str) -> int:
    value = got.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} is {value!r}, it must be a whole number of at least 1")
    return value


def _rotary(family: HFFamily, got: Mapping[str, Any]) -> dict[str, Any]:
    """The base and the stretching of rotary frequencies; where the family has them, the base of local layers too."""
    # transformers 5 writes everything into rope_parameters; 4 wrote rope_theta and rope_scaling.
    name = "rope_parameters" if got.get("rope_parameters") else "rope_scaling"
    rope, local = got.get(name) or {}, got.get("rope_local_base_freq")
    per_layer = any(isinstance(value, Mapping) for value in rope.values())
    if local is None:
        if per_layer:
            raise ModelError(f"{name} is given per layer type ({sorted(rope)}), supported is one for all layers")
        theta, scaling = _rope(family, name, rope, got["rope_theta"])
        return {"rope_theta": theta, "rope_scaling": scaling}
    if rope and name == "rope_parameters" and not per_layer:
        raise ModelError(f"{name} is {json.dumps(rope)}, it must be given per layer type ({FULL}, {SLIDING})")
    theta, scaling = _rope(family, name, rope.get(FULL) or {} if per_layer else rope, got["rope_theta"])
    local, stretched = _rope(family, name, rope.get(SLIDING) or {} if per_layer else {}, local)
    if stretched is not None:
        raise ModelError(f"{name}.{SLIDING}.rope_type is {stretched.kind!r}, supported is 'default'")
    return {"rope_theta": theta, "rope_scaling": scaling, "local_rope_theta": local}


def _rope(
    family: HFFamily, name: str, rope: Mapping[str, Any], default_theta: float
) -> tuple[float, RopeScaling | None]:
    """The base and the stretching of one kind of layers.

    Args:
      name: of the field of config.json.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", default_theta))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(f"{name}.partial_rotary_factor is {rope['partial_rotary_factor']!r}, supported is 1.0")
    if kind not in family.rope_types:
        raise ModelError(f"{name}.rope_type is {kind!r}, supported: {', '.join(map(repr, family.rope_types))}")
    if kind == "default":
        return theta, None
    wanted = _ROPE_FIELDS[kind]
    given: dict[str, Any] = dict(_YARN) if kind == "yarn" else {}
    given |= {field: value for field, value in rope.items() if value is not None}
    missing = [field for field in wanted.values() if field not in given]
    if missing:
        raise ModelError(f"{name}.{missing[0]} is missing; rope_type {kind!r} needs it")
    for factor in ("attention_factor", "attn_factor"):  # of transformers, and of vLLM
        if kind == "yarn" and factor in given:
            raise ModelError(f"{name}.{factor} is {given[factor]!r}, supported is None")
    if kind == "yarn" and not given.get("truncate", True):
        raise ModelError(f"{name}.truncate is {given['truncate']!r}, supported is True")
    return theta, RopeScaling(kind, **{ours: given[theirs] for ours, theirs in wanted.items()})


_ORIGINAL = {"factor": "factor", "original": "original_max_position_embeddings"}
_ROPE_FIELDS: Mapping[str, Mapping[str, str]] = {
    "linear": {"factor": "factor"},
    "llama3": _ORIGINAL | {"low": "low_freq_factor", "high": "high_freq_factor"},
    "yarn": _ORIGINAL | {"low": "beta_slow", "high": "beta_fast", "mscale": "mscale", "mscale_all": "mscale_all_dim"},
}
_YARN = {"beta_slow": 1.0, "beta_fast": 32.0, "mscale": 0.0, "mscale_all_dim": 0.0}  # where they are not given


def _rope_to_hf(rope: RopeScaling) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": rope.kind}
    fields = {theirs: getattr(rope, ours) for ours, theirs in _ROPE_FIELDS[rope.kind].items()}
    return raw | {name: value for name, value in fields.items() if value}


def _windows(family: HFFamily, got: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    window = got.get("sliding_window") if got.get("use_sliding_window") else None
    kinds = got.get("layer_types")
    kinds = family.kinds(got, layers) if kinds is None else kinds
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise ModelError(f"layer_types has {unknown[0]!r}, supported are 'full_attention' and 'sliding_attention'")
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    if SLIDING not in kinds:
        return None
    if window is None:
        raise ModelError("layer_types has 'sliding_attention' but sliding_window is off")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def _dtype(got: Mapping[str, Any]) -> str:
    dtype = str(got.get("dtype") or got.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, supported are {list(DTYPES)}")
    return dtype
