"""Packed copies of weights, made once for each version of a weight.

A version is torch's count of changes in place and, outside of inference mode, a digest of all bits too: changes through
`.data`, which torch does not count, are seen. Reading a weight costs far less than multiplying many rows by it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from funrl.compiled_kernels.arguments import kernel_bits
from funrl.compiled_kernels.kernel_library import library
from funrl.compiled_kernels.packed import PackedLinear, pack_groups, pack_linear


class _Memory(NamedTuple):
    """Packed weights of one piece of memory.

    Attributes:
      memory: of the weights, which it does not keep. While it is held, no other memory has the same key.
      packs: place, shape and form of a weight -> its version and digest, and the weight packed.
    """

    memory: StorageWeakRef
    packs: dict[tuple, tuple[int, int | None, PackedLinear]]


_KNOWN: dict[int, _Memory] = {}


def packed_weight(weight: Tensor, parts: int = 1) -> PackedLinear:
    """A weight in panels, packed when it is first seen, and again after it has been changed in place.

    Args:
      weight: [N, K], or [E, N, K] of as many groups.
      parts: as in `pack_linear`.
    """
    pack = pack_linear if weight.ndim == 2 else pack_groups
    return _known(weight, (parts,), lambda: pack(weight, parts))


def packed_rows(weight_ENK: Tensor, low: int, high: int, transposed: bool) -> PackedLinear:
    """Rows `low` to `high` of each matrix of some groups, or their transposes, likewise."""
    rows_ENK = weight_ENK[:, low:high]
    form = (low, high, transposed)
    return _known(weight_ENK, form, lambda: pack_groups(rows_ENK.transpose(1, 2) if transposed else rows_ENK))


def _known(weight: Tensor, form: tuple, pack_weight: Callable[[], PackedLinear]) -> PackedLinear:
    """The pack of a form of a weight, made where it is not there or of another version."""
    kernel_bits("the weight", weight)
    if not weight.is_contiguous() or weight.is_inference():
        return pack_weight()
    storage = weight.untyped_storage()
    key = storage._cdata
    known = _KNOWN.get(key)
    place = (weight.data_ptr(), weight.shape, weight.dtype, form)
    version = weight._version
    digest = None if torch.is_inference_mode_enabled() else library().funrl_digest(weight.data_ptr(), weight.nbytes)
    if known is not None:
        pack = known.packs.get(place)
        if pack is not None and pack[0] == version and (digest is None or pack[1] == digest):
            return pack[2]
    packed = pack_weight()
    if known is None:
        _drop_dead()
        known = _KNOWN[key] = _Memory(StorageWeakRef(storage), {})
    known.packs[place] = version, digest, packed
    return packed


def forget(*tensors: Tensor) -> None:
    """Pack these weights anew when they are next used."""
    for x in tensors:
        _KNOWN.pop(x.untyped_storage()._cdata, None)


def _drop_dead() -> None:
    for key, known in list(_KNOWN.items()):  # other threads may add and drop others meanwhile
        if torch.UntypedStorage._expired(known.memory.cdata):
            _KNOWN.pop(key, None)
