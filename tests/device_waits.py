"""A device that no test may wait for: "meta", whose tensors have no numbers that the host could ask for."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from funrl import trees
from funrl.processes import device_memory

META = torch.device("meta")
# Operators whose result, or its shape, the host has to know.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "repeat_interleave.Tensor", "is_nonzero")
COPIES = ("aten::_to_copy", "aten::to", "aten::copy_")  # in inference mode "to" is seen itself
SYNCHRONISE = (
    (torch.cuda, "synchronize"),
    (torch.cuda, "empty_cache"),
    (torch.cuda.Event, "synchronize"),
    (torch.cuda.Stream, "synchronize"),
    (torch.accelerator, "synchronize"),
)
MAKERS = ((torch, "tensor"), (torch, "as_tensor"), (torch, "asarray"), (torch.Tensor, "new_tensor"))
WAITS = r"waits|goes from"  # in each of its messages
# Ways to wait for a tensor's device.
FAULTS = {
    "item": lambda x: x.flatten()[0].item(),
    "tolist": lambda x: x.tolist(),
    "bool": lambda x: bool(x.any()),
    "nonzero": lambda x: x.nonzero(),
    "cpu": lambda x: x.cpu(),
    "to the host": lambda x: x.to("cpu", non_blocking=True),
    "into the host": lambda x: torch.zeros(x.shape, dtype=x.dtype).copy_(x),
    "from pageable memory": lambda x: torch.zeros(3).to(x.device, non_blocking=True),
    "into the device": lambda x: x.new_zeros(3).copy_(torch.zeros(3)),
    "pinned but blocking": lambda x: torch.zeros(3).pin_memory().to(x.device),
    "a tensor of numbers": lambda x: torch.tensor([1.0], device=x.device),
    "an index of numbers": lambda x: x[[0, 0]],
    "synchronize": lambda x: torch.cuda.synchronize(),
}


class NoWaits(TorchDispatchMode):
    """Fails on operators that make the host wait for the device, and on copies from pageable memory.

    Attributes:
      names: the operators that were called.
    """

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        kwargs = kwargs or {}
        self.names.append(name)
        tensors = tensors_in((args, kwargs))
        if any(x.device == META for x in tensors):
            assert not any(f"aten::{read}" == name or f"aten::{read}." in name for read in READS), f"{name} waits"
        try:
            out = func(*args, **kwargs)
        except NotImplementedError as problem:  # there is no number to compute it from
            raise AssertionError(f"{name} waits: {problem}") from problem
        if func._schema.name in COPIES:
            check_copy(func, args, kwargs, out)
            return out
        if not name.startswith("funrl::"):  # the plan of attention is on the host
            shaped = [x for x in [*tensors, *tensors_in(out)] if x.ndim]
            assert len({x.device for x in shaped}) < 2, f"{name} goes from one device to another"
        return out


def tensors_in(values):
    return [x for x in trees.leaves(values) if isinstance(x, torch.Tensor)]


def check_copy(func, args, kwargs, out):
    """A copy between host and device has to be from pinned memory, and asynchronous."""
    source = args[1] if func._schema.name == "aten::copy_" else args[0]
    if source.device == out.device or (func._schema.name == "aten::copy_" and not source.ndim):  # a number is filled in
        return
    names = [argument.name for argument in func._schema.arguments]
    place = names.index("non_blocking") if "non_blocking" in names else len(args)
    asynchronous = args[place] if place < len(args) else kwargs.get("non_blocking", False)
    assert source.device != META, f"a copy of {list(source.shape)} to the host waits"
    assert asynchronous, f"a copy of {list(source.shape)} to the device waits for it"
    assert getattr(source, "pinned", False), f"a copy of {list(source.shape)} from pageable memory waits"


class NoIndexOfNumbers(TorchFunctionMode):
    """Fail where a tensor on "meta" is indexed with a list.

    A mode, since a method of this name in Python would stay in the type's slots, and torch would take tensors for
    sequences.
    """

    def __torch_function__(self, func, types, args=(), kwargs=None):
        name = getattr(func, "__name__", "")
        if name in ("__getitem__", "__setitem__") and args[0].device == META:
            parts = args[1] if isinstance(args[1], tuple) else (args[1],)
            numbers = any(isinstance(part, list | np.ndarray) for part in parts)
            assert not numbers, f"{name} with a list copies pageable memory, and waits"
        return func(*args, **kwargs or {})


@contextmanager
def no_waits() -> Iterator[NoWaits]:
    """Fail where the host waits for "meta", synchronises with a GPU, or copies pageable memory to a device."""

    def pin_memory(x):  # this machine need not have such memory
        copy = x.clone()
        copy.pinned = True
        return copy

    def refusing(name):
        def refuse(*_, **__):
            raise AssertionError(f"{name} waits")

        return refuse

    def checked(name, make):
        def make_on_host(*args, **kwargs):
            device = kwargs.get("device") or (args[0].device if name == "new_tensor" else "cpu")
            moved = torch.device(device) == META and not (name != "new_tensor" and tensors_in(args[0]))
            assert not moved, f"{name} on the device copies pageable memory, and waits"
            return make(*args, **kwargs)

        return make_on_host

    def read(name, method):
        def of_host(x, *args, **kwargs):
            assert x.device != META, f"{name} waits"
            return method(x, *args, **kwargs)

        return of_host

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_memory, "PINNED_FOR", ("cuda", "meta"))
        patch.setattr(torch.Tensor, "pin_memory", pin_memory)
        for owner, name in SYNCHRONISE:
            patch.setattr(owner, name, refusing(name))
        for owner, name in MAKERS:
            patch.setattr(owner, name, checked(name, getattr(owner, name)))
        for name in ("cpu", "item", "tolist", "numpy"):
            patch.setattr(torch.Tensor, name, read(name, getattr(torch.Tensor, name)))
        with NoIndexOfNumbers(), NoWaits() as mode:
            yield mode
