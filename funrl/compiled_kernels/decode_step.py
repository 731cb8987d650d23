"""One forward pass of a dense decoder over a paged key-value cache, in one C++ call.

For Llama, Qwen2, Qwen3, Mistral and Phi-3 on one tensor rank, in float32, bfloat16 or float64, on the CPU. Prompts and
decoding rows are tokens: each has a position and a sequence, and a sequence has pages of `PAGE` tokens. A token's bits
depend neither on the other tokens of the call, nor on how a prompt is cut into calls, nor on page numbers or threads:
prefill equals decode bit for bit. Tests compare it with the same pass in torch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from funrl.compiled_kernels.arguments import BITS, KERNEL_DTYPES, check_parts, check_tensor, kernel_bits, real_of
from funrl.compiled_kernels.exact.adapters import AdaptedSizes, Factors, PackedAdapter, TokenAdapters
from funrl.compiled_kernels.exact.structures import StepAdapter, StepCall, StepLayer, StepModel
from funrl.compiled_kernels.kernel_library import KernelError, library, library_problem
from funrl.compiled_kernels.packed import (
    LANES,
    fill_panels,
    panel_numbers,
    panel_width,
    parts_of,
    round_up,
    unpack_panels,
    zeroed,
)
from funrl.compiled_kernels.rotary import frequencies, rotary

PAGE = 16  # tokens of a page
ROPE_STEP = 1024  # positions by which the table of rotations grows at least
_PROBLEMS = (
    None,
    "a token is not in the vocabulary",
    "a token's sequence is not a row of the tables",
    "a position, or one before it, has no page of the cache in its sequence's table",
    "a token whose logits are wanted is not in the call",
    "a token's adapter is not one of the call's",
)
_NO_ROTATION = len(_PROBLEMS)  # a position is after the table of rotations


class StepSizes(NamedTuple):
    """Sizes of a decoder that the kernel computes.

    Attributes:
      vocab, embed, heads, kv_heads, head, mlp: sizes V, D, H, K, N, F.
      norm_eps: added to the mean square in every norm.
      rope_theta, rope_scaling: base of the rotary frequencies and their stretching, as in `rotary.frequencies`.
      windows: per layer, the number of tokens that a token sees; None: all of them.
    """

    vocab: int
    embed: int
    heads: int
    kv_heads: int
    head: int
    mlp: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Any
    windows: tuple[int | None, ...]

    @property
    def layers(self) -> int:
        return len(self.windows)


class PagedKeyValues(NamedTuple):
    """Keys and values of all layers, [layers, pages, numbers of a page]; what a page means is the kernel's own."""

    keys: Tensor
    values: Tensor


def kernel_problem(sizes: StepSizes | str, dtype: torch.dtype) -> str | None:
    """The reason why `packed_decoder` has no kernel for a model here; None: it has one, if the compiler works.

    Args:
      sizes: of the model, or the reason why the kernel does not compute it.
    """
    if dtype not in BITS:
        return f"the C++ decoding step has {KERNEL_DTYPES}, not {dtype}"
    return sizes if isinstance(sizes, str) else library_problem()


def page_bytes(sizes: StepSizes, dtype: torch.dtype) -> int:
    """Memory of one page of all layers, keys and values."""
    return 2 * sizes.layers * _page_numbers(sizes) * dtype.itemsize


def packed_decoder(
    sizes: StepSizes | str, params: object, dtype: torch.dtype, threads: int | None = None
) -> PackedDecoder:
    """Copy a decoder's weights into the kernel's layout.

    Args:
      sizes: of the decoder, or the reason why the kernel does not compute it.
      params: its whole weights, on the CPU, in any float dtype.
      dtype: of weights, cache and activations: float32, bfloat16 or float64. Sums are float32, of float64 its own.
      threads: that compute together; None: as many as torch has.

    Raises:
      KernelError: there is no kernel; the message is the reason.
    """
    problem = kernel_problem(sizes, dtype)
    if problem is not None:
        raise KernelError(problem)
    assert not isinstance(sizes, str)
    return PackedDecoder(sizes, params, dtype, threads or torch.get_num_threads())


class PackedDecoder:
    """A decoder's weights in the kernel's layout; made by `packed_decoder`.

    Attributes:
      sizes, dtype, threads: as there.
      logits_dtype: of logits, and of norms and biases in the kernel's layout.
    """

    def __init__(self, sizes: StepSizes, params: Any, dtype: torch.dtype, threads: int):
        self.sizes = sizes
        self.dtype = dtype
        self.logits_dtype = real_of(dtype)
        self.threads = threads
        self._library = library()
        self._adapted_sizes = _adapted_sizes(sizes)
        # One piece of memory for all panels: huge pages need large pieces.
        self._panels = zeroed(_all_panel_numbers(sizes, dtype), dtype)
        self._positions = 0
        self._rope = torch.empty(0)
        self.load(params)

    @torch.no_grad()
    def load(self, params: Any) -> None:
        """Copy other weights of the same sizes into the memory of the present ones.

        Raises:
          ValueError: a weight has another shape or is not on the CPU, or there are other layers.
        """
        _check_weights(self.sizes, params)
        self._used = 0  # numbers of `_panels` that are filled
        self._vectors = []  # tensors that the kernel points to
        self._optional = {*params["layers"][0]["attn"], *params} & {"q_norm", "q_bias", "o_bias", "unembed"}
        self._layers = (StepLayer * self.sizes.layers)(*(self._layer(i, w) for i, w in enumerate(params["layers"])))
        sizes = self.sizes
        embedding = params["embed"].detach().to(self.dtype, copy=True).contiguous()
        unembed = params["unembed"] if "unembed" in params else params["embed"]
        self._model = StepModel(
            layers=sizes.layers,
            embed=sizes.embed,
            heads=sizes.heads,
            kv_heads=sizes.kv_heads,
            head=sizes.head,
            mlp=sizes.mlp,
            vocab=sizes.vocab,
            output_parts=parts_of(sizes.heads * sizes.head),
            down_parts=parts_of(sizes.mlp),
            norm_eps=sizes.norm_eps,
            embedding=self._own(embedding),
            unembed=self._pack(unembed),
            norm=self._vector(params["norm"]),
            rope=self._rope.data_ptr(),
            positions=self._positions,
            layer=ctypes.addressof(self._layers),
        )

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights as the kernel has them, taken out of its layout one by one; by the names of the tree."""
        sizes = self.sizes
        used = 0
        vectors = iter(self._vectors)
        half = panel_width() // 2
        head = round_up(sizes.head, LANES)
        inner = round_up(sizes.mlp, half)
        heads = (sizes.heads, sizes.kv_heads, sizes.kv_heads)

        def unpacked(outputs: int, inputs: int, parts: int = 1) -> Tensor:
            nonlocal used
            count = panel_numbers(outputs, inputs, parts, self.dtype)
            used += count
            return unpack_panels(self._panels[used - count : used], outputs, inputs, parts)

        def vector(size: int) -> Tensor:
            return next(vectors)[:size].to(self.dtype)

        for i in range(sizes.layers):
            layer = f"layers/{i}"
            D = sizes.embed
            parts = unpacked(sum(heads) * head, D).unflatten(0, (-1, head))[:, : sizes.head].split(heads)
            yield from ((f"{layer}/attn/{name}", part) for name, part in zip("qkv", parts, strict=True))
            columns = sizes.heads * sizes.head
            yield f"{layer}/attn/o", unpacked(D, columns, parts_of(columns)).unflatten(1, (-1, sizes.head))
            both = unpacked(2 * inner, D).unflatten(0, (-1, 2, half))
            for name, part in zip(("gate", "up"), both.unbind(1), strict=True):
                yield f"{layer}/mlp/{name}", part.flatten(0, 1)[: sizes.mlp]
            yield f"{layer}/mlp/down", unpacked(D, sizes.mlp, parts_of(sizes.mlp))
            yield f"{layer}/attn_norm", vector(D)
            yield f"{layer}/mlp_norm", vector(D)
            if "q_norm" in self._optional:
                yield f"{layer}/attn/q_norm", vector(sizes.head)
                yield f"{layer}/attn/k_norm", vector(sizes.head)
            if "q_bias" in self._optional:
                parts = vector(sum(heads) * head).unflatten(0, (-1, head))[:, : sizes.head].split(heads)
                yield from ((f"{layer}/attn/{name}_bias", part) for name, part in zip("qkv", parts, strict=True))
            if "o_bias" in self._optional:
                yield f"{layer}/attn/o_bias", vector(D)
        yield "embed", next(vectors)
        unembed = unpacked(sizes.vocab, sizes.embed)
        if "unembed" in self._optional:
            yield "unembed", unembed
        yield "norm", vector(sizes.embed)

    def adapter(self, layers: Sequence[Factors], scale: float) -> PackedAdapter:
        """Copy the factors of an adapter into the kernel's layout; they stay there when `load` replaces the weights.

        Raises:
          ValueError: a factor has another shape than its weight and the rank give or is not on the CPU, or there are
            other layers.
        """
        return PackedAdapter(layers, scale, self.dtype, self._adapted_sizes)

    def init_cache(self, pages: int) -> PagedKeyValues:
        """An empty cache; its memory is taken as pages are written."""
        shape = (self.sizes.layers, pages, _page_numbers(self.sizes))
        count = shape[0] * shape[1] * shape[2]
        return PagedKeyValues(*(zeroed(count, self.dtype).view(shape) for _ in range(2)))

    def forward(
        self,
        cache: PagedKeyValues,
        tokens_N: Tensor,
        positions_N: Tensor,
        sequence_N: Tensor,
        tables_SP: Tensor,
        draw_M: Tensor,
        logits_MV: Tensor | None = None,
        adapters: TokenAdapters | None = None,
    ) -> Tensor:
        """Write keys and values of some tokens and give the logits of some of these.

        In each layer all tokens are written before any attends: a sequence may share pages that another sequence of
        the same call writes. One call of a decoder runs at a time.

        Args:
          cache: made by `init_cache`; written in place.
          tokens_N: int64 token ids.
          positions_N: int64 positions, from 0; a token attends to those up to its own, or to the last `window` of them.
          sequence_N: int64, the row of `tables_SP` of each token.
          tables_SP: int32 pages of each sequence, in order: position p is in page p // PAGE, slot p % PAGE.
          draw_M: int64 indices into N of the tokens whose logits are wanted; there may be none.
          logits_MV: where they are to be written, contiguous float32 or wider: new memory for many costs as much as
            their products.
          adapters: of the tokens; None: they have none.

        Returns: [M, V] float32, of float64 its own.

        Raises:
          ValueError: a token, sequence, page or index does not exist, or an argument has another dtype or shape.
        """
        N = tokens_N.numel()
        check_tensor("tokens_N", tokens_N, torch.int64, (N,))
        check_tensor("positions_N", positions_N, torch.int64, (N,))
        check_tensor("sequence_N", sequence_N, torch.int64, (N,))
        check_tensor("tables_SP", tables_SP, torch.int32, (*tables_SP.shape[:1], tables_SP.shape[-1]))
        check_tensor("draw_M", draw_M, torch.int64, (draw_M.numel(),))
        for name, x in zip(cache._fields, cache, strict=True):
            check_tensor(name, x, self.dtype, (self.sizes.layers, cache.keys.shape[1], _page_numbers(self.sizes)))
            if not x.is_contiguous():
                raise ValueError(f"{name} is not contiguous, it must be made by init_cache")
        given = (tokens_N, positions_N, sequence_N, tables_SP, draw_M)
        tokens_N, positions_N, sequence_N, tables_SP, draw_M = (x.contiguous() for x in given)
        logits_MV = self._logits_memory(len(draw_M), logits_MV)
        step = StepCall(
            tokens=N,
            width=tables_SP.shape[1],
            drawn=len(draw_M),
            token=tokens_N.data_ptr(),
            position=positions_N.data_ptr(),
            sequence=sequence_N.data_ptr(),
            tables=tables_SP.data_ptr(),
            draw=draw_M.data_ptr(),
            keys=cache.keys.data_ptr(),
            values=cache.values.data_ptr(),
            pages=cache.keys.shape[1],
            threads=self.threads,
            logits=logits_MV.data_ptr(),
        )
        memory = None if adapters is None else self._set_adapters(step, adapters)  # which the call reads
        call = (BITS[self.dtype], ctypes.byref(self._model), ctypes.byref(step), tables_SP.shape[0])
        problem = self._library.funrl_forward(*call)
        if problem == _NO_ROTATION:
            self._grow_rope(int(positions_N.max()) + 1)
            problem = self._library.funrl_forward(*call)
        if problem:
            raise ValueError(_PROBLEMS[problem])
        del memory
        return logits_MV

    def _set_adapters(self, step: StepCall, adapters: TokenAdapters) -> tuple[ctypes.Array, Tensor]:
        """Add the products of adapters to a call; returns the memory that it then reads. Raises ValueError."""
        check_tensor("number_N", adapters.number_N, torch.int64, (step.tokens,))
        number_N = adapters.number_N.contiguous()
        for x in adapters.adapters:
            if x.sizes != self._adapted_sizes or x.dtype != self.dtype:
                raise ValueError("an adapter was made by a decoder of other sizes or another dtype")
        structures = (StepAdapter * len(adapters.adapters))(*(x.structure() for x in adapters.adapters))
        step.adapters = ctypes.addressof(structures)
        step.adapter = number_N.data_ptr()
        step.adapter_count = len(structures)
        return structures, number_N

    def _logits_memory(self, rows: int, given: Tensor | None) -> Tensor:
        """Memory for logits of some rows: what is given if it can hold them, new memory without any."""
        shape = (rows, self.sizes.vocab)
        if given is None:
            return torch.empty(shape, dtype=self.logits_dtype)
        if given.shape != shape or given.dtype != self.logits_dtype or not given.is_contiguous():
            raise ValueError(f"logits of {rows} rows do not go into {given.dtype} {tuple(given.shape)}")
        return given

    def copy_pages(self, cache: PagedKeyValues, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages in all layers; all are read before any is written."""
        source_C = torch.tensor(source, dtype=torch.int64)
        target_C = torch.tensor(target, dtype=torch.int64)
        for x in cache:
            x.index_copy_(1, target_C, x.index_select(1, source_C))

    def sample(
        self, logits_MV: Tensor, source_R: Tensor, noise_R: Tensor | None, temperature: float | Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Draw tokens: the first one whose cumulative probability exceeds the noise.

        Args:
          logits_MV: as `forward` gives them.
          source_R: int64, the row of logits of each draw.
          noise_R: float64 in (0, 1); None: the most probable token, and both log-probabilities are raw.
          temperature: above 0, of all draws or float64 [R].

        Returns: token [R] int64; its log-probability at the temperature and at temperature 1, [R] nats each in the
          dtype of the logits; where a row has NaN or +inf it is the last token, and NaN.

        Raises:
          ValueError: a source is not a row, or an argument has another dtype or shape.
        """
        bits = kernel_bits("logits_MV", logits_MV, 2)
        R = source_R.numel()
        M, V = logits_MV.shape
        check_tensor("logits_MV", logits_MV, self.logits_dtype, (M, V))
        check_parts(parts_of(V), V)
        check_tensor("source_R", source_R, torch.int64, (R,))
        if noise_R is not None:
            check_tensor("noise_R", noise_R, torch.float64, (R,))
        each = temperature.to(torch.float64).contiguous() if isinstance(temperature, Tensor) else None
        if each is not None:
            check_tensor("temperature", each, torch.float64, (R,))
        logits_MV = logits_MV.contiguous()
        source_R = source_R.contiguous()
        noise_R = None if noise_R is None else noise_R.contiguous()
        token_R = torch.empty(R, dtype=torch.int64)
        sampling_logp_R = torch.empty(R, dtype=self.logits_dtype)
        raw_logp_R = torch.empty(R, dtype=self.logits_dtype)
        results = (x.data_ptr() for x in (token_R, sampling_logp_R, raw_logp_R))
        rows = (bits, logits_MV.data_ptr(), M, V, parts_of(V), source_R.data_ptr(), R)
        problem = self._library.funrl_sample(
            *rows,
            None if noise_R is None else noise_R.data_ptr(),
            1.0 if each is not None else temperature,
            None if each is None else each.data_ptr(),
            *results,
            self.threads,
        )
        if problem:
            raise ValueError(f"the source of a draw is not one of the {M} rows of logits")
        return token_R, sampling_logp_R, raw_logp_R

    def _layer(self, index: int, params: Any) -> StepLayer:
        sizes = self.sizes
        attn = params["attn"]
        mlp = params["mlp"]
        half = panel_width() // 2
        head = round_up(sizes.head, LANES)
        inner = round_up(sizes.mlp, half)
        qkv = torch.cat([_pad(attn[name], 1, head).flatten(0, 1) for name in "qkv"])
        # A panel has the gates of half as many outputs and then their ups.
        halves = [_pad(mlp[name], 0, inner).unflatten(0, (-1, half)) for name in ("gate", "up")]
        packed = (
            self._pack(qkv),
            self._pack(attn["o"].flatten(1), parts_of(sizes.heads * sizes.head)),
            self._pack(torch.stack(halves, 1).flatten(0, 2)),
            self._pack(mlp["down"], parts_of(sizes.mlp)),
        )
        bias = None
        if "q_bias" in attn:
            bias = torch.cat([_pad(attn[f"{name}_bias"], 1, head).flatten() for name in "qkv"])
        return StepLayer(
            *packed,
            *map(self._vector, (params["attn_norm"], params["mlp_norm"], attn.get("q_norm"), attn.get("k_norm"))),
            self._vector(bias),
            self._vector(attn.get("o_bias")),
            sizes.windows[index] or 0,
        )

    def _pack(self, w_NK: Tensor, parts: int = 1) -> int:
        count = panel_numbers(w_NK.shape[0], w_NK.shape[1], parts, self.dtype)
        panels = self._panels[self._used : self._used + count]
        self._used += count
        fill_panels(w_NK.to(self.dtype), panels, parts)
        return panels.data_ptr()

    def _vector(self, x: Tensor | None) -> int | None:
        """A vector in the dtype of the logits, rounded to the weights' before, with zeros up to whole lanes."""
        if x is None:
            return None
        return self._own(_pad(x.detach().to(self.dtype).to(self.logits_dtype), 0, round_up(x.shape[0], LANES)).clone())

    def _own(self, x: Tensor) -> int:
        self._vectors.append(x)
        return x.data_ptr()

    def _grow_rope(self, positions: int) -> None:
        sizes = self.sizes
        self._positions = max(positions, 2 * self._positions, ROPE_STEP)
        frequency = frequencies(sizes.head, sizes.rope_theta, sizes.rope_scaling, self.logits_dtype)
        rope = rotary(torch.arange(self._positions), frequency, self.dtype, rotary_amplitude(sizes))
        half = sizes.head // 2
        self._rope = torch.cat((rope.cos[:, 0, :half], rope.sin[:, 0, half:]), 1).to(self.logits_dtype).contiguous()
        self._model.rope = self._rope.data_ptr()
        self._model.positions = self._positions


def rotary_amplitude(sizes: StepSizes) -> float:
    """The factor of rotated queries and keys."""
    return 1.0 if sizes.rope_scaling is None else sizes.rope_scaling.amplitude


def _check_weights(sizes: StepSizes, params: Any) -> None:
    """Require the shapes of a decoder's weights; those that may be missing are checked where they are there."""
    V, D, H, K, N, F = sizes[:6]
    shapes = {
        "attn": {"q": (H, N, D), "k": (K, N, D), "v": (K, N, D), "o": (D, H, N), "q_norm": (N,), "k_norm": (N,)}
        | {"q_bias": (H, N), "k_bias": (K, N), "v_bias": (K, N), "o_bias": (D,)},
        "mlp": {"gate": (F, D), "up": (F, D), "down": (D, F)},
    }
    if len(params["layers"]) != sizes.layers:
        raise ValueError(f"there are weights of {len(params['layers'])} layers, the decoder has {sizes.layers}")
    vectors = {"embed": (V, D), "unembed": (V, D), "norm": (D,)}
    parts = [("", params, vectors)]
    for i, layer in enumerate(params["layers"]):
        parts.append((f"layers/{i}/", layer, {"attn_norm": (D,), "mlp_norm": (D,)}))
        parts += [(f"layers/{i}/{name}/", layer[name], part) for name, part in shapes.items()]
    for path, weights, part in parts:
        for name in part.keys() & weights.keys():
            check_tensor(path + name, weights[name], weights[name].dtype, part[name])


def _adapted_sizes(sizes: StepSizes) -> AdaptedSizes:
    """Sizes of the weights that an adapter may have factors of."""
    _, D, H, K, N, F = sizes[:6]
    shapes = {"q": (H * N, D), "k": (K * N, D), "v": (K * N, D), "o": (D, H * N)}
    shapes |= {"gate": (F, D), "up": (F, D), "down": (D, F)}
    parts = {"o": parts_of(H * N), "down": parts_of(F)}
    return AdaptedSizes(sizes.layers, N, round_up(N, LANES), shapes, parts)


def _all_panel_numbers(sizes: StepSizes, dtype: torch.dtype) -> int:
    head = round_up(sizes.head, LANES)
    inner = round_up(sizes.mlp, panel_width() // 2)
    columns = sizes.heads * sizes.head
    layer = (
        ((sizes.heads + 2 * sizes.kv_heads) * head, sizes.embed, 1),
        (sizes.embed, columns, parts_of(columns)),
        (2 * inner, sizes.embed, 1),
        (sizes.embed, sizes.mlp, parts_of(sizes.mlp)),
    )
    numbers = sizes.layers * sum(panel_numbers(*shape, dtype) for shape in layer)
    return numbers + panel_numbers(sizes.vocab, sizes.embed, 1, dtype)


def _page_numbers(sizes: StepSizes) -> int:
    return sizes.kv_heads * PAGE * round_up(sizes.head, LANES)


def _pad(x: Tensor, dim: int, size: int) -> Tensor:
    """Pad x with zeros in one dim, up to a size."""
    if x.shape[dim] == size:
        return x
    shape = [*x.shape]
    shape[dim] = size - shape[dim]
    return torch.cat((x, x.new_zeros(shape)), dim)
