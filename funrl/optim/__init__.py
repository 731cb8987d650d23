"""Optimizers: gradient transformations in the protocol of optax, and schedules."""

from funrl.optim.adam import AdamState, adamw, scale_by_adam
from funrl.optim.base import Transformation, apply_updates, apply_updates_, chain
from funrl.optim.clip import clip_by_global_norm, global_norm
from funrl.optim.fused import fused_adamw
from funrl.optim.muon import muon
from funrl.optim.orthogonal import MatrixView, matrix_view, newton_schulz, orthogonalize
from funrl.optim.partition import masked, partition
from funrl.optim.scale import (
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
from funrl.optim.sgd import sgd
from funrl.optim.skip import SkipState, skip_nonfinite
from funrl.optim.state_layouts import layouts_of

__all__ = [
    "AdamState",
    "Mask",
    "MatrixView",
    "Schedule",
    "SkipState",
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
    "skip_nonfinite",
    "trace",
    "warmup_constant",
    "warmup_cosine",
    "warmup_linear",
]
