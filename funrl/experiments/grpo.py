"""GRPO: no critic; a completion is judged against the others of its prompt.

    python -m funrl.experiments.grpo --mesh=dp4,tp2
    python -m funrl.experiments.grpo --model=DIR --prompts=FILE.jsonl --reward=FILE.py:function

The same job as `ppo.py`: compare the two functions to see what the algorithms differ in.
"""

import sys

from funrl.algos.advantages import group_center, group_scale
from funrl.algos.core import Algorithm, add, chain, reduce, scale, weighted
from funrl.algos.kl import kl_to_reference
from funrl.algos.reductions import sequence_mean
from funrl.algos.shaping import to_tokens
from funrl.algos.terms import clipped_surrogate, entropy_bonus
from funrl.experiments.run import main


def algorithm(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 3.0,
    kl_coef: float = 0.01,
    kl_kind: str = "k3",
    entropy_coef: float = 0.0,
) -> Algorithm:
    """Group relative policy optimisation, Shao et al., 2024, https://arxiv.org/abs/2402.03300.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1
      dual_clip: the largest ratio that counts where the advantage is negative
      kl_coef: loss per nat of KL to the reference; 0: no reference is kept
      kl_kind: estimator of that KL: k1, k2, k3, abs, or one of them with + for the gradient of k2
      entropy_coef: loss taken off per nat of entropy
    """
    terms = [weighted(clipped_surrogate(clip_low, clip_high, dual_clip))]
    if kl_coef:
        terms.append(scale(kl_coef, kl_to_reference(kl_kind)))
    if entropy_coef:
        terms.append(entropy_bonus(entropy_coef))
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        policy_loss=reduce(add(*terms), sequence_mean()),
    )


if __name__ == "__main__":
    sys.exit(main("grpo", algorithm="funrl.experiments.grpo:algorithm"))
