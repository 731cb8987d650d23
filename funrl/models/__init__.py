"""Models as records of pure functions, and models on devices."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funrl.models.compiling.compile import compile_layer
    from funrl.models.decoder.config import Config, decoder_config
    from funrl.models.decoder.decoder import decoder_model
    from funrl.models.errors import ModelError
    from funrl.models.flat import flat_fields, with_fields
    from funrl.models.huggingface.directories import load_model
    from funrl.models.model import Inputs, Model, ModelConfig, Output
    from funrl.models.placed import Placed, place
    from funrl.models.remat import rematerialized
    from funrl.models.value_head import with_value_head
    from funrl.models.vision.model import with_vision

_FILES = {
    "Config": "decoder.config",
    "Inputs": "model",
    "Model": "model",
    "ModelConfig": "model",
    "ModelError": "errors",
    "Output": "model",
    "Placed": "placed",
    "compile_layer": "compiling.compile",
    "decoder_config": "decoder.config",
    "decoder_model": "decoder.decoder",
    "flat_fields": "flat",
    "load_model": "huggingface.directories",
    "place": "placed",
    "rematerialized": "remat",
    "with_fields": "flat",
    "with_value_head": "value_head",
    "with_vision": "vision.model",
}

__all__ = [
    "Config",
    "Inputs",
    "Model",
    "ModelConfig",
    "ModelError",
    "Output",
    "Placed",
    "compile_layer",
    "decoder_config",
    "decoder_model",
    "flat_fields",
    "load_model",
    "place",
    "rematerialized",
    "with_fields",
    "with_value_head",
    "with_vision",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"funrl.models has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"funrl.models.{_FILES[name]}"), name)
