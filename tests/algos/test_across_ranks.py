"""Every piece on real ranks gives the bits that it gives on one: advantages, filters, quantiles, denominators, choices.

Rows are wider than a block of a sum, so that sums are rounded in the order of blocks.
"""

import functools
import hashlib
from typing import Any, NamedTuple

import numpy as np
import pytest
import rows_preference
import torch
from tables import ROWS as TABLE

from funrl.algos.advantages.flow import OPENING_FIELDS
from funrl.algos.advantages.groups import group_mean, groups_of
from funrl.algos.applying import first_signal
from funrl.algos.core import Advantage, Signal, reduce
from funrl.algos.filters.by_row import every, not_truncated
from funrl.algos.recipes import NAMES, recipe
from funrl.batch import Batch, as_dict, declare, example, map_fields
from funrl.data.packing import RowCost
from funrl.fields import FIELDS
from funrl.mesh.collectives import gather_objects
from funrl.mesh.launch import launch
from funrl.mesh.mesh import parse, single
from funrl.trainer.steps.learn import denominators
from funrl.trainer.steps.micro import plan_epoch
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.step_rows import UpdatePlan, split_rows

B, T, GROUP = 24, 640, 4
PARTS = [np.arange(24)[::-1], np.array([3, 17, 4]), np.array([7])]  # mini-batches; one has an empty completion alone
RECIPES = {name: recipe(name)() for name in NAMES}
WITH_ADVANTAGE = [name for name, made in RECIPES.items() if made.advantage is not None]


class Case(NamedTuple):
    """An advantage, and what it is given."""

    piece: Advantage
    batch: Batch
    signal: Signal


@functools.cache
def drawn():
    """Float64 fields, whose sums are rounded, of rows of any length; groups of four; ties among scores."""
    rng = np.random.default_rng(3)
    length = torch.from_numpy(rng.integers(12, T + 1, B))
    length[5] = 640
    at, start = torch.arange(T), torch.from_numpy(rng.integers(1, 12, B))[:, None]
    mask = (at >= start) & (at < length[:, None])
    mask[7] = False  # an empty completion
    fixed = {
        "mask": mask,
        "sampled": mask,
        "selected": mask & (at % 2 == 0),
        "length": length,
        "tokens": torch.from_numpy(rng.integers(0, 99, (B, T))),
        "group": torch.arange(B) // GROUP,
        "score": torch.from_numpy(rng.integers(0, 3, B)).double() / 2,
        "truncated": length > 600,
        "greedy_score": torch.from_numpy(rng.integers(0, 2, B)).double(),
        "prompt_value": (torch.arange(B) % 5).double() / 4,
        "imitated": mask & (at % 3 == 0),
        "demonstration": mask & (torch.arange(B) % GROUP == 1)[:, None],
        "scores": torch.from_numpy(rng.random((B, 3))).double(),
        "label": mask.double(),
        "mismatched": torch.arange(B) % 2 == 1,
        "failed": torch.arange(B) % 7 == 3,
        "stale": mask.roll(1, 1) & mask,
        "observed": mask & (at % 5 == 0),
        "unit": torch.arange(B),
        "author": torch.where(mask, torch.where(at % 7 == 0, 4, 1), at % 4),
        "state": torch.where(mask, (at // 300 + length[:, None]) % 3, 0),
        "episode": torch.arange(B),
        "agent": torch.zeros(B, dtype=torch.int64),
        "episode_tokens": mask.sum(1),
        "episode_first": torch.ones(B, dtype=torch.bool),
        "teacher_span": torch.where(mask, (at // 3 * 3 + 2).clamp(max=T - 1), -1),
        "turn": (torch.arange(T) >= 300).long().expand(B, T),
    }

    def value(name, like):
        if name in fixed:
            return fixed[name]
        x = torch.from_numpy(rng.standard_normal((B, *((T,) if like.dim() > 1 else ()), *like.shape[2:]))).double()
        x = -x.abs() if name.endswith("logp") else x.abs()
        return torch.where(mask.view(B, T, *(1,) * (x.dim() - 2)), x, 0) if x.dim() > 1 else x

    names = [name for name in as_dict(example()) if name not in ("positions", "segments", "teacher_topk", "digests")]
    batch = Batch(**{name: value(name, getattr(example(), name)) for name in names})
    return declare(batch, OPENING_FIELDS)._replace(opening=mask & (mask.cumsum(1) == 1))


@functools.cache
def cases():
    """The chain of every recipe, and every piece of the tables."""
    results = {name: Case(RECIPES[name].advantage, drawn(), first_signal(drawn())) for name in WITH_ADVANTAGE}
    for row in TABLE:
        if row.kind == "advantage":
            batch = row.prepare(drawn())
            results[f"piece {row.name}"] = Case(row.make(), batch, row.subject.signal(batch))
    return results


def long_groups(batch):
    """A user's filter of groups that reads tokens."""
    tokens, groups = batch.across.sums(batch.mask), groups_of(batch.group)
    assert (batch.mask.sum(1) <= batch.across.own(batch.length)).all()  # each of its own row
    return group_mean(tokens, groups) > 300


def filters():
    rows = {row.name: row.make() for row in TABLE if row.kind == "filter"}
    rows["groups by their tokens"] = every(not_truncated(), long_groups)
    return rows | {name: made.filter for name, made in RECIPES.items() if made.filter is not None}


def losses(pairs):
    """The losses of every recipe, and every loss and reduction of the tables.

    Args:
      pairs: those of pairs too.
    """
    results = {
        f"{name} {role}": loss
        for name, made in RECIPES.items()
        if pairs or made.example == "row"
        for role, loss in made.losses.items()
    }
    for row in TABLE:
        if row.kind == "loss" and (pairs or row not in rows_preference.ROWS):
            results[row.name] = row.make()
        elif row.kind == "reduction":
            results[row.name] = reduce(lambda x, batch: (x, {}), row.make())
    return results


def digest(x: Any) -> str:
    return hashlib.sha256(x.contiguous().numpy().tobytes() if isinstance(x, torch.Tensor) else x.encode()).hexdigest()


def own_part(x, own):
    """A rank's rows of a field per token, no wider than they must be: ranks differ in their padding."""
    return x[own][:, : max(int(drawn().length[own].max()), 1) if len(own) else 8]


def on_rank(batch, owner, mesh):
    own = np.flatnonzero(owner == int(mesh.index(mesh.row_axes)))
    rows = split_rows(batch, owner, mesh)
    everywhere = FIELDS.rows()
    narrow = map_fields(lambda name, x: x if name in everywhere else own_part(batch.get(name), own), rows.batch)
    return rows._replace(batch=narrow), own


def advantage_bits(mesh, owners, names):
    """Digests of what chains and pieces make: of a rank's own rows, and of the table."""
    results = {}
    for name in names:
        piece, batch, signal = cases()[name]
        rows, own = on_rank(batch, owners[piece.whole_groups], mesh)
        whole, mask = batch.length, own_part(signal.mask, own)
        x = signal.x if signal.x.dim() == 1 else own_part(signal.x, own)
        weight = None if signal.weight is None else own_part(signal.weight, own)
        signal, state = piece.update(Signal(x, mask, weight=weight), piece.init(), rows.batch)
        metrics = sorted(signal.metrics.items())
        numbers = repr(state) + "".join(f"{key}{[x.double().item() for x in m]}" for key, m in metrics)
        results[name, "table"] = digest(numbers)
        made = {"x": signal.x, "mask": signal.mask, "returns": signal.returns, "weight": signal.weight}
        for field, x in (made | {"rows": signal.rows} | signal.extra).items():
            if x is not None:
                for i, row in enumerate(range(len(x)) if x.dim() == 1 else own.tolist()):
                    results[name, field, row] = digest(x[i, : whole[row]] if x.dim() > 1 else x[i])
    return results


def choice_bits(mesh, owner):
    """Digests of what are the same on all ranks: kept rows, denominators, mini-batches."""
    rows, _ = on_rank(drawn(), owner, mesh)
    results = {("filter", name): digest(keep(rows.batch)) for name, keep in filters().items()}
    sides = drawn()._replace(segments=(torch.arange(T) < 320).long().expand(B, T) % 2 + 1)
    for pairs, batch in {False: drawn(), True: sides}.items():
        roles = {name: Role(None, loss=loss) for name, loss in losses(pairs).items()}  # type: ignore[arg-type]
        for n, totals in enumerate(denominators(roles, on_rank(batch, owner, mesh)[0], PARTS)):
            for name, (dens, tokens) in totals.items():
                results["denominators", pairs, n, name] = digest(torch.stack([*dens, tokens]))
    for count in (1, 5):
        plan = plan_epoch(rows.lengths, mesh, UpdatePlan(3, minibatches=count, token_budget=700, cost=RowCost()), 1)
        results["mini-batches", count] = repr([part.tolist() for part in plan.parts])
    return results


def bits(mesh, ranks, names):
    """Groups stay whole for the pieces that need them so; else rows are anywhere, but none on ranks beyond `ranks`."""
    owners = {True: np.arange(B) // GROUP % ranks, False: np.arange(B) * 7 // 3 % ranks}
    return advantage_bits(mesh, owners, names), choice_bits(mesh, owners[False])


@functools.cache
def on_one():
    advantages, choices = bits(single(), 1, list(cases()))
    assert {name for name, *_ in advantages} == set(cases()) and len(cases()) > 80 and len(filters()) > 5
    assert len({name for kind, *_, name in choices if kind == "denominators"}) == len(losses(True)) > 30
    return advantages, choices


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("text,share", [("dp3", 1), ("dp2,tp2", 12)])  # of dp3 one has no rows
def test_every_piece_gives_the_same_bits_on_every_mesh(text, share):
    """Every piece where ranks have the rows; beside tensor ranks, which none of them sees, one in twelve."""
    advantages, choices = on_one()
    names, seen = list(cases())[::share], set()
    for mine, shared in launch(lambda mesh: gather_objects(bits(mesh, 2, names), mesh), parse(text)):
        wrong = sorted({(name, what) for (name, what, *row), x in mine.items() if advantages[name, what, *row] != x})
        assert not wrong
        assert sorted(key for key in choices if choices[key] != shared[key]) == []
        seen |= set(mine)
    assert seen == {key for key in advantages if key[0] in names}
