"""Log-probabilities, entropies and collision probabilities of tokens straight from hidden states.

The logits [T, V] are never whole in memory: a chunk of tokens at a time, computed again in the backward pass. On CUDA
and ROCm each of the two reads the logits once, by the kernels of `logit_rows`, and where the L2 cache of the device is
large enough in blocks of columns that stay in it; a CPU goes over what its cache holds.
Under tensor parallelism each rank holds some rows of the vocabulary, and the ranks' partial sums meet in two
collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl.autograd import AutogradFunction
from funrl.compiled_kernels.exact.dispatch import computes_exactly, is_plain
from funrl.compiled_kernels.exact.operators import exact_linear
from funrl.compiled_kernels.exact.scores import largest_logits, log_probabilities, logit_moments
from funrl.compiled_kernels.linear import add_products_, multiplies_wide, product, sum_of_products
from funrl.compiled_kernels.logit_rows import operators
from funrl.compiled_kernels.logit_rows.plain import cap_slope, row_sums_, to_d_logits_
from funrl.compiled_kernels.logit_rows.settings import LogitBlock, RowSettings
from funrl.compiled_kernels.packed import parts_of
from funrl.mesh.collectives import all_gather, pmax, psum, psum_pairwise
from funrl.mesh.mesh import SINGLE, Mesh

EXTRAS = ("entropy", "sum_pi_squared")
_CACHED = 2**18  # numbers that a CPU's cache holds, some of them twice
_CHUNKS = 4  # of tokens, at most, whose gradients of logits become one part of the weight's gradient
WANTS = ("logp", *EXTRAS)


class TokenScores(NamedTuple):
    """A model's scores of tokens; None: not asked for.

    All have the tokens' shape, and `topk_logp` a further dim K; but `load`, which a model with experts has, is a tuple
    of tensors of other shapes.
    """

    logp: Tensor | None = None  # nats, of the token
    entropy: Tensor | None = None  # nats, of the distribution that the token was sampled from
    sum_pi_squared: Tensor | None = None  # sum of the squared probabilities of that distribution
    topk_logp: Tensor | None = None  # nats, of K other tokens at the same position
    divergence: Tensor | None = None  # nats, of that distribution from a teacher's; by `linear_divergence`
    load: Any = None  # of the experts, by all tokens that the model read: `funrl.models.decoder.routing.Load`

    def read(self, name: str) -> Tensor:
        """One of the scores. Raises: KeyError, it was not asked for."""
        x = getattr(self, name)
        if x is None:
            raise KeyError(f"{name!r} is not among the scores that were asked for")
        return x


def linear_logprob(
    hidden_TD: Tensor,
    unembed_VD: Tensor,
    targets_T: Tensor,
    mesh: Mesh = SINGLE,
    temperature: float = 1.0,
    chunk: int = 1024,
    want: tuple[str, ...] = ("logp",),
    topk_TK: Tensor | None = None,
    cap: float | None = None,
    vocab: int | None = None,
) -> TokenScores:
    """Log-probabilities, entropy and sum of squares of p = softmax(hidden unembed^T / temperature).

    They are log p[target], -sum p log p, sum p^2, and log p of further tokens; all differentiable.

    Args:
      hidden_TD: the same on every tensor rank.
      unembed_VD: this rank's rows of the vocabulary, equally many on every rank.
      targets_T: token ids in the whole vocabulary.
      mesh: the vocabulary is split over "tensor".
      temperature: above 0.
      chunk: tokens at a time.
      want: some of "logp", "entropy", "sum_pi_squared".
      topk_TK: token ids in the whole vocabulary whose log-probabilities are wanted too.
      cap: logits x become cap tanh(x / cap), before the temperature; None: they stay.
      vocab: number of rows of all ranks that are tokens; None: all of them.

    Returns: [T] each, [T, K] for `topk_TK`, in float32 or wider. The gradient of hidden is complete on every tensor
      rank.

    Raises:
      ValueError: `want` has an unknown name, or the temperature is not above 0.
    """
    unknown = sorted(set(want) - set(WANTS))
    if unknown:
        raise ValueError(f"want has {unknown[0]!r}, there are {list(WANTS)}")
    if temperature <= 0:
        raise ValueError(f"temperature is {temperature}, it must be above 0")
    ids_TN = targets_T[:, None] if topk_TK is None else torch.cat([targets_T[:, None], topk_TK], 1)
    extras = tuple(name for name in EXTRAS if name in want)
    own_VD = token_rows(unembed_VD, mesh, vocab)
    if len(own_VD) < len(unembed_VD):  # its first row has the number that it would have if all ranks had as many
        ids_TN = ids_TN - int(mesh.index("tensor")) * (len(unembed_VD) - len(own_VD))
    logp_TN, *rest, _ = _LinearLogprob.apply(hidden_TD, own_VD, ids_TN, mesh, temperature, chunk, extras, cap)
    scores = dict(zip(extras, rest, strict=True))
    if "logp" in want:
        scores["logp"] = logp_TN[:, 0]
    if topk_TK is not None:
        scores["topk_logp"] = logp_TN[:, 1:]
    return TokenScores(**scores)


def topk(
    hidden_TD: Tensor,
    unembed_VD: Tensor,
    k: int,
    mesh: Mesh = SINGLE,
    temperature: float = 1.0,
    chunk: int = 1024,
    cap: float | None = None,
    vocab: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The k most probable tokens and their log-probabilities, [T, k] each, in descending order; without a gradient.

    Args: those of `linear_logprob`; k: at most the size of the vocabulary.
    """
    ids = []
    tops = []
    own_VD = token_rows(unembed_VD.detach(), mesh, vocab)
    for hidden_CD in hidden_TD.detach().split(chunk):
        x_CV = filled_columns(_tempered(hidden_CD, own_VD, temperature, cap), len(unembed_VD))
        top_CK, row_CK = x_CV.topk(min(k, x_CV.shape[1]), -1)
        tops.append(top_CK)
        ids.append(row_CK + mesh.index("tensor") * unembed_VD.shape[0])
    # The first k of all ranks are among the first k of each rank.
    top_TK = all_gather(torch.cat(tops), mesh, "tensor", 1)
    id_TK = all_gather(torch.cat(ids), mesh, "tensor", 1)
    topk_TK = id_TK.gather(1, top_TK.topk(k, -1).indices)
    targets_T = topk_TK[:, 0]
    with torch.no_grad():
        scores = linear_logprob(hidden_TD, unembed_VD, targets_T, mesh, temperature, chunk, (), topk_TK, cap, vocab)
    assert scores.topk_logp is not None
    return topk_TK, scores.topk_logp


def token_rows(unembed_VD: Tensor, mesh: Mesh, vocab: int | None) -> Tensor:
    """This rank's rows that are tokens, of as many as every rank has; `vocab` is as in `linear_logprob`.

    No rank is without a token: `rules.layout` refuses that.
    """
    V = unembed_VD.shape[0]
    if vocab is None or V * mesh.size("tensor") == vocab:
        return unembed_VD
    return unembed_VD[: vocab - int(mesh.index("tensor")) * V]


def filled_columns(logits_CV: Tensor, columns: int) -> Tensor:
    """Logits with further columns that are never chosen."""
    lacks = columns - logits_CV.shape[1]
    return F.pad(logits_CV, (0, lacks), value=-torch.inf) if lacks else logits_CV


def linear_logprob_reference(
    hidden_TD: Tensor, unembed_VD: Tensor, targets_T: Tensor, temperature: float = 1.0, cap: float | None = None
) -> TokenScores:
    """All of `linear_logprob` on one device with whole logits."""
    wide = torch.promote_types(hidden_TD.dtype, torch.float32)
    logits_TV = hidden_TD.to(wide) @ unembed_VD.to(wide).T
    if cap is not None:
        logits_TV = cap * (logits_TV / cap).tanh()
    logp_TV = (logits_TV / temperature).log_softmax(-1)
    logp_T = logp_TV.gather(1, targets_T[:, None])[:, 0]
    return TokenScores(logp_T, -(logp_TV.exp() * logp_TV).sum(-1), (2 * logp_TV).exp().sum(-1))


def project(hidden_TD: Tensor, unembed_VD: Tensor, cap: float | None = None) -> Tensor:
    """hidden unembed^T in float32 or wider, [T, V]; sums are not rounded to 16 bits. Without a gradient for 16 bits.

    Engines take their logits from here too, so that theirs and the trainer's are the same numbers.

    Args:
      cap: logits x become cap tanh(x / cap), without a gradient; None: they stay.
    """
    x_TV = _products(hidden_TD, unembed_VD)
    return x_TV if cap is None else x_TV.div_(cap).tanh_().mul_(cap)


def _products(hidden_TD: Tensor, unembed_VD: Tensor) -> Tensor:
    if computes_exactly(hidden_TD, unembed_VD):
        return exact_linear(hidden_TD, unembed_VD, None, 1, True)
    if hidden_TD.element_size() > 2:
        return product(hidden_TD, unembed_VD)
    if multiplies_wide(hidden_TD):
        return torch.mm(hidden_TD, unembed_VD.T, out_dtype=torch.float32)
    return hidden_TD.float() @ unembed_VD.T.float()


class _LinearLogprob(AutogradFunction):
    """(logp [T, N], those of `extras`, the logarithm of the normalizer [T]); the last has no gradient."""

    @staticmethod
    def forward(hidden_TD, unembed_VD, ids_TN, mesh, temperature, chunk, extras, cap):
        row_TN, mine_TN = _local(ids_TN, unembed_VD, mesh)
        if computes_exactly(hidden_TD, unembed_VD):
            options = _ExactOptions(mesh, temperature, chunk, extras, cap)
            return _exact_scores(hidden_TD, unembed_VD, row_TN, mine_TN, options)
        if operators.by_kernels(hidden_TD):
            settings = _settings(temperature, cap, extras)
            top_T, picked_TN, sum_T, *more = _kernel_sums(hidden_TD, unembed_VD, row_TN, chunk, settings)
        else:
            parts = [
                _plain_sums(h, unembed_VD, row, temperature, extras, cap)
                for h, row in zip(hidden_TD.split(chunk), row_TN.split(chunk), strict=True)
            ]
            top_T, picked_TN, sum_T, *more = (torch.cat(part) for part in zip(*parts, strict=True))
        # From this rank's maximum to that of all: shift what was taken relative to it.
        most_T = pmax(top_T, mesh, "tensor")
        shift_T = top_T - most_T
        sums = [shift_T.exp() * sum_T]
        for name, x_T in zip(extras, more, strict=True):
            sums.append(shift_T.exp() * (x_T + shift_T * sum_T) if name == "entropy" else (2 * shift_T).exp() * x_T)
        picked_NT = torch.where(mine_TN, picked_TN + shift_T[:, None], 0).T
        all_sums = psum(torch.cat([torch.stack(sums), picked_NT]), mesh, "tensor")
        sum_T, *more = all_sums[: len(sums)]
        picked_NT = all_sums[len(sums) :]
        log_T = sum_T.log()
        results = [
            log_T - x_T / sum_T if name == "entropy" else x_T / sum_T**2 for name, x_T in zip(extras, more, strict=True)
        ]
        return (picked_NT - log_T).T.contiguous(), *results, most_T + log_T

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden_TD, unembed_VD, ids_TN, *ctx.args = inputs
        ctx.set_materialize_grads(False)  # what no loss depends on costs nothing in the backward pass
        ctx.mark_non_differentiable(output[-1])
        ctx.save_for_backward(hidden_TD, unembed_VD, ids_TN, *output)

    @staticmethod
    def backward(ctx, *grads):
        hidden_TD, unembed_VD, ids_TN, *rows, normalizer_T = ctx.saved_tensors
        mesh, temperature, chunk, extras, cap = ctx.args
        names = ("logp", *extras)
        grads = (None if grad is None else grad / temperature for grad in grads[:-1])
        given = {name: _columns(grad) for name, grad in zip(names, grads, strict=True) if grad is not None}
        if not given:
            return (None,) * 8
        results = {name: _columns(x) for name, x in zip(names, rows, strict=True) if name in given}
        upstream = _Upstream(*_local(ids_TN, unembed_VD, mesh), normalizer_T, results, given, temperature, cap)
        d_hidden = []
        d_unembed = None
        kernels = operators.by_kernels(hidden_TD)
        parts = list(_parts(hidden_TD, chunk, normalizer_T.dtype))
        if ctx.needs_input_grad[1] and not kernels:
            d_unembed = torch.zeros(unembed_VD.shape, dtype=normalizer_T.dtype, device=unembed_VD.device)

        d_logits_of = _kernel_d_logits if kernels else _plain_d_logits
        for part in parts:
            d_logits = d_logits_of(hidden_TD, unembed_VD, upstream, part, chunk)
            if ctx.needs_input_grad[0]:
                d_hidden.append(product(d_logits, unembed_VD.T))
            if d_unembed is not None:
                add_products_(d_unembed, d_logits, hidden_TD[part])
            elif ctx.needs_input_grad[1]:  # of one part it is rounded once, by the product itself
                wide = None if len(parts) == 1 else normalizer_T.dtype
                d_unembed = sum_of_products(d_logits, hidden_TD[part], wide)
            del d_logits  # before the next ones are made
        whole = psum(torch.cat(d_hidden), mesh, "tensor") if d_hidden else None
        return whole, None if d_unembed is None else d_unembed.to(unembed_VD.dtype), *(None,) * 6


class _Upstream(NamedTuple):
    """Inputs of the gradients of logits, beside the logits: of T tokens, with N picked ones each.

    Attributes:
      row_TN, mine_TN: of `_local`.
      normalizer_T: log sum e^z over the whole vocabulary.
      results, grads: by name [T, 1], or [T, N] of "logp"; the gradients over the temperature.
      temperature, cap: of the logits.
    """

    row_TN: Tensor
    mine_TN: Tensor
    normalizer_T: Tensor
    results: dict[str, Tensor]
    grads: dict[str, Tensor]
    temperature: float
    cap: float | None

    def of(self, tokens: slice) -> _Upstream:
        """That of some tokens."""
        results, grads = ({name: x[tokens] for name, x in xs.items()} for xs in (self.results, self.grads))
        row_TN, mine_TN, normalizer_T = (x[tokens] for x in self[:3])
        return self._replace(row_TN=row_TN, mine_TN=mine_TN, normalizer_T=normalizer_T, results=results, grads=grads)


def _plain_d_logits(hidden_TD: Tensor, unembed_VD: Tensor, upstream: _Upstream, part: slice, chunk: int) -> Tensor:
    """Gradients of the logits of some tokens in the dtype of hidden states, a chunk at a time by plain passes."""
    temperature = upstream.temperature
    cap = upstream.cap

    def of_chunk(tokens: slice) -> Tensor:
        x_CV = _tempered(hidden_TD[tokens], unembed_VD, temperature, cap)
        for low, rows_RV in _cached(x_CV):
            some = upstream.of(slice(tokens.start + low, tokens.start + low + len(rows_RV)))
            slope_RV = None if cap is None else cap_slope(rows_RV * temperature, cap)
            rows_RV.sub_(some.normalizer_T[:, None])
            to_d_logits_(rows_RV, some.row_TN, some.mine_TN, some.results, some.grads)
            if slope_RV is not None:
                rows_RV.mul_(slope_RV)
        return x_CV.to(hidden_TD.dtype)

    return _of_chunks(of_chunk, part, chunk)


def _kernel_d_logits(hidden_TD: Tensor, unembed_VD: Tensor, upstream: _Upstream, part: slice, chunk: int) -> Tensor:
    """`_plain_d_logits` by one read of each block of logits and one write of its gradients."""
    given = upstream.of(part)
    facts_P6 = operators.row_facts(given.normalizer_T, given.results, given.grads)
    grad_PN = torch.where(given.mine_TN, given.grads["logp"], 0) if "logp" in given.grads else facts_P6[:, :0]
    row_PN = given.row_TN[:, : grad_PN.shape[1]].contiguous()
    settings = _settings(given.temperature, given.cap, given.grads)
    d_PV = unembed_VD.new_empty(len(row_PN), len(unembed_VD), dtype=hidden_TD.dtype)
    chunks = [x.split(chunk) for x in (hidden_TD[part], row_PN, grad_PN, facts_P6)]
    for columns in operators.column_blocks(min(chunk, len(row_PN)), len(unembed_VD), unembed_VD.device):
        unembed_BD = unembed_VD[columns]
        for d_CB, hidden_CD, row_CN, grad_CN, facts_C6 in zip(d_PV[:, columns].split(chunk), *chunks, strict=True):
            block = LogitBlock(_products(hidden_CD, unembed_BD), row_CN, columns.start)
            operators.logit_gradients(d_CB, block, grad_CN, facts_C6, settings)
            del block  # the next one takes its memory, of which the cache has a copy
    return d_PV


def _settings(temperature: float, cap: float | None, names: Collection[str]) -> RowSettings:
    """Settings of kernels, with the extras among some names."""
    return RowSettings(temperature, cap or 0.0, "entropy" in names, "sum_pi_squared" in names)


class _ExactOptions(NamedTuple):
    """Further arguments of `_LinearLogprob`."""

    mesh: Mesh
    temperature: float
    chunk: int
    extras: tuple[str, ...]
    cap: float | None


def _exact_scores(
    hidden_TD: Tensor, unembed_VD: Tensor, row_TN: Tensor, mine_TN: Tensor, options: _ExactOptions
) -> tuple[Tensor, ...]:
    """Results of `_LinearLogprob` with the bits of the decoding step, however many ranks share the vocabulary.

    Args:
      row_TN, mine_TN: of `_local`.
    """
    mesh, temperature, chunk, extras, cap = options
    ranks = mesh.size("tensor")
    parts = max(parts_of(unembed_VD.shape[0] * ranks) // ranks, 1)
    tops = []
    chunks = []
    for hidden_CD, row_CN in zip(hidden_TD.split(chunk), row_TN.split(chunk), strict=True):
        x_CV = project(hidden_CD, unembed_VD, cap)
        top_C = pmax(largest_logits(x_CV), mesh, "tensor")
        tops.append(top_C)
        chunks.append(logit_moments(x_CV, top_C, row_CN, temperature, parts, more=bool(extras)))
    above_TN, sums_T3 = (torch.cat(x) for x in zip(*chunks, strict=True))
    above_TN = psum(torch.where(mine_TN, above_TN, 0), mesh, "tensor")
    sum_T, first_T, second_T = psum_pairwise(sums_T3, mesh, "tensor").unbind(1)
    top_T = torch.cat(tops)
    log_T = sum_T.log()
    values = {"entropy": log_T - first_T / sum_T, "sum_pi_squared": second_T / sum_T**2}
    logp_TN = log_probabilities(above_TN, sum_T, temperature, top_T.dtype)
    normalizer_T = top_T.double() / temperature + log_T
    return logp_TN, *(values[name].to(top_T.dtype) for name in extras), normalizer_T.to(top_T.dtype)


def _parts(hidden_TD: Tensor, chunk: int, wide: torch.dtype) -> Iterator[slice]:
    """Tokens whose gradients of logits are whole at a time: some chunks, and no more than the weight's gradient is.

    Each part is added to that gradient, which is read and written for it.
    """
    T, D = hidden_TD.shape
    most = min(_CHUNKS, D * wide.itemsize // (chunk * hidden_TD.element_size()))
    step = chunk * max(1, most)
    return (slice(low, min(low + step, T)) for low in range(0, max(1, T), step))


def _of_chunks(values: Callable[[slice], Tensor], part: slice, chunk: int) -> Tensor:
    """Rows of a part, computed a chunk at a time."""
    first = values(slice(part.start, min(part.start + chunk, part.stop)))
    if part.stop - part.start <= chunk:
        return first
    rows = first.new_empty(part.stop - part.start, *first.shape[1:])
    rows[:chunk] = first
    for low in range(part.start + chunk, part.stop, chunk):
        high = min(low + chunk, part.stop)
        rows[low - part.start : high - part.start] = values(slice(low, high))
    return rows


def _columns(x: Tensor) -> Tensor:
    """[T, 1], or [T, N] where there is a number for every picked token."""
    return x if x.ndim == 2 else x[:, None]


def _local(ids_TN: Tensor, unembed_VD: Tensor, mesh: Mesh) -> tuple[Tensor, Tensor]:
    """Row of each token in this rank's part of the vocabulary, and a mask of the tokens that are in it."""
    row_TN = ids_TN - mesh.index("tensor") * unembed_VD.shape[0]
    mine_TN = (row_TN >= 0) & (row_TN < unembed_VD.shape[0])
    return torch.where(mine_TN, row_TN, 0), mine_TN


def _tempered(hidden_CD: Tensor, unembed_VD: Tensor, temperature: float, cap: float | None) -> Tensor:
    """Logits over the temperature; a pass over them less where it is 1."""
    x_CV = project(hidden_CD, unembed_VD, cap)
    return x_CV if temperature == 1 else x_CV.div_(temperature)


def _cached(x_CV: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Rows of logits, and the number of the first.

    They are as many as a CPU's cache holds, as several passes go over them; a tracer and a GPU have all of them at
    once.
    """
    if not is_plain(x_CV):
        return iter([(0, x_CV)])
    step = max(1, _CACHED // max(1, x_CV.shape[1]))
    return ((low, x_CV[low : low + step]) for low in range(0, max(1, len(x_CV)), step))


def _kernel_sums(
    hidden_TD: Tensor, unembed_VD: Tensor, row_TN: Tensor, chunk: int, settings: RowSettings
) -> list[Tensor]:
    """`_plain_sums` of all tokens by one read of each block of logits, while the L2 cache has it."""
    T, V = len(hidden_TD), len(unembed_VD)
    sums_TS, picked_TN = operators.empty_row_sums(T, row_TN.shape[1], settings, hidden_TD.device)
    chunks = [x.split(chunk) for x in (sums_TS, picked_TN, hidden_TD, row_TN.contiguous())]
    for columns in operators.column_blocks(min(chunk, T), V, unembed_VD.device):
        unembed_BD = unembed_VD[columns]
        for sums_CS, picked_CN, hidden_CD, row_CN in zip(*chunks, strict=True):
            block = LogitBlock(_products(hidden_CD, unembed_BD), row_CN, columns.start)
            operators.add_row_sums_(sums_CS, picked_CN, block, settings)
            del block  # the next one takes its memory, of which the cache has a copy
    top_T, *sums = sums_TS.unbind(1)
    return [top_T, picked_TN.sub_(top_T[:, None]), *sums]


def _plain_sums(
    hidden_CD: Tensor,
    unembed_VD: Tensor,
    row_CN: Tensor,
    temperature: float,
    extras: tuple[str, ...],
    cap: float | None,
) -> list[Tensor]:
    """Over this rank's rows: the maximum m; of x = logit - m: x[picked], sum e^x; of the extras sum x e^x, sum e^2x."""
    x_CV = _tempered(hidden_CD, unembed_VD, temperature, cap)
    parts = [row_sums_(x_RV, row_CN[low : low + len(x_RV)], extras) for low, x_RV in _cached(x_CV)]
    return parts[0] if len(parts) == 1 else [torch.cat(part) for part in zip(*parts, strict=True)]
