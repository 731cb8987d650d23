"""Variable-length attention on a GPU for 16-bit tensors, by flash-attn or by torch."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

log = logging.getLogger(__name__)
_aten = torch.ops.aten
FLASH_HEAD = 256  # numbers of a head at most
_FASTER = {9: "FA3", 10: "FA4"}  # by major compute capability, torch's name of its faster implementation
_PROBED = "cuda"  # device of the small call that tries a kernel
_TOLERANCE = 0.05  # of the small call's bfloat16 numbers, which are about 1
FLASH_4 = "pip install 'funrl[flash-attn-4]'"


class Kernel(NamedTuple):
    """Variable-length attention of one provider on a GPU, forward and backward; 16 bits, T tokens, S segments.

    Attributes:
      name: who provides it.
      forward: (q, k, v, offsets, longest, window, scale, cap, keys=None) -> out, lse [H, T], and what `backward` needs
        of the generator. With `keys`, the offsets of segments of keys, a query sees all keys of its segment.
      backward: (d_out, q, k, v, out, lse, offsets, longest, window, generator, scale, cap, keys=None) -> d_q, d_k, d_v.
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
def flash_kernel(capped: bool = False, head: int = 64) -> Kernel:
    """The kernel for 16-bit tensors on a GPU.

    FlashAttention-4 of the package flash-attn-4; else torch's where it calls FA3 or FA4; else flash-attn's; else
    torch's. The choice is logged once.

    Args:
      capped: whether logits are capped, which needs the kernel of flash-attn-4 or flash-attn.
      head: numbers of a head.
    """
    kernel = _flash_attn_4(head, capped)
    faster = None
    if kernel is None:
        faster = faster_attention()
        kernel = None if faster and not capped else _flash_attn()
    if kernel is None:
        by = "" if faster is None else f" with {faster}"
        kernel = Kernel(f"torch {torch.__version__}{by}", False, _torch_forward, _torch_backward)
    return _logged(kernel, capped)


@functools.cache
def _logged(kernel: Kernel, capped: bool) -> Kernel:
    """Log a kernel once, whatever the sizes of heads."""
    log.info("variable-length attention on the GPU is by %s%s", kernel.name, " where logits are capped" * capped)
    return kernel


def attention_by(dtype: torch.dtype) -> str:
    """Name of the attention over packed rows of a dtype on a GPU, for a log."""
    if dtype.itemsize > 2:
        return "float32 products over each row in turn, many times slower than a kernel for 16 bits"
    name = flash_kernel().name
    missing = _takes_flash_4() and name.startswith("torch") and "FA" not in name
    return f"{name}; FlashAttention-4 is faster on this GPU: {FLASH_4}" if missing else name


def _takes_flash_4() -> bool:
    """True on a GPU that FlashAttention-4 is for: Hopper and Blackwell of data centres."""
    if not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability()[0] in _FASTER


def _flash_attn_4(head: int, capped: bool = False) -> Kernel | None:
    """FlashAttention-4; None: it is not installed, not for this GPU, head and cap, or wrong in small calls."""
    if not _takes_flash_4() or head % 8:
        return None
    if torch.cuda.get_device_capability()[0] == 10 and (128 < head < FLASH_HEAD or (capped and head == FLASH_HEAD)):
        return None
    try:
        import flash_attn.cute.interface as interface  # type: ignore[import-not-found]
    except ImportError as problem:
        log.info("attention is not by flash-attn-4: %s", problem)
        return None
    forward = functools.partial(_flash_4_forward, interface)
    kernel = Kernel("flash-attn-4", True, forward, functools.partial(_flash_4_backward, interface))
    problems = (_problem(kernel, head, window, 2.0 if capped else 0.0) for window in (0, 16))
    if (problem := next(filter(None, problems), None)) is None:
        return kernel
    log.warning("flash-attn-4 does not compute attention here: %s", problem)
    return None


@torch.inference_mode(False)
@torch.enable_grad()
def _problem(kernel: Kernel, head: int, window: int, cap: float) -> str | None:
    """Reason why a kernel does not compute attention over two segments; None: it does.

    It may be called while a graph is traced, so modes such as that of fake tensors are left for the time.
    """
    with _disable_current_modes():
        return _difference(kernel, head, window, cap)


def _difference(kernel: Kernel, head: int, window: int, cap: float) -> str | None:
    generator = torch.Generator().manual_seed(0)
    q, k, v, d_out = (torch.randn(200, heads, head, generator=generator) for heads in (4, 2, 2, 4))
    inputs = [x.bfloat16().to(_PROBED) for x in (q, k, v, d_out)]
    *wide, d_wide = (x.float().requires_grad_() for x in inputs)
    offsets = torch.tensor([0, 60, 190], dtype=torch.int32, device=_PROBED)
    segments = (slice(60), slice(60, 190))
    expected = torch.cat([_by_matrix(*(x[part] for x in wide), window=window, cap=cap) for part in segments])
    gradients = torch.autograd.grad(expected, wide, d_wide[:190])
    scale = head**-0.5
    try:
        out, lse, seed = kernel.forward(*inputs[:3], offsets, 130, window, scale, cap)
        computed = kernel.backward(inputs[3], *inputs[:3], out, lse, offsets, 130, window, seed, scale, cap)
    except Exception as problem:  # a compiler's errors share no type
        return str(problem).partition("\n")[0]
    pairs = zip((out, *computed), (expected, *gradients), strict=True)
    error = torch.stack([(x[:190] - y[:190]).abs().max() for x, y in pairs]).max().item()
    return None if error < _TOLERANCE else f"its results differ by {error:.2g} from the reference's"


def _by_matrix(q_THN: Tensor, k_TKN: Tensor, v_TKN: Tensor, *, window: int, cap: float) -> Tensor:
    """Attention of one segment by a whole matrix of weights."""
    groups = q_THN.shape[1] // k_TKN.shape[1]
    keys, values = (x.repeat_interleave(groups, 1) for x in (k_TKN, v_TKN))
    logits_HTT = torch.einsum("thn,shn->hts", q_THN, keys) * q_THN.shape[-1] ** -0.5
    logits_HTT = cap * torch.tanh(logits_HTT / cap) if cap else logits_HTT
    seen_TT = torch.ones_like(logits_HTT[0], dtype=torch.bool).tril()
    seen_TT = seen_TT.triu(1 - window) if window else seen_TT
    return torch.einsum("hts,shn->thn", logits_HTT.masked_fill(~seen_TT, -torch.inf).softmax(-1), values)


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


def _window(window: int, keys: Tensor | None) -> dict[str, int]:
    """Window as flash kernels take it: tokens that a token sees before and after itself; -1 is all."""
    return {"window_size_left": window - 1 if window else -1, "window_size_right": 0 if keys is None else -1}


def _flash_4_options(
    offsets: Tensor, longest: int, window: int, scale: float, head: int, keys: Tensor | None
) -> dict[str, object]:
    """Options of flash-attn-4 for both directions. No bound on a side is None there: -1 beside 0 would be a window."""
    return {
        "cu_seqlens_q": offsets,
        "cu_seqlens_k": offsets if keys is None else keys,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "softmax_scale": scale or head**-0.5,
        "causal": not window and keys is None,
        "window_size_left": window - 1 if window else None,
        "window_size_right": 0 if window else None,
    }


def _flash_4_forward(interface, q, k, v, offsets, longest, window, scale=0.0, cap=0.0, keys=None):
    options = _flash_4_options(offsets, longest, window, scale, q.shape[-1], keys)
    out, lse, *_ = interface._flash_attn_fwd(q, k, v, softcap=cap, return_lse=True, **options)
    return out, lse, q.new_zeros(2, dtype=torch.uint64)


def _flash_4_backward(
    interface, d_out, q, k, v, out, lse, offsets, longest, window, generator, scale=0.0, cap=0.0, keys=None
):
    options = _flash_4_options(offsets, longest, window, scale, q.shape[-1], keys)
    return interface._flash_attn_bwd(q, k, v, out, d_out, lse, softcap=cap, **options)


def _torch_forward(q, k, v, offsets, longest, window, scale=0.0, cap=0.0, keys=None):
    out, lse, generator, _, _ = _aten._flash_attention_forward(
        q,
        k,
        v,
        offsets,
        offsets if keys is None else keys,
        longest,
        longest,
        0.0,
        not window and keys is None,
        False,
        scale=scale or None,
        **_window(window, keys),
    )
    return out, lse, generator


def _torch_backward(d_out, q, k, v, out, lse, offsets, longest, window, generator, scale=0.0, cap=0.0, keys=None):
    unused = q.new_empty(0)
    sizes = (offsets, offsets if keys is None else keys, longest, longest)
    return _aten._flash_attention_backward(
        d_out,
        q,
        k,
        v,
        out,
        lse,
        *sizes,
        0.0,
        not window and keys is None,
        generator,
        unused,
        scale=scale or None,
        **_window(window, keys),
    )


def _flash_forward(forward, q, k, v, offsets, longest, window, scale=0.0, cap=0.0, keys=None):
    out, lse, *_ = forward(
        q,
        k,
        v,
        offsets,
        offsets if keys is None else keys,
        longest,
        longest,
        dropout_p=0.0,
        softmax_scale=scale or q.shape[-1] ** -0.5,
        causal=not window and keys is None,
        softcap=cap,
        **_window(window, keys),
    )
    return out, lse, q.new_zeros(2, dtype=torch.uint64)


def _flash_backward(
    backward, d_out, q, k, v, out, lse, offsets, longest, window, generator, scale=0.0, cap=0.0, keys=None
):
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
        offsets if keys is None else keys,
        longest,
        longest,
        dropout_p=0.0,
        softmax_scale=scale or q.shape[-1] ** -0.5,
        causal=not window and keys is None,
        **_window(window, keys),
        softcap=cap,
        alibi_slopes=None,
        deterministic=False,
    )
    return d_q, d_k, d_v
