"""The parts of an algorithm: three small closed families and one record.

| piece | type | closed under | runs |
|---|---|---|---|
| advantage | `init() -> state`, `update(signal, state, batch) -> (signal, state)` | `chain` | once a rollout |
| term | `(x, batch) -> (per-token loss, metrics)` | `add`, `scale`, `weighted` | in every training step |
| reduction | denominators from masks, as many numerators from losses | `+` | in every training step |

`reduce(term, reduction)` is a `Loss`: its numerators are summed over micro-batches and ranks and divided by
denominators that are known in advance, so gradient accumulation and data parallelism are exact by construction. A term
never sees values outside the mask: they are set to 0, NaN included, before it runs. The fields that a piece reads are
recorded by running it (`reading.reads`); they need not be declared.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from funrl import trees
from funrl.algos.composition import composition_text
from funrl.algos.guarding import defined_at, described, guarded, name_of
from funrl.algos.masks import clean, where_masked
from funrl.algos.metrics import Metric, PieceError, value_of
from funrl.algos.terms import Filter, Reduction, Term, check_called, run_term, typed_metric
from funrl.batch import Batch, seen_of
from funrl.fields import FIELDS, Field, Schema
from funrl.role_kinds import ROLES, TOPK_OUTPUTS, RoleKind, RoleTable

NO_FIELDS = Schema()
NO_ROLES = RoleTable()
CARRIED = ("returns", "weight")  # fields of the batch that are attributes of a signal


class Loss(NamedTuple):
    """Numerators and denominators; the loss is the sum of num / den, where a den of 0 counts as 1.

    Attributes:
      denominators: batch -> a tuple of scalars, float64, additive over examples. It may read masks, segments and fields
        of the source or the advantage chain, but no field that the step writes.
      numerators: (x_BT, batch) -> (a tuple of equally many scalars, metrics as Mean, Max or Sum).
      fields: declarations of fields beyond `FIELDS` that it may read; `Algorithm` sets them.
    """

    denominators: Callable[[Batch], tuple[Tensor, ...]]
    numerators: Callable[[Tensor, Batch], tuple[tuple[Tensor, ...], dict[str, Metric]]]
    fields: Schema = NO_FIELDS

    def __call__(self, x_BT: Tensor, batch: Batch) -> tuple[Tensor, dict[str, Metric]]:
        """The loss of a whole batch, and its metrics."""
        nums, metrics = self.numerators(x_BT, batch)
        return value_of(nums, self.denominators(batch)), metrics


class Signal(NamedTuple):
    """The value that an advantage chain transforms: rewards at first, advantages at the end.

    Attributes:
      x: [B] outcome scores, later [B, T] token rewards, finally [B, T] advantages.
      mask: [B, T] bool, tokens that count; starts as `batch.mask`, corrections may remove tokens.
      returns: [B, T] the critic's target, if a piece sets it.
      weight: [B, T] importance weights, if a piece sets them.
      rows: [N] int64, the rows to train on, if a piece resamples them; None: all.
      extra: further fields of the batch that pieces set for the terms, by name.
      metrics: metrics of the pieces.
    """

    x: Tensor
    mask: Tensor
    returns: Tensor | None = None
    weight: Tensor | None = None
    rows: Tensor | None = None
    extra: dict[str, Tensor] = {}  # noqa: RUF012  (never mutated: pieces make a new dict)
    metrics: dict[str, Metric] = {}  # noqa: RUF012  (never mutated: pieces make a new dict)

    @property
    def fields(self) -> dict[str, Tensor]:
        """The fields that pieces have set for the terms, by name."""
        carried = {name: getattr(self, name) for name in CARRIED}
        return self.extra | {name: x for name, x in carried.items() if x is not None}


class Advantage(NamedTuple):
    """One piece of an advantage chain, with the protocol of a gradient transformation.

    Attributes:
      init: () -> state, a tree of tensors that is carried from step to step.
      update: (signal, state, batch) -> (signal, state), pure.
      pieces: the pieces of a chain; empty for others.
      whole_groups: whether it needs all tokens of a group on one rank.
      fields: declarations of the fields beyond `FIELDS` that it makes or reads, by name.
    """

    init: Callable[[], trees.Tree]
    update: Callable[[Signal, trees.Tree, Batch], tuple[Signal, trees.Tree]]
    pieces: tuple[Advantage, ...] = ()
    whole_groups: bool = False
    fields: Mapping[str, Field] = NO_FIELDS

    def hashable(self) -> Advantage:
        """The same piece with hashable declarations."""
        return self if isinstance(self.fields, Schema) else self._replace(fields=Schema(self.fields))


@dataclass(frozen=True)
class Divergence:
    """The divergence that the step writes as `batch.divergence`, over the whole vocabulary; p teacher, q policy.

    Attributes:
      beta: 0 is KL(p || q), 1 is KL(q || p); in between, the generalised Jensen-Shannon divergence
        beta KL(p || m) + (1 - beta) KL(q || m) with the mixture m = beta p + (1 - beta) q.
      temperature: of both distributions.
      role: the frozen role that gives p, such as "teacher", or "reference" for the initial policy.
    """

    beta: float = 0.5
    temperature: float = 1.0
    role: str = "teacher"

    def __post_init__(self):
        if not 0 <= self.beta <= 1 or self.temperature <= 0:
            raise ValueError(f"{self}: beta must be from 0 to 1 and the temperature above 0")


@dataclass(frozen=True, repr=False)
class Algorithm:
    """An algorithm: how rewards become advantages, what each role minimises, and which rows are trained on.

    Attributes:
      advantage: chain from outcomes to advantages; None: the losses need none, as in supervised training.
      losses: role -> loss, in the order in which the roles learn. `x` of a loss is the role's log-probabilities, as for
        the policy, or the output of its value head, as for the critic.
      filter: batch -> [B] bool, rows worth training on; the source samples more prompts to replace the others.
      divergence: the divergence that the step computes if a loss reads `divergence`; None: no loss does.
      example: the unit that is chosen, balanced and packed as a whole. A "row" is one text. A "pair" is a chosen and a
        rejected text, from the dataset or, if there is a filter, sampled. A "triple" is a pair and a text to imitate,
        from the dataset. A "demonstrated" pair is a demonstration of the prompt and a sample of the policy. A
        "labelled" row is a text with a label, a "steps" row one with a label per step, both from the dataset.
      fields: declarations of the fields beyond `FIELDS` that its pieces make and read, by name; fields that the pieces
        of its chain declare are added.
      roles: declarations of the roles beyond `ROLES` that its runs have, by name. Fields that they write are declared
        in `fields`, with the role as their writer.
      objectives, parts: names of the sources of prompts, by their numbers in the field `objective`, and the algorithm
        of each; (): the source does not matter. See `by_source`.
    """

    advantage: Advantage | None
    losses: Mapping[str, Loss]
    filter: Filter | None = None
    divergence: Divergence | None = None
    example: str = "row"
    fields: Mapping[str, Field] = NO_FIELDS
    roles: Mapping[str, RoleKind] = NO_ROLES
    objectives: tuple[str, ...] = ()
    parts: tuple[Algorithm, ...] = ()

    def __repr__(self) -> str:
        """The composition of the algorithm."""
        return composition_text(self)

    def __post_init__(self):
        if self.advantage is not None:
            _check_piece(self.advantage, "Algorithm.advantage")
        if self.filter is not None:
            check_called(self.filter, "Filter")
        if not isinstance(self.losses, Mapping) or not self.losses:
            raise PieceError(
                f"Algorithm.losses is {self.losses!r}: it maps roles to losses, such as {{'policy': loss}}"
            )
        for role, loss in self.losses.items():
            if not isinstance(loss, Loss):
                raise PieceError(
                    f"the loss of {role!r} is {described(loss)} and not a loss: reduce(term, token_mean()) turns a "
                    "term into one"
                )
        self._declare()
        self._check_roles()

    def _check_roles(self) -> None:
        """Check the declared roles against fields and losses."""
        try:
            kinds = self.role_kinds
        except ValueError as error:
            raise PieceError(f"Algorithm.roles: {error}") from error
        for name, kind in self.roles.items():
            for field, output in kind.writes.items():
                shape = "token_k" if output in TOPK_OUTPUTS else "token"
                declared = self.schema.get(field)
                if declared is None or (declared.writer, declared.kind.name) != (name, shape):
                    raise PieceError(
                        f"role {name!r} writes {field!r}, which lacks a matching declaration: give "
                        f"Algorithm(fields={{{field!r}: Field({shape!r}, {name!r}, text)}})"
                    )
            if kind.learns and name not in self.losses:
                raise PieceError(
                    f"role {name!r} learns but has no loss: give Algorithm(losses={{{name!r}: loss}}), or leave out "
                    "learns=True"
                )
        divergence = self.divergence
        if divergence is None:
            return
        kind = kinds.get(divergence.role)
        if kind is None or kind.value_head or kind.learns:
            frozen = [name for name, kind in kinds.items() if not (kind.value_head or kind.learns)]
            raise PieceError(f"{divergence}: the role must be one of the frozen roles {', '.join(frozen)}")

    def _declare(self) -> None:
        """Pass the declarations of all fields to every part."""
        chain = NO_FIELDS if self.advantage is None else self.advantage.fields
        try:
            fields = Schema({name: field for name, field in self.schema.extended(chain).items() if name not in FIELDS})
        except ValueError as error:
            raise PieceError(f"Algorithm.fields: {error}") from error
        object.__setattr__(self, "fields", fields)
        if not fields:
            return
        object.__setattr__(self, "losses", {role: loss._replace(fields=fields) for role, loss in self.losses.items()})
        if self.advantage is not None:
            object.__setattr__(self, "advantage", _with_declarations(self.advantage, fields))

    @property
    def schema(self) -> Schema:
        """Declarations of all fields that a batch of a run of the algorithm may have."""
        return FIELDS.extended(self.fields)

    @property
    def role_kinds(self) -> RoleTable:
        """Kinds of all roles that a run of the algorithm may have."""
        return ROLES.extended(self.roles)


def _with_declarations(piece: Advantage, fields: Schema) -> Advantage:
    """A piece with these declarations, set on its inner pieces too."""
    return piece._replace(fields=fields, pieces=tuple(_with_declarations(inner, fields) for inner in piece.pieces))


def _check_piece(piece: object, where: str) -> None:
    if not isinstance(piece, Advantage):
        hint = f": call it, {name_of(piece)}()" if callable(piece) else ""
        raise PieceError(f"{where} is {described(piece)} and not a piece of an advantage chain{hint}")


# ---- advantages


class RankError(PieceError):
    """A piece on outcomes [B] was given token rewards [B, T], or the other way round."""


def check_rank(signal: Signal, per: str) -> None:
    """Check that the signal is what a piece works on, "row" outcomes [B] or "token" rewards [B, T].

    Raises:
      RankError: it is not. The number of dims decides, since B and T may be equal.
    """
    shape = list(signal.x.shape)
    if per == "token" and signal.x.dim() != 2:
        raise RankError(
            f"a piece on token rewards [B, T] was given outcomes {shape}: put to_tokens() or to_last_token() before it"
        )
    if per == "row" and signal.x.dim() != 1:
        raise RankError(f"a piece on outcomes [B] was given token rewards {shape}: put it before to_tokens()")


def stateless(fn: Callable[[Tensor, Batch], Tensor], per: str | None = None) -> Advantage:
    """An advantage piece without state that changes only `signal.x`; `batch.mask` is the mask of the signal.

    Args:
      fn: (x, batch) -> x.
      per: "row" for a piece on outcomes [B], "token" for one on token rewards [B, T]; None: either.
    """

    def update(signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
        if per is not None:
            check_rank(signal, per)
        x = fn(signal.x, batch._replace(mask=signal.mask))
        if not isinstance(x, Tensor):
            origin = defined_at(fn)
            raise PieceError(f"{name_of(fn)}(x, batch) gave {described(x)}: return the new x, [B] or [B, T]{origin}")
        return signal._replace(x=x), state

    update.of = fn  # type: ignore[attr-defined]  (named in errors)
    return Advantage(lambda: (), update)


def chain(*pieces: Advantage) -> Advantage:
    """Apply pieces in order; the state is a tuple of their states.

    Raises:
      PieceError: an argument is not a piece, such as a factory that was not called.
    """
    for place, piece in enumerate(pieces, 1):
        _check_piece(piece, f"piece {place} of the chain")

    def update(signal: Signal, state: trees.Tree, batch: Batch) -> tuple[Signal, trees.Tree]:
        after = []
        for piece, before in zip(pieces, state, strict=True):
            signal, now = run_piece(piece, signal, before, batch=batch)
            after.append(now)
        return signal, tuple(after)

    together = any(piece.whole_groups for piece in pieces)
    fields = NO_FIELDS
    for piece in pieces:
        fields = fields.extended(piece.fields)
    pieces = tuple(piece.hashable() for piece in pieces)
    return Advantage(lambda: tuple(p.init() for p in pieces), update, pieces, whole_groups=together, fields=fields)


def run_piece(piece: Advantage, signal: Signal, state: object, batch: Batch) -> tuple[Signal, trees.Tree]:
    """Run a piece and check the types of its result, a signal and a state.

    Raises:
      PieceError: the types are wrong; or, on a batch that records, the piece changed its inputs.
    """
    seen = seen_of(batch)
    if seen is None:
        out = piece.update(signal, state, batch)
    else:
        others = {"state": state} | {f"signal.{name}": x for name, x in signal._asdict().items()}
        given = batch if seen.by_piece else None
        out = guarded(f"piece {name_of(piece)}", lambda: piece.update(signal, state, batch), given, others=others)
    if not isinstance(out, tuple) or len(out) != 2 or not isinstance(out[0], Signal):
        raise PieceError(f"piece {name_of(piece)} gave {described(out)}: return (signal, state){defined_at(piece)}")
    return out


# ---- terms and losses


def add(*terms: Term) -> Term:
    """The sum of the terms' losses; their metrics together."""
    for piece in terms:
        check_called(piece, "Term")

    def term(x_BT: Tensor, batch: Batch):
        total, metrics = run_term(terms[0], x_BT, batch, place=f"number 1 of {len(terms)}")
        for number, other in enumerate(terms[1:], 2):
            loss_BT, more = run_term(other, x_BT, batch, place=f"number {number} of {len(terms)}")
            total = total + loss_BT
            metrics = metrics | more
        return total, metrics

    return term


def scale(factor: float, term: Term) -> Term:
    """`factor` times the term's loss."""
    check_called(term, "Term")

    def scaled(x_BT: Tensor, batch: Batch):
        loss_BT, metrics = run_term(term, x_BT, batch)
        return factor * loss_BT, metrics

    return scaled


def weighted(term: Term) -> Term:
    """The term's loss times `batch.weight`, the importance weights.

    On a batch without weights the term is unchanged.
    """
    check_called(term, "Term")

    def with_weight(x_BT: Tensor, batch: Batch):
        loss_BT, metrics = run_term(term, x_BT, batch)
        weight_BT = batch.get("weight")
        return (loss_BT if weight_BT is None else weight_BT.detach() * loss_BT), metrics

    return with_weight


def reduce(term: Term, reduction: Reduction) -> Loss:
    """Make a loss of a term and a reduction; metrics are means over tokens.

    Per-token fields and log-probabilities are set to zero outside the mask before the term sees them, so that
    no value there (NaN, a prompt's log-probability) reaches a loss or, through 0 times NaN, a gradient.

    Raises:
      PieceError: the reduction is not one; when the loss is run, the term does not give a loss per token and metrics.
    """
    check_called(term, "Term")
    if not isinstance(reduction, Reduction):
        hint = f": call it, {name_of(reduction)}()" if callable(reduction) else ""
        raise PieceError(f"reduce was given {described(reduction)} as a reduction{hint}")

    def denominators(batch: Batch) -> tuple[Tensor, ...]:
        return reduction.on(batch).denominators(batch.mask, batch.get("segments"))

    def numerators(x_BT: Tensor, batch: Batch):
        mask_BT = batch.mask
        loss_BT, metrics = run_term(term, where_masked(x_BT, mask_BT), clean(batch))
        typed = {name: typed_metric(name, metric, term, mask_BT=mask_BT) for name, metric in metrics.items()}
        return reduction.on(batch).numerators(loss_BT, mask_BT, batch.get("segments")), typed

    return Loss(denominators, numerators)


def sum_losses(*losses: Loss) -> Loss:
    """Sum of losses, each with its own denominator."""
    for loss in losses:
        if not isinstance(loss, Loss):
            raise PieceError(f"sum_losses was given {described(loss)}; `add` is the sum of terms")

    def numerators(x_BT: Tensor, batch: Batch):
        nums = ()
        metrics = {}
        for loss in losses:
            more, typed = loss.numerators(x_BT, batch)
            nums = nums + more
            metrics = metrics | typed
        return nums, metrics

    return Loss(lambda batch: tuple(den for loss in losses for den in loss.denominators(batch)), numerators)
