"""Model of the bytes that log-probabilities move through a GPU's L2 and HBM, by blocks of logits. It needs no GPU.

    python benchmarks/logit_blocks.py
    python benchmarks/logit_blocks.py --tokens=32768 --l2_mb=50

Every size of a block is a row: all columns of a chunk of tokens, the block that `linear_logprob` takes on such a GPU,
and others beside it. A cache of the L2's size that evicts what was used least recently sees every tile of each product
and of each kernel in order; what it misses or writes back are bytes of HBM. Milliseconds are predictions: a product
takes its FLOPs in whole turns of all processors and, after them, the writes of its results, a kernel its bytes through
the L2 or those of HBM, whatever is longer, and each launch a gap. With all columns and the sum apart that gives what
one H200 measured (benchmarks/README.md, "One GPU").
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from absl import app, flags

from funrl.compiled_kernels.logit_rows.operators import L2_SHARE, TILE, ColumnBlocks

TOKENS = flags.DEFINE_integer("tokens", 4096, "tokens", lower_bound=1)
EMBED = flags.DEFINE_integer("embed", 2048, "size of hidden states", lower_bound=1)
VOCAB = flags.DEFINE_integer("vocab", 151936, "tokens of the vocabulary", lower_bound=1)
L2_MB = flags.DEFINE_float("l2_mb", 60, "MiB of the L2", lower_bound=0)
PROCESSORS = flags.DEFINE_integer("processors", 132, "processors of the GPU", lower_bound=1)
CHUNK = 1024  # tokens at a time
PART = 4 * CHUNK  # tokens whose gradients of logits are whole at a time
FLOPS = 780e12  # of products in 16 bits, as measured
HBM = 4.2e12  # bytes a second, as measured
L2 = 7e12  # bytes a second; others measured 5.5 on fewer and slower processors
GAP = 2e-6  # seconds between two launches in which the device fills and drains
HALF, FULL = 2, 4  # bytes of a number


class Cache:
    """An L2 that evicts what was used least recently, and writes it back if it was written to."""

    def __init__(self, size: float):
        """Begin empty."""
        self._size = size
        self._held = 0.0
        self._lines: collections.OrderedDict[Hashable, tuple[float, bool]] = collections.OrderedDict()
        self.missed = 0.0  # bytes read from memory
        self.evicted = 0.0  # bytes written back to it
        self.moved = 0.0

    def read(self, key: Hashable, nbytes: float) -> None:
        """Read a tile, from memory where it is not held."""
        self._use(key, nbytes, dirty=False)

    def write(self, key: Hashable, nbytes: float) -> None:
        """Write a whole tile, which needs no read."""
        self._use(key, nbytes, dirty=True)

    def _use(self, key: Hashable, nbytes: float, dirty: bool) -> None:
        self.moved += nbytes
        _, was_dirty = self._lines.pop(key, (0.0, None))
        if was_dirty is None:
            self._held += nbytes
            self.missed += 0 if dirty else nbytes
        self._lines[key] = nbytes, dirty or bool(was_dirty)
        while self._held > self._size:
            _, (evicted, written) = self._lines.popitem(last=False)
            self._held -= evicted
            self.evicted += evicted if written else 0


class Costs(NamedTuple):
    """Costs of a pass.

    Attributes:
      launches: of kernels.
      l2, hbm: bytes.
      seconds: predicted.
    """

    launches: int = 0
    l2: float = 0.0
    hbm: float = 0.0
    seconds: float = 0.0

    def __add__(self, other: tuple) -> Costs:
        """Costs of both, one after the other."""
        return Costs(*(a + b for a, b in zip(self, other, strict=True)))


class Machine:
    """A GPU whose cache sees each launch."""

    def __init__(self) -> None:
        """Begin with an empty cache."""
        self._cache = Cache(L2_MB.value * 2**20)

    def product(self, rows: range, columns: range, inner: int, names: tuple[str, str, str], out: int) -> Costs:
        """Product of some rows of one matrix with some of another, by tiles.

        Args:
          rows, columns: of the result.
          inner: terms of a sum.
          names: of both matrices and the result; the tiles of "logits" and "gradients" are those of rows and columns.
          out: bytes of a number of the result.
        """
        left, right, result = names
        tiles = list(itertools.product(steps(columns, TILE[1]), steps(rows, TILE[0])))
        before = self._counts()
        for low in range(0, len(tiles), PROCESSORS.value):
            turn = tiles[low : low + PROCESSORS.value]  # they share what they read
            for axis, name in enumerate((right, left)):
                for part in dict.fromkeys(tile[axis] for tile in turn):
                    self._read_operand(name, part, TILE[1 - axis], inner)
            for column, row in turn:
                self._cache.write(place(result, row, column, rows, columns), TILE[0] * TILE[1] * out)
        moved, missed, evicted = self._since(before)
        turns = -(-len(tiles) // PROCESSORS.value)
        flops = 2.0 * turns * PROCESSORS.value * TILE[0] * TILE[1] * inner
        written = float(len(tiles) * TILE[0] * TILE[1] * out)
        seconds = max(flops / FLOPS, missed / HBM) + max(written / L2, evicted / HBM) + GAP
        return Costs(1, moved, missed + evicted, seconds)

    def _read_operand(self, name: str, first: int, count: int, inner: int) -> None:
        """Read rows of a matrix; gradients of logits are read by the tiles that were written."""
        if name == "gradients":
            for column in range(0, inner, TILE[1]):
                self._cache.read((name, first, column), count * TILE[1] * HALF)
        elif name == "gradients transposed":
            for row in range(0, inner, TILE[0]):
                self._cache.read(("gradients", row, first), count * TILE[0] * HALF)
        else:
            self._cache.read((name, first), count * inner * HALF)

    def rows(self, rows: range, columns: range, gradients: bool) -> Costs:
        """Kernel that reads logits row by row, and may write their gradients."""
        before = self._counts()
        for row, column in itertools.product(steps(rows, TILE[0]), steps(columns, TILE[1])):
            self._cache.read(place("logits", row, column, rows, columns), TILE[0] * TILE[1] * FULL)
            if gradients:
                self._cache.write(("gradients", row, column), TILE[0] * TILE[1] * HALF)
        moved, missed, evicted = self._since(before)
        return Costs(1, moved, missed + evicted, max(moved / L2, (missed + evicted) / HBM) + GAP)

    def passes(self, nbytes: float) -> Costs:
        """A pass over numbers of which the cache holds none."""
        return Costs(1, nbytes, nbytes, nbytes / HBM + GAP)

    def _counts(self) -> tuple[float, float, float]:
        return self._cache.moved, self._cache.missed, self._cache.evicted

    def _since(self, before: tuple[float, float, float]) -> tuple[float, ...]:
        return tuple(now - then for now, then in zip(self._counts(), before, strict=True))


def place(name: str, row: int, column: int, rows: range, columns: range) -> tuple[str, int, int]:
    """Memory of a tile; logits of each block take the memory of those before."""
    return (name, row - rows.start, column - columns.start) if name == "logits" else (name, row, column)


def steps(numbers: range, size: int) -> range:
    """First numbers of the tiles of a range."""
    return range(numbers.start, numbers.stop, size)


def blocks(total: int, size: int) -> Iterator[range]:
    """Parts of a range."""
    return (range(low, min(low + size, total)) for low in range(0, total, size))


def forward(tokens: int, columns: int) -> Costs:
    """Costs of log-probabilities by blocks of some tokens and columns."""
    machine = Machine()
    costs = Costs()
    for block in blocks(VOCAB.value, columns):
        for chunk in blocks(TOKENS.value, tokens):
            costs += machine.product(chunk, block, EMBED.value, ("hidden", "unembedding", "logits"), FULL)
            costs += machine.rows(chunk, block, gradients=False)
    return costs


def backward(tokens: int, columns: int, in_place: bool = True) -> Costs:
    """Costs of the gradients; `in_place`: the unembedding's is summed by its products."""
    machine = Machine()
    costs = Costs()
    T, V, D = TOKENS.value, VOCAB.value, EMBED.value
    weight = float(V * D)
    parts = list(blocks(T, PART))
    costs += machine.passes(weight * FULL) if not in_place else Costs()  # zeros
    for part in parts:
        for block in blocks(V, columns):
            for chunk in (range(x.start + part.start, x.stop + part.start) for x in blocks(len(part), tokens)):
                costs += machine.product(chunk, block, D, ("hidden", "unembedding", "logits"), FULL)
                costs += machine.rows(chunk, block, gradients=True)
        costs += machine.product(part, range(D), V, ("gradients", "unembedding columns", "hidden gradient"), HALF)
        whole = in_place and len(parts) > 1
        names = "gradients transposed", "hidden columns", "unembedding gradient"
        costs += machine.product(range(V), range(D), len(part), names, FULL if whole else HALF)
        if whole and part.start:  # the sum before is read
            costs += (0, weight * FULL, weight * FULL, weight * FULL / HBM)
        if not in_place:
            costs += machine.passes(weight * (HALF + FULL + FULL))
    return costs + (machine.passes(weight * (FULL + HALF)) if not in_place or len(parts) > 1 else Costs())


def main(argv: list[str]) -> None:
    del argv
    numbers = int(L2_SHARE * L2_MB.value * 2**20) // FULL
    width = ColumnBlocks(numbers, PROCESSORS.value).width(min(CHUNK, TOKENS.value), VOCAB.value)
    print(f"{TOKENS.value} tokens of {EMBED.value}, {VOCAB.value} columns, L2 of {L2_MB.value:g} MiB; predicted")
    print("| block | pass | launches | GB through the L2 | GB of HBM | ms |\n| --- | --- | --- | --- | --- | --- |")
    smaller = [(CHUNK, width), (CHUNK, 4096), (2 * CHUNK, 4096)]
    for tokens, columns in [(CHUNK, VOCAB.value), *dict.fromkeys(x for x in smaller if x[1] < VOCAB.value)]:
        name = f"{tokens} x {columns}" + " (taken)" * ((tokens, columns) == (CHUNK, width))
        rows = {"forward": forward(tokens, columns), "backward": backward(tokens, columns)}
        if columns == VOCAB.value:
            rows["backward, sum apart"] = backward(tokens, columns, in_place=False)
        for kind, costs in rows.items():
            cells = f"{costs.launches} | {costs.l2 / 1e9:.2f} | {costs.hbm / 1e9:.2f} | {1e3 * costs.seconds:.2f}"
            print(f"| {name} | {kind} | {cells} |")


if __name__ == "__main__":
    app.run(main)
