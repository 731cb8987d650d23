"""The config.json of OLMo 3: OLMo 2 with windows in three of four layers, whose rotary positions are not stretched."""

from __future__ import annotations

from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.huggingface.family_fields import FULL, SLIDING, write_bias, write_layer_windows


def write_olmo3(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    sliding = {"rope_type": "default", "rope_theta": config.rope.local_theta or config.rope.theta}
    full = {"rope_type": "default", "rope_theta": config.rope.theta}
    return write_bias(config) | write_layer_windows(config) | {"rope_parameters": {FULL: full, SLIDING: sliding}}
