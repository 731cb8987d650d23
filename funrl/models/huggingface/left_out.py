"""Tensors of a directory that its model does not need, and remarks on what is not taken as the files have it."""

from __future__ import annotations

from pathlib import Path

from funrl.models.decoder.config import Config
from funrl.models.huggingface.config import ModuleConfig
from funrl.models.huggingface.configs.delta_nets import NESTED_PREFIX, TEXT_PARTS, TOWER_PREFIXES
from funrl.models.huggingface.configs.hf_family import LAYERS, UNEMBED
from funrl.models.huggingface.families import FAMILIES
from funrl.models.huggingface.fp8_files import FP8
from funrl.models.huggingface.mxfp4_files import MXFP4_BLOCKS
from funrl.models.huggingface.weight_files import weight_tables
from funrl.models.model import Model, ModelConfig

_UNEMBEDDINGS = (UNEMBED, f"language_model.{UNEMBED}", "embed_out.weight")
_OF_KEYS = ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
_PREFIXES = (LAYERS, f"{NESTED_PREFIX}layers.")


def is_redundant(name: str, config: ModelConfig) -> bool:
    """True of tensors that some files have for nothing.

    They are rotary frequencies, masks, a second copy of tied embeddings, layers after the last, the towers of a model
    of which only the text part is read, and what would make keys and values of a layer that attends to another's.
    """
    masks = (".attn.bias", ".attention.bias", ".masked_bias") if isinstance(config, ModuleConfig) else ()
    if _further_layer(name, config) is not None or _in_unread_tower(name, config) or _of_borrowed_keys(name, config):
        return True
    return name.endswith((".rotary_emb.inv_freq", *masks)) or (config.tied and name in _UNEMBEDDINGS)


def remarks_on_files(path: str | Path, model: Model) -> list[str]:
    """A line for each thing of a directory that is not read, or that is read as something else.

    Args:
      path: a directory that `check_directory` has passed.
      model: its model.
    """
    dtypes = {name: x["dtype"] for table in weight_tables(Path(path)).values() for name, x in table.items()}
    further = {_further_layer(name, model.config) for name in dtypes} - {None}
    remarks = []
    if further:
        layers, are = ("layer", "is") if len(further) == 1 else ("layers", "are")
        remarks.append(f"{len(further)} multi-token-prediction {layers} of the files {are} not trained")
    tower = sum(_in_unread_tower(name, model.config) for name in dtypes)
    if tower:
        remarks.append(
            f"the vision tower of the files, {tower} tensors, is not read: the model is trained, and saved, as a "
            f"{model.config.source.family}, and refuses pictures"
        )
    narrow = "FP8" if FP8 in dtypes.values() else "MXFP4" if any(name.endswith(MXFP4_BLOCKS) for name in dtypes) else ""
    if narrow:
        remarks.append(f"the files have weights in {narrow}, and the saved model has them as --save_dtype says")
    return remarks


def _in_unread_tower(name: str, config: ModelConfig) -> bool:
    return config.source.family in TEXT_PARTS.values() and name.startswith(TOWER_PREFIXES)


def _of_borrowed_keys(name: str, config: ModelConfig) -> bool:
    """True of a tensor that would make keys and values of a layer that attends to those of another."""
    lenders = config.attention.lenders if isinstance(config, Config) else ()
    layer, _, weight = name.rpartition(".self_attn.")
    return (
        weight.startswith(_OF_KEYS)
        and layer.startswith(_PREFIXES)
        and layer.rpartition(".")[2] in {str(i) for i, lender in enumerate(lenders) if lender is not None}
    )


def _further_layer(name: str, config: ModelConfig) -> str | None:
    """Beginning of a tensor's name where its layer predicts tokens behind the next one; None: it does not."""
    family = FAMILIES.get(config.source.family)
    prefix = "" if family is None else family.further_layers
    if not prefix or not name.startswith(prefix):
        return None
    if prefix != LAYERS:
        return prefix
    number = name.removeprefix(prefix).split(".")[0]
    return prefix + number if int(number) >= config.layers else None
