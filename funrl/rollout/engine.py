"""The contract of rollout engines: servers of requests with weights that are replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.processes.heartbeat import beat
from funrl.rollout.requests import Completion, Request


@dataclass(frozen=True)
class WeightSpec:
    """The form in which an engine takes weights.

    Attributes:
      names: for each weight of the model, its name and shape there; some neighbouring dims may be merged.
      layouts: of the model's weights, on the devices of `mesh`.
      mesh: the devices.
      dtype: of the weights, but for `weight_dtypes.WIDE`; an engine converts others.
      streamed: whether `Engine.load` takes whole weights one by one and keeps none of them, so that they are best made
        a bucket at a time.
    """

    names: Mapping[str, tuple[str, tuple[int, ...]]]
    layouts: trees.Tree
    mesh: Mesh
    dtype: torch.dtype
    streamed: bool = False

    def named(self, params: trees.Tree) -> Iterator[tuple[str, Tensor]]:
        """Weights of the model, this rank's shards in `layouts`, as `Engine.load` takes them."""
        for name, x in trees.named(params):
            there, shape = self.names[name]
            yield there, x if len(shape) == x.ndim else x.reshape(shape)


class EngineCost(NamedTuple):
    """Memory that an engine's keys and values take, and what it has done since it was made.

    Attributes:
      cache_bytes: of keys and values on a rank; it is never exceeded.
      page_tokens: tokens of a page.
      pages: in all, each `cache_bytes / pages`.
      used_pages: by requests in flight; the most so far is `peak_pages`.
      peak_pages: the most that were in use at once.
      rows: completions that are sampled together at most.
      passes: forward passes.
      prefilled, cached, decoded: prompt tokens that were computed, prompt tokens that were found in the cache, and
        tokens that were sampled.
      preempted: requests that were put back because there were no pages, and computed again.
      drafted, accepted: tokens of drafts, and those of them that were sampled; see `native_engine`.
    """

    cache_bytes: int
    page_tokens: int
    pages: int
    used_pages: int
    peak_pages: int
    rows: int
    passes: int
    prefilled: int
    cached: int
    decoded: int
    preempted: int
    drafted: int = 0
    accepted: int = 0


class Engine(Protocol):
    """A server of requests: a model with weights that completes prompts.

    Where its mesh splits a model over several ranks ("tensor"), all of them make the same calls in the same order.

    Attributes:
      weights: the form in which it takes weights.
      version: of the weights that it has; None: it has none yet.
      paused: whether `step` does nothing.
    """

    @property
    def weights(self) -> WeightSpec: ...

    @property
    def version(self) -> int | None: ...

    @property
    def paused(self) -> bool: ...

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the weights. The old ones are let go before the first new one is asked for.

        Requests in flight go on with the new weights: what they have written stays, and is computed again.

        Args:
          named_weights: every weight exactly once, in the form `weights`.
          version: number of the weights, such as that of the trainer's update.
        """
        ...

    def held_weights(self) -> Iterable[tuple[str, Tensor | None]]:
        """Weights that the engine computes with, each once and in the form in which `load` takes them; None instead of
        one that cannot be read back, on all ranks alike."""
        ...

    def check(self, requests: Sequence[Request]) -> None:
        """Raise what `submit` would raise, and take nothing."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests. Those of one prompt that stand together share its prefill.

        Raises:
          ValueError: a prompt is empty, too long for the model or the cache, or has ids that are not in the vocabulary;
            a number is in flight already. Then none is taken.
        """
        ...

    def step(self) -> list[Completion]:
        """Do some work, such as one token of each request in flight; the completions that it finished.

        Raises:
          RuntimeError: no weights have been loaded.
          FloatingPointError: the model's logits are not finite.
        """
        ...

    def in_flight(self) -> int:
        """Number of requests that are not finished yet."""
        ...

    def room(self) -> int:
        """Number of further requests that it would begin at once, as far as it can tell; 0 while some wait."""
        ...

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Give up requests; what they have written so far, finish "cancelled" where they had not ended yet.

        Numbers that are not in flight are left alone.
        """
        ...

    def pause(self) -> None:
        """Let `step` do nothing until `resume`, and give back the memory of keys and values.

        Requests stay, and are still taken; what they have written is computed again.
        """
        ...

    def resume(self) -> None:
        """Let `step` work again."""
        ...

    def cost(self) -> EngineCost:
        """Memory of its cache, and counts of its work."""
        ...


@contextlib.contextmanager
def awake(engine: Engine) -> Iterator[None]:
    """The engine at work for as long as the context lasts, or a function that it decorates; paused behind it."""
    engine.resume()
    try:
        yield
    finally:
        engine.pause()


def awake_step(engine: Engine) -> list[Completion]:
    """A step of an engine that others wait for.

    Raises:
      RuntimeError: it is paused, and would never be done.
    """
    if engine.paused:
        raise RuntimeError("the engine is paused: call resume first")
    beat()
    return engine.step()


def complete(
    engine: Engine, requests: Sequence[Request], finished: Callable[[Completion], None] | None = None
) -> list[Completion]:
    """Complete requests, in their order.

    Args:
      engine: one with weights, and nothing else in flight.
      finished: told each completion as soon as it is there.

    Raises:
      ValueError, RuntimeError, FloatingPointError: as `Engine.submit` and `Engine.step`. The engine then has none of
        these requests in flight.
    """
    completions: dict[int, Completion] = {}
    engine.submit(requests)
    try:
        while engine.in_flight():
            for done in awake_step(engine):
                completions[done.number] = done
                if finished is not None:
                    finished(done)
    finally:
        engine.cancel(request.number for request in requests)
    return [completions[request.number] for request in requests]
