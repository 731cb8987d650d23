"""Sequences as plain lists: what references of terms are written on, and their layout in rows of tensors.

One set of sequences is laid out as padded rows or packed ones, with anything or NaN outside the mask; and any batch is
taken apart into its sequences.

A sequence is a dict of lists, one number a position: the fields of a batch, "logp" (the argument of a term) and
"mask". References get the same dicts with masked positions only, and a further field "held": the numbers of "logp" that
a formula treats as constants, so that a numerical derivative by "logp" leaves them alone.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from funrl.batch import Batch

Sequence = dict[str, list]

LENGTHS = (5, 3, 6, 2, 4, 6)
TOP = 3


def make_sequences(seed: int = 0) -> list[Sequence]:
    """Six sequences, three pairs, with prompts and holes outside the mask."""
    draw = random.Random(seed)
    return [_sequence(draw, i, n) for i, n in enumerate(LENGTHS)]


def _sequence(draw: random.Random, number: int, length: int) -> Sequence:
    logp = [-draw.uniform(0.05, 3.0) for _ in range(length)]

    def near(spread: float) -> list[float]:
        return [x + draw.uniform(-spread, spread) for x in logp]

    mask = [t > 0 and (t == length - 1 or draw.random() < 0.8) for t in range(length)]
    return {
        "logp": logp,
        "mask": mask,
        "old_logp": [min(x, -0.01) for x in near(0.9)],
        "rollout_logp": [min(x, -0.01) for x in near(0.9)],
        "ref_logp": [min(x, -0.01) for x in near(1.5)],
        "teacher_logp": [min(x, -0.01) for x in near(1.5)],
        "advantage": [draw.gauss(0.0, 1.5) for _ in range(length)],
        "weight": [draw.uniform(0.3, 1.8) for _ in range(length)],
        "entropy": [draw.uniform(0.1, 2.0) for _ in range(length)],
        "old_entropy": [draw.uniform(0.1, 2.0) for _ in range(length)],
        "entropy_coefficient": [0.3] * length,
        "selected": [draw.random() < 0.5 for _ in range(length)],
        "label": [float(number in (0, 3, 4))] * length,
        "margin": [0.1 + number // 2] * length,
        "kl_baseline": [0.2] * length,
        "score": [1.0 - 0.4 * number] * length,
        "sum_pi_squared": [draw.uniform(0.2, 0.9) for _ in range(length)],
        "divergence": [draw.uniform(0.1, 2.0) for _ in range(length)],
        "teacher_topk_logp": [_top(draw) for _ in range(length)],
        "topk_logp": [_top(draw) for _ in range(length)],
    }


def _top(draw: random.Random) -> list[float]:
    scores = [draw.uniform(0.1, 1.0) for _ in range(TOP + 1)]
    return [math.log(x / sum(scores)) for x in scores[:TOP]]


def masked(sequences: list[Sequence]) -> list[Sequence]:
    """What a reference sees."""
    seen = []
    for s in sequences:
        keep = [t for t, m in enumerate(s["mask"]) if m]
        only = {name: [values[t] for t in keep] for name, values in s.items()}
        seen.append(only | {"held": list(only["logp"])})
    return seen


def lay_out(
    sequences: list[Sequence], rows: list[list[int]], fields: frozenset[str], outside: float = math.nan
) -> tuple[Tensor, Batch]:
    """The argument of a term and its batch.

    Args:
      rows: which sequences lie in each row, in order; where each holds one, rows are padded and there are no segments.
      fields: of the batch.
      outside: what stands outside the mask.
    """
    packed = any(len(row) > 1 for row in rows)
    width = max(sum(len(sequences[i]["mask"]) for i in row) for row in rows) + 1

    def field(name: str) -> Tensor:
        sample = sequences[0][name][0]
        filler: Any = False if isinstance(sample, bool) else [outside] * TOP if isinstance(sample, list) else outside
        table = []
        for row in rows:
            values = []
            for i in row:
                values += [x if m else filler for x, m in zip(sequences[i][name], sequences[i]["mask"], strict=True)]
            table.append(values + [filler] * (width - len(values)))
        return torch.tensor(table, dtype=None if isinstance(sample, bool) else torch.float64)

    def segments() -> Tensor:
        table = []
        for row in rows:
            values = [k + 1 for k, i in enumerate(row) for _ in sequences[i]["mask"]]
            table.append(values + [0] * (width - len(values)))
        return torch.tensor(table)

    mask = field("mask")
    known = {name: field(name) for name in fields - {"score", "mask", "segments"}}
    if "score" in fields:
        known["score"] = torch.tensor([sequences[row[0]]["score"][0] for row in rows], dtype=torch.float64)
    tokens = torch.zeros_like(mask, dtype=torch.int64)
    batch = Batch(tokens=tokens, mask=mask, segments=segments() if packed else None, **known)
    return field("logp"), batch


PADDED = [[i] for i in range(len(LENGTHS))]
PACKED = [[0, 1], [2, 3, 4, 5]]


def unpack(x_BT: Tensor, sequences: list[Sequence], rows: list[list[int]]) -> list[list[float]]:
    """The numbers on the mask, by sequence."""
    out: list[list[float]] = [[] for _ in sequences]
    for b, row in enumerate(rows):
        start = 0
        for i in row:
            for t, m in enumerate(sequences[i]["mask"]):
                if m:
                    out[i].append(x_BT[b, start + t].item())
            start += len(sequences[i]["mask"])
    return out


def on_batch(reference: Callable[[list[Sequence]], list[list[float]]]) -> Callable[[list, SimpleNamespace], list]:
    """A reference of sequences as one of a batch of nested lists: (logp [B][T], batch) -> loss [B][T]."""

    def of_batch(logp: list[list[float]], b: SimpleNamespace) -> list[list[float]]:
        sequences, places = apart(logp, b)
        loss = [[0.0] * len(row) for row in b.mask]
        for where, losses in zip(places, reference(sequences), strict=True):
            for (i, t), value in zip(where, losses, strict=True):
                loss[i][t] = value
        return loss

    return of_batch


def apart(logp: list[list[float]], b: SimpleNamespace) -> tuple[list[Sequence], list[list[tuple[int, int]]]]:
    """The sequences of a batch that have masked tokens, with masked positions only, and where each position was."""
    known = {k: x for k, x in vars(b).items() if isinstance(x, list) and k not in ("mask", "segments", "scores")}
    sequences, places = [], []
    for i, mask in enumerate(b.mask):
        numbers = [1] * len(mask) if b.segments is None else b.segments[i]
        for number in sorted(set(numbers) - {0}):
            at = [t for t, on in enumerate(mask) if on and numbers[t] == number]
            if at:
                s = {k: [x[i][t] if isinstance(x[i], list) else x[i] for t in at] for k, x in known.items()}
                sequences.append(s | {name: [logp[i][t] for t in at] for name in ("logp", "held")})
                places.append([(i, t) for t in at])
    return sequences, places
