"""The one record that travels through a step: rows of tokens, and what is known of each.

    batch = Batch(tokens=tokens, mask=mask, score=score)
    batch.score                       # a required read: MissingField says who would have written it
    batch.get("weight")               # an optional read: None where it is absent
    batch._replace(advantage=x)       # a new batch; None removes a field
    watched, seen = recording(batch)  # `seen` collects the names that are read of `watched`

B rows of T tokens. Per-token fields are aligned with `tokens`: position t speaks of token t, given what came before it.
"""

from __future__ import annotations

import difflib
import linecache
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import torch
from torch import Tensor
from torch.utils import _pytree

from funrl import trees
from funrl.across import ALONE, Across

FIELD_KINDS = ("row", "token", "token_k", "packing")  # [B] or [B, K], [B, T], [B, T, K], of a packed row as a whole
WRITERS = {
    "source": "the source of the rows",
    "policy": "the trainer, from the policy before the first update on the batch",
    "reference": "a frozen reference",
    "teacher": "a teacher",
    "implicit_reward": "an implicit reward model, as PRIME trains one",
    "critic": "a critic",
    "advantage": "a piece of the advantage chain",
    "step": "the training step, from the policy as it is trained",
    "trainer": "the trainer",
}
TOKEN_INT = torch.int32  # of whole numbers per token: ids, places in a sequence, numbers of sequences


class Field(NamedTuple):
    """Declaration of one field of a batch.

    Attributes:
      kind: "row" ([B] or [B, K]), "token" ([B, T]), "token_k" ([B, T, K]) or "packing" (of one packed row).
      writer: one of WRITERS.
      text: what it is and its unit; for a field of the chain also the pieces that make it.
      dtype: "float", "int" or "bool". Whole numbers are int64, those per token `TOKEN_INT`: a rank holds these
        from phase to phase.
    """

    kind: str
    writer: str
    text: str
    dtype: str = "float"


class MissingField(ValueError):
    """A field was read that the batch does not have.

    Attributes:
      field: its name.
    """

    def __init__(self, field: str):
        self.field = field
        super().__init__(
            f"batch.{field} is missing; it is written by {WRITERS[FIELDS[field].writer]}: {FIELDS[field].text}"
            + _reader()
        )


class Batch:
    """Rows of tokens and what is known of each; immutable. What is None is not held."""

    tokens: Annotated[Tensor, Field("token", "source", "token ids: prompt, completion, padding", "int")]
    mask: Annotated[Tensor, Field("token", "source", "true on tokens that the policy sampled and that count", "bool")]
    positions: Annotated[Tensor, Field("token", "source", "place of a token in its sequence; else 0, 1, ...", "int")]
    segments: Annotated[Tensor, Field("token", "source", "sequence of a packed row, from 1; 0 is padding", "int")]
    length: Annotated[Tensor, Field("row", "source", "tokens of the row that are not padding", "int")]
    group: Annotated[Tensor, Field("row", "source", "rows of one prompt share a number", "int")]
    score: Annotated[Tensor, Field("row", "source", "outcome reward of the row")]
    scores: Annotated[Tensor, Field("row", "source", "[B, K] its parts by reward function; NaN: does not apply")]
    failed: Annotated[
        Tensor, Field("row", "source", "a reward function failed on it; there with --on_reward_error", "bool")
    ]
    token_reward: Annotated[Tensor, Field("token", "source", "rewards of single tokens, added to the outcome")]
    truncated: Annotated[Tensor, Field("row", "source", "the completion hit the length limit", "bool")]
    rollout_logp: Annotated[Tensor, Field("token", "source", "nats, by the engine that sampled")]
    version: Annotated[
        Tensor, Field("token", "source", "of the weights that sampled it; there with --new_tokens_per_step", "int")
    ]
    routes: Annotated[
        Tensor,
        Field(
            "token_k",
            "source",
            "experts that it went to in the engine, layer by layer; -1: any; --router_replay",
            "int",
        ),
    ]
    greedy_score: Annotated[Tensor, Field("row", "source", "outcome reward of a greedy completion of the prompt")]
    label: Annotated[
        Tensor,
        Field("token", "source", "outcome, 0 to 1, on all tokens of what has one; label_outcomes makes it of scores"),
    ]
    mismatched: Annotated[
        Tensor, Field("row", "source", "the completion is behind another prompt than its own, for KTO", "bool")
    ]
    margin: Annotated[Tensor, Field("token", "source", "by how much the chosen sequence of a pair should win")]
    old_logp: Annotated[Tensor, Field("token", "policy", "nats, of the sampled tokens")]
    old_entropy: Annotated[Tensor, Field("token", "policy", "nats, at the sampled tokens")]
    sum_pi_squared: Annotated[Tensor, Field("token", "policy", "sum over the vocabulary of squared probabilities")]
    ref_logp: Annotated[Tensor, Field("token", "reference", "nats")]
    teacher_logp: Annotated[Tensor, Field("token", "teacher", "nats")]
    teacher_topk: Annotated[Tensor, Field("token_k", "teacher", "the teacher's K most probable tokens at t", "int")]
    teacher_topk_logp: Annotated[Tensor, Field("token_k", "teacher", "nats, the teacher's, of these tokens")]
    implicit_logp: Annotated[Tensor, Field("token", "implicit_reward", "nats")]
    value: Annotated[Tensor, Field("token", "critic", "estimate before token t, before the first update")]
    advantage: Annotated[
        Tensor, Field("token", "advantage", "in units of reward; to_tokens() brings outcomes to tokens")
    ]
    returns: Annotated[Tensor, Field("token", "advantage", "the critic's target, made by gae()")]
    weight: Annotated[
        Tensor,
        Field("token", "advantage", "constant importance weights, made by importance_weights() and other corrections"),
    ]
    selected: Annotated[
        Tensor,
        Field("token", "advantage", "tokens picked out of the batch, made by select_highest_covariance()", "bool"),
    ]
    imitated: Annotated[
        Tensor, Field("token", "advantage", "tokens of successful completions, made by mark_positives()", "bool")
    ]
    entropy_coefficient: Annotated[
        Tensor, Field("token", "advantage", "factor of an adaptive entropy bonus, made by adapt_entropy()")
    ]
    kl_baseline: Annotated[
        Tensor, Field("token", "advantage", "nats, KTO's reference point, made by reference_point()")
    ]
    offsets: Annotated[Tensor, Field("packing", "trainer", "[S + 1] where the sequences of a packed row begin", "int")]
    trained: Annotated[
        Tensor,
        Field(
            "packing", "trainer", "[N] places of this rank's part of a packed row behind which the mask is true", "int"
        ),
    ]
    sampled: Annotated[Tensor, Field("token", "trainer", "the mask before corrections, set after the chain", "bool")]
    entropy: Annotated[Tensor, Field("token", "step", "nats, differentiable")]
    topk_logp: Annotated[Tensor, Field("token_k", "step", "nats, of the teacher's K tokens; differentiable")]
    divergence: Annotated[
        Tensor, Field("token", "step", "nats, from the teacher over the whole vocabulary; differentiable")
    ]

    def __init__(self, **fields: Tensor | None):
        _check_names(fields)
        object.__setattr__(self, "_held", {name: x for name, x in fields.items() if x is not None})
        object.__setattr__(self, "_across", ALONE)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        held = self._held
        if name in held:
            return held[name]
        if name in FIELDS:
            raise MissingField(name)
        raise AttributeError(_unknown(name))

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a batch is immutable: batch._replace({name}=...) gives a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a batch is immutable: batch._replace({name}=None) gives a new one")

    def __repr__(self) -> str:
        return f"Batch({', '.join(f'{name}={list(x.shape)}' for name, x in self._held.items())})"

    def get(self, name: str) -> Tensor | None:
        """The field, or None where the batch does not have it."""
        if name not in FIELDS:
            raise AttributeError(_unknown(name))
        return self._held.get(name)

    def names(self) -> tuple[str, ...]:
        """The fields that are there."""
        return tuple(self._held)

    def _replace(self, **fields: Tensor | None) -> Batch:
        """A batch with other values of these fields; None removes one."""
        return self._with({**self._held, **fields}, fields)

    @property
    def across(self) -> Across:
        """The batch's `Across`: sums and orders over all rows of the step."""
        return self._across

    def _with(self, fields: dict[str, Any], replaced: Iterable[str] = ()) -> Batch:
        """A batch of the same kind with these fields, of which some were replaced."""
        batch = Batch(**fields)
        object.__setattr__(batch, "_across", self._across)
        return batch


FIELDS: dict[str, Field] = {
    name: hint.__metadata__[0] for name, hint in get_type_hints(Batch, include_extras=True).items()
}


def fields_of_kind(*kinds: str) -> tuple[str, ...]:
    """Names of the fields of these kinds."""
    return tuple(name for name, field in FIELDS.items() if field.kind in kinds)


def fields_by(*writers: str) -> tuple[str, ...]:
    """Names of the fields that these writers write."""
    return tuple(name for name, field in FIELDS.items() if field.writer in writers)


def row_fields() -> tuple[str, ...]:
    return fields_of_kind("row")


def token_fields() -> tuple[str, ...]:
    """Names of the fields whose second dim is T: per token, and per token and K."""
    return fields_of_kind("token", "token_k")


def as_dict(batch: Batch) -> dict[str, Tensor]:
    """The fields that are there, by name; not a read."""
    return dict(batch._held)


def map_fields(fn: Callable[[str, Tensor], Tensor], batch: Batch) -> Batch:
    """The batch with `fn(name, field)` of every field that is there. Neither a read nor a write of any of them."""
    return batch._with({name: fn(name, x) for name, x in batch._held.items()})


def select(batch: Batch, rows: Any) -> Batch:
    """The given rows (a slice or an index tensor) of every field."""
    return map_fields(lambda name, x: x[rows], batch)


def narrowed(batch: Batch) -> Batch:
    """The batch with its whole numbers per token in `TOKEN_INT`."""
    wide = frozenset(token_fields())
    return map_fields(lambda name, x: x.to(TOKEN_INT) if name in wide and x.dtype == torch.int64 else x, batch)


def with_across(batch: Batch, across: Across) -> Batch:
    """The batch of a rank that holds some of the rows: its row fields have all rows, its token fields the own ones."""
    batch = map_fields(lambda name, x: x, batch)
    object.__setattr__(batch, "_across", across)
    return batch


# ---- recording


class Reads(NamedTuple):
    """Fields that are read.

    Attributes:
      required: by attribute; the reader fails without them.
      optional: by `get`.
    """

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

    def __or__(self, other: Reads) -> Reads:  # type: ignore[override]
        required = self.required | other.required
        return Reads(required, (self.optional | other.optional) - required)

    def __sub__(self, names: Iterable[str]) -> Reads:
        return Reads(self.required - frozenset(names), self.optional - frozenset(names))


class Seen:
    """Fields that have been read of a recording batch so far."""

    def __init__(self) -> None:
        self.required: set[str] = set()
        self.optional: set[str] = set()

    @property
    def reads(self) -> Reads:
        return Reads(frozenset(self.required)) | Reads(optional=frozenset(self.optional))


class _Recording(Batch):
    """A batch that tells what is read of it; fields that its reader has put in itself are no reads."""

    def __init__(self, held: dict[str, Tensor], across: Across, seen: Seen, made: frozenset[str]):
        super().__init__(**held)
        object.__setattr__(self, "_across", across)
        object.__setattr__(self, "_seen", seen)
        object.__setattr__(self, "_made", made)

    def __getattr__(self, name: str) -> Any:
        if name in FIELDS and name not in self._made:
            self._seen.required.add(name)
        return super().__getattr__(name)

    def get(self, name: str) -> Tensor | None:
        if name in FIELDS and name not in self._made:
            self._seen.optional.add(name)
        return super().get(name)

    def _with(self, fields: dict[str, Any], replaced: Iterable[str] = ()) -> Batch:
        return _Recording(fields, self._across, self._seen, self._made | frozenset(replaced))


def recording(batch: Batch) -> tuple[Batch, Seen]:
    """The batch, and what has been read of it: attribute access is a required read, `get` an optional one.

    `_replace` keeps recording; a field that was replaced is its reader's own and no longer a read.
    """
    seen = Seen()
    return _Recording(batch._held, batch.across, seen, frozenset()), seen


def example(names: Iterable[str] | None = None) -> Batch:
    """A small batch of these fields (default: all but those of a packed row), with values that the schema allows, to
    run a piece on.

    Two groups of two rows, scores 0 and 1 in each; 8 tokens a row, of which the third to the sixth are sampled and the
    others are 0; two sequences a row; K = 2.
    """
    B, T, K = 4, 8, 2
    draw = torch.Generator().manual_seed(0)
    mask = torch.zeros(B, T, dtype=torch.bool)
    mask[:, 2:6] = True
    fixed = {
        "mask": mask, "sampled": mask, "selected": mask & (torch.arange(T) % 2 == 0), "imitated": mask,
        "tokens": torch.arange(B * T).reshape(B, T), "positions": torch.arange(T).expand(B, T),
        "segments": 1 + (torch.arange(T) >= T // 2).int().expand(B, T), "length": torch.full((B,), T),
        "group": torch.tensor([0, 0, 1, 1]), "score": torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        "greedy_score": torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float64),
        "truncated": torch.tensor([False, False, False, True]), "teacher_topk": torch.arange(K).expand(B, T, K),
        "routes": torch.arange(K).expand(B, T, K),
        "scores": torch.tensor([[0.0, 0.0], [1.0, 0.0], [1.0, 1.0], [0.0, 1.0]], dtype=torch.float64),
        "label": mask.double(), "version": mask.long(), "failed": torch.zeros(B, dtype=torch.bool),
        "mismatched": torch.tensor([False, True, False, True]),
    }  # fmt: skip

    def value(name: str) -> Tensor:
        if name in fixed:
            return fixed[name]
        shape = (B, T, K) if FIELDS[name].kind == "token_k" else (B, T) if FIELDS[name].kind == "token" else (B,)
        positive = -0.1 - torch.rand(shape, generator=draw, dtype=torch.float64)
        x = positive if name.endswith("logp") else -positive
        on = mask[..., None] if len(shape) == 3 else mask
        return torch.where(on, x, x.new_zeros(())) if len(shape) > 1 else x

    names = fields_of_kind("row", "token", "token_k") if names is None else names
    return narrowed(Batch(**{name: value(name) for name in names}))


# ---- errors


def _check_names(fields: Iterable[str]) -> None:
    for name in fields:
        if name not in FIELDS:
            raise ValueError(_unknown(name))


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, list(FIELDS), 1)
    return f"a batch has no field {name!r}; " + (f"did you mean {near[0]!r}?" if near else f"there are {list(FIELDS)}")


def _reader() -> str:
    """The line that reads the field where it is a user's, else the name of the piece that does."""
    if torch.compiler.is_compiling():
        return ""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None:
        return ""
    name, line = frame.f_code.co_filename, frame.f_lineno
    if Path(name).is_relative_to(Path(__file__).parent):
        return f" (read by {frame.f_code.co_qualname.split('.')[0]})"
    return f" (read at {name}:{line}: {linecache.getline(name, line).strip()})"


# ---- a batch is a tree; its leaves are named by field


def _flatten(batch: Batch) -> tuple[tuple, tuple[tuple[str, ...], Across], tuple[str, ...]]:
    names = tuple(name for name in FIELDS if name in batch._held)
    return tuple(batch._held[name] for name in names), (names, batch._across), names


def _unflatten(how: tuple[tuple[str, ...], Across], leaves: Iterable[Any]) -> Batch:
    batch = Batch(**dict(zip(how[0], leaves, strict=True)))
    object.__setattr__(batch, "_across", how[1])
    return batch


for _class in (Batch, _Recording):
    trees.register_node(_class, _flatten, _unflatten)
_pytree.register_pytree_node(
    Batch,
    lambda batch: (list(_flatten(batch)[0]), _flatten(batch)[1]),
    lambda leaves, how: _unflatten(how, leaves),
    serialized_type_name="funrl.batch.Batch",
    flatten_with_keys_fn=lambda batch: (
        [(_pytree.GetAttrKey(name), x) for x, name in zip(_flatten(batch)[0], _flatten(batch)[2], strict=True)],
        _flatten(batch)[1],
    ),  # pyright: ignore[reportArgumentType]
)
