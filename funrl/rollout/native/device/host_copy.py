"""Small tensors that travel between the host and its device without either waiting for the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from funrl.processes.device_memory import copy_to_device, copy_to_host


class HostCopy:
    """Tensors on their way to the host; on a CPU they are there already."""

    def __init__(self, tensors: Sequence[Tensor]):
        self._ready: torch.cuda.Event | None = None
        self._tensors = tensors if tensors[0].is_cpu else [copy_to_host(x) for x in tensors]
        if tensors[0].is_cuda:
            self._ready = torch.cuda.Event()
            self._ready.record()

    def arrays(self) -> list[np.ndarray]:
        """The numbers; the host waits for them where they have not come yet."""
        if self._ready is not None:
            self._ready.synchronize()
        return [x.numpy() for x in self._tensors]


def device_copy(x: np.ndarray, device: torch.device) -> Tensor:
    """An array on a device, in the order of the device's work."""
    return copy_to_device(torch.from_numpy(x), device)


class PendingTokens(NamedTuple):
    """Tokens of one iteration, on their way to the host.

    Attributes:
      slots: [R] slot of each token.
      serials: [R] serials of these slots at the time of sampling.
      positions: [R] position of each token in its sequence.
      copy: tokens, sampling and raw log-probabilities; may have more rows than there are slots.
    """

    slots: np.ndarray
    serials: np.ndarray
    positions: np.ndarray
    copy: HostCopy
