"""Optimizers: gradient transformations in the protocol of optax, and schedules."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from funrl.optim.adam import AdamState, scale_by_adam
    from funrl.optim.base import Transformation, apply_updates, apply_updates_, chain, step_
    from funrl.optim.clip import clip_by_global_norm, global_dot, global_norm
    from funrl.optim.fused import fused_adamw
    from funrl.optim.masking import masked, partition
    from funrl.optim.orthogonal import MatrixView, matrix_view, newton_schulz, orthogonalize
    from funrl.optim.recipes import adamw, muon, sgd
    from funrl.optim.scaling import (
        Mask,
        add_decayed_weights,
        matrices,
        scale,
        scale_by_learning_rate,
        scale_by_schedule,
        trace,
    )
    from funrl.optim.schedules import (
        Schedule,
        constant,
        cosine,
        join,
        linear,
        warmup_constant,
        warmup_cosine,
        warmup_linear,
    )
    from funrl.optim.state_layouts import layouts_of

_FILES = {
    "AdamState": "adam",
    "Mask": "scaling",
    "MatrixView": "orthogonal",
    "Schedule": "schedules",
    "Transformation": "base",
    "adamw": "recipes",
    "add_decayed_weights": "scaling",
    "apply_updates": "base",
    "apply_updates_": "base",
    "chain": "base",
    "clip_by_global_norm": "clip",
    "constant": "schedules",
    "cosine": "schedules",
    "fused_adamw": "fused",
    "global_dot": "clip",
    "global_norm": "clip",
    "join": "schedules",
    "layouts_of": "state_layouts",
    "linear": "schedules",
    "masked": "masking",
    "matrices": "scaling",
    "matrix_view": "orthogonal",
    "muon": "recipes",
    "newton_schulz": "orthogonal",
    "orthogonalize": "orthogonal",
    "partition": "masking",
    "scale": "scaling",
    "scale_by_adam": "adam",
    "scale_by_learning_rate": "scaling",
    "scale_by_schedule": "scaling",
    "sgd": "recipes",
    "step_": "base",
    "trace": "scaling",
    "warmup_constant": "schedules",
    "warmup_cosine": "schedules",
    "warmup_linear": "schedules",
}

__all__ = [
    "AdamState",
    "Mask",
    "MatrixView",
    "Schedule",
    "Transformation",
    "adamw",
    "add_decayed_weights",
    "apply_updates",
    "apply_updates_",
    "chain",
    "clip_by_global_norm",
    "constant",
    "cosine",
    "fused_adamw",
    "global_dot",
    "global_norm",
    "join",
    "layouts_of",
    "linear",
    "masked",
    "matrices",
    "matrix_view",
    "muon",
    "newton_schulz",
    "orthogonalize",
    "partition",
    "scale",
    "scale_by_adam",
    "scale_by_learning_rate",
    "scale_by_schedule",
    "sgd",
    "step_",
    "trace",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
]


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"funrl.optim has no {name!r}; it has {', '.join(__all__)}")
    return getattr(importlib.import_module(f"funrl.optim.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
