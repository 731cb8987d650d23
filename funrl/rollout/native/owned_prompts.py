"""Prompts that own values, such as pictures: what a pass needs of them besides their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.kinds import OwnedLines
from funrl.models.model import Model, PromptPlaces
from funrl.rollout.requests import Request

MOST_STATE_BYTES = 1 << 30  # of the states of values that are held; those of one pass may be more
MOST_PLACE_BYTES = 1 << 26  # of places of prompts' tokens
MOST_SHRINKS = 1 << 12  # prompts whose shifts are held, more than run at once
Key = tuple[int, tuple[int, ...]]


class HeldPlaces(NamedTuple):
    """Places of a prompt, with the digest of each of its values."""

    places: PromptPlaces
    digests: list[int]


class OwnedPrompts:
    """States of the values of prompts, each computed once until the weights change.

    A value, such as a picture, is computed by itself, so that its bits depend on nothing beside it, and found again by
    its digest: the turns of a conversation and the samples of a prompt share it. The most recently used states are
    held, within a bound on their bytes; of more prompts the one number that decoding needs.
    """

    def __init__(self, model: Model):
        self._model = model
        self._states: OrderedDict[int, Tensor] = OrderedDict()  # [L, M, D] by the digests of values
        self._places: OrderedDict[Key, HeldPlaces] = OrderedDict()
        # by how much positions after a prompt are below their numbers
        self._shrinks: OrderedDict[Key, int] = OrderedDict()
        self._bytes = 0
        self._place_bytes = 0

    def clear(self) -> None:
        """Forget all states: the weights that made them are gone, or their memory is needed."""
        self._states.clear()
        self._places.clear()
        self._shrinks.clear()
        self._bytes = 0
        self._place_bytes = 0

    def inputs(
        self, requests: Sequence[Request | None], counts_S: np.ndarray, ends_S: np.ndarray, params: trees.Tree
    ) -> dict[str, Tensor]:
        """Fields of `Inputs` for the tokens of a pass.

        Args:
          requests: of its sequences; None: a prompt owns no values.
          counts_S, ends_S: new tokens of each sequence, and its length with them.
          params: weights of the model.
        """
        device = trees.leaves(params)[0].device
        begins_S = ends_S - counts_S
        firsts_S = np.cumsum(counts_S) - counts_S
        known_S = [self._known(request, int(begin)) for request, begin in zip(requests, begins_S, strict=True)]
        shrink_S = np.array([shrink for _, shrink in known_S])
        places_N = np.arange(counts_S.sum()) + np.repeat(begins_S - firsts_S - shrink_S, counts_S)
        positions_N3 = torch.from_numpy(places_N).unsqueeze(1).repeat(1, 3)
        at_N = torch.full((len(places_N),), -1)
        hidden: list[Tensor] = []
        mutual: list[Tensor] = []
        rows = 0
        for place, (request, (held, _)) in enumerate(zip(requests, known_S, strict=True)):
            begin = int(begins_S[place])
            new = 0 if held is None else min(int(counts_S[place]), len(held.places.inserted_at_T) - begin)
            if request is None or held is None or new <= 0:
                continue
            there = slice(begin, begin + new)
            here = slice(int(firsts_S[place]), int(firsts_S[place]) + new)
            positions_N3[here] = held.places.positions_T3[there]
            at_T = held.places.inserted_at_T[there]
            used = at_T[at_T >= 0]
            if not len(used):
                continue
            ends_V = np.cumsum(held.places.counts)
            low, high = np.searchsorted(ends_V, (int(used.min()), int(used.max())), side="right")
            at_N[here] = torch.where(at_T >= 0, at_T + rows - int(ends_V[low] - held.places.counts[low]), -1)
            states = self._states_of(request, held.digests, range(low, high + 1), params)
            hidden += states
            rows += sum(state.shape[1] for state in states)
            if held.places.mutual_RM is not None:  # a pass has all tokens of such a group, or none
                mutual_RM = held.places.mutual_RM
                inside_R = (mutual_RM[:, 0] >= there.start) & (mutual_RM[:, -1] < there.stop)
                mutual.append(mutual_RM[inside_R] + (here.start - there.start))
        inputs = {"axial_positions": positions_N3.to(device).unsqueeze(0)}
        if hidden:
            inputs |= {"inserted": torch.cat(hidden, 1), "inserted_at": at_N.to(device).unsqueeze(0)}
        if any(len(x) for x in mutual):
            inputs["mutual_RM"] = torch.cat(mutual).to(device)
        return inputs

    def _known(self, request: Request | None, begin: int) -> tuple[HeldPlaces | None, int]:
        """Places of a prompt, None where a pass from `begin` on computes none of its tokens, and its shift."""
        if request is None:
            return None, 0
        key = _key(request)
        held = None
        if begin < len(request.prompt) or key not in self._shrinks:
            held = self._placed(request, key)
            self._shrinks[key] = held.places.shrink
        self._shrinks.move_to_end(key)
        shrink = self._shrinks[key]
        while len(self._shrinks) > MOST_SHRINKS:
            self._shrinks.popitem(last=False)
        return held, shrink

    def _placed(self, request: Request, key: Key) -> HeldPlaces:
        if key not in self._places:
            values = owned_of(request).values
            digests = [value.digest for value in self._model.values.apart(values)]
            self._places[key] = HeldPlaces(self._model.values.place(torch.tensor(key[1]), values), digests)
            self._place_bytes += _bytes_of(self._places[key])
            while self._place_bytes > MOST_PLACE_BYTES and len(self._places) > 1:
                self._place_bytes -= _bytes_of(self._places.popitem(last=False)[1])
        self._places.move_to_end(key)
        return self._places[key]

    def _states_of(self, request: Request, digests: Sequence[int], values: range, params: trees.Tree) -> list[Tensor]:
        """States of some of a prompt's values, by their numbers."""
        apart = None
        states = []
        for value in values:
            digest = digests[value]
            if digest not in self._states:
                apart = apart or self._model.values.apart(owned_of(request).values)
                self._states[digest] = self._model.values.encode(params, apart[value].values)
                self._bytes += self._states[digest].nbytes
            self._states.move_to_end(digest)
            states.append(self._states[digest])
            while self._bytes > MOST_STATE_BYTES and len(self._states) > 1:
                self._bytes -= self._states.popitem(last=False)[1].nbytes
        return states


def owned_of(request: Request) -> OwnedLines:
    """The values that a prompt owns. Raises: ValueError, it is tokens alone."""
    if request.owned is None:
        raise ValueError("the prompt owns no values")
    return request.owned


def _key(request: Request) -> Key:
    """Key of the places of a prompt and its values."""
    return owned_of(request).digest, tuple(request.prompt)


def _bytes_of(held: HeldPlaces) -> int:
    return sum(x.nbytes for x in held.places if isinstance(x, Tensor))
