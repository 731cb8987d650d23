"""Attention of the new tokens of many sequences to keys and values that stand in pages.

A page holds a fixed number of neighbouring tokens of one sequence. All new keys and values are written before any token
attends, so a sequence may use pages that another one fills in the same pass. One opaque operator, so that no graph
depends on lengths.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.attention import add_sinks, attention, attention_reference
from funrl.compiled_kernels.exact.aligned import aligned_kernels
from funrl.compiled_kernels.exact.dispatch import computes_exactly, is_aligned
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.flash_kernel import faster_attention
from funrl.compiled_kernels.packed import AttentionOptions, PagedKeys, page_attention
from funrl.processes.device_memory import copy_to_device

KERNEL_PAGE = 256  # tokens; the page of a kernel is a multiple of it
KERNEL_HEAD = 256  # numbers of a head at most, in eights
TRITON_PAGE = 16  # tokens; the page of a Triton kernel is a multiple of it
_PROBED = "cuda"  # where a kernel is tried
_TOLERANCE = 0.05  # of results in bfloat16 that are averages of values of size 1
log = logging.getLogger(__name__)
CAPPED_QUERIES = 256  # new tokens of a sequence at a time where logits are capped, or there are sinks


class Paging(NamedTuple):
    """Places of the new tokens of a pass; N tokens of S sequences, in their order.

    Attributes:
      places_N: int64, page times page length plus offset, where each token's key and value go.
      positions_N: int64, of each token in its sequence.
      table_SP: int64 or int32 pages of each sequence in order; those after its last token are any.
      offsets_S1: [S + 1] int32, where the new tokens of each sequence begin and end.
      ends_S: int32, tokens of each sequence, the new ones included.
      groups_G5: int64, on the CPU: sequences with equally many new tokens and about as many pages, computed together.
        First token, first sequence, sequences, new tokens of each, pages that are read of each.
    """

    places_N: Tensor
    positions_N: Tensor
    table_SP: Tensor
    offsets_S1: Tensor
    ends_S: Tensor
    groups_G5: Tensor


class PagedHeads(NamedTuple):
    """Heads as a kernel of paged attention takes them.

    Attributes:
      head: size.
      plain: without a cap of the logits and without sinks.
    """

    head: int
    plain: bool


def paging_of(
    counts: Sequence[int] | np.ndarray,
    ends: Sequence[int] | np.ndarray,
    table_SP: Tensor,
    page_tokens: int,
    device: torch.device | str = "cpu",
) -> Paging:
    """Places of a pass. Sequences that stand together with equal counts and `read_pages` are one group.

    Args:
      counts: new tokens of each sequence, at least 1.
      ends: tokens of each sequence, the new ones included.
      table_SP: pages of each sequence, on the CPU.
      page_tokens: of a page.
    """
    table = table_SP.long()
    new_S = np.asarray(counts, dtype=np.int64)
    last_S = np.asarray(ends, dtype=np.int64)
    begins_S = np.cumsum(new_S) - new_S
    numbers_N = np.repeat(np.arange(len(new_S)), new_S)
    positions_N = torch.from_numpy(np.arange(len(numbers_N)) + (last_S - new_S - begins_S)[numbers_N])
    places_N = table[torch.from_numpy(numbers_N), positions_N // page_tokens] * page_tokens + positions_N % page_tokens
    pages_S = _read_pages_of(last_S, page_tokens)
    starts_G = np.flatnonzero((np.diff(new_S, prepend=0) != 0) | (np.diff(pages_S, prepend=0) != 0))
    many_G = np.diff(starts_G, append=len(new_S))
    pages_G = np.minimum(pages_S[starts_G], table.shape[1])
    groups_G5 = np.stack([begins_S[starts_G], starts_G, many_G, new_S[starts_G], pages_G], 1)
    offsets_S1, ends_S = (torch.from_numpy(x.astype(np.int32)) for x in (np.append(begins_S, new_S.sum()), last_S))
    on = functools.partial(copy_to_device, device=torch.device(device))
    return Paging(on(places_N), on(positions_N), on(table), on(offsets_S1), on(ends_S), torch.from_numpy(groups_G5))


def decode_paging(positions_B: Tensor, table_BP: Tensor, places_B: Tensor, running_B: Tensor) -> Paging:
    """Places of a pass that computes one token of each of B sequences, from what the device alone knows.

    Args:
      positions_B: int64, of each token in its sequence.
      table_BP: int32 pages of each sequence; all are read.
      places_B: int64, where each token's key and value go.
      running_B: bool; of a sequence that is not running one token is read.
    """
    B, P = table_BP.shape
    ends_B = torch.where(running_B, positions_B + 1, 1).int()
    offsets_B1 = torch.arange(B + 1, dtype=torch.int32, device=table_BP.device)
    return Paging(places_B, positions_B, table_BP, offsets_B1, ends_B, torch.tensor([[0, 0, B, 1, P]]))


def read_pages(tokens: int, page_tokens: int) -> int:
    """Pages that attention reads of a sequence: its own pages, or up to a quarter more.

    There are few such numbers, so that sequences of about one length are computed together.
    """
    pages = -(-tokens // page_tokens)
    step = 1 << max(0, pages.bit_length() - 3)
    return -(-pages // step) * step


def _read_pages_of(tokens_S: np.ndarray, page_tokens: int) -> np.ndarray:
    """`read_pages` of many sequences."""
    pages_S = -(-tokens_S // page_tokens)
    step_S = 1 << np.maximum(0, np.frexp(pages_S)[1].astype(np.int64) - 3)
    return -(-pages_S // step_S) * step_S


def paged_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    cache: tuple[Tensor, Tensor],
    paging: Paging,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """softmax(scale q k^T) v, where a token sees itself and the tokens before it in its own sequence.

    Tensors that `computes_exactly` takes, as on a CPU, go to a function that gives them the bits of `varlen_attention`;
    16-bit tensors on CUDA and ROCm to the kernel that `kernel_for` finds; everything else is gathered group by group.
    Without a gradient.

    Args:
      q_NHD, k_NKD, v_NKD: of the new tokens; K divides H, query head h uses key-value head h // (H / K).
      cache: keys and values, pages [P, page, K, D]; the new ones are written to it, in place.
      paging: places of the tokens.
      window: how many tokens a token sees at most, itself included; None: all.
      scale: None: 1 / sqrt(D).
      cap: logits x become cap tanh(x / cap) before the softmax; None: they stay.
      sinks_H: logit of each head of a further key, which every token sees and whose value is 0.

    Returns: [N, H, D].
    """
    return _paged_attention(q_NHD, k_NKD, v_NKD, *cache, *paging, window or 0, scale or 0.0, cap or 0.0, sinks_H)


def paged_attention_reference(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    cache: tuple[Tensor, Tensor],
    paging: Paging,
    window: int | None = None,
    scale: float | None = None,
    cap: float | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """`paged_attention`, sequence by sequence, with the whole matrix of weights."""
    outs = []
    page = cache[0].shape[1]
    for new, x in zip((k_NKD, v_NKD), cache, strict=True):
        for row, place in zip(new, paging.places_N.tolist(), strict=True):
            x[place // page, place % page] = row
    for s, end in enumerate(paging.ends_S.tolist()):
        begin, stop = paging.offsets_S1[s : s + 2].tolist()
        keys, values = (x[paging.table_SP[s]].flatten(0, 1)[None, :end] for x in cache)
        behind_TS = torch.arange(end - (stop - begin), end, device=q_NHD.device)[:, None]
        behind_TS = behind_TS - torch.arange(end, device=q_NHD.device)
        seen = (behind_TS >= 0) & (behind_TS < (window or end))
        options = {"scale": scale, "cap": cap, "sinks_H": sinks_H}
        outs.append(attention_reference(q_NHD[None, begin:stop], keys, values, seen[None], **options)[0])
    return torch.cat(outs)


def static_paged_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKD: Tensor,
    cache: tuple[Tensor, Tensor],
    paging: Paging,
    window: int | None = None,
    **options: Any,
) -> Tensor:
    """`paged_attention` of equally many tokens of each row of `paging.table_SP`, whose pages are all read.

    It is made of core operators, for programs that are traced. A sequence may have several rows, and shapes alone say
    how many tokens a row has.

    Args:
      options: `scale`, `cap` and `sinks_H`.
    """
    page = cache[0].shape[1]
    rows, pages = paging.table_SP.shape
    for new, x in zip((k_NKD, v_NKD), cache, strict=True):
        x.view(-1, *x.shape[2:]).index_copy_(0, paging.places_N, new)
    wide = torch.promote_types(q_NHD.dtype, torch.float32)
    k_RSKD, v_RSKD = (x[paging.table_SP.long()].flatten(1, 2).to(wide) for x in cache)
    q_RTHD = q_NHD.unflatten(0, (rows, -1)).to(wide)
    behind_RTS = paging.positions_N.view(rows, -1, 1) - torch.arange(pages * page, device=q_NHD.device)
    seen_RTS = behind_RTS >= 0
    if window is not None:
        seen_RTS = seen_RTS & (behind_RTS < window)
    return attention_reference(q_RTHD, k_RSKD, v_RSKD, seen_RTS, **options).flatten(0, 1).to(q_NHD.dtype)


# Flat arguments, here and in the fake: torch.library takes tensors and numbers, no records.
@operator("funrl::paged_attention", mutates_args=("keys", "values"))
def _paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    places: Tensor,
    positions: Tensor,
    table: Tensor,
    offsets: Tensor,
    ends: Tensor,
    groups: Tensor,
    window: int,
    scale: float = 0.0,
    cap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    _write(k, v, (keys, values), places)
    if computes_exactly(q, keys, values):
        options = AttentionOptions(window, scale, cap)
        if is_aligned(q):
            inputs = q, keys, values
            out, lse = aligned_kernels().launch_attention(
                inputs, offsets, (table, ends), options, int(groups[:, 3].max())
            )
        else:
            out, lse = page_attention(q, PagedKeys(keys, values, table, ends), offsets, options)
        return out if sinks is None else add_sinks(out, lse.T, sinks)[0]
    kernel = kernel_for(q.device.type, q.dtype, q.shape[-1], keys.shape[1], plain=not cap and sinks is None)
    if kernel is not None:
        extras = {"cap": cap, "sinks": sinks} if cap or sinks is not None else {}
        return kernel(q, keys, values, table, offsets, ends, groups, window, scale, **extras)
    out = torch.empty_like(q)
    page = keys.shape[1]
    for first, low, rows, count, pages in groups.tolist():
        part = slice(first, first + rows * count)
        pages_RP = table[low : low + rows, :pages]
        k_RSKD, v_RSKD = (x[pages_RP].flatten(1, 2) for x in (keys, values))
        q_RTHD, positions_RT, out_RTHD = (x[part].view(rows, count, *x.shape[1:]) for x in (q, positions, out))
        most = count if sinks is None and not cap else CAPPED_QUERIES
        for begin in range(0, count, most):
            tokens = slice(begin, begin + most)
            behind_RTS = positions_RT[:, tokens, None] - torch.arange(pages * page, device=q.device)
            seen_RTS = behind_RTS >= 0
            if window:
                seen_RTS &= behind_RTS < window
            out_RTHD[:, tokens] = attention(
                q_RTHD[:, tokens], k_RSKD, v_RSKD, seen_RTS, scale=scale or None, cap=cap or None, sinks_H=sinks
            )
    return out


def _write(k: Tensor, v: Tensor, cache: tuple[Tensor, Tensor], places: Tensor) -> None:
    """Write new keys and values to their places, by one kernel on a GPU."""
    if k.is_cuda and all(x.is_contiguous() for x in cache) and triton_takes_pages():
        from funrl.compiled_kernels.gpu_kernels.page_kernels import write_pages

        write_pages(k, v, cache, places)
        return
    for new, x in ((k, cache[0]), (v, cache[1])):
        x.view(-1, *x.shape[2:]).index_copy_(0, places, new)


@_paged_attention.register_fake
def _(q, k, v, keys, values, places, positions, table, offsets, ends, groups, window, scale=0.0, cap=0.0, sinks=None):
    return torch.empty_like(q)


def kernel_for(
    device: str, dtype: torch.dtype, head: int, page_tokens: int, plain: bool = True
) -> Callable[..., Tensor] | None:
    """Kernel of attention of a dtype to pages and heads of these sizes; None: there is none.

    It takes (q, keys, values, table, offsets, ends, groups, window, scale), and where it is not `plain` cap and sinks.

    Args:
      plain: without a cap and without sinks.
    """
    if device != "cuda" or dtype.itemsize != 2 or head > KERNEL_HEAD:
        return None
    if plain and head % 8 == 0 and page_tokens % KERNEL_PAGE == 0 and (kernel := paged_kernel()) is not None:
        return kernel
    return by_triton if page_tokens % TRITON_PAGE == 0 and triton_takes_pages() else None


@functools.cache
def paged_kernel() -> Callable[..., Tensor] | None:
    """Plain attention over pages on a GPU: torch's from 2.12 on, else flash-attn's, else Triton's; None: none of them.

    It is logged once, and takes (q, keys, values, table, offsets, ends, groups, window, scale). Where there is a GPU a
    small call is tried first: a kernel may take pages by its signature and refuse them on this device.
    """
    from torch.nn.attention.varlen import varlen_attn

    faster_attention()  # what torch's kernel calls is chosen before it is tried
    if "block_table" in inspect.signature(varlen_attn).parameters:
        kernel = functools.partial(by_torch, varlen_attn)
        if (problem := _problem(kernel)) is None:
            log.info("attention over pages on the GPU is by torch %s", torch.__version__)
            return kernel
        log.warning("torch %s has no attention over pages for this GPU: %s", torch.__version__, problem)
    try:  # flash-attn-4 alone brings a namespace of this name without functions
        flash = getattr(importlib.import_module("flash_attn"), "flash_attn_varlen_func", None)
    except ImportError:
        flash = None
    if flash is not None and "block_table" in inspect.signature(flash).parameters:
        kernel = functools.partial(by_flash_attn, flash)
        if (problem := _problem(kernel)) is None:
            log.info("attention over pages on the GPU is by flash-attn")
            return kernel
        log.warning("flash-attn has no attention over pages for this GPU: %s", problem)
    return by_triton if triton_takes_pages() else None


@functools.cache
def triton_takes_pages() -> bool:
    """True if the kernels of `gpu_kernels.page_kernels` compute what the reference does on this machine's GPU."""
    if importlib.util.find_spec("triton") is None:
        problem = "triton is not installed; torch for CUDA and ROCm brings it along"
    else:
        problem = _problem(by_triton) or _problem(by_triton, KERNEL_HEAD)
    if problem is None:
        log.info("attention over pages on the GPU is by Triton kernels")
        return True
    log.warning("attention over pages on the GPU gathers them, which is slow: %s", problem)
    return False


def _problem(kernel: Callable[..., Tensor], head: int = 64) -> str | None:
    """Reason why a kernel does not attend over pages on this machine's GPU; None: it does, or there is no GPU.

    Args:
      head: size of the heads of the small call.
    """
    if not torch.cuda.is_available():
        return None
    generator = torch.Generator().manual_seed(0)
    shapes = (3, 2, head), (2, KERNEL_PAGE, 1, head), (2, KERNEL_PAGE, 1, head)
    q, keys, values = (torch.randn(shape, generator=generator).bfloat16().to(_PROBED) for shape in shapes)
    try:
        for counts, ends in (((1, 2), (40, 200)), ((1, 1, 1), (40, 200, 256))):  # of a prompt; of decoding alone
            table = torch.arange(len(counts)).remainder(2).unsqueeze(1)
            paging = paging_of(counts, ends, table, KERNEL_PAGE, _PROBED)
            new_keys, new_values = (x.flatten(0, 1)[paging.places_N] for x in (keys, values))
            expected = paged_attention_reference(q, new_keys, new_values, (keys, values), paging)
            places = paging.table_SP, paging.offsets_S1, paging.ends_S, paging.groups_G5
            error = (kernel(q, keys, values, *places, 0, 0.0) - expected).abs().max().item()
            if not error < _TOLERANCE:
                return f"its results differ by {error:.2g} from the reference's"
    except Exception as problem:  # a compiler's errors share no type
        return str(problem).partition("\n")[0]
    return None


def by_torch(kernel: Callable, q, keys, values, table, offsets, ends, groups, window: int, scale: float) -> Tensor:
    """Attention over pages by `torch.nn.attention.varlen.varlen_attn`. The host waits for nothing."""
    most_new, most = _most(keys, groups)
    return kernel(
        q,
        keys,
        values,
        offsets,
        None,
        most_new,
        most,
        window_size=_window(window, most_new),
        scale=scale or None,
        enable_gqa=True,
        seqused_k=ends,
        block_table=table.int(),
        num_splits=1,
    )


def by_flash_attn(kernel: Callable, q, keys, values, table, offsets, ends, groups, window: int, scale: float) -> Tensor:
    """Attention over pages by `flash_attn.flash_attn_varlen_func`, which takes the lengths of texts as offsets."""
    most_new, most = _most(keys, groups)
    upto = torch.nn.functional.pad(ends.cumsum(0, dtype=torch.int32), (1, 0))
    return kernel(
        q,
        keys,
        values,
        offsets,
        upto,
        most_new,
        most,
        softmax_scale=scale or None,
        causal=_window(window, most_new)[1] == 0,
        window_size=_window(window, most_new),
        block_table=table.int(),
    )


def by_triton(
    q, keys, values, table, offsets, ends, groups, window: int, scale: float, cap: float = 0.0, sinks=None
) -> Tensor:
    """Attention over pages by the kernels of `gpu_kernels.page_kernels`. The host waits for nothing."""
    from funrl.compiled_kernels.gpu_kernels.page_kernels import PageOptions, attend_pages

    counts = int(groups[:, 3].min()), int(groups[:, 3].max())
    options = PageOptions(scale or q.shape[-1] ** -0.5, window, cap)
    return attend_pages(q, (keys, values), (table, offsets, ends), counts, options, sinks_H=sinks)


def _window(window: int, most_new: int) -> tuple[int, int]:
    """Tokens that a token sees before and after itself, as kernels take them; -1: all.

    A single new token is the last of its sequence, so nothing after it needs to be hidden. Only without that bound do
    kernels treat query heads that share keys as queries of one head, and read these keys once.
    """
    if most_new == 1 and not window:
        return -1, -1
    return window - 1 if window else -1, 0


def _most(keys: Tensor, groups: Tensor) -> tuple[int, int]:
    """Largest numbers of new tokens and of tokens read, over sequences; `groups` is on the host."""
    return int(groups[:, 3].max()), int(groups[:, 4].max()) * keys.shape[1]


def paged_flops(q: Tensor, groups: Tensor, page_tokens: int) -> int:
    """FLOPs of the two products of `paged_attention`, over the pages that are read."""
    pairs = int((groups[:, 2] * groups[:, 3] * groups[:, 4]).sum()) * page_tokens
    return 4 * q.shape[1] * q.shape[2] * pairs


def paged_bytes(q: Tensor, keys: Tensor, groups: Tensor) -> int:
    """Bytes of `paged_attention` that are read or written: the new tokens', and the pages of each sequence once."""
    pages = int((groups[:, 2] * groups[:, 4]).sum())
    return 4 * q.nbytes + 2 * pages * keys[0].nbytes
