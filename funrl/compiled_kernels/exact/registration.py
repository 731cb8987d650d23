"""Registration of C++ functions as operators of torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from funrl.compiled_kernels.exact.dispatch import is_watched

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
