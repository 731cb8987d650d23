"""A model on devices: where its weights are, and its scores of the tokens of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from funrl import trees
from funrl.batch import Batch, schema_of
from funrl.compiled_kernels import linear_logprob as kernel
from funrl.compiled_kernels.linear_divergence import linear_divergence
from funrl.compiled_kernels.linear_logprob import TokenScores, linear_logprob
from funrl.compiled_kernels.truncated_scores import KeptTokens, truncated_scores
from funrl.mesh.collectives import all_gather, gather_replicated, own_shard
from funrl.mesh.mesh import SINGLE, Mesh
from funrl.mesh.reshard import copied
from funrl.mesh.rules import COMPUTE, SPLIT_RESIDUAL, STORED, Rules, layouts, partial_axes
from funrl.models.equivalent_layer import computes_as
from funrl.models.errors import ModelError
from funrl.models.expert_rows import ExpertRows
from funrl.models.fsdp import gathered
from funrl.models.gather_buffers import GatherDtypes
from funrl.models.model import Inputs, Layer, Model, Output, RouterLoad
from funrl.models.shared_prefixes import SharedPrefixes, shared_prefixes
from funrl.models.split_residual import all_tokens
from funrl.models.value_head import HEADS
from funrl.models.weight_dtypes import weight_dtypes

SEQUENCE = "sequence"  # axis that splits the tokens of a row


@dataclass(frozen=True, eq=False)
class Placed:
    """A model on the devices of a mesh; made by `place`.

    Every method takes this rank's shards of the weights and its own rows of a batch, of which it reads `tokens` and,
    where they are there, `positions`, `segments` and `mask`. All ranks of the mesh call it together. Results are
    aligned with the tokens: position t speaks of token t, given the tokens before it in its sequence. They are 0 at the
    first token of a sequence and at padding.

    Ranks that differ in `sequence` alone have the same rows. Each computes the hidden states, and what is made of them,
    of its contiguous part of one packed row; results are those of the whole row again, the same on all of them. Where
    `splits`, tensor ranks share the residual stream of that part.

    Attributes:
      model: what is placed.
      mesh: the devices.
      stored: layouts of the weights between steps.
      compute: layouts of the weights while their layer runs.
      dtype: the weights are cast to it to compute; gradients arrive in the dtype of the weights.
      reduce_dtype: of the sums over ranks of the gradients of weights that are gathered; None: that of the weights.
      layer: the function of one layer, such as a compiled one.
      replay: whether tokens go to the experts that `routes` of the batch says, where it has some.
      splits: whether the residual stream of packed rows is split over `tensor`; see `split_residual`.
      shares_prefixes: whether layers may compute what packed rows on a CPU begin with in common once; see
        `shared_prefixes`. A compiled layer would have one more variant.
      expert_rows: bound of the rows that the experts of a rank take.
    """

    model: Model
    mesh: Mesh
    stored: trees.Tree
    compute: trees.Tree
    dtype: torch.dtype
    layer: Layer
    expert_rows: ExpertRows
    replay: bool = False
    splits: bool = False
    reduce_dtype: torch.dtype | None = None
    shares_prefixes: bool = True

    @property
    def partial(self) -> trees.Tree:
        """For each weight the axes, besides those of tokens, over which to sum its gradient of packed rows."""
        return partial_axes(self.model.shapes, self.model.axes, SPLIT_RESIDUAL if self.splits else {})

    @property
    def multiple(self) -> int:
        """Number of tokens that the length of a packed row is a multiple of."""
        return self.mesh.size((SEQUENCE, "tensor") if self.splits else SEQUENCE)

    def token_scores(
        self,
        params: trees.Tree,
        batch: Batch,
        want: tuple[str, ...] = ("logp",),
        temperature: float = 1.0,
        topk: Tensor | None = None,
        teacher: Teacher | None = None,
    ) -> TokenScores:
        """Log-probability, entropy and collision probability of every token, and its divergence from a teacher.

        Args:
          params: weights in the layouts `stored`.
          batch: rows [B, T]. Tokens outside its mask get 0 and cost no logits.
          want: some of "logp", "entropy", "sum_pi_squared".
          temperature: logits are divided by it.
          topk: [B, T, K] ids of other tokens whose log-probabilities at each position are wanted too.
          teacher: the divergence from it over the whole vocabulary is wanted too. Its hidden states are computed
            here, without a gradient, and what is [tokens, vocabulary] is never whole.

        Where the batch has `kept`, the distribution is that of truncated sampling, renormalised over these tokens.

        Returns: [B, T] each, differentiable; `topk_logp` [B, T, K].

        Raises:
          ModelError: the model, or the teacher, has a value head and no probabilities; or the batch has `kept`, and
            other tokens or a teacher are asked for.
          ValueError: the teacher's vocabulary has another size.
        """
        (hidden_ND, w_VD, over, at_N), load = self._before_tokens(params, batch)
        kept = self._kept_after(batch, at_N)
        if kept is not None and (topk is not None or teacher is not None):
            raise ModelError("a teacher's probabilities are not computed for truncated distributions")
        topk_NK = None if topk is None else self._own_next(topk)[at_N].long()
        topk_NK = topk_NK if kept is None else kept.padded()
        after_N = self._own_next(batch.tokens)[at_N].long()
        unsampled = self.model.abilities.unsampled
        if unsampled:
            topk_NK = _with_unsampled(topk_NK, unsampled, after_N)
        scores = linear_logprob(
            hidden_ND,
            w_VD,
            after_N,
            mesh=over,
            temperature=temperature,
            want=want,
            topk_TK=topk_NK,
            cap=self.model.abilities.logit_cap,
            vocab=self._vocab(over),
        )
        if unsampled:
            scores = _without_unsampled(scores, len(unsampled))
        if kept is not None:
            logp_M = scores.read("topk_logp")[kept.places_M, kept.columns_M]
            scores = truncated_scores(scores, logp_M, kept)._replace(topk_logp=None)
        if teacher is not None:
            scores = scores._replace(divergence=self._divergence(hidden_ND, w_VD, over, teacher, batch))
        return TokenScores(*(None if x is None else self._spread(x, at_N, batch) for x in scores))._replace(load=load)

    def _divergence(self, hidden_ND: Tensor, w_VD: Tensor, over: Mesh, teacher: Teacher, batch: Batch) -> Tensor:
        """Divergence [N] from a teacher at the positions of hidden states; `over` has the ranks of the vocabulary."""
        if self.model.abilities.unsampled:
            raise ModelError("a divergence from a teacher is not computed for a model with tokens never sampled")
        with torch.no_grad():
            (teacher_NE, teacher_VE, *_), _ = teacher.placed._before_tokens(teacher.params, batch)
        return linear_divergence(
            hidden_ND,
            kernel.token_rows(w_VD, over, self._vocab(over)),
            teacher_NE,
            teacher_unembed_VE=kernel.token_rows(teacher_VE, over, self._vocab(over)),
            beta=teacher.beta,
            mesh=over,
            temperature=teacher.temperature,
            caps=(self.model.abilities.logit_cap, teacher.placed.model.abilities.logit_cap),
        )

    def topk(self, params: trees.Tree, batch: Batch, k: int, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """The k most probable tokens at every position, and their log-probabilities.

        Args: as in `token_scores`; k: at most the size of the vocabulary.

        Returns: [B, T, k] int64 and [B, T, k] nats, the most probable first; without a gradient.
        """
        with torch.no_grad():
            (hidden_ND, w_VD, over, at_N), _ = self._before_tokens(params, batch)
            cap = self.model.abilities.logit_cap
            ids_NK, logp_NK = kernel.topk(
                hidden_ND, w_VD, k, mesh=over, temperature=temperature, cap=cap, vocab=self._vocab(over)
            )
            return self._spread(ids_NK, at_N, batch), self._spread(logp_NK, at_N, batch)

    def logits(self, params: trees.Tree, batch: Batch) -> Tensor:
        """Logits of the whole vocabulary before each token of the mask that this rank has, [N, V]; no gradient.

        Args: as in `token_scores`.
        """
        with torch.no_grad():
            (hidden_ND, w_VD, over, _), _ = self._before_tokens(params, batch)
            logits_NV = kernel.project(hidden_ND, w_VD, self.model.abilities.logit_cap)
            return all_gather(logits_NV, over, "tensor", dim=1)[:, : self.model.config.vocab]

    def values(self, params: trees.Tree, batch: Batch) -> Tensor:
        """The value head's number before each token: position t is read from the hidden state of token t - 1.

        Returns: [B, T] in float32 or wider, differentiable.

        Raises:
          ModelError: the model has no value head.
        """
        if self.model.value is None:
            raise ModelError("the model has no value head: with_value_head(model) gives it one")
        weights = self._gathered(params)
        value_Bt = self.model.value(weights, self._apply(weights, batch).hidden)
        over = (SEQUENCE, "tensor") if self._splits(batch) else SEQUENCE
        return _shifted(gather_replicated(value_Bt, self.mesh, over, dim=1), batch)

    def copy_from(self, source: Placed, params: trees.Tree, dtype: torch.dtype | None = None) -> trees.Tree:
        """Weights of this model that begin as those of another one. Collective; the copy shares no memory.

        An unembedding that this model lacks is left out, and a value head that the other one lacks begins at 0: a
        critic can begin as the policy, or as a reward model.

        Args:
          source: a model of the same sizes on the same mesh.
          params: its weights, in its layouts `stored`.
          dtype: of the copy; None: that of `params`.

        Returns: weights in the layouts `stored` of this model.

        Raises:
          ModelError: the other model lacks a weight, or has one of another shape.
        """
        weights, src, dst = (_by_part(tree) for tree in (params, source.stored, self.stored))
        for name, layout in dst.items():
            if name not in src and name not in HEADS:
                raise ModelError(f"the model to begin as has no {name}")
            if name in src and src[name].shape != layout.shape:
                shape = list(src[name].shape)
                wanted = list(layout.shape)
                raise ModelError(f"the model to begin as has a {name} of shape {shape}, this one of {wanted}")
        shared = [name for name in dst if name in src]
        weights, src = ({name: tree[name] for name in shared} for tree in (weights, src))
        dtypes = None if dtype is None else weight_dtypes(src, dtype)
        copies = copied(weights, src, {name: dst[name] for name in shared}, mesh=self.mesh, dtypes=dtypes)
        for name in set(HEADS) & (dst.keys() - copies.keys()):
            copies[name] = next(iter(copies.values())).new_zeros(dst[name].local_shape(self.mesh.rank))
        return trees.fill(self.stored, [copies[name] for name in dst])

    def _before_tokens(
        self, params: trees.Tree, batch: Batch
    ) -> tuple[tuple[Tensor, Tensor, Mesh, Tensor | slice], RouterLoad | None]:
        """Hidden states before the tokens of the mask, and the load of experts, where there are some.

        With the hidden states come the unembedding, the mesh that splits it, and which of this rank's B t hidden states
        these are.
        """
        if self.model.unembed is None:
            raise ModelError("a model with a value head gives no probabilities to tokens")
        tied = "embed" if self.model.config.tied else None  # is the unembedding
        weights = self._gathered(params, last=tied)
        hidden_BtD, _, aux = self._apply(weights, batch)
        hidden_BtD = all_tokens(hidden_BtD, self.mesh, self._splits(batch))
        load = RouterLoad(**aux) if aux else None
        before_MD = rearrange(hidden_BtD, "b t d -> (b t) d")
        w_VD = self.model.unembed(weights)
        over = SINGLE if w_VD.shape[0] == self.model.config.vocab else self.mesh  # a whole one needs no other rank
        mask_BT = batch.get("mask")
        at_N = batch.get("trained")
        if mask_BT is None:
            return (before_MD, w_VD, over, slice(None)), load
        if at_N is None:
            at_N = self._own_next(mask_BT).nonzero().squeeze(-1)
        return (before_MD[at_N], w_VD, over, at_N), load

    def _kept_after(self, batch: Batch, at_N: Tensor | slice) -> KeptTokens | None:
        """The tokens that could be sampled after some of the hidden states; None: nothing was truncated."""
        if "kept" not in schema_of(batch) or batch.get("kept") is None:
            return None
        counts_BT = batch.kept_counts.long()
        # No token is sampled at the first place of a row, so that no id belongs to a place that is shifted out.
        after_M = torch.cat([counts_BT[:, 1:], torch.zeros_like(counts_BT[:, :1])], 1).flatten()
        place_BT = torch.arange(len(after_M), device=after_M.device).view(counts_BT.shape)
        own_M = own_shard(place_BT, self.mesh, SEQUENCE, dim=1).flatten()
        return KeptTokens(batch.kept.values, after_M).select(own_M[at_N])

    def _vocab(self, over: Mesh) -> int | None:
        """Number of tokens of an unembedding that is split over a mesh; None: one that is whole."""
        return None if over.size("tensor") == 1 else self.model.config.vocab

    def choices(self, params: trees.Tree, batch: Batch) -> Tensor:
        """Count the choices of each expert by this rank's tokens, in each layer that has some: [L, E] int64."""
        with torch.no_grad():
            weights = self._gathered(params)
            return self._apply(weights, batch).aux["counts_E"]

    def _gathered(self, params: trees.Tree, last: str | None = None) -> trees.Tree:
        """The weights to compute with, gathered when they are looked at."""
        dtypes = GatherDtypes(self.dtype, self.reduce_dtype)
        return gathered(params, self.stored, self.compute, mesh=self.mesh, dtypes=dtypes, last=last)

    def _apply(self, weights: trees.Tree, batch: Batch) -> Output:
        """The forward pass over this rank's part of the tokens, with the recorded experts where they are replayed."""
        routes = batch.get("routes")
        routers = self.model.abilities.routers
        inputs = inputs_of(batch)._replace(split=self._splits(batch))
        if self.model.owned is not None:
            inputs = self.model.owned.read(batch, inputs)
        if routes is not None and routers is not None and self.replay:
            inputs = inputs._replace(routes=rearrange(routes.long(), "b t (l k) -> b t l k", k=routers.per_token))
        inputs = inputs._replace(prefixes=self._prefixes(inputs), row_bound=self.expert_rows.bound)
        output = self.model.apply(weights, own_inputs(inputs, self.mesh), self.mesh, layer=self.layer)
        if output.aux:
            self.expert_rows.add(output.aux["peak"])
        return output

    def _prefixes(self, inputs: Inputs) -> SharedPrefixes | None:
        """The distinct tokens of a packed row, where equal tokens before two of them mean equal hidden states."""
        if not self.shares_prefixes or not self.model.abilities.shares_prefixes or self.mesh.size(SEQUENCE) > 1:
            return None
        if inputs.split or inputs.routes is not None or inputs.offsets is None or inputs.positions is None:
            return None
        return shared_prefixes(inputs.tokens, inputs.positions, inputs.offsets)

    def _splits(self, batch: Batch) -> bool:
        """True if the residual stream of these rows is split: they are packed."""
        return self.splits and batch.get("offsets") is not None

    def _own_next(self, x_BT: Tensor) -> Tensor:
        """[B t, ...] of this rank's tokens, a field of the token behind each; 0 behind the last of a row."""
        after_BT = torch.cat([x_BT[:, 1:], torch.zeros_like(x_BT[:, :1])], 1)
        return own_shard(after_BT, self.mesh, SEQUENCE, dim=1).flatten(0, 1)

    def _spread(self, x: Tensor, at_N: Tensor | slice, batch: Batch) -> Tensor:
        """Scatter [N, ...] values of selected tokens into zeros [B, T, ...]."""
        B, T = batch.tokens.shape
        t = T // self.mesh.size(SEQUENCE)
        if isinstance(at_N, Tensor):
            x = x.new_zeros(B * t, *x.shape[1:]).index_copy(0, at_N, x)
        return _shifted(gather_replicated(x.unflatten(0, (B, t)), self.mesh, SEQUENCE, dim=1), batch)


class Teacher(NamedTuple):
    """A frozen model that a student is compared with over the whole vocabulary.

    Attributes:
      placed, params: the model, on the student's mesh, and this rank's shards of its weights.
      beta, temperature: of the divergence; see `linear_divergence`.
    """

    placed: Placed
    params: trees.Tree
    beta: float = 0.5
    temperature: float = 1.0


def place(
    model: Model,
    mesh: Mesh = SINGLE,
    stored_rules: Rules = STORED,
    compute_rules: Rules = COMPUTE,
    dtype: torch.dtype = torch.float32,
    layer: Layer | None = None,
    replay: bool = False,
    splits: bool = False,
    reduce_dtype: torch.dtype | None = None,
    shares_prefixes: bool = True,
    expert_rows: ExpertRows | None = None,
) -> Placed:
    """A model on a mesh.

    Args:
      model: the model.
      mesh: the devices.
      stored_rules: rule table of the weights between steps.
      compute_rules: rule table of the weights while their layer runs; what differs is gathered for it.
      dtype: the dtype to compute in.
      layer: a replacement of `model.layer`, such as a compiled one; None: that one.
      replay: whether tokens go to the experts that a batch says.
      splits: whether the residual stream of packed rows is split over `tensor`.
      reduce_dtype: the dtype to sum gradients of gathered weights in; None: that of the weights.
      shares_prefixes: as in `Placed`; a layer that is not the model's own, compiled or not, shares nothing.
      expert_rows: bound of the rows of experts, for callers that repeat passes which need more; None: there is none.

    Raises:
      MeshError: the model cannot be split like this; the message names the weight and the sizes.
    """
    stored, compute = (
        layouts(model.shapes, model.axes, rules, sizes=mesh.sizes) for rules in (stored_rules, compute_rules)
    )
    layer = layer or model.layer
    return Placed(
        model,
        mesh,
        stored,
        compute=compute,
        dtype=dtype,
        layer=layer,
        expert_rows=expert_rows or ExpertRows(mesh, limited=False),
        replay=replay,
        splits=splits,
        reduce_dtype=reduce_dtype,
        shares_prefixes=shares_prefixes and computes_as(layer, model.layer),
    )


def inputs_of(batch: Batch) -> Inputs:
    """The inputs of a forward pass over the rows of a batch: models index with int64."""
    positions, segments = (x if x is None else x.long() for x in (batch.get("positions"), batch.get("segments")))
    return Inputs(batch.tokens.long(), positions, segments, offsets=batch.get("offsets"))


def own_inputs(inputs: Inputs, mesh: Mesh) -> Inputs:
    """The inputs of this rank's part of the tokens.

    Raises:
      ModelError: the tokens do not divide over the ranks that share them.
    """
    T = inputs.tokens.shape[1]
    ranks = mesh.size((SEQUENCE, "tensor") if inputs.split else SEQUENCE)
    if T % ranks:
        raise ModelError(f"a row of {T} tokens does not divide over the mesh {mesh}: pad it to a multiple of {ranks}")
    if mesh.size(SEQUENCE) == 1:
        return inputs
    if inputs.positions is None:
        inputs = inputs._replace(positions=torch.arange(T, device=inputs.tokens.device).expand_as(inputs.tokens))
    split = {name: x for name, x in inputs._asdict().items() if isinstance(x, Tensor) and name != "offsets"}
    return inputs._replace(**{name: own_shard(x, mesh, SEQUENCE, dim=1) for name, x in split.items()})


def follows(tokens_BT: Tensor, segments_BT: Tensor | None) -> Tensor:
    """True where a token has one before it in its sequence: [B, T] bool, or [T] where it is the same in all rows."""
    if segments_BT is None:
        return torch.arange(tokens_BT.shape[1], device=tokens_BT.device) > 0
    same_BT = (segments_BT[:, 1:] == segments_BT[:, :-1]) & (segments_BT[:, 1:] != 0)
    return F.pad(same_BT, (1, 0))


def _shifted(x: Tensor, batch: Batch) -> Tensor:
    """Shift values [B, T, ...] one token later; a first token gets 0."""
    x = torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1)
    known_BT = follows(batch.tokens, batch.get("segments"))
    return torch.where(known_BT.view(*known_BT.shape, *(1,) * (x.ndim - 2)), x, 0)


def _by_part(tree: trees.Tree) -> dict[str, Any]:
    """The leaves of a decoder, or of one with a value head, by the same names."""
    return {name.removeprefix("decoder/"): x for name, x in trees.named(tree)}


def _with_unsampled(topk_NK: Tensor | None, unsampled: tuple[int, ...], tokens_N: Tensor) -> Tensor:
    """Ids whose log-probabilities `_without_unsampled` needs, after the requested ones."""
    ids_NU = torch.tensor(unsampled, device=tokens_N.device).expand(len(tokens_N), -1)
    return ids_NU if topk_NK is None else torch.cat([topk_NK, ids_NU], 1)


def _without_unsampled(scores: TokenScores, count: int) -> TokenScores:
    """Scores of the distribution in which the last `count` of the top-k tokens have the probability 0.

    With s their probability before, those of all others become p / (1 - s).

    Args:
      scores: per token [N]; `topk_logp` [N, K + count].
    """
    topk_logp = scores.read("topk_logp")
    wanted_NK = topk_logp[:, : topk_logp.shape[1] - count]
    logp_NU = topk_logp[:, wanted_NK.shape[1] :]
    prob_NU = logp_NU.exp()
    # Rounding matters only to a policy that would write little else than these tokens.
    gone_N = prob_NU.sum(1).clamp_max(1 - torch.finfo(prob_NU.dtype).eps)
    rest_N = 1 - gone_N
    log_rest_N = torch.log1p(-gone_N)
    entropy_N = scores.entropy
    if entropy_N is not None:
        entropy_N = (entropy_N + (prob_NU * logp_NU).sum(1)) / rest_N + log_rest_N
    squares_N = scores.sum_pi_squared
    if squares_N is not None:
        squares_N = (squares_N - prob_NU.square().sum(1)) / rest_N.square()
    return scores._replace(
        logp=None if scores.logp is None else scores.logp - log_rest_N,
        entropy=entropy_N,
        sum_pi_squared=squares_N,
        topk_logp=wanted_NK - log_rest_N.unsqueeze(1) if wanted_NK.shape[1] else None,
    )
