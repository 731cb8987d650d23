"""Scores and gradients do not depend on micro-batches, padding, or which rank works on which rows."""

import dataclasses
import functools
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from small_runs import GRPO, PPO, assert_same, assert_same_gradients, begin, gap, gradients, run_steps, small_job
from small_runs import scored_batch as scored_of

from funrl import trees
from funrl.algos.core import Loss
from funrl.algos.metrics import Sum, token_mean_of
from funrl.algos.recipes.dpo import dpo
from funrl.batch import TOKEN_INT, Batch, map_fields
from funrl.compiled_kernels.exact import packs
from funrl.compiled_kernels.kernel_library import library_problem
from funrl.fields import FIELDS
from funrl.mesh import collectives, sums
from funrl.mesh.launch import launch
from funrl.mesh.mesh import Mesh, parse, single
from funrl.mesh.rules import Layout, shard
from funrl.trainer.jobs.build import build
from funrl.trainer.phases import learn_batch
from funrl.trainer.steps import step as steps
from funrl.trainer.steps.micro import mini_batches, own_micro_batches
from funrl.trainer.steps.optimizer import is_constant
from funrl.trainer.steps.roles import Role
from funrl.trainer.steps.score import score_role
from funrl.trainer.steps.step import gradient
from funrl.trainer.steps.step_rows import split_rows, take

MANY = 1 << 20  # tokens: everything in one micro-batch
FEW = 24  # tokens: one or two rows in a micro-batch
PLAIN: dict[str, Any] = {"batch_prompts": 4, "samples_per_prompt": 3, "max_new_tokens": 6, "verify_sync": False}


@functools.cache
def scored(compose, mesh="dp1"):
    """A job, its models, its state and a batch, after one step's rollout. Longer prompts make rows of two widths."""
    job = small_job(compose, mesh=mesh, **PLAIN)
    job = dataclasses.replace(job, task=job.task._replace(prompts=[*map(longer, job.task.prompts[:40])]))
    run, state = begin(job, single())
    state = state._replace(roles={n: r._replace(params=trees.map(jiggle, r.params)) for n, r in state.roles.items()})
    rows, state, _ = scored_of(run, state)
    assert len(set(rows.lengths.tolist())) > 4 and rows.batch.tokens.shape[1] > 16
    return run, state, rows


def longer(example):
    """Some prompts several times as long: micro-batches of different widths."""
    return example._replace(tokens=example.tokens * (1 + len(example.tokens) % 3))


def jiggle(x):
    """Weights near x: a critic whose head is not 0, a policy that is not the one that sampled."""
    noise = torch.randn(x.shape, dtype=x.dtype, generator=torch.Generator().manual_seed(x.numel()))
    return x + 0.3 * noise


WITH_ENTROPY = functools.partial(PPO, entropy_coef=0.1)


def moved(state):
    """The state after some updates: ratios are not 1, values not the old ones."""
    policy = state.roles["policy"]
    policy = policy._replace(params=trees.map(lambda x: jiggle(jiggle(x) - 0.25 * x), policy.params))
    return state._replace(roles={**state.roles, "policy": policy})


def assert_equal(a, b, tolerance=1e-12):
    assert_same_gradients(a, b, tolerance, metrics=True)


def _sums_on_two_ranks(mesh):
    """Gradients with sums that begin in the last backward pass, and with sums after it; events of the former."""
    run, state = begin(small_job(PPO, mesh="dp2", **PLAIN), mesh)
    rows, state, _ = scored_of(run, state)
    sums.SUM_BYTES = 1  # each leaf is a bucket
    events = []
    start, add = collectives.start_psum, steps.LastMicroBatch.add

    def watched_start(x, *where):
        events.append("sum")
        return start(x, *where)

    def watched_add(last, i, grad):
        events.append("gradient")
        add(last, i, grad)

    collectives.start_psum, steps.LastMicroBatch.add = watched_start, watched_add
    beside = gradients(run, state, rows, FEW)
    begun = list(events)
    steps._is_gathered = lambda role: True
    return beside, gradients(run, state, rows, FEW), begun


@pytest.mark.gloo
def test_sums_over_ranks_begin_in_the_last_backward_pass_with_the_same_bits():
    beside, after, events = launch(_sums_on_two_ranks, parse("dp2"), "cpu")
    for name, expected in after.items():
        got = beside[name]
        assert got.loss == expected.loss and got.metrics == expected.metrics
        assert all(map(torch.equal, trees.leaves(got.tree), trees.leaves(expected.tree)))
    leaves = sum(len(trees.leaves(got.tree)) for got in beside.values())
    assert events.count("gradient") == leaves
    waiting = [events[: i + 1].count("gradient") - events[:i].count("sum") for i, e in enumerate(events) if e == "sum"]
    assert max(waiting) <= 8, "a layer's gradients at most wait for one that comes before them"


def _summed_tree(scale):
    """A function of weights as an objective, in the order in which a model with pictures uses them."""

    def objective(params, *_):
        x = (params["embed"] * params["vision"]["project"]).cos()
        for layer in params["layers"]:
            x = (x + layer["router_bias"].detach()).sin() * layer["w"]
        return (scale * x * params["norm"].detach() * params["unembed"]).sum(), ((torch.ones(()),), {})

    return objective


@pytest.mark.parametrize("earlier", [False, True], ids=["one micro-batch", "several"])
def test_no_bucket_waits_for_a_weight_without_a_gradient(earlier, monkeypatch):
    """A frozen norm, biases of routers, and a projector whose gradient is the last."""
    started = []
    monkeypatch.setattr(sums, "SUM_BYTES", 1)  # each leaf is a bucket
    monkeypatch.setattr(collectives, "start_psum", lambda x, *where: started.append(len(x)) or 2 * x)
    monkeypatch.setattr(collectives, "wait", lambda x: x)
    monkeypatch.setattr(steps, "objective", _summed_tree(1.0))
    weight = iter(torch.linspace(0.5, 1.5, 7))
    shapes = {
        "embed": 0,
        "layers": ({"router_bias": 0, "w": 0}, {"router_bias": 0, "w": 0}),
        "norm": 0,
        "unembed": 0,
        "vision": {"project": 0},
    }
    params = trees.map(lambda _: next(weight, torch.tensor(2.0)).expand(3).clone(), shapes)
    layouts = trees.map(lambda x: Layout((3,), ((),), (2, 1, 1, 1)), params)
    model = SimpleNamespace(abilities=SimpleNamespace(code=""))
    placed = SimpleNamespace(mesh=Mesh(parse("dp2")), model=model)
    role: Any = SimpleNamespace(stored=layouts, compute=layouts, partial=None, placed=placed, frozen=("norm",))
    _, gradients = trees.value_and_grad(_summed_tree(1.0))(params)
    last = steps.LastMicroBatch(role, params, trees.clone(gradients) if earlier else None, None)
    begun = {}

    def watched_add(i, grad):
        begun[i] = len(started)
        last.add(i, grad)

    _, own = trees.value_and_grad(last.objective, watched_add)(params)
    assert len(started) == len(last.sums.buckets) == 9
    assert max(begun) == 7 and begun[7] >= 7, "only the embedding comes as late as the projector"
    summed, _ = last.finish(own)
    factor = 4 if earlier else 2
    assert all(map(torch.equal, trees.leaves(summed), [factor * x for x in trees.leaves(gradients)]))


def test_constant_weights_are_those_frozen_and_those_that_a_model_of_this_package_reads_detached():
    models: list[Any] = [SimpleNamespace(abilities=SimpleNamespace(code=code)) for code in ("", "SwiftFormer")]
    names = ("norm", "layers/0/router_bias", "layers/0/layer_scale", "layers/0/w")
    assert [is_constant(name, models[0], ("norm",)) for name in names] == [True, True, True, False]
    assert [is_constant(name, models[1], ("norm",)) for name in names] == [True, False, False, False]


def norm(tree):
    return torch.cat([x.reshape(-1) for x in trees.leaves(tree)]).norm().item()


@pytest.mark.slow
def test_micro_batches_change_nothing():
    run, state, rows = scored(WITH_ENTROPY)
    state = moved(state)
    whole = gradients(run, state, rows, MANY)
    assert all(norm(item.tree) > 1e-2 for item in whole.values())
    for budget in (1, FEW, 100):
        assert_equal(gradients(run, state, rows, budget), whole)


@pytest.mark.slow
def test_padding_changes_nothing():
    """Wider rows, other pad tokens, and anything at all in the fields outside of the mask."""
    run, state, rows = scored(WITH_ENTROPY)
    state = moved(state)
    whole = gradients(run, state, rows, MANY)
    at_T = torch.arange(rows.batch.tokens.shape[1] + 24)

    def widen(name, x):
        filler = 7 if x.dtype == TOKEN_INT else False if x.dtype == torch.bool else float("nan")
        return torch.nn.functional.pad(x, (0, 24), value=filler) if FIELDS[name].kind.per_token else x

    wide = map_fields(widen, rows.batch)
    beyond = at_T >= wide.length[:, None]
    wide = rows._replace(batch=wide._replace(tokens=torch.where(beyond, 11, wide.tokens)))
    for budget in (MANY, FEW):
        assert_equal(gradients(run, state, wide, budget), whole)


def test_the_order_of_rows_changes_nothing():
    run, state, rows = scored(WITH_ENTROPY)
    order = torch.randperm(len(rows.owner), generator=torch.Generator().manual_seed(0))
    shuffled = take(rows, order.numpy())
    assert_equal(gradients(run, state, shuffled, 100), gradients(run, state, rows, MANY))


def test_the_gradient_is_that_of_the_loss_written_out():
    """GRPO on one batch: the mean over rows of the mean over tokens of -min(r A, clip(r) A) + beta k3."""
    run, state, rows = scored(functools.partial(GRPO, kl_coef=0.1, dual_clip=1e9))
    state, placed, batch = moved(state), run.parts.roles["policy"].placed, rows.batch

    def loss(params):
        logp = placed.token_scores(params, Batch(tokens=batch.tokens)).logp
        total = torch.zeros((), dtype=torch.float64)
        for row in range(len(batch.tokens)):
            at = batch.mask[row]
            ratio, adv = (logp - batch.old_logp)[row][at].exp(), batch.advantage[row][at]
            ahead = (batch.ref_logp - logp)[row][at]
            per_token = -torch.minimum(ratio * adv, ratio.clamp(0.8, 1.2) * adv) + 0.1 * (ahead.exp() - 1 - ahead)
            total = total + per_token.mean() / len(batch.tokens)
        return total, ()

    (value, _), grads = trees.value_and_grad(loss)(state.roles["policy"].params)
    ours = gradients(run, state, rows, 100)["policy"]
    assert ours.loss.item() == pytest.approx(value.item(), abs=1e-12)
    assert gap(ours.tree, grads) < 1e-12
    assert ours.metrics["actor/pg_clipfrac"] > 0.1  # the clip was at work


def test_scores_of_several_micro_batches_are_those_of_one():
    run, state, rows = scored(PPO)
    role = run.parts.roles["policy"]._replace(writes={"old_logp": "logp", "old_entropy": "entropy"})
    params = state.roles["policy"].params
    row, batch = score_role(role, params, rows, MANY), rows.batch
    for budget in (1, FEW, 100):
        for name, tensor in score_role(role, params, rows, budget).items():
            assert tensor.shape == batch.tokens.shape and not tensor.requires_grad
            assert (tensor - row[name]).abs().max() < 1e-12
    assert row["old_entropy"][batch.mask].min() > 0


@pytest.mark.parametrize(
    ("job", "shares"),
    [
        ({"compose": PPO}, True),
        ({"compose": PPO, "samples_per_prompt": 1}, False),
        ({"compose": dpo, "reward": None}, False),
    ],
    ids=["groups", "single completions", "texts"],
)
def test_runs_that_sample_groups_alone_share_beginnings_of_rows(job, shares):
    roles = build(small_job(**job), single(), print).roles
    assert {role.placed.shares_prefixes for role in roles.values()} == {shares}


class Linear(NamedTuple):
    """A placed model that can be checked by hand: the value of token v is params[v]."""

    mesh: Any
    model: Any = type("Model", (), {"unembed": None, "adapters": None})
    stored: Any = None
    compute: Any = None
    partial: Any = None
    dtype: torch.dtype = torch.float64

    def values(self, params, rows):
        return params["w"][rows.tokens]


def weighted_numerators(x_BT, batch):
    """The mean over tokens of A x, and how many micro-batches there were."""
    mean = token_mean_of(x_BT * torch.nan_to_num(batch.advantage), batch.mask)
    return (mean.num,), {"pieces": Sum(x_BT.new_ones(()).detach()), "mean": mean._replace(num=mean.num.detach())}


WEIGHTED = Loss(lambda batch: (batch.mask.count_nonzero().double(),), weighted_numerators)


def by_hand(rows, width=8):
    """A batch of `rows` rows, its parameters and its gradient: A of a token is its row's number plus 1."""
    length = torch.tensor([1 + i % width for i in range(rows)])
    tokens = torch.arange(rows * width).view(rows, width) % 5
    mask = (torch.arange(width) < length[:, None]) & (torch.arange(width) >= length[:, None] // 2)
    advantage = torch.where(mask, torch.arange(rows)[:, None] + 1.0, float("nan")).double()
    expected = torch.zeros(5, dtype=torch.float64)
    for i in range(rows):
        for t in range(width):
            if mask[i, t]:
                expected[tokens[i, t]] += (i + 1) / int(mask.sum())
    batch = Batch(tokens=tokens, mask=mask, length=length, advantage=advantage)
    return batch, {"w": torch.arange(5).double()}, {"w": expected}


def hand_gradient(mesh, rows, budget):
    batch, params, _ = by_hand(rows)
    whole = {"w": Layout((5,), ((),), tuple(mesh.sizes.values()))}
    role = Role(Linear(mesh, stored=whole, compute=whole, partial={"w": frozenset()}), loss=WEIGHTED)
    owner = np.arange(rows) % mesh.size(mesh.row_axes)
    pieces = [piece.batch for piece in own_micro_batches(split_rows(batch, owner, mesh), budget)]
    grads, metrics, loss, *_ = gradient(role, params, pieces, WEIGHTED.denominators(batch))
    return grads, {k: float(v) for k, v in metrics.items()}, float(loss)


@pytest.mark.slow
@pytest.mark.gloo
def test_data_ranks_without_rows_contribute_nothing_and_nothing_hangs():
    """One to nine rows over four data ranks: the closed form, on every rank's parameters."""
    cases = [(1, 8), (3, MANY), (5, 8), (9, 16)]
    over_ranks = launch(
        lambda mesh: [hand_gradient(mesh, *case) for case in cases], {**single().sizes, "data": 4}, "cpu"
    )
    for (rows, budget), (grads, metrics, loss) in zip(cases, over_ranks, strict=True):
        _, params, expected = by_hand(rows)
        value = float((expected["w"] * params["w"]).sum())
        assert gap(grads, expected) < 1e-14, (rows, budget)
        assert (loss, metrics["mean"]) == pytest.approx((value, value), abs=1e-13)
        alone = hand_gradient(single(), rows, budget)
        assert gap(alone[0], expected) < 1e-14
        if rows >= 4:  # equal numbers of micro-batches on every rank
            assert metrics["pieces"] % 4 == 0


@pytest.mark.slow
@pytest.mark.gloo
def test_fewer_rows_than_data_ranks_in_a_mini_batch():
    """Two rows on three data ranks with real models: one data rank only keeps pace."""
    run, state, rows = scored(PPO)
    few = take(rows, np.array([0, 7]))
    expected = gradients(run, state, few, MANY)
    sizes = {**run.job.sizes, "data": 3}
    job = dataclasses.replace(run.job, sizes=sizes, generate_sizes=sizes)

    def program(mesh):
        parts = build(job, mesh, print)
        roles = {
            name: role._replace(params=shard(role.params, parts.roles[name].placed.stored, mesh))
            for name, role in state.roles.items()
        }
        there = split_rows(few.batch, np.array([2, 0]), mesh)  # one data rank has no row
        return gradients(run._replace(job=job, parts=parts), state._replace(roles=roles), there, 8)

    assert_equal(launch(program, sizes, "cpu"), expected, 1e-11)


@pytest.mark.gloo
@pytest.mark.slow
def test_a_run_whose_mini_batches_have_fewer_rows_than_ranks():
    settings = {"batch_prompts": 2, "minibatches": 3}  # mini-batches of two rows, and of fewer
    assert_same(run_steps(1, mesh="dp3", **settings), run_steps(1, **settings), 1e-9)


@pytest.mark.parametrize("rows, minibatches, sizes", [(8, 2, [4, 4]), (9, 6, [2, 2, 2, 1, 1, 1]), (3, 6, [1, 1, 1])])
def test_a_pass_has_the_mini_batches_of_the_schedule(rows, minibatches, sizes):
    parts = mini_batches(rows, minibatches, seed=0, step=1, epoch=0)
    assert [len(part) for part in parts] == sizes
    order = np.concatenate(parts).tolist()
    assert order != list(range(rows)) and sorted(order) == list(range(rows))


@pytest.mark.skipif(library_problem() is not None, reason=str(library_problem()))
def test_an_update_frees_the_packed_copies_of_what_the_weights_were():
    run, state = begin(small_job(GRPO, minibatches=1), single())
    rows, state, _ = scored_of(run, state)
    before = set(packs._KNOWN)
    weights = {x.untyped_storage()._cdata for x in trees.leaves(state.roles["policy"].params)}
    gradients(run, state, rows)
    assert weights & (set(packs._KNOWN) - before)
    learn_batch(run, state, rows)
    assert not weights & set(packs._KNOWN)
