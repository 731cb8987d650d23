"""Functions with gradients of their own."""

from __future__ import annotations

from typing import Any

import torch
from torch._functorch.utils import unwrap_dead_wrappers


class AutogradFunction(torch.autograd.Function):
    """`torch.autograd.Function` whose `apply` takes all arguments by position.

    torch reads the signature of `forward` at each call, to add defaults and names: 70 of the 85 microseconds of a call
    on a slow CPU. Compiled code has no such calls; there `apply` is torch's own.
    """

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """The result of `forward`; as `torch.autograd.Function.apply`."""
        if torch._C._are_functorch_transforms_active() or torch._C._len_torch_function_stack():
            return super().apply(*args)  # modes, such as a checker of types, may replace torch's own
        return super(torch.autograd.Function, cls).apply(*unwrap_dead_wrappers(args))  # type: ignore[misc]
