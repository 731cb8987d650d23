"""Sizes of messages by the number of ranks that share them.

A collective over n ranks goes round in n pieces, so what is large enough for 8 ranks is crumbs for 512: time goes to
latency then, not to bytes. Between nodes a message is chosen so large that every rank's piece has `PIECE_BYTES`, as far
as `LARGEST_BYTES` go, which is what a rank may hold of it.
"""

from __future__ import annotations

from funrl.mesh.plan import RANKS_PER_NODE

PIECE_BYTES = 1 << 20
LARGEST_BYTES = 1 << 30


def message_bytes(ranks: int, least: int) -> int:
    """Bytes of a message over some ranks: `least`, or where they are of several nodes what their pieces need."""
    if ranks <= RANKS_PER_NODE:
        return least
    return max(least, min(ranks * PIECE_BYTES, LARGEST_BYTES))
