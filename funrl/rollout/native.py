"""The engine that is the training model itself: batched prefill, then one token of every row a step.

Rows are in a key-value cache whose slot is the token's position. Each prompt is prefilled once, whatever the number of
its samples. Finished rows leave the batch: the last unfinished ones move into their places, so that no more is copied
than has finished.

`prefill`, `draw_tokens` and `decode_step` are the three computations of generation; a cost estimate traces them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.linear_logprob import project
from funrl.mesh.collectives import all_gather
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.mesh.rules import GENERATE, layouts
from funrl.models.config import Config, ModelError
from funrl.models.model import Inputs, Layer, Model, cache_prefix
from funrl.rollout.completions import Completions, Sampling, WeightSpec
from funrl.rollout.sampling import sample_tokens, uniform

PREFILL_TOKENS = 8192  # padded tokens in one forward pass over prompts
CACHE_BLOCK = 32  # the part of the cache that attention reads grows by this many slots
NOISE_STEPS = 64  # noise is made for this many steps at a time
LOGITS = 1 << 26  # numbers in the logits of one draw
LOOK_EVERY = {"cpu": 1}  # steps between looks for finished rows; asking a GPU (8) makes the host wait for it


class LoadedModel(NamedTuple):
    """A model with this rank's weights in the layouts to generate in."""

    model: Model
    params: trees.Tree
    unembed_VD: Tensor
    mesh: Mesh
    layer: Layer | None


class DecodeState(NamedTuple):
    """Rows that are being completed, in the order of the cache.

    Attributes:
      cache: keys and values, a tree of [R, S, ...].
      prefix: a view of its slots that attention reads.
      reach: slots of `prefix`.
      longest: tokens of the longest row.
      hidden_RD: hidden state of the last token of each row.
      positions_R1: int64 position of the next token of each row.
      numbers_R: int64, the row of the `Completions` that each one is.
      noise_RS: of the steps of this block.
      done_R: bool, a stop token was drawn.
    """

    cache: trees.Tree
    prefix: trees.Tree
    reach: int
    longest: int
    hidden_RD: Tensor
    positions_R1: Tensor
    numbers_R: Tensor
    noise_RS: Tensor
    done_R: Tensor


class NativeEngine:
    """An `Engine` over a `Model`; made by `native_engine`.

    Attributes:
      weights, version: as in `Engine`.
      rows: `(slots)` -> the number of rows of so many tokens that are decoded together.
    """

    def __init__(self, model: Model, weights: WeightSpec, rows: Callable[[int], int], layer: Layer | None):
        self.weights, self.rows = weights, rows
        self.version: int | None = None
        self._model, self._layer = model, layer
        self._loaded: LoadedModel | None = None

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Take this rank's shards of all weights; see `Engine`.

        Tensors that have the engine's dtype and device already are kept, not copied.

        Raises:
          KeyError: a name is missing, unknown, or given twice.
          ModelError: a shape is not that of this rank's shard.
        """
        self._loaded, self.version = None, None
        mesh, dtype = self.weights.mesh, self.weights.dtype
        params = trees.from_named(self.weights.layouts, named_weights)
        for (name, x), layout in zip(trees.named(params), trees.leaves(self.weights.layouts), strict=True):
            if tuple(x.shape) != layout.local_shape(mesh.rank):
                expected = list(layout.local_shape(mesh.rank))
                raise ModelError(f"{name} has shape {list(x.shape)}, rank {mesh.rank} holds {expected}")
        params = trees.map(lambda x: x.detach().to(mesh.device, dtype), params)
        self._loaded, self.version = loaded_model(self._model, params, mesh, self._layer), version

    def held_weights(self) -> Iterator[tuple[str, Tensor]]:
        """This rank's shards of all weights; see `Engine`.

        Raises:
          RuntimeError: no weights have been loaded.
        """
        if self._loaded is None:
            raise RuntimeError("the engine has no weights: call load first")
        return self.weights.named(self._loaded.params)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, first_prompt: int = 0
    ) -> Completions:
        """Complete every prompt; see `Engine`. All ranks of "tensor" call it together, with the same arguments.

        Raises:
          RuntimeError: no weights have been loaded.
          ValueError: a prompt is empty, too long, or has ids that are not in the vocabulary.
          FloatingPointError: the model's logits are not finite.
        """
        if self._loaded is None:
            raise RuntimeError("the engine has no weights: call load first")
        return complete(self._loaded, prompts, sampling, seed, first_prompt, self.rows)


def native_engine(
    model: Model,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype = torch.float32,
    max_rows: int = 512,
    cache_bytes: int = 16 * 10**9,
    layer: Layer | None = None,
) -> NativeEngine:
    """An engine without weights yet.

    Args:
      model: a model with an unembedding.
      mesh: weights, heads and logits are split over "tensor"; its other axes are the caller's.
      dtype: of weights and cache.
      max_rows: bound on the completions that are decoded together.
      cache_bytes: bound on the keys and values of one rank; where it is small, fewer rows are decoded together.
      layer: a replacement of `model.layer`, such as a compiled one.

    Raises:
      ModelError: the model has a value head instead of an unembedding.
    """
    if model.unembed is None:
        raise ModelError("a model with a value head cannot generate: it has no unembedding")
    one = trees.nbytes(model.init_cache(mesh, 1, 1, dtype, torch.device("meta")))

    def rows(slots: int) -> int:
        return max(1, min(max_rows, cache_bytes // (one * slots)))

    names = {name: (name, tuple(x.shape)) for name, x in trees.named(model.shapes)}
    placed = layouts(model.shapes, model.axes, GENERATE, mesh.sizes)
    return NativeEngine(model, WeightSpec(names, placed, mesh, dtype), rows, layer)


def loaded_model(model: Model, params: trees.Tree, mesh: Mesh = SINGLE, layer: Layer | None = None) -> LoadedModel:
    """A model with this rank's weights, ready to generate."""
    assert model.unembed is not None
    unembed_VD = model.unembed(params)
    if unembed_VD.element_size() == 2 and not unembed_VD.is_cuda:
        unembed_VD = unembed_VD.float()  # `project` would convert it at every step
    return LoadedModel(model, params, unembed_VD, mesh, layer)


@torch.no_grad()
def complete(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int,
    first_prompt: int,
    rows_for: Callable[[int], int],
) -> Completions:
    """Complete every prompt.

    Args:
      prompts, sampling, seed, first_prompt: as in `Engine.generate`.
      rows_for: as `NativeEngine.rows`.
    """
    config, samples = loaded.model.config, sampling.samples
    check_token_prompts(config, prompts, sampling)
    shape, device = (len(prompts) * samples, sampling.max_new_tokens), loaded.unembed_VD.device
    wide = torch.promote_types(loaded.unembed_VD.dtype, torch.float32)
    logp_RT, model_logp_RT = (torch.zeros(shape, dtype=wide, device=device) for _ in range(2))
    out = (torch.zeros(shape, dtype=torch.int64, device=device), logp_RT, model_logp_RT)
    # Prompts of similar length go together: they pad and look back alike.
    order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
    todo = [p * samples + s for p in order for s in range(samples)]
    while todo:
        count = rows_for(len(prompts[todo[-1] // samples]) + sampling.max_new_tokens)
        chunk, todo = todo[-count:], todo[:-count]
        # Nothing here names a state, so that a chunk's cache is freed before the next one's is made.
        _complete(loaded, prompts, chunk, sampling, (seed, first_prompt * samples), out)
    return cut_completions(sampling, config.pad or 0, *out)


def check_token_prompts(config: Config, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Raise ValueError where a prompt cannot be completed by this model."""
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; a completion needs at least one token before it, such as bos")
        if len(prompt) + sampling.max_new_tokens > config.max_positions:
            raise ValueError(
                f"prompt {i} has {len(prompt)} tokens; with max_new_tokens={sampling.max_new_tokens} that is more than "
                f"the model's {config.max_positions} positions"
            )
        if min(prompt) < 0 or max(prompt) >= config.vocab:
            wrong = next(t for t in prompt if not 0 <= t < config.vocab)
            raise ValueError(f"prompt {i} has token {wrong}; the vocabulary has {config.vocab}")
    wrong = [t for t in sampling.stop if not 0 <= t < config.vocab]
    if wrong:
        raise ValueError(f"stop has token {wrong[0]}; the vocabulary has {config.vocab}")


def prefill(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], rows: Sequence[int], sampling: Sampling
) -> DecodeState:
    """The state of rows before their first token, with a cache for all the tokens that they may have.

    Args:
      prompts: all of them.
      rows: numbers of the rows to complete; row r completes prompt `r // sampling.samples`. Rows of one prompt are
        neighbours, and prompts grow in length.
    """
    device, dtype = loaded.params["embed"].device, loaded.params["embed"].dtype
    chosen = [r // sampling.samples for r in rows]
    longest = len(prompts[chosen[-1]])
    slots = longest + sampling.max_new_tokens
    cache = loaded.model.init_cache(loaded.mesh, len(rows), slots, dtype, device)
    hidden, low = [], 0
    for group in _groups(chosen, [len(p) for p in prompts]):
        member = {p: i for i, p in enumerate(group)}
        source = [member[p] for p in chosen[low:] if p in member]
        high = low + len(source)
        part = trees.map(lambda x, low=low, high=high: x[low:high], cache)
        hidden.append(_prefill_group(loaded, [prompts[p] for p in group], source, part))
        low = high
    numbers_R = torch.tensor(rows, device=device)
    return DecodeState(
        cache=cache,
        prefix=cache,
        reach=0,
        longest=longest,
        hidden_RD=torch.cat(hidden),
        positions_R1=torch.tensor([[len(prompts[p])] for p in chosen], device=device),
        numbers_R=numbers_R,
        noise_RS=torch.empty(len(rows), 0, device=device),
        done_R=torch.zeros_like(numbers_R, dtype=torch.bool),
    )


def _prefill_group(
    loaded: LoadedModel, prompts: Sequence[Sequence[int]], source: list[int], part: trees.Tree
) -> Tensor:
    """Fill part of a cache with prompts; the hidden state of each row's last token, [R, D].

    Args:
      prompts: distinct ones, in the order of the rows.
      source: the prompt of each row.
      part: the rows' part of the cache.
    """
    device, dtype = loaded.params["embed"].device, loaded.params["embed"].dtype
    width = len(prompts[-1])
    tokens_BT = torch.tensor([[*p, *[0] * (width - len(p))] for p in prompts], device=device)
    once = len(source) == len(prompts)
    cache = part if once else loaded.model.init_cache(loaded.mesh, len(prompts), width, dtype, device)
    hidden_BTD, new, _ = loaded.model.apply(loaded.params, Inputs(tokens_BT), loaded.mesh, cache, loaded.layer)
    ends_B = torch.tensor([len(p) - 1 for p in prompts], device=device)
    hidden_BD = hidden_BTD[torch.arange(len(prompts), device=device), ends_B]
    if once:
        return hidden_BD
    source_R = torch.tensor(source, device=device)
    trees.map(lambda to, x: to[:, :width].copy_(x.index_select(0, source_R)), part, new)
    return hidden_BD.index_select(0, source_R)


def _groups(chosen: list[int], lengths: list[int]) -> list[list[int]]:
    """The distinct prompts, in order, in groups of at most PREFILL_TOKENS padded tokens."""
    groups: list[list[int]] = []
    for p in dict.fromkeys(chosen):
        if groups and (len(groups[-1]) + 1) * lengths[p] <= PREFILL_TOKENS:
            groups[-1].append(p)
        else:
            groups.append([p])
    return groups


def draw_tokens(
    loaded: LoadedModel, hidden_RD: Tensor, noise_R: Tensor | None, sampling: Sampling
) -> tuple[Tensor, Tensor, Tensor]:
    """`sample_tokens` from the model's logits, over as many rows at once as their logits allow."""
    count = max(1, LOGITS // loaded.model.config.vocab)
    parts = [
        sample_tokens(
            all_gather(project(hidden_RD[low : low + count], loaded.unembed_VD), loaded.mesh, "tensor", 1).contiguous(),
            None if noise_R is None else noise_R[low : low + count],
            sampling,
        )
        for low in range(0, len(hidden_RD), count)
    ]
    if len(parts) == 1:
        return parts[0]
    token_R, logp_R, model_logp_R = (torch.cat(x) for x in zip(*parts, strict=True))
    return token_R, logp_R, model_logp_R


def decode_step(loaded: LoadedModel, state: DecodeState, token_R: Tensor) -> DecodeState:
    """The state with one more token in every row. The cache is written in place."""
    prefix, reach, longest = state.prefix, state.reach, state.longest + 1
    if longest > reach:
        reach = min(-(-longest // CACHE_BLOCK) * CACHE_BLOCK, trees.leaves(state.cache)[0].shape[1])
        prefix = cache_prefix(state.cache, reach)
    inputs = Inputs(token_R.unsqueeze(1), state.positions_R1)
    hidden_R1D, prefix, _ = loaded.model.apply(loaded.params, inputs, loaded.mesh, prefix, loaded.layer)
    return state._replace(
        prefix=prefix,
        reach=reach,
        longest=longest,
        hidden_RD=hidden_R1D.squeeze(1),
        positions_R1=state.positions_R1 + 1,
    )


@torch.inference_mode()
def _complete(
    loaded: LoadedModel,
    prompts: Sequence[Sequence[int]],
    chunk: list[int],
    sampling: Sampling,
    noise_key: tuple[int, int],
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Complete the rows of one chunk.

    Args:
      prompts, chunk, sampling: as in `prefill`.
      noise_key: the seed, and the number of row 0 of the completions among all rows of the step.
      out: tokens, logp and model_logp of all rows [R, T], written in place.
    """
    state, limit = prefill(loaded, prompts, chunk, sampling), sampling.max_new_tokens
    device = state.hidden_RD.device
    stop_K = torch.tensor(sampling.stop, dtype=torch.int64, device=device)
    look_every = LOOK_EVERY.get(device.type, 8)
    drawn: list[tuple[Tensor, ...]] = []
    wasted = 0
    for step in range(limit):
        if not sampling.greedy and step % NOISE_STEPS == 0:
            steps_S = torch.arange(step, min(step + NOISE_STEPS, limit), device=device)
            state = state._replace(noise_RS=uniform(noise_key[0], state.numbers_R + noise_key[1], steps_S))
        noise_R = None if sampling.greedy else state.noise_RS[:, step % NOISE_STEPS]
        drawn.append(draw_tokens(loaded, state.hidden_RD, noise_R, sampling))
        token_R = drawn[-1][0]
        if step + 1 == limit:
            break
        if sampling.stop:
            state = state._replace(done_R=state.done_R | _is_any(token_R, stop_K))
            if (step + 1) % look_every == 0:
                done = int(state.done_R.sum())
                if done == len(token_R):
                    break
                wasted += done * look_every
                if wasted * 16 >= len(token_R):
                    _write(out, state.numbers_R, step + 1, drawn)
                    drawn, wasted = [], 0
                    token_R, state = _drop_done(token_R, state)
        state = decode_step(loaded, state, token_R)
    _write(out, state.numbers_R, step + 1, drawn)


def _drop_done(token_R: Tensor, state: DecodeState) -> tuple[Tensor, DecodeState]:
    """The rows that are not done. The last of them move into the places of those that are."""
    alive_R = ~state.done_R
    count = int(alive_R.sum())
    holes = (state.done_R[:count]).nonzero().squeeze(1)
    movers = alive_R[count:].nonzero().squeeze(1) + count
    order = torch.arange(count, device=token_R.device).index_copy_(0, holes, movers)
    if len(holes):
        for x in trees.leaves(state.cache):
            x[holes, : state.longest] = x[movers, : state.longest]
    cache = trees.map(lambda x: x[:count], state.cache)
    of_rows = ("hidden_RD", "positions_R1", "numbers_R", "noise_RS", "done_R")
    rows = {name: getattr(state, name).index_select(0, order) for name in of_rows}
    return token_R.index_select(0, order), state._replace(cache=cache, prefix=cache, reach=0, **rows)


def _write(out: tuple[Tensor, ...], numbers_R: Tensor, end: int, drawn: list[tuple[Tensor, ...]]) -> None:
    """Put the draws of the steps up to `end` into their rows of `out`."""
    for x_RT, columns in zip(out, zip(*drawn, strict=True), strict=True):
        x_RT[numbers_R, end - len(drawn) : end] = torch.stack(columns, 1)


def _is_any(tokens: Tensor, ids_K: Tensor) -> Tensor:
    return (tokens.unsqueeze(-1) == ids_K).any(-1)


def cut_completions(
    sampling: Sampling, pad: int, tokens_RT: Tensor, logp_RT: Tensor, model_logp_RT: Tensor
) -> Completions:
    """Completions cut behind their first stop token, padded to the longest."""
    if not len(tokens_RT):
        return Completions(tokens_RT, tokens_RT.sum(1), logp_RT, model_logp_RT, tokens_RT.any(1))
    stopped_RT = _is_any(tokens_RT, torch.tensor(sampling.stop, dtype=torch.int64, device=tokens_RT.device))
    finished_R = stopped_RT.any(1)
    lengths_R = torch.where(finished_R, stopped_RT.int().argmax(1) + 1, tokens_RT.shape[1])
    width = int(lengths_R.max())
    beyond_RT = torch.arange(width, device=tokens_RT.device) >= lengths_R.unsqueeze(1)
    logp_RT, model_logp_RT = (x[:, :width].masked_fill(beyond_RT, 0) for x in (logp_RT, model_logp_RT))
    if not torch.isfinite(model_logp_RT).all():
        row, step = (~torch.isfinite(model_logp_RT)).nonzero()[0].tolist()
        raise FloatingPointError(
            f"the model's logits are not finite at token {step} of completion {row}: its weights are damaged, or it "
            "has diverged, which a lower --lr may prevent"
        )
    tokens_RT = tokens_RT[:, :width].masked_fill(beyond_RT, pad)
    return Completions(tokens_RT, lengths_R, logp_RT, model_logp_RT, finished_R)
