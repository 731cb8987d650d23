"""One small batch that is awkward on purpose, and variants of it that must not matter to a piece."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from funrl import trees
from funrl.algos.masks import PLACES
from funrl.batch import TOKEN_INT, Batch, as_dict, declare, kind_of, schema_of, with_rows_spread
from funrl.fields import Field

# prompt, completion with a tool's output in it (.), padding; row 4 has no sampled token
MASKS = (
    "..xxxx.......",
    "...xx..xxx...",
    ".xxxxxxxxxxx.",
    "..x..........",
    "....,........",
    "..xxx.x......",
    "...xxxxx.....",
)
GROUP_NUMBERS = (7, -2, 7, 40, 7, -2, 3)  # 40 and 3 are alone, any order, any numbers
SEQUENCE_LENGTHS = (7, 11, 12, 3, 6, 8, 8)
PACKED_ROWS = ([0, 3, 4], [2], [1], [5, 6])  # several sequences to a row
PACKED_WIDTH = 20


def awkward_batch(dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    """Seven rows of thirteen tokens with every field of a batch filled with plausible random numbers."""
    draw = torch.Generator().manual_seed(seed)
    mask = torch.tensor([[c == "x" for c in row] for row in MASKS])
    B, T = mask.shape

    def normal(*shape: int, scale: float = 1.0, shift: float = 0.0) -> Tensor:
        return (torch.randn(*shape, generator=draw, dtype=torch.float64) * scale + shift).to(dtype)

    def logp(*shape: int) -> Tensor:
        return -normal(*shape).abs() - 0.05

    old = logp(B, T)
    near = {
        name: old + normal(B, T, scale=0.3) for name in ("rollout_logp", "ref_logp", "teacher_logp", "implicit_logp")
    }
    return Batch(
        tokens=torch.randint(0, 50, (B, T), generator=draw),
        mask=mask,
        turn=_turns_of(mask),
        length=torch.tensor(SEQUENCE_LENGTHS),
        group=torch.tensor(GROUP_NUMBERS),
        score=normal(B, shift=0.3),
        scores=normal(B, 3),
        token_reward=normal(B, T, scale=0.1),
        truncated=torch.tensor([False, True, True, False, False, False, True]),
        failed=torch.tensor([False, False, True, True, False, False, False]),
        old_logp=old,
        value=normal(B, T),
        sum_pi_squared=old.exp().square() + 0.2 * normal(B, T).sigmoid(),
        greedy_score=normal(B),
        advantage=normal(B, T),
        returns=normal(B, T),
        weight=normal(B, T).abs() + 0.1,
        entropy=normal(B, T).abs(),
        old_entropy=normal(B, T).abs(),
        entropy_coefficient=torch.full((B, T), 0.02, dtype=dtype),
        selected=torch.rand(B, T, generator=draw) < 0.5,
        label=(torch.rand(B, T, generator=draw) < 0.5).to(dtype),
        margin=normal(B, T).abs(),
        kl_baseline=torch.full((B, T), 0.1, dtype=dtype),
        mismatched=torch.tensor([False, False, True, False, False, True, False]),
        imitated=mask & (torch.arange(B) % 2 == 0)[:, None],
        prompt_tokens=_group_tokens(mask),
        divergence=normal(B, T).abs(),
        demonstration=mask & (torch.arange(B) == 6)[:, None],  # which is alone in its group, as demonstrations are
        prompt_value=normal(B),
        **near,
    )


def _group_tokens(mask: Tensor) -> Tensor:
    """[B, T] sampled tokens in all rows of each token's group."""
    group = torch.tensor(GROUP_NUMBERS)
    counts = torch.where(group[:, None] == group, mask.sum(1), 0).sum(1)
    return (counts[:, None] * mask).to(TOKEN_INT)


def _turns_of(mask: Tensor) -> Tensor:
    """[B, T] int64, turn of each token: each run of sampled tokens is one."""
    begins = mask & ~torch.nn.functional.pad(mask, (1, 0))[:, :-1]
    return (begins.cumsum(1) - 1).clamp_min(0)


def with_own_fields(batch: Batch, fields: Mapping[str, Field], seed: int = 3) -> Batch:
    """The batch with example values of fields that an algorithm or a piece declares."""
    draw = torch.Generator().manual_seed(seed)
    batch = declare(batch, fields)
    values = {name: field.example_value(draw, batch.mask) for name, field in fields.items()}
    return batch._replace(**trees.cast(values, batch.score.dtype))


def nearby_logp(batch: Batch, seed: int = 1) -> Tensor:
    """Log-probabilities of a policy that has moved away from the old one, some of them beyond every clip."""
    draw = torch.Generator().manual_seed(seed)
    moved = torch.randn(batch.mask.shape, generator=draw, dtype=torch.float64) * 0.4
    return (batch.old_logp.double() + moved).to(batch.old_logp.dtype)


def token_rewards_like(batch: Batch, seed: int = 2) -> Tensor:
    """Token rewards [B, T]."""
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(batch.mask.shape, generator=draw, dtype=torch.float64).to(batch.score.dtype)


def poisoned(batch: Batch) -> Batch:
    """NaN in every per-token field outside the mask."""
    fields = {}
    for name, x in _per_token(batch).items():
        mask = batch.mask if x.dim() == 2 else batch.mask[..., None]
        fields[name] = torch.where(mask, x, torch.nan) if x.is_floating_point() else x
    return batch._replace(**fields)


def with_padding(batch: Batch, columns: int) -> Batch:
    """More padding on the right."""
    fields = {"mask": batch.mask, "tokens": batch.tokens, **_per_token(batch)}
    fields |= {k: x for k in ("segments", "positions") if (x := batch.get(k)) is not None}
    pads = {k: (0, columns) if x.dim() == 2 else (0, 0, 0, columns) for k, x in fields.items()}
    return batch._replace(**{k: torch.nn.functional.pad(x, pads[k]) for k, x in fields.items()})


def packed_batch(batch: Batch, logp: Tensor) -> tuple[Batch, Tensor]:
    """The same sequences, several to a row, as an update has them; fields per row are on all tokens of their row."""

    def end_to_end(x: Tensor) -> Tensor:
        out = x.new_zeros(len(PACKED_ROWS), PACKED_WIDTH, *x.shape[2:])
        for row, members in enumerate(PACKED_ROWS):
            begin = 0
            for i in members:
                length = SEQUENCE_LENGTHS[i]
                out[row, begin : begin + length] = x[i, :length]
                begin += length
        return out

    numbers = torch.zeros_like(batch.tokens)
    for members in PACKED_ROWS:
        for number, i in enumerate(members):
            numbers[i] = number + 1
    spread = as_dict(with_rows_spread(batch))
    fields = _per_token(batch) | {name: x for name, x in spread.items() if kind_of(batch, name).everywhere}
    laid = {name: end_to_end(x) for name, x in fields.items()}
    laid |= {"tokens": end_to_end(batch.tokens), "mask": end_to_end(batch.mask), "segments": end_to_end(numbers)}
    packed = Batch(schema_of(batch), **laid)
    return packed, end_to_end(logp)


def _per_token(batch: Batch) -> dict[str, Tensor]:
    fields = as_dict(batch)
    return {name: x for name, x in fields.items() if kind_of(batch, name).per_token and name not in PLACES}
