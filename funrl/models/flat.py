"""The flat form of a model's config: one name for each field, as saved files have it and as callers type it.

A config is a tree of records by subject: `heads` of the flat form is `attention.heads` of the tree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, is_dataclass, replace
from typing import Any, TypeVar

from funrl.models.model import ModelConfig

C = TypeVar("C", bound=ModelConfig)

# flat name -> the record of the tree and the field of it
TREE_PATHS: Mapping[str, tuple[str, str]] = {
    "dtype": ("source", "dtype"),
    "family": ("source", "family"),
    "generation": ("source", "generation"),
    "bos": ("special_tokens", "bos"),
    "eos": ("special_tokens", "eos"),
    "pad": ("special_tokens", "pad"),
    "heads": ("attention", "heads"),
    "kv_heads": ("attention", "kv_heads"),
    "head": ("attention", "head"),
    "attention_bias": ("attention", "bias"),
    "output_bias": ("attention", "output_bias"),
    "attention_scale": ("attention", "scale"),
    "attention_cap": ("attention", "cap"),
    "windows": ("attention", "windows"),
    "latent": ("attention", "latent"),
    "output_gate": ("attention", "gated"),
    "attention_sinks": ("attention", "sinks"),
    "mixers": ("attention", "mixers"),
    "lenders": ("attention", "lenders"),
    "rope_theta": ("rope", "theta"),
    "rope_scaling": ("rope", "scaling"),
    "local_rope_theta": ("rope", "local_theta"),
    "rotates": ("rope", "rotates"),
    "rotary_part": ("rope", "part"),
    "rotary_pairs": ("rope", "interleaved"),
    "query_growth": ("rope", "query_growth"),
    "rope_axes": ("rope", "axes"),
    "norm_eps": ("norm", "eps"),
    "norm_offset": ("norm", "offset"),
    "norms": ("norm", "places"),
    "mlp": ("mlp", "inner"),
    "activation": ("mlp", "activation"),
    "mlp_bias": ("mlp", "bias"),
    "experts": ("mlp", "experts"),
    "mlps": ("mlp", "mlps"),
    "embed_scale": ("scales", "embed"),
    "residual_scale": ("scales", "residual"),
    "logit_divisor": ("scales", "logit_divisor"),
    "logit_cap": ("scales", "logit_cap"),
    "layer_scales": ("scales", "layers"),
}
_RECORDS = {record for record, _ in TREE_PATHS.values()}


def flat_fields(config: ModelConfig) -> dict[str, Any]:
    """All fields of a config by their flat names; values are as the config has them."""
    records = {name: vars(value) for name, value in vars(config).items() if name in _RECORDS and is_dataclass(value)}
    return _flat(vars(config) | records)


def saved_fields(config: ModelConfig) -> dict[str, Any]:
    """The same as it is written to files: records among the values are dicts."""
    return _flat(asdict(config))


def with_fields(config: C, **fields: object) -> C:
    """The config with other values of some fields, by their flat names.

    Raises:
      TypeError: a name is unknown.
    """
    own, records = by_record(fields, flat_fields(config))
    changed = {name: replace(getattr(config, name), **values) for name, values in records.items()}
    return replace(config, **own, **changed)


def by_record(
    fields: Mapping[str, object], known: Mapping[str, object] | None = None
) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Sort flat fields by the record that they belong to.

    Args:
      fields: flat names and values.
      known: flat fields that count where `fields` has none.

    Returns: fields of the config itself, and those of each of its records.
    """
    own: dict[str, Any] = {}
    records: dict[str, dict[str, Any]] = {}
    for name, value in fields.items():
        if name in TREE_PATHS:
            record, field = TREE_PATHS[name]
            records.setdefault(record, {})[field] = value
        elif name not in ("qk_norm", "qk_norm_over"):
            own[name] = value
    if "qk_norm" in fields or "qk_norm_over" in fields:
        both = {**(known or {}), **fields}
        over = both.get("qk_norm_over", "head") if both.get("qk_norm") else None
        records.setdefault("attention", {})["qk_norm"] = over
    return own, records


def _flat(tree: Mapping[str, object]) -> dict[str, Any]:
    """The flat form of a tree of mappings."""
    fields = {name: value for name, value in tree.items() if not (name in _RECORDS and isinstance(value, Mapping))}
    for name, (record, field) in TREE_PATHS.items():
        if isinstance(values := tree.get(record), Mapping):
            fields[name] = values[field]
    if isinstance(attention := tree.get("attention"), Mapping):
        fields["qk_norm"] = attention["qk_norm"] is not None
        fields["qk_norm_over"] = attention["qk_norm"] or "head"
    return fields
