"""A layer under torch.compile. Only `compile_layer` imports this, where it is needed: dynamo takes two seconds."""

from __future__ import annotations

import functools
import logging
import time
import warnings
from collections.abc import Callable

import torch
import torch._dynamo
from torch._dynamo.decorators import mark_unbacked
from torch._inductor.compile_fx import compile_fx

from funrl.compiled_kernels.attention import flash_attention
from funrl.compiled_kernels.delta_rule.gated_delta import delta_kernels_run
from funrl.compiled_kernels.exact.dispatch import aligned_on, has_kernels
from funrl.models.compiling.direct_calls import DirectCalls, layer_call
from funrl.models.model import Layer

VARIANTS = 64  # compiled versions of the layer that may be kept
# It cannot follow an import that fails, nor a compiler of C++.
for constant in (flash_attention, delta_kernels_run, has_kernels):
    torch._dynamo.assume_constant_result(constant)
logging.getLogger("torch._higher_order_ops.wrap").addFilter(  # each rank would warn of in-place operators: none is here
    lambda record: "context_fn is passed to torch.utils.checkpoint" not in record.getMessage()
)
warnings.filterwarnings("ignore", message=r"\s*Online softmax is disabled")  # a choice of the compiler, once a graph


def compiled_layer(plain: Layer, note: Callable[[str], None], backend: str | Callable, device: str) -> Layer:
    """The layer, compiled by `backend`; `note` receives what was compiled and how long it took.

    On a CPU, and with --numerics=aligned, 16-bit numbers are rounded where the plain layer rounds them, so that the
    results have its bits.
    """
    # Training, scoring, prefill and decode, each with and without a mask and for one row or many: more than dynamo's 8.
    torch._dynamo.config.recompile_limit = max(VARIANTS, torch._dynamo.config.recompile_limit)
    patches = {"emulate_precision_casts": True} if device == "cpu" or aligned_on(device) else {}
    inductor = functools.partial(compile_fx, config_patches=patches)
    calls = DirectCalls(inductor if backend == "inductor" else torch._dynamo.lookup_backend(backend))
    compiled = torch.compile(plain, fullgraph=True, backend=calls.compile_graph)

    def layer(config, mesh, params, x_BTD, context):
        call = layer_call(config, mesh, params, x_BTD, context)
        route = calls.find(call)
        if route is not None:
            return route.run(call.tensors)
        before = _graphs()
        start = time.perf_counter()
        _mark_dynamic(x_BTD, context)
        out = calls.trace(call, lambda: compiled(config, mesh, params, x_BTD, context))
        if _graphs() > before:
            kind = "decode" if context.kv_cache is not None else "train" if torch.is_grad_enabled() else "score"
            shape = "x".join(str(n) for n in x_BTD.shape)
            took = time.perf_counter() - start
            note(f"compiled one of {config.layers} layers to {kind} {shape} in {took:.1f} s")
        return out

    return layer


def _mark_dynamic(x_BTD, context) -> None:
    """Mark rows, tokens, sequences and pages as dynamic; a size of 1 is a case of its own."""
    rotations = [(x, x.dim() - 2) for x in context.rope or () if x is not None]
    others = (context.attention_mask_BTS, 3), (context.offsets, 1), (context.segments_BT, 2), (context.routes_BTK, 2)
    others = *others, (context.mutual_RM, 1)
    for x, dims in [(x_BTD, 2), *rotations, *others]:
        if x is not None:
            torch._dynamo.maybe_mark_dynamic(x, [dim for dim in range(dims) if x.shape[dim] > 1])
    if context.paging is not None:
        for x in (*context.paging, *context.kv_cache):
            mark_unbacked(x, 0)
        mark_unbacked(context.paging.table_SP, 1)


def _graphs() -> int:
    """Number of graphs that have been compiled in this process."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]
