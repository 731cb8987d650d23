"""Sampling parameters."""

from __future__ import annotations

from dataclasses import dataclass


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
    repetition_penalty: float = 1.0
    stop_strings: tuple[str, ...] = ()

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
