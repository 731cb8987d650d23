"""Record of a family of models in transformers: what its config.json and its files have of its own."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.family_fields import FULL, SLIDING
from funrl.models.model import Model

LAYERS = "model.layers."  # how the names of a layer's tensors begin
UNEMBED = "lm_head.weight"
# Fields that a config.json must have.
GIVEN_SIZES = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")


@functools.cache
def class_defaults(model_type: str, part: str = "") -> Mapping[str, Any]:
    """Values that a config class of transformers has for fields that a config.json lacks.

    Args:
      model_type: of the class.
      part: "vision_config": the class of that part.

    Raises:
      ModelError: the installed transformers does not know the model_type.
    """
    import transformers  # takes seconds

    if model_type not in transformers.CONFIG_MAPPING:
        raise ModelError(f"transformers {transformers.__version__} has no model_type {model_type!r}; update it")
    cls = transformers.CONFIG_MAPPING[model_type]
    cls = cls.sub_configs[part] if part else cls
    values = {"rope_theta": getattr(cls, "default_theta", None)}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            values[field.name] = field.default
        elif field.default_factory is not dataclasses.MISSING:
            values[field.name] = field.default_factory()
    return values


# Fields by which a class of transformers derives the kinds of layers.
_KIND_FIELDS = (
    *("num_hidden_layers", "sliding_window", "use_sliding_window", "max_window_layers", "sliding_window_pattern"),
    *("full_attention_interval", "no_rope_layers", "no_rope_layer_interval"),
)


def kinds_of_layers(model_type: str, got: Mapping[str, Any]) -> list[str]:
    """The kind of each layer of a config.json without layer_types.

    Args:
      model_type: of the class.
      got: fields with their defaults.

    Raises:
      ModelError: the class of transformers refuses them.
    """
    import transformers

    fields = {name: got[name] for name in _KIND_FIELDS if name in got}
    if "layer_types" in class_defaults(model_type):
        try:
            return list(transformers.CONFIG_MAPPING[model_type](**fields).layer_types)
        except Exception as error:  # of its own checks
            raise ModelError(f"layer_types is missing, and transformers derives none from {fields}: {error}") from error
    windows = "sliding_window" in class_defaults(model_type) and got.get("use_sliding_window", True)
    return [SLIDING if windows and got.get("sliding_window") else FULL] * got["num_hidden_layers"]


def class_name(model_type: str, kind: str) -> str | None:
    """Name of a class of transformers; None: it has none for these models.

    Args:
      model_type: of the models.
      kind: "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION" or "TOKEN_CLASSIFICATION".
    """
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(model_type)
    return name if name is None or isinstance(name, str) else name[0]


def _nothing(_: object) -> dict[str, Any]:
    return {}


class VisionFamily(NamedTuple):
    """Parts that a family that sees pictures has beside its text model.

    Attributes:
      text: fields of config.json -> those of the text model, as config.json of such a model has them.
      tower: (fields of config.json, config of the text model) -> the config with its tower.
      nest: (fields of the text model, config) -> fields of config.json.
      name: name of a weight in the tree of the tower -> its name in files.
      make: config -> the model.
      prefix: how the names of the text model's tensors begin.
      unembed: name of its unembedding.
      other_prefixes: beginning of a name -> its other beginnings in some files.
      text_type: model_type of the text model; "": that of the family and "_text".
      modules: beginnings of names -> those of the modules of transformers, by which PEFT names adapters.
    """

    text: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    tower: Callable[[Mapping[str, Any], Config], Config]
    nest: Callable[[Mapping[str, Any], Config], dict[str, Any]]
    name: Callable[[str], str]
    make: Callable[[Any], Model]
    prefix: str = "model."
    unembed: str = UNEMBED
    other_prefixes: Mapping[str, Sequence[str]] = {}
    text_type: str = ""
    modules: Mapping[str, str] = {}


class HFFamily(NamedTuple):
    """A family of models in transformers.

    Attributes:
      defaults: values of fields that config.json lacks, where `class_defaults` has none or another one.
      supported: further values that a field may have; any other is refused.
      read: fields of config.json -> fields of `Config` that only some families have.
      write: the config -> fields of config.json for them.
      rope_types: ways of stretching rotary frequencies; (): `read` makes mixers that know theirs.
      mixers: further kinds that layers may have, which `read` makes mixers of.
      partial_rotary: the rotated part of a head is any.
      further_layers: how the names of tensors begin that predict tokens behind the next one, and are left out;
        `LAYERS`: those of layers behind the last.
      names: last parts of the names of weights here -> their names in a layer's file, where other families' differ.
      fused: tensor of a layer's file -> the tensors that it holds one behind the other.
      woven: tensor of a layer's file -> the tensors whose numbers along its last dim it holds in turn; matrices are
        transposed there.
      abreast: the same of matrices [E, N, K] whose transposes it holds side by side.
      stacked: the same of matrices that it holds one above the other, as they are.
      in_rows: last parts of the names of vectors that are matrices of one row in a layer's file.
      vision: what it has of its own where it sees pictures; None: it reads text only.
    """

    defaults: Mapping[str, Any] = {}
    supported: Mapping[str, Sequence[Any]] = {}
    read: Callable[[Mapping[str, Any]], dict[str, Any]] = _nothing
    write: Callable[[Config], dict[str, Any]] = _nothing
    rope_types: Sequence[str] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    mixers: Sequence[str] = ()
    partial_rotary: bool = False
    further_layers: str = ""
    fused: Mapping[str, Sequence[str]] = {}
    names: Mapping[str, str] = {}
    in_rows: Collection[str] = ()
    woven: Mapping[str, Sequence[str]] = {}
    abreast: Mapping[str, Sequence[str]] = {}
    stacked: Mapping[str, Sequence[str]] = {}
    vision: VisionFamily | None = None
