"""RLOO: REINFORCE; the baseline of a completion is the mean reward of the others of its prompt.

    python -m funrl.experiments.rloo --mesh=dp4,tp2
    python -m funrl.experiments.rloo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

No critic and no scaling by the group's deviation: the gradient is that of the expected reward, without bias.

Left out on purpose: one ratio for the whole sequence, as TRL takes it; with one update a batch all ratios are 1.
"""

import sys

from funrl.algos.core import Algorithm
from funrl.algos.rloo import rloo
from funrl.algos.shaping import fixed_kl
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.01, entropy_coef: float = 0.0
) -> Algorithm:
    """REINFORCE leave-one-out, Ahmadian et al., 2024, https://arxiv.org/abs/2402.14740.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1
      kl_coef: reward taken off per nat of a completion's KL to the reference; 0: no reference is kept
      entropy_coef: loss taken off per nat of entropy
    """
    return rloo(clip_low, clip_high, fixed_kl(kl_coef) if kl_coef else None, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("rloo", algorithm="funrl.experiments.rloo:algorithm"))
