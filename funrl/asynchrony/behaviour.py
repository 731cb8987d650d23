"""Algorithms that may learn from rows of older policies: those whose policy loss depends on who sampled the tokens.

`rollout_logp` are the log-probabilities of the policy that sampled a token, whatever its version: its behaviour policy.
A ratio to `old_logp` alone, which the trainer recomputes with its own weights before the update, treats rows as if the
newest policy had sampled them. On rows that are some versions old that is biased, and training may collapse.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from funrl.algos.applying import apply_advantage
from funrl.algos.core import Algorithm, Loss
from funrl.algos.reading import on_example
from funrl.batch import Batch, as_dict, example, with_rows_spread

BEHAVIOUR = "rollout_logp"
PROXIMAL = "old_logp"
# Gaps of log-probabilities in nats that are tried on the tokens of the example, one after the other. They are within
# and beyond the bounds of ratios in use: truncated importance weights see the small ones, masks the large ones. Their
# number shares no factor with the example's 8 tokens, so rows differ and their changes do not cancel.
TRIED_GAPS = (0.05, -0.05, 3.0, -3.0, 0.2, -0.1, 0.6)
TRIED_SCALES = (0, 1, 0.01)  # of all gaps: at 1 a bound on whole sequences may reject every row


class StaleLossError(ValueError):
    """An algorithm does not correct for the age of its rows, or for the rounding of the engine that sampled them."""


def check_behaviour(algorithm: Algorithm, staleness: float) -> None:
    """Check that a policy loss depends on behaviour log-probabilities where rows may be older than the policy.

    Args:
      staleness: versions that a group may be behind, as in `LedgerRule`.

    Raises:
      StaleLossError: staleness is above 0 and a role that generates has a loss that does not; the message names a
        correction to add.
    """
    if staleness:
        age = f"rows may be {staleness:g} versions old"
        check_correction(algorithm, f"--staleness={staleness:g}", age, sampler="the policy that sampled them")


def check_correction(algorithm: Algorithm, flag: str, why: str, sampler: str) -> None:
    """Check that a policy loss depends on behaviour log-probabilities where a flag makes these another policy's.

    Args:
      flag: with its value.
      why: what the flag does to the rows.
      sampler: whose log-probabilities they are.

    Raises:
      StaleLossError: a role that generates has a loss that does not; the message names a correction to add.
    """
    for part in algorithm.parts:  # none corrects for another
        check_correction(part, flag, why, sampler)
    for role, loss in algorithm.losses.items():
        kind = algorithm.role_kinds.get(role)
        if kind is not None and kind.generates and not reads_behaviour(algorithm, loss):
            raise StaleLossError(
                f"{flag}: {why}, and the loss of {role!r} does not depend on {BEHAVIOUR}, the log-probabilities of "
                f"{sampler}: {_remedy(algorithm, flag.partition('=')[0])}"
            )


def _remedy(algorithm: Algorithm, flag: str) -> str:
    if algorithm.advantage is None:
        return f"it has no advantage chain to put a correction into; leave {flag} out"
    return (
        "use --algorithm=dppo, which stays near the policy that sampled; or add a correction, such as "
        'corrected(algorithm, importance_weights("token", high=2.0)), in a --algorithm=FILE.py; or leave '
        f"{flag} out"
    )


def reads_behaviour(algorithm: Algorithm, loss: Loss) -> bool:
    """True if a loss has another value for other behaviour log-probabilities, on an example.

    The value may depend on them through the loss itself, or through a field that the algorithm's chain makes of them,
    such as importance weights or a mask.

    Raises:
      PieceError: a piece cannot be run on the example.
    """
    batch = example(schema=algorithm.schema)
    proximal_BT = as_dict(batch)[PROXIMAL]
    gap_BT = torch.tensor(TRIED_GAPS, dtype=proximal_BT.dtype).repeat(-(-proximal_BT.numel() // len(TRIED_GAPS)))
    gap_BT = gap_BT[: proximal_BT.numel()].view(proximal_BT.shape)
    same, *others = (
        _loss_parts(algorithm, loss, batch._replace(**{BEHAVIOUR: proximal_BT - gap_BT * scale}))
        for scale in TRIED_SCALES
    )
    return any(not torch.equal(a, b) for moved in others for a, b in zip(same, moved, strict=True))


def _loss_parts(algorithm: Algorithm, loss: Loss, batch: Batch) -> tuple[Tensor, ...]:
    """Numerators and denominators of a loss after the algorithm's chain, where the policy is still the proximal one."""
    rows = batch
    advantage = algorithm.advantage
    if advantage is not None:
        run = functools.partial(apply_advantage, advantage, advantage.init())
        rows = on_example("the advantage chain", lambda seen: run(seen)[0], batch)[0]
    rows = with_rows_spread(rows)
    logp_BT = as_dict(rows)[PROXIMAL]

    def parts(rows: Batch) -> tuple[Tensor, ...]:
        return (*loss.numerators(logp_BT, rows)[0], *loss.denominators(rows))

    return on_example("the policy's loss", parts, rows)[0]
