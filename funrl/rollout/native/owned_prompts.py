"""Prompts that own values, such as pictures: what a pass needs of them besides their tokens."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.models.model import Model, PromptStates
from funrl.rollout.requests import Request

MOST_STATE_BYTES = 1 << 30  # of prompts' states that are held; those of one pass may be more
MOST_SHRINKS = 1 << 12  # prompts whose shifts are held, more than run at once
Key = tuple[int, tuple[int, ...]]


class OwnedPrompts:
    """States of prompts, computed once for each prompt and its values until the weights change.

    The most recently used states are held, within a bound on their bytes; of more
    prompts the one number that decoding needs.
    """

    def __init__(self, model: Model):
        self._model = model
        self._states: OrderedDict[Key, PromptStates] = OrderedDict()
        # by how much positions after a prompt are below their numbers
        self._shrinks: OrderedDict[Key, int] = OrderedDict()
        self._bytes = 0

    def clear(self) -> None:
        """Forget all states: the weights that made them are gone, or their memory is needed."""
        self._states.clear()
        self._shrinks.clear()
        self._bytes = 0

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
        states: list[PromptStates | None] = []
        shrink_S = np.zeros(len(requests), dtype=np.int64)
        for place, (request, begin) in enumerate(zip(requests, begins_S, strict=True)):
            state = None
            if request is not None:
                key = _key(request)
                if begin < len(request.prompt) or key not in self._shrinks:
                    state = self._of(request, key, params)
                self._shrinks.move_to_end(key)
                shrink_S[place] = self._shrinks[key]
            states.append(state)
        places_N = np.arange(counts_S.sum()) + np.repeat(begins_S - firsts_S - shrink_S, counts_S)
        positions_N3 = torch.from_numpy(places_N).unsqueeze(1).repeat(1, 3)
        at_N = torch.full((len(places_N),), -1)
        hidden: list[Tensor] = []
        mutual: list[Tensor] = []
        rows = 0
        for state, begin, first, count in zip(states, begins_S, firsts_S, counts_S, strict=True):
            new = 0 if state is None else min(int(count), len(state.inserted_at_T) - int(begin))
            if state is None or new <= 0:
                continue
            there = slice(int(begin), int(begin) + new)
            here = slice(int(first), int(first) + new)
            positions_N3[here] = state.positions_T3[there]
            at_T = state.inserted_at_T[there]
            at_N[here] = torch.where(at_T >= 0, at_T + rows, -1)
            hidden.append(state.inserted_LMD)
            rows += state.inserted_LMD.shape[1]
            if state.mutual_RM is not None:  # a pass has all tokens of such a group, or none
                inside_R = (state.mutual_RM[:, 0] >= there.start) & (state.mutual_RM[:, -1] < there.stop)
                mutual.append(state.mutual_RM[inside_R] + (here.start - there.start))
        inputs = {"axial_positions": positions_N3.to(device).unsqueeze(0)}
        if hidden:
            inputs |= {"inserted": torch.cat(hidden, 1), "inserted_at": at_N.to(device).unsqueeze(0)}
        if any(len(x) for x in mutual):
            inputs["mutual_RM"] = torch.cat(mutual).to(device)
        return inputs

    def _of(self, request: Request, key: Key, params: trees.Tree) -> PromptStates:
        assert request.owned is not None and self._model.owned is not None
        if key not in self._states:
            state = self._model.owned.encode(params, torch.tensor(key[1]), request.owned.values)
            self._states[key] = state
            self._bytes += _bytes_of(state)
            while self._bytes > MOST_STATE_BYTES and len(self._states) > 1:
                self._bytes -= _bytes_of(self._states.popitem(last=False)[1])
        self._states.move_to_end(key)
        self._shrinks[key] = self._states[key].shrink
        while len(self._shrinks) > MOST_SHRINKS:
            self._shrinks.popitem(last=False)
        return self._states[key]


def _key(request: Request) -> Key:
    """Key of the states of a prompt and its values."""
    assert request.owned is not None
    return request.owned.digest, tuple(request.prompt)


def _bytes_of(state: PromptStates) -> int:
    return sum(x.nbytes for x in (state.inserted_LMD, state.inserted_at_T, state.positions_T3))
