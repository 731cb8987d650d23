"""What is offloaded from the accelerator; on a CPU, nothing."""

import contextlib
import dataclasses

import pytest
import torch
from small_runs import begin, small_job

from funrl import trees
from funrl.mesh.mesh import single
from funrl.models.weight_dtypes import narrow_weight
from funrl.trainer import offload
from funrl.trainer.steps.roles import keep_copies


def test_on_a_cpu_nothing_moves_and_that_is_noted():
    run, state = begin(small_job(), single())
    notes = []
    place = offload.mover("optimizer,reference,params", run.parts, notes.append)
    for stage in offload.NEEDS:
        moved, after = place(run, state, stage)
        assert moved is run and after is state
    assert len(notes) == 1 and "--offload=optimizer,reference,params does nothing here" in notes[0]
    offload.mover(None, run.parts, notes.append)
    assert len(notes) == 1


def test_weights_that_the_engine_has_in_another_dtype_may_be_offloaded():
    for dtype, stays in (("float32", True), ("bfloat16", False)):
        run, state = begin(small_job(dtype=dtype), single())
        generator, params = run.parts.generator, state.roles["policy"].params
        assert set(offload.shared(params, generator.to_engine)) == {stays}


def test_an_unknown_part_is_refused():
    assert offload.offloaded_parts(None) == frozenset()
    assert offload.offloaded_parts("params,optimizer") == {"params", "optimizer"}
    with pytest.raises(ValueError, match="--offload=params,cache: it must be some of optimizer,reference,params"):
        small_job(offload="params,cache")


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Tensors with the attribute `away` count as a GPU's; pinned buffers that are made are listed."""
    pinned = []
    empty_like = torch.empty_like

    def made(x, device=None, pin_memory=False, **options):
        tensor = empty_like(x, **options)
        tensor.away = not pin_memory
        pinned.extend([tensor] * pin_memory)
        return tensor

    here = contextlib.nullcontext()
    here.wait_stream = lambda stream: None
    monkeypatch.setattr(torch, "empty_like", made)
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: getattr(x, "away", False)), raising=False)
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda x: any(x is y for y in pinned))
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda x, stream: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: here)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(offload, "copy_stream", lambda device: here)
    return pinned


def test_host_buffers_are_made_once_and_hold_the_newest_values(pretended_gpu):
    run, state = begin(small_job(), single())
    tensors = [x for x in trees.leaves([r.opt_state for r in state.roles.values()]) if isinstance(x, torch.Tensor)]
    for x in tensors:
        x.away = True
    place = offload.mover("optimizer", dataclasses.replace(run.parts, mesh=single("cuda:0")), lambda note: None)
    counts = []
    for step in range(3):
        run, state = place(run, state, "generate")
        counts.append(len(pretended_gpu))
        held = [x for x in trees.leaves([r.opt_state for r in state.roles.values()]) if x.is_floating_point()]
        assert all(x.is_pinned() for x in held)
        run, state = place(run, state, "update")
        for x in trees.leaves([r.opt_state for r in state.roles.values()]):
            if x.is_floating_point():
                assert not x.is_pinned()
                assert float(x.abs().max()) == float(step)
                x += 1
    assert counts[0] > 0
    assert counts == counts[:1] * 3


def test_weights_that_come_back_have_copies_to_compute_with(pretended_gpu):
    """One cast a step, instead of one in each pass until the next update."""
    run, state = begin(small_job(dtype="bfloat16"), single())
    weights = trees.leaves([role.params for role in state.roles.values()])
    for x in weights:
        x.away = True
    place = offload.mover("params", dataclasses.replace(run.parts, mesh=single("cuda:0")), lambda note: None)
    for _ in range(2):
        run, state = place(run, state, "generate")
        for stage in ("score", "update"):
            run, state = place(run, state, stage)
            for x in trees.leaves([role.params for role in state.roles.values()]):
                assert not x.is_pinned() and x.dtype == torch.float32
                copy = narrow_weight(x, torch.bfloat16)
                assert copy is not x and torch.equal(copy, x.bfloat16())
            for x in trees.leaves([role.params for role in state.roles.values()]):
                x += 1  # as an update does, which writes the copies too
            keep_copies(run.parts.roles, state.roles)


def test_a_host_buffer_of_another_form_is_not_used(pretended_gpu):
    buffers = {}
    for shape, count in (((2, 3), 1), ((3, 2), 2), ((3, 2), 2)):
        x = torch.ones(shape)
        x.away = True
        offload.offload({"w": x}, buffers=buffers)
        assert len(pretended_gpu) == count


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tree_is_offloaded_and_onloaded_the_same():
    device = torch.device("cuda:0")
    tree = {"w": torch.randn(1 << 20, device=device), "count": torch.tensor(3, device=device)}
    values, before = tree["w"].cpu(), torch.cuda.memory_allocated(device)
    tree = offload.offload(tree)
    torch.cuda.synchronize()
    assert tree["w"].is_pinned() and tree["count"].is_cuda
    assert torch.cuda.memory_allocated(device) <= before - (1 << 22)
    tree = offload.onload(tree, device)
    assert torch.equal(tree["w"].cpu(), values)
    stayed = offload.offload(tree, [True, True])
    assert trees.leaves(stayed)[1] is tree["w"]
