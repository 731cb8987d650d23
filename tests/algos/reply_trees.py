"""Random trees of replies, laid out as rows in several ways: every sampled token has the same numbers in all of them.

    forest = random_forest(seed)
    rows = forest.rows(forest.leaves())      # one row for each leaf, as a run has them
    rows = forest.rows(forest.scattered(1))  # the same replies on more rows

A reply is trained in one row; where others contain it, it is context, with other numbers.
"""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor

from funrl.algos.advantages.units import by_unit, episode_fields, units_of
from funrl.batch import Batch, as_dict, kind_of, with_rows_spread
from funrl.testing.awkward_rows import awkward_batch

PROMPT, GAP = 2, 1  # tokens of context before the first reply, and between replies
PER_REPLY = 4  # tokens at most
Path = list[int]  # numbers of replies, from the first to the last


class Reply(NamedTuple):
    """A sampled node: the reply before it, its tokens among all tokens, its unit, and its turn."""

    parent: int | None
    tokens: range
    unit: int
    turn: int


class Forest(NamedTuple):
    """The replies of all agents of all episodes.

    Attributes:
      replies: by number; parents come before their children.
      units: (group, episode, agent) of each unit.
      flat: numbers of all sampled tokens in one row [1, N], and of the units [U].
    """

    replies: list[Reply]
    units: list[tuple[int, int, int]]
    flat: Batch

    def path(self, number: int) -> Path:
        parent = self.replies[number].parent
        return [*([] if parent is None else self.path(parent)), number]

    def leaves(self) -> list[Path]:
        """Paths to the replies that nothing follows, in the order of units."""
        inner = {reply.parent for reply in self.replies}
        return self._ordered([n for n in range(len(self.replies)) if n not in inner])

    def single(self) -> list[Path]:
        """A row for each reply."""
        return self._ordered(list(range(len(self.replies))))

    def scattered(self, seed: int) -> list[Path]:
        """Paths to the leaves and to some inner replies, those of each unit in any order."""
        rng = random.Random(seed)
        leaves = [path[-1] for path in self.leaves()]
        inner = [n for n in range(len(self.replies)) if n not in leaves]
        ends = leaves + rng.sample(inner, rng.randint(0, len(inner)))
        rng.shuffle(ends)
        return self._ordered(ends)

    def _ordered(self, ends: list[int]) -> list[Path]:
        return [self.path(n) for n in sorted(ends, key=lambda n: self.replies[n].unit)]

    def rows(self, paths: list[Path]) -> Layout:
        """Rows of paths; each reply is trained in the first one that has it."""
        width = max(PROMPT + sum(len(self.replies[n].tokens) + GAP for n in path) for path in paths) + 2
        index = torch.full((len(paths), width), -1)
        turn = torch.zeros(len(paths), width, dtype=torch.int64)
        lengths = []
        seen = set[int]()
        for row, path in enumerate(paths):
            begin = PROMPT
            for n in path:
                reply = self.replies[n]
                end = begin + len(reply.tokens)
                turn[row, begin:] = reply.turn
                if n not in seen:
                    index[row, begin:end] = torch.tensor(reply.tokens)
                seen.add(n)
                begin = end + GAP
            lengths.append(begin - GAP)
        unit_B = torch.tensor([self.replies[path[-1]].unit for path in paths])
        return _laid_out(self, index, turn, torch.tensor(lengths), unit_B)


class Layout(NamedTuple):
    """Rows of a forest.

    Attributes:
      batch: the rows.
      index: [B, T] which of all tokens; -1: context.
    """

    batch: Batch
    index: Tensor

    @property
    def by_unit(self) -> Batch:
        """As a chain sees them."""
        units = units_of(self.batch)
        assert units is not None
        return by_unit(self.batch, units)

    def on_tokens(self, x_N: Tensor, outside: float = 0.0) -> Tensor:
        """Each token of the rows, by its number."""
        x_BT = x_N[self.index.clamp_min(0)]
        return torch.where(self.index >= 0, x_BT, torch.full_like(x_BT, outside))

    def flat(self, x_BT: Tensor) -> Tensor:
        """Numbers on the rows' masks, as those of all tokens [N]."""
        on = self.index >= 0
        return x_BT.new_zeros(int(self.index.max()) + 1).index_put((self.index[on],), x_BT[on])


def _laid_out(forest: Forest, index: Tensor, turn: Tensor, length: Tensor, unit_B: Tensor) -> Layout:
    draw = torch.Generator().manual_seed(5)
    held = as_dict(forest.flat)
    fields = {"mask": index >= 0, "turn": turn, "length": length}
    for name, x in held.items():
        kind = kind_of(forest.flat, name)
        if name in fields or name == "tokens":
            continue
        if kind.everywhere:
            fields[name] = x[unit_B]
        elif kind.per_token:
            values = x[0][index.clamp_min(0)]
            context = values.flatten()[torch.randperm(values.numel(), generator=draw)].view_as(values)
            on = fields["mask"] if values.dim() == 2 else fields["mask"][..., None]
            fields[name] = torch.where(on, values, context & False if values.dtype == torch.bool else context)
    batch = Batch(tokens=torch.zeros_like(index), **fields)
    units = units_of(batch)
    assert units is not None
    return Layout(batch._replace(**episode_fields(batch, units)), index)


def spread(batch: Batch) -> Batch:
    """Rows as an update has them."""
    return with_rows_spread(batch)


def random_forest(seed: int, branches: bool = True) -> Forest:
    """Two groups of three episodes of one or two agents, each a tree of replies."""
    rng = random.Random(seed)
    replies: list[Reply] = []
    units: list[tuple[int, int, int]] = []
    count = 0
    for episode in range(6):
        for agent in range(rng.randint(1, 2)):
            own: list[int] = []
            for _ in range(rng.randint(1, 5)):
                parent = None if not own else rng.choice(own) if branches else own[-1]
                turn = 0 if parent is None else replies[parent].turn + 1
                size = rng.randint(1, PER_REPLY)
                replies.append(Reply(parent, range(count, count + size), len(units), turn))
                own.append(len(replies) - 1)
                count += size
            units.append((episode // 3, episode, agent))
    return Forest(replies, units, _numbers(count, units, seed))


def _numbers(count: int, units: list[tuple[int, int, int]], seed: int) -> Batch:
    """Values of the awkward batch for [1, count] tokens and for the units."""
    like = awkward_batch(seed=seed)
    draw = torch.Generator().manual_seed(seed)
    fields = {}
    for name, x in as_dict(like).items():
        kind = kind_of(like, name)
        if kind.everywhere:
            fields[name] = x[torch.randint(0, len(x), (len(units),), generator=draw)]
        elif kind.per_token and name != "token_reward":
            flat = x.flatten(0, 1)
            fields[name] = flat[torch.randint(0, len(flat), (count,), generator=draw)][None]
    group, episode, agent = (torch.tensor(column) for column in zip(*units, strict=True))
    scores = torch.randint(0, 4, (len(units),), generator=draw).double() / 3
    fields |= {"group": group, "episode": episode, "agent": agent, "score": scores}
    fields["demonstration"] = torch.zeros(1, count, dtype=torch.bool)
    return Batch(**fields)
