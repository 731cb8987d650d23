"""Registration of functions as operators of torch, which are called directly where nothing watches operators."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
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
        for device in ("CPU", "CUDA"):
            _LIBRARY.impl(name, fn, device)
        torch.library.register_fake(f"funrl::{name}", meta, lib=_LIBRARY)
        operator = getattr(torch.ops.funrl, name).default

        def call(*args: object) -> Any:
            return operator(*args) if torch.compiler.is_compiling() or is_watched() else fn(*args)

        return call

    return decorate


@dataclass(frozen=True)
class DirectOperator:
    """An operator of torch; on plain tensors of the CPU its function is called directly.

    torch's own call takes the dispatcher twice, and the first one of a process imports the compiler for two seconds.

    Attributes:
      definition: the operator, as torch knows it.
      function: what computes it on the CPU.
    """

    definition: CustomOpDef
    function: Callable

    def __call__(self, *args: Any) -> Any:
        """Results of the operator."""
        if torch.compiler.is_compiling() or not is_plain(*_tensors(args)):  # first, so that no graph has `_tensors`
            return self.definition(*args)
        return self.function(*args)

    def register_kernel(self, device_type: str) -> Callable[[Callable], Callable]:
        """Register what computes it on another device."""
        return self.definition.register_kernel(device_type)

    def register_fake(self, fn: Callable) -> Callable:
        """Register what gives tensors of the shapes of its results."""
        return self.definition.register_fake(fn)


def _tensors(args: Iterable[object]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def operator(
    name: str, mutates_args: tuple[str, ...] = (), device_types: str | None = None
) -> Callable[[Callable], DirectOperator]:
    """Register a function as an operator named "NAMESPACE::NAME".

    Args:
      name: of the operator.
      mutates_args: names of the arguments that it writes to.
      device_types: of the devices that the function computes on; None: all of them.
    """

    def decorate(fn: Callable) -> DirectOperator:
        return DirectOperator(
            torch.library.custom_op(name, fn, mutates_args=mutates_args, device_types=device_types), fn
        )

    return decorate
