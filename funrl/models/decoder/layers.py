"""A layer as a record of a mixer and an mlp.

A mixer lets tokens see one another (attention, latent attention), an mlp computes each token by itself (dense,
experts). Both are frozen dataclasses of sizes, with functions of the weights. A new mixer is a file of its own, whose
record the reader of a family puts into `AttentionConfig.mixers`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from funrl import trees
from funrl.compiled_kernels.norm import rms_norm
from funrl.compiled_kernels.paged_attention import PagedHeads, Paging
from funrl.compiled_kernels.rotary import Rotary, frequencies, rotary, with_query_growth
from funrl.mesh.mesh import Mesh
from funrl.models.model import RouterLoad
from funrl.models.shared_prefixes import SharedPrefixes
from funrl.models.token_costs import LayerCost

WeightShapes = Mapping[str, tuple[int, ...]]  # name of a weight -> shape of the whole one
WeightAxes = Mapping[str, tuple[str, ...]]  # name of a weight -> logical axis of each dim
KeysValues = tuple[Tensor, Tensor]  # rotated keys and values of this rank's heads, [B, T, K, N] each


@dataclass(frozen=True)
class RopeScaling:
    """Stretching of rotary frequencies beyond the lengths of pretraining.

    Attributes:
      kind: "linear" divides every frequency by `factor`; "llama3" only the low ones, with a ramp between that is even
        in turns; "yarn" likewise with one that is even in the numbers of frequencies; "longrope" divides each by its
        number in `short`; "dynamic" none of them, as sequences are no longer than the model's positions.
      factor: the divisor.
      low, high: frequencies that turn fewer times than `low` over the original length are divided by `factor`, those
        that turn more often than `high` are kept.
      original: length of pretraining, in tokens.
      mscale, mscale_all: yarn: how much attention is sharpened: in its rotated part, and in all of it; 0: as yarn says.
      truncate: yarn: the ramp begins and ends at whole numbers.
      fixed_amplitude: yarn and longrope: factor of rotated queries and keys; 0: it follows from the other fields.
      short: longrope: divisors of the frequencies of sequences up to `original` tokens.
      long: longrope: those of longer ones, which the files have and nothing here uses.
      extended: longrope: length of the longest sequences for which `long` was made.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope", "dynamic"]
    factor: float
    low: float = 1.0
    high: float = 4.0
    original: int = 8192
    mscale: float = 0.0
    mscale_all: float = 0.0
    truncate: bool = True
    fixed_amplitude: float = 0.0
    short: tuple[float, ...] = ()
    long: tuple[float, ...] = ()
    extended: int = 0

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        if self.fixed_amplitude:
            return self.fixed_amplitude
        if self.kind == "longrope" and self.factor > 1:
            return math.sqrt(1 + math.log(self.factor) / math.log(self.original))
        if self.kind != "yarn":
            return 1.0
        both = self.mscale > 0 and self.mscale_all > 0
        return self._sharper(self.mscale) / self._sharper(self.mscale_all) if both else self._sharper(1.0)

    @property
    def sharpness(self) -> float:
        """Factor of the logits of latent attention."""
        return self._sharper(self.mscale_all) ** 2 if self.kind == "yarn" and self.mscale_all else 1.0

    def _sharper(self, mscale: float) -> float:
        return 1.0 if self.factor <= 1 else 0.1 * mscale * math.log(self.factor) + 1


@dataclass(frozen=True)
class Rope:
    """Rotary positions of a layer.

    Attributes:
      size: numbers of a head that are rotated.
      theta: base of the frequencies.
      scaling: stretching of these; None: none.
      interleaved: neighbours are the pairs that are rotated, not numbers half a head apart.
      query_growth: rotated queries at position p have a factor 1 + query_growth log(1 + floor(p / original)), with
        `original` of `scaling`.
      axes: for each frequency which of a token's three positions it takes, where it has three; (): there is one.
      turning: number of frequencies, the first ones, that turn; the others are 0. None: all turn.
    """

    size: int
    theta: float
    scaling: RopeScaling | None = None
    interleaved: bool = False
    query_growth: float = 0.0
    axes: tuple[int, ...] = ()
    turning: int | None = None

    def rotations(self, positions: Tensor, dtype: torch.dtype, axial: Tensor | None = None) -> Rotary:
        """Rotations of tokens at these positions.

        Args:
          positions: one of each token.
          dtype: of the result.
          axial: [..., 3] positions of each token; None: all three are `positions`.
        """
        wide = torch.promote_types(dtype, torch.float32)
        axes = () if axial is None else self.axes
        where = axial if axial is not None and axes else positions
        scaling = self.scaling
        turns = frequencies(self.size, self.theta, scaling, dtype=wide, device=positions.device)
        if self.turning is not None:
            turns = F.pad(turns[: self.turning], (0, len(turns) - self.turning))
        if scaling is None:
            return rotary(where, turns, dtype, axes=axes)
        rope = rotary(where, turns, dtype, amplitude=scaling.amplitude, axes=axes)
        return with_query_growth(rope, positions, scaling.original, self.query_growth) if self.query_growth else rope


@dataclass(frozen=True)
class Norm:
    """Root mean square norm over the last dim.

    Attributes:
      eps: added to the mean square.
      offset: added to the weight.
    """

    eps: float = 1e-6
    offset: float = 0.0

    def __call__(self, x: Tensor, weight: Tensor | None) -> Tensor:
        """Normalize x; None: there is no norm here."""
        return x if weight is None else rms_norm(x, weight, self.eps, offset=self.offset)


class Context(NamedTuple):
    """Inputs of a layer besides its weights and hidden states.

    Attributes:
      layer: the mixer and the mlp.
      rope: rotations of the tokens' positions; None: the layer has none.
      attention_mask_BTS: bool, true where token t sees token s; None: every token, or those up to t where `causal`.
      causal: without a mask, token t sees tokens up to t.
      kv_cache: this layer's part of the cache, its pages and its cells, written in place.
      paging: with `kv_cache`, the places of the tokens of one packed row.
      cells_S: with `kv_cache`, the cell of each sequence.
      offsets: where the sequences of one packed row begin and end; None: the mask says which tokens see each other.
      segments_BT: the sequence of each token, 0 at padding; None: `offsets` say it, or every row is one sequence.
      form: of attention where a mesh splits the tokens of the row; one of `sequence_parallel.FORMS`.
      routes_BTK: the experts that tokens go to; None: as the router says.
      split: whether the hidden states are a part of the tokens that the rest is of; see `split_residual`.
      blockwise: compute attention of static shapes, as on XLA: by blocks, or of equally many tokens of each row of
        pages. "kernel": packed rows by one operator, as `varlen_attention` says.
      mutual_RM: as in `Inputs`, of packed rows and of pages; the mask has them already.
      stream_BTD: for an mlp, the residual stream that its hidden states are the norm of.
      keys_values: keys and values of an earlier layer that this one attends to; `kv_cache` is that layer's then. None:
        it makes its own.
      vectors_BTP: this layer's own vector of each token, as `LayerVectors` makes them; None: there are none.
      prefixes: the distinct tokens of the row of `offsets`, which the hidden states are of; None: they are of all.
      row_bound: as in `Inputs`.
    """

    layer: DecoderLayer
    rope: Rotary | None = None
    attention_mask_BTS: Tensor | None = None
    causal: bool = True
    kv_cache: tuple[Tensor, ...] | None = None
    paging: Paging | None = None
    cells_S: Tensor | None = None
    offsets: Tensor | None = None
    segments_BT: Tensor | None = None
    form: str = "auto"
    routes_BTK: Tensor | None = None
    split: bool = False
    blockwise: bool | Literal["kernel"] = False
    mutual_RM: Tensor | None = None
    stream_BTD: Tensor | None = None
    keys_values: KeysValues | None = None
    vectors_BTP: Tensor | None = None
    prefixes: SharedPrefixes | None = None
    row_bound: int | None = None


class CacheShapes(NamedTuple):
    """Shapes of a layer's cache on a rank.

    Attributes:
      pages: of one page of each tensor that grows with the tokens, in the dtype of the cache.
      cells: of what one sequence has in each tensor that does not grow, in float32 or wider.
    """

    pages: tuple[tuple[int, ...], ...] = ()
    cells: tuple[tuple[int, ...], ...] = ()


class Mixer(Protocol):
    """Part of a layer in which tokens see one another: a frozen dataclass of sizes.

    Its weights are the part "attn" of a layer's tree.

    Attributes:
      rope: rotary positions, the source of `Context.rope`; None: the mixer has none.
      window: the number of tokens that a token sees, itself and those before it; None: all of them.
      paged: heads as the kernel of paged attention takes them; None: the mixer does not call it.
    """

    @property
    def rope(self) -> Rope | None: ...

    @property
    def window(self) -> int | None: ...

    @property
    def paged(self) -> PagedHeads | None: ...

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights, for hidden states of a size."""
        ...

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        ...

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight, in float32; None: it begins as `weights.init` says, as most do."""
        ...

    def apply(
        self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context
    ) -> Tensor | tuple[Tensor, KeysValues]:
        """Part of the residual stream that the mixer adds, [B, T, D]; with its keys and values if it lends them.

        Args:
          params: this rank's part of the weights.
          h_BTD: normalized hidden states, the same on every tensor rank and not yet passed through
            `split_residual.enter`; where `context.split`, this rank's tokens of them. The result is likewise.
        """
        ...

    def cache_shapes(self, page_tokens: int, tensor: int) -> CacheShapes | None:
        """Shapes of the layer's cache, on one of `tensor` ranks; None: the mixer cannot decode with one."""
        ...

    def cost(self, cost: LayerCost) -> LayerCost:
        """The cost of a layer with what the mixer takes filled in."""
        ...


class Mlp(Protocol):
    """Part of a layer that computes each token by itself: a frozen dataclass of sizes.

    Its weights are the part "mlp" of a layer's tree.

    Attributes:
      routed: whether tokens go to some of several experts; `Context.routes_BTK` may say to which.
    """

    @property
    def routed(self) -> bool: ...

    def shapes(self, embed: int) -> WeightShapes:
        """Shapes of the whole weights, for hidden states of a size."""
        ...

    def axes(self) -> WeightAxes:
        """Logical axes of the weights."""
        ...

    def initial(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor | None:
        """First values of a weight, in float32; None: it begins as `weights.init` says, as most do."""
        ...

    def apply(
        self, params: trees.Tree, h_BTD: Tensor, mesh: Mesh, context: Context
    ) -> tuple[Tensor, RouterLoad | None]:
        """Part of the residual stream that the mlp adds, as `Mixer.apply`; and the load of its experts, if any."""
        ...

    def cost(self, cost: LayerCost) -> LayerCost:
        """The cost of a layer with what the mlp takes filled in."""
        ...


class DecoderLayer(NamedTuple):
    """A layer of a decoder."""

    mixer: Mixer
    mlp: Mlp


class LayerOutput(NamedTuple):
    """Result of a layer that has more than hidden states.

    Attributes:
      hidden_BTD: its hidden states.
      load: of its experts; None: it has none.
      lent: keys and values for later layers; None: none attends to them.
    """

    hidden_BTD: Tensor
    load: RouterLoad | None = None
    lent: KeysValues | None = None
