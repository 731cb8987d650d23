"""Compilation of one layer, which then serves every depth of the model."""

from __future__ import annotations

import logging
from collections.abc import Callable

from funrl.models.model import Layer, Model
from funrl.models.remat import rematerialized

log = logging.getLogger(__name__)


def compile_layer(
    model: Model,
    mode: str = "auto",
    device: str = "cpu",
    note: Callable[[str], None] = log.info,
    remat: str = "none",
    backend: str | Callable = "inductor",
) -> Layer:
    """The layer of a model, compiled, to pass as `layer`.

    Row counts and lengths are dynamic and weights are not, so that after the first training batch, the first prefill
    and the first decode step nothing is compiled again; a size of 1 is a case of its own.

    Args:
      model: the model; others of the same architecture can use the layer too.
      mode: "on", "off" (the plain layer) or "auto", which compiles on CUDA and ROCm; on CPU a cold compile costs more
        than a short run gains. Layers of transformers' own code are not compiled.
      device: type of the device, such as "cuda".
      note: receives what was compiled and how long it took.
      remat: what the backward pass computes again, as `rematerialized` has it; of a compiled layer it is part of what
        is compiled.
      backend: torch.compile's.
    """
    plain = rematerialized(model.layer, remat)
    if mode == "off" or model.abilities.code or (mode == "auto" and device != "cuda"):
        return plain
    from funrl.models.compiled_layer import compiled_layer

    return compiled_layer(plain, note, backend)
