"""Costs of a phase on one rank, and arithmetic on them: extrapolation, sequences and repetition of phases."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

MEMORY_KINDS = (
    "weights",
    "optimizer",
    "gradients",
    "activations",
    "logits",
    "cache",
    "staging",
    "batch",
    "communicators",
)
UPDATES = "update_"  # prefix of the names of training phases


class Traffic(NamedTuple):
    """Traffic of one kind of collective in one group; `nbytes` are of the larger side: the input or the result."""

    count: float
    nbytes: float


@dataclass
class Costs:
    """Costs of one phase on one rank.

    Attributes:
      peaks: for each part of the phase (forward, backward, optimizer, other) the bytes by kind at the moment when their
        sum was the largest; as "activations", at the moment of the backward pass when most was held besides gradients,
        which may be the largest in a deeper model.
      flops: FLOPs of matrix products and attention.
      seconds: seconds of all kernels, each bound by arithmetic, memory or its launch; without collectives.
      bounds: these seconds by what bounds a kernel, see `hardware.kernel_seconds`.
      traffic: traffic by (collective, name of the process group).
      early: part of `traffic` that starts before it is needed, so that kernels run meanwhile.
      cover: part of `seconds` of kernels that run while a collective runs.
      weight_bytes: by operator, bytes that updates read and write of weights, gradients and optimizer states alone, so
        without matrix products.
    """

    peaks: dict[str, dict[str, float]] = field(default_factory=dict)
    flops: float = 0.0
    seconds: float = 0.0
    traffic: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    early: dict[tuple[str, str], Traffic] = field(default_factory=dict)
    cover: float = 0.0
    weight_bytes: dict[str, float] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)

    @property
    def peak(self) -> dict[str, float]:
        """Bytes by kind at the overall peak."""
        return max(self.peaks.values(), key=lambda held: sum(held.values()), default={})

    @property
    def total(self) -> float:
        """Bytes at the peak."""
        return sum(self.peak.values())


def along(first: Costs, *ways: tuple[Costs, float]) -> Costs:
    """Extrapolate costs from `first` along one or several directions.

    Args:
      ways: costs one step from `first` in a direction, and the number of such steps.
    """
    seconds = [second for second, _ in ways]
    steps = [n for _, n in ways]

    def line(a: float, *ends: float) -> float:
        return a + sum((b - a) * n for b, n in zip(ends, steps, strict=True))

    def lines(*points: dict[str, float]) -> dict[str, float]:
        return {k: line(*(point.get(k, 0) for point in points)) for k in dict.fromkeys(itertools.chain(*points))}

    every = (first, *seconds)
    shared = [part for part in first.peaks if all(part in costs.peaks for costs in seconds)]

    def sent(*points: dict[tuple[str, str], Traffic]) -> dict[tuple[str, str], Traffic]:
        keys = dict.fromkeys(itertools.chain(*points))
        none = Traffic(0, 0)
        return {key: Traffic(*map(line, *(point.get(key, none) for point in points))) for key in keys}

    return Costs(
        peaks={part: lines(*(costs.peaks[part] for costs in every)) for part in shared},
        flops=line(*(costs.flops for costs in every)),
        seconds=line(*(costs.seconds for costs in every)),
        traffic=sent(*(costs.traffic for costs in every)),
        early=sent(*(costs.early for costs in every)),
        cover=line(*(costs.cover for costs in every)),
        weight_bytes=lines(*(costs.weight_bytes for costs in every)),
        bounds=lines(*(costs.bounds for costs in every)),
    )


def times(costs: Costs, n: float) -> Costs:
    """The same phase `n` times in sequence; the peak stays the same."""
    traffic, early = (
        {k: Traffic(t.count * n, t.nbytes * n) for k, t in sent.items()} for sent in (costs.traffic, costs.early)
    )
    written, bounds = ({name: x * n for name, x in sums.items()} for sums in (costs.weight_bytes, costs.bounds))
    costs = replace(costs, flops=costs.flops * n, seconds=costs.seconds * n, cover=costs.cover * n)
    return replace(costs, traffic=traffic, early=early, weight_bytes=written, bounds=bounds)


def after(first: Costs, second: Costs) -> Costs:
    """Two phases in sequence, as one: the higher peak, and sums of the rest."""
    peaks = {**first.peaks, **second.peaks}
    for part in peaks:
        peaks[part] = max(first.peaks.get(part, {}), second.peaks.get(part, {}), key=lambda held: sum(held.values()))
    traffic = dict(first.traffic)
    early = dict(first.early)
    for sent, added in ((traffic, second.traffic), (early, second.early)):
        for key, more in added.items():
            add_traffic(sent, key, *more)
    flops = first.flops + second.flops
    seconds = first.seconds + second.seconds
    written, bounds = (
        {name: earlier.get(name, 0.0) + later.get(name, 0.0) for name in {**earlier, **later}}
        for earlier, later in ((first.weight_bytes, second.weight_bytes), (first.bounds, second.bounds))
    )
    cover = first.cover + second.cover
    return Costs(peaks, flops, seconds, traffic, early, cover=cover, weight_bytes=written, bounds=bounds)


def add_traffic(sent: dict[tuple[str, str], Traffic], key: tuple[str, str], count: float, nbytes: float) -> None:
    """Add messages to those of a collective and a group, in place."""
    old = sent.get(key, Traffic(0, 0))
    sent[key] = Traffic(old.count + count, old.nbytes + nbytes)


def plus(costs: Costs, kept: Mapping[str, float]) -> Costs:
    """The same phase with additional bytes held throughout."""
    peaks = {part: {k: held.get(k, 0) + kept.get(k, 0) for k in {**held, **kept}} for part, held in costs.peaks.items()}
    return replace(costs, peaks=peaks)
