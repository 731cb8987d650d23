"""A dispatch mode in which the host may not wait for the "meta" device, on which a test stands in for a GPU."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class NoBlockingCopies(TorchDispatchMode):
    """Copies from the host to the device must not wait for it either."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("device", args[0].device) != args[0].device:
            assert kwargs.get("non_blocking"), f"a copy of {args[0].shape} to the device waits for it"
            assert getattr(args[0], "pinned", False), f"a copy of {args[0].shape} from pageable memory waits for it"
        return func(*args, **kwargs)


def pinned(x):
    """A copy of a tensor in "pinned" memory, which a machine need not have: it is marked."""
    copy = x.clone()
    copy.pinned = True
    return copy
