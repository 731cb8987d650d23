"""Sums by symmetric memory: whom they take, who falls back, and what they compute with a kernel in the GPU's place."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from funrl.mesh import collectives, one_shot
from funrl.mesh.launch import launch
from funrl.mesh.mesh import SINGLE, parse


def test_a_cpu_has_none():
    assert one_shot.one_shot_problem(torch.device("cpu"), 2, 2) == "symmetric memory is for NVIDIA's GPUs"
    assert collectives.begin_one_shot_sums(SINGLE, "tensor") == "there is one rank"


def test_ranks_of_several_machines_have_none(monkeypatch):
    monkeypatch.setattr(torch.version, "hip", None)
    assert one_shot.one_shot_problem(torch.device("cuda"), 16, 8) == "the ranks are on several machines"


def test_small_tensors_of_what_does_not_learn_are_summed_at_once(monkeypatch):
    monkeypatch.setitem(one_shot._buffers, "own", torch.zeros(one_shot.MOST_BYTES, dtype=torch.uint8))
    small = torch.ones(8, 1024, dtype=torch.bfloat16)
    assert not one_shot.sums_at_once(small, "own"), "there may be a gradient"
    with torch.inference_mode():
        assert one_shot.sums_at_once(small, "own") and not one_shot.sums_at_once(small, "other")
        largest = torch.ones(one_shot.MOST_BYTES // 4)
        assert one_shot.sums_at_once(largest, "own") and not one_shot.sums_at_once(torch.cat([largest, largest]), "own")
        assert not one_shot.sums_at_once(torch.ones(7), "own"), "28 bytes are not aligned"
        assert not one_shot.sums_at_once(small.double(), "own") and not one_shot.sums_at_once(small[:0], "own")
    with FakeTensorMode():
        assert one_shot.one_shot_sum(torch.ones(3, 8), "own").shape == (3, 8)  # as torch.compile traces it


def with_kernel(mesh, wrong=False, unmapped=()):
    """`begin_one_shot_sums` twice with gloo in place of the kernel, and what `psum` gives then."""
    patch = pytest.MonkeyPatch()
    calls = []

    def kernel(part, op, group):
        calls.append(part.nbytes)
        return collectives._all_reduce(part, op, group) + (wrong and int(mesh.index("tensor")) == 1)

    def map_buffer(group, device):
        if mesh.rank in unmapped:
            return "no memory"
        one_shot._buffers[group] = torch.zeros(one_shot.MOST_BYTES, dtype=torch.uint8)
        return None

    with patch.context() as patched:
        patched.setattr(collectives, "one_shot_problem", lambda *_: None)
        patched.setattr(collectives, "map_buffer", map_buffer)
        patched.setattr(torch.ops.symm_mem, "one_shot_all_reduce", kernel)
        problem = collectives.begin_one_shot_sums(mesh, "tensor")
        buffers = dict(one_shot._buffers)
        if problem is None:  # as for a second engine
            assert collectives.begin_one_shot_sums(mesh, "tensor") is None
            assert all(one_shot._buffers[group] is buffer for group, buffer in buffers.items())
        assert not (unmapped and calls), "a sum was tried where not all ranks have memory"
        calls.clear()
        x = torch.arange(12.0).view(3, 4).T + mesh.rank  # not contiguous
        with torch.inference_mode():
            sums = collectives.psum(x, mesh, "tensor")
        in_training = collectives.psum(x, mesh, "tensor")
        one_shot._buffers.clear()
    assert torch.equal(sums, in_training)
    return problem, calls, sums.tolist()


@pytest.mark.gloo
@pytest.mark.parametrize("wrong", [False, True])
def test_all_ranks_sum_at_once_or_none_does(wrong):
    problem, calls, sums = launch(lambda mesh: with_kernel(mesh, wrong), parse("tp2"), "cpu")
    assert problem == ("another rank cannot" if wrong else None) and calls == ([] if wrong else [48])
    assert sums == (2 * torch.arange(12.0).view(3, 4).T + 1).tolist()


@pytest.mark.gloo
def test_no_sum_is_tried_before_all_ranks_have_mapped_the_memory():
    problem, calls, _ = launch(lambda mesh: with_kernel(mesh, unmapped=(1,)), parse("tp2"), "cpu")
    assert problem == "another rank cannot" and not calls


@pytest.mark.gloo
def test_gloo_stays_where_there_is_no_gpu():
    def program(mesh):
        problem = collectives.begin_one_shot_sums(mesh, "tensor")
        return problem, collectives.psum(torch.ones(4), mesh, "tensor").tolist()

    assert launch(program, parse("tp2"), "cpu") == ("symmetric memory is for NVIDIA's GPUs", [2.0] * 4)
