"""The share of groups whose completions all have one reward."""

import pytest
import torch

from funrl.trainer.steps.advantage_phase import equal_groups


@pytest.mark.parametrize(
    ("group", "score", "share"),
    [
        ([0, 0, 1, 1], [1.0, 1.0, 0.0, 1.0], 0.5),
        ([7, 3, 7, 3, 3], [1.0, 0.0, 1.0, 0.0, 0.0], 1.0),  # in any order, of any size
        ([0, 0, 1], [0.0, 1.0, 1.0], 0.0),  # a row alone is no group
        ([0, 1, 2], [1.0, 1.0, 1.0], None),
        ([], [], None),
    ],
)
def test_share(group, score, share):
    scores = torch.tensor(score, dtype=torch.float64)
    result = equal_groups(scores, torch.tensor(group, dtype=torch.int64))
    assert {k: float(v) for k, v in result.items()} == ({} if share is None else {"reward/equal_groups": share})
    assert equal_groups(scores, None) == {}
