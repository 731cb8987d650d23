"""CFPO: GRPO with a quadratic penalty instead of the clip, so that each token keeps a gradient.

References: Cagatan et al., 2026, https://arxiv.org/abs/2601.22801. Its abstract was read, and the descriptions of the
  authors' pull requests; their code was not. The penalty is that of SPO, Xie et al., 2024,
  https://arxiv.org/abs/2401.16025, which comes from the total variation too.
verl: in no release; pull request 5252 is open. TRL: in no release; pull request 5027 was closed.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.reductions import token_mean
from funrl.algos.losses.token_terms import quadratic_surrogate


def cfpo(clip: float = 0.2, kl_coef: float = 0.0, entropy_coef: float = 0.0) -> Algorithm:
    """Clipping-free policy optimisation.

    Args:
      clip: distance of the best ratio from 1, where GRPO would clip.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
    """
    term = quadratic_surrogate(clip)
    return Algorithm(
        advantage=chain(group_center(), group_scale(), to_tokens()),
        losses={"policy": reduce(with_regularizers(term, kl_coef, entropy_coef), token_mean())},
    )
