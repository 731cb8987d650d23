"""Bound of the rows that experts on several ranks take, with exact results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from funrl.mesh.collectives import pmax
from funrl.mesh.mesh import AXES, Mesh

FIRST_BOUND = 5  # quarters of the mean: 1.25 times it
Scores = TypeVar("Scores")


class ExpertRows:
    """Bound of the rows that a rank's experts take in a forward pass; passes that need more are repeated.

    In the context `bounded` passes have rows up to the bound, and the largest number that one needs is measured. Where
    it is above the bound, the results of the context are not those of all slots: `exceeded` doubles the bound until
    it suffices, and the caller computes them again. The bound never falls, so that layers are compiled for few sizes.
    It changes no result. All ranks of the mesh enter a context together, and always have the same bound.

    Attributes:
      limited: whether there is a bound.

    Example:
      >>> rows = ExpertRows(Mesh())
      >>> rows.repeat(lambda: torch.ones(2).sum()).item()
      2.0
    """

    def __init__(self, mesh: Mesh, limited: bool = True) -> None:
        """Begin with `FIRST_BOUND`; without any where not `limited`, or where each rank has all experts."""
        self._mesh = mesh
        self.limited = limited and mesh.size("expert") > 1
        self._quarters = FIRST_BOUND
        self._measures = False

    @property
    def bound(self) -> int | None:
        """Bound of passes at present, in quarters of the mean; None: there is room for all slots."""
        return self._quarters if self._measures else None

    @contextlib.contextmanager
    def bounded(self) -> Iterator[None]:
        """Bound the rows of the passes in the context, and measure how many they need."""
        self._largest = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        self._measures = self.limited
        try:
            yield
        finally:
            self._measures = False

    def add(self, peak_L: Tensor) -> None:
        """Add the peaks of the layers of a pass, as `RouterLoad` has them."""
        if self._measures:
            self._largest = torch.maximum(self._largest, peak_L.detach().max())

    def peak(self) -> Tensor:
        """Largest number of rows over the mean that a pass of the last context needed, on any rank. Collective."""
        return pmax(self._largest, self._mesh, AXES) if self.limited else self._largest

    def exceeded(self, peak: float) -> bool:
        """True if passes with this peak are to be computed again, with the bound that has been raised for them."""
        fits = 4 * peak <= self._quarters
        while 4 * peak > self._quarters:
            self._quarters *= 2
        return not fits

    def repeat(self, run: Callable[[], Scores]) -> Scores:
        """The result of a function whose passes had enough rows. Collective; the host waits for the device."""
        while True:
            with self.bounded():
                result = run()
            if not self.limited or not self.exceeded(self.peak().item()):
                return result
