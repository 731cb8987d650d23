"""Sizes and switches of a decoder: one frozen record, from and to a Hugging Face config.json.

| family | what it adds to a pre-norm decoder with rotary positions, grouped key-value heads and a gated SiLU mlp |
|---|---|
| llama | attention bias (q, k, v and o) where the config has it |
| qwen2 | bias on q, k, v; a sliding window on the upper layers where the config has it |
| qwen3 | q and k normalised per head, free head size, the sliding window of qwen2 |
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

Family = Literal["llama", "qwen2", "qwen3"]
DTYPES = ("float32", "bfloat16", "float16", "float64")


class ModelError(ValueError):
    """A model that cannot be used; the message names the file or field, its value and what is supported."""


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies beyond the lengths of pretraining.

    Attributes:
      kind: "linear" divides every frequency by `factor`; "llama3" only the low ones, with a smooth ramp between.
      factor: the divisor.
      low, high: llama3: frequencies that turn fewer times than `low` over the original length are divided by
        `factor`, those that turn more often than `high` are kept.
      original: llama3: length of pretraining, in tokens.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192


@dataclass(frozen=True)
class Config:
    """Sizes and switches of a decoder.

    Attributes:
      vocab, embed, layers, heads, kv_heads, head, mlp: sizes V, D, L, H, K, N, F.
      norm_eps: added to the mean square in every norm.
      rope_theta: base of the rotary frequencies.
      rope_scaling: stretching of these; None: none.
      qk_norm: q and k of each head are normalised before rotation.
      attention_bias, output_bias: q, k, v have a bias; the attention's output has one.
      tied: the unembedding is the embedding.
      windows: per layer, the number of tokens that a token sees, itself and those before it; None: all of them.
      max_positions: longest sequence that the model was made for.
      dtype: of the weights in the file.
      family: which Hugging Face architecture this is.
      bos, eos, pad: token ids; there may be several that end a sequence.
      generation: the JSON text of the model's generation_config.json; "" where it has none.
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
    family: Family = "llama"
    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None
    generation: str = ""

    def __post_init__(self) -> None:
        for name in ("vocab", "embed", "layers", "heads", "kv_heads", "head", "mlp"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} is {getattr(self, name)}, it must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"heads {self.heads} is not a multiple of kv_heads {self.kv_heads}")
        if self.head % 2:
            raise ModelError(f"head is {self.head}, rotary positions need an even head size")
        if self.windows is not None and len(self.windows) != self.layers:
            raise ModelError(f"windows has {len(self.windows)} entries for {self.layers} layers")

    def window(self, layer: int) -> int | None:
        """Attention window of one layer; None: it sees all tokens before."""
        return None if self.windows is None else self.windows[layer]

    def attention_cost(self, parameters: int) -> float:
        """FLOPs of attention for one pair of tokens, divided by the FLOPs of everything else for one token.

        Args:
          parameters: of the model.
        """
        return 4 * self.layers * self.heads * self.head / (2 * parameters)

    def with_layers(self, layers: int) -> Config:
        """The same sizes with only the first `layers` layers."""
        windows = None if self.windows is None else self.windows[:layers]
        return replace(self, layers=layers, windows=windows)


# Values that transformers takes for fields that config.json lacks.
_COMMON = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "rope_theta": 10000.0}
_QWEN = {"num_key_value_heads": 32, "max_position_embeddings": 32768, "use_sliding_window": False}
_QWEN = _QWEN | {"sliding_window": 4096, "max_window_layers": 28}
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": _COMMON | {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": _COMMON | _QWEN,
    "qwen3": _COMMON | _QWEN | {"head_dim": 128},
}
ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}


def config_from_hf(raw: Mapping[str, Any]) -> Config:
    """The record of a parsed config.json, written by transformers 4 or 5.

    Raises:
      ModelError: a field has a value that is not supported, or is missing.
    """
    family = raw.get("model_type")
    if family not in DEFAULTS:
        raise ModelError(f"model_type is {family!r}, supported are {sorted(DEFAULTS)}")
    got = DEFAULTS[family] | dict(raw)
    _refuse(family, got)
    embed, layers, heads = (_size(got, k) for k in ("hidden_size", "num_hidden_layers", "num_attention_heads"))
    theta, scaling = _rope(got)
    bias = bool(got.get("attention_bias", False))
    eos = got.get("eos_token_id")
    return Config(
        vocab=_size(got, "vocab_size"),
        embed=embed,
        layers=layers,
        heads=heads,
        kv_heads=heads if got.get("num_key_value_heads") is None else _size(got, "num_key_value_heads"),
        head=embed // heads if got.get("head_dim") is None else _size(got, "head_dim"),
        mlp=_size(got, "intermediate_size"),
        norm_eps=float(got["rms_norm_eps"]),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=family == "qwen3",
        attention_bias=bias or family == "qwen2",
        output_bias=bias and family != "qwen2",
        tied=bool(got["tie_word_embeddings"]),
        windows=_windows(got, layers),
        max_positions=_size(got, "max_position_embeddings"),
        dtype=_dtype(got),
        family=family,
        bos=got.get("bos_token_id"),
        eos=() if eos is None else tuple(eos) if isinstance(eos, list | tuple) else (int(eos),),
        pad=got.get("pad_token_id"),
    )


def config_to_hf(config: Config) -> dict[str, Any]:
    """The fields of this model's config.json, readable by transformers 4 and 5."""
    raw: dict[str, Any] = {
        "architectures": [ARCHITECTURES[config.family]],
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
    expected = config_from_hf(raw)  # what the family implies; the rest is written
    if config.rope_scaling is not None:
        raw["rope_scaling"] = _rope_to_hf(config.rope_scaling)
    if config.output_bias != expected.output_bias:
        raw["attention_bias"] = config.output_bias
    if config.windows is not None:
        raw |= _windows_to_hf(config)
    written = replace(config_from_hf(raw), generation=config.generation)  # which has a file of its own
    if written != config:
        lost = [k for k, v in vars(written).items() if v != getattr(config, k)]
        raise ModelError(
            f"a {config.family} config.json cannot hold {', '.join(f'{k}={getattr(config, k)}' for k in lost)}"
        )
    return raw


def _refuse(family: str, got: Mapping[str, Any]) -> None:
    supported = {
        "hidden_act": ("silu",),
        "mlp_bias": (False, None),
        "partial_rotary_factor": (1, 1.0, None),
        "pretraining_tp": (1, None),
        "quantization_config": (None,),
    }
    for name, values in supported.items():
        if got.get(name) not in values:
            raise ModelError(f"{name} is {got[name]!r}, supported is {values[0]!r}")
    if family == "qwen2" and got.get("attention_bias") is False:
        raise ModelError("attention_bias is False, qwen2 always has a bias on q, k and v")
    if family == "llama" and got.get("sliding_window") is not None:
        raise ModelError(f"sliding_window is {got['sliding_window']!r}, llama has none")


def _size(got: Mapping[str, Any], name: str) -> int:
    value = got.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"{name} is {value!r}, it must be a whole number of at least 1")
    return value


def _rope(got: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    # transformers 5 writes both into rope_parameters; 4 wrote rope_theta and rope_scaling.
    name = "rope_parameters" if got.get("rope_parameters") else "rope_scaling"
    rope = got.get(name) or {}
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise ModelError(f"{name} is given per layer type ({sorted(rope)}), supported is one for all layers")
    kind = rope.get("rope_type", rope.get("type", "default"))
    theta = float(rope.get("rope_theta", got["rope_theta"]))
    if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
        raise ModelError(f"{name}.partial_rotary_factor is {rope['partial_rotary_factor']!r}, supported is 1.0")
    if kind == "default":
        return theta, None
    if kind not in ("linear", "llama3"):
        raise ModelError(f"{name}.rope_type is {kind!r}, supported are 'default', 'linear' and 'llama3'")
    wanted = {"factor": "factor"}
    if kind == "llama3":
        wanted |= {"low": "low_freq_factor", "high": "high_freq_factor", "original": "original_max_position_embeddings"}
    missing = [field for field in wanted.values() if rope.get(field) is None]
    if missing:
        raise ModelError(f"{name}.{missing[0]} is missing; rope_type {kind!r} needs it")
    return theta, RopeScaling(kind, **{ours: rope[theirs] for ours, theirs in wanted.items()})


def _rope_to_hf(rope: RopeScaling) -> dict[str, Any]:
    raw: dict[str, Any] = {"rope_type": rope.kind, "factor": rope.factor}
    if rope.kind == "llama3":
        raw |= {"low_freq_factor": rope.low, "high_freq_factor": rope.high}
        raw |= {"original_max_position_embeddings": rope.original}
    return raw


def _windows(got: Mapping[str, Any], layers: int) -> tuple[int | None, ...] | None:
    window = got.get("sliding_window") if got.get("use_sliding_window") else None
    kinds = got.get("layer_types")
    if kinds is None:
        first = got.get("max_window_layers", layers)
        kinds = ["sliding_attention" if window is not None and i >= first else "full_attention" for i in range(layers)]
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ModelError(f"layer_types has {unknown[0]!r}, supported are 'full_attention' and 'sliding_attention'")
    if len(kinds) != layers:
        raise ModelError(f"layer_types has {len(kinds)} entries for num_hidden_layers {layers}")
    if "sliding_attention" not in kinds:
        return None
    if window is None:
        raise ModelError("layer_types has 'sliding_attention' but sliding_window is off")
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)


def _windows_to_hf(config: Config) -> dict[str, Any]:
    windows = config.windows or ()
    sizes = {w for w in windows if w is not None}
    if len(sizes) > 1:
        raise ModelError(f"windows has sizes {sorted(sizes)}, config.json can say only one")
    kinds = ["full_attention" if w is None else "sliding_attention" for w in windows]
    first = kinds.index("sliding_attention") if sizes else config.layers
    return {"use_sliding_window": True, "sliding_window": next(iter(sizes), None), "layer_types": kinds} | {
        "max_window_layers": first
    }


def _dtype(got: Mapping[str, Any]) -> str:
    dtype = str(got.get("dtype") or got.get("torch_dtype") or "float32").removeprefix("torch.")
    if dtype not in DTYPES:
        raise ModelError(f"dtype is {dtype!r}, supported are {list(DTYPES)}")
    return dtype
