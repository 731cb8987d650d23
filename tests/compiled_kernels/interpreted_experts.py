"""Cases of the kernel that zeroes rows of no expert under Triton's interpreter, which interpreted_cases.py runs."""

import itertools

import torch

from funrl.compiled_kernels.gpu_kernels import tail_kernel
from funrl.compiled_kernels.grouped_linear import zero_tail_error

SHAPES = tuple(itertools.product((1, 2, 5, 13, 40), (1, 3, 32, 33, 70, 129)))  # rows and columns; most divide no block


def rows_after_the_last_end_are_zeroed():
    """At 30 shapes; no other row changes, and rows of several programs and turns are zeroed once each."""
    assert len(SHAPES) == 30
    tail_kernel._WIDTH, tail_kernel._PROGRAMS = 32, 4
    for i, (rows, columns) in enumerate(SHAPES):
        end = (0, rows, rows // 2, max(0, rows - 1))[i % 4]
        dtype = (torch.bfloat16, torch.float32)[i % 2]
        x_RN = torch.randn(rows, columns, generator=torch.Generator().manual_seed(i)).to(dtype)
        x_RN[end:] = torch.nan
        expected_RN = x_RN.nan_to_num(0.0)
        ends_E = torch.tensor([0, end // 2, end][: 1 + i % 3], dtype=torch.int32)
        ends_E[-1] = end
        tail_kernel.launch_zero_tail(x_RN, ends_E)
        assert torch.equal(x_RN, expected_RN), (rows, columns, end)
    assert zero_tail_error("cpu") == 0
    tail_kernel.launch_zero_tail(torch.zeros(0, 3), ends_E)


CASES = (rows_after_the_last_end_are_zeroed,)


def set_up():
    """The case sets its blocks by itself."""
