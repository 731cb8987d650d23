"""Copies, on devices of another library, of the host's tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary


class HostCopies:
    """Copies of the host's tensors on devices.

    A copy stays as long as its tensor, and is made anew after the tensor has changed. So weights are sent once, and
    results of programs are not sent at all.

        copies = HostCopies(lambda x, _: x.to("xla"), lambda copy: copy.cpu())
        copies.sent(weight) is copies.sent(weight)
    """

    def __init__(self, send: Callable[[Tensor, Any], Any], fetch: Callable[[Any], Tensor]) -> None:
        """Begin without a copy.

        Args:
          send: (tensor, how the devices split it) -> its copy, which shares no memory with another array.
          fetch: copy -> a tensor of the host with its numbers.
        """
        self._send = send
        self._fetch = fetch
        self._copies: Any = WeakTensorKeyDictionary()

    def sent(self, x: Tensor, spec: Any = None, keep: bool = True) -> Any:
        """The copy of a tensor, split like this; `keep=False` forgets it, for a program that takes over its memory."""
        known = self._copies.get(x)
        if known is None or known[:2] != (version(x), spec):
            known = (version(x), spec, self._send(x, spec))
            self._copies[x] = known
        if not keep:
            del self._copies[x]
        return known[2]

    def fetched(self, copy: Any, spec: Any = None) -> Tensor:
        """A tensor with the numbers of an array, which becomes its copy."""
        x = self._fetch(copy)
        self._copies[x] = (version(x), spec, copy)
        return x


def version(x: Tensor) -> int:
    """Number of changes of a tensor in place."""
    return 0 if x.is_inference() else x._version
