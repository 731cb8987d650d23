"""Trials of Triton kernels: a small call of each shows once whether it computes on this GPU what its reference does."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)
_PROBED = "cuda"  # where the kernels are tried
_TOLERANCE = 1e-4  # of sums and gradients of size 1 in float32


@functools.cache
def kernels_run(trial: Callable[[str], float], tolerance: float = _TOLERANCE) -> bool:
    """True if kernels compute what torch's operators do on this machine's GPU; logged once.

    Args:
      trial: device -> the largest error of a small call; its name is that of the subject, with "_error" after it.
      tolerance: of that error.
    """
    problem = trial_problem(trial, tolerance)
    subject = trial.__name__.removesuffix("_error").replace("_", " ")
    if problem is None:
        log.info("Triton kernels on the GPU: %s", subject)
        return True
    log.warning("torch's operators on the GPU, which take several times as long: %s; %s", subject, problem)
    return False


class AssumedGPU(NamedTuple):
    """GPU whose kernels take tensors without memory: the operators that a dry run counts are its.

    Attributes:
      l2_bytes: of its L2 cache; 0: unknown.
      processors: that compute a tile each at a time.
    """

    l2_bytes: float = 0.0
    processors: int = 1


_assumed: AssumedGPU | None = None


def assumed_gpu() -> AssumedGPU | None:
    """The GPU that is assumed; None: tensors are where they are."""
    return _assumed


def kernels_take(tensors: Sequence[Tensor], trial: Callable[[str], float]) -> bool:
    """True if kernels that compute in float32 and need tensors of a GPU, end to end, compute with these.

    Args:
      trial: as in `kernels_run`.
    """
    if any(x.dtype.itemsize > torch.float32.itemsize for x in tensors):
        return False
    return _assumed is not None or (all(x.is_cuda and x.is_contiguous() for x in tensors) and kernels_run(trial))


@contextlib.contextmanager
def assume_kernels(gpu: AssumedGPU | None) -> Iterator[None]:
    """Assume a GPU for the duration of the context; None: assume none."""
    global _assumed
    before = _assumed
    _assumed = gpu
    try:
        yield
    finally:
        _assumed = before


def trial_problem(trial: Callable[[str], float], tolerance: float = _TOLERANCE) -> str | None:
    """Reason why kernels are not for this machine's GPU; None: they are."""
    try:
        error = trial(_PROBED)
    except ImportError as problem:
        return f"{problem}; torch for CUDA and ROCm brings triton along"
    except Exception as problem:  # a compiler's errors share no type
        return exception_text(problem)
    return None if error < tolerance else f"its results differ by {error:.2g} from the reference's"


def exception_text(problem: Exception) -> str:
    """Type of an exception, and the first line of its message."""
    return f"{type(problem).__name__}: {problem}".partition("\n")[0]


def largest_error(pairs: Iterable[tuple[Tensor, Tensor]]) -> float:
    """Largest difference of numbers from those on the host; not a number where one is not."""
    return torch.stack([(here.cpu().double() - there).abs().max() for here, there in pairs]).max().item()
