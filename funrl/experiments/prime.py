"""PRIME: rewards for every token from a process model that is trained along, on outcomes alone.

    python -m funrl.experiments.prime --mesh=dp4,tp2
    python -m funrl.experiments.prime --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The process model begins as a copy of the policy. beta times its log-ratio to the reference is a token's reward, and the
sum over a completion is taught to tell right answers from wrong ones while the policy learns. Prompts that are too easy
or too hard are replaced, as in `dapo.py`.

Left out on purpose: updating the process model before its rewards are used in the same step.
"""

import sys

from funrl.algos.core import Algorithm
from funrl.algos.prime import prime
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    beta: float = 0.05,
    process_coef: float = 1.0,
    easiest: float = 0.8,
    hardest: float = 0.2,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Process reinforcement through implicit rewards, Cui et al., 2025, https://arxiv.org/abs/2502.01456.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1
      beta: reward per nat between the process model and the reference
      process_coef: weight of the process rewards; the outcome's is 1
      easiest, hardest: prompts are kept whose mean reward, 0 to 1, lies between
      entropy_coef: loss taken off per nat of entropy
    """
    return prime(beta, process_coef, clip_low, clip_high, easiest, hardest, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("prime", algorithm="funrl.experiments.prime:algorithm"))
