"""Record of a family of models in transformers: what its config.json and its files have of its own."""

from __future__ import annotations

import contextlib
import copy
import re
import textwrap
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from funrl.models.decoder.config import Config
from funrl.models.errors import ModelError
from funrl.models.huggingface.fp8_files import FIELD
from funrl.models.model import MOST_LAYERS
from funrl.models.vision.config import TowerConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

ConfigFields: TypeAlias = Mapping[str, Any]  # of a config.json

LAYERS = "model.layers."  # how the names of a layer's tensors begin
UNEMBED = "lm_head.weight"
# Largest sizes that are taken for real: a larger one would take all memory before its mistake is found.
LARGEST_SIZES = {"num_hidden_layers": MOST_LAYERS, "vocab_size": 2**26}
LARGEST_OF_OTHERS = 2**24
_SIZE = re.compile(r"num_\w+|\w+_(size|dim|rank|experts|heads)")


def transformers_config(raw: ConfigFields) -> PretrainedConfig:
    """The config of transformers of a parsed config.json, with its defaults and checks of types.

    Raises:
      ModelError: the installed transformers does not know the model_type, or a field has a value that it refuses.
    """
    import transformers  # takes seconds

    family = raw.get("model_type")
    if not isinstance(family, str) or family not in transformers.CONFIG_MAPPING:
        raise ModelError(f"model_type is {family!r}, which transformers does not know either")
    given = {name: x for name, x in raw.items() if name not in ("model_type", FIELD)}
    _check_sizes(given)
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return _config_or_error(transformers.CONFIG_MAPPING[family], given)
    finally:
        transformers.logging.set_verbosity(verbosity)


def _config_or_error(cls: type[PretrainedConfig], given: ConfigFields) -> PretrainedConfig:
    """The config of some fields. Raises: ModelError, naming the field without which it would be one."""
    try:
        return cls(**copy.deepcopy(dict(given)))
    except Exception as error:  # of its own checks, in several lines
        reason = str(error).strip().splitlines()[-1].strip() if str(error) else type(error).__name__
        culprit = next((name for name in given if _is_accepted(cls, given, name)), None)
        what = "" if culprit is None else f"{culprit} is {textwrap.shorten(repr(given[culprit]), 80)}: "
        raise ModelError(what + textwrap.shorten(reason, 300)) from error


def _is_accepted(cls: type[PretrainedConfig], given: ConfigFields, without: str) -> bool:
    with contextlib.suppress(Exception):
        cls(**copy.deepcopy({name: x for name, x in given.items() if name != without}))
        return True
    return False


def _check_sizes(raw: ConfigFields) -> None:
    """Check that no size is too large. Raises: ModelError, one is."""
    for name, value in raw.items():
        if isinstance(value, Mapping):
            _check_sizes(value)
        elif type(value) is int and _SIZE.fullmatch(name) and value > LARGEST_SIZES.get(name, LARGEST_OF_OTHERS):
            most = LARGEST_SIZES.get(name, LARGEST_OF_OTHERS)
            raise ModelError(f"{name} is {value!s:.20}, it must be at most {most}")


def fields_with_defaults(raw: ConfigFields) -> dict[str, Any]:
    """The fields of a config.json, and those that it lacks with the defaults of transformers.

    Raises:
      ModelError: as `transformers_config`.
    """
    config = transformers_config(raw)
    fields = _with_aliases(config)
    return fields | {"text_config": _with_aliases(config.text_config)} if "text_config" in fields else fields


def fields_as_written(raw: ConfigFields) -> dict[str, Any]:
    """The fields of a config.json of `config_to_hf`, and the rotary ones where transformers has them.

    Raises:
      ModelError: a size is too large.
    """
    _check_sizes(raw)
    rope = {"rope_type": "default", "rope_theta": raw["rope_theta"], **raw.get("rope_scaling", {})}
    return {**raw, "rope_parameters": rope}


def _with_aliases(config: PretrainedConfig) -> dict[str, Any]:
    fields = config.to_dict()
    return fields | {alias: fields[name] for alias, name in config.attribute_map.items() if name in fields}


def class_name(model_type: str, kind: str) -> str | None:
    """Name of a class of transformers; None: it has none for these models.

    Args:
      model_type: of the models.
      kind: "CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "SEQUENCE_CLASSIFICATION" or "TOKEN_CLASSIFICATION".
    """
    from transformers.models.auto import modeling_auto

    name = getattr(modeling_auto, f"MODEL_FOR_{kind}_MAPPING_NAMES").get(model_type)
    return name if name is None or isinstance(name, str) else name[0]


def _nothing(_: object) -> ConfigFields:
    return {}


class VisionFamily(NamedTuple):
    """Parts that a family that sees pictures has beside its text model.

    Attributes:
      tower: (fields of config.json with all defaults, config of the text model) -> the tower.
      write: (the tower, the config) -> fields of config.json, of its vision_config, and of its text_config.
      name: name of a weight in the tree of the tower -> its name in files.
      prefix: how the names of the text model's tensors begin.
      unembed: name of its unembedding.
      other_prefixes: beginning of a name -> its other beginnings in some files.
      text_type: model_type of the text model.
      modules: beginnings of names -> those of the modules of transformers, by which PEFT names adapters.
    """

    tower: Callable[[ConfigFields, Config], TowerConfig]
    write: Callable[[TowerConfig, Config], tuple[ConfigFields, ConfigFields, ConfigFields]]
    name: Callable[[str], str]
    text_type: str
    prefix: str = "model."
    unembed: str = UNEMBED
    other_prefixes: Mapping[str, Sequence[str]] = {}
    modules: Mapping[str, str] = {}


class HFFamily(NamedTuple):
    """A family of models in transformers.

    Attributes:
      defaults: values of fields that config.json and the class of transformers lack.
      supported: further values that a field may have; any other is refused.
      windows: fields of config.json about windows and kinds of layers, which are read and written; others are refused.
      fields: fields of `Config` -> fields of config.json with the same values.
      values: fields of `Config` that all of its models have.
      experts: fields of `Experts` -> fields of config.json. Three are further ones: "sparse" are layers without
        experts, beside a period; "first_dense" counts such layers; "shared_experts" counts experts in the shared mlp.
      expert_values: fields of `Experts` that all of its models have.
      read: fields of config.json -> further fields of `Config`; "experts" are those of `Experts`.
      write: the config -> further fields of config.json.
      rope_types: ways of stretching rotary frequencies; (): `read` makes mixers that know theirs.
      local_rope: layers with a window have rotary positions of their own.
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
      causal_lm: name of its class in transformers, where config.json as it is written here is read without defaults of
        transformers, whose import takes a second; "": transformers is asked for both.
    """

    defaults: Mapping[str, Any] = {}
    supported: Mapping[str, Sequence[object]] = {}
    windows: Sequence[str] = ()
    fields: Mapping[str, str] = {}
    values: Mapping[str, Any] = {}
    experts: Mapping[str, str] = {}
    expert_values: Mapping[str, Any] = {}
    read: Callable[[ConfigFields], ConfigFields] = _nothing
    write: Callable[[Config], ConfigFields] = _nothing
    rope_types: Sequence[str] = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
    local_rope: bool = False
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
    causal_lm: str = ""
