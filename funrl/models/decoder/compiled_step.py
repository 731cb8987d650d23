"""Common sizes of a decoder and the compiled decoding step.

Sizes for that step, or the reason why it does not compute a decoder; and whether decoding has the bits of training.
"""

from __future__ import annotations

from typing import Any

from funrl.compiled_kernels.decode_step import StepSizes
from funrl.models.decoder.attention import Attention
from funrl.models.decoder.config import Config
from funrl.models.decoder.dense import Dense
from funrl.models.decoder.gemma4 import DenseBesideExperts
from funrl.models.flat import flat_fields

# Switches of a decoder that the compiled step does not know, as it has them.
AS_COMPILED: dict[str, Any] = {
    "norms": "pre",
    "norm_offset": 0.0,
    "activation": "silu",
    "local_rope_theta": None,
    "rotates": None,
    "qk_norm_over": "head",
    "attention_scale": None,
    "attention_cap": None,
    "attention_sinks": False,
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_divisor": 1.0,
    "logit_cap": None,
    "experts": None,
    "latent": None,
    "output_gate": False,
    "rotary_part": None,
    "rotary_pairs": False,
    "query_growth": 0.0,
    "rope_axes": (),
    "mlp_bias": False,
    "mixers": (),
    "lenders": (),
    "mlps": (),
    "layer_vectors": None,
    "layer_scales": False,
}

# Switches that the GPU's kernels of a fixed order do not know; whatever else differs from layer to layer, they take.
_UNALIGNED = (
    "qk_norm_over",
    "attention_sinks",
    "residual_scale",
    "experts",
    "latent",
    "output_gate",
    "query_growth",
    "mixers",
    "lenders",
    "mlps",
    "layer_vectors",
    "layer_scales",
)
_ALIGNED_HEAD = 256  # numbers of a head at most
_ALIGNED_GROUP = 64  # query heads that share keys at most


def step_sizes(config: Config) -> StepSizes | str:
    """The sizes that `decode_step.packed_decoder` takes, or the reason why it does not take this decoder."""
    fields = flat_fields(config)
    for name, value in AS_COMPILED.items():
        if fields[name] != value:
            return f"the C++ decoding step does not take {name}={fields[name]}"
    return StepSizes(
        vocab=config.vocab,
        embed=config.embed,
        heads=config.attention.heads,
        kv_heads=config.attention.kv_heads,
        head=config.attention.head,
        mlp=config.mlp.inner,
        norm_eps=config.norm.eps,
        rope_theta=config.rope.theta,
        rope_scaling=config.rope.scaling,
        windows=tuple(config.attention.window(i) for i in range(config.layers)),
    )


def aligned_problem(config: Config) -> str | None:
    """The reason why kernels of a fixed order on a GPU do not compute this decoder; None: they do."""
    fields = flat_fields(config)
    for name in _UNALIGNED:
        if fields[name] != AS_COMPILED[name]:
            return f"kernels of a fixed order do not take {name}={fields[name]}"
    head = config.attention.head
    if head > _ALIGNED_HEAD:
        return f"kernels of a fixed order take heads of {_ALIGNED_HEAD}, not of {head}"
    group = config.attention.heads // config.attention.kv_heads
    if group > _ALIGNED_GROUP:
        return f"kernels of a fixed order take {_ALIGNED_GROUP} query heads that share keys, not {group}"
    return None


def exact_sums(config: Config) -> tuple[int, ...] | str:
    """The sizes of `Abilities.exact_sums`, or the reason why decoding has other bits than training."""
    attention = config.attention
    if attention.mixers:
        return _sums_of_mixers(config)
    normed = (attention.kv_heads * attention.head,) if attention.qk_norm == "projection" else ()
    head = attention.head if attention.latent is None else attention.latent.value
    return (attention.heads * head, *normed, *_mlp_sums(config), config.vocab)


def _sums_of_mixers(config: Config) -> tuple[int, ...] | str:
    """`exact_sums` of a decoder whose mixers are given."""
    mixers = [config.mixer(i) for i in range(config.layers)]
    heads = {mixer.heads * mixer.head for mixer in mixers if isinstance(mixer, Attention)}
    if not all(isinstance(mixer, Attention) for mixer in mixers):
        return "it has mixers other than attention"
    experts = config.mlp.experts
    of_experts = set() if experts is None else {experts.mlp}
    mlps = [config.mlp.layer(i) for i in range(config.layers)]
    dense = [mlp.dense if isinstance(mlp, DenseBesideExperts) else mlp for mlp in mlps]
    inner = {mlp.inner for mlp in dense if isinstance(mlp, Dense)}
    return (*sorted(heads), *sorted(inner | of_experts), config.vocab)


def _mlp_sums(config: Config) -> tuple[int, ...]:
    """Sizes of the sums of the mlps."""
    experts = config.mlp.experts
    if experts is None:
        return (config.mlp.inner,)
    every_layer = not any(i < config.layers for i in experts.dense)
    shared = (experts.shared,) if experts.shared else ()
    return (experts.mlp, *shared) if every_layer else (experts.mlp, *shared, config.mlp.inner)
