"""Prompts that own values, such as pictures: what a pass needs of them besides their tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from funrl import trees
from funrl.models.model import Model, PromptStates
from funrl.rollout.requests import Request


class OwnedPrompts:
    """States of prompts, computed once for each prompt and its values until the weights change."""

    def __init__(self, model: Model):
        self._model = model
        self._states: dict[tuple[int, tuple[int, ...]], PromptStates] = {}

    def clear(self) -> None:
        """Forget all states, as the weights that made them are gone."""
        self._states.clear()

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
        states = [None if request is None else self._of(request, params) for request in requests]
        shrink_S = np.array([0 if state is None else state.shrink for state in states])
        places_N = np.arange(counts_S.sum()) + np.repeat(begins_S - firsts_S - shrink_S, counts_S)
        positions_N3 = torch.from_numpy(places_N).unsqueeze(1).repeat(1, 3)
        at_N = torch.full((len(places_N),), -1)
        hidden: list[Tensor] = []
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
            hidden.append(state.inserted_MD)
            rows += len(state.inserted_MD)
        inputs = {"axial_positions": positions_N3.to(device).unsqueeze(0)}
        if hidden:
            inputs |= {"inserted": torch.cat(hidden), "inserted_at": at_N.to(device).unsqueeze(0)}
        return inputs

    def _of(self, request: Request, params: trees.Tree) -> PromptStates:
        assert request.owned is not None and self._model.owned is not None
        key = request.owned.digest, tuple(request.prompt)
        if key not in self._states:
            tokens_T = torch.tensor(key[1])
            self._states[key] = self._model.owned.encode(params, tokens_T, request.owned.values)
        return self._states[key]
