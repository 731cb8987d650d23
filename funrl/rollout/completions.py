"""Sampling parameters, completions, and the protocol of rollout engines."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees
from funrl.mesh.mesh import Mesh


@dataclass(frozen=True)
class Sampling:
    """Parameters of sampling, in the order in which they act on the logits of the next token.

    1. repetition_penalty: logits of tokens that are in the prompt or in the completion so far are divided by it where
       they are positive and multiplied where they are negative, once however often the token is there.
    2. temperature: logits are divided by it.
    3. top_k: the k most probable tokens are kept; among equally probable ones those with the lower token ids.
    4. top_p: of these, the fewest most probable ones are kept whose probabilities, among these, add up to p.
    5. min_p: of these, those are kept that have at least this part of the largest probability.

    Attributes:
      temperature: above 0.
      top_k: 0: all tokens.
      top_p: above 0; 1: all.
      max_new_tokens: tokens that a completion may have, the stop token included.
      stop: token ids that end a completion.
      samples: completions of each prompt.
      greedy: take the most probable token; temperature, top_k, top_p and min_p play no part.
      min_p: from 0 (all) to 1.
      repetition_penalty: above 0; 1: none; below 1 it favours repetition. It acts on greedy sampling too.
      stop_strings: texts that end a completion whose text has one of them.

    Raises:
      ValueError: a number out of its range, or a stop string that is empty.

    Reference: top-p, Holtzman et al., 2020, https://arxiv.org/abs/1904.09751; min-p, Nguyen et al., 2024,
      https://arxiv.org/abs/2407.01082; repetition penalty, Keskar et al., 2019, https://arxiv.org/abs/1909.05858
    Warning: this is the order of transformers, which TRL takes over where it generates with it. vLLM, which verl and
      TRL use too, applies min_p before top_k and top_p, so there top_p counts the probability that min_p left.
      transformers keeps all tokens that are as probable as the k-th; it also penalises the tokens that pad a prompt,
      and takes top_k=50 where none is given. vLLM writes "all tokens" as top_k=-1 (today 0 too), and ignores
      do_sample of a generation_config.json.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_new_tokens: int = 64
    stop: tuple[int, ...] = ()
    samples: int = 1
    greedy: bool = False
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}, it must be above 0; greedy=True takes the most probable"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, it must be from 0 (all tokens) to 1")
        if not 0 < self.repetition_penalty < math.inf:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}, it must be above 0 (1: none)")
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ValueError(f"stop_strings is {self.stop_strings!r}, it must be a tuple of texts that are not empty")
        for name in ("max_new_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")

    @property
    def truncated(self) -> bool:
        """True if some tokens cannot be drawn although the model gives them a probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def reshaped(self) -> bool:
        """True if what is drawn from is not the model's distribution at the temperature: truncated or penalised."""
        return self.truncated or self.repetition_penalty != 1


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
