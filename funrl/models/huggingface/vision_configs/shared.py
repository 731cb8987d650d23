"""Checks and constants of several vision-language families."""

from __future__ import annotations

from collections.abc import Mapping

from funrl.models.errors import ModelError
from funrl.models.huggingface.configs.hf_family import ConfigFields

HALF = (0.5, 0.5, 0.5)  # mean and standard deviation of pixels


def check_supported(vision: ConfigFields, supported: Mapping[str, object]) -> None:
    """Check fields of vision_config. Raises: ModelError, one has another value than the supported one."""
    for name, value in supported.items():
        if vision[name] != value:
            raise ModelError(f"vision_config.{name} is {vision[name]!r}, supported is {value!r}")
