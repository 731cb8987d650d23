"""Products and attention in a fixed order of sums: a token's bits depend on no other token and on no thread.

The C++ code is that of a decoding step (`decode_step`), so a pass made of these gives the step's bits.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import FIXED_PARTS, check_parts, check_tensor, kernel_bits, real_of
from funrl.compiled_kernels.exact.aligned import aligned_kernels
from funrl.compiled_kernels.exact.dispatch import is_aligned
from funrl.compiled_kernels.kernel_library import library

_LARGE = 1 << 22  # bytes of a packed weight that wants huge pages
LANES = 16  # dims that a sum runs over, and head sizes, are padded to it


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
      ValueError: another number of dims, or other parts.
    """
    kernel_bits("the weight", w_NK, 2)
    N, K = w_NK.shape
    count = panel_numbers(N, K, parts, w_NK.dtype)
    # Huge pages need large pieces; a small one is made faster by torch.
    large = count * w_NK.element_size() >= _LARGE
    packed = PackedLinear(zeroed(count, w_NK.dtype) if large else w_NK.new_empty(count), N, K, parts)
    fill_panels(w_NK, packed.panels, parts)
    return packed


def fill_panels(w_NK: Tensor, panels: Tensor, parts: int = 1) -> None:
    """`pack_linear` into `panel_numbers(...)` contiguous numbers of memory that is there."""
    bits = kernel_bits("the weight", w_NK, 2)
    w_NK = w_NK.detach().contiguous()
    N, K = w_NK.shape
    check_tensor("the panels", panels, w_NK.dtype, (panel_numbers(N, K, parts, w_NK.dtype),))
    library().funrl_pack(bits, w_NK.data_ptr(), N, K // parts, parts, panels.data_ptr())


def pack_groups(w_ENK: Tensor, parts: int = 1) -> PackedLinear:
    """Copy a matrix of each of E groups into panels, one after the other; as `pack_linear`."""
    bits = kernel_bits("the weight", w_ENK, 3)
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


@functools.lru_cache(maxsize=1024)  # each product asks, and a model has few shapes
def panel_numbers(N: int, K: int, parts: int, dtype: torch.dtype) -> int:
    """Numbers that a weight [N, K] has in panels, the padding included. Raises ValueError for other parts."""
    check_parts(parts, K)
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
      ValueError: x has not K columns, the weight has groups, or the bias is another than it must be.
    """
    bits = kernel_bits("x", x_MK, 2)
    if x_MK.shape[1] != packed.inputs or x_MK.dtype != packed.panels.dtype:
        raise ValueError(
            f"x is {x_MK.dtype} with {x_MK.shape[1]} columns, the packed weight {packed.panels.dtype} with "
            f"{packed.inputs} inputs"
        )
    numbers = panel_numbers(packed.outputs, packed.inputs, packed.parts, x_MK.dtype)
    check_tensor("the packed weight", packed.panels, x_MK.dtype, (numbers,))
    if bias_N is not None:
        if wide:
            raise ValueError("a product that is not rounded takes no bias")
        check_tensor("bias_N", bias_N, x_MK.dtype, (packed.outputs,))
    M = x_MK.shape[0]
    x_MK = x_MK.contiguous()
    bias_N = None if bias_N is None else bias_N.contiguous()
    y_MN = x_MK.new_empty(M, packed.outputs, dtype=real_of(x_MK.dtype) if wide else None)
    pointers = (x_MK.data_ptr(), packed.panels.data_ptr(), None if bias_N is None else bias_N.data_ptr())
    sizes = (wide, M, packed.outputs, packed.inputs // packed.parts, packed.parts)
    library().funrl_linear(bits, *pointers, y_MN.data_ptr(), *sizes, threads or torch.get_num_threads())
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
    if offsets[-1] != len(q_THN):
        raise ValueError(f"offsets {offsets.tolist()} do not ascend from 0 to the {len(q_THN)} tokens")
    return sequence_attention(q_THN, k_TKN, v_TKN, offsets, AttentionOptions(window or 0), threads)[0]


def sequence_attention(
    q_THN: Tensor,
    k_TKN: Tensor,
    v_TKN: Tensor,
    offsets: Tensor,
    options: AttentionOptions,
    threads: int | None = None,
) -> tuple[Tensor, Tensor]:
    """`packed_attention`; after the last offset there may be padding.

    Returns: [T, H, N], 0 at padding; the logarithm of the normaliser of each query, [H, T] float32 or wider.
    """
    q, k, v = (x.detach().contiguous() for x in (q_THN, k_TKN, v_TKN))
    if is_aligned(q):
        return aligned_kernels().launch_attention((q, k, v), offsets, None, options, len(q))
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
    q, k, v = inputs
    bits = kernel_bits("q", q, 3)
    places = q.shape[:1] if paged is None else k.shape[:2]  # of keys and values
    kernel_bits("k", k, len(places) + 2)
    T, H, N = q.shape
    K = k.shape[-2]
    for name, x in (("k", k), ("v", v)):
        check_tensor(name, x, q.dtype, (*places, K, N))
    if not K or H % K:
        raise ValueError(f"there are {H} query heads, they must be a multiple of the {K} key-value heads")
    if options.window < 0:
        raise ValueError(f"the window is {options.window}, it must be at least 1, or 0 for all tokens")
    offsets = offsets.to(torch.int64).contiguous()
    S = offsets.numel() - 1
    check_tensor("offsets", offsets, torch.int64, (max(S, 0) + 1,))
    table = ends = None
    width = page = pages = 0
    if paged is not None:
        table = paged.table_SP.to(torch.int64).contiguous()
        ends = paged.ends_S.to(torch.int64).contiguous()
        width = table.shape[-1]
        pages, page = places
        check_tensor("table_SP", table, torch.int64, (S, width))
        check_tensor("ends_S", ends, torch.int64, (S,))
    sizes = (ctypes.c_int64 * 9)(T, S, H, K, N, options.window, width, page, pages)
    pointers = (x.data_ptr() for x in (*inputs, *outputs))
    indices = (None if x is None else x.data_ptr() for x in (offsets, ends, table))
    numbers = (options.scale, options.cap, threads or torch.get_num_threads())
    problem = library().funrl_attention(bits, *pointers, sizes, *indices, *numbers)
    if problem == 1:
        raise ValueError(f"offsets {offsets.tolist()} do not ascend from 0 to at most the {T} tokens")
    if problem == 2:
        ends_S = [] if ends is None else ends.tolist()
        raise ValueError(f"ends_S {ends_S} are not between the queries and the {width * page} tokens of a table's row")
    if problem == 3:
        raise ValueError(f"table_SP has a page that is read and is not one of the {pages} pages")


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
