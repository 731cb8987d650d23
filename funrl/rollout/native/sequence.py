"""A request in flight, whether it has a slot or waits for one."""

from __future__ import annotations

import dataclasses

import numpy as np

from funrl.rollout.native.prompt_lookup import PromptLookup
from funrl.rollout.requests import Request


@dataclasses.dataclass(eq=False, slots=True)
class RunningSequence:
    """A request in flight.

    Attributes:
      request: as it was submitted.
      text: tokens of prompt and completion, as far as they were known when it last had no slot.
      logps: [2, T] log-probabilities of the completion's tokens so far, sampling and raw, likewise.
      versions: (first token of the completion, version of the weights) pairs, ascending.
      slot: its row of the arrays; -1: it waits for one.
      pages: that hold its keys and values, in order.
      siblings: requests of the same prompt that begin when its prompt is computed.
      computed: whether its pages hold all its tokens but the last, which nothing was sampled behind.
      lookup: its text, where drafts are made of it.
    """

    request: Request
    text: np.ndarray
    logps: np.ndarray
    versions: list[tuple[int, int]]
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    siblings: list[RunningSequence] = dataclasses.field(default_factory=list)
    computed: bool = False
    lookup: PromptLookup | None = None

    @property
    def untouched(self) -> bool:
        """True if nothing has been written behind its prompt."""
        return len(self.text) == len(self.request.prompt)

    @property
    def limit(self) -> int:
        """Tokens of prompt and completion at which it ends."""
        sampling = self.request.sampling
        begun = self.request.begun
        most = self.request.most
        count = sampling.max_new_tokens
        if most is not None:
            count = min(count, most + (0 if begun is None else len(begun.tokens)))
        return len(self.request.prompt) + count
