"""The config.json of OLMo 3: OLMo 2 with windows in three of four layers, whose rotary positions are not stretched."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.huggingface.family_fields import FULL, SLIDING, write_bias, write_layer_windows


def olmo3_kinds(got: Mapping[str, Any], layers: int) -> list[str]:
    """Kinds of layers where config.json has no layer_types."""
    return [SLIDING if (i + 1) % 4 else FULL for i in range(layers)]


def write_olmo3(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    sliding = {"rope_type": "default", "rope_theta": config.rope.local_theta or config.rope.theta}
    full = {"rope_type": "default", "rope_theta": config.rope.theta}
    return write_bias(config) | write_layer_windows(config) | {"rope_parameters": {FULL: full, SLIDING: sliding}}
