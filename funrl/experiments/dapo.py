"""DAPO: GRPO that clips higher than it clips low, and trains on no prompt that all or none of its samples solve.

    python -m funrl.experiments.dapo --mesh=dp4,tp2
    python -m funrl.experiments.dapo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

Prompts whose rewards are all equal teach a group baseline nothing; more are sampled until the batch is full, at most
`--max_refills` times, and the metrics `filter_groups/...` say what was thrown away. A completion that comes close to
the limit of its length loses up to `--overlong_factor`.

Left out on purpose: sampling more prompts than a batch and keeping the rest for the next step.
"""

import sys

from funrl.algos.core import Algorithm
from funrl.algos.dapo import dapo
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    overlong_factor: float = 1.0,
    overlong_buffer: int | None = None,
    entropy_coef: float = 0.0,
    max_new_tokens: int = 64,
) -> Algorithm:
    """Decoupled clip and dynamic sampling, Yu et al., 2025, https://arxiv.org/abs/2503.14476.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1
      overlong_factor: reward taken off where a completion reaches --max_new_tokens; 0: nothing
      overlong_buffer: tokens before the limit over which that grows; default: a fifth of the limit
      entropy_coef: loss taken off per nat of entropy
    """
    limit = max_new_tokens if overlong_factor else None
    return dapo(clip_low, clip_high, None, limit, overlong_buffer, overlong_factor, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("dapo", algorithm="funrl.experiments.dapo:algorithm"))
