"""What is offloaded from the accelerator; on a CPU, nothing."""

import pytest
import torch
from small_runs import begin, small_job

from funrl import trees
from funrl.mesh.mesh import single
from funrl.trainer import offload


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
