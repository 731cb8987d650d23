"""Random configurations of families against transformers; `-k "draw and 17"` runs one alone.

Draws 0 to 799 were run once: 10 exceed the tolerance, transformers' logits in 9 of them and these in 3, by roundings of
1.5e-4 in draw 81 (weights off by 6e-8 of themselves alone move its logits by 4e-5), else of at most 4.3e-5. Of draws
20261126 to 20261305, two exceed it, one of these and one of transformers, by roundings of at most 2.3e-5.
"""

import pytest
import torch
from drawn_families import drawn
from hf_peers import assert_logits_and_files, greedy, greedy_of, peer_of, tokens_of
from selection import quick

DRAWS, QUICK = 6, 1


@pytest.mark.slow
@pytest.mark.parametrize("number", quick(range(DRAWS), range(QUICK)))
def test_a_draw(number, tmp_path):
    peer = peer_of(drawn(number), tmp_path / "theirs")
    model, params = assert_logits_and_files(peer, tmp_path)
    begins_BS = tokens_of(model.config)[:2, :9]
    assert torch.equal(greedy(model, params, begins_BS, 8), greedy_of(peer, begins_BS, 8))
