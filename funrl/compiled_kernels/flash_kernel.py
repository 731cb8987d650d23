"""Variable-length attention on a GPU for 16-bit tensors, by flash-attn or by torch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)
_aten = torch.ops.aten
FLASH_HEAD = 256  # numbers of a head at most
_FASTER = {9: "FA3", 10: "FA4"}  # by major compute capability, torch's name of its faster implementation


class Kernel(NamedTuple):
    """Variable-length attention of one provider on a GPU, forward and backward; 16 bits, T tokens, S segments.

    Attributes:
      name: who provides it.
      forward: (q, k, v, offsets, longest, window, scale, cap) -> out, lse [H, T], and what `backward` needs of the
        generator.
      backward: (d_out, q, k, v, out, lse, offsets, longest, window, generator, scale, cap) -> d_q, d_k, d_v.
      caps: whether it can cap logits.
    """

    name: str
    caps: bool
    forward: Callable[..., tuple[Tensor, Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@functools.cache
def faster_attention() -> str | None:
    """Register FA3 on Hopper and FA4 on Blackwell for torch's attention operators, where these are installed.

    Returns: the name of the implementation; None: the operators stay as they are.
    """
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return None
    name = _FASTER.get(torch.cuda.get_device_capability()[0])
    activate = getattr(torch.nn.attention, "activate_flash_attention_impl", None)
    if name is None or activate is None:
        return None
    try:
        activate(name)
    except (ImportError, RuntimeError, ValueError) as problem:
        log.info("torch's attention is not by %s: %s", name, problem)
        return None
    return name


@functools.cache
def flash_kernel(capped: bool = False) -> Kernel:
    """The kernel for 16-bit tensors on a GPU: torch's where it calls FA3 or FA4, else flash-attn's, else torch's.

    It is logged once.

    Args:
      capped: whether logits are capped, which flash-attn's kernel alone can do.
    """
    faster = faster_attention()
    kernel = None if faster and not capped else _flash_attn()
    if kernel is None:
        by = "" if faster is None else f" with {faster}"
        kernel = Kernel(f"torch {torch.__version__}{by}", False, _torch_forward, _torch_backward)
    log.info("variable-length attention on the GPU is by %s%s", kernel.name, " where logits are capped" * capped)
    return kernel


def attention_by(dtype: torch.dtype) -> str:
    """Name of the attention over packed rows of a dtype on a GPU, for a log."""
    if dtype.itemsize > 2:
        return "float32 products over each row in turn, many times slower than a kernel for 16 bits"
    return flash_kernel().name


def _flash_attn() -> Kernel | None:
    """flash-attn's kernel; None: it is not installed."""
    try:
        from flash_attn import flash_attn_interface as flash  # type: ignore[import-not-found]
    except ImportError:
        return None
    return Kernel(
        "flash-attn",
        True,
        functools.partial(_flash_forward, flash._flash_attn_varlen_forward),
        functools.partial(_flash_backward, flash._flash_attn_varlen_backward),
    )


def _window(window: int) -> dict[str, int]:
    """Window as flash kernels take it: tokens that a token sees before and after itself; -1 is all."""
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0}


def _torch_forward(q, k, v, offsets, longest, window, scale=0.0, cap=0.0):
    out, lse, generator, _, _ = _aten._flash_attention_forward(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        0.0,
        not window,
        False,
        scale=scale or None,
        **_window(window),
    )
    return out, lse, generator


def _torch_backward(d_out, q, k, v, out, lse, offsets, longest, window, generator, scale=0.0, cap=0.0):
    unused = q.new_empty(0)
    sizes = (offsets, offsets, longest, longest)
    return _aten._flash_attention_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse,
        *sizes,
        0.0,
        not window,
        generator,
        unused,
        scale=scale or None,
        **_window(window),
    )


def _flash_forward(forward, q, k, v, offsets, longest, window, scale=0.0, cap=0.0):
    out, lse, *_ = forward(
        q,
        k,
        v,
        offsets,
        offsets,
        longest,
        longest,
        dropout_p=0.0,
        softmax_scale=scale or q.shape[-1] ** -0.5,
        causal=not window,
        softcap=cap,
        **_window(window),
    )
    return out, lse, q.new_zeros(2, dtype=torch.uint64)


def _flash_backward(backward, d_out, q, k, v, out, lse, offsets, longest, window, generator, scale=0.0, cap=0.0):
    d_q, d_k, d_v = (torch.empty_like(x) for x in (q, k, v))
    backward(
        d_out,
        q,
        k,
        v,
        out,
        lse,
        d_q,
        d_k,
        d_v,
        offsets,
        offsets,
        longest,
        longest,
        dropout_p=0.0,
        softmax_scale=scale or q.shape[-1] ** -0.5,
        causal=not window,
        **_window(window),
        softcap=cap,
        alibi_slopes=None,
        deterministic=False,
    )
    return d_q, d_k, d_v
