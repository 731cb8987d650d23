"""A decoding pass of a dense decoder in ten launches a layer: one new token of each of B sequences, on a GPU.

For the decoders that the C++ step takes (`StepSizes`: Llama, Qwen2, Qwen3, Mistral and Phi-3) on one tensor rank, in 16
bits. Weights that read the same input are stacked: queries, keys and values; gate and up. Between products stand the
kernels of `gpu_kernels.decode_kernels`, each an operator; on a CPU an operator computes its reference.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.compiled_kernels.attention import attention_reference
from funrl.compiled_kernels.decode_slots import ENDED, LENGTH, SPLIT_TILE, STOP, PassForm, SlotState
from funrl.compiled_kernels.decode_step import StepSizes
from funrl.compiled_kernels.exact.aligned import aligned_kernels
from funrl.compiled_kernels.exact.dispatch import computes_exactly, is_aligned
from funrl.compiled_kernels.exact.registration import operator
from funrl.compiled_kernels.float8 import RowScaled, float8_format, round_rows, scaled_product
from funrl.compiled_kernels.gpu_kernels.trials import kernels_run, largest_error
from funrl.compiled_kernels.norm import rms_norm_reference
from funrl.compiled_kernels.paged_attention import kernel_for
from funrl.compiled_kernels.rotary import frequencies, rotary

SPLIT_PRODUCT_ROWS = 8  # rows of a pass up to which products are split into parts
_LEAST_SPAN = 256  # terms of a part at least
_MOST_PARTS = 8
_PROGRAMS = 264  # two for each processor of an H200
QKV = ("q", "k", "v")
GATE_UP = ("gate", "up")
_ROUNDINGS = 4  # to 16 bits, one after the other, that kernels and references do not share
_TRIED = 1e-4  # error that a trial lets pass


class LayerWeights(NamedTuple):
    """Weights of one layer; products as matrices [in, out], which share memory with the model's own weights.

    Those in 8 bits are matrices [out, in].
    """

    attn_norm: Tensor
    qkv: Tensor | RowScaled
    qkv_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: Tensor | RowScaled
    o_bias: Tensor | None
    mlp_norm: Tensor
    gate_up: Tensor | RowScaled
    down: Tensor | RowScaled


class FusedDecoder:
    """Weights and sizes of a decoder for passes that only decode.

    Example: `FusedDecoder(sizes, params).hidden(rows_B, state, pages, form)` are the hidden states [B, D] of the last
    tokens of some slots, whose keys and values are then in their pages.
    """

    def __init__(self, sizes: StepSizes, params: Any):
        """Stack weights layer by layer, so that no more than one layer's are there twice.

        Args:
          sizes: of the decoder.
          params: its weights; in their dicts those that are stacked become parts of one tensor.
        """
        self._sizes = sizes
        self._layers = [_stack_layer(layer) for layer in params["layers"]]
        self._embed_VD: Tensor = params["embed"].detach().contiguous()
        self._norm_D: Tensor = params["norm"].detach()
        theta, scaling = sizes.rope_theta, sizes.rope_scaling
        wide = torch.promote_types(self._embed_VD.dtype, torch.float32)
        self._frequency = frequencies(sizes.head, theta, scaling, dtype=wide, device=self._embed_VD.device)
        self._amplitude = 1.0 if scaling is None else float(scaling.amplitude)

    def hidden(self, rows_B: Tensor, state: SlotState, pages: Sequence[tuple[Tensor, ...]], form: PassForm) -> Tensor:
        """Hidden states [B, D] after the last norm.

        Args:
          rows_B: int64 slots.
          state: of all slots; it is read.
          pages: keys and values of each layer; they are written.
          form: constants of the pass.
        """
        eps = self._sizes.norm_eps
        first = self._layers[0].attn_norm
        embedding = self._embed_VD, self._frequency, self._amplitude, first, eps
        x_BD, h_BD, *rotation, ends, offsets, table = _begin_rows(rows_B, *state, *embedding, *form)
        if is_aligned(x_BD):  # the trainer's cosines
            turns = rotary(ends.long() - 1, self._frequency, x_BD.dtype, self._amplitude)
            rotation[:2] = turns.cos.squeeze(-2), turns.sin.squeeze(-2)
        norms = [w.attn_norm for w in self._layers[1:]] + [self._norm_D]
        for w, cache, window, norm_D in zip(self._layers, pages, self._sizes.windows, norms, strict=True):
            vectors = w.qkv_bias, w.q_norm, w.k_norm
            q_BHN = _rotated_heads(_product(h_BD, w.qkv), *vectors, *rotation, *cache, eps)
            mixed_BM = _decode_attention(q_BHN, *cache, table, offsets, ends, window or 0)
            h_BD = _add_norm(x_BD, _product(mixed_BM, w.o), w.o_bias, w.mlp_norm, eps)
            inner_BF = _gated_halves(_product(h_BD, w.gate_up), h_BD.dtype)
            h_BD = _add_norm(x_BD, _product(inner_BF, w.down), None, norm_D, eps)
        return h_BD


def fused_problem(sizes: StepSizes | str, dtype: torch.dtype, device: torch.device, page: int) -> str | None:
    """Reason why `FusedDecoder` does not decode with a model here; None: it does.

    Args:
      sizes: of the model, or the reason why the C++ step does not compute it.
      dtype: of its weights.
      device: a GPU.
      page: tokens of a page.
    """
    if isinstance(sizes, str):
        return sizes.replace("the C++ decoding step does", "fused decoding kernels do")
    if dtype.itemsize != 2:
        return f"decoding by fused kernels is in 16 bits, not in {dtype}"
    if kernel_for(device.type, dtype, sizes.head, page) is None:
        return f"no kernel attends over pages of {page} tokens with heads of {sizes.head}"
    return None if kernels_run(trial_in(dtype)) else "the fused kernels do not run on this GPU"


def _stack_layer(layer: Mapping[str, Any]) -> LayerWeights:
    """The weights of a layer as matrices; in its dicts the stacked ones become parts of one tensor each."""
    attn: dict[str, Any] = layer["attn"]
    mlp: dict[str, Any] = layer["mlp"]
    inner = attn["q"].shape[-1]
    bias = tuple(f"{name}_bias" for name in QKV)
    vectors = {name: attn[name].detach() for name in ("q_norm", "k_norm", "o_bias") if name in attn}
    return LayerWeights(
        attn_norm=layer["attn_norm"].detach(),
        qkv=_matrix(_stack(attn, QKV, inner)),
        qkv_bias=_stack(attn, bias, 1).flatten() if bias[0] in attn else None,
        q_norm=vectors.get("q_norm"),
        k_norm=vectors.get("k_norm"),
        o=_matrix(attn["o"]),
        o_bias=vectors.get("o_bias"),
        mlp_norm=layer["mlp_norm"].detach(),
        gate_up=_matrix(_stack(mlp, GATE_UP, inner)),
        down=_matrix(mlp["down"]),
    )


def _matrix(weight: Tensor | RowScaled) -> Tensor | RowScaled:
    """A weight whose first dim is that of its outputs, as a matrix."""
    if isinstance(weight, RowScaled):
        return RowScaled(weight.values.flatten(1), weight.scales)
    return weight.detach().flatten(1).contiguous().T


def _stack(part: dict[str, Any], names: tuple[str, ...], inner: int) -> Any:
    """Weights of a part of a layer as one matrix of `inner` columns, whose rows they then are."""
    if isinstance(part[names[0]], RowScaled):
        values, scales = ({name: getattr(part[name], field) for name in names} for field in RowScaled._fields)
        whole = RowScaled(_stack(values, names, inner), _stack(scales, names, 1).flatten())
        part |= {name: RowScaled(values[name], scales[name]) for name in names}
        return whole
    matrices = [part[name].detach().reshape(-1, inner) for name in names]
    whole = torch.cat(matrices)
    for name, rows in zip(names, whole.split([len(x) for x in matrices]), strict=True):
        part[name] = rows.view(part[name].shape)
    return whole


def _product(x_BK: Tensor, weight_KM: Tensor | RowScaled) -> Tensor:
    """x weight, [B, M]; of few rows, unless it is in 8 bits, in parts [P, B, M] float32 whose sum it is."""
    if isinstance(weight_KM, RowScaled):
        rounded_BK, scale_B = _rounded_rows(x_BK, weight_KM.form)
        return scaled_product(rounded_BK, scale_B, weight_KM, x_BK.dtype)
    if is_aligned(x_BK):
        return aligned_kernels().launch_product_parts(x_BK, weight_KM.T)
    return torch.mm(x_BK, weight_KM) if len(x_BK) > SPLIT_PRODUCT_ROWS else _split_product(x_BK, weight_KM)


def runs_kernels(x: Tensor) -> bool:
    """True if kernels compute with a tensor, false if the references do."""
    return x.is_cuda


def _summed(product: Tensor, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """A product, whole or in parts, with its bias."""
    whole = product.sum(0).to(dtype) if product.dim() == 3 else product
    return whole if bias is None else whole + bias.flatten()


# Flat arguments: torch.library takes tensors and numbers, no records.
@operator("funrl::begin_rows")
def _begin_rows(
    rows: Tensor,
    tokens: Tensor,
    numbers: Tensor,
    table: Tensor,
    embed: Tensor,
    frequency: Tensor,
    amplitude: float,
    norm: Tensor,
    eps: float,
    page: int,
    pages: int,
    spare: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    if runs_kernels(embed):
        from funrl.compiled_kernels.gpu_kernels import decode_kernels as kernels

        rope = frequency, amplitude
        norm_scale, form = kernels.NormScale(norm, eps), PassForm(page, pages, spare)
        results = kernels.launch_begin(rows, SlotState(tokens, numbers, table), embed, rope, norm_scale, form)
        return results  # pyright: ignore[reportReturnType]
    return begin_rows_reference(
        rows, tokens, numbers, table, embed, frequency, amplitude, norm, eps, page, pages, spare
    )


def begin_rows_reference(rows, tokens, numbers, table, embed, frequency, amplitude, norm, eps, page, pages, spare):
    """Embeddings, normalized embeddings, rotations, and `Paging` of the last tokens of some slots."""
    own = numbers.index_select(1, rows)
    running = own[ENDED] == 0
    position = torch.where(running, own[LENGTH] - 1, 0)
    copied = table[rows, :pages]
    number = copied.gather(1, (position // page)[:, None])[:, 0].long()
    places = torch.where(running, number, spare) * page + position % page
    x = embed[tokens[rows]]
    angle = position[:, None].to(frequency.dtype) * frequency
    cos = angle.cos() * amplitude
    sin = angle.sin() * amplitude
    cosines, sines = (torch.cat(pair, 1).to(x.dtype) for pair in ((cos, cos), (-sin, sin)))
    offsets = torch.arange(len(rows) + 1, dtype=torch.int32)
    return x, rms_norm_reference(x, norm, eps), cosines, sines, places, (position + 1).int(), offsets, copied


@_begin_rows.register_fake
def _(rows, tokens, numbers, table, embed, frequency, amplitude, norm, eps, page, pages, spare):
    B = rows.shape[0]
    x, h = (embed.new_empty(B, embed.shape[1]) for _ in range(2))
    cos, sin = (embed.new_empty(B, 2 * frequency.shape[0]) for _ in range(2))
    ends, offsets = (rows.new_empty(count, dtype=torch.int32) for count in (B, B + 1))
    return x, h, cos, sin, torch.empty_like(rows), ends, offsets, table.new_empty(B, pages)


@operator("funrl::rotated_heads", mutates_args=("keys", "values"))
def _rotated_heads(
    x: Tensor,
    bias: Tensor | None,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    places: Tensor,
    keys: Tensor,
    values: Tensor,
    eps: float,
) -> Tensor:
    if runs_kernels(keys):
        from funrl.compiled_kernels.gpu_kernels import decode_kernels as kernels

        norms = None if q_norm is None or k_norm is None else (q_norm, k_norm)
        return kernels.launch_heads(x, bias, norms, eps, (cos, sin, places), (keys, values))
    return rotated_heads_reference(x, bias, q_norm, k_norm, cos, sin, places, keys, values, eps)


def rotated_heads_reference(x, bias, q_norm, k_norm, cos, sin, places, keys, values, eps):
    """Queries; keys and values go to their pages."""
    K, N = keys.shape[2:]
    heads = _summed(x, keys.dtype, bias).unflatten(1, (-1, N))
    q, k, v = heads.split([heads.shape[1] - 2 * K, K, K], 1)
    if q_norm is not None and k_norm is not None:
        q, k = (rms_norm_reference(y, weight, eps) for y, weight in ((q, q_norm), (k, k_norm)))
    q, k = (torch.addcmul(y * cos[:, None], y.roll(N // 2, -1), sin[:, None]) for y in (q, k))
    for new, cache in ((k, keys), (v, values)):
        cache.view(-1, K, N).index_copy_(0, places, new)
    return q.contiguous()


@_rotated_heads.register_fake
def _(x, bias, q_norm, k_norm, cos, sin, places, keys, values, eps):
    K, N = keys.shape[2:]
    return keys.new_empty(x.shape[-2], x.shape[-1] // N - 2 * K, N)


@operator("funrl::decode_attention")
def _decode_attention(
    q: Tensor, keys: Tensor, values: Tensor, table: Tensor, offsets: Tensor, ends: Tensor, window: int
) -> Tensor:
    B, pages = table.shape
    if is_aligned(q):
        assert computes_exactly(q, keys, values), "`fused_problem` takes 16 bits"
        inputs = q, keys, values
        out, _ = aligned_kernels().launch_attention(inputs, offsets, (table, ends), (window, 0.0, 0.0), 1)
        return out.flatten(1)
    if runs_kernels(q):
        kernel = kernel_for(q.device.type, q.dtype, q.shape[-1], keys.shape[1])
        assert kernel is not None, "`fused_problem` has found one"
        groups = torch.tensor([[0, 0, B, 1, pages]])
        return kernel(q, keys, values, table, offsets, ends, groups, window, 0.0).flatten(1)
    return decode_attention_reference(q, keys, values, table, ends, window)


def decode_attention_reference(q, keys, values, table, ends, window):
    """Attention of one token of each sequence to its pages."""
    k, v = (x[table.long()].flatten(1, 2) for x in (keys, values))
    positions = torch.arange(k.shape[1])
    seen = (positions < ends[:, None]) & (positions >= ends[:, None] - (window or k.shape[1]))
    return attention_reference(q[:, None], k, v, seen[:, None]).flatten(1)


@_decode_attention.register_fake
def _(q, keys, values, table, offsets, ends, window):
    return q.new_empty(q.shape[0], q.shape[1] * q.shape[2])


@operator("funrl::add_norm", mutates_args=("x",))
def _add_norm(x: Tensor, branch: Tensor, bias: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    if runs_kernels(x):
        from funrl.compiled_kernels.gpu_kernels import decode_kernels as kernels

        return kernels.launch_add_norm(x, branch, bias, kernels.NormScale(weight, eps))
    return add_norm_reference(x, branch, bias, weight, eps)


def add_norm_reference(x, branch, bias, weight, eps):
    """Norm of the residual stream, to which the branch is added in place."""
    x += _summed(branch, x.dtype, bias)
    return rms_norm_reference(x, weight, eps)


@_add_norm.register_fake
def _(x, branch, bias, weight, eps):
    return torch.empty_like(x)


@operator("funrl::gated_halves")
def _gated_halves(x: Tensor, dtype: torch.dtype) -> Tensor:
    if runs_kernels(x):
        from funrl.compiled_kernels.gpu_kernels import decode_kernels as kernels

        return kernels.launch_gate(x, dtype)
    return gated_halves_reference(x, dtype)


def gated_halves_reference(x, dtype):
    """silu(gate) * up of the halves of a product."""
    gate, up = _summed(x, dtype).chunk(2, 1)
    return F.silu(gate) * up


@_gated_halves.register_fake
def _(x, dtype):
    return x.new_empty(x.shape[-2], x.shape[-1] // 2, dtype=dtype)


@operator("funrl::rounded_rows")
def _rounded_rows(x: Tensor, form: torch.dtype) -> tuple[Tensor, Tensor]:
    if runs_kernels(x):
        from funrl.compiled_kernels.gpu_kernels import decode_kernels as kernels

        return kernels.launch_round_rows(x, form)
    return round_rows(x, form)


@_rounded_rows.register_fake
def _(x, form):
    return x.new_empty(x.shape, dtype=form), x.new_empty(x.shape[0], dtype=torch.float32)


@operator("funrl::split_product")
def _split_product(x: Tensor, weight: Tensor) -> Tensor:
    if runs_kernels(x):
        from funrl.compiled_kernels.gpu_kernels import decode_kernels as kernels

        return kernels.launch_split_product(x, weight.T, parts_for(weight))
    return split_product_reference(x, weight)


def split_product_reference(x, weight):
    """A product in parts."""
    parts = parts_for(weight)
    span = -(-len(weight) // parts)
    wide = torch.promote_types(x.dtype, torch.float32)
    return torch.stack(
        [x[:, k : k + span].to(wide) @ weight[k : k + span].to(wide) for k in range(0, parts * span, span)]
    )


@_split_product.register_fake
def _(x, weight):
    wide = torch.promote_types(x.dtype, torch.float32)
    return x.new_empty(parts_for(weight), x.shape[0], weight.shape[1], dtype=wide)


def parts_for(weight_KM: Tensor) -> int:
    """Parts of a product of few rows, whose programs are to occupy a GPU."""
    K, M = weight_KM.shape
    return max(1, min(_MOST_PARTS, _PROGRAMS // -(-M // SPLIT_TILE), K // _LEAST_SPAN))


def rounded_rows_error(device: str) -> float:
    """Largest error of the kernel that rounds rows to 8 bits, beside torch's operators on the host."""
    form = float8_format(device)
    if isinstance(form, str):
        return torch.inf
    x_BK = torch.randn(3, 40, generator=torch.Generator().manual_seed(0))
    pairs = _rounded_rows(x_BK.to(device), form), round_rows(x_BK, form)
    return largest_error((here.float(), there.double()) for here, there in zip(*pairs, strict=True))


@functools.cache
def trial_in(dtype: torch.dtype) -> Callable[[str], float]:
    """`fused_decode_error` in a dtype."""

    @functools.wraps(fused_decode_error)
    def trial(device: str) -> float:
        return fused_decode_error(device, dtype)

    return trial


def fused_decode_error(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Largest error of the kernels in a small call of each, beside the references in float64 on the host.

    Args:
      device: where kernels compute.
      dtype: of weights and activations; in 16 bits the error is a share of what rounding explains, times the tolerance.
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    def on(xs: Sequence[Any]) -> list[Any]:
        return [x.to(device, copy=True) if isinstance(x, Tensor) else x for x in xs]

    def widened(x: Any) -> Any:
        return x.double() if isinstance(x, Tensor) and x.is_floating_point() else x

    def both(op: Any, reference: Callable, args: Sequence[Any], *written: int) -> Iterator[tuple[Tensor, Tensor]]:
        here = on(args)
        there = [widened(x) for x in args]
        results, expected = op(*here), reference(*there)
        pairs = zip(results, expected, strict=True) if isinstance(results, tuple) else [(results, expected)]
        yield from (*pairs, *((here[i], there[i]) for i in written))

    B, D, N = 3, 40, 8
    numbers = torch.zeros(STOP, 5, dtype=torch.int64)
    numbers[LENGTH] = torch.tensor([3, 70, 1, 9, 1])
    numbers[ENDED, 4] = 1
    state = torch.arange(5), numbers, torch.arange(15, dtype=torch.int32).view(5, 3)
    rows = torch.tensor([1, 4, 0])
    begin = rows, *state, draw(5, D), frequencies(N, 1e4), 1.0, draw(D), 1e-6, 32, 3, 15
    turns = draw(2, B, N)
    pages = draw(2, 32, 2, N), draw(2, 32, 2, N)
    heads = draw(2, B, 7 * N, dtype=torch.float32), None, draw(N), draw(N), *turns
    heads = *heads, torch.tensor([40, 3, 0]), *pages, 1e-6
    parts = draw(2, B, 2 * D, dtype=torch.float32)
    product = draw(B, 600), draw(70, 600).T / 32
    pairs = itertools.chain(
        both(_begin_rows, begin_rows_reference, begin),
        both(_rotated_heads, rotated_heads_reference, heads, 7, 8),
        both(_add_norm, add_norm_reference, (draw(B, D), draw(B, D), draw(D), draw(D), 1e-6), 0),
        both(_gated_halves, lambda x, _: gated_halves_reference(x, torch.float64), (parts, dtype)),
        [(_split_product(*on(product)).sum(0), widened(product[0]) @ widened(product[1]))],
    )
    if dtype.itemsize > 2:
        return largest_error(pairs)
    rounding = _ROUNDINGS * torch.finfo(dtype).eps
    shares = [(x.cpu().double() - there) / (1 + there.abs()) / rounding for x, there in pairs]
    return _TRIED * largest_error((share, torch.zeros_like(share)) for share in shares)
