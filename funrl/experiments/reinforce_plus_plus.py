"""REINFORCE++: PPO without a critic; rewards to go are whitened over the whole batch.

    python -m funrl.experiments.reinforce_plus_plus --mesh=dp4,tp2
    python -m funrl.experiments.reinforce_plus_plus --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The baseline is the batch's mean, not that of a prompt, so one sample a prompt would do. With `--group_baseline` the
group's mean is taken off first, and the KL stands in the loss.

Left out on purpose: OpenRLHF's asynchronous sampling.
"""

import sys

from funrl.algos.core import Algorithm
from funrl.algos.reinforce_plus_plus import reinforce_plus_plus, reinforce_plus_plus_baseline
from funrl.algos.shaping import fixed_kl
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 1.0,
    kl_coef: float = 0.01,
    entropy_coef: float = 0.0,
    group_baseline: bool = False,
) -> Algorithm:
    """REINFORCE++, Hu et al., 2025, https://arxiv.org/abs/2501.03262.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1
      gamma: discount per token, without --group_baseline
      kl_coef: reward taken off (with --group_baseline: loss) per nat of KL to the reference; 0: no reference is kept
      entropy_coef: loss taken off per nat of entropy
      group_baseline: compare a completion with the others of its prompt first
    """
    if group_baseline:
        return reinforce_plus_plus_baseline(clip_low, clip_high, kl_coef, entropy_coef)
    return reinforce_plus_plus(clip_low, clip_high, gamma, fixed_kl(kl_coef) if kl_coef else None, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("reinforce_plus_plus", algorithm="funrl.experiments.reinforce_plus_plus:algorithm"))
