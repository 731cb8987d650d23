"""Sampling parameters, completions, and the protocol of rollout engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling: logits / temperature, then the `top_k` most probable tokens, then those up to `top_p`.

    Attributes:
      temperature: divides the logits; above 0.
      top_k: draw among this many most probable tokens; 0: among all.
      top_p: draw among the fewest most probable tokens whose probabilities (after `top_k`) add up to this; 1: all.
      max_new_tokens: tokens that a completion may have, the stop token included.
      stop: token ids that end a completion.
      samples: completions of each prompt.
      greedy: take the most probable token; temperature, top_k and top_p play no part.

    Raises:
      ValueError: a number out of its range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()
    samples: int = 1
    greedy: bool = False

    def __post_init__(self) -> None:
        if not self.temperature > 0:
            raise ValueError(
                f"temperature is {self.temperature}, it must be above 0; greedy=True takes the most probable"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        for name in ("max_new_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")

    @property
    def truncated(self) -> bool:
        """True if some tokens cannot be drawn although the model gives them a probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1)


class Completions(NamedTuple):
    """Sampled completions. Row r is sample `r % samples` of prompt `r // samples`; T is the longest completion.

    Attributes:
      tokens: [R, T] int64, padded on the right; a stop token that was drawn is part of its completion.
      lengths: [R] int64, tokens of each completion.
      logp: [R, T] nats, of the distribution that was drawn from (tempered, truncated); greedy: the model's own.
      model_logp: [R, T] nats, of the model's own distribution (temperature 1, not truncated).
      finished: [R] bool, ended by a stop token rather than by the limit.
    """

    tokens: Tensor
    lengths: Tensor
    logp: Tensor
    model_logp: Tensor
    finished: Tensor


@dataclass(frozen=True)
class WeightSpec:
    """The form in which an engine takes weights.

    Attributes:
      names: for each weight of the model, its name and shape there; some neighbouring dims may be merged.
      layouts: of the model's weights, on the devices of `mesh`.
      mesh: the devices.
      dtype: of the weights; an engine converts others.
    """

    names: Mapping[str, tuple[str, tuple[int, ...]]]
    layouts: trees.Tree
    mesh: Mesh
    dtype: torch.dtype

    def named(self, params: trees.Tree) -> Iterator[tuple[str, Tensor]]:
        """Weights of the model, this rank's shards in `layouts`, as `Engine.load` takes them."""
        for name, x in trees.named(params):
            there, shape = self.names[name]
            yield there, x if len(shape) == x.ndim else x.reshape(shape)


class Engine(Protocol):
    """A model with weights that completes prompts.

    Attributes:
      weights: the form in which it takes weights.
      version: of the weights that it has; None: it has none yet.
    """

    @property
    def weights(self) -> WeightSpec: ...

    @property
    def version(self) -> int | None: ...

    def load(self, named_weights: Iterable[tuple[str, Tensor]], version: int = 0) -> None:
        """Replace the weights. The old ones are let go before the first new one is asked for.

        Args:
          named_weights: every weight exactly once, in the form `weights`.
          version: number of the weights, such as that of the trainer's update.
        """
        ...

    def held_weights(self) -> Iterable[tuple[str, Tensor | None]]:
        """Weights that the engine computes with, each once and in the form in which `load` takes them; None instead of
        one that cannot be read back, on all ranks alike."""
        ...

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, seed: int, first_prompt: int = 0
    ) -> Completions:
        """Complete every prompt `sampling.samples` times.

        Args:
          prompts: token ids.
          sampling: parameters of the draws.
          seed: fixes the noise.
          first_prompt: the number of `prompts[0]` among all prompts of the step. Noise belongs to the number of the
            prompt, so ranks that share the prompts of a step draw what one rank would draw.
        """
        ...
