"""Arguments of the decoding step as ctypes fills them: fields and order as in decode_step.cpp and adapters.hpp."""

from __future__ import annotations

import ctypes


class StepLayer(ctypes.Structure):
    """Weights of a layer."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ["qkv", "output", "gate_up", "down"]),
        *((name, ctypes.c_void_p) for name in ["attn_norm", "mlp_norm", "q_norm", "k_norm", "qkv_bias", "output_bias"]),
        ("window", ctypes.c_int64),
    ]


class StepModel(ctypes.Structure):
    """Sizes and weights of a decoder."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ["layers", "embed", "heads", "kv_heads", "head", "mlp", "vocab"]),
        *((name, ctypes.c_int64) for name in ["output_parts", "down_parts"]),
        ("norm_eps", ctypes.c_double),
        *((name, ctypes.c_void_p) for name in ["embedding", "unembed", "norm", "rope"]),
        ("positions", ctypes.c_int64),
        ("layer", ctypes.c_void_p),
    ]


class StepCall(ctypes.Structure):
    """Tokens of a call, and where its results go."""

    _fields_ = [
        *((name, ctypes.c_int64) for name in ["tokens", "width", "drawn"]),
        *((name, ctypes.c_void_p) for name in ["token", "position", "sequence", "tables", "draw", "keys", "values"]),
        *((name, ctypes.c_int64) for name in ["pages", "threads"]),
        *((name, ctypes.c_void_p) for name in ["logits", "adapters", "adapter"]),
        ("adapter_count", ctypes.c_int64),
    ]


class LayerFactors(ctypes.Structure):
    """Factors of the weights of a layer, as `Factors` of adapters.hpp describes them."""

    _fields_ = [
        *((f"{name}_first", ctypes.c_void_p) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("q", "k", "v", "output", "gate", "up", "down")),
    ]


class StepAdapter(ctypes.Structure):
    """Factors of an adapter."""

    _fields_ = [("rank", ctypes.c_int64), ("scale", ctypes.c_double), ("layer", ctypes.c_void_p)]
