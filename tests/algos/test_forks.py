"""A fork changes no number: the same replies on other rows of an episode give the same advantages and losses.

Trees of replies are laid out with a row for each leaf, as a run has them, with a row for each reply, and in between.
"""

import functools

import pytest
import rows_preference
import torch
from reply_trees import Layout, random_forest, spread
from tables import ROWS
from test_named import SAMPLED, VARIANTS, compose

from funrl import trees
from funrl.algos import Signal, apply_advantage
from funrl.algos.core import run_piece
from funrl.algos.losses.reductions import sequence_mean
from funrl.algos.terms import episodes_of
from funrl.batch import Batch
from funrl.testing.awkward_rows import with_own_fields
from funrl.testing.subjects import loss_parts, reduction_parts, signal_fields

# Their numbers are of what follows a reply on its path, or precedes it: they need the rows that a run has, a path to
# each leaf. See `paths_of`, and the test of listed trajectories in tests/trainer/test_episode_rows.py.
ALONG_PATHS = {
    "gae": "the next state of a reply is on its path",
    "reward_to_go": "rewards that follow on its path",
    "to_turns": "rewards of later turns of its path",
    "turn_gae": "the next turn of its path",
    "discount_segments": "rows that follow its path",
    "step_groups": "returns of a step's path",
    "subtree_baselines": "paths that share a beginning",
    "turn_relative": "the last turn of a path",
    "to_last_token": "the end of each path has the outcome",
    "token_rewards": "as to_last_token",
    "kl_in_reward": "its row of the table begins with to_last_token",
    "future_weighted": "ratios of what follows on its path",
    "optimal_token_baseline": "gradients of what was sampled before it",
    "weigh_early_tokens": "advantages of what was sampled before it",
}
# Recipes with such pieces.
OF_PATHS = {"ppo", "prime", "vapo", "sao", "compaction", "pf_ppo", "otb", "fipo", "gigpo", "iw_opd", "treepo"}
OF_PAIRS = {id(row) for row in rows_preference.ROWS}
LAYOUTS = {
    "single": lambda forest: forest.single(),
    "scattered": lambda forest: forest.scattered(1),
    "otherwise scattered": lambda forest: forest.scattered(2),
}
PIECES = [row for row in ROWS if id(row) not in OF_PAIRS]
RECIPES = [name for name in {**SAMPLED, **VARIANTS} if compose(name).example == "row"]


def of_kind(*kinds):
    rows = [row for row in PIECES if row.kind in kinds and row.name.split()[0] not in ALONG_PATHS]
    return pytest.mark.parametrize("row", rows, ids=lambda row: row.name)


@functools.cache
def layouts():
    forest = random_forest(0)
    return forest.rows(forest.leaves()), {name: forest.rows(made(forest)) for name, made in LAYOUTS.items()}


def assert_same(numbers):
    """Numbers by name of a layout are the same for all layouts of a forest."""
    whole, others = layouts()
    want = numbers(whole)
    for name, layout in others.items():
        got = numbers(layout)
        assert set(got) == set(want)
        for field, x in want.items():
            same = torch.allclose(got[field].double(), x.double(), rtol=1e-12, atol=1e-12)
            assert same, f"{field} of {name} rows"


def ramp(layout: Layout):
    """Any numbers from -1 to 1, one for each token."""
    return torch.linspace(-9, 9, int(layout.index.max()) + 1, dtype=torch.float64).sin()


def of_advantage(row, layout):
    subject = row.subject
    piece = subject.piece
    batch = with_own_fields(layout.by_unit, piece.fields)
    x = layout.on_tokens(ramp(layout)) if row.tokens else batch.score
    given = Signal(x, batch.mask)
    signal, state = run_piece(piece, given, piece.init(), batch)
    out = {name: layout.flat(x) if x.dim() == 2 else x for name, x in signal_fields(signal).items()}
    out |= {f"{name} {i}": x for name, metric in signal.metrics.items() for i, x in enumerate(metric)}
    return out | {f"state {i}": torch.as_tensor(x) for i, x in enumerate(trees.leaves(state))}


def of_loss(loss, batch: Batch, layout: Layout):
    logp = layout.on_tokens(-ramp(layout).abs(), float("nan")).requires_grad_()
    parts, metrics = loss_parts(loss, logp, spread(batch))
    out = {f"part {i} {j}": x.detach() for i, part in enumerate(parts) for j, x in enumerate(part)}
    out |= {name: metric.value for name, metric in metrics.items()}
    total = torch.stack([part.num for part in parts]).sum()
    if total.requires_grad:
        (gradient,) = torch.autograd.grad(total, logp)
        out["gradient"] = layout.flat(gradient)
    return out


@of_kind("advantage")
def test_a_fork_changes_no_advantage(row):
    assert_same(lambda layout: of_advantage(row, layout))


@of_kind("term", "loss")
def test_a_fork_changes_no_loss(row):
    def numbers(layout):
        batch = with_own_fields(layout.batch, getattr(row.subject.piece, "fields", {}))
        if "topk" in row.name:
            flat = [layout.flat(x) for x in (batch.old_logp, batch.ref_logp)]
            flat = torch.stack([flat[0], flat[1]], -1).log_softmax(-1) - 0.1
            tops = torch.stack([layout.on_tokens(x) for x in flat.unbind(-1)], -1)
            batch = batch._replace(teacher_topk_logp=tops, topk_logp=tops - 0.2)
        parts = [of_loss(loss, batch, layout) for loss in row.subject.losses()]
        return {f"{i} {name}": x for i, part in enumerate(parts) for name, x in part.items()}

    assert_same(numbers)


@of_kind("reduction")
def test_a_fork_changes_no_reduction(row):
    def numbers(layout):
        batch = spread(layout.batch)
        reduction = row.make().at(episodes_of(sequence_mean(), batch))
        parts = reduction_parts(reduction, layout.on_tokens(ramp(layout)), batch.mask)
        return {f"part {i} {j}": x for i, part in enumerate(parts) for j, x in enumerate(part)}

    assert_same(numbers)


@of_kind("filter")
def test_a_fork_changes_no_filter(row):
    assert_same(lambda layout: {"kept": row.make()(layout.by_unit)})


def of_recipe(algorithm, layout):
    batch = with_own_fields(layout.batch._replace(advantage=None, weight=None), algorithm.fields)
    if algorithm.advantage is not None:
        batch, _, _ = apply_advantage(algorithm.advantage, algorithm.advantage.init(), batch)
    parts = {role: of_loss(loss, batch, layout) for role, loss in algorithm.losses.items()}
    return {f"{role} {name}": x for role, part in parts.items() for name, x in part.items()}


@pytest.mark.parametrize("name", [name for name in RECIPES if name.split()[0] not in OF_PATHS])
def test_a_fork_changes_no_recipe(name):
    assert_same(lambda layout: of_recipe(compose(name), layout))


def differs(numbers):
    try:
        assert_same(numbers)
    except AssertionError:
        return True
    return False


def test_exceptions_are_needed():
    rows = [row for row in PIECES if row.kind == "advantage" and row.name.split()[0] in ALONG_PATHS]
    moved = {row.name.split()[0] for row in rows if differs(lambda layout, row=row: of_advantage(row, layout))}
    assert moved == ALONG_PATHS.keys() - {"future_weighted"}
    assert all(differs(lambda layout, name=name: of_recipe(compose(name), layout)) for name in OF_PATHS - {"pf_ppo"})


def test_the_optimal_baseline_counts_what_an_agent_sampled_whatever_the_row():
    """Without branches the rows of an episode are in the order of its replies."""
    row = next(row for row in ROWS if row.name == "optimal_token_baseline turns")
    forest = random_forest(4, branches=False)
    whole, single = (of_advantage(row, forest.rows(paths)) for paths in (forest.leaves(), forest.single()))
    assert whole["x"].count_nonzero() > 10
    torch.testing.assert_close(single["x"], whole["x"], rtol=1e-12, atol=1e-12)
