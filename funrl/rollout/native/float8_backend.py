"""The training model with the projections of its layers in 8 bits, as an engine's backend."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.decode_step import StepSizes
from funrl.compiled_kernels.fused_decode import rounded_rows_error
from funrl.compiled_kernels.gpu_kernels.trials import kernels_run
from funrl.models.float8_weights import quantize_layers, quantize_leaf, quantizes_all
from funrl.models.lora import with_adapters
from funrl.models.model import Inputs, ModelCache
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

    @property
    def load_bytes(self) -> int:
        """As `TorchBackend.load_bytes`, with the quantized projections."""
        held = {id(x) for x in trees.leaves(self._params)}
        return super().load_bytes + trees.nbytes([x for x in trees.leaves(self._quantized) if id(x) not in held])

    def overwrite(self, params: trees.Tree) -> bool:
        """As `TorchBackend.overwrite`, of the quantized weights too."""
        held = self._quantized if NO_ADAPTER in self._fixed else None
        stays = super().overwrite(params)
        if stays:
            copy_into(held, self._quantized)
            self._quantized = held
        return stays

    def empty_cache(self, pages: int) -> ModelCache:
        """A cache of so many pages beside that of the engine's requests."""
        return self.model.empty_cache(self.mesh, pages, self.page_tokens, self._dtype, self.mesh.device)

    def unquantized(self, inputs: Inputs, cache: ModelCache | None, adapter: int) -> tuple[Tensor, ModelCache | None]:
        """Hidden states [N, D] of one sequence by the weights as they were loaded, and the cache after them.

        Args:
          adapter: its number; -1: none.
        """
        params = self._params
        if adapter >= 0:
            params = with_adapters(params, [(self._adapters[adapter], None)])
        hidden_1ND, cache_after, _ = self.model.apply(params, inputs, self.mesh, cache, self._layer)
        return hidden_1ND[0], cache_after

    def changed_roundings(self) -> Tensor:
        """Number of bytes of quantized weights and scales that are not those of the loaded weights."""
        layers = trees.named({"layers": self._params["layers"]})
        held = trees.leaves(self._quantized)
        count = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        place = 0
        for name, x in layers:
            for again in trees.leaves(quantize_leaf(name, x)):
                count += (again.contiguous().view(torch.uint8) != held[place].contiguous().view(torch.uint8)).sum()
                place += 1
        return count

    def _stack(self) -> None:
        if self._fused_sizes is not None:  # else passes read the quantized projections, each by itself
            super()._stack()

    def drop(self) -> None:
        super().drop()
        self._quantized = None

    @functools.cached_property
    def _fused_sizes(self) -> StepSizes | None:
        sizes = super()._fused_sizes
        return sizes if sizes and quantizes_all(self.model) and kernels_run(rounded_rows_error) else None
