"""Choice between operators of torch and functions whose bits depend on no batch.

On a CPU these are the C++ functions of the decoding step; on a GPU, where `align_gpu_kernels` asks for them, the Triton
kernels of `gpu_kernels.aligned_kernels`.
"""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from funrl.compiled_kernels.arguments import BITS
from funrl.compiled_kernels.kernel_library import KernelError, library

log = logging.getLogger(__name__)
# Modes under which operators compute as without: those of selective activation checkpoints.
_TRANSPARENT = ("_CachingTorchDispatchMode", "_CachedTorchDispatchMode")
ALIGNED_DTYPES = (torch.bfloat16, torch.float32)  # of the Triton kernels
_triton_devices: set[str] = set()


def align_gpu_kernels(on: bool, device: str = "cuda") -> None:
    """Let tensors on a GPU go to Triton kernels whose sums have a fixed order, from now on in this process, or not.

    Args:
      device: "cpu" is for tests under Triton's interpreter: its tensors go there instead of to the C++ functions.
    """
    (_triton_devices.add if on else _triton_devices.discard)(device)


@contextlib.contextmanager
def keep_alignment() -> Iterator[None]:
    """Restore at the end what `align_gpu_kernels` has said before: one run's kernels are not the next one's."""
    before = set(_triton_devices)
    try:
        yield
    finally:
        _triton_devices.clear()
        _triton_devices.update(before)


def is_aligned(x: Tensor) -> bool:
    """True if a tensor goes to the Triton kernels of a fixed order, where it `computes_exactly`."""
    return bool(_triton_devices) and aligned_on(x.device.type)


def aligned_on(device: str) -> bool:
    """True if tensors on devices of this type go to the Triton kernels of a fixed order."""
    return device in _triton_devices


def computes_exactly(*tensors: Tensor) -> bool:
    """True if plain tensors of one dtype go to the C++ functions of a CPU, or on a GPU to kernels of a fixed order.

    What is simulated, traced or transformed by `torch.func` sees operators of torch's core instead; torch.compile sees
    the functions as operators, which it does not look into.
    """
    first = tensors[0]
    dtype = first.dtype
    device = first.device.type
    if dtype not in BITS or any(x.dtype != dtype or x.device.type != device for x in tensors):
        return False
    triton = aligned_on(device)
    if (not triton and device != "cpu") or (triton and dtype not in ALIGNED_DTYPES):
        return False
    if torch.compiler.is_compiling():
        return triton or has_kernels()
    return (
        all(type(x) is Tensor for x in tensors)
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_function_stack()  # such as a checker of types
        and (not torch._C._len_torch_dispatch_stack() or _transparent_modes())
        and (triton or kernels_work())
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
