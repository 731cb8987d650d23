"""Comparison of two runs by their bits: how many numbers differ, by how much, and where."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

BIT_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
METRIC_PHASES = {  # phase of a step -> prefixes of the metrics that it makes; the first prefix that fits counts
    "verify": ("sync/",),
    "eval": ("eval/",),
    "score_policy": ("rollout/logprob_gap", "rollout/ratio_mean", "rollout/effective_share"),
    "advantage": ("critic/advantages/", "critic/values/", "critic/returns/", "critic/vf_explained_var"),
    "update_critic": ("critic/",),
    "update_policy": ("actor/",),
    "update_implicit_reward": ("implicit_reward/",),
    "generate": (
        "rollout/",
        "reward/",
        "episodes/",
        "source/",
        "response_length/",
        "filter_groups/",
        "partial/",
        "perf/",
    ),
}
# Metrics of the machine, its load and what a cache still has, not of the run.
# Of weights that are sent in the background.
TRANSFERS = ("sync/hidden_share", "sync/sent_bytes", "sync/changed_share", "sync/resent")
MEASURED = ("time_s/", "memory/", "perf/tokens_per_s", "compile/", "wait/", "places/", *TRANSFERS)
MEASURED_OF_EPISODES = ("/environment_s", "/recomputed_tokens")  # the same, of all episodes or of a source
KINDS = ("turns", "field", "weights", "digests", "metric")
PHASE_ORDER = ("generate", "score", "advantage", "update", "verify", "eval")  # some are of a role


class Difference(NamedTuple):
    """Comparison of two tensors, or of parts of them.

    Attributes:
      phase: of the step that makes it.
      kind: "turns" of episodes, "field" of the rows, "metric", "weights", or "digests" of weights. Differences of turns
        and digests have no size.
      name: of the field, metric or weight.
      total: count of compared numbers.
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
        if self.kind == "turns":
            return self.name
        if self.total == 1:
            return f"{self.name} differs by {self.largest:.3g}: {self.where}"
        return f"{self.name}: {self.count} of {self.total} differ, the largest by {self.largest:.3g} at {self.where}"


def difference(
    phase: str,
    kind: str,
    name: str,
    first: Tensor,
    second: Tensor,
    place: Callable[[tuple[int, ...]], str] | None = None,
) -> Difference:
    """Compare two tensors.

    Args:
      place: index of a number -> words for it; None: the index as it is.
    """
    if first.shape != second.shape or first.dtype != second.dtype:
        kinds = " and ".join(f"{str(x.dtype).removeprefix('torch.')} {list(x.shape)}" for x in (first, second))
        return unequal(phase, kind, name, kinds, max(first.numel(), second.numel(), 1))
    unlike = _bits(first) != _bits(second)
    count = int(unlike.count_nonzero())
    if not count:
        return Difference(phase, kind, name, first.numel())
    gap = (first.double() - second.double()).abs().nan_to_num(nan=math.inf, posinf=math.inf)
    number = int(torch.where(unlike, gap, gap.new_full((), -1.0)).argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(number), first.shape))
    where = f"at {list(index)}: " if place is None else f"{place(index)}: "
    values = f"{first.flatten()[number].item()} and {second.flatten()[number].item()}"
    largest = float(gap.flatten()[number])
    return Difference(phase, kind, name, first.numel(), count, largest, where=where * bool(index) + values)


def unequal(phase: str, kind: str, name: str, where: str, count: int = 1) -> Difference:
    """A difference without a size, of all numbers."""
    return Difference(phase, kind, name, total=count, count=count, largest=math.inf, where=where)


def row_place(index: tuple[int, ...]) -> str:
    """Words for the place of a number in a field [B, ...]."""
    return f"row {index[0]}"


def _token_place(row: int, index: tuple[int, ...]) -> str:
    return f"row {row}, token {index[0]}"


def line_differences(
    phase: str, name: str, numbers: Iterable[int], first: Sequence[Tensor], second: Sequence[Tensor]
) -> list[Difference]:
    """Compare a field of some rows, per token or ragged; of rows of different lengths, the lines that both have.

    Args:
      phase: of a step, that writes the field.
      name: of the field.
      numbers: of the rows.
      first, second: [count, ...] of each row.
    """
    differences = []
    for number, x, y in zip(numbers, first, second, strict=True):
        length = min(len(x), len(y))
        place = functools.partial(_token_place, number)
        differences.append(difference(phase, "field", name, x[:length], y[:length], place))
    return joined_differences(differences)


def digest_difference(role: str, first: Mapping[str, str], second: Mapping[str, str]) -> Difference:
    """Compare the digests of a role's weights, by the weights' names."""
    unlike = [name for name in {**first, **second} if first.get(name) != second.get(name)]
    same = Difference(f"update_{role}", "digests", f"weights of {role} by their digests", len(second))
    return same._replace(count=len(unlike), largest=math.inf, where=unlike[0]) if unlike else same


def joined_differences(parts: Iterable[Difference]) -> list[Difference]:
    """Join the parts of each phase and name, which were compared one by one or by several ranks."""
    joined: dict[tuple[str, str], Difference] = {}
    for part in parts:
        key = part.phase, part.name
        before = joined.get(key, part._replace(total=0, count=0))
        larger = part if part.count and (not before.count or part.largest > before.largest) else before
        joined[key] = larger._replace(total=before.total + part.total, count=before.count + part.count)
    return list(joined.values())


def metric_differences(first: Mapping[str, float | None], second: Mapping[str, float | None]) -> list[Difference]:
    """Compare metrics except times and memory; one that is not in both differs. None stands for what is no number."""
    differences = []
    for name in dict.fromkeys((*first, *second)):
        if name == "step" or name.startswith(MEASURED) or name.endswith(MEASURED_OF_EPISODES):
            continue
        phase = next((phase for phase, prefixes in METRIC_PHASES.items() if name.startswith(prefixes)), "update")
        if name not in first or name not in second:
            lacks = "first" if name not in first else "second"
            differences.append(unequal(phase, "metric", name, f"the {lacks} has no such metric"))
            continue
        x, y = (torch.tensor(math.nan if v is None else v, dtype=torch.float64) for v in (first[name], second[name]))
        differences.append(difference(phase, "metric", name, x, y))
    return differences


def phase_of_field(writer: str, stage: str) -> str:
    """Phase of a step that writes a field of the rows, which are at the stage "drawn" or "scored"."""
    if stage == "drawn":
        return "generate"
    return "advantage" if writer in ("source", "advantage", "trainer") else f"score_{writer}"


def phase_of_leaf(name: str) -> str:
    """Phase of a step that writes a leaf of the state, such as "roles/policy/params/embed"."""
    part, _, rest = name.partition("/")
    if part in ("earlier", "following"):
        return "update"
    phases = {"roles": f"update_{rest.partition('/')[0]}", "source": "generate"}
    return phases.get(part, "advantage")


def by_phase(differences: Iterable[Difference]) -> list[tuple[str, list[Difference]]]:
    """The phases of a step in their order, each with what was compared in it: tensors first, metrics last."""
    phases: dict[str, list[Difference]] = {}
    for part in sorted(differences, key=lambda part: KINDS.index(part.kind)):
        phases.setdefault(part.phase, []).append(part)
    return sorted(phases.items(), key=lambda phase: PHASE_ORDER.index(phase[0].partition("_")[0]))


def _bits(x: Tensor) -> Tensor:
    return x.contiguous().view(BIT_VIEWS[x.element_size()]) if x.is_floating_point() else x
