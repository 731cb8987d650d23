"""Placement of a run on pools of ranks: which ranks train, generate, or score for a role. It imports no torch.

    place = read_placement("train:dp2@0-1 generate:dp1@2 reference:dp1@3")
    place.generate.ranks  # (2,)

A pool is written NAME:MESH@RANKS; NAME is train, generate, or that of a role that does not learn. MESH is that of a
mesh flag, or a number of ranks, which is so many dp. Without @RANKS a pool has the next ranks that no other one names.
"""

from __future__ import annotations

import collections
import itertools
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from funrl.mesh.text import AXES, TOKEN_AXES, MeshError, devices, parse, text

_TRAIN = "train"
_GENERATE = "generate"
_POOLS = (_TRAIN, _GENERATE)
_RAY = "generate:ray"
_JOINED = "generate:join"  # of earlier versions
_ONE = "generate:1"  # a pool that stands for them, so that the rest is read as it is with one


class RankPool(NamedTuple):
    """Ranks that do one thing.

    Attributes:
      sizes: of their mesh.
      ranks: their numbers in the run, ascending.
    """

    sizes: dict[str, int]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        return f"{text(self.sizes)}@{ranks_text(self.ranks)}"


class Placement(NamedTuple):
    """Pools of a run. Every rank is in exactly one.

    Attributes:
      train: the ranks that score and learn; rank 0 is the first of them.
      generate: the generator ranks.
      scoring: the ranks of each role that has some of its own, by the role's name.
    """

    train: RankPool
    generate: RankPool
    scoring: Mapping[str, RankPool] = {}

    @property
    def pools(self) -> dict[str, RankPool]:
        """All pools, by name."""
        return {_TRAIN: self.train, _GENERATE: self.generate, **self.scoring}

    @property
    def world(self) -> int:
        """Number of ranks of the run."""
        return sum(len(pool.ranks) for pool in self.pools.values())

    def shards(self, name: str) -> bool:
        """True if weights of a pool may be fully sharded: it trains, or scores on ranks that share tokens."""
        return name == _TRAIN or (name in self.scoring and devices(self.scoring[name].sizes, TOKEN_AXES) > 1)

    @property
    def launched(self) -> dict[str, int]:
        """Sizes of a mesh over all ranks, with which they are started."""
        return dict.fromkeys(AXES, 1) | {AXES[0]: self.world}

    def __str__(self) -> str:
        return " ".join(f"{name}:{pool}" for name, pool in self.pools.items())


def read_placement(flag: str, mesh: Mapping[str, int]) -> Placement:
    """Parse the text of --place.

    Args:
      flag: the text.
      mesh: sizes of the mesh to train on, where the text does not give it.

    Raises:
      MeshError: the text is not a placement of all ranks.
    """
    entries: dict[str, tuple[dict[str, int], tuple[int, ...] | None]] = {}
    for part in flag.split():
        name, colon, rest = part.partition(":")
        if not colon or not name.isidentifier():
            raise _error(
                flag, f"{part!r} is not a pool; write {', '.join(_POOLS)} or a role, a colon and a mesh, as generate:2"
            )
        if name in entries:
            raise _error(flag, f"the pool {name!r} is given twice")
        shape, sign, numbers = rest.partition("@")
        entries[name] = _sizes(flag, shape), _ranks(flag, part, numbers) if sign else None
    if _GENERATE not in entries:
        raise _error(flag, "no pool generates; add one, such as generate:2, or leave --place out")
    entries = {_TRAIN: entries.get(_TRAIN, (dict(mesh), None)), _GENERATE: entries.pop(_GENERATE)} | entries
    if entries[_GENERATE][0]["sequence"] > 1:
        raise _error(flag, "generation does not split the tokens of a row; write dp for sp")
    pools = _pools(flag, entries)
    if 0 not in pools[_TRAIN].ranks:
        raise _error(flag, "rank 0 writes the run's files, and has to be one that trains")
    return Placement(pools.pop(_TRAIN), pools.pop(_GENERATE), pools)


def names_train(flag: str) -> bool:
    """True if the text of --place gives the mesh to train on."""
    return any(part.startswith(f"{_TRAIN}:") for part in flag.split())


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as the flag writes them: "0-3,6"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and spans[-1][1] == rank - 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in spans)


class GeneratorBounds(NamedTuple):
    """Bounds on the number of generators.

    Attributes:
      least: without so many the run waits, and ends after --timeout.
      most: that are asked for.
      tensor: devices of each, which split its weights.
    """

    least: int
    most: int
    tensor: int = 1

    @property
    def sizes(self) -> dict[str, int]:
        """Sizes of the mesh of a generator."""
        return dict.fromkeys(AXES, 1) | {"tensor": self.tensor}


def generators_on_ray(flag: str | None) -> GeneratorBounds | None:
    """Bounds that the text of --place gives to generators on Ray; None: there are none.

    Raises:
      MeshError: the pool is not of this form.

    Example:
      >>> generators_on_ray("train:dp2 generate:ray1-8"), generators_on_ray("generate:ray4,tp2")
      (GeneratorBounds(least=1, most=8, tensor=1), GeneratorBounds(least=4, most=4, tensor=2))
    """
    pool = _ray_pool(flag or "")
    if _JOINED in (flag or "").split():
        raise MeshError(
            f"--place={flag}: generators of other jobs do not join any more; write generate:ray1-8 for one to eight "
            "generators on a Ray cluster"
        )
    if not pool:
        return None
    match = re.fullmatch(r"generate:ray(\d{1,6})(?:-(\d{1,6}))?(?:,tp(\d{1,4}))?", pool)
    least, most, tensor = (match[1], match[2] or match[1], match[3] or 1) if match else (0, 0, 0)
    bounds = GeneratorBounds(int(least), int(most), int(tensor))
    if not 1 <= bounds.least <= bounds.most or bounds.tensor < 1:
        raise MeshError(
            f"--place={flag}: {pool!r} is not a number of generators on Ray; write generate:ray1-8, generate:ray4, or "
            "generate:ray1-8,tp2 for generators of two devices each"
        )
    return bounds


def training_sizes(flag: str, mesh: Mapping[str, int]) -> dict[str, int]:
    """Sizes of the mesh to train on, which has all ranks of the run.

    Args:
      flag: the text of --place, with generators on Ray.
      mesh: sizes of the mesh to train on, where the text does not give it.

    Raises:
      MeshError: the text is not such a placement.
    """
    pool = _ray_pool(flag)
    try:
        pools = read_placement(" ".join(_ONE if part == pool else part for part in flag.split()), mesh)
    except MeshError as error:
        raise MeshError(f"--place={flag}: {str(error).partition(': ')[2]}") from None
    world = devices(pools.train.sizes)
    if tuple(pools.train.ranks) != tuple(range(world)):
        raise MeshError(
            f"--place={flag}: generators on Ray are no ranks of this run, whose ranks all train: 0 to {world - 1}"
        )
    return pools.train.sizes


def _pools(flag: str, entries: Mapping[str, tuple[dict[str, int], tuple[int, ...] | None]]) -> dict[str, RankPool]:
    """The pools with their ranks, after a check that these are all ranks once."""
    named = [rank for _, ranks in entries.values() if ranks is not None for rank in ranks]
    taken = collections.Counter(named)
    if twice := sorted(rank for rank, count in taken.items() if count > 1):
        raise _error(flag, f"rank {ranks_text(twice)} is in two pools; every rank is in one")
    world = sum(devices(sizes) for sizes, _ in entries.values())
    free = [rank for rank in range(world) if rank not in taken]
    pools = {}
    for name, (sizes, ranks) in entries.items():
        count = devices(sizes)
        if ranks is None:
            ranks, free = tuple(free[:count]), free[count:]
        elif len(ranks) != count:
            shape = text(sizes)
            raise _error(flag, f"{name}:{shape} has {count} devices and @{ranks_text(ranks)} is {len(ranks)} ranks")
        pools[name] = RankPool(sizes, ranks)
    used = {rank for pool in pools.values() for rank in pool.ranks}
    if missing := sorted(set(range(max(used) + 1)) - used):
        raise _error(flag, f"rank {ranks_text(missing)} is in no pool; the ranks of all pools are 0 to {world - 1}")
    return pools


def _sizes(flag: str, shape: str) -> dict[str, int]:
    if not shape:
        raise _error(flag, "a pool has no mesh; write one such as dp2 or 2")
    return parse(f"dp{shape}" if shape.isdigit() else shape, "place")


def _ranks(flag: str, part: str, numbers: str) -> tuple[int, ...]:
    """The ranks of "0-3,6"."""
    ranks: list[int] = []
    for span in numbers.split(","):
        match = re.fullmatch(r"(\d{1,6})(?:-(\d{1,6}))?", span)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise _error(flag, f"{part!r}: {span!r} is not a range of ranks; write @0-7 or @8")
        ranks += range(int(match[1]), int(match[2] or match[1]) + 1)
    if any(a >= b for a, b in itertools.pairwise(ranks)):
        raise _error(flag, f"{part!r}: its ranks are not ascending")
    return tuple(ranks)


def _error(flag: str, problem: str) -> MeshError:
    return MeshError(f"--place={flag}: {problem}")


def _ray_pool(flag: str) -> str:
    """The pool of generators on Ray; "" if there is none."""
    return next((part for part in flag.split() if part.startswith(_RAY)), "")
