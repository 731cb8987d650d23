"""VAPO: PPO for long reasoning; the critic learns first, and lambda grows with the completion.

    python -m funrl.experiments.vapo --mesh=dp4,tp2
    python -m funrl.experiments.vapo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

In the first `--critic_warmup_steps` the policy is held still while the critic learns from whole returns. Then the
policy takes lambda = 1 - 1 / (alpha length), and the likelihood of right completions is raised beside the clipped
surrogate. For completions of hundreds of tokens, which it was made for, the paper's alpha is `--alpha=0.05`.

Left out on purpose: sampling fewer prompts more often, which is `--batch_prompts` and `--samples_per_prompt`.
"""

import sys

from funrl.algos.core import Algorithm
from funrl.algos.vapo import vapo
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    alpha: float = 1.0,  # the task's sums have 4 tokens: with the paper's 0.05 lambda is 0, and it hardly learns
    imitation_coef: float = 0.1,
    value_clip: float = 0.5,
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Value-based augmented PPO, Yue et al., 2025, https://arxiv.org/abs/2504.05118.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1
      alpha: the policy's lambda is 1 - 1 / (alpha length), at least 0: it is 0 for completions of up to 1 / alpha
        tokens; 0.05 in the paper
      imitation_coef: loss per nat of the negative log-likelihood of right completions
      value_clip: how far a value may move in one step, in units of reward
      entropy_coef: loss taken off per nat of entropy
    """
    return vapo(clip_low, clip_high, alpha, imitation_coef, value_clip, entropy_coef)


if __name__ == "__main__":
    sys.exit(main("vapo", algorithm="funrl.experiments.vapo:algorithm", critic_warmup_steps=5))
