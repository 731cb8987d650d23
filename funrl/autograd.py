"""The base class of functions with a derivative of their own."""

from __future__ import annotations

import inspect
from typing import Any

import torch


class AutogradFunction(torch.autograd.Function):
    """`torch.autograd.Function` with `setup_context`, whose calls do not find out the signature of `forward` again.

    `torch.autograd.Function.apply` asks `inspect.signature` for it, which takes longer than a small operator; an
    attribute `__signature__` answers at once.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Keep the signature of `forward`."""
        super().__init_subclass__(**kwargs)
        forward: Any = cls.forward
        forward.__signature__ = inspect.signature(forward)
