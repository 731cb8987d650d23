"""Copies of weights in the dtype to compute in: of the weights as they are, or not there."""

import gc
import weakref

import pytest
import torch

from funrl import trees
from funrl.models.weight_dtypes import (
    cast_weight,
    cast_weights,
    copy_to_write,
    mark_written,
    narrow_weight,
    renew_copies,
)


def weights():
    generator = torch.Generator().manual_seed(0)
    return {"w": torch.randn(5, 3, generator=generator), "router_bias": torch.randn(4, generator=generator)}


def with_copies():
    params = weights()
    renew_copies(params, torch.bfloat16)
    return params


def test_a_copy_is_the_cast_and_is_read_again():
    params = with_copies()
    first, second = (cast_weights(params, torch.bfloat16) for _ in range(2))
    assert first["w"] is second["w"] is narrow_weight(params["w"].detach(), torch.bfloat16)
    assert torch.equal(first["w"], params["w"].bfloat16())
    assert first["router_bias"] is params["router_bias"]  # it stays wide
    assert cast_weight(params["w"], torch.float64).dtype == torch.float64
    assert cast_weight(params["w"], torch.float32) is params["w"]


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x.mul_(2),
        lambda x: torch._foreach_add_([x], 1.0),
        lambda x: x.detach().copy_(torch.ones(5, 3)),
        lambda x: x[1].zero_(),
        lambda x: x.set_(torch.ones(5, 3)),
        lambda x: setattr(x, "data", torch.ones(5, 3)),
    ],
)
def test_a_changed_weight_is_cast_until_its_copy_is_renewed(change):
    params = with_copies()
    change(params["w"])
    assert narrow_weight(params["w"], torch.bfloat16) is params["w"]
    assert torch.equal(cast_weight(params["w"], torch.bfloat16), params["w"].bfloat16())
    renew_copies(params, torch.bfloat16)
    assert torch.equal(narrow_weight(params["w"], torch.bfloat16), params["w"].bfloat16())


@pytest.mark.parametrize("other", [torch.clone, lambda x: x[:2], lambda x: x.T, lambda x: x.view(3, 5)])
def test_another_tensor_has_no_copy(other):
    x = other(with_copies()["w"])
    assert narrow_weight(x, torch.bfloat16) is x


def test_a_copy_in_another_dtype_is_not_read():
    params = with_copies()
    assert torch.equal(cast_weight(params["w"], torch.float16), params["w"].half())


def test_a_copy_that_was_written_with_its_weight_is_read():
    params = with_copies()
    copy = narrow_weight(params["w"], torch.bfloat16)
    assert copy_to_write(params["w"]) is copy
    params["w"].add_(1)
    copy.copy_(params["w"])
    assert narrow_weight(params["w"], torch.bfloat16) is params["w"]
    mark_written([params["w"]], [copy])
    assert narrow_weight(params["w"], torch.bfloat16) is copy
    renew_copies(params, torch.bfloat16)
    assert narrow_weight(params["w"], torch.bfloat16) is copy


def test_a_gradient_passes_from_a_copy_to_its_weight():
    def loss(tree):
        copy = cast_weights(tree, torch.bfloat16)["w"]
        assert copy.data_ptr() == narrow_weight(tree["w"], torch.bfloat16).data_ptr()
        return copy.float().square().sum(), None

    params = with_copies()
    _, grads = trees.value_and_grad(loss)(params)
    assert torch.equal(grads["w"], (2 * params["w"].bfloat16()).float())
    assert grads["w"].dtype == torch.float32


def test_a_copy_is_freed_with_its_weight():
    params = with_copies()
    copy = copy_to_write(params["w"])
    gone = []
    weakref.finalize(copy, gone.append, True)
    del copy, params
    gc.collect()
    assert gone == [True]
