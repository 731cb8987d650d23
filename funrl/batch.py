"""The one record that travels through a step: rows of tokens, and what is known of each.

    batch = Batch(tokens=tokens, mask=mask, score=score)
    batch.score                       # a required read: MissingField says who would have written it
    batch.get("weight")               # an optional read: None where it is absent
    batch._replace(advantage=x)       # a new batch; None removes a field
    watched, seen = recording(batch)  # `seen` collects the names that are read of `watched`

B rows of T tokens. Per-token fields are aligned with `tokens`: position t speaks of token t, given what came before it.

The fields are declared in `funrl.fields`. A batch may have further ones that are declared with it; everything that is
made of it knows them too:

    batch = declare(batch, {"curiosity": Field("token", "advantage", "how new the token is to the policy")})
"""

from __future__ import annotations

import functools
import linecache
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils import _pytree

from funrl import trees
from funrl.across import ALONE, Across
from funrl.fields import FIELDS, WRITERS, Field, Schema, example_mask
from funrl.kinds import FieldKind, Value

TOKEN_INT = torch.int32  # of whole numbers per token: ids, places in a sequence, numbers of sequences


class MissingField(ValueError):
    """A field was read that the batch does not have.

    Attributes:
      field: its name.
    """

    def __init__(self, field: str, declared: Field):
        self.field = field
        writer = WRITERS.get(declared.writer, f"the role {declared.writer!r}")
        super().__init__(f"batch.{field} is missing; it is written by {writer}: {declared.text}" + _reader())


class Batch:
    """Rows of tokens and what is known of each; immutable. What is None is not held."""

    def __init__(self, schema: Schema | None = None, /, **fields: Value | None):
        """Make a batch of fields.

        Args:
          schema: declarations of the fields that the batch may have; None: `FIELDS`.
          fields: the values.
        """
        schema = FIELDS if schema is None else schema  # as a default of the parameter, torch.compile could not trace it
        for name in fields:
            if name not in schema:
                raise ValueError(schema.unknown(name))
        object.__setattr__(self, "_schema", schema)
        object.__setattr__(self, "_held", {name: x for name, x in fields.items() if x is not None})
        object.__setattr__(self, "_across", ALONE)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        held = self._held
        if name in held:
            return held[name]
        if name in self._schema:
            raise MissingField(name, self._schema[name])
        raise AttributeError(self._schema.unknown(name))

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a batch is immutable: batch._replace({name}=...) gives a new one")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a batch is immutable: batch._replace({name}=None) gives a new one")

    def __repr__(self) -> str:
        shapes = trees.map(lambda x: list(x.shape), self._held)
        return f"Batch({', '.join(f'{name}={shapes[name]}' for name in self._held)})"

    def __reduce__(self) -> tuple:
        further = {name: field for name, field in self._schema.items() if name not in FIELDS}
        return _restored, (further, self._held, self._across)

    def get(self, name: str) -> Any:
        """The field, or None where the batch does not have it."""
        if name not in self._schema:
            raise AttributeError(self._schema.unknown(name))
        return self._held.get(name)

    def names(self) -> tuple[str, ...]:
        """The fields that are there."""
        return tuple(self._held)

    def _replace(self, **fields: Value | None) -> Batch:
        """A batch with other values of these fields; None removes one."""
        return self._with({**self._held, **fields}, fields)

    @property
    def across(self) -> Across:
        """The batch's `Across`: sums and orders over all rows of the step."""
        return self._across

    def _with(self, fields: dict[str, Any], replaced: Iterable[str] = ()) -> Batch:
        """A batch of the same schema with these fields, some of them replaced."""
        batch = Batch(self._schema, **fields)
        object.__setattr__(batch, "_across", self._across)
        return batch


def schema_of(batch: Batch) -> Schema:
    """Declarations of the fields that a batch may have."""
    return batch._schema


def kind_of(batch: Batch, name: str) -> FieldKind:
    """Kind of a field."""
    return batch._schema[name].kind


def declare(batch: Batch, fields: Mapping[str, Field]) -> Batch:
    """The batch with declarations of further fields.

    Raises:
      ValueError: a field is declared already, as another one.
    """
    schema = batch._schema.extended(fields)
    if schema == batch._schema:
        return batch
    return _restored({name: schema[name] for name in schema if name not in FIELDS}, batch._held, batch._across)


def _restored(further: Mapping[str, Field], held: Mapping[str, Value], across: Across) -> Batch:
    batch = Batch(FIELDS | further if further else FIELDS, **held)
    object.__setattr__(batch, "_across", across)
    return batch


def as_dict(batch: Batch) -> dict[str, Value]:
    """The fields that are there, by name; not a read."""
    return dict(batch._held)


def map_fields(fn: Callable[[str, Value], Value], batch: Batch) -> Batch:
    """The batch with `fn(name, field)` of every field that is there. Neither a read nor a write of any of them."""
    return batch._with({name: fn(name, x) for name, x in batch._held.items()})


def map_kinds(fn: Callable[[FieldKind, Value], Value], batch: Batch) -> Batch:
    """The batch with `fn(kind, value)` of every field that is there; as `map_fields`."""
    return map_fields(lambda name, x: fn(batch._schema[name].kind, x), batch)


def select(batch: Batch, rows: object) -> Batch:
    """The given rows (a slice or an index tensor) of every field."""
    return map_kinds(lambda kind, x: kind.select(x, rows), batch)


def with_rows_spread(batch: Batch) -> Batch:
    """The batch as an update has it: each field per row is one per token [B, T] or [B, T, K], its row's number on all.

    Rows of an update are packed end to end, so a number per row has no place of its own there.
    """
    tokens = as_dict(batch)["mask"].shape[1]
    return map_kinds(lambda kind, x: x if kind.spread is None else kind.spread(x, tokens), batch)


def narrowed(batch: Batch) -> Batch:
    """The batch with its whole numbers per token in `TOKEN_INT`."""
    return map_kinds(lambda kind, x: x.to(TOKEN_INT) if kind.per_token and x.dtype == torch.int64 else x, batch)


def with_across(batch: Batch, across: Across) -> Batch:
    """The batch of a rank that holds some of the rows: its row fields have all rows, its token fields the own ones."""
    batch = map_fields(lambda name, x: x, batch)
    object.__setattr__(batch, "_across", across)
    return batch


# ---- recording


class FieldReads(NamedTuple):
    """Fields that are read.

    Attributes:
      required: by attribute; the reader fails without them.
      optional: by `get`.
    """

    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()

    def __or__(self, other: FieldReads) -> FieldReads:  # type: ignore[override]
        required = self.required | other.required
        return FieldReads(required, (self.optional | other.optional) - required)

    def __sub__(self, names: Iterable[str]) -> FieldReads:
        return FieldReads(self.required - frozenset(names), self.optional - frozenset(names))


class ReadRecord:
    """Fields that have been read of a recording batch so far, and the terms that ran on it.

    Attributes:
      terms: (term, its place among others, x, its loss per token), the innermost first.
      by_piece: compare the batch after each piece inside another too, so that an error can name it.
    """

    def __init__(self, *, by_piece: bool) -> None:
        self.by_piece = by_piece
        self.required: set[str] = set()
        self.optional: set[str] = set()
        self.terms: list[tuple[Any, str, Tensor, Tensor]] = []

    @property
    def reads(self) -> FieldReads:
        return FieldReads(frozenset(self.required)) | FieldReads(optional=frozenset(self.optional))


class _Recording(Batch):
    """A batch that tells what is read of it; fields that its reader has put in itself are no reads."""

    def __init__(self, like: Batch, held: Mapping[str, Value], seen: ReadRecord, made: frozenset[str]):
        super().__init__(like._schema, **held)
        object.__setattr__(self, "_across", like._across)
        object.__setattr__(self, "_seen", seen)
        object.__setattr__(self, "_made", made)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("_") and name in self._schema and name not in self._made:
            self._seen.required.add(name)
        return super().__getattr__(name)

    def get(self, name: str) -> Any:
        if name in self._schema and name not in self._made:
            self._seen.optional.add(name)
        return super().get(name)

    def _with(self, fields: dict[str, Any], replaced: Iterable[str] = ()) -> Batch:
        return _Recording(self, fields, self._seen, self._made | frozenset(replaced))


def recording(batch: Batch, *, by_piece: bool = True) -> tuple[Batch, ReadRecord]:
    """The batch, and what has been read of it: attribute access is a required read, `get` an optional one.

    `_replace` keeps recording; a field that was replaced is its reader's own and no longer a read.

    Args:
      by_piece: as in `ReadRecord`.
    """
    seen = ReadRecord(by_piece=by_piece)
    return _Recording(batch, batch._held, seen, frozenset()), seen


def seen_of(batch: Batch) -> ReadRecord | None:
    """The record of a recording batch; None for a batch that does not record."""
    return batch._seen if isinstance(batch, _Recording) else None


def example(names: Iterable[str] | None = None, schema: Schema = FIELDS) -> Batch:
    """A small batch of these fields (default: all that rows have), with values as they are declared, to try a piece on.

    Two groups of two rows, scores 0 and 1 in each; 8 tokens a row; the third to the sixth are sampled and the
    others are 0; two sequences a row; K = 2.
    """
    names = [name for name, field in schema.items() if field.kind.of_rows] if names is None else names
    return trees.map(torch.clone, _example(tuple(names), schema))  # a piece may write to its own


@functools.lru_cache(maxsize=64)
def _example(names: tuple[str, ...], schema: Schema) -> Batch:
    draw = torch.Generator().manual_seed(0)
    mask = example_mask()
    return narrowed(Batch(schema, **{name: schema[name].example_value(draw, mask) for name in names}))


# ---- errors


def _reader() -> str:
    """The line that reads the field where it is a user's, else the name of the piece that does."""
    if torch.compiler.is_compiling():
        return ""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    if frame is None:
        return ""
    name = frame.f_code.co_filename
    line = frame.f_lineno
    if Path(name).is_relative_to(Path(__file__).parent):
        return f" (read by {frame.f_code.co_qualname.split('.')[0]})"
    return f" (read at {name}:{line}: {linecache.getline(name, line).strip()})"


# ---- a batch is a tree; its leaves are named by field


def _flatten(batch: Batch) -> tuple[tuple, tuple[tuple[str, ...], Schema, Across], tuple[str, ...]]:
    names = tuple(name for name in batch._schema if name in batch._held)
    return tuple(batch._held[name] for name in names), (names, batch._schema, batch._across), names


def _unflatten(structure: tuple[tuple[str, ...], Schema, Across], leaves: Iterable[object]) -> Batch:
    names, schema, across = structure
    batch = Batch(schema, **dict(zip(names, leaves, strict=True)))
    object.__setattr__(batch, "_across", across)
    return batch


def _children(batch: Batch) -> tuple[list, tuple[tuple[str, ...], Schema, Across]]:
    values, structure, _ = _flatten(batch)
    return list(values), structure


def _named_children(batch: Batch) -> tuple[list, tuple[tuple[str, ...], Schema, Across]]:
    values, structure, names = _flatten(batch)
    return [(_pytree.GetAttrKey(name), x) for name, x in zip(names, values, strict=True)], structure


for _class in (Batch, _Recording):
    trees.register_node(_class, _flatten, _unflatten)
_pytree.register_pytree_node(
    Batch,
    _children,
    lambda leaves, structure: _unflatten(structure, leaves),
    serialized_type_name="funrl.batch.Batch",
    flatten_with_keys_fn=_named_children,  # pyright: ignore[reportArgumentType]
)
