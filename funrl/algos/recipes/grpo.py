"""GRPO: no critic; a completion is compared with the others of its prompt.

References: Shao et al., 2024, https://arxiv.org/abs/2402.03300.
verl: token-mean by default (`per_sequence=False`), KL factor 0.001, k3 clamped to +-10, a singleton group keeps its raw
  reward. TRL: no KL by default, loss_type dapo (token mean), `std_eps` 1e-4, `kl_bias_corrected`; with several
  mini-batches dapo divides each by the mean number of tokens of all.
"""

from funrl.algos.advantages.baselines import group_center, group_scale
from funrl.algos.advantages.shaping import to_tokens
from funrl.algos.compose import with_regularizers
from funrl.algos.core import Algorithm, chain, reduce
from funrl.algos.losses.clipped import clipped_surrogate
from funrl.algos.losses.reductions import sequence_mean, token_mean


def grpo(
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = 3.0,
    kl_coef: float = 0.01,
    kl_kind: str = "k3",
    entropy_coef: float = 0.0,
    per_sequence: bool = True,
    kl_bias_corrected: bool = False,
    std_eps: float = 1e-6,
) -> Algorithm:
    """Group relative policy optimisation.

    Args:
      clip_low, clip_high: how far the ratio of a token may fall below and rise above 1.
      dual_clip: the largest ratio that counts where the advantage is negative; None: no bound.
      kl_coef: factor of the KL in the loss, in units of advantage per nat; 0: none, and no reference.
      kl_kind: estimator of that KL: k1, k2, k3, abs, or one of them with + for the gradient of k2.
      entropy_coef: factor of the entropy bonus, in units of advantage per nat.
      per_sequence: take the mean over each completion's tokens, then over completions; otherwise over all tokens.
      kl_bias_corrected: weigh the KL of each token by its importance ratio, as TRL does by default.
      std_eps: added to the deviation that a group's rewards are divided by; 1e-4 in TRL.
    """
    surrogate = clipped_surrogate(clip_low, clip_high, dual_clip)
    term = with_regularizers(surrogate, kl_coef, entropy_coef, kl_kind=kl_kind, kl_bias_corrected=kl_bias_corrected)
    return Algorithm(
        advantage=chain(group_center(), group_scale(std_eps), to_tokens()),
        losses={"policy": reduce(term, sequence_mean() if per_sequence else token_mean())},
    )
