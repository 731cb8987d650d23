"""Bitwise comparison of the numbers of two runs: how many differ, by how much, and where."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

BIT_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
METRIC_PHASES = {  # prefix of a metric -> phase of a step that makes it; the first that fits
    "sync/": "verify",
    "eval/": "eval",
    "rollout/logprob_gap": "score_policy",
    "rollout/": "generate",
    "critic/advantages/": "advantage",
    "critic/values/": "advantage",
    "critic/returns/": "advantage",
    "critic/vf_explained_var": "advantage",
    "critic/": "update_critic",
    "actor/": "update_policy",
    "implicit_reward/": "update_implicit_reward",
    "train/": "update",
    "reward/": "generate",
    "episodes/": "generate",
    "source/": "generate",
    "response_length/": "generate",
    "filter_groups/": "generate",
    "partial/": "generate",
    "perf/": "generate",
}
MEASURED = (  # of the machine, its load and what a cache still has, not of the run
    "time_s/",
    "memory/",
    "perf/tokens_per_s",
    "compile/",
    "wait/",
    "sync/hidden_share",
)
MEASURED_OF_EPISODES = ("/environment_s", "/recomputed_tokens")  # the same, of all episodes or of a source
KINDS = ("turns", "field", "weights", "digests", "metric")
PHASE_ORDER = (  # in the order of a step
    "generate",
    "score_policy",
    "score_critic",
    "score_implicit_reward",
    "score_reference",
    "score_teacher",
    "advantage",
    "update_implicit_reward",
    "update_critic",
    "update_policy",
    "update",
    "verify",
    "eval",
)


class Difference(NamedTuple):
    """Comparison of two tensors, or of parts of them.

    Attributes:
      phase: of the step that makes it.
      kind: "turns" of episodes, "field" of the rows, "metric", "weights", or "digests" of weights. Differences of turns
        and digests have no size.
      name: of the field, metric or weight.
      total: numbers that were compared.
      count: those of other bits.
      largest: the largest difference, infinite where one of two is no number.
      where: place of that one, with both numbers.
    """

    phase: str
    kind: str
    name: str
    total: int
    count: int = 0
    largest: float = 0.0
    where: str = ""

    def agrees(self, tolerance: float = 0.0) -> bool:
        """True if all bits are equal, or within a tolerance above 0 all numbers."""
        return self.count == 0 or (tolerance > 0 and self.largest <= tolerance)

    def __str__(self) -> str:
        if not self.count:
            return f"{self.name}: equal"
        if self.kind == "turns":
            return self.name
        if self.total == 1:
            return f"{self.name} differs by {self.largest:.3g}: {self.where}"
        return f"{self.name}: {self.count} of {self.total} differ, the largest by {self.largest:.3g} at {self.where}"


def difference(
    phase: str,
    kind: str,
    name: str,
    one: Tensor,
    other: Tensor,
    place: Callable[[tuple[int, ...]], str] | None = None,
) -> Difference:
    """Compare two tensors.

    Args:
      place: index of a number -> words for it; None: the index as it is.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        total = max(one.numel(), other.numel())
        kinds = f"{_kind(one)} and {_kind(other)}"
        return Difference(phase, kind, name, total, count=max(total, 1), largest=math.inf, where=kinds)
    unlike = _bits(one) != _bits(other)
    count = int(unlike.count_nonzero())
    if not count:
        return Difference(phase, kind, name, one.numel())
    gap = (one.double() - other.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    number = int(torch.where(unlike, gap, gap.new_full((), -1.0)).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), one.shape)) if one.ndim else ()
    where = place(index) if place is not None else f"at {list(index)}" if index else ""
    values = f"{one.flatten()[number].item()} and {other.flatten()[number].item()}"
    text = f"{where}: {values}" if where else values
    largest = float(gap.flatten()[number])
    return Difference(phase, kind, name, one.numel(), count=count, largest=largest, where=text)


def joined_differences(parts: Iterable[Difference]) -> list[Difference]:
    """One for each phase and name, of parts that were compared one by one or by several ranks."""
    joined: dict[tuple[str, str], Difference] = {}
    for part in parts:
        key = part.phase, part.name
        before = joined.get(key, part._replace(total=0, count=0))
        larger = part if part.count and (not before.count or part.largest > before.largest) else before
        joined[key] = larger._replace(total=before.total + part.total, count=before.count + part.count)
    return list(joined.values())


def metric_differences(one: Mapping[str, float | None], other: Mapping[str, float | None]) -> list[Difference]:
    """Compare metrics, but for times and memory; one that is not in both differs. None stands for what is no number."""
    differences = []
    for name in dict.fromkeys((*one, *other)):
        if name == "step" or name.startswith(MEASURED) or name.endswith(MEASURED_OF_EPISODES):
            continue
        phase = phase_of_metric(name)
        if name not in one or name not in other:
            lacks = "first" if name not in one else "second"
            text = f"the {lacks} has no such metric"
            differences.append(Difference(phase, "metric", name, 1, count=1, largest=math.inf, where=text))
            continue
        differences.append(difference(phase, "metric", name, _number(one[name]), _number(other[name])))
    return differences


def phase_of_metric(name: str) -> str:
    """Phase of a step that makes a metric."""
    return next((phase for prefix, phase in METRIC_PHASES.items() if name.startswith(prefix)), "update")


def phase_of_field(writer: str, stage: str) -> str:
    """Phase of a step that writes a field of the rows, which are at the stage "drawn" or "scored"."""
    if stage == "drawn":
        return "generate"
    return "advantage" if writer in ("source", "advantage", "trainer") else f"score_{writer}"


def by_phase(differences: Iterable[Difference]) -> list[tuple[str, list[Difference]]]:
    """The phases of a step in their order, each with what was compared in it: tensors first, metrics last."""
    phases: dict[str, list[Difference]] = {}
    for difference in sorted(differences, key=lambda difference: KINDS.index(difference.kind)):
        phases.setdefault(difference.phase, []).append(difference)
    known = [*PHASE_ORDER, *sorted(set(phases) - set(PHASE_ORDER))]
    return [(phase, phases[phase]) for phase in known if phase in phases]


def first_phase(differences: Iterable[Difference]) -> list[Difference]:
    """The differences of the first phase of a step that has some."""
    unlike = by_phase(difference for difference in differences if difference.count)
    return unlike[0][1] if unlike else []


def _number(x: float | None) -> Tensor:
    return torch.tensor(math.nan if x is None else float(x), dtype=torch.float64)


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BIT_VIEWS[x.element_size()]) if x.is_floating_point() else x


def _kind(x: Tensor) -> str:
    return f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}"
