"""Noise of an engine's slots: blocks of each request's random stream, on the device."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from funrl.processes.device_memory import copy_to_device
from funrl.rollout.native.device.host_copy import device_copy
from funrl.rollout.sampling import stream_noise

NOISE_STEPS = 64  # numbers of a stream that are computed at a time


class SlotNoise:
    """The random stream of each slot; one block per slot is stored.

    Attributes:
      seeds: [slots] seeds of the streams.
    """

    def __init__(self, device: torch.device) -> None:
        self.seeds = np.zeros(0, dtype=np.int64)
        self._blocks = self.seeds.copy()  # number of the stored block; -1: none
        self._held = torch.zeros(0, NOISE_STEPS, dtype=torch.float64, device=device)

    def more(self, count: int) -> None:
        """Add `count` slots."""
        none = np.zeros(count, dtype=np.int64)
        self.seeds = np.concatenate([self.seeds, none])
        self._blocks = np.concatenate([self._blocks, none])
        self._held = torch.cat([self._held, self._held.new_zeros(count, NOISE_STEPS)])

    def begin(self, slot: int, seed: int) -> None:
        """Start a new stream in a slot."""
        self.seeds[slot] = seed
        self._blocks[slot] = -1

    def at(self, slots: np.ndarray, steps: np.ndarray) -> Tensor:
        """Noise of each of some slots at a step of its stream, [R]."""
        lacking = self._blocks[slots] != steps // NOISE_STEPS
        old = slots[lacking]
        slots_R = device_copy(slots, self._held.device)
        if len(old):
            block = steps[lacking] // NOISE_STEPS
            steps_RS = torch.from_numpy(block)[:, None] * NOISE_STEPS + torch.arange(NOISE_STEPS)
            fresh = stream_noise(torch.from_numpy(self.seeds[old])[:, None], steps_RS)
            self._held[device_copy(old, self._held.device)] = copy_to_device(fresh, self._held.device)
            self._blocks[old] = block
        return self._held[slots_R, device_copy(steps % NOISE_STEPS, self._held.device)]
