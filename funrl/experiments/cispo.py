"""CISPO: GRPO that clips a token's importance weight and never its gradient.

    python -m funrl.experiments.cispo --mesh=dp4,tp2
    python -m funrl.experiments.cispo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

A rare token that begins a correction has a large ratio; PPO's clip takes it out of the update, this one only bounds its
weight.

Left out on purpose: MiniMax's filter of repeated text.
"""

import sys

from funrl.algos.cispo import cispo
from funrl.algos.core import Algorithm
from funrl.experiments.run import main


def algorithm(
    clip_low: float | None = None,
    clip_high: float = 0.2,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Clipped importance sampling, MiniMax, 2025, https://arxiv.org/abs/2506.13585.

    Args:
      clip_low: how far the weight of a token may fall below 1; default: to 0
      clip_high: how far it may rise above 1
      kl_coef: loss per nat of KL to the reference; 0: no reference is kept
      entropy_coef: loss taken off per nat of entropy
    """
    return cispo(clip_low, clip_high, kl_coef, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("cispo", algorithm="funrl.experiments.cispo:algorithm"))
