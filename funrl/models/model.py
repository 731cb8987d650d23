"""A model as a record of pure functions of a tree of weights.

Whatever computes with a model (the trainer, the native engine, the cost tracer) is given a `Model` and calls its
functions; which architecture it is made of is known here alone. A function such as `with_value_head` takes a model and
gives another one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from funrl import trees
from funrl.batch import Batch
from funrl.compiled_kernels.decode_step import StepSizes
from funrl.compiled_kernels.paged_attention import PagedHeads, Paging
from funrl.kinds import OwnedLines
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.models.errors import ModelError
from funrl.models.shared_prefixes import SharedPrefixes
from funrl.models.token_costs import ModelCost

MOST_LAYERS = 4096
# (config, mesh, params of one layer, hidden [B, T, D], context) -> hidden [B, T, D], or of a decoder a `LayerOutput`
Layer = Callable[..., Any]
Adapt = Callable[[Mapping[str, Any]], Mapping[str, Any]]


class LayerContext(Protocol):
    """Part of a layer's context that every architecture has; see `decoder.layers.Context`."""

    @property
    def split(self) -> bool: ...


@dataclass(frozen=True)
class SpecialTokens:
    """Token ids with a meaning of their own; None: there is none.

    Attributes:
      bos: begins a sequence.
      eos: each ends a sequence.
      pad: fills rows.
    """

    bos: int | None = None
    eos: tuple[int, ...] = ()
    pad: int | None = None


@dataclass(frozen=True)
class ModelFiles:
    """Facts about the files of a model. What it computes does not depend on them.

    Attributes:
      dtype: of the weights in the files.
      family: name of the architecture in the files.
      generation: JSON text of the defaults of sampling that the files give; "" where they give none.
    """

    dtype: str = "float32"
    family: str = "llama"
    generation: str = ""


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and facts that every model has, whatever its architecture.

    Attributes:
      vocab, embed, layers: sizes V, D, L.
      tied: the unembedding is the embedding.
      max_positions: longest sequence that the model was made for.
      special_tokens: ids of tokens with a meaning of their own.
      source: facts about its files.
    """

    vocab: int
    embed: int
    layers: int
    _: KW_ONLY
    tied: bool = False
    max_positions: int = 2048
    special_tokens: SpecialTokens = SpecialTokens()
    source: ModelFiles = ModelFiles()

    def __post_init__(self) -> None:
        check_sizes(vocab=self.vocab, embed=self.embed, layers=self.layers)
        if self.layers > MOST_LAYERS:
            raise ModelError(f"layers is {self.layers}, it must be at most {MOST_LAYERS}")

    @property
    def foreign(self) -> Mapping[str, Any]:
        """Fields of config.json, beside those of this record, that what the model computes depends on."""
        return {}

    def of_layers(self, chosen: Sequence[int]) -> Self:
        """The same sizes with only the layers of these numbers, in their order."""
        return replace(self, layers=len(chosen))


def check_sizes(**sizes: int) -> None:
    """Check that sizes are at least 1.

    Raises:
      ModelError: naming the size that is not.
    """
    for name, size in sizes.items():
        if size < 1:
            raise ModelError(f"{name} is {size}, it must be at least 1")


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
      cells_S: with a cache, int64, the cell of each sequence; None: the cache has no cells.
      routes: [B, T, L, k] int64, the experts of each token in each of the L layers with experts; -1: the experts that
        its router says. None: so everywhere.
      split: whether each tensor rank has a part of a packed row's residual stream, as `split_residual` says.
      axial_positions: [B, T, 3] int64, three positions of each token, for rotary frequencies that take one of several;
        None: they are `positions`.
      inserted: [1 + L, M, D] hidden states of M tokens: the first instead of their embeddings, the others added behind
        the first L layers, one each; None: no token has such.
      inserted_at: [B, T] int64, which of these a token has; -1: its embedding.
      pictures: those of the rows, as `OwnedValues.read` gives them.
      mutual_RM: [R, M] int64, tokens of the rows end to end, in R groups of M that see one another, as those of a
        picture may; None: tokens see none after them.
      adapt: (weights of a part) -> the same with the factors of adapters, for parts that are no layer; None: they have
        none.
      prefixes: of one packed row, whose layers then compute its distinct tokens alone, if the model can; the fields
        and the results are those of the whole row. None: they compute all.
      row_bound: bound of the rows that the experts of a rank take, in quarters of the mean of all ranks; see
        `ExpertRows`. None: there is room for all slots.
    """

    tokens: Tensor
    positions: Tensor | None = None
    segments: Tensor | None = None
    offsets: Tensor | None = None
    paging: Paging | None = None
    cells_S: Tensor | None = None
    routes: Tensor | None = None
    split: bool = False
    axial_positions: Tensor | None = None
    inserted: Tensor | None = None
    inserted_at: Tensor | None = None
    pictures: Any = None
    mutual_RM: Tensor | None = None
    adapt: Adapt | None = None
    prefixes: SharedPrefixes | None = None
    row_bound: int | None = None


class RouterLoad(NamedTuple):
    """Sums over this rank's tokens of one layer's routes, padding left out.

    Attributes:
      counts_E: how often each expert was chosen, int64; no gradient.
      probs_E: probabilities of each expert.
      z: squares of the log-sum-exp of the logits.
      ids_TK: the chosen experts.
      peak: rows that the experts of the fullest rank take, over the mean of all ranks, float64; 0: one rank has all
        experts. Where it is above a bound of the rows, the layer's result is not that of all slots.
    """

    counts_E: Tensor
    probs_E: Tensor
    z: Tensor
    ids_TK: Tensor
    peak: Tensor


class Output(NamedTuple):
    """Result of a forward pass.

    Attributes:
      hidden: [B, T, D] hidden states after the last norm, the same on every tensor rank; where `Inputs.split`, this
        tensor rank's part of the tokens.
      cache: the key-value cache with the new tokens in it; None where none was given.
      aux: of a model with experts the fields of `RouterLoad`, of all its layers that have some: counts_E [L, E],
        probs_E [L, E], z [L], ids_TK [L, B T, k] and peak [L].
    """

    hidden: Tensor
    cache: trees.Tree
    aux: Mapping[str, Tensor]


class Init(Protocol):
    """Function that makes random weights."""

    def __call__(self, generator: torch.Generator, dtype: torch.dtype = torch.float32) -> trees.Tree: ...


class Apply(Protocol):
    """Function that runs the model, or one layer of it."""

    def __call__(
        self,
        params: trees.Tree,
        inputs: Inputs,
        mesh: Mesh = SINGLE,
        cache: trees.Tree = None,
        layer: Layer | None = None,
    ) -> Output: ...


class ModelCache(Protocol):
    """Cache of a model: trees of tensors [pages, ...] and [cells, ...]; see `decoder.Cache`."""

    @property
    def pages(self) -> trees.Tree: ...

    @property
    def cells(self) -> trees.Tree: ...


class InitCache(Protocol):
    """Function that makes an empty cache."""

    def __call__(
        self,
        mesh: Mesh,
        pages: int,
        page_tokens: int,
        dtype: torch.dtype,
        device: torch.device | None = None,
        cells: int = 0,
    ) -> ModelCache: ...


class Lora(NamedTuple):
    """Adapters of low rank: W + alpha / rank B A instead of each adapted weight W; B and A learn.

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


class PromptPlaces(NamedTuple):
    """Places and positions of the tokens of a prompt that owns values.

    Attributes:
      inserted_at_T: int64 on the CPU, which hidden state of its values, end to end, a token has; -1: its embedding.
      positions_T3: int64 on the CPU, as `Inputs.axial_positions`.
      shrink: by how much the positions of tokens behind the prompt are below their numbers.
      counts: hidden states of each value that `OwnedValues.apart` gives.
      mutual_RM: int64 on the CPU, as `Inputs.mutual_RM`; None: tokens see none after them.
    """

    inserted_at_T: Tensor
    positions_T3: Tensor
    shrink: int
    counts: tuple[int, ...]
    mutual_RM: Tensor | None = None


class OwnedValues(NamedTuple):
    """Values that rows of a model may own besides their tokens.

    Attributes:
      none: by ragged field, the lines of a row that owns nothing.
      read: `(batch, inputs)` -> the inputs with the values of a batch, if it has the fields.
      apart: `(lines by field)` -> each value by itself, such as one picture, in order.
      encode: `(params, lines of one value)` -> its hidden states [L, M, D], as `Inputs.inserted`.
      place: `(tokens [T], lines by field)` -> the places of a prompt.
      check: `(token ids, lines)`; raises ModelError where the tokens do not stand for these values.
      contents: `(token ids, lines)` -> the ids, with a negative number, which the values make, at tokens for these:
        equal numbers mean equal keys and values.
      frozen: by the name of a part of the weights how those names in it begin that do not learn by default.
      whole: `(token ids)` -> begin and end of each group of tokens that see one another, in order; None: there are no
        such groups.
    """

    none: Mapping[str, Tensor]
    read: Callable[[Batch, Inputs], Inputs]
    apart: Callable[[Mapping[str, Tensor]], list[OwnedLines]]
    encode: Callable[[trees.Tree, Mapping[str, Tensor]], Tensor]
    place: Callable[[Tensor, Mapping[str, Tensor]], PromptPlaces]
    check: Callable[[Sequence[int], OwnedLines | None], None]
    contents: Callable[[Sequence[int], OwnedLines], list[int]]
    frozen: Mapping[str, tuple[str, ...]] = {}
    whole: Callable[[Sequence[int]], list[tuple[int, int]]] | None = None


class Routers(NamedTuple):
    """Routers of a model with experts.

    Attributes:
      experts: of a layer, E.
      per_token: experts that a token goes to, k.
      layers: numbers of the layers that have experts.
      biased: experts are chosen by score + bias; the bias is a weight without a gradient.
    """

    experts: int
    per_token: int
    layers: tuple[int, ...]
    biased: bool


class Abilities(NamedTuple):
    """Abilities of a model, for code that does not know its architecture.

    Attributes:
      cost: of its tokens, pairs of tokens and caches.
      code: the class of transformers whose own code computes the model; "" where this package's does: only then can it
        be compiled, split over `sequence` and `tensor`, and be given adapters and further rows of the vocabulary.
      compiled_step: sizes for `compiled_kernels.decode_step`, if it computes what `apply` and `unembed` do; else the
        reason why it does not.
      routers: None: there are no experts.
      splits_rows: ranks of `sequence` can share a row's tokens; False: some tokens see later ones.
      heads: query heads of a layer, which ranks that share a row's tokens may split.
      logit_cap: logits x become cap tanh(x / cap); None: they stay.
      paged_kernel: head size and cap of attention for the kernel of paged attention; None: it attends otherwise.
      exact_sums: sizes of the sums that tensor ranks share, if a pass over pages has the bits of one over packed rows
        on a CPU; else the reason why it has not.
      aligned: reason why the kernels of a fixed order on a GPU do not compute it; None: they do.
      unsampled: ids of tokens that are never sampled: they have the probability 0.
      layer_kinds: for each layer the number of its kind; layers of one kind differ in nothing but their weights. ():
        unknown.
      constant: names of weights that never learn: buffers of transformers' modules.
      shares_prefixes: `Inputs.prefixes` may be given.
    """

    cost: ModelCost
    code: str = ""
    compiled_step: StepSizes | str = "it has another architecture"
    routers: Routers | None = None
    splits_rows: bool = True
    heads: int = 1
    logit_cap: float | None = None
    paged_kernel: PagedHeads | None = None
    exact_sums: tuple[int, ...] | str = "it has another architecture"
    aligned: str | None = "it has another architecture"
    unsampled: tuple[int, ...] = ()
    layer_kinds: tuple[int, ...] = ()
    constant: tuple[str, ...] = ()
    shares_prefixes: bool = False

    @property
    def choices(self) -> int:
        """Number of experts that a token goes to, in all layers together."""
        return 0 if self.routers is None else len(self.routers.layers) * self.routers.per_token


@dataclass(frozen=True, eq=False)
class Model:
    """An architecture of given sizes.

    Attributes:
      config: sizes and facts.
      shapes: the tree of whole weights, as tensors without memory.
      axes: the same tree with the logical axes of every weight, a tuple of names per tensor.
      init: `(generator, dtype=float32)` -> random weights, whole.
      apply: `(params, inputs, mesh=SINGLE, cache=None, layer=None)` -> `Output`. `params` are this rank's shards of the
        weights, or what `fsdp.gathered` makes of them; `layer` replaces `Model.layer`. With a cache and
        `inputs.paging`, new keys and values are written to their pages, in place: the cache is donated, and the
        returned one takes its place.
      unembed: `(params)` -> this rank's rows of the matrix [V, D] from hidden states to logits; None: it has no logits.
      value: `(params, hidden [B, T, D])` -> a number per token [B, T]; None: it has no value head.
      layer: the function of one layer that `apply` calls for each; what `compile_layer` and `rematerialized` replace.
      init_cache: `(mesh, pages, page_tokens, dtype, device=None, cells=0)` -> an empty cache for this rank's heads, a
        tree of pages, tensors [pages, page_tokens, ...], and of cells, tensors [cells, ...] of what a sequence has of a
        fixed size; None: it has no cache.
      rebuild: `(config)` -> the same architecture of another size.
      abilities: what else it can do.
      adapters: of a model that `with_lora` has made; None: all weights learn.
      owned: values that rows of it may own, such as pictures; None: rows are tokens.
      whole: of a model that `with_nf4` has made, that with whole weights; None: they are whole.
    """

    config: ModelConfig
    shapes: trees.Tree
    axes: trees.Tree
    init: Init
    apply: Apply
    unembed: Callable[[trees.Tree], Any] | None
    value: Callable[[trees.Tree, Tensor], Tensor] | None
    layer: Layer
    init_cache: InitCache | None
    rebuild: Callable[[Any], Model]
    abilities: Abilities
    adapters: Adapters | None = None
    owned: OwnedValues | None = None
    whole: Model | None = None

    @property
    def parameters(self) -> int:
        """How many numbers its weights are, in whatever form they are stored."""
        return trees.count((self.whole or self).shapes)

    @property
    def generates(self) -> bool:
        """True if it gives probabilities to tokens, which a value head does not."""
        return self.unembed is not None

    @property
    def pages(self) -> bool:
        """True if it decodes with a cache of pages."""
        return self.init_cache is not None

    @property
    def lora(self) -> Lora:
        """The form of its adapters. Raises: TypeError, it has none."""
        if self.adapters is None:
            raise TypeError(f"{type(self.config).__name__}: the model has no adapters")
        return self.adapters.lora

    @property
    def values(self) -> OwnedValues:
        """Its functions of values that tokens own. Raises: TypeError, it reads none."""
        if self.owned is None:
            raise TypeError(f"{type(self.config).__name__}: the model reads tokens alone")
        return self.owned

    def unembedding(self, params: trees.Tree) -> Tensor:
        """`unembed` of its weights. Raises: TypeError, it has no logits."""
        if self.unembed is None:
            raise TypeError(f"{type(self.config).__name__}: the model has no logits")
        return self.unembed(params)

    def empty_cache(
        self, mesh: Mesh, pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device, *, cells: int = 0
    ) -> ModelCache:
        """`init_cache` of its weights. Raises: TypeError, it has no cache of pages."""
        if self.init_cache is None:
            raise TypeError(f"{type(self.config).__name__}: the model has no cache of pages")
        return self.init_cache(mesh, pages, page_tokens, dtype, device, *([cells] if cells else []))

    def page_bytes(self, mesh: Mesh, page_tokens: int, dtype: torch.dtype) -> int:
        """Bytes of a page of its cache on a rank, all layers together."""
        return trees.nbytes(self.empty_cache(mesh, 1, page_tokens, dtype, torch.device("meta")))

    def cell_bytes(self, mesh: Mesh, dtype: torch.dtype) -> int:
        """Bytes of a cell of its cache on a rank, all layers together; 0: it has no cells."""
        if self.init_cache is None:
            return 0
        return trees.nbytes(self.init_cache(mesh, 0, 1, dtype, torch.device("meta"), 1))

    def of_layers(self, chosen: Sequence[int]) -> Model:
        """The same model with only the layers of these numbers, in their order."""
        return self.rebuild(self.config.of_layers(chosen))

    def with_layers(self, layers: int) -> Model:
        """The same model with only its first `layers` layers."""
        return self.of_layers(range(layers))
