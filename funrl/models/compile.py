"""Compiles one layer, which then serves every depth of the model."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
import torch._dynamo

from funrl.compiled_kernels.attention import flash_attention
from funrl.models import decoder
from funrl.models.config import Config

VARIANTS = 64  # compiled versions of the layer that may be kept
log = logging.getLogger(__name__)
torch._dynamo.assume_constant_result(flash_attention)  # it cannot follow an import that fails


def compile_layer(
    config: Config,
    mode: str = "auto",
    device: str = "cpu",
    note: Callable[[str], None] = log.info,
    fullgraph: bool = True,
) -> Callable | None:
    """A replacement of `decoder.decoder_layer` to pass as `layer`; None is the plain one.

    Row counts and lengths are dynamic and weights are not, so that after the first training batch, the first prefill
    and the first decode step nothing is compiled again; a size of 1 is a case of its own. What was compiled and how
    long it took is logged.

    Args:
      config: the model.
      mode: "on", "off" or "auto", which compiles on CUDA and ROCm; on CPU a cold compile costs more than a short run
        gains.
      device: type of the device, such as "cuda".
      note: told what was compiled and how long it took.
      fullgraph: a part that cannot be compiled is an error.
    """
    if mode == "off" or (mode == "auto" and device != "cuda"):
        return None
    # Training, scoring, prefill and decode, each with and without a mask and for one row or many: more than dynamo's 8.
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    compiled = torch.compile(decoder.decoder_layer, fullgraph=fullgraph)

    def layer(*args):
        before, start = _graphs(), time.perf_counter()
        _mark_dynamic(*args[3:])
        out = compiled(*args)
        if _graphs() > before:
            kind = "decode" if args[6] is not None else "train" if torch.is_grad_enabled() else "score"
            shape = "x".join(str(n) for n in args[3].shape)
            took = time.perf_counter() - start
            note(f"compiled one of {config.layers} layers to {kind} {shape} in {took:.1f} s")
        return out

    return layer


def _mark_dynamic(x_BTD, turn, view, kept, slots_BT) -> None:
    """Rows, tokens and slots may vary; a size of 1 stays what it is."""
    rows_and_tokens = [(x, 2) for x in (x_BTD, slots_BT, *(kept or ()))]
    turns = [(x, x.dim() - 2) for x in turn]
    for x, dims in [*rows_and_tokens, *turns, (view.mask_BTS, 3)]:
        if x is not None:
            torch._dynamo.maybe_mark_dynamic(x, [dim for dim in range(dims) if x.shape[dim] > 1])


def _graphs() -> int:
    """How many graphs have been compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
