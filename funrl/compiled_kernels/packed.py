"""Products and attention in a fixed order of sums: a token's bits depend on no other token and on no thread.

The C++ code is that of a decoding step (`decode_step`), so a pass made of these gives the step's bits.
"""

from __future__ import annotations

import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.kernel_library import KernelError, library

LANES = 16  # dims that a sum runs over, and head sizes, are padded to it
BITS = {torch.float32: 32, torch.bfloat16: 16}


class PackedLinear(NamedTuple):
    """A weight [N, K] in panels, as `packed_linear` reads it; made by `pack_linear`."""

    panels: Tensor  # flat, in the dtype of the weight
    outputs: int
    inputs: int


def pack_linear(w_NK: Tensor) -> PackedLinear:
    """Copy a weight into panels.

    Args:
      w_NK: float32 or bfloat16 on the CPU.

    Raises:
      KernelError: another dtype or device, or no kernel can be had (see `library`).
    """
    N, K = w_NK.shape
    packed = PackedLinear(zeroed(panel_numbers(N, K), w_NK.dtype), N, K)
    fill_panels(w_NK, packed.panels)
    return packed


def fill_panels(w_NK: Tensor, panels: Tensor) -> None:
    """`pack_linear` into `panel_numbers(N, K)` numbers of memory that is there."""
    bits = kernel_bits("the weight", w_NK)
    w_NK = w_NK.detach().contiguous()
    N, K = w_NK.shape
    library().funrl_pack(bits, w_NK.data_ptr(), N, K, round_up(K, LANES), panels.data_ptr())


def unpack_panels(panels: Tensor, outputs: int, inputs: int) -> Tensor:
    """The weight [N, K] that was packed, a copy."""
    terms = 4 // panels.element_size()  # neighbouring inputs that stand together
    w_NK = panels.view(-1, round_up(inputs, LANES) // terms, panel_width(), terms).transpose(1, 2).flatten(0, 1)
    return w_NK.flatten(1)[:outputs, :inputs]


def panel_numbers(N: int, K: int) -> int:
    """Numbers that a weight [N, K] has in panels, the padding included."""
    return round_up(N, panel_width()) * round_up(K, LANES)


def packed_linear(x_MK: Tensor, packed: PackedLinear, threads: int | None = None) -> Tensor:
    """x w^T, where a row of the result depends on no other row of x.

    The terms of a sum are added in chunks of 64 (128 in bfloat16), each from zero, and then chunk after chunk; in
    bfloat16 on a processor with AMX from the first to the last, 32 at a time.

    Args:
      x_MK: in the dtype of the packed weight.
      packed: made by `pack_linear`.
      threads: None: as many as torch has.

    Returns: [M, N] float32, the sums as they are: where torch would round to bfloat16, the caller does.

    Raises:
      KernelError: another dtype or device.
      ValueError: x has not K columns.
    """
    bits = kernel_bits("x", x_MK)
    x_MK = x_MK.detach()
    if x_MK.shape[1] != packed.inputs or x_MK.dtype != packed.panels.dtype:
        raise ValueError(
            f"x is {x_MK.dtype} with {x_MK.shape[1]} columns, the packed weight {packed.panels.dtype} with "
            f"{packed.inputs} inputs"
        )
    M = x_MK.shape[0]
    K = round_up(packed.inputs, LANES)
    x_MK = torch.nn.functional.pad(x_MK, (0, K - packed.inputs)).contiguous()
    y_MN = torch.empty(M, packed.outputs)
    pointers = (x.data_ptr() for x in (x_MK, packed.panels, y_MN))
    library().funrl_linear(bits, *pointers, M, packed.outputs, K, threads or torch.get_num_threads())
    return y_MN


def packed_attention(
    q_THN: Tensor,
    k_TKN: Tensor,
    v_TKN: Tensor,
    offsets: Tensor,
    window: int | None = None,
    threads: int | None = None,
) -> Tensor:
    """Causal attention over sequences that stand end to end, with the bits of decoding over pages.

    Args:
      q_THN, k_TKN, v_TKN: float32 or bfloat16 on the CPU; K divides H.
      offsets: [S + 1] ascending from 0 to T: sequence s is the tokens offsets[s] to offsets[s + 1].
      window: tokens that a token sees at most, itself included; None: all of its sequence before it.
      threads: None: as many as torch has.

    Returns: [T, H, N] in the dtype of q.

    Raises:
      KernelError: another dtype or device.
      ValueError: shapes or offsets do not fit.
    """
    bits = kernel_bits("q", q_THN)
    T, H, N = q_THN.shape
    K = k_TKN.shape[1]
    q, k, v = (x.detach().contiguous() for x in (q_THN, k_TKN, v_TKN))
    if k.shape != (T, K, N) or v.shape != k.shape or H % K or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ValueError(f"q {tuple(q.shape)}, k {tuple(k.shape)} and v {tuple(v.shape)} do not fit or differ in dtype")
    offsets = offsets.to(torch.int64).contiguous()
    if offsets[0] != 0 or offsets[-1] != T or (offsets.diff() < 0).any():
        raise ValueError(f"offsets {offsets.tolist()} do not ascend from 0 to the {T} tokens")
    out = torch.empty_like(q)
    pointers = (x.data_ptr() for x in (q, k, v, offsets))
    sizes = (len(offsets) - 1, H, K, N, window or 0)
    library().funrl_attention(bits, *pointers, *sizes, out.data_ptr(), threads or torch.get_num_threads())
    return out


def kernel_bits(name: str, x: Tensor) -> int:
    """Bits of a number of x.

    Raises:
      KernelError: the kernels do not take its dtype or device.
    """
    if x.dtype not in BITS or x.device.type != "cpu":
        raise KernelError(f"{name} is {x.dtype} on {x.device}, the C++ kernels take float32 and bfloat16 on the CPU")
    return BITS[x.dtype]


def panel_width() -> int:
    """Outputs whose weights stand together, by the processor's vectors."""
    return library().funrl_panel()


def round_up(size: int, multiple: int) -> int:
    """The next multiple that is at least `size`."""
    return -(-size // multiple) * multiple


def zeroed(count: int, dtype: torch.dtype) -> Tensor:
    """A flat tensor of zeros that takes memory as it is written, in huge pages where the system has them."""
    memory = mmap.mmap(-1, max(count, 1) * dtype.itemsize, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype, count=count)
