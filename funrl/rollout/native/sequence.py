"""An unfinished request, with or without a slot."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from funrl.compiled_kernels.truncated_scores import KeptTokens
from funrl.rollout.kept_tokens import ID
from funrl.rollout.load_digest import LoadDigest, digests_of
from funrl.rollout.native.pages import ROOT
from funrl.rollout.native.prompt_lookup import PromptLookup
from funrl.rollout.requests import Completion, Finish, Request


@dataclasses.dataclass(eq=False, slots=True)
class RunningSequence:
    """An unfinished request.

    Attributes:
      request: as it was submitted.
      text: tokens of prompt and completion, as of when it last had no slot.
      logps: [2, T] sampling and raw log-probabilities of the completion's tokens in `text`.
      versions: (first token of the completion, version of the weights) pairs, ascending.
      digests: (first token of the completion, digest of the weights) pairs, ascending; (): they are not recorded.
      kept: ids that could be sampled at each token of the completion in `text`; None: they are not recorded.
      slot: its row of the arrays; -1: it has no slot.
      pages: pages that hold its keys and values, in order.
      cell: its cell of the cache; -1: it has none.
      lane: of its pages; see `LanePages`.
      siblings: requests of the same prompt that begin once its prompt is computed.
      computed: whether its pages cover every token except the last, which was never fed back.
      overrun: whether its cell holds the last token too, which a pass fed back before a stop string was seen.
      known_before: tokens whose keys and values were computed before it waited; see `EngineCost.recomputed`.
      recomputed: tokens that were computed again, as in `Completion.recomputed`.
      lookup: index of its text for drafts; None without drafts.
      adapter: number of its adapter in the backend; -1: it has none.
      contents: those of its prompt's tokens, as `OwnedValues.contents`, if it owns values; None: its ids.
      whole: begin and end of each run of tokens of its prompt that one pass computes together, in order.
    """

    request: Request
    text: np.ndarray
    logps: np.ndarray
    versions: list[tuple[int, int]]
    kept: list[np.ndarray] | None = None
    digests: Sequence[tuple[int, LoadDigest | int]] = ()
    slot: int = -1
    pages: list[int] = dataclasses.field(default_factory=list)
    cell: int = -1
    lane: int = 0
    siblings: list[RunningSequence] = dataclasses.field(default_factory=list)
    computed: bool = False
    overrun: bool = False
    known_before: int = 0
    recomputed: int = 0
    lookup: PromptLookup | None = None
    adapter: int = -1
    contents: list[int] | None = None
    whole: Sequence[tuple[int, int]] = ()

    def chunk_end(self, begin: int, end: int) -> int:
        """End of a chunk of its tokens that cuts no group: not after `end`, unless the chunk begins with the group."""
        cut = next((group for group in self.whole if group[0] < end < group[1]), None)
        return end if cut is None else cut[1] if cut[0] <= begin else cut[0]

    def pages_before(self, known: int, page: int) -> int:
        """Tokens of whole pages, `known` at most, in which no group is cut."""
        for first, end in reversed(self.whole):
            if first < known < end:
                known = first - first % page
        return known

    @property
    def root(self) -> int:
        """Content before its first page: texts of one adapter share pages."""
        return ROOT - 1 - self.adapter

    def contents_of(self, text: list[int]) -> list[int]:
        """Numbers by which pages of the first tokens of its text are found: other pictures have others."""
        if self.contents is None:
            return text
        return [*self.contents[: len(text)], *text[len(self.contents) :]]

    @property
    def untouched(self) -> bool:
        """True if no token of the completion has been sampled yet."""
        return len(self.text) == len(self.request.prompt)

    def is_sibling(self, other: RunningSequence) -> bool:
        """True if `other` has the same prompt, owned values and adapter, and has sampled nothing yet."""
        equal = other.untouched and self.root == other.root and len(self.text) == len(other.text)
        return equal and self.contents == other.contents and bool((self.text == other.text).all())

    @property
    def limit(self) -> int:
        """Length of prompt and completion at which it ends."""
        sampling = self.request.sampling
        begun = self.request.begun
        most = self.request.most
        count = sampling.max_new_tokens
        if most is not None:
            count = min(count, most + (0 if begun is None else len(begun.tokens)))
        return len(self.request.prompt) + count

    def completion(self, finish: Finish, routes: Tensor | None) -> Completion:
        """The tokens sampled, with their log-probabilities.

        Args:
          finish: why it ended.
          routes: experts of its tokens; None: they are not recorded.
        """
        begin = len(self.request.prompt)
        starts = [start for start, _ in self.versions] + [len(self.text) - begin]
        versions = np.repeat([version for _, version in self.versions], np.diff(starts))
        with torch.inference_mode(False):  # autograd takes no tensors that are made in it
            kept = None
            if self.kept is not None:
                ids = np.concatenate([np.zeros(0, ID), *self.kept])
                counts = np.array([len(x) for x in self.kept], dtype=np.int64)
                kept = KeptTokens(torch.from_numpy(ids), torch.from_numpy(counts))
            sampling_logp, raw_logp = torch.from_numpy(self.logps)
            return Completion(
                self.request.number,
                torch.from_numpy(self.text[begin:]),
                sampling_logp,
                raw_logp=raw_logp,
                versions=torch.from_numpy(versions.astype(np.int64)),
                finish=finish,
                routes=None if routes is None else routes.clone(),
                recomputed=self.recomputed,
                kept=kept,
                digests=digests_of(self.digests, len(self.text) - begin) if self.digests else None,
            )
