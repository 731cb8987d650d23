"""Tensors of a directory that its model does not need, and remarks on what is not taken as the files have it."""

from __future__ import annotations

import re
from pathlib import Path

from funrl.models.config import Config
from funrl.models.fp8_files import FP8
from funrl.models.model import Model
from funrl.models.names import UNEMBED
from funrl.models.weight_files import weight_tables


def is_redundant(name: str, config: Config) -> bool:
    """True of tensors that some files have for nothing: rotary frequencies, masks, a second copy of tied embeddings,
    layers behind the last."""
    ends = (".rotary_emb.inv_freq", *((".attn.bias", ".attention.bias", ".masked_bias") if config.module else ()))
    if _further_layer(name, config) is not None:
        return True
    return name.endswith(ends) or (config.tied and name in (UNEMBED, "embed_out.weight"))


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
    if FP8 in dtypes.values():
        remarks.append("the files have weights in FP8; they are trained, and saved, as numbers of the run's dtype")
    return remarks


def _further_layer(name: str, config: Config) -> int | None:
    """The number of the layer of a tensor where that layer predicts tokens behind the next one."""
    found = re.match(r"model\.layers\.(\d+)\.", name) if config.latent is not None else None
    return int(found[1]) if found is not None and int(found[1]) >= config.layers else None
