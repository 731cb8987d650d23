"""The config.json of EXAONE 4: norms after attention and mlp, and rotary positions only in layers with a window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.family_fields import FULL, SLIDING, layer_types, write_layer_windows, write_window


def exaone4_kinds(got: Mapping[str, Any], layers: int) -> list[str]:
    """Kinds of layers where config.json has no layer_types.

    Raises:
      ModelError: sliding_window_pattern is text or 0.
    """
    pattern = got["sliding_window_pattern"]
    if got["sliding_window"] is None:
        return [FULL] * layers
    if not isinstance(pattern, int) or pattern < 1:
        least = "a whole number of at least 1"
        raise ModelError(f"sliding_window_pattern is {pattern!r}, supported without layer_types is {least}")
    return [SLIDING if (i + 1) % pattern else FULL for i in range(layers)]


def read_exaone4(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults.

    Beside a window, layers without one do not rotate, whether or not some layer has it.
    """
    fields = {"qk_norm": True, "norms": "post"}
    if got["sliding_window"] is None:
        return fields
    layers = got["num_hidden_layers"]
    kinds = got.get("layer_types") or exaone4_kinds(got, layers)
    rotates = tuple(kind == SLIDING for kind in kinds)
    return fields | {"rotates": None if all(rotates) else rotates}


def write_exaone4(config: Config) -> dict[str, Any]:
    """Fields of config.json that only this family has."""
    if config.attention.windows is None and config.rope.rotates is not None:
        return write_layer_windows(config)
    return write_window(config) | {"layer_types": layer_types(config)}
