"""The config.json of Ministral 3: Mistral whose queries grow with their positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from funrl.models.errors import ModelError

QUERY_GROWTH = "llama_4_scaling_beta"  # of the rotary fields


def read_ministral3(got: Mapping[str, Any]) -> dict[str, Any]:
    """Fields of `Config` of a config.json with all its defaults.

    Raises:
      ModelError: it does not say how queries grow.
    """
    rope = got.get("rope_parameters") or got.get("rope_scaling") or {}
    rate = rope.get(QUERY_GROWTH)
    if isinstance(rate, bool) or not isinstance(rate, int | float):
        raise ModelError(f"rope_parameters.{QUERY_GROWTH} is {rate!r}, it must be a number")
    return {"query_growth": float(rate)}
