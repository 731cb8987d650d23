"""The first layer and operation after which engine and trainer have other bits, of a row that a run has saved.

Both compute the row again, each on its own mesh: the engine a prompt at once and then token by token, the trainer all
tokens. Only the named results of one layer are held at a time (`decoder.watch`, `exact.step_trace`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.decode_step import PagedKeyValues, packed_decoder
from funrl.compiled_kernels.exact.step_trace import StepTrace, empty_trace
from funrl.mesh.collectives import gather_objects
from funrl.mesh.mesh import Mesh
from funrl.models import Model, Placed
from funrl.models.decoder.watch import show_results
from funrl.models.filled import filled
from funrl.rollout.native.backends import PackedBackend, TorchBackend, packed_problem
from funrl.rollout.native.cache_sizes import page_tokens
from funrl.rollout.native.passes import PassWork
from funrl.rollout.sampling_parameters import Sampling
from funrl.trainer.differences import Difference, difference
from funrl.trainer.gap_row import GapRow, as_trained, read_gap_row, read_gap_weights
from funrl.trainer.jobs.build import build
from funrl.trainer.jobs.job import Job
from funrl.trainer.steps.parts import GeneratingParts

PREFILLED = 1024  # tokens of a prompt in one pass
BY_HEADS = ("q product", "k product", "v product", "q norm", "k norm", "rotation of q", "rotation of k", "attention")
BY_KEYS = ("k product", "v product", "k norm", "rotation of k")
BY_INNER = ("gate product", "up product", "gate")
Results = dict[str, Tensor]  # by the name of an operation: [T, ...]


class GapSearch(NamedTuple):
    """The first difference between engine and trainer in a row.

    Attributes:
      row: the token.
      layer: number of the layer; None: the difference is in none.
      first: the first results that differ, by the name of the operation; None: all are equal.
      engine, trainer: log-probabilities of the token as they are computed now, in nats.
    """

    row: GapRow
    layer: int | None
    first: Difference | None
    engine: float
    trainer: float


class TracedPasses(NamedTuple):
    """Results of all passes over a row.

    Attributes:
      stream: residual stream after each layer, [T, D] each.
      layer: results of one layer.
      last: results after all layers, of the last token alone.
    """

    stream: list[Tensor]
    layer: Results
    last: Results


def search_gap(job: Job, path: Path, mesh: Mesh, note: Callable[[str], None]) -> GapSearch:
    """Find the first difference in a row that a run has saved. Collective.

    Args:
      job: of the run.
      path: of the row.
      mesh: to train on.

    Returns: the same on every rank.

    Raises:
      DamagedError: a file cannot be read.
    """
    row = read_gap_row(path)
    parts = build(job, mesh, note)
    assert isinstance(parts, GeneratingParts)
    engine = parts.generator.engine
    shards = read_gap_weights(path, engine)
    placed = parts.roles[parts.main_role].placed
    params = as_trained(parts, shards)
    weights = trees.from_named(engine.weights.layouts, shards.items())
    generated = _generated(parts, weights, row)

    def both(layer: int) -> tuple[TracedPasses, TracedPasses]:
        return generated(layer), _trained(placed, params, row, layer)

    ours, theirs = both(-1)
    logp = float(ours.last.pop("logp")), float(theirs.last.pop("logp"))
    for number, (x, y) in enumerate(zip(ours.stream, theirs.stream, strict=True)):
        if difference("", "field", "", x, y).count:
            first = _first_difference(*(run.layer for run in both(number)))
            return GapSearch(row, number, first or _compared("layer", x, y), *logp)
    first = _first_difference(ours.last, theirs.last)
    if first is None and logp[0] != logp[1]:
        first = _compared("log-sum-exp", *(torch.tensor([x], dtype=torch.float64) for x in logp))
    return GapSearch(row, None, first, *logp)


def _first_difference(engine: Results, trainer: Results) -> Difference | None:
    """The first results, in the trainer's order, that both have and that differ."""
    for name, x in trainer.items():
        if name in engine:
            compared = _compared(name, engine[name].to(x.dtype), x)
            if compared.count:
                return compared
    return None


def _compared(name: str, engine: Tensor, trainer: Tensor) -> Difference:
    return difference("", "field", name, engine, trainer, _place)


def _place(index: tuple[int, ...]) -> str:
    return f"token {index[0]}" + (f", number {list(index[1:])}" if len(index) > 1 else "")


def _generated(parts: GeneratingParts, weights: trees.Tree, row: GapRow) -> Callable[[int], TracedPasses]:
    """The engine's passes, as a function of the layer whose results are wanted."""
    engine = parts.generator.engine
    model = parts.begin.model
    dtype = engine.weights.dtype
    mesh = parts.generator.mesh
    if packed_problem(model, mesh, dtype) is None:
        return lambda layer: _packed_run(model, weights, dtype, row, layer)
    backend = TorchBackend(model, mesh, dtype, parts.begin.layer, page_tokens(mesh.device.type))
    backend.load(filled(weights, engine.weights.layouts))
    return lambda layer: _torch_run(backend, row, layer)


def _passes(row: GapRow) -> list[tuple[int, int]]:
    """First and last token of each pass, that before the token in question being the last of all."""
    end = len(row.tokens) - 1
    prompt = min(row.prompt, end)
    starts = [*range(0, prompt, PREFILLED), *range(prompt, end), end]
    return list(itertools.pairwise(starts))


def _packed_run(model: Model, params: trees.Tree, dtype: torch.dtype, row: GapRow, layer: int) -> TracedPasses:
    """Passes of the compiled step."""
    sizes = model.abilities.compiled_step
    decoder = packed_decoder(sizes, params, dtype)
    pages = -(-len(row.tokens) // PackedBackend.page_tokens)
    cache: PagedKeyValues = decoder.init_cache(pages)
    tables_SP = torch.arange(pages, dtype=torch.int32)[None]
    tokens = torch.tensor(row.tokens)
    traces = []
    logits_1V = torch.empty(0)
    for start, end in _passes(row):
        count = end - start
        decoder.trace = empty_trace(decoder.sizes, layer, count, decoder.logits_dtype)
        positions = torch.arange(start, end)
        sequence = torch.zeros(count, dtype=torch.int64)
        drawn = torch.tensor([count - 1])
        logits_1V = decoder.forward(cache, tokens[start:end], positions, sequence, tables_SP, drawn)
        traces.append(decoder.trace)
    logp = decoder.sample(logits_1V, *_draw_of(logits_1V, row), row.temperature)[1]
    last = {"last norm": traces[-1].norm[:1, : decoder.sizes.embed], "logits": logits_1V, "logp": logp}
    whole = StepTrace(layer, torch.cat([x.stream for x in traces], 1), *(torch.cat(x) for x in _columns(traces)))
    return TracedPasses(list(whole.stream[..., : decoder.sizes.embed]), _named_results(whole, decoder.sizes), last)


def _columns(traces: Sequence[StepTrace]) -> Iterable[tuple[Tensor, ...]]:
    """The results of all passes, less the first two fields, by field."""
    return zip(*(trace[2:] for trace in traces), strict=True)


def _named_results(trace: StepTrace, sizes) -> Results:
    """Results of the compiled step by the names that the model gives them."""
    H, K = sizes.heads, sizes.kv_heads
    D, F = sizes.embed, sizes.mlp
    head = sizes.head
    q, k, v = trace.heads[..., :head].split((H, K, K), 1)
    normed_q, normed_k = trace.normed[..., :head].split((H, K), 1)
    turned_q, turned_k = trace.turned[..., :head].split((H, K), 1)
    return {
        "norm before the mixer": trace.attn_norm[:, :D],
        "q product": q,
        "k product": k,
        "v product": v,
        "q norm": normed_q,
        "k norm": normed_k,
        "rotation of q": turned_q,
        "rotation of k": turned_k,
        "attention": trace.attention[..., :head],
        "output product": trace.output[:, :D],
        "residual after the mixer": trace.middle[:, :D],
        "norm before the mlp": trace.mlp_norm[:, :D],
        "gate product": trace.gate[:, :F],
        "up product": trace.up[:, :F],
        "gate": trace.inner[:, :F],
        "down product": trace.down[:, :D],
        "residual after the mlp": trace.stream[max(trace.layer, 0), :, :D],
    }


class _Recorder:
    """A watcher of passes on this rank: the stream after each layer, and all results of one layer."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.number = 0  # of the layer that computes
        self.results: dict[str, list[Tensor]] = {}

    def __call__(self, name: str, x: Tensor) -> None:
        if name == "embedding":
            self.number = 0
        elif name == "layer":
            name = f"layer {self.number}"
            self.number += 1
        elif name != "last norm" and self.number != self.layer:
            return
        self.results.setdefault(name, []).append(x[0].detach().clone())

    def run(self, model: Model, mesh: Mesh, split: bool, last: Results, tokens: int) -> TracedPasses:
        """Results of all ranks, of the first `tokens` tokens. Collective.

        Args:
          split: whether tensor ranks share the residual stream.
          last: further results after all layers.
        """
        mine = {name: torch.cat(parts) for name, parts in self.results.items()}
        place = {axis: int(mesh.index(axis)) for axis in mesh.sizes}
        ranks = {
            (index["sequence"], index["tensor"]): results
            for index, results in gather_objects((place, mine), mesh)
            if not index["data"] and not index["expert"]
        }
        whole = {name: _whole(name, ranks, split, model)[:tokens] for name in mine}
        stream = [whole.pop(f"layer {number}") for number in range(model.config.layers)]
        return TracedPasses(stream, whole, {"last norm": whole.pop("last norm")[-1:], **last})


def _whole(name: str, ranks: Mapping[tuple[int, int], Results], split: bool, model: Model) -> Tensor:
    """Results of all tokens and heads, from the parts of ranks by their places on the axes sequence and tensor."""
    tensor = {t for _, t in ranks}
    lines = []
    for sequence in sorted({s for s, _ in ranks}):
        parts = [ranks[sequence, t][name] for t in sorted(tensor)]
        if name in BY_HEADS:
            lines.append(torch.cat(parts, 1))
        elif name in BY_INNER:
            lines.append(torch.cat(parts, -1))
        else:
            lines.append(torch.cat(parts) if split else parts[0])
    x = torch.cat(lines)
    if name not in BY_KEYS or model.abilities.cost is None:
        return x
    heads = max(layer.cached_heads for layer in model.abilities.cost.layers)
    return x[:, :: max(1, x.shape[1] // heads)]  # where several ranks use a key-value head, each of them has it


def _torch_run(backend: TorchBackend, row: GapRow, layer: int) -> TracedPasses:
    """The engine's passes by the model itself. Collective over "tensor"."""
    pages = -(-len(row.tokens) // backend.page_tokens)
    backend.resize(pages)
    table_SP = torch.arange(pages, dtype=torch.int32)[None]
    tokens = torch.tensor(row.tokens)
    recorder = _Recorder(layer)
    hidden_1D = torch.empty(0)
    with torch.inference_mode(), show_results(recorder):
        for start, end in _passes(row):
            work = PassWork(tokens[start:end], [end - start], [end], table_SP, [end - start - 1])
            hidden_1D = backend.forward(work)
        logits_1V = backend.logits(hidden_1D)
        source, noise = _draw_of(logits_1V, row)
        logp = backend.sample(hidden_1D, source, noise, Sampling(temperature=row.temperature), None)[1]
    last = {"logits": logits_1V, "logp": logp}
    return recorder.run(backend.model, backend.mesh, False, last, len(row.tokens) - 1)


def _draw_of(logits_1V: Tensor, row: GapRow) -> tuple[Tensor, Tensor]:
    """The row of logits, and the noise that lets the token be sampled."""
    p_V = (logits_1V[0].double() / row.temperature).softmax(-1)
    token = row.tokens[-1]
    return torch.zeros(1, dtype=torch.int64), (p_V[:token].sum() + p_V[token] / 2)[None]


def _trained(placed: Placed, params: trees.Tree, row: GapRow, layer: int) -> TracedPasses:
    """The trainer's pass over the row, packed alone. Collective."""
    count = len(row.tokens)
    padding = -count % placed.multiple
    tokens_1T = torch.tensor([[*row.tokens, *[0] * padding]])
    mask_1T = torch.zeros_like(tokens_1T, dtype=torch.bool)
    mask_1T[0, count - 1] = True
    batch = Batch(
        tokens=tokens_1T,
        positions=torch.tensor([[*range(count), *range(padding)]]),
        segments=torch.tensor([[1] * count + [0] * padding]),
        offsets=torch.tensor([0, count], dtype=torch.int32),
        mask=mask_1T,
    )
    recorder = _Recorder(layer)
    with torch.no_grad(), show_results(recorder):
        scores = placed.token_scores(params, batch, temperature=row.temperature)
    logits = torch.cat(gather_objects(placed.logits(params, batch), placed.mesh))[:1]
    last = {"logits": logits, "logp": scores.read("logp")[0, count - 1]}
    return recorder.run(placed.model, placed.mesh, placed.splits, last, count - 1)
