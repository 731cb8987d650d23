"""The training model with the projections of its layers in 8 bits, as an engine's backend."""

from __future__ import annotations

import functools

from funrl import trees
from funrl.models.float8_weights import quantize_layers
from funrl.rollout.native.backends import NO_ADAPTER, TorchBackend, copy_into


class Float8Backend(TorchBackend):
    """`TorchBackend` whose passes read quantized projections.

    The weights that were loaded stay beside them: the proof of a sync reads these. Embedding, norms, biases and
    unembedding are the loaded ones.
    """

    _quantized: trees.Tree = None  # the layers

    @property
    def _computed(self) -> trees.Tree:
        return {**self._params, "layers": self._quantized}

    def _take(self, params: trees.Tree) -> None:
        super()._take(params)
        self._quantized = quantize_layers(params)

    def overwrite(self, params: trees.Tree) -> bool:
        """As `TorchBackend.overwrite`, of the quantized weights too."""
        held = self._quantized if NO_ADAPTER in self._fixed else None
        stays = super().overwrite(params)
        if stays:
            copy_into(held, self._quantized)
            self._quantized = held
        return stays

    def drop(self) -> None:
        super().drop()
        self._quantized = None

    @functools.cached_property
    def _fused_sizes(self) -> None:
        return None
