"""Sums of trees and ranges of rows, on one process and on real ranks."""

import pytest
import torch

from funrl import trees
from funrl.mesh import collectives, sums
from funrl.mesh.launch import launch
from funrl.mesh.mesh import Mesh, parse, single
from funrl.mesh.message_sizes import message_bytes
from funrl.mesh.rules import Layout

COUNTS = (0, 1, 3, 4, 7, 9)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("text", ["dp1", "dp4", "dp3,tp2", "dp2,sp3"])
def test_own_ranges_are_the_whole_in_order_and_differ_by_at_most_one(text, count):
    sizes = parse(text)
    for axes in ("data", ("data", "tensor"), ("data", "sequence")):
        meshes = [Mesh(sizes, rank) for rank in range(Mesh(sizes).world)]
        ranges = {m.index(axes): sums.own_range(count, m, axes) for m in meshes}
        shares = [ranges[i] for i in range(meshes[0].size(axes))]
        assert [i for share in shares for i in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.gloo
@pytest.mark.parametrize("bucket_bytes", [8, 128 << 20])
def test_psum_tree_sums_every_leaf_in_its_own_dtype(bucket_bytes, monkeypatch):
    """Whether a collective has a leaf of its own or shares it."""
    monkeypatch.setattr(sums, "SUM_BYTES", bucket_bytes)

    def tree_of(n):
        return {
            "a": torch.full((2, 3), float(n), dtype=torch.float64),
            "b": (torch.tensor(n), {"c": torch.tensor([0.5 * n, -n]), "d": torch.zeros(0)}),
            "none": None,
            "e": torch.tensor(1e-12 * n, dtype=torch.float64),
        }

    def program(mesh):
        return {axes: sums.psum_tree(tree_of(mesh.rank + 1), mesh, axes) for axes in ("data", "tensor")}

    # Ranks 0 to 3 hold 1 to 4; rank 0 shares data with rank 2 (tp is innermost) and tensor with rank 1.
    over = launch(program, parse("dp2,tp2"), "cpu")
    for axes, total in (("data", 1 + 3), ("tensor", 1 + 2)):
        for (name, got), (_, expected) in zip(trees.named(over[axes]), trees.named(tree_of(total)), strict=True):
            assert got.dtype == expected.dtype and got.shape == expected.shape, name
            torch.testing.assert_close(got, expected, rtol=1e-15, atol=0)


@pytest.mark.parametrize(
    ("ranks", "expected"), [(2, 128 << 20), (8, 128 << 20), (64, 128 << 20), (512, 512 << 20), (4096, 1 << 30)]
)
def test_a_message_has_a_megabyte_for_each_of_many_ranks(ranks, expected):
    assert message_bytes(ranks, sums.SUM_BYTES) == expected


def test_buckets_are_full_and_of_one_dtype():
    values = [
        torch.zeros(n, dtype=d)
        for n, d in (
            (2, torch.float32),
            (1, torch.int64),
            (2, torch.float32),
            (1, torch.float32),
            (9, torch.float32),
            (0, torch.float32),
        )
    ]
    assert list(sums._buckets(values, torch.float32, 16)) == [[0, 2], [3], [4, 5]]
    assert list(sums._buckets(values, torch.int64, 16)) == [[1]] and list(sums._buckets(values, torch.bool, 16)) == []


def test_buckets_are_sent_in_one_order_whatever_order_gradients_arrive_in(monkeypatch):
    sent = []
    monkeypatch.setattr(sums, "SUM_BYTES", 16)
    monkeypatch.setattr(collectives, "start_psum", lambda x, mesh, axes: sent.append((axes, x.tolist())) or 10 * x)
    monkeypatch.setattr(collectives, "wait", lambda x: x)
    mesh, axes = Mesh(parse("dp2,tp2")), [("data",), ("data",), (), ("data", "tensor"), ("data",)]
    layouts = [Layout((2,), ((),), (2, 1, 1, 2))] * 3 + [Layout((3,), (("tensor",),), (2, 1, 1, 2))] * 2
    orders = ([4, 3, 2, 1, 0], [0, 2, 3, 1, 4])
    for order in orders:
        run = sums.RestSums(layouts, axes, [torch.float32] * 5, mesh)
        run.begin({"metric": torch.tensor(7.0)})
        for i in order:
            run.add(i, torch.full((2 if i < 4 else 1,), i + 1.0))
            assert order == orders[1] or len(sent) == [1, 2, 2, 2, 3][order.index(i)]
        gradients, extra = run.finish()
        # The last gradient is padded: another rank of its tensor axis has two numbers.
        assert sent == [(("data",), [5, 0, 7]), (("data", "tensor"), [4, 4]), (("data",), [1, 1, 2, 2])]
        assert [x.tolist() for x in gradients] == [[10, 10], [20, 20], [3, 3], [40, 40], [50]] and extra["metric"] == 70
        sent.clear()


def test_psum_tree_on_one_device_copies_nothing():
    tree = {"a": torch.ones(2)}
    assert sums.psum_tree(tree, single(), "data") is tree
