"""Declarations of the fields of a batch.

    curiosity = Field("token", "advantage", "how new the token is to the policy")
    pictures = Field("ragged", "source", "pictures of the row, [3, height, width] each")

The declarations here are a batch's own from the start; an algorithm brings further ones.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from funrl.kinds import FIELD_KINDS, FieldKind, Value
from funrl.role_kinds import ROLES

FIELD_DTYPES = ("float", "int", "bool")
EXAMPLE_ROWS = 4  # of `batch.example`: two groups of two rows
EXAMPLE_TOKENS = 8
UNUSABLE_NAMES = ("get", "names", "across")  # attributes of a batch that are no fields
WRITERS = {
    "source": "the source of the rows",
    **{name: kind.text for name, kind in ROLES.items() if kind.writes},
    "advantage": "a piece of the advantage chain",
    "step": "the training step, from the policy as it is trained",
    "trainer": "the trainer",
}

ExampleValues = Callable[[torch.Generator, tuple[int, ...]], Tensor]  # the numbers of an example, of a shape


@dataclass(frozen=True, init=False)
class Field:
    """Declaration of one field of a batch.

    Attributes:
      kind: how rows of it are kept: one of `FIELD_KINDS`, by its name, or a record of one's own.
      writer: who writes it: one of `WRITERS`, or the name of a role.
      text: what it is and its unit; for a field of the advantage chain also the pieces that make it.
      dtype: "float", "int" or "bool". Whole numbers are int64, those per token `batch.TOKEN_INT`: a rank holds these
        from phase to phase. A ragged field keeps the dtype of its values.
      example: (generator, shape) -> values that pieces may be tried on; None: any of the dtype.
      made_of: further fields that its writer needs.
    """

    kind: FieldKind
    writer: str
    text: str
    dtype: str = "float"
    example: ExampleValues | None = None
    made_of: tuple[str, ...] = ()

    def __init__(
        self,
        kind: FieldKind | str,
        writer: str,
        text: str,
        *,
        dtype: str = "float",
        example: ExampleValues | None = None,
        made_of: tuple[str, ...] = (),
    ):
        if isinstance(kind, str):
            if kind not in FIELD_KINDS:
                raise ValueError(f"Field({kind!r}): the kind is one of {', '.join(FIELD_KINDS)}, or a FieldKind")
            kind = FIELD_KINDS[kind]
        if dtype not in FIELD_DTYPES:
            raise ValueError(f"Field(dtype={dtype!r}): the dtype is one of {', '.join(FIELD_DTYPES)}")
        given = {"kind": kind, "writer": writer, "text": text, "dtype": dtype, "example": example, "made_of": made_of}
        for name, value in given.items():
            object.__setattr__(self, name, value)

    def example_value(self, draw: torch.Generator, mask: Tensor) -> Value:
        """A value for rows that pieces are tried on.

        Args:
          draw: the source of random numbers.
          mask: [B, T] bool, of the rows. Outside it, a field per token is 0 unless it is declared with an example.
        """

        def numbers(shape: tuple[int, ...]) -> Tensor:
            if self.example is not None:
                return self.example(draw, shape)
            x = {"float": _positive, "int": _whole, "bool": _alternating}[self.dtype](draw, shape)
            return masked(x)

        def masked(x: Tensor) -> Tensor:
            if not self.kind.per_token:
                return x
            return torch.where(mask.view(*mask.shape, *(1,) * (x.dim() - 2)), x, x.new_zeros(()))

        return self.kind.example(numbers, *mask.shape)


class Schema(dict[str, Field]):
    """Declarations of fields by name. It is never changed, so it can be a key; `|` gives a new one."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(tuple(self))

    def __or__(self, other: Mapping[str, Field]) -> Schema:  # type: ignore[override]
        return Schema({**self, **other})

    def extended(self, fields: Mapping[str, Field]) -> Schema:
        """The declarations with further ones.

        Raises:
          ValueError: a name is declared already, as another field, or cannot name a field.
        """
        if not fields:
            return self
        for name, field in fields.items():
            if not isinstance(field, Field):
                raise ValueError(f"field {name!r} is declared as {field!r}: give Field(kind, writer, text)")
            if name.startswith("_") or not name.isidentifier() or name in UNUSABLE_NAMES:
                raise ValueError(f"{name!r} cannot name a field: it is no identifier, or a batch has it otherwise")
            if name in self and self[name] != field:
                raise ValueError(f"field {name!r} is declared already: {self[name].text}; give yours another name")
        return self | fields

    def by(self, *writers: str) -> tuple[str, ...]:
        """Names of the fields that these writers write."""
        return tuple(name for name, field in self.items() if field.writer in writers)

    def rows(self) -> tuple[str, ...]:
        """Names of the fields whose values every rank has of all rows."""
        return tuple(name for name, field in self.items() if field.kind.everywhere)

    def tokens(self) -> tuple[str, ...]:
        """Names of the fields whose second dim is T."""
        return tuple(name for name, field in self.items() if field.kind.per_token)

    def unknown(self, name: str) -> str:
        """Words for a name that is not declared."""
        near = difflib.get_close_matches(name, list(self), 1)
        if near:
            return f"a batch has no field {name!r}; did you mean {near[0]!r}?"
        return f"a batch has no field {name!r}; Algorithm(fields=...) declares further ones, there are {list(self)}"


# ---- values of the example batch: two groups of two rows, the third to the sixth token of each are sampled


def _positive(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Random numbers from 0.1 to 1.1."""
    return 0.1 + torch.rand(shape, generator=draw, dtype=torch.float64)


def _whole(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """The whole numbers from 0."""
    return torch.arange(int(np.prod(shape))).reshape(shape)


def _alternating(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """True and false in turn."""
    return _whole(draw, shape) % 2 == 0


def _numbers(values: tuple, draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    x = torch.tensor(values)
    return x.double() if x.is_floating_point() else x


def _these(*values: object) -> Callable[[torch.Generator, tuple[int, ...]], Tensor]:
    return functools.partial(_numbers, values)


def example_mask() -> Tensor:
    """The mask of the example batch."""
    mask = torch.zeros(EXAMPLE_ROWS, EXAMPLE_TOKENS, dtype=torch.bool)
    mask[:, 2:6] = True
    return mask


def _mask(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return example_mask()


def _even_places(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return example_mask() & (torch.arange(shape[1]) % 2 == 0)


def _odd_rows(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return example_mask() & (torch.arange(shape[0]) % 2 == 1)[:, None]


def _mask_as_numbers(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return example_mask().double()


def _last_place(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.arange(shape[-1]).expand(shape)


def _two_segments(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return (1 + (torch.arange(shape[1]) >= shape[1] // 2).long()).expand(shape)


def _two_turns(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return (torch.arange(shape[1]) >= shape[1] // 2).long().expand(shape)


def _authors(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.where(torch.arange(shape[1]) == shape[1] - 2, 2, example_mask().long())


def _mask_as_int(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    return example_mask().long()


def _negative(draw: torch.Generator, shape: tuple[int, ...]) -> Tensor:
    """Log-probabilities."""
    x = -_positive(draw, shape)
    return torch.where(example_mask() if len(shape) == 2 else example_mask()[..., None], x, x.new_zeros(()))


FIELDS = Schema(
    tokens=Field("token", "source", "token ids: prompt, completion, padding", dtype="int", example=_whole),
    mask=Field("token", "source", "true on tokens that the policy sampled and that count", dtype="bool", example=_mask),
    positions=Field(
        "token", "source", "place of a token in its sequence; else 0, 1, ...", dtype="int", example=_last_place
    ),
    segments=Field(
        "token", "source", "sequence of a packed row, from 1; 0 is padding", dtype="int", example=_two_segments
    ),
    length=Field(
        "row",
        "source",
        "tokens of the row that are not padding",
        dtype="int",
        example=_these(*[EXAMPLE_TOKENS] * EXAMPLE_ROWS),
    ),
    group=Field("row", "source", "rows of one prompt share a number", dtype="int", example=_these(0, 0, 1, 1)),
    score=Field("row", "source", "outcome reward of the row", example=_these(0.0, 1.0, 1.0, 0.0)),
    scores=Field(
        "wide_row",
        "source",
        "its parts by reward function; NaN: does not apply",
        example=_these((0.0, 0.0), (1.0, 0.0), (1.0, 1.0), (0.0, 1.0)),
    ),
    failed=Field(
        "row",
        "source",
        "a reward function failed on it; there with --on_reward_error",
        dtype="bool",
        example=_these(False, False, False, False),
    ),
    token_reward=Field("token", "source", "rewards of single tokens, added to the outcome"),
    truncated=Field(
        "row", "source", "the completion hit the length limit", dtype="bool", example=_these(False, False, False, True)
    ),
    episode=Field(
        "row", "source", "rows of one episode share a number", dtype="int", example=_these(*range(EXAMPLE_ROWS))
    ),
    agent=Field(
        "row", "source", "agent of the episode whose row it is, by number", dtype="int", example=_these(0, 0, 0, 0)
    ),
    episode_tokens=Field(
        "row",
        "source",
        "tokens on the mask in all rows of its episode and agent; anew after the chain",
        dtype="int",
        example=_these(4, 4, 4, 4),
    ),
    episode_first=Field(
        "row",
        "source",
        "the first row of its episode and agent",
        dtype="bool",
        example=_these(True, True, True, True),
    ),
    unit=Field(
        "row",
        "source",
        "rows of one agent of an episode share a number: they are one sequence; in a micro-batch from 1",
        dtype="int",
        example=_these(*range(EXAMPLE_ROWS)),
    ),
    turn=Field(
        "token",
        "source",
        "turn of the path that a token is in, from 0; a fork continues counting",
        dtype="int",
        example=_two_turns,
    ),
    author=Field(
        "token",
        "source",
        "of what follows an episode's first reply: 1 the policy, 2 a tool, 3 others, 4 the policy in a summary of its "
        "history; each in one row; else 0",
        dtype="int",
        example=_authors,
    ),
    state=Field(
        "token",
        "source",
        "digest of the state in which a reply was sampled, below 2^31",
        dtype="int",
        example=_two_turns,
    ),
    rollout_logp=Field("token", "source", "nats, by the engine that sampled", example=_negative),
    version=Field(
        "token",
        "source",
        "of the weights that sampled it; there with --new_tokens_per_step",
        dtype="int",
        example=_mask_as_int,
    ),
    digests=Field(
        "ragged",
        "source",
        "first token, version and digest of the weights that sampled it and those after it, for each run of tokens "
        "(--foreign_rows)",
        dtype="int",
    ),
    stale=Field(
        "token",
        "source",
        "sampled by other weights than the scoring ones; there with --new_tokens_per_step",
        dtype="bool",
        example=_odd_rows,
    ),
    routes=Field(
        "token_k",
        "source",
        "experts that it went to in the engine, layer by layer; -1: any; --router_replay",
        dtype="int",
        example=_last_place,
    ),
    prompt_value=Field(
        "row", "source", "expected score of the prompt, by its earlier samples", example=_these(0.2, 0.2, 0.7, 0.7)
    ),
    greedy_score=Field(
        "row", "source", "outcome reward of a greedy completion of the prompt", example=_these(0.0, 0.0, 1.0, 1.0)
    ),
    label=Field(
        "token",
        "source",
        "outcome, 0 to 1, on all tokens of what has one; label_outcomes makes it of scores",
        example=_mask_as_numbers,
    ),
    mismatched=Field(
        "row",
        "source",
        "the completion is behind another prompt than its own, for KTO",
        dtype="bool",
        example=_these(False, True, False, True),
    ),
    demonstration=Field(
        "token",
        "source",
        "true on a text that the prompt's record brings, beside the policy's own",
        dtype="bool",
        example=_odd_rows,
    ),
    margin=Field("token", "source", "by how much the chosen sequence of a pair should win"),
    old_logp=Field("token", "policy", "nats, of the sampled tokens", example=_negative),
    old_entropy=Field("token", "policy", "nats, at the sampled tokens"),
    sum_pi_squared=Field("token", "policy", "sum over the vocabulary of squared probabilities"),
    ref_logp=Field("token", "reference", "nats", example=_negative),
    teacher_logp=Field("token", "teacher", "nats", example=_negative),
    teacher_topk=Field(
        "token_k", "teacher", "the teacher's K most probable tokens at t", dtype="int", example=_last_place
    ),
    teacher_topk_logp=Field("token_k", "teacher", "nats, the teacher's, of these tokens", example=_negative),
    teacher_span=Field(
        "token",
        "source",
        "place in the row of the last token of its span, as a teacher with another tokenizer reads it; -1: in none",
        dtype="int",
        example=_last_place,
    ),
    implicit_logp=Field("token", "implicit_reward", "nats", example=_negative),
    value=Field("token", "critic", "estimate before token t, before the first update"),
    advantage=Field("token", "advantage", "in units of reward; to_tokens() brings outcomes to tokens"),
    returns=Field("token", "advantage", "the critic's target, made by gae()"),
    weight=Field(
        "token", "advantage", "constant importance weights, made by importance_weights() and other corrections"
    ),
    selected=Field(
        "token",
        "advantage",
        "tokens picked out of the batch, made by select_highest_covariance()",
        dtype="bool",
        example=_even_places,
    ),
    imitated=Field(
        "token", "advantage", "tokens of successful completions, made by mark_positives()", dtype="bool", example=_mask
    ),
    observed=Field(
        "token",
        "advantage",
        "tokens that the policy read and learns to predict, made by learn_observations()",
        dtype="bool",
        example=_even_places,
    ),
    entropy_coefficient=Field("token", "advantage", "factor of an adaptive entropy bonus, made by adapt_entropy()"),
    prompt_tokens=Field(
        "token", "advantage", "tokens on the mask in all rows of the group, made by count_prompt_tokens()", dtype="int"
    ),
    kl_baseline=Field("token", "advantage", "nats, KTO's reference point, made by reference_point()"),
    offsets=Field("packing", "trainer", "[S + 1] where the sequences of a packed row begin", dtype="int"),
    trained=Field(
        "packing",
        "trainer",
        "[N] places of this rank's part of a packed row behind which the mask is true",
        dtype="int",
    ),
    sampled=Field("token", "trainer", "the mask before corrections, set after the chain", dtype="bool", example=_mask),
    entropy=Field("token", "step", "nats, differentiable"),
    topk_logp=Field(
        "token_k",
        "step",
        "nats, of the teacher's K tokens; differentiable",
        example=_negative,
        made_of=("teacher_topk",),
    ),
    divergence=Field("token", "step", "nats, from the teacher over the whole vocabulary; differentiable"),
)
TEACHER_PROMPT = "teacher_prompt"
TEACHER_TOKENS = "teacher_tokens"
NOT_IN_PASSES = ("digests", TEACHER_PROMPT, TEACHER_TOKENS, "teacher_span")  # which neither models nor losses read
CONTEXT_FIELDS = Schema(  # of rows that a teacher reads in another form
    {
        TEACHER_PROMPT: Field(
            "ragged", "source", "token ids of the teacher's prompt; none: the row's own", dtype="int"
        ),
        TEACHER_TOKENS: Field(
            "ragged",
            "source",
            "[n, 2] ids of the row's tokens of the teacher's tokenizer, and places of their spans' last tokens; none: "
            "the row's own",
            dtype="int",
        ),
    }
)
DATA_SOURCE = "data_source"
SOURCE_FIELDS = Schema(  # of rows that roles score by the source of their prompts
    {DATA_SOURCE: Field("row", "source", "number of the prompt's source; -1: of no role", dtype="int")}
)
KEPT_FIELDS = Schema(  # of rows with --mask_replay
    kept=Field("ragged", "source", "ids that truncated sampling could take, one token after another", dtype="int"),
    kept_counts=Field("token", "source", "number of these ids at a token; 0: nothing was truncated", dtype="int"),
)
