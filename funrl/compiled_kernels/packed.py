"""Products and attention in a fixed order of sums: a token's bits depend on no other token and on no thread.

The C++ code is that of a decoding step (`decode_step`), so a pass made of these gives the step's bits.
"""

from __future__ import annotations

import ctypes
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.kernel_library import KernelError, library

FIXED_PARTS = 8  # of the terms of a sum that ranks may share
KERNEL_DTYPES = "float32, bfloat16 and float64"
_LARGE = 1 << 22  # bytes of a packed weight that wants huge pages
LANES = 16  # dims that a sum runs over, and head sizes, are padded to it
BITS = {torch.float32: 32, torch.bfloat16: 16, torch.float64: 64}


class PackedLinear(NamedTuple):
    """A weight [N, K] in panels, as `packed_linear` reads it; made by `pack_linear`.

    Attributes:
      panels: flat, in the dtype of the weight.
      outputs, inputs: N, K.
      parts: of the terms of a sum.
    """

    panels: Tensor
    outputs: int
    inputs: int
    parts: int = 1


def parts_of(size: int) -> int:
    """Number of equal parts that a sum over `size` terms is taken in where ranks may share it: a power of two."""
    parts = FIXED_PARTS
    while size % parts:  # math.gcd could not be traced
        parts //= 2
    return parts


def pack_linear(w_NK: Tensor, parts: int = 1) -> PackedLinear:
    """Copy a weight into panels.

    Args:
      w_NK: float32, bfloat16 or float64 on the CPU.
      parts: a power of two, at most 8, that divides K.

    Raises:
      KernelError: another dtype or device, or no kernel can be had (see `library`).
    """
    N, K = w_NK.shape
    count = panel_numbers(N, K, parts, w_NK.dtype)
    # Huge pages need large pieces; a small one is made faster by torch.
    large = count * w_NK.element_size() >= _LARGE
    packed = PackedLinear(zeroed(count, w_NK.dtype) if large else w_NK.new_empty(count), N, K, parts)
    fill_panels(w_NK, packed.panels, parts)
    return packed


def fill_panels(w_NK: Tensor, panels: Tensor, parts: int = 1) -> None:
    """`pack_linear` into `panel_numbers(...)` numbers of memory that is there."""
    bits = kernel_bits("the weight", w_NK)
    w_NK = w_NK.detach().contiguous()
    N, K = w_NK.shape
    library().funrl_pack(bits, w_NK.data_ptr(), N, K // parts, parts, panels.data_ptr())


def pack_groups(w_ENK: Tensor, parts: int = 1) -> PackedLinear:
    """Copy a matrix of each of E groups into panels, one after the other; as `pack_linear`."""
    bits = kernel_bits("the weight", w_ENK)
    E, N, K = w_ENK.shape
    count = E * panel_numbers(N, K, parts, w_ENK.dtype)
    large = count * w_ENK.element_size() >= _LARGE
    panels = zeroed(count, w_ENK.dtype) if large else w_ENK.new_empty(count)
    w_ENK = w_ENK.detach().contiguous()
    library().funrl_pack_groups(bits, w_ENK.data_ptr(), E, N, K // parts, parts, panels.data_ptr())
    return PackedLinear(panels, N, K, parts)


def unpack_panels(panels: Tensor, outputs: int, inputs: int, parts: int = 1) -> Tensor:
    """The weight [N, K] that was packed, a copy."""
    pair = _pair(panels.dtype)
    padded = parts * _padded_part(inputs, parts, panels.dtype)
    w_NK = panels.view(-1, padded // pair, panel_width(), pair).transpose(1, 2).flatten(0, 1).flatten(1)
    return w_NK.unflatten(1, (parts, -1))[:outputs, :, : inputs // parts].flatten(1)


def panel_numbers(N: int, K: int, parts: int, dtype: torch.dtype) -> int:
    """Numbers that a weight [N, K] has in panels, the padding included."""
    return round_up(N, panel_width()) * parts * _padded_part(K, parts, dtype)


def _padded_part(K: int, parts: int, dtype: torch.dtype) -> int:
    """Terms of a part: whole vectors where there is one, else what a product takes."""
    return round_up(K // parts, LANES if parts == 1 else _pair(dtype))


def _pair(dtype: torch.dtype) -> int:
    """Neighbouring inputs whose weights stand together."""
    return 2 if dtype.itemsize == 2 else 1


def packed_linear(
    x_MK: Tensor,
    packed: PackedLinear,
    threads: int | None = None,
    bias_N: Tensor | None = None,
    wide: bool = True,
) -> Tensor:
    """x w^T + bias, where a row of the result depends on no other row of x.

    The terms of a sum stand in `packed.parts` equal parts. In a part they are added in chunks of 64 (128 in bfloat16,
    32 in float64), each from zero, and then chunk after chunk; in bfloat16 on a processor with AMX from the first to
    the last, 32 at a time. Parts are added by a binary tree.

    Args:
      x_MK: in the dtype of the packed weight.
      packed: made by `pack_linear`.
      threads: None: as many as torch has.
      bias_N: in the dtype of x; added before the result is rounded, and not with `wide`.
      wide: return the sums as they are; else rounded to the dtype of x.

    Returns: [M, N] float32, or float64 of float64; without `wide` in the dtype of x.

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
    x_MK = x_MK.contiguous()
    bias_N = None if bias_N is None else bias_N.detach().contiguous()
    y_MN = x_MK.new_empty(M, packed.outputs, dtype=real_of(x_MK.dtype) if wide else None)
    pointers = (None if x is None else x.data_ptr() for x in (x_MK, packed.panels, bias_N, y_MN))
    terms = (packed.inputs // packed.parts, packed.parts)
    sizes = (wide, M, packed.outputs, *terms)
    library().funrl_linear(bits, *pointers, *sizes, threads or torch.get_num_threads())
    return y_MN


class AttentionOptions(NamedTuple):
    """Options of an attention.

    Attributes:
      window: tokens that a token sees at most, itself included; 0: all of its sequence before it.
      scale: factor of q k^T; 0: 1 / sqrt(N).
      cap: logits x become cap tanh(x / cap); 0: they stay.
    """

    window: int = 0
    scale: float = 0.0
    cap: float = 0.0


class PagedKeys(NamedTuple):
    """Keys and values in pages, and the pages of sequences.

    Attributes:
      keys, values: [P, page, K, N] each.
      table_SP: int64.
      ends_S: int64, tokens of each sequence; its queries are those of the last ones.
    """

    keys: Tensor
    values: Tensor
    table_SP: Tensor
    ends_S: Tensor


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
      q_THN, k_TKN, v_TKN: float32, bfloat16 or float64 on the CPU; K divides H.
      offsets: [S + 1] ascending from 0 to T: sequence s is the tokens offsets[s] to offsets[s + 1].
      window: tokens that a token sees at most, itself included; None: all of its sequence before it.
      threads: None: as many as torch has.

    Returns: [T, H, N] in the dtype of q.

    Raises:
      KernelError: another dtype or device.
      ValueError: shapes or offsets do not fit.
    """
    T, H, N = q_THN.shape
    K = k_TKN.shape[1]
    if k_TKN.shape != (T, K, N) or v_TKN.shape != k_TKN.shape or H % K or not q_THN.dtype == k_TKN.dtype == v_TKN.dtype:
        shapes = [tuple(x.shape) for x in (q_THN, k_TKN, v_TKN)]
        raise ValueError(f"q {shapes[0]}, k {shapes[1]} and v {shapes[2]} do not fit or differ in dtype")
    if offsets[0] != 0 or offsets[-1] != T or (offsets.diff() < 0).any():
        raise ValueError(f"offsets {offsets.tolist()} do not ascend from 0 to the {T} tokens")
    return sequence_attention(q_THN, k_TKN, v_TKN, offsets, AttentionOptions(window or 0), threads)[0]


def sequence_attention(
    q_THN: Tensor,
    k_TKN: Tensor,
    v_TKN: Tensor,
    offsets: Tensor,
    options: AttentionOptions,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`packed_attention` that trusts its arguments; after the last offset there may be padding.

    Returns: [T, H, N], 0 at padding; the logarithm of the normaliser of each query, [H, T] float32 or wider.
    """
    q, k, v = (x.detach().contiguous() for x in (q_THN, k_TKN, v_TKN))
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=real_of(q.dtype))
    _attention((q, k, v), (out, lse), offsets, options, None, threads)
    return out, lse


def page_attention(
    q_THN: Tensor, paged: PagedKeys, offsets: Tensor, options: AttentionOptions
) -> tuple[Tensor, Tensor]:
    """The same of queries of the last tokens of sequences whose keys and values are in pages.

    Args:
      q_THN: [T, H, N].
      paged: keys and values, those of the queries' tokens included.
      offsets: [S + 1] ascending from 0 to T, of the queries.

    Returns: as `sequence_attention`.
    """
    q, k, v = (x.detach().contiguous() for x in (q_THN, paged.keys, paged.values))
    out = torch.zeros_like(q)
    lse = q.new_zeros(q.shape[1], q.shape[0], dtype=real_of(q.dtype))
    _attention((q, k, v), (out, lse), offsets, options, paged, None)
    return out, lse


def _attention(
    inputs: tuple[Tensor, Tensor, Tensor],
    outputs: tuple[Tensor, Tensor],
    offsets: Tensor,
    options: AttentionOptions,
    paged: PagedKeys | None,
    threads: int | None,
) -> None:
    q = inputs[0]
    bits = kernel_bits("q", q)
    T, H, N = q.shape
    offsets = offsets.to(torch.int64).contiguous()
    table = ends = None
    width = page = 0
    if paged is not None:
        table = paged.table_SP.to(torch.int64).contiguous()
        ends = paged.ends_S.to(torch.int64).contiguous()
        width = table.shape[1]
        page = paged.keys.shape[1]
    each = (T, len(offsets) - 1, H, inputs[1].shape[-2], N, options.window, width, page)
    sizes = (ctypes.c_int64 * 8)(*each)
    pointers = (None if x is None else x.data_ptr() for x in (*inputs, *outputs))
    places = (None if x is None else x.data_ptr() for x in (offsets, ends, table))
    numbers = (options.scale, options.cap, threads or torch.get_num_threads())
    library().funrl_attention(bits, *pointers, sizes, *places, *numbers)


def real_of(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which the kernels compute with numbers of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def kernel_bits(name: str, x: Tensor) -> int:
    """Bits of a number of x.

    Raises:
      KernelError: the kernels do not take its dtype or device.
    """
    if x.dtype not in BITS or x.device.type != "cpu":
        raise KernelError(f"{name} is {x.dtype} on {x.device}, the C++ kernels take {KERNEL_DTYPES} on the CPU")
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
