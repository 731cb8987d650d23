"""Tensors at any element offset, right before or right after a page of memory that cannot be accessed."""

import ctypes
import mmap

import torch

FILL = 0xFF  # NaN in each float dtype, -1 in each integer dtype
_mprotect = ctypes.CDLL(None, use_errno=True).mprotect
_mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


class FencedMemory:
    """Copies of tensors between two inaccessible pages.

    An access beyond a fence is a segmentation fault; an access between a tensor and its fences reads NaN or -1, or is
    found by `assert_untouched`.

    Args:
      gap: elements between the end of each tensor and the fence after it; None: each tensor begins at the fence before
        it.
    """

    def __init__(self, gap: int | None):
        self.gap = gap
        self._blocks: list[tuple[mmap.mmap, int, int]] = []

    def place(self, x: torch.Tensor) -> torch.Tensor:
        """Copy a tensor with at least one element."""
        page = mmap.PAGESIZE
        gap_bytes = (self.gap or 0) * x.element_size()
        inside = -(-(x.nbytes + gap_bytes) // page) * page
        memory = mmap.mmap(-1, inside + 2 * page)
        memory.write(bytes([FILL]) * len(memory))
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        for fence in (address, address + page + inside):
            if _mprotect(fence, page, 0):
                raise OSError(ctypes.get_errno(), "mprotect failed")
        begin = page if self.gap is None else page + inside - gap_bytes - x.nbytes
        self._blocks.append((memory, begin, begin + x.nbytes))
        placed = torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=begin).view(x.shape)
        return placed.copy_(x.detach())

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Place a tensor for a result, filled with NaN or -1."""
        return self.place(
            torch.full((torch.Size(shape).numel() * dtype.itemsize,), FILL, dtype=torch.uint8).view(dtype).view(shape)
        )

    def assert_untouched(self) -> None:
        """Fail where memory around a tensor was written."""
        for memory, begin, end in self._blocks:
            page = mmap.PAGESIZE
            around = memory[page:begin] + memory[end : len(memory) - page]
            assert around == bytes([FILL]) * len(around)
