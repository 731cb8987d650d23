"""Sizes of a decoder for the compiled decoding step, or the reason why that step does not compute it."""

from __future__ import annotations

from typing import Any

from funrl.compiled_kernels.decode_step import StepSizes
from funrl.models.decoder.config import Config

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
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_divisor": 1.0,
    "logit_cap": None,
    "experts": None,
    "latent": None,
    "output_gate": False,
    "rotary_part": None,
    "mixers": (),
}


def step_sizes(config: Config) -> StepSizes | str:
    """The sizes that `decode_step.packed_decoder` takes, or the reason why it does not take this decoder."""
    for name, value in AS_COMPILED.items():
        if getattr(config, name) != value:
            return f"the C++ decoding step does not take {name}={getattr(config, name)}"
    return StepSizes(
        vocab=config.vocab,
        embed=config.embed,
        heads=config.heads,
        kv_heads=config.kv_heads,
        head=config.head,
        mlp=config.mlp,
        norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        windows=tuple(config.window(i) for i in range(config.layers)),
    )
