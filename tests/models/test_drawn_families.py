"""Random configurations of families against transformers; `-k "draw and 17"` runs one alone.

Of draws 0 to 199, run once, one exceeded the tolerance: 173, by 2.2e-5 with logits up to 7.7 (transformers: 1.9e-5).
"""

import pytest
import torch
from drawn_families import drawn
from hf_peers import assert_logits_and_files, greedy, greedy_of, peer_of, tokens_of
from selection import quick

DRAWS, QUICK = 24, 3


@pytest.mark.parametrize("number", quick(range(DRAWS), range(QUICK)))
def test_a_draw(number, tmp_path):
    peer = peer_of(drawn(number), tmp_path / "theirs")
    model, params = assert_logits_and_files(peer, tmp_path)
    begins_BS = tokens_of(model.config)[:2, :9]
    assert torch.equal(greedy(model, params, begins_BS, 8), greedy_of(peer, begins_BS, 8))
