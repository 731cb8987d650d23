"""What the table of pieces is made of: a row per piece, one small batch that is awkward on purpose, and its variants.

A row's reference is written from the formula, with Python floats and loops: it gets the batch as nested lists
(`plain(batch)`), with the same field names, and knows nothing of tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch

from funrl import trees
from funrl.algos import Loss, Mean, Reduction, clean, where_masked
from funrl.batch import FIELDS, Batch, as_dict, token_fields


@dataclass(frozen=True)
class Row:
    """One public piece, with one choice of its arguments.

    Attributes:
      name: "module.function", of funrl.algos, plus anything after a space to tell rows of one piece apart.
      kind: what `make()` is, and what `reference` takes and gives:
        advantage: (x, b) -> dict of any of x, mask, returns, weight, rows and extra fields; nested lists
        term: (logp, b) -> loss [B][T]; what stands outside the mask is not compared
        loss: (logp, b) -> list of (numerator, denominator)
        reduction: (loss, b) -> (numerator, denominator)
        filter: (b) -> [B] bool
      make: () -> the piece.
      reference: see kind.
      tokens: an advantage piece that is given token rewards [B, T] instead of scores [B].
      prepare: (batch) -> batch, what the piece needs beyond the example.
      smooth: the derivative of the reference is the gradient (no stopped gradients inside): it is checked by
        differences.
      packed: the piece gives the same on packed rows. False where it reads a field of whole rows.
      additive: the piece of a whole is the sum over its parts. False where it takes statistics over the batch.
      permutes: the piece does not care for the order of rows.
      also: further public names that this row covers.
    """

    name: str
    kind: str
    make: Callable[[], Any]
    reference: Callable[..., Any]
    tokens: bool = False
    prepare: Callable[[Batch], Batch] = lambda batch: batch
    smooth: bool = False
    packed: bool = True
    additive: bool = True
    permutes: bool = True
    also: tuple[str, ...] = ()


#   prompt, completion with a tool's output in it (.), padding; row 4 has no sampled token
MASKS = (
    "..xxxx.......",
    "...xx..xxx...",
    ".xxxxxxxxxxx.",
    "..x..........",
    "....,........",
    "..xxx.x......",
    "...xxxxx.....",
)
GROUPS = (7, -2, 7, 40, 7, -2, 3)  # 40 and 3 are alone, any order, any numbers
SEQUENCE_LENGTHS = (7, 11, 12, 3, 6, 8, 8)


def example(dtype=torch.float64, seed=0) -> Batch:
    """Seven rows of thirteen tokens with every field of a batch filled with plausible random numbers."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[c == "x" for c in row] for row in MASKS])
    B, T = mask.shape

    def normal(*shape, scale=1.0, shift=0.0):
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) * scale + shift).to(dtype)

    def logp(*shape):
        return -normal(*shape).abs() - 0.05

    old = logp(B, T)
    near = {
        name: old + normal(B, T, scale=0.3) for name in ("rollout_logp", "ref_logp", "teacher_logp", "implicit_logp")
    }
    return Batch(
        tokens=torch.randint(0, 50, (B, T), generator=draw),
        mask=mask,
        length=torch.tensor(SEQUENCE_LENGTHS),
        group=torch.tensor(GROUPS),
        score=normal(B, shift=0.3),
        scores=normal(B, 3),
        token_reward=normal(B, T, scale=0.1),
        truncated=torch.tensor([False, True, True, False, False, False, True]),
        failed=torch.tensor([False, False, True, True, False, False, False]),
        old_logp=old,
        value=normal(B, T),
        sum_pi_squared=old.exp().square() + 0.2 * normal(B, T).sigmoid(),
        greedy_score=normal(B),
        advantage=normal(B, T),
        returns=normal(B, T),
        weight=normal(B, T).abs() + 0.1,
        entropy=normal(B, T).abs(),
        old_entropy=normal(B, T).abs(),
        entropy_coefficient=torch.full((B, T), 0.02, dtype=dtype),
        selected=torch.rand(B, T, generator=draw) < 0.5,
        label=(torch.rand(B, T, generator=draw) < 0.5).to(dtype),
        margin=normal(B, T).abs(),
        kl_baseline=torch.full((B, T), 0.1, dtype=dtype),
        mismatched=torch.tensor([False, False, True, False, False, True, False]),
        imitated=mask & (torch.arange(B) % 2 == 0)[:, None],
        divergence=normal(B, T).abs(),
        **near,
    )


def policy_logp(batch: Batch, seed=1) -> torch.Tensor:
    """Log-probabilities of a policy that has moved away from the old one, some of them beyond every clip."""
    draw = torch.Generator().manual_seed(seed)
    moved = torch.randn(batch.mask.shape, generator=draw, dtype=torch.float64) * 0.4
    return (batch.old_logp.double() + moved).to(batch.old_logp.dtype)


def token_signal(batch: Batch, seed=2) -> torch.Tensor:
    """Token rewards [B, T]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch.mask.shape, generator=draw, dtype=torch.float64).to(batch.score.dtype)


def plain(batch: Batch) -> SimpleNamespace:
    """The batch as nested lists; what it does not have is None."""
    return SimpleNamespace(**{k: v.tolist() if (v := batch.get(k)) is not None else None for k in FIELDS})


def sampled(b: SimpleNamespace, i: int) -> list[int]:
    """The positions of row i's sampled tokens."""
    return [t for t, on in enumerate(b.mask[i]) if on]


def members(b: SimpleNamespace, i: int) -> list[int]:
    """The rows of row i's group, itself included."""
    return [j for j, number in enumerate(b.group) if number == b.group[i]]


def sequences(b: SimpleNamespace) -> list[int]:
    """The rows that have a sampled token."""
    return [i for i in range(len(b.mask)) if any(b.mask[i])]


def grid(b: SimpleNamespace, fill: float = 0.0) -> list[list[float]]:
    """[B][T] of one number."""
    return [[fill] * len(row) for row in b.mask]


def _per_token(batch: Batch):
    names = frozenset(token_fields()) - {"tokens", "mask", "positions", "segments"}
    return {name: x for name, x in as_dict(batch).items() if name in names}


def poisoned(batch: Batch) -> Batch:
    """NaN in every per-token field outside the mask."""
    fields = {}
    for name, x in _per_token(batch).items():
        mask = batch.mask if x.dim() == 2 else batch.mask[..., None]
        fields[name] = torch.where(mask, x, torch.nan) if x.is_floating_point() else x
    return batch._replace(**fields)


def widened(batch: Batch, columns: int) -> Batch:
    """More padding on the right."""
    fields = {"mask": batch.mask, "tokens": batch.tokens, **_per_token(batch)}
    fields |= {k: x for k in ("segments", "positions") if (x := batch.get(k)) is not None}
    pads = {k: (0, columns) if x.dim() == 2 else (0, 0, 0, columns) for k, x in fields.items()}
    return batch._replace(**{k: torch.nn.functional.pad(x, pads[k]) for k, x in fields.items()})


def packed(batch: Batch, logp: torch.Tensor) -> tuple[Batch, torch.Tensor]:
    """The same sequences, several to a row: [0, 3, 4], [2], [1], [5, 6]; fields of whole rows are dropped."""
    rows, width = ([0, 3, 4], [2], [1], [5, 6]), 20

    def lay(x):
        out = x.new_zeros(len(rows), width, *x.shape[2:])
        for r, members_ in enumerate(rows):
            at = 0
            for i in members_:
                n = SEQUENCE_LENGTHS[i]
                out[r, at : at + n] = x[i, :n]
                at += n
        return out

    numbers = torch.zeros_like(batch.tokens)
    for members_ in rows:
        for number, i in enumerate(members_):
            numbers[i] = number + 1
    fields = {k: lay(x) for k, x in _per_token(batch).items()}
    return Batch(tokens=lay(batch.tokens), mask=lay(batch.mask), segments=lay(numbers), **fields), lay(logp)


def fractions(loss: Loss, x: torch.Tensor, batch: Batch) -> tuple[tuple[Mean, ...], dict[str, Any]]:
    """The parts of a loss as numerators over denominators, and its metrics."""
    nums, metrics = loss.numerators(x, batch)
    return tuple(Mean(num, den) for num, den in zip(nums, loss.denominators(batch), strict=True)), metrics


def reduced(reduction: Reduction, loss: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor | None = None) -> Mean:
    """The one part of a reduction."""
    (num,), (den,) = reduction.numerators(loss, mask, segments), reduction.denominators(mask, segments)
    return Mean(num, den)


def on_term(term: Any, x: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, dict[str, Any]]:
    """A term as `reduce` runs it: what lies outside the mask is 0, and the batch is constant."""
    return term(where_masked(x, batch.mask), clean(batch))


def sum_leaves(state) -> float:
    """The sum of all numbers in a state."""
    return float(sum(x.sum() for x in trees.leaves(state)))
