"""The config.json of EXAONE 4: norms after attention and mlp, and rotary positions only in layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.huggingface.family_fields import SLIDING, layer_types, write_layer_windows, write_window


def read_exaone4(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults.

    Beside a window, layers without one do not rotate, whether or not some layer has it.
    """
    fields = {"qk_norm": True, "norms": "post"}
    if got["sliding_window"] is None:
        return fields
    rotates = tuple(kind == SLIDING for kind in got["layer_types"])
    return fields | {"rotates": None if all(rotates) else rotates}


def write_exaone4(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    if config.attention.windows is None and config.rope.rotates is not None:
        return write_layer_windows(config)
    return write_window(config) | {"layer_types": layer_types(config)}
