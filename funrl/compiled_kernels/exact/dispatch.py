"""Choice between operators of torch and the C++ functions of the decoding step, whose bits depend on no batch."""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from funrl.compiled_kernels.arguments import BITS
from funrl.compiled_kernels.kernel_library import KernelError, library

log = logging.getLogger(__name__)
# Modes under which operators compute as without: those of selective activation checkpoints.
_TRANSPARENT = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")


def computes_exactly(*tensors: Tensor) -> bool:
    """True if plain tensors of one dtype on the CPU go to the C++ functions.

    What is simulated, traced or transformed by `torch.func` sees operators of torch's core instead; torch.compile sees
    the functions as operators, which it does not look into.
    """
    first = tensors[0]
    dtype = first.dtype
    if dtype not in BITS or any(x.dtype != dtype or x.device.type != "cpu" for x in tensors):
        return False
    if torch.compiler.is_compiling():
        return has_kernels()
    return (
        all(type(x) is Tensor for x in tensors)
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_function_stack()  # such as a checker of types
        and (not torch._C._len_torch_dispatch_stack() or _transparent_modes())
        and kernels_work()
    )


def is_plain(*tensors: Tensor, devices: tuple[str, ...] = ("cpu",)) -> bool:
    """True of plain tensors on a CPU, and not of what is simulated, traced, compiled, watched or in `torch.func`.

    Args:
      devices: types of other devices too.
    """
    return (
        not torch.compiler.is_compiling()
        and all(type(x) is Tensor and x.device.type in devices for x in tensors)
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_function_stack()
        and not torch._C._len_torch_dispatch_stack()  # nor where operators are counted, which are to be the core's
    )


def has_kernels() -> bool:
    """`kernels_work` as a constant of what is compiled; see `compiled_layer`."""
    return kernels_work()


@functools.cache
def kernels_work() -> bool:
    """True if the C++ functions can be had here; the first call may compile them."""
    try:
        library()
    except KernelError as error:
        log.info("engine and trainer round differently: %s", error)
        return False
    return True


def is_watched() -> bool:
    """True if some mode, or torch.compile, has to see the operators that are called."""
    return torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0


def _transparent_modes() -> bool:
    return all(type(mode).__name__ in _TRANSPARENT for mode in _get_current_dispatch_mode_stack())
