"""GSPO: GRPO whose ratio is that of the whole completion, normalised by its length.

    python -m funrl.experiments.gspo --mesh=dp4,tp2
    python -m funrl.experiments.gspo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The clip then takes whole completions in or out, and its bounds are some hundred times tighter than those of a token.

Left out on purpose: replaying the experts' routes of a mixture, which this ratio makes needless.
"""

import sys

from funrl.algos.core import Algorithm
from funrl.algos.gspo import gspo
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    per_token: bool = False,
    kl_coef: float = 0.0,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Group sequence policy optimisation, Zheng et al., 2025, https://arxiv.org/abs/2507.18071.

    Args:
      clip_low, clip_high: how far the ratio of a completion may fall below and rise above 1
      per_token: GSPO-token, for advantages that differ by token
      kl_coef: loss per nat of KL to the reference; 0: no reference is kept
      entropy_coef: loss taken off per nat of entropy
    """
    return gspo(clip_low, clip_high, per_token, kl_coef, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("gspo", algorithm="funrl.experiments.gspo:algorithm"))
