"""The contract of rollout engines: servers of requests whose weights can be replaced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh
from funrl.mesh.rules import Layout
from funrl.processes.heartbeat import beat
from funrl.rollout.requests import Completion, Request


@dataclass(frozen=True)
class WeightSpec:
    """The form in which an engine takes its weights.

    Attributes:
      names: for each weight of the model, its name and shape in the engine; neighbouring dims may be merged.
      layouts: of the model's weights on the devices of `mesh`.
      mesh: the engine's mesh.
      dtype: of the weights, except `weight_dtypes.WIDE`; an engine converts other dtypes.
      streamed: whether `Engine.load` copies whole weights one by one and keeps none, so that the caller should create
        them a bucket at a time.
      adapters: whether they are the factors of an adapter alone; the engine has its base.
      float8: whether the engine quantizes weights and activations to 8 bits for its products.
      signed_zeros: whether an engine that shows a weight shows the sign of a 0 in it.
      held: layouts of what an engine that splits weights itself holds of them; None: `layouts`.
    """

    names: Mapping[str, tuple[str, tuple[int, ...]]]
    layouts: trees.Tree
    mesh: Mesh
    dtype: torch.dtype
    streamed: bool = False
    adapters: bool = False
    float8: bool = False
    signed_zeros: bool = True
    held: trees.Tree = None

    @property
    def held_layouts(self) -> dict[str, Layout]:
        """Layout of what the engine holds of each weight, by name."""
        return dict(trees.named(self.layouts if self.held is None else self.held))

    def named(self, params: trees.Tree) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's shards of the model's weights, laid out as `layouts`, as `Engine.load` takes them."""
        for name, x in trees.named(params):
            there, shape = self.names[name]
            yield there, x if len(shape) == x.ndim else x.reshape(shape)


class EngineCost(NamedTuple):
    """Memory of an engine's keys and values, and counts of its work since construction.

    Attributes:
      cache_bytes: size of the cache of keys and values on a rank; it is never exceeded.
      page_tokens: tokens of a page.
      pages: number of pages; without cells of `cache_bytes / pages` bytes each.
      used_pages: pages of unfinished requests.
      peak_pages: largest number of pages in use at once so far.
      rows: bound on the completions that are sampled together.
      passes: forward passes.
      prefilled, cached, decoded: prompt tokens computed, prompt tokens found in the cache, and tokens sampled.
      preempted: requests whose pages were taken away, and which are recomputed.
      drafted, accepted: drafted tokens, and the number of them that were accepted; see `NativeOptions`.
      recomputed: tokens that were computed again: of preempted requests, and of prompts whose begin an earlier request
        had computed (`Request.computed`) and the cache did not hold any more. An engine that is not native counts none.
      cells: number of states of a fixed size in the cache, snapshots included.
      uncaptured: passes that ran eagerly, as no pass of their kind can be captured as a CUDA graph.
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
    recomputed: int = 0
    cells: int = 0
    uncaptured: int = 0


class Engine(Protocol):
    """A server of requests: a model with weights that completes prompts.

    If its mesh splits a model over several ranks ("tensor"), all of them make the same calls in the same order.

    Attributes:
      weights: the form in which it takes weights.
      version: version of its weights; None: it has no weights yet.
      paused: whether `step` does nothing.
    """

    @property
    def weights(self) -> WeightSpec: ...

    @property
    def version(self) -> int | None: ...

    @property
    def paused(self) -> bool: ...

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the weights. The old ones are released before the first new one is requested.

        Unfinished requests continue with the new weights: their tokens stay, and their keys and values are recomputed.

        Args:
          named_weights: every weight exactly once, in the form `weights`.
          version: number of these weights, such as the trainer's number of updates.
        """
        ...

    def held_weights(self) -> Iterable[tuple[str, Tensor | int | None]]:
        """Weights that the engine computes with, each once, by the names that `load` takes and in `held_layouts`.

        None stands for a weight that cannot be read back, on the same weights on all ranks, and an int for the digest
        of a weight in another process, of `certificate.digest`.
        """
        ...

    def take_digests(self, digests: Mapping[str, Tensor]) -> None:
        """Take digests of this rank's parts of its weights by name, just read, so that it need not read them again.

        Completions record by them which weights sampled each token.
        """
        ...

    def check(self, requests: Sequence[Request]) -> None:
        """Raise what `submit` would raise, without taking the requests."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests. Consecutive requests of one prompt share its prefill.

        Raises:
          ValueError: a prompt is empty, too long for the model or the cache, or has ids that are not in the vocabulary;
            a number is in use already. Then no request is taken.
        """
        ...

    def step(self) -> list[Completion]:
        """Do some work, such as one token of each unfinished request; returns the completions that ended.

        Raises:
          RuntimeError: no weights have been loaded.
          LogitsError: the model's logits are not finite for some requests, which have ended; others continue.
        """
        ...

    def unfinished(self) -> int:
        """Number of requests that are not finished yet."""
        ...

    def sampled(self, number: int, begin: int = 0) -> list[int]:
        """Token ids of an unfinished request's completion that the host knows, from the `begin`-th on."""
        ...

    def room(self) -> int:
        """Estimated number of further requests that would begin at once; 0 while requests wait."""
        ...

    def reserve(self, tokens: int) -> None:
        """Keep the keys and values of so many tokens of ended requests, which later requests continue, where it can.

        The cache may grow for them, within its bound. Those of requests that ended long ago are evicted first, and
        all of them before those of unfinished requests. An engine whose cache has a fixed size ignores it.
        """
        ...

    def cancel(self, numbers: Iterable[int]) -> list[Completion]:
        """Cancel requests; returns their completions so far, with finish "cancelled" where they had not ended.

        Other numbers are ignored.
        """
        ...

    def pause(self) -> None:
        """Make `step` do nothing until `resume`, and free the memory of keys and values.

        Requests are kept, and further ones are accepted; keys and values are recomputed.
        """
        ...

    def resume(self) -> None:
        """Allow `step` again after `pause`."""
        ...

    def cost(self) -> EngineCost:
        """Memory of its cache, and counts of its work."""
        ...


@contextlib.contextmanager
def onload_engine(engine: Engine) -> Iterator[None]:
    """Resume the engine for the duration of the context or the decorated function, then pause it."""
    engine.resume()
    try:
        yield
    finally:
        engine.pause()


class Callbacks(NamedTuple):
    """Callbacks while an engine completes requests.

    Attributes:
      iterated: called after each iteration of the engine.
      finished: called with each completion as soon as it ends.
    """

    iterated: Callable[[], None] = lambda: None
    finished: Callable[[Completion], None] = lambda completion: None


NO_CALLBACKS = Callbacks()


def check_running(engine: Engine) -> None:
    """Raise RuntimeError if an engine whose completions are waited for is paused: it would never finish."""
    if engine.paused:
        raise RuntimeError("the engine is paused: call resume first")


def complete(engine: Engine, requests: Sequence[Request], callbacks: Callbacks = NO_CALLBACKS) -> list[Completion]:
    """Complete requests; returns completions in the order of the requests.

    Args:
      engine: an engine with weights and no other unfinished request.
      requests: what to complete.
      callbacks: receives what happens.

    Raises:
      ValueError, RuntimeError, FloatingPointError: as in `Engine.submit` and `Engine.step`. The engine then has none
        of these unfinished requests.
    """
    completions: dict[int, Completion] = {}
    engine.submit(requests)
    try:
        while engine.unfinished():
            check_running(engine)
            beat()
            newest = engine.step()
            callbacks.iterated()
            for done in newest:
                callbacks.finished(done)
                completions[done.number] = done
    finally:
        engine.cancel(request.number for request in requests)
    return [completions[request.number] for request in requests]
