"""Sizes of the parts of a decoder that only some families have: experts, and latent attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


class ModelError(ValueError):
    """A model that cannot be used; the message names the file or field, its value and what is supported."""


@dataclass(frozen=True)
class Experts:
    """Layers whose mlp is a mixture of experts.

    Attributes:
      count, per_token, mlp: experts of a layer E, those that a token goes to, and the inner size of each F.
      normalized: whether the weights of a token's experts are divided by their sum.
      dense: numbers of the layers that have one mlp instead.
      scoring: of the router's logits: "softmax" over the experts, or "sigmoid" of each by itself.
      biased: experts are chosen by score + bias, and weighed by the score; the bias is a weight without a gradient.
      groups, chosen_groups: experts stand in groups, and a token goes to those of a few groups only.
      best_of_group: a group is as good as so many of its best experts together.
      scale: factor of the weights of a token's experts.
      shared: inner size of an mlp that every token goes to, beside its experts; 0: there is none.
      wide: the router computes in float32 where weights are narrower: experts with nearly equal scores are told apart.
    """

    count: int
    per_token: int
    mlp: int
    normalized: bool = True
    dense: tuple[int, ...] = ()
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    biased: bool = False
    groups: int = 1
    chosen_groups: int = 1
    scale: float = 1.0
    shared: int = 0
    best_of_group: int = 2
    wide: bool = False

    def __post_init__(self) -> None:
        for name in ("count", "per_token", "mlp", "groups", "chosen_groups"):
            if getattr(self, name) < 1:
                raise ModelError(f"experts.{name} is {getattr(self, name)}, it must be at least 1")
        if self.per_token > self.count:
            raise ModelError(f"experts.per_token is {self.per_token}, it must be at most their count, {self.count}")
        if self.chosen_groups > self.groups:
            raise ModelError(f"experts.chosen_groups is {self.chosen_groups}, there are {self.groups} groups")
        size = self.count // self.groups
        if self.groups > 1 and (self.count % self.groups or size < self.best_of_group):
            least = f"at least {self.best_of_group}"
            raise ModelError(f"{self.count} experts do not make {self.groups} groups of {least}, equally large")
        if self.per_token > self.chosen_groups * size:
            raise ModelError(
                f"experts.per_token is {self.per_token}, but {self.chosen_groups} of {self.groups} groups have "
                f"{self.chosen_groups * size}"
            )


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are made of one small vector a token, the same for all heads.

    Attributes:
      kv_rank: size of this vector.
      q_rank: size of the vector that queries are made of; None: they are made of the hidden states.
      nope, rope: sizes of the parts of a head's query and key: without positions, and rotated by them; the latter part
        of the keys is the same for all heads.
      value: size of a head's value.
      interleaved: neighbours are the pairs that are rotated, not numbers half a head apart.

    References: DeepSeek-AI, 2024, https://arxiv.org/abs/2405.04434
    """

    kv_rank: int
    q_rank: int | None
    nope: int
    rope: int
    value: int
    interleaved: bool = True

    def __post_init__(self) -> None:
        if self.rope % 2:
            raise ModelError(f"latent.rope is {self.rope}, rotary positions need an even size")

    @property
    def cached(self) -> int:
        """Numbers of a token in a layer's cache."""
        return self.kv_rank + self.rope

    @property
    def width(self) -> int:
        """Size of a head in training: of queries, keys and values, the smaller of which are padded."""
        return max(self.nope + self.rope, self.value)
