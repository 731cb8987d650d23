"""What leaves the accelerator and comes back; on a CPU, nothing."""

import pytest
import torch
from small_runs import begin, small_job

from funrl import trees
from funrl.mesh.mesh import single
from funrl.trainer import offload


def test_on_a_cpu_the_state_stays_as_it_is():
    job = small_job()
    models, state = begin(job, single())
    away = offload.parse("optimizer,reference,params")
    assert offload.place(state, (), away, models.to_generate, torch.device("cpu")) is state


def test_weights_that_the_engine_has_in_another_dtype_may_leave():
    for dtype, stays in (("float32", True), ("bfloat16", False)):
        models, state = begin(small_job(dtype=dtype), single())
        assert set(offload.shared(state.policy.params, models.to_generate)) == {stays}
        one = trees.leaves(state.policy.params)[0], models.engine._model.params["embed"]
        assert (one[0].data_ptr() == one[1].data_ptr()) == stays


def test_an_unknown_part_is_refused():
    assert offload.parse(None) == frozenset()
    assert offload.parse("params,optimizer") == {"params", "optimizer"}
    with pytest.raises(ValueError, match="--offload=params,cache: 'cache' cannot leave the accelerator"):
        small_job(offload="params,cache")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_tree_leaves_and_comes_back_the_same():
    device = torch.device("cuda:0")
    tree = {"w": torch.randn(1 << 20, device=device), "count": torch.tensor(3, device=device)}
    values, before = tree["w"].cpu(), torch.cuda.memory_allocated(device)
    tree = offload.leave(tree)
    torch.cuda.synchronize()
    assert tree["w"].is_pinned() and tree["count"].is_cuda
    assert torch.cuda.memory_allocated(device) <= before - (1 << 22)
    tree = offload.come(tree, device)
    assert torch.equal(tree["w"].cpu(), values)
    stayed = offload.leave(tree, [True, True])
    assert trees.leaves(stayed)[1] is tree["w"]
