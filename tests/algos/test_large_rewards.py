"""Advantages of rewards whose squares float32 does not hold."""

import pytest
import torch
from tables import ROWS

ADVANTAGES = [row for row in ROWS if row.kind == "advantage" and row.name.split(".")[-1] != "label_outcomes"]
LARGE = 2.0**100  # float32 holds it, but not its square


@pytest.mark.parametrize("row", ADVANTAGES, ids=[row.name for row in ADVANTAGES])
def test_advantage_of_rewards_whose_squares_float32_does_not_hold(row):
    """No advantage may become 0 because a square overflows, as one does in a division by it."""
    subject, results = row.subject, []
    for dtype in (torch.float64, torch.float32):
        batch = subject.batch(dtype)
        rewards = {name: batch.get(name) for name in ("score", "scores", "greedy_score", "token_reward", "value")}
        batch = batch._replace(**{name: x * LARGE for name, x in rewards.items() if x is not None})
        signal = subject.signal(batch)
        if subject.tokens:
            signal = signal._replace(x=signal.x * LARGE)
        results.append(subject.piece.update(signal, subject.piece.init(), batch)[0].x.double())
    exact, single = results
    finite = exact.abs() < torch.finfo(torch.float32).max
    unit = torch.where(exact.abs() > 2.0**40, LARGE, 1.0)  # of rewards and roundings, or of what is scaled
    torch.testing.assert_close((single / unit)[finite], (exact / unit)[finite], rtol=2e-4, atol=2e-4)
