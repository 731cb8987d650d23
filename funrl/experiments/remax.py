"""ReMax: REINFORCE; the baseline of a completion is the reward of the greedy one of its prompt.

    python -m funrl.experiments.remax --mesh=dp4,tp2
    python -m funrl.experiments.remax --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

Every prompt is completed once more, greedily, so that one sample a prompt is enough. What is learnt is to beat what the
policy would say anyway.

Left out on purpose: the paper's reward models; the task's reward is verified.
"""

import sys

from funrl.algos.core import Algorithm
from funrl.algos.remax import remax
from funrl.algos.shaping import fixed_kl
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2, clip_high: float = 0.2, kl_coef: float = 0.01, entropy_coef: float = 0.0
) -> Algorithm:
    """REINFORCE with an argmax baseline, Li et al., 2024, https://arxiv.org/abs/2310.10505.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1
      kl_coef: reward taken off per nat of KL to the reference; 0: no reference is kept
      entropy_coef: loss taken off per nat of entropy
    """
    return remax(clip_low, clip_high, fixed_kl(kl_coef) if kl_coef else None, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("remax", algorithm="funrl.experiments.remax:algorithm", batch_prompts=1024, samples_per_prompt=1))
