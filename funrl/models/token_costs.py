"""Costs of tokens, of pairs of tokens and of caches, from the sizes of a model. Nothing here imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class LayerCost(NamedTuple):
    """Sizes by which the time and the memory of one layer grow; numbers of a token, before tensor ranks split them.

    Attributes:
      queries: numbers of its queries, in all heads; each takes 4 FLOPs forward for a pair of tokens.
      keys: numbers of its keys, and as many of its values, as they are sent to ranks that share a row's tokens.
      projected: numbers of queries and keys as training makes them.
      normed: whether queries and keys are normalized.
      window: tokens that a token sees at most; None: all of its sequence.
      cached: numbers of it in the cache.
      cached_heads: ranks that can share what is cached, each a part of it; 1: all have the whole.
      state: numbers of a sequence in the cache, of a fixed size, in float32 or wider.
      state_heads: ranks that can share these, each a part of it.
      passed: numbers of a fixed size, in float32 or wider, that ranks that share a row's tokens gather from each.
      inner: numbers inside the mlp that it meets.
      experts: in all; 0: the mlp is dense.
      chosen: experts that it goes to.
      expert_mlp: inner size of one expert.
    """

    queries: int = 0
    keys: int = 0
    projected: int = 0
    normed: bool = False
    window: int | None = None
    cached: int = 0
    cached_heads: int = 1
    state: int = 0
    state_heads: int = 1
    passed: int = 0
    inner: int = 0
    experts: int = 0
    chosen: int = 0
    expert_mlp: int = 0


@dataclass(frozen=True)
class ModelCost:
    """Functions of a model's sizes that give what its tokens, pairs of tokens and caches cost.

    Attributes:
      embed: size D of hidden states.
      layers: the layers' own.
      looked_up: parameters, besides the embedding, that a token looks up as a row instead of multiplying.
    """

    embed: int
    layers: tuple[LayerCost, ...]
    looked_up: int = 0

    @property
    def queries(self) -> int:
        """Elements of a token's queries in all layers: a quarter of the FLOPs that a pair of tokens takes forward."""
        return sum(layer.queries for layer in self.layers)

    @property
    def expert_parameters(self) -> int:
        """Parameters of all experts of all layers."""
        return sum(3 * layer.experts * layer.expert_mlp * self.embed for layer in self.layers)

    @property
    def window(self) -> int | None:
        """Tokens that a token sees at most, where that is the same in all layers; None: it is not, or all tokens."""
        windows = {layer.window for layer in self.layers}
        return windows.pop() if len(windows) == 1 else None

    def used_parameters(self, parameters: int) -> int:
        """Parameters that multiply a token: of the experts, its own."""
        idle = sum(3 * (layer.experts - layer.chosen) * layer.expert_mlp * self.embed for layer in self.layers)
        return parameters - idle - self.looked_up

    def pair_share(self, parameters: int) -> float:
        """FLOPs of attention for one pair of tokens, divided by the FLOPs of everything else for one token.

        Args:
          parameters: of the model.
        """
        return 4 * self.queries / (2 * self.used_parameters(parameters))

    def cached(self, tensor: int = 1) -> float:
        """Cached elements per token over all layers, on one of the ranks that share the heads."""
        return sum(layer.cached / min(tensor, layer.cached_heads) for layer in self.layers)

    def state(self, tensor: int = 1) -> float:
        """Elements of fixed size per sequence in the cache of all layers, on a rank that shares the heads."""
        return sum(layer.state / min(tensor, layer.state_heads) for layer in self.layers)
