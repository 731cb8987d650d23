"""Registration of functions as operators of torch, which are called directly where nothing watches operators."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._library.autograd import Info, make_autograd_impl
from torch._ops import OpOverload
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
            if torch.compiler.is_compiling() or is_watched() or _is_differentiated(args):
                return operator(*args)
            return fn(*args)

        return call

    return decorate


@dataclass(frozen=True)
class DirectOperator:
    """An operator of torch; on plain tensors of the CPU its function is called directly.

    Compiled code calls the operator. One that writes to no argument is registered without `custom_op`, whose calls go
    through the dispatcher twice and check what they return: longer than a small kernel takes.

    Attributes:
      definition: the operator, as torch knows it.
      function: what computes it on the CPU.
      devices: types of devices on whose plain tensors the function is called.
    """

    definition: CustomOpDef | OpOverload
    function: Callable
    devices: tuple[str, ...] = ("cpu",)

    def __call__(self, *args: Any) -> Any:
        """Results of the operator."""
        # What compiles comes first, so that no graph has `_tensors`.
        if torch.compiler.is_compiling() or _is_differentiated(args):
            return self.definition(*args)
        return (self.function if is_plain(*_tensors(args), devices=self.devices) else self.definition)(*args)

    def register_kernel(self, device_type: str) -> Callable[[Callable], Callable]:
        """Register what computes it on another device."""

        def register(fn: Callable) -> Callable:
            torch.library.register_kernel(self.definition, device_type, fn, lib=_LIBRARY)
            return fn

        return register

    def register_fake(self, fn: Callable) -> Callable:
        """Register what gives tensors of the shapes of its results."""
        torch.library.register_fake(self.definition, fn, lib=_LIBRARY)
        return fn


def _is_differentiated(args: Iterable[object]) -> bool:
    """True if autograd has to see a call, as a backward pass through it is an error."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in _tensors(args))


def _tensors(args: Iterable[object]) -> Iterator[Tensor]:
    for x in args:
        if isinstance(x, Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)


def operator(
    name: str,
    mutates_args: tuple[str, ...] = (),
    device_types: str | None = None,
    direct: tuple[str, ...] = ("cpu",),
) -> Callable[[Callable], DirectOperator]:
    """Register a function as an operator named "NAMESPACE::NAME".

    Args:
      name: of the operator.
      mutates_args: names of the arguments that it writes to.
      device_types: of the devices that the function computes on; None: all of them.
      direct: types of devices on whose plain tensors the function is called directly.
    """

    def decorate(fn: Callable) -> DirectOperator:
        if mutates_args:  # torch counts the versions of what a `custom_op` writes to
            return DirectOperator(
                torch.library.custom_op(name, fn, mutates_args=mutates_args, device_types=device_types), fn, direct
            )
        short = name.removeprefix("funrl::")
        _LIBRARY.define(short + torch.library.infer_schema(fn, mutates_args=()))
        _LIBRARY.impl(short, fn, device_types.upper() if device_types else "CompositeExplicitAutograd")
        definition = getattr(torch.ops.funrl, short).default
        _LIBRARY.impl(short, _autograd_kernel(definition, fn, direct), "Autograd", with_keyset=True)
        return DirectOperator(definition, fn, direct)

    return decorate


def _autograd_kernel(definition: OpOverload, function: Callable, devices: tuple[str, ...]) -> Callable:
    """Function that autograd's keys of the dispatcher call: an operator whose backward pass is an error.

    Compiled code comes here too. On plain tensors without a gradient the function is called at once, as another round
    through the dispatcher takes longer than it.
    """
    watched = make_autograd_impl(definition, Info(functools.partial(_refuse_gradient, definition.name()), None))

    def call(keyset: torch._C.DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if is_plain(*_tensors(args), devices=devices) and not _is_differentiated(args):
            return function(*args, **kwargs)
        return watched(keyset, *args, **kwargs)

    return call


def _refuse_gradient(name: str, *_: object) -> None:
    """Backward pass of an operator that stands within a function of autograd, or computes no gradient."""
    raise RuntimeError(f"{name} has no formula for its gradient: call it without grad mode, or in a function with one")
