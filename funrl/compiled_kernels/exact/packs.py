"""Packed copies of weights, made once for each version of a weight."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from funrl.compiled_kernels.packed import PackedLinear, pack_linear


class _Memory(NamedTuple):
    """Packed weights of one piece of memory.

    Attributes:
      memory: of the weights, which it does not keep. While it is held, no other memory has the same key.
      packs: place, shape and parts of a weight -> its version, and the weight packed.
    """

    memory: StorageWeakRef
    packs: dict[tuple, tuple[int, PackedLinear]]


_KNOWN: dict[int, _Memory] = {}


def packed_weight(w_NK: Tensor, parts: int = 1) -> PackedLinear:
    """A weight in panels, packed when it is first seen, and again after it has been changed in place.

    Changes that torch does not count, such as those through `.data`, are not seen: `forget` them.
    """
    storage = w_NK.untyped_storage()
    key = storage._cdata
    known = _KNOWN.get(key)
    place = (w_NK.data_ptr(), w_NK.shape, w_NK.stride(), w_NK.dtype, parts)
    version = -1 if w_NK.is_inference() else w_NK._version
    if known is not None and version >= 0:
        found = known.packs.get(place)
        if found is not None and found[0] == version:
            return found[1]
    packed = pack_linear(w_NK, parts)
    if version >= 0:
        if known is None:
            _drop_dead()
            known = _KNOWN[key] = _Memory(StorageWeakRef(storage), {})
        known.packs[place] = version, packed
    return packed


def forget(*tensors: Tensor) -> None:
    """Pack these weights anew when they are next used."""
    for x in tensors:
        _KNOWN.pop(x.untyped_storage()._cdata, None)


def _drop_dead() -> None:
    for key in [key for key, known in _KNOWN.items() if known.memory.expired()]:
        del _KNOWN[key]
