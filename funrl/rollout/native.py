"""The engine that is the training model itself: batched prefill, then one token for all rows a step.

Rows lie in a key-value cache whose slot is the token's position. Each prompt is prefilled once, whatever the number of
its samples. Rows that have finished leave the batch: the last of the others move into their places, so that what is
copied is at most what has finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.linear_logprob import project
from funrl.mesh.collectives import all_gather
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import GENERATE, layouts
from funrl.models import decoder
from funrl.models.config import Config, ModelError
from funrl.models.decoder import SINGLE, Cache
from funrl.rollout.completions import Completions, Sampling
from funrl.rollout.sampling import draw, uniform

PREFILL_TOKENS = 8192  # padded tokens in one forward pass over prompts
BLOCK = 32  # the part of the cache that is looked at grows by this many slots
NOISE_STEPS = 64  # noise is made for this many steps at a time
LOGITS = 1 << 26  # numbers in the logits of one draw
LOOK_EVERY = {"cpu": 1}  # steps between looks for finished rows; asking a GPU (8) makes the host wait for it


class Model(NamedTuple):
    """What a forward pass needs."""

    config: Config
    params: trees.Tree
    unembed_VD: Tensor
    mesh: Mesh
    layer: Callable | None


class Rows(NamedTuple):
    """Rows that are being completed, in the order of the cache."""

    numbers_R: Tensor  # which row of the `Completions` each one is
    positions_R1: Tensor  # of the token that was drawn last
    noise_RS: Tensor  # of the steps of this block
    done_R: Tensor  # bool, a stop token was drawn


class NativeEngine:
    """An `Engine` over `decoder.apply`; made by `native_engine`."""

    def __init__(self, config: Config, mesh: Mesh, dtype: torch.dtype, rows: Callable[[int], int], layer):
        self._config, self._mesh, self._dtype, self._layer = config, mesh, dtype, layer
        self._rows = rows
        self._model: Model | None = None
        self._layouts = layouts(decoder.shapes(config), decoder.axes(config), GENERATE, mesh.sizes)

    def load(self, named_weights: Iterable[tuple[str, Tensor]]) -> None:
        """Takes this rank's shards of all weights, in the layout of the table GENERATE.

        Tensors that have the engine's dtype and device already are kept, not copied.

        Raises:
          KeyError: a name is missing, unknown, or given twice.
          ModelError: a shape is not that of this rank's shard.
        """
        self._model = None
        params = trees.from_named(self._layouts, named_weights)
        for (name, x), layout in zip(trees.named(params), trees.leaves(self._layouts), strict=True):
            if tuple(x.shape) != layout.local_shape(self._mesh.rank):
                expected = list(layout.local_shape(self._mesh.rank))
                raise ModelError(f"{name} has shape {list(x.shape)}, rank {self._mesh.rank} holds {expected}")
        params = trees.map(lambda x: x.detach().to(self._mesh.device, self._dtype), params)
        unembed_VD = decoder.unembed(params)
        if unembed_VD.element_size() == 2 and not unembed_VD.is_cuda:
            unembed_VD = unembed_VD.float()  # `project` would convert it at every step
        self._model = Model(self._config, params, unembed_VD, self._mesh, self._layer)

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, first_prompt: int = 0
    ) -> Completions:
        """Completes every prompt; see `Engine`. All ranks of "tensor" call it together, with the same arguments.

        Raises:
          RuntimeError: no weights have been loaded.
          ValueError: a prompt is empty, too long, or has ids that are not in the vocabulary.
          FloatingPointError: the model's logits are not finite.
        """
        if self._model is None:
            raise RuntimeError("the engine has no weights: call load first")
        return generate(self._model, prompts, sampling, seed, first_prompt, self._rows)


def native_engine(
    config: Config,
    mesh: Mesh = SINGLE,
    dtype: torch.dtype = torch.float32,
    max_rows: int = 512,
    cache_bytes: int = 16 * 10**9,
    layer: Callable | None = None,
) -> NativeEngine:
    """An engine without weights yet.

    Args:
      config: of the model.
      mesh: weights, heads and logits are split over "tensor"; its other axes are the caller's.
      dtype: of weights and cache.
      max_rows: completions that are decoded together, at most.
      cache_bytes: what the keys and values of one rank may take; fewer rows are decoded together where it is little.
      layer: a replacement of `decoder.decoder_layer`, such as a compiled one.
    """
    one = trees.nbytes(decoder.init_cache(config, mesh, 1, 1, dtype, torch.device("meta")))

    def rows(length: int) -> int:
        return max(1, min(max_rows, cache_bytes // (one * length)))

    return NativeEngine(config, mesh, dtype, rows, layer)


@torch.no_grad()
def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    seed: int,
    first_prompt: int,
    rows_for: Callable[[int], int],
) -> Completions:
    """Completes every prompt.

    Args:
      prompts, sampling, seed, first_prompt: as in `Engine.generate`.
      rows_for: how many rows of a given number of slots are decoded together.
    """
    check_prompts(model.config, prompts, sampling)
    device, samples, steps = model.unembed_VD.device, sampling.samples, sampling.max_new_tokens
    shape = (len(prompts) * samples, steps)
    wide = torch.promote_types(model.unembed_VD.dtype, torch.float32)
    logp_RT, model_logp_RT = (torch.zeros(shape, dtype=wide, device=device) for _ in range(2))
    out = (torch.zeros(shape, dtype=torch.int64, device=device), logp_RT, model_logp_RT)
    # Prompts of similar length go together: they pad and look back alike.
    order = sorted(range(len(prompts)), key=lambda p: len(prompts[p]))
    todo = [p * samples + s for p in order for s in range(samples)]
    while todo:
        length = len(prompts[todo[-1] // samples]) + steps
        count = rows_for(length)
        chunk, todo = todo[-count:], todo[:-count]
        with torch.inference_mode():
            cache, hidden_RD = _prefill(model, prompts, [r // samples for r in chunk], length)
            positions_R1 = torch.tensor([[len(prompts[r // samples])] for r in chunk], device=device)
            numbers_R = torch.tensor(chunk, device=device)
            none = torch.zeros_like(numbers_R, dtype=torch.bool)
            rows = Rows(numbers_R, positions_R1, torch.empty(len(chunk), 0, device=device), none)
            _decode(model, cache, hidden_RD, rows, length - steps, sampling, (seed, first_prompt * samples), out)
    return finish(sampling, model.config.pad or 0, *out)


def check_prompts(config: Config, prompts: Sequence[Sequence[int]], sampling: Sampling) -> None:
    """Raises ValueError where a prompt cannot be completed by this model."""
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


def _prefill(model: Model, prompts: Sequence[Sequence[int]], chosen: list[int], length: int) -> tuple[Cache, Tensor]:
    """A cache of `length` slots with the chosen prompts in it, and the hidden state of each one's last token [R, D].

    Args:
      chosen: index of each row's prompt; rows of one prompt are neighbours, prompts grow in length.
    """
    device, dtype = model.params["embed"].device, model.params["embed"].dtype
    cache = decoder.init_cache(model.config, model.mesh, len(chosen), length, dtype, device)
    last, low = [], 0
    for group in _groups(chosen, [len(p) for p in prompts]):
        width = len(prompts[group[-1]])
        tokens_BT = torch.tensor([[*prompts[p], *[0] * (width - len(prompts[p]))] for p in group], device=device)
        member = {p: i for i, p in enumerate(group)}
        high = low + sum(p in member for p in chosen[low:])
        part = trees.map(lambda x, low=low, high=high: x[low:high], cache)
        once = high - low == len(group)
        new = part if once else decoder.init_cache(model.config, model.mesh, len(group), width, dtype, device)
        hidden_BTD, new = decoder.apply(
            model.config, model.params, tokens_BT, cache=new, mesh=model.mesh, layer=model.layer
        )
        ends_B = torch.tensor([len(prompts[p]) - 1 for p in group], device=device)
        hidden_BD = hidden_BTD[torch.arange(len(group), device=device), ends_B]
        if not once:
            source_R = torch.tensor([member[p] for p in chosen[low:high]], device=device)
            trees.map(lambda to, x, r=source_R, w=width: to[:, :w].copy_(x.index_select(0, r)), part, new)
            hidden_BD = hidden_BD.index_select(0, source_R)
        last.append(hidden_BD)
        low = high
    return cache, torch.cat(last)


def _groups(chosen: list[int], lengths: list[int]) -> list[list[int]]:
    """The distinct prompts, in order, in groups of at most PREFILL_TOKENS padded tokens."""
    groups: list[list[int]] = []
    for p in dict.fromkeys(chosen):
        if groups and (len(groups[-1]) + 1) * lengths[p] <= PREFILL_TOKENS:
            groups[-1].append(p)
        else:
            groups.append([p])
    return groups


def _decode(
    model: Model,
    cache: Cache,
    hidden_RD: Tensor,
    rows: Rows,
    longest: int,
    sampling: Sampling,
    noise_key: tuple[int, int],
    out: tuple[Tensor, Tensor, Tensor],
) -> None:
    """Draws until every row has ended.

    Args:
      cache: holds the prompts; it is given up.
      hidden_RD: of the last token of each prompt.
      rows: with the position of the first token to be drawn.
      longest: tokens of the longest prompt.
      noise_key: the seed, and the number of row 0 of the completions among all rows of the step.
      out: tokens, logp and model_logp of all rows [R, T], written in place.
    """
    device, limit = hidden_RD.device, sampling.max_new_tokens
    stop_K = torch.tensor(sampling.stop, dtype=torch.int64, device=device)
    look_every = LOOK_EVERY.get(device.type, 8)
    drawn: list[tuple[Tensor, ...]] = []
    wasted, reach, view = 0, 0, cache
    for step in range(limit):
        if not sampling.greedy and step % NOISE_STEPS == 0:
            steps_S = torch.arange(step, min(step + NOISE_STEPS, limit), device=device)
            rows = rows._replace(noise_RS=uniform(noise_key[0], rows.numbers_R + noise_key[1], steps_S))
        drawn.append(_draw(model, hidden_RD, rows.noise_RS, step % NOISE_STEPS, sampling))
        token_R = drawn[-1][0]
        if step + 1 == limit:
            break
        if sampling.stop:
            rows.done_R.logical_or_(_among(token_R, stop_K))
            if (step + 1) % look_every == 0:
                done = int(rows.done_R.sum())
                if done == len(token_R):
                    break
                wasted += done * look_every
                if wasted * 16 >= len(token_R):
                    _write(out, rows, step + 1, drawn)
                    drawn, wasted = [], 0
                    token_R, rows, cache = _drop_done(token_R, rows, cache, longest + step)
                    reach = 0
        if longest + step >= reach:
            reach = min(-(-(longest + step + 1) // BLOCK) * BLOCK, cache.keys[0].shape[1])
            view = decoder.cache_prefix(cache, reach)
        hidden_R1D, _ = decoder.apply(
            model.config,
            model.params,
            token_R.unsqueeze(1),
            rows.positions_R1,
            cache=view,
            mesh=model.mesh,
            layer=model.layer,
        )
        hidden_RD = hidden_R1D.squeeze(1)
        rows.positions_R1.add_(1)
    _write(out, rows, step + 1, drawn)


def _draw(model: Model, hidden_RD: Tensor, noise_RS: Tensor, at: int, sampling: Sampling) -> tuple[Tensor, ...]:
    """`draw` from the model's logits, over as many rows at once as their logits allow."""
    noise_R = None if sampling.greedy else noise_RS[:, at]
    count = max(1, LOGITS // model.config.vocab)
    parts = [
        draw(
            all_gather(project(hidden_RD[low : low + count], model.unembed_VD), model.mesh, "tensor", 1).contiguous(),
            None if noise_R is None else noise_R[low : low + count],
            sampling,
        )
        for low in range(0, len(hidden_RD), count)
    ]
    return parts[0] if len(parts) == 1 else tuple(torch.cat(x) for x in zip(*parts, strict=True))


def _drop_done(token_R: Tensor, rows: Rows, cache: Cache, length: int) -> tuple[Tensor, Rows, Cache]:
    """The rows that are not done. Those at the end move into the places of those that are.

    Args:
      length: slots of the cache that are in use.
    """
    alive_R = ~rows.done_R
    count = int(alive_R.sum())
    holes = (rows.done_R[:count]).nonzero().squeeze(1)
    movers = alive_R[count:].nonzero().squeeze(1) + count
    order = torch.arange(count, device=token_R.device).index_copy_(0, holes, movers)
    if len(holes):
        for x in trees.leaves(cache):
            x[holes, :length] = x[movers, :length]
    kept = Rows(*(x.index_select(0, order) for x in rows))
    return token_R.index_select(0, order), kept, trees.map(lambda x: x[:count], cache)


def _write(out: tuple[Tensor, ...], rows: Rows, end: int, drawn: list[tuple[Tensor, ...]]) -> None:
    """Puts what the steps up to `end` have drawn into the rows of `out`."""
    for x_RT, columns in zip(out, zip(*drawn, strict=True), strict=True):
        x_RT[rows.numbers_R, end - len(drawn) : end] = torch.stack(columns, 1)


def _among(tokens: Tensor, ids_K: Tensor) -> Tensor:
    return (tokens.unsqueeze(-1) == ids_K).any(-1)


def finish(sampling: Sampling, pad: int, tokens_RT: Tensor, logp_RT: Tensor, model_logp_RT: Tensor) -> Completions:
    """Cuts every row behind its first stop token, and all rows to the longest."""
    if not len(tokens_RT):
        return Completions(tokens_RT, tokens_RT.sum(1), logp_RT, model_logp_RT, tokens_RT.any(1))
    stopped_RT = _among(tokens_RT, torch.tensor(sampling.stop, dtype=torch.int64, device=tokens_RT.device))
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
