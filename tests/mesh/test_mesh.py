"""Meshes as texts, and over some of the ranks."""

import pytest
import torch

from funrl.mesh import collectives, mesh
from funrl.mesh.launch import launch, submesh
from funrl.mesh.mesh import MeshError, parse


@pytest.mark.parametrize(
    "text,message",
    [
        ("dp3,xx2", "'xx2' is not an axis"),
        ("dp2,dp2", "given twice"),
        ("dp0", "at least 1"),
        ("4", "'4' is not an axis"),
    ],
)
def test_a_mesh_that_cannot_be_read(text, message):
    with pytest.raises(MeshError, match=message):
        parse(text)


def test_the_order_of_axes_is_free():
    assert parse("tp2,dp4") == parse("dp4,tp2")
    assert mesh.text(parse("tp2,dp4")) == "dp4,tp2"
    assert mesh.text(parse("")) == "dp1"


@pytest.mark.slow
def test_meshes_over_some_of_the_ranks():
    def program(m):
        x, seen = torch.tensor([float(m.rank)]), []
        for sizes, ranks in (("dp2,tp2", [0, 1, 2, 3]), ("tp2", [4, 5]), ("dp3", [0, 2, 5]), ("dp1", [3])):
            mesh = submesh(m, parse(sizes), ranks)
            assert (mesh.here, list(mesh.ranks), mesh.process) == (m.rank in ranks, ranks, m.rank)
            if mesh.here:
                sums = [collectives.psum(x, mesh, axes).item() for axes in ("data", "tensor")]
                seen.append((mesh.rank, *sums, collectives.gather_objects(m.rank, mesh)))
            else:
                with pytest.raises(MeshError, match=f"process {m.rank} is not in the mesh"):
                    mesh.index("data")
        assert submesh(m, parse("tp2"), [4, 5]).groups == submesh(m, parse("tp2"), (4, 5)).groups
        return collectives.gather_objects(seen, m)

    seen = launch(program, parse("dp6"), "cpu")
    everyone = [0, 1, 2, 3]
    assert seen == [
        [(0, 0 + 2, 0 + 1, everyone), (0, 0 + 2 + 5, 0, [0, 2, 5])],
        [(1, 1 + 3, 0 + 1, everyone)],
        [(2, 0 + 2, 2 + 3, everyone), (1, 0 + 2 + 5, 2, [0, 2, 5])],
        [(3, 1 + 3, 2 + 3, everyone), (0, 3, 3, [3])],
        [(0, 4, 4 + 5, [4, 5])],
        [(1, 5, 4 + 5, [4, 5]), (2, 0 + 2 + 5, 5, [0, 2, 5])],
    ]


@pytest.mark.parametrize(
    "sizes,ranks,message",
    [
        ("dp2", [0], r"dp2 has 2 devices: \[0\] must be as many ranks"),
        ("dp2", [1, 0], "ascending"),
        ("dp2", [0, 1], r"over the ranks \[0, 1\]; this run has 1"),
    ],
)
def test_ranks_that_make_no_mesh_are_refused(sizes, ranks, message):
    with pytest.raises(MeshError, match=message):
        submesh(mesh.single(), parse(sizes), ranks)


def test_ranks_at_even_distances_are_a_range():
    assert mesh.ranks_of([2, 4, 6]) == range(2, 7, 2)
    assert mesh.ranks_of([5]) == range(5, 6)
    assert mesh.ranks_of([0, 1, 3]) == (0, 1, 3)
