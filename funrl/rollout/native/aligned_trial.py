"""Trial of the kernels of a fixed order on a device: a small model's engine and trainer, before a run relies on them.

The model has the run's layers with one or two key-value heads and shortened sums, whose kernels compile as the run's
do. Prompts of several lengths are completed together and one by one, and scored together, in another order with padding
after them, and one by one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.exact.aligned import aligned_kernels
from funrl.compiled_kernels.gpu_kernels.trials import exception_text
from funrl.mesh.mesh import SINGLE, Mesh, single
from funrl.models import Model, Placed, place, with_fields
from funrl.models.flat import flat_fields
from funrl.rollout.engine import complete
from funrl.rollout.native.cache_sizes import page_tokens
from funrl.rollout.native.engine import NativeOptions, native_engine
from funrl.rollout.requests import requests_of
from funrl.rollout.sampling_parameters import Sampling

_TERMS = 2048  # of a sum at most, which is then in two parts; the rest that a block leaves is kept
_VOCAB = 8192
_NEW_TOKENS = 3
_PADDING = 7
_TOLERANCES = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.05, 0.1)}  # of scores, in nats, and of gradients


def aligned_trial_problem(model: Model, dtype: torch.dtype, device: torch.device) -> str | None:
    """Reason why kernels of a fixed order fail on a device; None: bits are equal, and errors within bounds.

    They have to be on, as by `align_gpu_kernels`. The kernels are those of a plain layer, not of a compiled one.

    Args:
      model: one that they compute.
      dtype: of weights and activations.
      device: a GPU.
    """
    try:
        return _trial_problem(_shrink_model(model), dtype, single(device))
    except Exception as problem:  # a compiler's errors share no type
        return exception_text(problem)


def _shrink_model(model: Model) -> Model:
    """A model with one layer of each kind, and sizes that leave the kernels' forms as they are."""
    kinds = model.abilities.layer_kinds
    model = model.of_layers(sorted(kinds.index(kind) for kind in set(kinds)))
    fields = flat_fields(model.config)
    kv_heads = min(fields["kv_heads"], 2)
    sizes = {
        "vocab": _shrink(fields["vocab"], _VOCAB),
        "embed": _shrink(fields["embed"], _TERMS),
        "mlp": _shrink(fields["mlp"], _TERMS),
        "kv_heads": kv_heads,
        "heads": fields["heads"] // fields["kv_heads"] * kv_heads,
        "max_positions": max(fields["max_positions"], _TERMS),
    }
    return model.rebuild(with_fields(model.config, **sizes))


def _shrink(size: int, most: int) -> int:
    return size if size <= most else most + size % 64


def _trial_problem(model: Model, dtype: torch.dtype, mesh: Mesh) -> str | None:
    generator = torch.Generator().manual_seed(0)
    wide = trees.map(
        lambda x: x + 0.1 * torch.randn(x.shape, generator=generator) * (x.dim() == 1), model.init(generator)
    )
    params = trees.map(lambda x: x.to(mesh.device, dtype), wide)
    lengths = aligned_kernels().KEYS_PART + 6, 1, 37
    prompts = [torch.randint(model.config.vocab, (n,), generator=generator).tolist() for n in lengths]
    rows, logps, same = _sample_rows(model, params, prompts, mesh)
    if not same:
        return "the engine's numbers depend on the other rows of a pass"
    placed = place(model, mesh, dtype=dtype)
    order = list(range(len(rows)))
    leaves = trees.map(lambda x: x.clone().requires_grad_(), params)
    scores = _score_rows(placed, leaves, rows, lengths, order)
    whole = [x.detach().cpu().double() for x in scores]
    gap = torch.stack([(x - y).abs().max() for x, y in zip(whole, logps, strict=True)]).max()  # NaN if one is
    if gap != 0:
        return f"engine and trainer differ by {gap:.3g} nats"
    with torch.no_grad():
        for packing in (order[::-1], *([i] for i in order)):
            packed = _score_rows(placed, params, rows, lengths, packing, _PADDING * (len(packing) > 1))
            if not all(torch.equal(whole[i], x.cpu().double()) for i, x in zip(packing, packed, strict=True)):
                return "the trainer's numbers depend on the packing of rows"
    return _error_problem(model, params, (scores, leaves), (rows, lengths), _TOLERANCES[dtype])


def _sample_rows(
    model: Model, params: trees.Tree, prompts: Sequence[Sequence[int]], mesh: Mesh
) -> tuple[list[Tensor], list[Tensor], bool]:
    """Prompts with completions, these one's log-probabilities, and whether each alone is completed in the same way."""
    dtype = trees.leaves(params)[0].dtype
    page = page_tokens(mesh.device.type)
    pages = 2 + sum(-(-(len(prompt) + _NEW_TOKENS) // page) for prompt in prompts)
    options = NativeOptions(len(prompts), pages * model.page_bytes(mesh, page, dtype), packed=False)
    engine = native_engine(model, mesh, dtype, options)
    requests = requests_of(prompts, Sampling(max_new_tokens=_NEW_TOKENS), 0)
    engine.load(engine.weights.named(params))
    done = complete(engine, requests)
    engine.load(engine.weights.named(params))  # it forgets the prompts
    alone = [complete(engine, [request])[0] for request in requests]
    same = all(
        torch.equal(x.tokens, y.tokens) and torch.equal(x.raw_logp, y.raw_logp)
        for x, y in zip(done, alone, strict=True)
    )
    engine.pause()
    rows = [torch.cat([torch.tensor(prompt), x.tokens]) for prompt, x in zip(prompts, done, strict=True)]
    return rows, [x.raw_logp.double() for x in done], same


def _score_rows(
    placed: Placed,
    params: trees.Tree,
    rows: Sequence[Tensor],
    lengths: Sequence[int],
    order: Sequence[int],
    padding: int = 0,
) -> list[Tensor]:
    """The trainer's log-probabilities of the completions of some rows, which are packed in this order."""
    counts = torch.tensor([len(rows[i]) for i in order])
    positions = torch.cat([*(torch.arange(n) for n in counts.tolist()), torch.zeros(padding, dtype=torch.int64)])
    firsts = torch.tensor([lengths[i] for i in order]).repeat_interleave(counts)
    own = torch.nn.functional.pad(positions[: len(firsts)] >= firsts, (0, padding))
    segments = torch.arange(1, len(order) + 1).repeat_interleave(counts)
    packed = Batch(
        tokens=torch.cat([*(rows[i] for i in order), torch.zeros(padding, dtype=torch.int64)])[None],
        mask=own[None],
        positions=positions[None],
        segments=torch.nn.functional.pad(segments, (0, padding))[None],
        offsets=torch.cat([torch.zeros(1), counts.cumsum(0)]).int(),
    )
    batch = trees.map(lambda x: x.to(placed.mesh.device), packed)
    logp_T = placed.token_scores(params, batch).read("logp")[0]
    return list(logp_T[own.to(logp_T.device)].split([len(rows[i]) - lengths[i] for i in order]))


def _error_problem(
    model: Model,
    params: trees.Tree,
    trained: tuple[Sequence[Tensor], trees.Tree],
    texts: tuple[Sequence[Tensor], Sequence[int]],
    tolerances: tuple[float, float],
) -> str | None:
    """Compare scores, and the gradient of their sum, with those of float64 on the host.

    Args:
      model, params: as they are computed.
      trained: scores of all rows, and the leaves that they are functions of.
      texts: rows, and the tokens of their prompts.
      tolerances: of scores and gradients.
    """
    scores, leaves = trained
    wide = trees.map(lambda x: x.detach().cpu().double().requires_grad_(), params)
    expected = _score_rows(place(model, SINGLE, dtype=torch.float64), wide, *texts, list(range(len(scores))))
    error = torch.stack([(x.cpu() - y).abs().max() for x, y in zip(scores, expected, strict=True)]).max()
    if not error < tolerances[0]:
        return f"log-probabilities differ by {error:.2g} nats from those in float64"
    grads, right = (
        torch.autograd.grad(
            torch.cat([x.double() for x in values]).sum(), trees.leaves(weights), materialize_grads=True
        )
        for values, weights in ((scores, leaves), (expected, wide))
    )
    norms = [y.norm().item() for y in right]
    least = 0.01 * math.hypot(*norms)  # a gradient may be 0, as by a bias of all keys
    errors = [(x.cpu().double() - y).norm() / (least + n) for x, y, n in zip(grads, right, norms, strict=True)]
    error = torch.stack(errors).max()
    return None if error < tolerances[1] else f"gradients differ by {error:.1%} from those in float64"
