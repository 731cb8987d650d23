"""Sampling parameters."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

SMALLEST_TEMPERATURE = 1e-5  # below it vLLM too takes the most probable token; float32 has no logits / 1e-39
PENALTIES = (1e-10, 1e10)  # logits stay finite between these


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
      temperature: at least `SMALLEST_TEMPERATURE`.
      top_k: 0: all tokens.
      top_p: above 0; 1: all.
      max_new_tokens: tokens that a completion may have, the stop token included.
      stop: token ids that end a completion.
      samples: completions of each prompt.
      greedy: take the most probable token; temperature, top_k, top_p and min_p play no part.
      min_p: from 0 (all) to 1.
      repetition_penalty: within `PENALTIES`; 1: none; below 1 it favours repetition. It acts on greedy sampling too.
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
        if not SMALLEST_TEMPERATURE <= self.temperature < math.inf:
            raise ValueError(
                f"temperature is {self.temperature}, it must be above 0 and at least {SMALLEST_TEMPERATURE}, "
                "as logits divided by less may overflow; greedy=True takes the most probable"
            )
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}, it must be at least 0 (0: all tokens)")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}, it must be above 0 and at most 1")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p is {self.min_p}, it must be from 0 (all tokens) to 1")
        low, high = PENALTIES
        if not low <= self.repetition_penalty <= high:
            raise ValueError(
                f"repetition_penalty is {self.repetition_penalty}, it must be above 0, from {low:g} to {high:g} "
                "(1: none)"
            )
        if isinstance(self.stop_strings, str) or not all(self.stop_strings):
            raise ValueError(f"stop_strings is {self.stop_strings!r}, it must be a tuple of texts that are not empty")
        for name in ("max_new_tokens", "samples"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, it must be at least 1")

    @property
    def per_token(self) -> Sampling:
        """The parameters that the next token depends on, with defaults for the others."""
        return dataclasses.replace(self, max_new_tokens=1, stop=(), stop_strings=(), samples=1)

    @property
    def truncated(self) -> bool:
        """True if some tokens cannot be sampled although the model gives them a probability."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def reshaped(self) -> bool:
        """True if what is sampled from is not the model's distribution at the temperature: truncated or penalised."""
        return self.truncated or self.repetition_penalty != 1
