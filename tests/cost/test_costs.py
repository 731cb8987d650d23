"""The tracer, and arithmetic with costs."""

import pytest
import torch
from dry_jobs import CPU, H100, small
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from funrl.cost import dry_run
from funrl.cost import verdict as rates
from funrl.cost.tracing import tracer
from funrl.cost.tracing.costs import Costs, Traffic, after, along, plus, times
from funrl.cost.tracing.hardware import KernelWork, collective_seconds, kernel_seconds, op_seconds
from funrl.cost.tracing.tracer import ShapeMemo, Tracer, scan


def test_the_tracer_counts_what_lives():
    tracer = Tracer(CPU)
    with tracer, tracer.phase("all"):
        x = torch.zeros(1000)
        y = x + 1
        del y
        z = x * 2
        w = z.view(10, 100) @ z.view(100, 10)
        del x, z
    costs = tracer.phases["all"]
    assert costs.total == 4 * 2100 and costs.flops == 2 * 10 * 100 * 10
    assert tracer.sum == w.numel() * 4


def test_gathers_read_the_chosen_rows_of_their_source():
    tracer = Tracer(H100)
    with tracer, tracer.phase("all"):
        x = torch.zeros(100_000, 1000)
        rows = torch.arange(1000)
        for gather in (
            lambda: x[rows],
            lambda: x.index_select(0, rows),
            lambda: torch.nn.functional.embedding(rows, x),
        ):
            before = tracer.now.seconds
            gather()
            read = op_seconds(H100, 0, 2 * 4e6 + rows.nbytes, torch.float32)
            assert tracer.now.seconds - before == pytest.approx(read, abs=H100.launch)  # with that of a view


def test_the_backward_pass_has_a_moment_of_most_activations_and_one_with_gradients():
    """Deeper models may have the largest sum in either: one has inputs of all layers, the other all gradients."""
    tracer = Tracer(CPU, {(64, 64)})
    weights = [torch.zeros(64, 64, requires_grad=True) for _ in range(6)]
    with tracer, tracer.phase("update_policy"):
        x = torch.zeros(256, 64)
        for weight in weights:
            x = torch.tanh(x @ weight)
        torch.autograd.grad(x.sum(), weights)
    peaks = tracer.phases["update_policy"].peaks
    first, whole = peaks["activations"], peaks["backward"]
    assert sum(first.values()) <= sum(whole.values())
    assert sum(first.values()) - first["gradients"] >= sum(whole.values()) - whole["gradients"]
    assert first["activations"] >= whole["activations"] and first["gradients"] <= whole["gradients"]


def test_masks_that_are_not_known_are_true_everywhere():
    tracer = Tracer(CPU)
    with tracer:
        x = torch.randn(4, 6)
        assert x[torch.arange(24).view(4, 6) % 2 == 0].shape == (12,)
        assert x[x > 0].shape == (24,)
        assert torch.randperm(5, generator=torch.Generator().manual_seed(0)).sum().item() == 10
        with pytest.raises(RuntimeError, match="whole number"):
            x.argmax().item()


def test_sums_of_costs():
    a = Costs({"other": {"weights": 10.0}}, 1.0, 2.0, {("all_reduce", "g"): Traffic(1, 8)})
    b = Costs({"other": {"weights": 14.0, "batch": 2.0}, "forward": {"weights": 1.0}}, 2.0, 2.5)
    assert along(a, (b, 3)).peak == {"weights": 22.0, "batch": 6.0}
    assert along(a, (b, 3)).flops == 4.0
    assert times(a, 3).traffic["all_reduce", "g"] == (3, 24) and times(a, 3).total == 10
    assert after(a, b).total == 16 and after(a, b).seconds == 4.5
    assert plus(a, {"batch": 5}).total == 15


def test_what_sharding_sends_is_hidden_behind_kernels_on_an_accelerator():
    whole, sharded = (
        dry_run.estimate(small("sft", mesh="dp2", fsdp=fsdp, sizes={"layers": 2}), 30, H100) for fsdp in (False, True)
    )
    assert not whole.phases["update_policy"].early and not whole.phases["update_policy"].cover
    costs = sharded.phases["update_policy"]
    early = {op: sent.count for (op, _), sent in costs.early.items()}
    sent = {op: sent.count for (op, _), sent in costs.traffic.items()}
    assert {*early} == {"all_gather_into_tensor", "reduce_scatter_tensor"}
    assert all(0 < early[op] <= sent[op] for op in early)
    assert 0 < costs.cover < costs.seconds
    saved = rates.hidden(sharded, costs, H100)
    assert 0 < saved <= min(costs.cover, rates.communication(sharded, costs, H100))
    spent = costs.seconds + rates.communication(sharded, costs, H100)
    assert rates.phase_seconds(sharded, costs, H100) == pytest.approx(spent - saved)
    assert rates.hidden(sharded, costs, CPU) == 0
    twice = times(costs, 2)
    assert twice.cover == 2 * costs.cover and along(costs, (twice, 3)).early == times(costs, 4).early
    assert after(costs, costs).early == twice.early


def test_several_lines_from_one_point():
    first = Costs({"other": {"weights": 10.0}}, 1.0, 1.0, {("all_reduce", "g"): Traffic(1, 8)})
    policy = Costs({"other": {"weights": 12.0}}, 4.0, 2.0, {("all_reduce", "g"): Traffic(2, 16)})
    teacher = Costs({"other": {"weights": 15.0, "cache": 1.0}}, 6.0, 1.0, {("all_gather", "g"): Traffic(1, 4)})
    estimate = along(first, (policy, 10), (teacher, 2))
    assert estimate.peak == {"weights": 10 + 10 * 2 + 2 * 5, "cache": 2.0}
    assert estimate.flops == 1 + 10 * 3 + 2 * 5 and estimate.seconds == 11
    assert estimate.traffic == {("all_reduce", "g"): (9, 72), ("all_gather", "g"): (2, 8)}
    assert along(first) == first


def test_time_is_bound_by_the_slowest():
    flops, nbytes = 1e15, 1e6
    assert op_seconds(H100, flops, nbytes, torch.bfloat16) == pytest.approx(1e15 / 989e12 / 0.74)
    assert op_seconds(H100, 0, 3.35e12, torch.bfloat16) == pytest.approx(1 / 0.7)
    assert op_seconds(H100, 0, 8, torch.bfloat16) == H100.launch
    ring = collective_seconds(H100, "all_reduce", 0, 450e9, 2, per_node=2)
    assert ring == pytest.approx(2 * 0.5 / 0.7)


def test_kernels_reach_the_share_of_their_kind():
    attention = KernelWork(1e15, 0.0, torch.bfloat16, "attention")
    waiting = attention._replace(tile=1e12)  # FLOPs of a tile, two of which the last of 132 processors compute
    assert kernel_seconds(H100, attention) == (pytest.approx(1e15 / 989e12 / 0.39), "attention")
    assert kernel_seconds(H100, waiting)[0] == pytest.approx((1e15 + 2 * 132 * 1e12) / 989e12 / 0.39)
    joined = KernelWork(0.0, 3.35e12, torch.bfloat16, "elementwise")
    assert kernel_seconds(H100, joined) == (pytest.approx(H100.efficiency.fused / 0.7), "elementwise")
    assert kernel_seconds(H100, joined._replace(kind="memory")) == (pytest.approx(1 / 0.7), "memory")
    assert kernel_seconds(CPU, joined._replace(nbytes=1e10))[0] == pytest.approx(1 / 0.7)  # nothing is compiled


def test_rings_over_nodes_use_every_card_of_a_node():
    def seconds(op, ranks, per_node):
        return collective_seconds(H100, op, 0, 50e9, ranks, per_node=per_node) * 0.7

    assert seconds("all_gather_into_tensor", 16, 8) == pytest.approx(15 / 16 / 8)
    assert seconds("all_gather_into_tensor", 16, 1) == pytest.approx(15 / 16)
    assert seconds("all_to_all_single", 16, 8) == pytest.approx(0.5)  # of each device's bytes leave by its own card


@pytest.mark.slow
def test_what_is_remembered_of_operators_changes_no_number():
    job = small("dpo", mesh="dp2,tp2", fsdp=True)
    with_it = dry_run.estimate(job, 8, CPU).phases
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ShapeMemo, "run", lambda memo, func, args, kwargs, key: _in_mode(memo.fake, func, args, kwargs))
        patch.setattr(tracer, "_works", dict)
        without = dry_run.estimate(job, 8, CPU).phases
    assert with_it == without


def _in_mode(fake, func, args, kwargs):
    with fake:
        return func(*args, **kwargs)


def test_results_are_made_again_with_their_shapes_and_storages():
    fake = FakeTensorMode()
    memo, aten = ShapeMemo(fake), torch.ops.aten

    def run(func, *args):
        return memo.run(func, args, {}, scan(func, args, {}, by_shapes=False).key)

    with fake:
        x, y = torch.empty(3, 4), torch.empty(3, 4)
    for given in (x, y):
        view = run(aten.slice.Tensor, given, 0, 1, 3)
        assert (view.shape, view.storage_offset()) == ((2, 4), 4)
        assert view.untyped_storage()._cdata == given.untyped_storage()._cdata
        total = run(aten.add.Tensor, given, 1)
        assert total.shape == (3, 4) and total.untyped_storage()._cdata != given.untyped_storage()._cdata
        assert run(aten.add_.Tensor, given, 1) is given
    assert run(aten.add.Tensor, x, True).dtype == torch.float32 and len(memo.known) == 4
    assert isinstance(run(aten.sum.default, x), FakeTensor)
