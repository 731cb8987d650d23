"""Registration of functions as operators of torch, which are called directly where nothing watches operators."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import CustomOpDef

from funrl.compiled_kernels.exact.dispatch import is_plain, is_watched

_LIBRARY = torch.library.Library("funrl", "FRAGMENT")


def kernel_operator(schema: str, meta: Callable) -> Callable[[Callable], Callable]:
    """Register a function as an operator, and call it directly where nothing watches operators."""

    def decorate(fn: Callable) -> Callable:
        name = schema.partition("(")[0]
        _LIBRARY.define(schema)
        _LIBRARY.impl(name, fn, "CPU")
        torch.library.register_fake(f"funrl::{name}", meta, lib=_LIBRARY)
        operator = getattr(torch.ops.funrl, name).default

        def call(*args: Any) -> Any:
            return operator(*args) if torch.compiler.is_compiling() or is_watched() else fn(*args)

        return call

    return decorate


@dataclass(frozen=True)
class CpuOperator:
    """An operator that writes to no argument; on plain tensors of the CPU its function is called directly.

    torch's own call takes the dispatcher twice, and the first one of a process imports the compiler for two seconds.

    Attributes:
      definition: the operator, which takes a fake and the kernels of other devices.
      function: what computes it on the CPU.
    """

    definition: CustomOpDef
    function: Callable

    def __call__(self, *args: Any) -> Any:
        """Results of the operator."""
        plain = is_plain(*(x for x in args if isinstance(x, Tensor)))
        return self.function(*args) if plain else self.definition(*args)


def cpu_operator(name: str) -> Callable[[Callable], CpuOperator]:
    """Register a function as an operator of the CPU, named "NAMESPACE::NAME"."""

    def decorate(fn: Callable) -> CpuOperator:
        return CpuOperator(torch.library.custom_op(name, fn, mutates_args=(), device_types="cpu"), fn)

    return decorate
