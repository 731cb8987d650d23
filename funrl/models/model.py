"""A model as a record of pure functions of a tree of weights.

Whatever computes with a model (the trainer, the native engine, the cost tracer) is given a `Model` and calls its
functions; which architecture it is made of is known here alone. A function such as `with_value_head` takes a model and
gives another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.paged_attention import Paging
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.config import Config
from funrl.models.names import Names

# (config, mesh, params of one layer, hidden [B, T, D], context) -> hidden [B, T, D]; of experts (hidden, their load)
Layer = Callable[..., Any]


class Inputs(NamedTuple):
    """Tokens as a forward pass takes them.

    Where a mesh splits tokens (`sequence`), those of a rank are its contiguous part of one packed row, as is all that
    is per token; `offsets` are of the whole row.

    Attributes:
      tokens: [B, T] int64 token ids.
      positions: [B, T] or [T] int64 position of each token in its sequence; None: 0, 1, 2, ...
      segments: [B, T] int64, the sequence of a packed row that a token belongs to; tokens see their own sequence only.
        0 is padding. None: every row is one sequence.
      offsets: [S + 1] int32, where the sequences of one packed row [1, T] begin and end: attention is then of variable
        length, and no [T, T] mask is made. None: the mask is made of `segments`.
      paging: with a cache, the places of the tokens of one packed row [1, T]; it has their positions. None: no cache.
      routes: [B, T, L, k] int64, for each of the L layers that have experts those that a token goes to; -1: those that
        its router says. None: so everywhere.
      split: whether each tensor rank has a part of a packed row's residual stream, as `split_residual` says.
    """

    tokens: Tensor
    positions: Tensor | None = None
    segments: Tensor | None = None
    offsets: Tensor | None = None
    paging: Paging | None = None
    routes: Tensor | None = None
    split: bool = False


class Output(NamedTuple):
    """Result of a forward pass.

    Attributes:
      hidden: [B, T, D] hidden states after the last norm, the same on every tensor rank; where `Inputs.split`, this
        tensor rank's part of the tokens.
      cache: the key-value cache with the new tokens in it; None where none was given.
      aux: of a model with experts the fields of `routing.Load`, of all its layers that have some: counts_E [L, E],
        probs_E [L, E], z [L] and ids_TK [L, B T, k].
    """

    hidden: Tensor
    cache: trees.Tree
    aux: Mapping[str, Tensor]


class Init(Protocol):
    def __call__(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree: ...


class Apply(Protocol):
    def __call__(
        self,
        params: trees.Tree,
        inputs: Inputs,
        mesh: Mesh = SINGLE,
        cache: trees.Tree = None,
        layer: Layer | None = None,
    ) -> Output: ...


class InitCache(Protocol):
    def __call__(
        self, mesh: Mesh, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> trees.Tree: ...


class Lora(NamedTuple):
    """Adapters of low rank: W + alpha / rank B A instead of each adapted weight W, of which B and A learn.

    Attributes:
      rank: columns of B and rows of A.
      alpha: the larger, the more the adapters count.
      targets: last parts of the names of adapted weights, such as "q".
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


class Adapters(NamedTuple):
    """Adapters of a model, and the model without them."""

    lora: Lora
    plain: Model


@dataclass(frozen=True, eq=False)
class Model:
    """An architecture of given sizes.

    Attributes:
      config: sizes and switches.
      shapes: the tree of whole weights, as tensors without memory.
      axes: the same tree with the logical axes of every weight, a tuple of names per tensor.
      names: for each weight, its name and shape in transformers; some neighbouring dims may be merged there. A file may
        hold several as one tensor (`names.stored_in`).
      init: `(generator, dtype=float32)` -> random weights, whole.
      apply: `(params, inputs, mesh=SINGLE, cache=None, layer=None)` -> `Output`. `params` are this rank's shards of the
        weights, or what `fsdp.gathered` makes of them; `layer` replaces `Model.layer`. With a cache and
        `inputs.paging`, new keys and values are written to their pages, in place: the cache is donated, and the
        returned one takes its place.
      unembed: `(params)` -> this rank's rows of the matrix [V, D] from hidden states to logits; None: it has no logits.
      value: `(params, hidden [B, T, D])` -> a number per token [B, T]; None: it has no value head.
      layer: the function of one layer that `apply` calls for each; what `compile_layer` and `rematerialized` replace.
      init_cache: `(mesh, pages, page_tokens, dtype, device=None)` -> an empty key-value cache for this rank's heads, a
        tree of tensors [pages, page_tokens, ...].
      rebuild: `(config)` -> the same architecture of another size.
      packs: whether `compiled_kernels.decode_step` computes what `apply` and `unembed` do.
      adapters: of a model that `with_lora` has made; None: all weights learn.
    """

    config: Config
    shapes: trees.Tree
    axes: trees.Tree
    names: Names
    init: Init
    apply: Apply
    unembed: Callable[[trees.Tree], Any] | None
    value: Callable[[trees.Tree, Tensor], Tensor] | None
    layer: Layer
    init_cache: InitCache
    rebuild: Callable[[Config], Model]
    packs: bool = False
    adapters: Adapters | None = None

    def with_layers(self, layers: int) -> Model:
        """The same model with only its first `layers` layers."""
        return self.rebuild(self.config.with_layers(layers))
